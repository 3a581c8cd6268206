"""A save killed between any two system calls leaves the old checkpoint, the new one, or one reported as torn."""

import gc
import json
import os
import shutil
import sys
import threading

import pytest
import torch
from torch import nn

import torchtether as tt
from tests import interrupts
from tests.interrupts import count_steps, interrupted
from torchtether.cli.main import main
from torchtether.files import folder as folder_module
from torchtether.files import locks, store
from torchtether.files.opening import SETTINGS

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")

CONFIG = {"architectures": ["Net"], "hidden_size": 64}
CONFIG_TEXT = json.dumps(CONFIG, indent=2, sort_keys=True) + "\n"
CALLS = ("open", "replace", "unlink", "fsync", "close", "write", "chmod", "rmdir", "mkdir")
_MANY = {"max_shard_size": 5000}
_MORE = {"max_shard_size": 20_000}


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Deaths of processes lose nothing that is written; an ``fsync`` is still a moment to die at."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


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
    "plain shards": lambda value: options(value, **_MORE),
    "more plain shards": lambda value: options(value, **_MANY),
    "compressed-tensors": lambda value: options(value, "int8", format="compressed-tensors"),
    "compressed-tensors shards": lambda value: options(value, "int8", format="compressed-tensors", **_MANY),
    "bitsandbytes shards": lambda value: options(value, "nf4", format="bitsandbytes", **_MANY),
}
CHANGES = [
    ("plain", "plain shards"),
    ("plain shards", "plain shards"),
    ("plain", "compressed-tensors"),
    ("plain with settings", "plain"),
    (None, "plain shards"),
    *(
        pytest.param(old, new, marks=pytest.mark.slow)
        for old, new in (
            ("plain", "plain"),
            ("plain shards", "plain"),
            ("plain shards", "more plain shards"),
            ("compressed-tensors", "plain"),
            ("compressed-tensors shards", "plain"),
            ("plain shards", "compressed-tensors shards"),
            ("compressed-tensors shards", "bitsandbytes shards"),
            ("bitsandbytes shards", "compressed-tensors"),
            (None, "compressed-tensors"),
        )
    ),
]


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


def dies_at(count, act):
    """Whether ``act``, in a process of its own, was ended before its system call number ``count``."""
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
        for name in CALLS:
            setattr(os, name, dying(getattr(os, name)))
        act()
    except BaseException:
        os._exit(1)
    os._exit(0)


def file_names(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), CHANGES, ids=str)
def test_a_save_that_dies_leaves_the_old_the_new_or_says_that_it_is_torn(tmp_path, old, new):
    """Before each call that opens, renames, removes or syncs; ``config.json`` is whole, and the next save repairs."""
    folder, whole = tmp_path / "there", tmp_path / "whole"
    prepared(whole, old)
    before = values(whole)
    config = (whole / "config.json").read_text()
    model, more = KINDS[new](2)
    tt.save(model, whole, **more)
    after, wanted = values(whole), file_names(whole)
    said = (whole / "config.json").read_text()
    seen, count = set(), 0
    while True:
        prepared(folder, old)
        is_dead = dies_at(count, lambda: tt.save(model, folder, **more))
        found = values(folder)
        if old is None and isinstance(found, str) and "torn" not in found:
            assert "holds no safetensors file" in found
            found = before
        torn = isinstance(found, str) and "a save to this checkpoint has not ended" in found
        assert torn or found in (before, after), found
        seen.add("torn" if torn else "old" if found == before else "new")
        assert (folder / "config.json").read_text() in (config, said)
        left = json.loads((folder / "config.json").read_text())
        assert {key: left.get(key) for key in CONFIG} == CONFIG
        assert (folder / "tokenizer.json").read_text() == "{}"
        if torn:
            assert main(["verify", str(folder)]) == 1
        elif found == after:
            assert (folder / "config.json").read_text() == said
            assert not (folder / SETTINGS[0]).exists()
        if not is_dead:
            break
        tt.save(model, folder, **more)
        assert (values(folder), file_names(folder)) == (after, wanted)
        assert (folder / "config.json").read_text() == said
        count += 1
    assert found == after
    assert file_names(folder) == wanted
    assert {"old", "new"} <= seen


