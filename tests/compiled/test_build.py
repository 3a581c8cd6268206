"""The loops are compiled once, in the background; whatever stands in the way is said, and torch ops do the work."""

import os
import shutil
import subprocess
import sys
import time

import pytest
import torch

from torchtether import compiled
from torchtether.compiled.build import Build
from torchtether.compiled.toolchain import DAY, build, find_built
from torchtether.schemes import int8

needs_compiler = pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="there is no C compiler")


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A build without a past, in a folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHTETHER_COMPILE", "1")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return Build()


def test_nothing_is_built_before_it_is_asked_for(fresh, tmp_path):
    assert fresh.library() is None
    assert not list(tmp_path.rglob("*.so*"))


@needs_compiler
def test_a_build_does_not_wait_and_the_next_process_has_it(fresh, tmp_path):
    begun = time.monotonic()
    fresh.warm()
    assert time.monotonic() - begun < 1  # it takes seconds
    assert fresh.state == "being compiled"
    assert fresh.wait()
    assert fresh.state == "compiled"
    files = sorted(path.suffix for path in (tmp_path / "cache" / "torchtether").iterdir())
    assert ".so" in files
    assert Build().library() is not None
    for _ in range(100):
        if not list(tmp_path.rglob("*.lock")):
            break
        time.sleep(0.02)
    assert [path.suffix for path in (tmp_path / "cache" / "torchtether").iterdir()] == [".so"]


@pytest.mark.slow
@needs_compiler
def test_a_process_may_end_while_it_is_built(fresh, tmp_path):
    code = "from torchtether import compiled; compiled.BUILD.warm(); print(compiled.BUILD.state)"
    ended = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "being compiled\n", "")
    assert fresh.wait()  # what that process began is waited for


def test_without_a_compiler(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    fresh.warm()
    assert (fresh.library(), fresh.state) == (None, "no C compiler")


@pytest.mark.parametrize("word", ["0", "off", "False"])
def test_switched_off(fresh, monkeypatch, word):
    monkeypatch.setenv("TORCHTETHER_COMPILE", word)
    assert not fresh.wait()
    assert fresh.state == "off by TORCHTETHER_COMPILE"


def test_a_compiler_that_fails(fresh, monkeypatch):
    monkeypatch.setenv("CC", "false")
    assert not fresh.wait(20)
    assert fresh.state.startswith("the compiler failed: ")
    again = Build()
    again.warm()
    assert again.state.startswith("the compiler failed: ")  # it is not asked again
    (failed,) = fresh._folder.glob("*.failed")
    os.utime(failed, (time.time() - 2 * DAY,) * 2)
    later = Build()
    later.warm()
    assert later.state == "being compiled"
    assert not later.wait(20)


def script(folder, *lines):
    """A compiler that runs ``lines`` of shell."""
    path = folder / "compiler"
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    "lines",
    [
        ("kill -9 $$",),
        ("echo 'fatal error: error writing to /tmp/cc.s: No space left on device' >&2", "exit 1"),
        ("echo 'gcc: fatal error: Killed signal terminated program cc1' >&2", "exit 1"),
        ("echo 'cc1: out of memory allocating 65536 bytes' >&2", "exit 1"),
    ],
    ids=["killed", "no space", "a part was killed", "no memory"],
)
def test_what_may_pass_is_not_held_against_the_compiler(fresh, monkeypatch, tmp_path, lines):
    monkeypatch.setenv("CC", script(tmp_path, *lines))
    assert not fresh.wait(20)
    assert fresh.state == "the compiler did not end its work"
    again = Build()
    again.warm()
    assert again.state == "being compiled"
    assert not again.wait(20)


DAMAGES = {
    "other bytes": lambda path: path.write_bytes(b"not a library"),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "others may write it": lambda path: path.chmod(0o666),
}


@pytest.fixture
def step(tmp_path):
    """What makes a library, in no time."""
    source = tmp_path / "source"
    source.write_bytes(bytes(range(256)) * 64)
    source.chmod(0o666)
    return ["cp", str(source), "made.so"]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_library_is_not_loaded_but_built_again(fresh, step, damage):
    fresh.library()
    folder, name = fresh._folder, fresh._name
    for _ in range(2):
        assert build([step], folder, name) == ""
        built = find_built(folder, name)
        assert built.parent == folder
        damage(built)
        assert find_built(folder, name) is None
        assert fresh.library() is None
    assert fresh.state == ""


def test_nobody_else_may_write_what_is_built_whatever_the_umask(fresh, step):
    before = os.umask(0)
    try:
        fresh.library()
        assert build([step], fresh._folder, fresh._name) == ""
    finally:
        os.umask(before)
    for path in (fresh._folder, find_built(fresh._folder, fresh._name)):
        assert not path.stat().st_mode & 0o077


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
@pytest.mark.parametrize(("mode", "is_used"), [(0o777, False), (0o775, False), (0o1777, True), (0o755, True)])
@pytest.mark.parametrize("above", [0, 1, 2])
def test_a_folder_that_others_may_exchange_is_not_used(fresh, tmp_path, mode, is_used, above):
    folder = tmp_path / "cache" / "torchtether"
    folder.mkdir(parents=True)
    [folder, *folder.parents][above].chmod(mode)
    fresh.library()
    is_used = is_used and not (above == 0 and mode & 0o022)  # the folder itself is for its owner alone
    assert fresh._folder == (folder if is_used else None if above == 2 else tmp_path / f"torchtether-{os.getuid()}")


@needs_compiler
def test_another_processor_or_command_has_another_library(fresh, monkeypatch):
    fresh.library()
    other, third = Build(), Build()
    with monkeypatch.context() as patch:
        patch.setattr("torchtether.compiled.build.processor_flags", lambda: b"another")
        other.library()
    monkeypatch.setenv("CC", f"{shutil.which('cc') or shutil.which('gcc')} -ffast-math")
    third.library()
    assert len({made._name for made in (fresh, other, third)}) == 3


def test_torch_ops_do_the_work_meanwhile(monkeypatch):
    w = torch.randn(4, 8)
    parts = int8().encode(w)
    monkeypatch.setattr(compiled.BUILD, "library", lambda: None)
    assert all(torch.equal(part, parts[name]) for name, part in int8().encode(w).items())
