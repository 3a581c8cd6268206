"""Saves whose process dies or waits at a system call, and what readers find then; for the tests beside it."""

import json
import os
import shutil
import threading

import torch
from torch import nn

import torchtether as tt
from torchtether.files.opening import SETTINGS

CONFIG = {"architectures": ["Net"], "hidden_size": 64}
CONFIG_TEXT = json.dumps(CONFIG, indent=2, sort_keys=True) + "\n"
CALLS = ("open", "replace", "unlink", "fsync", "close", "write", "chmod", "rmdir", "mkdir")
MANY = {"max_shard_size": 5000}
MORE = {"max_shard_size": 20_000}


def net(value, scheme=None):
    model = nn.ModuleDict({f"l{i}": nn.Linear(64, 64) for i in range(4)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-value, value, parameter.numel()).view_as(parameter))
    return model if scheme is None else tt.quantize(model, scheme)


def options(value, scheme=None, **more):
    return net(value, scheme), more


KINDS = {
    "plain": lambda value: options(value),
    "plain with settings": lambda value: options(value),
    "plain shards": lambda value: options(value, **MORE),
    "more plain shards": lambda value: options(value, **MANY),
    "compressed-tensors": lambda value: options(value, "int8", format="compressed-tensors"),
    "compressed-tensors shards": lambda value: options(value, "int8", format="compressed-tensors", **MANY),
    "bitsandbytes shards": lambda value: options(value, "nf4", format="bitsandbytes", **MANY),
}


def prepared(folder, kind):
    """Make a folder with a config, a tokenizer and a checkpoint, which is copied where it has been saved before."""
    shutil.rmtree(folder, ignore_errors=True)
    template = folder.parent / f"template of {kind}"
    if not template.exists():
        _prepare(template, kind)
    shutil.copytree(template, folder)


def _prepare(folder, kind):
    folder.mkdir()
    (folder / "config.json").write_text(CONFIG_TEXT)
    (folder / "tokenizer.json").write_text("{}")
    if kind is not None:
        model, more = KINDS[kind](1)
        tt.save(model, folder, **more)
    if kind == "plain with settings":
        (folder / SETTINGS[0]).write_text("{}")


def trained(value):
    """A model and an optimizer whose state is about ``value``, too."""
    model = net(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(value))
    optimizer.step()
    return model, optimizer


def values(path):
    """What readers get of a checkpoint; an error is the words of it."""
    try:
        with tt.open(path) as checkpoint:
            assert not checkpoint.faults
            return {name: held_bits(checkpoint[name]) for name in checkpoint}
    except tt.CheckpointError as error:
        assert "\n" not in str(error)
        return str(error)


def held_bits(tensor):
    tensor = tensor.dequantize() if isinstance(tensor, tt.Weight) else tensor
    return tensor.detach().contiguous().numpy().tobytes()


def file_names(folder):
    return {path.name for path in folder.iterdir()}


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def is_marked(folder):
    return bool(list(folder.glob("**/*.torn")))


def dies_at(count, act, calls=CALLS):
    """Whether ``act``, in a process of its own, was ended before number ``count`` of its system calls ``calls``."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = [count]

    def dying(stock):
        def call(*arguments, **more):
            if left[0] == 0:
                os._exit(9)
            left[0] -= 1
            return stock(*arguments, **more)

        return call

    try:
        for name in calls:
            setattr(os, name, dying(getattr(os, name)))
        act()
    except BaseException:
        os._exit(1)
    os._exit(0)


def dies_at_rename(count, act):
    """The same before a rename; the first is that of the mark, if there is one."""
    return dies_at(count, act, ("replace",))


def torn(folder, at=2):
    """Make a folder whose save over shards died before its rename number ``at``, the first being the mark's."""
    prepared(folder, "plain shards")
    assert dies_at_rename(at, lambda: tt.save(net(2), folder, **MORE))
    assert is_marked(folder)


class Paused:
    """A save in a thread that stops before its rename number ``at``, until ``go`` is called."""

    def __init__(self, monkeypatch, folder, value, at, **more):
        self.reached, self._resume, self._left, self.error = threading.Event(), threading.Event(), at, None
        self._stock = os.replace
        monkeypatch.setattr(os, "replace", self._replace)
        self._thread = threading.Thread(target=self._save, args=(net(value), folder, more))
        self._thread.start()
        assert self.reached.wait(30)

    def _replace(self, *arguments):
        if threading.current_thread() is self._thread:
            if self._left == 0:
                self.reached.set()
                self._resume.wait(30)
            self._left -= 1
        return self._stock(*arguments)

    def _save(self, model, folder, more):
        try:
            tt.save(model, folder, **more)
        except tt.CheckpointError as error:
            self.error = error
        self.reached.set()

    def go(self):
        self._resume.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
