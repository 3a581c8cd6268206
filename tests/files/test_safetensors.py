"""Safetensors files: we and others read what we write, and files with false headers are refused."""

import copy
import errno
import gc
import itertools
import json
import os
import pickle
import stat
import struct
import sys
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchtether as tt
from tests.written import write_tensors
from torchtether.files import DTYPES, TensorFile, crew, replacing
from torchtether.files import batch as batch_module
from torchtether.files.memory import pieces


def bits(tensor):
    """A tensor's values as bytes, so that NaN equals NaN."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def random_tensor(code, shape, seed=0):
    dtype = DTYPES[code]
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    top = 2 if code == "BOOL" else 256
    return torch.randint(0, top, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def write(path, tensors, metadata=None):
    with replacing(path) as (file,):
        write_tensors(file, tensors, metadata or {}, name=str(path))


@st.composite
def many_tensors(draw):
    shapes = st.lists(st.integers(0, 5), max_size=4)
    names = draw(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6, unique=True))
    made = {}
    for name in names:
        if name == "__metadata__" or any(0xD800 <= ord(c) < 0xE000 for c in name):
            continue
        code, shape = draw(st.sampled_from(sorted(DTYPES))), draw(shapes)
        if code == "F4" and not shape:
            shape = [2]
        tensor = random_tensor(code, shape, draw(st.integers(0, 99)))
        if tensor.dim() > 1 and draw(st.booleans()):
            tensor = tensor.transpose(0, -1)
        made[name] = tensor
    return made


@given(many_tensors(), st.dictionaries(st.text("abc", max_size=3), st.text("xyz", max_size=3)))
def test_what_is_written_is_read_by_us_and_by_the_reference(tmp_path_factory, tensors, metadata):
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    write(path, tensors, metadata)
    reference = safetensors.torch.load_file(path)
    assert reference.keys() == tensors.keys()
    with TensorFile(path) as file:
        assert dict(file.header.metadata) == metadata
        for name, tensor in tensors.items():
            assert same(file.read(name), tensor)
            assert same(reference[name], tensor)
            assert file.stored(name).start % tensor.element_size() == 0
        assert min((file.stored(name).start for name in tensors), default=0) % 64 == 0


@given(many_tensors())
def test_what_the_reference_writes_is_read(tmp_path_factory, tensors):
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    with TensorFile(path) as file:
        for name, tensor in tensors.items():
            assert same(file.read(name), tensor)


def test_equal_tensors_give_equal_bytes_whatever_their_order(tmp_path):
    tensors = {f"n{i}": random_tensor("F32", (i, 2), i) for i in range(9)}
    metadata = {f"k{i}": str(i) for i in range(9)}
    write(tmp_path / "a", tensors, metadata)
    write(tmp_path / "b", dict(reversed(tensors.items())), dict(reversed(metadata.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_lazy_conjugates_and_negatives_are_written_resolved(tmp_path):
    value = torch.randn(3, 4, dtype=torch.complex64)
    write(tmp_path / "x", {"conj": value.conj(), "neg": value.conj().imag, "turned": value.conj().t()})
    with TensorFile(tmp_path / "x") as file:
        assert torch.equal(file.read("conj"), value.conj().resolve_conj())
        assert torch.equal(file.read("neg"), value.conj().imag.resolve_neg())
        assert torch.equal(file.read("turned"), value.conj().t().resolve_conj())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("piece", [8, 100, 10_000])
def test_reading_into_other_dtypes_and_strides_goes_by_pieces(tmp_path, monkeypatch, dtype, turned, piece):
    monkeypatch.setattr(batch_module, "SLICE", piece)
    monkeypatch.setattr(batch_module, "_WORTHWHILE", 2 * piece)
    monkeypatch.setattr(crew, "_TOLD", 0)
    value = torch.randn(3, 5, 7)
    write(tmp_path / "x", {"v": value})
    out = torch.zeros(7, 5, 3, dtype=dtype).permute(2, 1, 0) if turned else torch.zeros(3, 5, 7, dtype=dtype)
    told = []
    with TensorFile(tmp_path / "x") as file:
        file.read_into("v", out, told.append)
    assert torch.equal(out, value.to(dtype))
    assert sum(told) == value.nbytes
    assert max(told) <= piece


@given(st.lists(st.integers(0, 6), max_size=4), st.integers(1, 200), st.booleans())
def test_pieces_are_the_tensor_in_order(shape, limit, turned):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    tensor = tensor.transpose(0, -1) if turned and tensor.dim() > 1 else tensor
    found = [piece for piece in pieces(tensor, limit) if piece.numel()]
    assert [x for piece in found for x in piece.reshape(-1).tolist()] == tensor.reshape(-1).tolist()
    assert all(piece.nbytes <= max(limit, 8) for piece in found)


def test_autograd_is_told_that_the_bytes_changed(tmp_path):
    write(tmp_path / "x", {"v": torch.ones(3)})
    held = torch.zeros(3, requires_grad=True)
    loss = (held * held).sum()
    with TensorFile(tmp_path / "x") as file:
        file.read_into("v", held)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- writing beside and renaming --------------------------------------------------------------------------------------


def test_umask_mode_and_symlinks_are_respected(tmp_path):
    before = os.umask(0o027)
    try:
        write(tmp_path / "new", {"v": torch.ones(1)})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    (tmp_path / "new").chmod(0o604)
    (tmp_path / "link").symlink_to(tmp_path / "new")
    write(tmp_path / "link", {"v": torch.zeros(1)})
    assert (tmp_path / "link").is_symlink()
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o604
    with TensorFile(tmp_path / "new") as file:
        assert file.read("v").item() == 0


def test_a_file_system_without_modes_takes_a_second_save(tmp_path, monkeypatch):
    write(tmp_path / "x", {"v": torch.ones(1)})
    monkeypatch.setattr(os, "chmod", Mock(side_effect=PermissionError(errno.EPERM, "Operation not permitted")))
    write(tmp_path / "x", {"v": torch.zeros(1)})
    with TensorFile(tmp_path / "x") as file:
        assert file.read("v").item() == 0


@pytest.mark.skipif(sys.platform == "win32", reason="a current folder cannot be removed")
def test_a_current_folder_that_is_gone_is_one_error(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(tt.CheckpointError, match=r"x\.safetensors: cannot be written: No such file"):
        tt.save({"v": torch.ones(1)}, "x.safetensors")


def test_a_failure_leaves_the_old_files_and_no_rubbish(tmp_path):
    (tmp_path / "one").write_bytes(b"old")

    def fail():
        with replacing(tmp_path / "one", tmp_path / "two") as (one, _):
            one.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"one": b"old"}


def test_a_full_disk_is_one_error(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(tt.CheckpointError, match="No space left"):
        write(tmp_path / "x", {"v": torch.ones(4)})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"x": b"old"}


@pytest.mark.parametrize(
    ("tensors", "what"),
    [
        ({"v": torch.ones(2, dtype=torch.complex128)}, "v: safetensors has no dtype for torch.complex128"),
        (
            {"v": torch.ones((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)},
            "v: safetensors cannot store a float4_e2m1fn_x2 tensor without dimensions",
        ),
        ({"v": torch.ones(2, device="meta")}, "v: it is on meta"),
        ({"v": torch.ones(2, 2).to_sparse()}, "v: safetensors cannot store a torch.sparse_coo tensor"),
        ({"__metadata__": torch.ones(2)}, "__metadata__: this name is reserved"),
        ({"\ud800": torch.ones(2)}, "not Unicode"),
        ({"n" * (2**16 + 1): torch.ones(2)}, "x: 'nnn.*' has 65537 characters, more than 65536"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_by_name(tmp_path, tensors, what):
    with pytest.raises(tt.CheckpointError, match=what):
        write(tmp_path / "x", tensors)
    assert list(tmp_path.iterdir()) == []


# -- files that lie ---------------------------------------------------------------------------------------------------


def crafted(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


LIES = {
    "empty": (lambda p: p.write_bytes(b""), "0 bytes"),
    "short": (lambda p: p.write_bytes(b"\0" * 7), "7 bytes"),
    "no_header": (lambda p: p.write_bytes(b"\0" * 8), "does not begin"),
    "huge_header": (lambda p: crafted(p, {}, length=100_000_001), "allows 100000000"),
    "header_past_end": (lambda p: crafted(p, {}, length=1000), "takes 1000 bytes"),
    "not_json": (lambda p: crafted(p, b"{]"), "not JSON"),
    "not_utf8": (lambda p: crafted(p, b'{"\xff": 1}'), "not UTF-8"),
    "list": (lambda p: crafted(p, b"[]"), "does not begin"),
    "deep": (lambda p: crafted(p, b'{"a":' * 200_000), "nested too deeply"),
    "twice": (lambda p: crafted(p, b'{"a": 1, "a": 2}'), "'a' twice"),
    "twice_inside": (lambda p: crafted(p, b'{"a": {"b": 1, "c": 2, "b": 3}}'), "'b' twice"),
    "twice_in_a_list": (lambda p: crafted(p, b'{"a": [{"b": 1, "b:": 2, "b": 3}]}'), "'b' twice"),
    "twice_with_objects": (lambda p: crafted(p, b'{"a": {"b": {"c": 1}, "d": 1}, "a": {}}'), "'a' twice"),
    "twice_escaped": (lambda p: crafted(p, b'{"a\\":": 1, "a\\u0022:": 2}'), "twice"),
    "long_inner_key": (lambda p: crafted(p, {"a": {"x" * 70_000: 1}}), "has 70000 characters"),
    "long_key_deep_down": (lambda p: crafted(p, {"a": [{"x" * 70_000: 1}]}), "has 70000 characters"),
    "nan": (lambda p: crafted(p, b'{"a": NaN}'), "number NaN"),
    "fraction": (lambda p: crafted(p, b'{"a": 1.5}'), "number 1.5"),
    "long_number": (lambda p: crafted(p, b'{"a": ' + b"9" * 5000 + b"}"), "not JSON"),
    "metadata": (lambda p: crafted(p, {"__metadata__": {"a": 1}}), "__metadata__ is not"),
    "metadata_list": (lambda p: crafted(p, {"__metadata__": []}), "__metadata__ is not"),
    "no_dtype": (
        lambda p: crafted(p, {"a": {"shape": [], "data_offsets": [0, 4]}}),
        "a: its entry in the header lacks",
    ),
    "dtype": (lambda p: crafted(p, {"a": entry("F31")}), "a: it has dtype 'F31', which the format does not have"),
    "f6": (lambda p: crafted(p, {"a": entry("F6_E2M3")}), "a: it has dtype 'F6_E2M3', which torch does not"),
    "negative": (lambda p: crafted(p, {"a": entry(shape=(-1,))}), "a: its shape .* is not a list"),
    "bool_size": (lambda p: crafted(p, {"a": entry(shape=(True,))}, b"1234"), "a: its shape .* is not a list"),
    "rank": (lambda p: crafted(p, {"a": entry(shape=(1,) * 65)}, b"1234"), "a: its shape .* is not a list"),
    "overflow": (
        lambda p: crafted(p, {"a": entry(shape=(2**40, 2**40, 0), offsets=(0, 0))}),
        "a: its shape .* has too many elements",
    ),
    "odd_f4": (lambda p: crafted(p, {"a": entry("F4", (3,), (0, 1))}, b"1"), "a: it is F4 with shape"),
    "nbytes": (lambda p: crafted(p, {"a": entry(shape=(2,))}, b"1234"), "a: its data_offsets span 4 bytes"),
    "backwards": (lambda p: crafted(p, {"a": entry(offsets=(4, 0))}, b"1234"), "a: its data_offsets span -4"),
    "offsets": (
        lambda p: crafted(p, {"a": entry(offsets=(0, 4, 8))}, b"1234"),
        "a: its data_offsets .* are not two byte offsets",
    ),
    "past_end": (lambda p: crafted(p, {"a": entry()}, b"123"), "cut short"),
    "left_over": (lambda p: crafted(p, {"a": entry()}, b"12345"), "no tensor covers"),
    "gap": (lambda p: crafted(p, {"a": entry(offsets=(4, 8))}, b"12345678"), "a: it begins at byte .* leaves a gap"),
    "overlap": (
        lambda p: crafted(p, {"a": entry(shape=(2,), offsets=(0, 8)), "b": entry(offsets=(4, 8))}, b"12345678"),
        "b: it begins at byte .* overlaps",
    ),
    "gap_before_the_last": (
        lambda p: crafted(p, {"a": entry(offsets=(8, 12)), "b": entry(offsets=(0, 4))}, b"123456789012"),
        "a: it begins at byte .* leaves a gap",
    ),
    "the_same_place": (
        lambda p: crafted(p, {"a": entry(), "b": entry(), "c": entry(offsets=(4, 8))}, b"12345678"),
        "b: it begins at byte .* overlaps",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_is_one_error_with_its_name(tmp_path, lie):
    make, what = LIES[lie]
    make(tmp_path / "bad.safetensors")
    with pytest.raises(tt.CheckpointError, match=what) as caught:
        TensorFile(tmp_path / "bad.safetensors")
    assert "bad.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tensors_may_be_listed_in_any_order(tmp_path):
    data = struct.pack("<4f", 1, 2, 3, 4)
    places = {"a": (8, 16), "none": (8, 8), "b": (4, 8), "c": (0, 4)}
    for order in itertools.permutations(places):
        listed = {key: entry(shape=((places[key][1] - places[key][0]) // 4,), offsets=places[key]) for key in order}
        with TensorFile(crafted(tmp_path / "x.safetensors", listed, data)) as file:
            assert list(file.header.tensors) == list(order)
            found = {key: file.read(key).tolist() for key in order}
        assert found == {"a": [3, 4], "none": [], "b": [2], "c": [1]}


def test_a_file_that_shrinks_while_it_is_open_is_an_error(tmp_path):
    write(tmp_path / "x", {"v": torch.ones(1000)})
    with TensorFile(tmp_path / "x") as file:
        os.truncate(tmp_path / "x", 500)
        with pytest.raises(tt.CheckpointError, match="x: v: the file is cut short: nothing follows byte 500"):
            file.read("v")


@pytest.mark.parametrize("suffix", [".safetensors", ".gguf", ".pt"])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_of_an_open_file_is_refused_and_does_not_close_it(tmp_path, suffix, copied):
    """The next file would get the number of the descriptor, and its bytes would be read in place of this one's."""
    for name, value in (("one", 1.0), ("two", 2.0)):
        path, state = tmp_path / f"{name}{suffix}", {"w": torch.full((3,), value)}
        if suffix == ".pt":
            torch.save(state, path)
        else:
            tt.save(state, path, format="gguf" if suffix == ".gguf" else "native")
    with tt.open(tmp_path / f"one{suffix}") as checkpoint:
        held = checkpoint.store.files[0] if copied is copy.copy else checkpoint
        with pytest.raises(TypeError, match="an open file cannot be copied or pickled. Open its path again"):
            copied(held)
        gc.collect()
        with tt.open(tmp_path / f"two{suffix}") as other:
            assert other["w"].tolist() == [2, 2, 2]
            assert checkpoint["w"].tolist() == [1, 1, 1]


def test_metadata_null_is_accepted_as_by_the_reference(tmp_path):
    with TensorFile(crafted(tmp_path / "x", {"__metadata__": None, "a": entry()}, b"1234")) as file:
        assert list(file.header.tensors) == ["a"]
