"""Allocating memory for loaded tensors."""

import ctypes
import gc
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchtether as tt
from torchtether import compiled
from torchtether.files import TensorFile, memory
from torchtether.files.crew import Scratch
from torchtether.files.memory import allocate, allocate_each
from torchtether.files.system import HUGE_PAGE

CPU = torch.device("cpu")
LARGE = (HUGE_PAGE // 4 + 3, 1)


def is_on_a_huge_page(tensor):
    return tensor.data_ptr() % HUGE_PAGE == 0 and not tensor.untyped_storage().resizable()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
@pytest.mark.parametrize(("shape", "stride"), [((), None), ((0, 3), None), ((3, 5), (1, 3)), ((1024, 2049), (1, 1024))])
def test_it_has_the_shape_strides_and_bytes_that_are_asked_for(shape, stride, dtype):
    made, wanted = allocate(shape, dtype, stride=stride), torch.empty(shape, dtype=dtype)
    assert (made.shape, made.dtype, made.stride()) == (wanted.shape, dtype, stride or wanted.stride())
    assert made.untyped_storage().nbytes() == wanted.untyped_storage().nbytes()
    assert is_on_a_huge_page(made) == (made.nbytes >= HUGE_PAGE)
    assert torch.equal(made.copy_(torch.ones(shape)), torch.ones(shape, dtype=dtype))


def test_without_a_mapping_it_is_memory_of_torch(monkeypatch):
    def refused(*args, **kwargs):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(memory.mmap, "mmap", refused)
    made = allocate(LARGE, torch.float32)
    assert made.shape == LARGE
    assert made.untyped_storage().resizable()


def test_other_devices_and_modes():
    assert allocate(LARGE, torch.float32, "meta").is_meta
    with torch.device("meta"), torch.inference_mode():
        made = allocate(LARGE, torch.float32)
    assert made.device.type == "cpu"


KINDS = [
    (shape, dtype, stride, at)
    for at, (shape, stride) in enumerate(
        [((), ()), ((0, 3), (3, 1)), ((3, 5), (1, 3)), ((1, 7), (99, 1)), ((1024, 2049), (1, 1024))]
    )
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.float8_e4m3fn, torch.uint16)
]


class Watching(TorchDispatchMode):
    """Counts the tensors that torch makes."""

    made = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.made += "empty" in str(function) and kwargs["device"].type == "cpu"
        return function(*args, **(kwargs or {}))


def test_many_are_like_each():
    with torch.device("meta"):
        many = allocate_each(KINDS)
        each = [allocate(shape, dtype, "cpu", stride, at=at) for shape, dtype, stride, at in KINDS]
    for one, other in zip(many, each, strict=True):
        assert (one.shape, one.dtype, one.stride(), one.device) == (other.shape, other.dtype, other.stride(), CPU)
        assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
        assert is_on_a_huge_page(one) == is_on_a_huge_page(other)
        assert (one.requires_grad, one._base, one.storage_offset()) == (False, None, 0)
    assert len({one.untyped_storage()._cdata for one in many}) == len(KINDS)


def test_who_looks_on_sees_many():
    with Watching() as mode:
        allocate_each([((3,), torch.float32, (1,), 0)] * 5)
    assert mode.made == 5


def is_slow(address, at):
    """Whether processors copy slowly from byte ``at`` of a page to that address."""
    return 0 < (address - at) % 4096 < 32


@given(st.one_of(st.integers(0, 2**40), st.integers(0, 64).map(lambda behind: 2**32 - behind)), st.booleans())
def test_no_copy_begins_just_behind_its_original(at, is_large):
    room = Scratch()
    taken = room.take((3, 2**19 if is_large else 5), torch.float32, at)
    for address in (allocate(LARGE, torch.float32, at=at).data_ptr(), taken.data_ptr()):
        assert address % 64 == 0
        assert not is_slow(address, at)
    again = room.take(tuple(taken.shape), torch.float32, at + 8)
    assert again.untyped_storage().data_ptr() == taken.untyped_storage().data_ptr()


