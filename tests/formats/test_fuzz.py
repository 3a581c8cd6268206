"""Quantized files with false contents: in config.json, in the header, in tensors that describe other tensors.

Every read returns tensors of the announced shapes, or raises one error of one line that names file and key. A failed
load leaves the model as it was.
"""

import json
import math
import struct
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchtether as tt
from tests.fuzzing.limits import little_memory
from tests.fuzzing.mutators import ODD as ODD_VALUES
from tests.strategies import examples
from torchtether.files.dtypes import DTYPES

GOLDEN = Path(__file__).parent.parent / "golden"


def _is_read(path):
    """Whether the format of this sample exists."""
    try:
        with tt.open(path / "model.safetensors") as checkpoint:
            return checkpoint.format != "safetensors"
    except tt.CheckpointError:
        return False


SAMPLES = sorted(path.parent.name for path in GOLDEN.glob("*/model.safetensors") if _is_read(path.parent))


class Sample:
    """A folder of tests/golden in memory: its config, its header, its bytes, and the shapes it decodes to."""

    def __init__(self, name):
        folder = GOLDEN / name
        data = (folder / "model.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        self.metadata = header.pop("__metadata__", {})
        self.tensors = {
            key: (what["dtype"], what["shape"], data[8 + length :][slice(*what["data_offsets"])])
            for key, what in header.items()
        }
        self.config = json.loads((folder / "config.json").read_text())
        self.beside = {path.name: path.read_text() for path in folder.glob("model.*.json")}
        self.shapes = {name: what["shape"] for name, what in json.loads((folder / "expected.json").read_text()).items()}

    def write(self, folder):
        """The files of it; a config that JSON has no words for is written as Python does, NaN and all."""
        header, at = ({"__metadata__": self.metadata} if self.metadata else {}), 0
        for key, (code, shape, data) in self.tensors.items():
            header[key] = {"dtype": code, "shape": shape, "data_offsets": [at, at + len(data)]}
            at += len(data)
        text = json.dumps(header).encode()
        whole = struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in self.tensors.values())
        (folder / "model.safetensors").write_bytes(whole)
        (folder / "config.json").write_text(json.dumps(self.config))
        for name, text in self.beside.items():
            (folder / name).write_text(text)

    def model(self):
        """A module with every tensor that it decodes to, under its name, on meta."""
        root = nn.Module()
        for name, shape in self.shapes.items():
            *path, leaf = name.split(".")
            module = root
            for step in path:
                if step not in dict(module.named_children()):
                    module.add_module(step, nn.Module())
                module = module.get_submodule(step)
            module.register_parameter(leaf, nn.Parameter(torch.empty(shape, device="meta")))
        return root


# -- the law ----------------------------------------------------------------------------------------------------------


def is_one_line(error):
    """Whether it is one that a person can act on: one line, which names a file or a tensor."""
    text = str(error)
    return "\n" not in text and ": " in text and len(text) < 20_000


def check(sample, folder):
    """Opens, reads and loads it; returns whether it was believed."""
    sample.write(folder)
    with little_memory():
        return _read(folder) + _load(sample, folder)


def _read(folder):
    try:
        checkpoint = tt.open(folder)
    except tt.CheckpointError as error:
        assert is_one_line(error), str(error)
        return 0
    with checkpoint:
        assert all("\n" not in what for what in checkpoint.faults.values())
        read = 0
        for name in (*checkpoint, *checkpoint.faults):
            try:
                tensor = checkpoint[name]
                assert name not in checkpoint.faults
                assert tuple(tensor.shape) == checkpoint.spec(name).shape
                if isinstance(tensor, tt.Weight):
                    tensor.dequantize()
                read += 1
            except tt.TetherError as error:
                assert is_one_line(error), str(error)
                assert name in str(error) or any(key in str(error) for key in checkpoint.store.header.tensors)
        return read


def _load(sample, folder):
    model = sample.model()
    before = dict(model.named_parameters())
    try:
        tt.load(model, folder, strict=False)
        for name, shape in sample.shapes.items():
            found = model.get_parameter(name)
            assert found is before[name]
            assert list(found.shape) == shape
        return 1
    except tt.TetherError as error:
        assert is_one_line(error), str(error)
        for name, parameter in before.items():
            assert model.get_parameter(name) is parameter
            assert type(parameter) is nn.Parameter
            assert parameter.is_meta
            assert list(parameter.shape) == sample.shapes[name]
        return 0


# -- mutations --------------------------------------------------------------------------------------------------------

