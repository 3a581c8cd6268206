"""The loops are compiled once, in the background; whatever stands in the way is said, and torch ops do the work."""

import os
import shutil
import subprocess
import sys
import time

import pytest
import torch

from torchtether import native
from torchtether.native.build import Build
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
    code = "from torchtether import native; native.compiled.warm(); print(native.compiled.state)"
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
    assert not again.wait(20)  # it is not tried again
    assert again.state.startswith("the compiler failed: ")


@needs_compiler
def test_a_damaged_library(fresh):
    fresh.library()
    fresh._target.write_bytes(b"not a library")
    assert fresh.library() is None
    assert fresh.state.startswith("it does not load: ")


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_folder_that_others_may_write_is_not_used(fresh, tmp_path):
    folder = tmp_path / "cache" / "torchtether"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    fresh.library()
    assert fresh._target is None or fresh._target.parent != folder


@needs_compiler
def test_another_processor_has_another_library(fresh, monkeypatch):
    fresh.library()
    other = Build()
    monkeypatch.setattr("torchtether.native.build.said_processor", lambda: b"another")
    other.library()
    assert fresh._target != other._target


def test_torch_ops_do_the_work_meanwhile(monkeypatch):
    w = torch.randn(4, 8)
    parts = int8().encode(w)
    monkeypatch.setattr(native.compiled, "_library", None)
    assert all(torch.equal(part, parts[name]) for name, part in int8().encode(w).items())