@pytest.fixture
def reads(monkeypatch):
    """Where tensors were read to, and where in their files they begin.

    Headers are left out: Python puts them anywhere, and 8 bytes are not slow to copy.
    """
    found, asked = [], set()
    read, encode, take = TensorFile.read_bytes, compiled.encode_file, Scratch.take

    def read_bytes(file, buffers, at):
        place = at
        for key, buffer in buffers:
            if key != "header":
                found.append((ctypes.addressof(ctypes.c_char.from_buffer(buffer)), place))
            place += len(buffer)
        read(file, buffers, at)

    def encode_file(recipe, descriptor, at, rows, room, parts):
        assert at in asked
        found.append((room.data_ptr(), at))
        return encode(recipe, descriptor, at, rows, room, parts)

    def taken(room, shape, dtype, at):
        asked.add(at)
        return take(room, shape, dtype, at)

    monkeypatch.setattr(TensorFile, "read_bytes", read_bytes)
    monkeypatch.setattr(Scratch, "take", taken)
    monkeypatch.setattr(compiled, "encode_file", encode_file)
    return found


@pytest.mark.parametrize("how", ["plain", "quantized", "read", "in a file", "tied", "renamed", "converted", "encoded"])
@pytest.mark.parametrize("behind", [0, 1, 8, 24, 40, -56])
def test_files_with_headers_of_any_length_are_read_clear_of_it(tmp_path, behind, how, reads):
    with torch.device("meta"):
        model = nn.Linear(2048, 1536, bias=False)
    saved = nn.Linear(2048, 1536, bias=False)
    if how == "quantized":
        tt.quantize(saved, "int8")
    path = tmp_path / "model.safetensors"
    tt.save(saved, path)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header, rest = path.read_bytes()[8 : 8 + length].rstrip(), path.read_bytes()[8 + length :]
    entries = [entry for key, entry in json.loads(header).items() if key != "__metadata__"]
    (first,) = (start for start, stop in (entry["data_offsets"] for entry in entries) if stop - start >= HUGE_PAGE)
    header += b" " * ((-behind - 8 - len(header) - first) % 4096)
    path.write_bytes(len(header).to_bytes(8, "little") + header + rest)
    wanted = saved.weight
    if how == "read":
        with tt.Checkpoint(path) as checkpoint:
            model.weight = nn.Parameter(checkpoint.read("weight"))
    elif how == "in a file":
        with TensorFile(path) as file:
            model.weight = nn.Parameter(file.read("weight"))
    elif how == "tied":
        model = nn.ModuleList([model, nn.Linear(2048, 1536, bias=False, device="meta")])
        model[1].weight = model[0].weight
        tt.load(model, path, rename={"weight": "0.weight"})
        model = model[1]
    elif how == "renamed":
        model = nn.ModuleDict({"inner": model})
        tt.load(model, path, rename={"weight": "inner.weight"})
        model = model["inner"]
    elif how == "converted":
        tt.load(model, path, dtype=torch.bfloat16)
        wanted = wanted.to(torch.bfloat16)
    elif how == "encoded":
        tt.load(model, path, quantize="int8")
        wanted = tt.Weight.encode(wanted, tt.int8())
    else:
        tt.load(model, path)
    large = [(address, at) for address, at in reads if at % 4096 == -behind % 4096]
    assert large
    assert not any(is_slow(*place) for place in large)
    assert torch.equal(torch.as_tensor(model.weight), torch.as_tensor(wanted))


def test_mappings_are_counted_and_come_to_an_end(monkeypatch):
    """A process may not have many; a model may have a hundred thousand experts."""
    gc.collect()
    monkeypatch.setattr(memory, "MOST_MAPPINGS", len(memory.MAPPINGS) + 2)
    held = [allocate(LARGE, torch.float32) for _ in range(4)]
    assert [is_on_a_huge_page(tensor) for tensor in held] == [True, True, False, False]
    view = held[0][1:]
    del held[0]
    assert not is_on_a_huge_page(allocate(LARGE, torch.float32))
    del view
    assert is_on_a_huge_page(allocate(LARGE, torch.float32))