ODD = st.sampled_from(ODD_VALUES)


def _paths(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _paths(inner, (*path, key))


def edited(value, path, draw):
    """``value`` with what is at ``path`` replaced by something odd, dropped, or put inside of something."""
    if path:
        made = dict(value) if isinstance(value, dict) else list(value)
        if len(path) == 1 and draw(st.integers(0, 3)) == 0:
            del made[path[0]]
        else:
            made[path[0]] = edited(made[path[0]], path[1:], draw)
        return made
    how = draw(st.integers(0, 9))
    return [value] if how == 0 else {"x": value} if how == 1 else str(value) if how == 2 else draw(ODD)


def change_config(sample, draw):
    """Any value of the config, or of what else stands beside; the whole of it may become no object at all."""
    for name, text in sample.beside.items():
        if draw(st.booleans()):
            content = json.loads(text)
            sample.beside[name] = json.dumps(edited(content, draw(st.sampled_from(list(_paths(content)))), draw))
            return
    sample.config = edited(sample.config, draw(st.sampled_from(list(_paths(sample.config)))), draw)


def change_metadata(sample, draw):
    """Any value of the JSON texts in the metadata of the file, or the text."""
    if not sample.metadata:
        return change_config(sample, draw)
    key = draw(st.sampled_from(sorted(sample.metadata)))
    try:
        record = json.loads(sample.metadata[key])
        made = json.dumps(edited(record, draw(st.sampled_from(list(_paths(record)))), draw))
    except ValueError:
        made = draw(st.sampled_from(["", "{}", "[]", "null", "{", '{"_type": 3}', "x" * 1000]))
    sample.metadata = {**sample.metadata, key: made}


def change_keys(sample, draw):
    """A tensor has another name, or none, or one more."""
    key = draw(st.sampled_from(sorted(sample.tensors)))
    other = draw(st.sampled_from(sorted(sample.tensors)))
    stem, _, last = key.rpartition(".")
    names = [
        f"{key}.{other.rpartition('.')[2]}",
        f"{stem}.{other.rpartition('.')[2]}",
        f"{key}_scale",
        last,
        f"x.{key}",
    ]
    how = draw(st.sampled_from(["drop", "rename", "copy", "swap"]))
    if how == "swap":
        sample.tensors[key], sample.tensors[other] = sample.tensors[other], sample.tensors[key]
        return
    name = draw(st.sampled_from(names))
    if how != "drop":
        sample.tensors[name] = sample.tensors[key]
    if how != "copy" and key != name:
        del sample.tensors[key]


def change_shape(sample, draw):
    """The same bytes in another shape or dtype, or fewer or more of them: what the header allows."""
    key = draw(st.sampled_from(sorted(sample.tensors)))
    code, shape, data = sample.tensors[key]
    item = DTYPES[code].itemsize
    count = len(data) // item
    how = draw(st.sampled_from(["dtype", "flat", "turned", "more", "fewer", "none", "deep", "scalar"]))
    if how == "dtype":
        fitting = sorted(one for one in DTYPES if len(data) % DTYPES[one].itemsize == 0 and one != "F4")
        code = draw(st.sampled_from(fitting))
        shape = [*shape[:-1], -1] if shape else [-1]
        rest = math.prod(shape[:-1]) * DTYPES[code].itemsize
        fits = rest and len(data) % rest == 0
        shape = [*shape[:-1], len(data) // rest] if fits else [len(data) // DTYPES[code].itemsize]
    elif how == "flat":
        shape = [count]
    elif how == "turned":
        shape = shape[::-1]
    elif how in ("more", "fewer"):
        row = math.prod(shape[1:]) * item
        shape = [max((shape or [1])[0] + (1 if how == "more" else -1), 0), *shape[1:]]
        data = (data + bytes(row))[: shape[0] * row]
    elif how == "none":
        shape, data = draw(st.sampled_from([[0], [0, *shape[1:]], [*shape, 0], [2**30, 0]])), b""
    elif how == "deep":
        shape = draw(st.sampled_from([[1, *shape], [*shape, 1], [1] * 60 + shape]))
    else:
        shape, data = [], data[:item] or bytes(item)
    sample.tensors[key] = code, shape, data


_ENDS = (0, 1, 0x7F, 0x80, 0xFF)


def change_bytes(sample, draw):
    """Bytes of one of the smaller tensors; where it is JSON, also what that says."""
    smaller = sorted(sample.tensors, key=lambda key: (len(sample.tensors[key][2]), key))
    key = draw(st.sampled_from(smaller[: max(1, len(smaller) * 3 // 4)]))
    code, shape, data = sample.tensors[key]
    if data[:1] == b"{" and draw(st.booleans()):
        record = json.loads(data)
        made = json.dumps(edited(record, draw(st.sampled_from(list(_paths(record)))), draw)).encode()
        sample.tensors[key] = code, [len(made)], made
        return
    item = DTYPES[code].itemsize
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        if changed:
            at = draw(st.integers(0, len(changed) // item - 1)) * item
            changed[at : at + item] = draw(
                st.one_of(
                    st.sampled_from([bytes([end]) * item for end in _ENDS]),
                    st.sampled_from([bytes(item - 1) + b"\x7f", bytes(item - 1) + b"\x40"]),
                    st.binary(min_size=item, max_size=item),
                )
            )
    sample.tensors[key] = code, shape, bytes(changed)


CHANGES = {
    "config": change_config,
    "metadata": change_metadata,
    "keys": change_keys,
    "shape": change_shape,
    "bytes": change_bytes,
}


def _fuzz(name, folder, draw):
    sample = Sample(name)
    for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
        CHANGES[draw(st.sampled_from(sorted(CHANGES)))](sample, draw)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(sample, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("name", SAMPLES)
def test_the_sample_itself_is_believed(name, folder):
    sample = Sample(name)
    assert check(sample, folder) > len(sample.shapes)


# -- what it has found ------------------------------------------------------------------------------------------------


def _faulty(name, folder):
    with tt.open(folder) as checkpoint:
        assert name not in checkpoint
        assert name not in list(checkpoint)
        with pytest.raises(tt.CheckpointError, match=f"{name}: "):
            checkpoint[name]
        return checkpoint.faults[name]


def test_codes_of_another_dtype_are_a_fault_and_no_plain_tensor(folder):
    sample = Sample("fp8_block128_f32scale")
    name = "self_attn.k_proj.weight"
    _, (rows, columns), data = sample.tensors[name]
    sample.tensors[name] = "BF16", [rows, columns // 2], data
    sample.write(folder)
    assert _faulty(name, folder) == f"it has a scale ({name}_scale_inv), but its codes are torch.bfloat16"


def test_codes_that_are_also_a_scale_are_a_fault_and_no_weight(folder):
    sample = Sample("fp8_block128_bf16scale")
    name = "self_attn.k_proj.weight"
    sample.tensors[f"{name}_scale"] = sample.tensors[name]
    sample.write(folder)
    assert f"it has a scale ({name}_scale)" in _faulty(name, folder)


def test_a_fault_is_one_line_whatever_the_file_says(folder):
    sample = Sample("torchao_fp8_row")
    name = "self_attn.k_proj.weight"
    sample.metadata[name] = json.dumps({**json.loads(sample.metadata[name]), "_type": "a\nb"})
    sample.write(folder)
    assert "its torchao type is 'a\\nb', not one of" in _faulty(name, folder)


def test_a_description_of_a_plain_tensor_that_cannot_be_is_a_fault(folder):
    sample = Sample("torchao_int8_row")
    sample.metadata["self_attn.q_proj.bias"] = '{"_type": null}'
    sample.write(folder)
    assert "not a list of names" in _faulty("self_attn.q_proj.bias", folder)


@pytest.mark.parametrize("odd", ODD_VALUES, ids=lambda odd: repr(odd)[:20])
@pytest.mark.parametrize(("sample", "ends"), [("bnb_nf4_dq_bf16", "bitsandbytes__nf4"), ("comfy_mixed", "comfy_quant")])
def test_every_field_of_json_in_a_tensor_may_be_anything(folder, sample, ends, odd):
    """Where a tensor holds a JSON text; also bytes that are no JSON, and JSON without an end."""
    given = Sample(sample)
    key = next(key for key in given.tensors if key.endswith(ends))
    code, _, data = given.tensors[key]
    record = json.loads(data)
    texts = [json.dumps({**record, field: odd}).encode() for field in record]
    for text in (*texts, json.dumps(odd).encode(), data[:-9], b"[" * 100_000):
        given.tensors[key] = code, [len(text)], text
        check(given, folder)


# -- any others -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
@examples(8)
@given(data=st.data())
def test_mutated_samples(name, folder, data):
    _fuzz(name, folder, data.draw)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
@given(data=st.data())
def test_much_mutated_samples(name, folder, data):
    _fuzz(name, folder, data.draw)
