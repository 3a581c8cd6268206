"""Saves on Windows, which refuses what is done to open files, and on macOS, as simulated here."""

import errno
import gc
import os
import stat
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import torchtether as tt
from torchtether.files import folder, leftovers, locks, system

replacing = import_module("torchtether.files.replacing")  # the package has a function of that name
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="open files are found in /proc")


def used():
    """Return the numbers of the files that this process has open or mapped."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.stat(int(name)).st_ino)
        except OSError:  # the descriptor of the listing
            continue
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return found | {int(line.split()[4]) for line in maps.splitlines()}


@pytest.fixture
def windows(monkeypatch):
    """Let the system refuse what Windows refuses, and have no locks."""
    stock = {name: getattr(os, name) for name in ("open", "replace", "rename", "unlink")}

    def check(path):
        inside = [Path(path), *Path(path).rglob("*")]
        if {one.lstat().st_ino for one in inside if one.is_file()} & used():
            raise PermissionError(errno.EACCES, "another process uses it", os.fspath(path))

    def opened(path, *arguments, **options):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return stock["open"](path, *arguments, **options)

    def replaced(source, target):
        if os.path.isdir(target):
            raise PermissionError(errno.EACCES, "Access is denied", os.fspath(source))
        check(source)
        check(target)
        stock["replace"](source, target)

    def renamed(source, target):
        check(source)
        if os.path.exists(target) and source != target:
            raise FileExistsError(errno.EEXIST, "File exists", os.fspath(source))
        stock["rename"](source, target)

    def unlinked(path):
        check(path)
        stock["unlink"](path)

    for name, function in {"open": opened, "replace": replaced, "rename": renamed, "unlink": unlinked}.items():
        monkeypatch.setattr(os, name, function)
    for module in (replacing, folder):
        monkeypatch.setattr(module, "IS_WINDOWS", True)
    monkeypatch.setattr(locks, "fcntl", None)
    monkeypatch.setattr(leftovers, "HAS_LOCKS", False)


def state(value, count=3):
    return {f"w{i}": torch.full((64, 64), float(value)) for i in range(count)}


def values(path):
    with tt.open(path) as found:
        return {key: found[key][0, 0].item() for key in found}


SHARDS = {"max_shard_size": 20_000}


def test_saves_replace_files_on_windows(tmp_path, windows):
    for value in (1, 2):
        tt.save(state(value), tmp_path / "x.safetensors")
        tt.save(state(value), tmp_path / "x.gguf", format="gguf")
        assert values(tmp_path / "x.safetensors") == values(tmp_path / "x.gguf") == dict.fromkeys(state(1), value)
    for value, options in enumerate([SHARDS, SHARDS, {}, SHARDS]):
        tt.save(state(value), tmp_path / "sharded", **options)
        assert values(tmp_path / "sharded") == dict.fromkeys(state(1), value)
    assert len(os.listdir(tmp_path / "sharded")) == 4


@pytest.mark.parametrize("options", [{}, SHARDS])
def test_a_mapped_checkpoint_is_refused_before_a_change_on_windows(tmp_path, windows, options):
    tt.save(state(1, 9), tmp_path, **SHARDS)
    model = torch.nn.ParameterDict({key: torch.nn.Parameter(value.to("meta")) for key, value in state(1, 9).items()})
    tt.load(model, tmp_path, mmap=True)
    before = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    wanted = r"model-0000\d-of-00009.safetensors: cannot be replaced: another process uses it. Close it, and free"
    with pytest.raises(tt.CheckpointError, match=wanted):
        tt.save(state(2, 9), tmp_path, **options)
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == before
    assert values(tmp_path) == dict.fromkeys(state(1, 9), 1)
    del model
    gc.collect()
    tt.save(state(2, 9), tmp_path, **options)
    assert values(tmp_path) == dict.fromkeys(state(1, 9), 2)


def test_a_mapped_file_is_refused_before_anything_is_written_on_windows(tmp_path, windows, monkeypatch):
    tt.save(state(1), tmp_path / "x.safetensors")
    with open(tmp_path / "x.safetensors", "rb"):
        monkeypatch.setattr(replacing, "FileIO", None)  # would fail
        with pytest.raises(tt.CheckpointError, match=r"x\.safetensors: cannot be replaced"):
            tt.save(state(2), tmp_path / "x.safetensors")


def test_an_empty_folder_is_replaced_on_windows(tmp_path, windows):
    for name in ("new", "empty"):
        if name == "empty":
            (tmp_path / name).mkdir()
        with folder.new_folder(tmp_path / name) as made:
            (made / "x").write_bytes(b"1")
        assert os.listdir(tmp_path / name) == ["x"]
    assert sorted(os.listdir(tmp_path)) == ["empty", "new"]


@pytest.mark.parametrize("is_refused", [False, True])
def test_macos_writes_past_the_cache_of_the_disk(tmp_path, monkeypatch, is_refused):
    """A file system without that call is synced as elsewhere."""
    full, plain = set(), set()
    monkeypatch.setattr(system.fcntl, "F_FULLFSYNC", 51, raising=False)

    def control(descriptor, command):
        assert command == 51
        full.add(os.fstat(descriptor).st_ino)
        if is_refused:
            raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(system.fcntl, "fcntl", control)
    monkeypatch.setattr(os, "fsync", lambda descriptor: plain.add(os.fstat(descriptor).st_ino))
    tt.save(state(1), tmp_path / "x.safetensors")
    written = {path.stat().st_ino for path in (tmp_path, tmp_path / "x.safetensors")}
    assert (full, plain) == (written, written if is_refused else set())