@pytest.mark.parametrize("then", ["plain", "plain shards", "compressed-tensors", "bitsandbytes shards"])
def test_any_save_repairs_what_another_kind_has_torn(tmp_path, then):
    model, more = KINDS["compressed-tensors shards"](2)
    count, repaired = 10, 0
    other, options = KINDS[then](3)
    prepared(tmp_path / "wanted", None)
    tt.save(other, tmp_path / "wanted", **options)
    while True:
        prepared(tmp_path / "there", "plain")
        if not dies_at(count, lambda: tt.save(model, tmp_path / "there", **more)):
            break
        repaired += isinstance(values(tmp_path / "there"), str)
        tt.save(other, tmp_path / "there", **options)
        for name in file_names(tmp_path / "wanted"):
            assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes()
        assert file_names(tmp_path / "there") == file_names(tmp_path / "wanted")
        count += 3
    assert repaired > 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file that nobody had taken yet
@pytest.mark.slow
@pytest.mark.parametrize("finely", [(), ("replacing.py",)], ids=["lines", "bytecodes"])
@pytest.mark.parametrize("more", [{}, _MORE], ids=["one file", "shards"])
def test_an_interrupt_at_any_step_of_replacing_leaves_nothing_hidden(tmp_path, monkeypatch, more, finely):
    """Ctrl-C raises in this process, which goes on: no next save may ever come to take what is left."""
    rooms = (sys.modules["torchtether.files.replacing"], folder_module)
    monkeypatch.setattr(interrupts, "OURS", tuple(room.__file__ for room in rooms))
    for value in (1, 2):
        tt.save(net(value), tmp_path / str(value), **more)
    old, new = values(tmp_path / "1"), values(tmp_path / "2")
    target = tmp_path / "there" if more else tmp_path / "there" / "model.safetensors"
    save = lambda: tt.save(net(2), target, **more)  # noqa: E731
    count = count_steps(save, finely)
    assert count > 50
    for at in range(0, count, 7 if finely else 1):
        shutil.rmtree(tmp_path / "there")
        shutil.copytree(tmp_path / "1", tmp_path / "there")
        interrupted(save, at, finely)
        gc.collect(1)  # a generator that its error has held ends now
        assert not [name for name in file_names(tmp_path / "there") if name.startswith(".")], at
        found = values(tmp_path / "there")
        assert found in (old, new) or "a save to this checkpoint has not ended" in found, at


# -- two writers ------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("at", range(5))
def test_a_second_save_is_refused_while_the_first_renames_or_waits_for_it(tmp_path, monkeypatch, at):
    prepared(tmp_path / "there", "plain shards")
    first = Paused(monkeypatch, tmp_path / "there", 2, at, **_MORE)
    assert not os.path.exists(tmp_path / "there" / "lock")
    monkeypatch.setattr(locks, "PATIENCE", 0.05)
    with pytest.raises(tt.CheckpointError, match="another save has not ended") as refused:
        tt.save(net(3), tmp_path / "there", **_MORE)
    assert "\n" not in str(refused.value)
    monkeypatch.setattr(locks, "PATIENCE", 60.0)
    second = threading.Thread(target=tt.save, args=(net(3), tmp_path / "there"), kwargs=_MORE)
    second.start()
    first.go()
    second.join(30)
    assert first.error is None
    prepared(tmp_path / "wanted", None)
    tt.save(net(3), tmp_path / "wanted", **_MORE)
    assert values(tmp_path / "there") == values(tmp_path / "wanted")
    assert file_names(tmp_path / "there") == file_names(tmp_path / "wanted")


def test_a_lock_goes_with_its_process(tmp_path):
    prepared(tmp_path / "there", "plain shards")
    child = os.fork()
    if child == 0:
        with locks.locked(tmp_path / "there"):
            os._exit(9)
    os.waitpid(child, 0)
    tt.save(net(2), tmp_path / "there", **_MORE)
    assert values(tmp_path / "there") == {name: held_bits(held) for name, held in net(2).state_dict().items()}


