"""Any system call may fail or be interrupted: files are old or new, nothing stays open, and the next call works."""

import errno
import gc
import io
import itertools
import os
import shutil
import signal
import sys

import pytest
import torch
from torch import nn

import torchtether as tt
from torchtether.files import locks

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")

OURS = {"posix", "fcntl"}
CANNOT_FAIL = {"close", "fspath", "getpid", "kill", "fileno", "cpu_count"}  # close always closes


class Failing:
    """Let the ``at``-th system call fail: raise EIO, or what the handler of SIGINT raises if ``is_interrupt``."""

    def __init__(self, at, is_interrupt=False):
        self.left, self.is_interrupt, self.failed = at, is_interrupt, None

    def profile(self, frame, event, function):
        if event != "c_call" or self.failed or function.__name__ in CANNOT_FAIL:
            return
        if function.__name__.startswith("_"):  # as _path_normpath: Python's own, of the text of a path
            return
        if getattr(function, "__module__", None) in OURS or isinstance(function.__self__, io.FileIO):
            self.left -= 1
            if self.left < 0:
                self.failed = function.__name__
                if not self.is_interrupt:
                    raise OSError(errno.EIO, "injected", "somewhere")
                signal.getsignal(signal.SIGINT)(signal.SIGINT, frame)

    def __enter__(self):
        self.before = sys.getprofile()
        sys.setprofile(self.profile)
        return self

    def __exit__(self, *error):
        sys.setprofile(self.before)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def net(value):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def values(path):
    try:
        with tt.open(path) as checkpoint:
            return {name: checkpoint[name].unique().tolist() for name in checkpoint}
    except tt.CheckpointError as error:
        return "torn" if "has not ended" in str(error) else str(error)


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def each_failure(act, is_interrupt):
    """Let each system call of ``act`` fail in turn, until it meets none; yield the call that failed and the error."""
    for at in itertools.count():
        start, failing, found = descriptors(), Failing(at, is_interrupt), None
        try:
            with failing:
                act()
        except (tt.TetherError, KeyboardInterrupt) as error:
            found = str(error)
            assert "\n" not in found
        if failing.failed is None:
            assert at > 10
            return
        if descriptors() != start:
            gc.collect()  # which takes longer than the act
        assert descriptors() == start, (at, failing.failed)
        yield failing.failed, found


@pytest.mark.parametrize("is_interrupt", [False, True], ids=["failed", "interrupted"])
@pytest.mark.parametrize("options", [{}, {"max_shard_size": 1100}], ids=["one", "shards"])
@pytest.mark.parametrize("name", ["x.safetensors", ""], ids=["file", "folder"])
def test_a_call_of_a_save(tmp_path, monkeypatch, name, options, is_interrupt):
    if name and options:
        pytest.skip("shards need a folder")
    monkeypatch.setattr(locks, "PATIENCE", 0.5)
    monkeypatch.setattr(os, "fsync", os.fstat)  # which takes no time, and fails as often
    template, there = tmp_path / "template", tmp_path / "there"
    template.mkdir()
    (template / "config.json").write_text("{}")
    tt.save(net(1), template / name, **options)
    shutil.copytree(template, there)
    tt.save(net(2), there / name, **options)
    before, after, wanted = values(template / name), values(there / name), files(there)
    assert before != after
    shutil.rmtree(there)
    shutil.copytree(template, there)
    for call, error in each_failure(lambda: tt.save(net(2), there / name, **options), is_interrupt):
        found = values(there / name)
        assert found in ((before, after, "torn") if error is not None else (after,)), (call, error, found)
        hidden = [path for path in there.iterdir() if path.name.startswith(".")]
        assert not hidden or call in ("unlink", "rmdir"), (call, hidden)
        tt.save(net(2), there / name, **options)
        assert files(there) == wanted, call
        shutil.rmtree(there)
        shutil.copytree(template, there)


@pytest.mark.parametrize("is_interrupt", [False, True], ids=["failed", "interrupted"])
@pytest.mark.parametrize("kind", ["file", "shards", "torch.save"])
def test_a_call_of_a_load(tmp_path, kind, is_interrupt):
    path = tmp_path / {"file": "x.safetensors", "shards": "", "torch.save": "x.bin"}[kind]
    if kind == "torch.save":
        torch.save(net(2).state_dict(), path)
    else:
        tt.save(net(2), path, max_shard_size=1100 if kind == "shards" else None)

    def on_meta():
        with torch.device("meta"):
            return net(0)

    holder = [on_meta()]
    for call, error in each_failure(lambda: tt.load(holder[0], path), is_interrupt):
        are_meta = {parameter.is_meta for parameter in holder[0].parameters()}
        assert are_meta in ({True}, {False}), call
        assert are_meta == {False} or error is not None, call
        tt.load(holder[0], path)
        assert all((parameter == 2).all() for parameter in holder[0].parameters())
        holder[0] = on_meta()
