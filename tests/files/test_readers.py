"""Reads ahead fill exactly their memory, by the threads of the compiled module and by Python's."""

import gc
import os
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchtether as tt
from torchtether import compiled
from torchtether.files import TensorFile, readers

COUNT = 5000
VALUES = torch.arange(COUNT, dtype=torch.int16)


@pytest.fixture(params=["compiled", "python", "windows"], scope="module")
def way(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "PIECE", 700)
        patch.setattr(readers, "_PIECE_OF_PYTHON", 700)
        patch.setattr(readers, "READERS", 3)
        patch.setattr(readers, "_READERS_OF_PYTHON", 3)
        if request.param == "windows":  # lacks this call
            patch.delattr(os, "preadv")
        if request.param != "compiled":
            patch.setattr(readers, "compiled", SimpleNamespace(native=lambda: None))
        elif compiled.native() is None:
            pytest.skip("there is no compiled module")
        yield request.param


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("read") / "x.safetensors"
    tt.save({"x": VALUES}, path)
    with TensorFile(path) as opened:
        yield opened


RANGES = st.lists(st.tuples(st.integers(0, 2 * COUNT - 1), st.integers(1, 3000)), min_size=1, max_size=8)


@given(ranges=RANGES, turns=st.randoms(use_true_random=False))
@pytest.mark.usefixtures("way")
def test_reads_fill_their_memory_and_no_other(file, ranges, turns):
    """Any number of them side by side, waited for in any order."""
    ours, begun = readers.Readers(), []
    start = file.stored("x").start
    for at, nbytes in ranges:
        nbytes = min(nbytes, 2 * COUNT - at)
        memory = torch.full((nbytes + 16,), 0xA5, dtype=torch.uint8)
        cut = nbytes // 3
        parts = [("x", count) for count in (cut, nbytes - cut) if count]
        begun.append((ours.start(file, memory, parts, start + at), memory, at, nbytes))
    turns.shuffle(begun)
    for wait, memory, at, nbytes in begun:
        wait()
        assert torch.equal(memory[:nbytes], VALUES.view(torch.uint8)[at : at + nbytes])
        assert bool((memory[nbytes:] == 0xA5).all())
    ours.close()


def test_memory_lives_until_its_read_has_ended(file, way):
    """Also where nobody waits for it, and where the readers are dropped without a word."""
    for is_closed in (True, False):
        ours, memories = readers.Readers(), []
        for _ in range(50):
            memory = torch.empty(2 * COUNT, dtype=torch.uint8)
            ours.start(file, memory, [("x", 2 * COUNT)], file.stored("x").start)
            memories.append(weakref.ref(memory))
            del memory
        if way == "compiled":  # Python's reads hold their memory themselves, as long as they last
            assert all(memory() is not None for memory in memories)
        if is_closed:
            ours.close()
            ours.close()
        del ours
        gc.collect()
        assert way != "compiled" or all(memory() is None for memory in memories)


@pytest.mark.usefixtures("way")
def test_they_can_be_used_again_after_close(file):
    ours = readers.Readers()
    for _ in range(2):
        memory = torch.zeros(2 * COUNT, dtype=torch.uint8)
        ours.start(file, memory, [("x", 2 * COUNT)], file.stored("x").start)()
        assert torch.equal(memory.view(torch.int16), VALUES)
        ours.close()


def test_an_error_is_that_of_the_file(file, way, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(file.path.read_bytes())
    with TensorFile(tmp_path / "x.safetensors") as short, open(short.path, "r+b") as opened:
        opened.truncate(short.stored("x").start + 1000)
        ours = readers.Readers()
        memory = torch.zeros(2 * COUNT, dtype=torch.uint8)
        wait = ours.start(short, memory, [("x", 2 * COUNT)], short.stored("x").start)
        with pytest.raises(tt.CheckpointError, match="x.safetensors: x: the file is cut short"):
            wait()
        ours.close()


@pytest.mark.skipif(compiled.native() is None, reason="there is no compiled module")
def test_the_compiled_readers_check_their_arguments(file):
    native = compiled.native()
    for bad in ((0, 1), (1, 0), (1,), ("a", 1)):
        with pytest.raises(TypeError):
            native.open_readers(*bad)
    ours = native.open_readers(1, 10)
    for bad in ((object(), 0, 1, 0, 1), (ours, 0, 0, 0, 1), (ours, 0, 1, -1, 1), (ours, 0, 1, 0, 0), (ours,)):
        with pytest.raises((TypeError, ValueError)):
            native.start_read(*bad)
    assert native.finish_read(ours, 99) is False  # no such read
    memory = bytearray(4)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert native.finish_read(ours, native.start_read(ours, -1, address, 0, 4)) is False  # no such file