@pytest.mark.parametrize("other", [_MORE, {}], ids=["shards", "one file"])
@pytest.mark.parametrize("at", range(5))
def test_where_there_are_no_locks_a_mixture_is_refused(tmp_path, monkeypatch, at, other):
    """The second save is done whole between two renames of the first."""

    def none(descriptor):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(locks, "try_to_own", none)
    prepared(tmp_path / "there", "plain shards")
    first = Paused(monkeypatch, tmp_path / "there", 2, at, **_MORE)
    tt.save(net(3), tmp_path / "there", **other)
    first.go()
    whole = [{name: held_bits(held) for name, held in net(value).state_dict().items()} for value in (2, 3)]
    found = values(tmp_path / "there")
    assert isinstance(found, str) or found in whole
    assert (main(["verify", str(tmp_path / "there")]) == 1) == isinstance(found, str)
    tt.save(net(4), tmp_path / "there", **_MORE)
    assert values(tmp_path / "there") == {name: held_bits(held) for name, held in net(4).state_dict().items()}


def test_a_shard_of_another_save_is_refused_also_by_verify(tmp_path, capsys):
    """It has the same names, shapes and records; its own checksums are right."""
    for value in (1, 2):
        tt.save(net(value), tmp_path / str(value), **_MORE)
    shard = sorted(file_names(tmp_path / "1"))[0]
    shutil.copyfile(tmp_path / "2" / shard, tmp_path / "1" / shard)
    assert f"{shard}: its header has digest" in values(tmp_path / "1")
    assert main(["verify", str(tmp_path / "1")]) == 1
    assert "but model.safetensors.index.json lists" in capsys.readouterr().err
    tt.save(net(1), tmp_path / "1", **_MORE)
    shutil.copytree(tmp_path / "1", tmp_path / "again")
    tt.save(net(1), tmp_path / "again", **_MORE)
    for name in file_names(tmp_path / "1"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_an_index_without_digests_is_read_as_ever(tmp_path):
    tt.save(net(1), tmp_path, **_MORE)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    assert set(index["metadata"].pop("torchtether.headers")) == set(index["weight_map"].values())
    path.write_text(json.dumps(index))
    assert values(tmp_path) == {name: held_bits(held) for name, held in net(1).state_dict().items()}
    assert main(["verify", str(tmp_path)]) == 0
    for wrong in ({}, [], "x", None):
        index["metadata"]["torchtether.headers"] = wrong
        path.write_text(json.dumps(index))
        assert isinstance(values(tmp_path), str) == (wrong is not None)


def test_two_saves_under_two_names_do_not_disturb_each_other(tmp_path, monkeypatch):
    """One is between its renames, and both are whole."""
    first = Paused(monkeypatch, tmp_path / "a.safetensors", 1, 0)
    second = threading.Thread(target=tt.save, args=(net(2), tmp_path / "b.safetensors"))
    second.start()
    first.go()
    second.join(30)
    for name, value in (("a", 1), ("b", 2)):
        wanted = {key: held_bits(held) for key, held in net(value).state_dict().items()}
        assert values(tmp_path / f"{name}.safetensors") == wanted


@pytest.mark.parametrize("at", [None, 0, 1, 2], ids=str)
@pytest.mark.parametrize(
    ("old", "new"), [("compressed-tensors", "plain"), ("plain shards", "compressed-tensors shards")]
)
def test_a_checkpoint_that_is_replaced_while_it_is_opened_is_no_mixture(tmp_path, monkeypatch, old, new, at):
    """Between the files of tensors and ``config.json`` a save is done, or has done some of its renames."""
    prepared(tmp_path, old)
    stock, (model, more) = store.read_beside, KINDS[new](2)

    def read_late(folder):
        with monkeypatch.context() as patch:
            patch.setattr(store, "read_beside", stock)
            if at is None:
                tt.save(model, folder, **more)
            else:
                assert dies_at_rename(at, lambda: tt.save(model, folder, **more))
        return stock(folder)

    monkeypatch.setattr(store, "read_beside", read_late)
    found = values(tmp_path)
    if at == 0:  # nothing is in place yet
        assert not isinstance(found, str)
    else:
        assert "the file was replaced while it was open" in found or "a save to this checkpoint has not ended" in found


def dies_at_rename(count, act):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    stock, left = os.replace, [count]

    def replace(*arguments):
        if left[0] == 0:
            os._exit(9)
        left[0] -= 1
        return stock(*arguments)

    os.replace = replace
    try:
        act()
    finally:
        os._exit(1)
