"""optimum-quanto: codes of every kind from tensors made here, shapes that only the model knows, faults by name."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchtether as tt
from tests.formats.folders import fault, opened, write

BF16 = torch.bfloat16


def packed(groups, group_size, bits, dtype=BF16, seed=0):
    """Components of one weight by suffix, and its groups decoded: a product and a difference, each rounded."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (groups, group_size), generator=generator)
    scale, shift = (torch.randn(groups, 1, generator=generator).to(dtype) for _ in range(2))
    values = ((codes * scale.double()).to(dtype).double() - shift.double()).to(dtype)
    rows = -(-groups * bits // 8)
    words = torch.zeros(rows, group_size, dtype=torch.int64)
    for group in range(groups):
        words[group % rows] |= codes[group] << bits * (group // rows)
    return {"._data._data": words.to(torch.uint8), "._scale": scale, "._shift": shift}, values


def named(name, components):
    return {f"{name}{suffix}": tensor for suffix, tensor in components.items()}


def loaded(tensors, shape, **beside):
    """A bare Parameter of ``shape``, filled."""
    model = nn.Module()
    model.m = nn.Module()
    model.m.weight = nn.Parameter(torch.empty(shape, device="meta"))
    with opened(tensors, **beside) as checkpoint:
        tt.load(model, checkpoint.path, strict=False)
    return model.m.weight


@given(
    rows=st.integers(1, 9),
    per_row=st.integers(1, 3),
    group_size=st.sampled_from((32, 96, 128)),
    bits=st.sampled_from((2, 4)),
    dtype=st.sampled_from((BF16, torch.float16, torch.float32)),
    seed=st.integers(0, 2**31 - 1),
)
def test_packed_codes_take_the_shape_of_the_module(rows, per_row, group_size, bits, dtype, seed):
    components, values = packed(rows * per_row, group_size, bits, dtype, seed)
    qmap = {"m": {"weights": f"qint{bits}", "activations": "none"}}
    shape = (rows, per_row * group_size)
    weight = loaded(named("m.weight", components), shape, quanto_qmap=qmap)
    assert weight.dtype == dtype
    assert torch.equal(weight.dequantize(), values.reshape(shape))


def test_whole_rows_of_any_length():
    components, values = packed(5, 13, 4)
    assert torch.equal(loaded(named("m.weight", components), (5, 13)).dequantize(), values)


def test_without_a_model_it_has_the_rows_of_its_bias():
    components, values = packed(12, 32, 4)
    with opened({**named("m.weight", components), "m.bias": torch.ones(6)}) as checkpoint:
        assert torch.equal(checkpoint["m.weight"].dequantize(), values.view(6, 64))
    with opened(named("m.weight", components)) as checkpoint:
        assert torch.equal(checkpoint["m.weight"].dequantize(), values)


@pytest.mark.parametrize(("group_size", "shape"), [(32, (12, 33)), (32, (24, 16)), (32, (8, 48)), (13, (6, 26))])
def test_a_module_of_another_shape_is_a_fault(group_size, shape):
    """Another number of elements; rows that are not whole groups; groups that share bytes."""
    with pytest.raises(tt.LoadError, match=re.escape(f"has shape (12, {group_size}), the model has {shape}")):
        loaded(named("m.weight", packed(12, group_size, 4)[0]), shape)


def test_the_model_decides_once_for_tied_names(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(64, 6, bias=False, device="meta")
            self.b = nn.Linear(64, 6, bias=False, device="meta")
            self.b.weight = self.a.weight

    components, values = packed(12, 32, 4)
    write(tmp_path, {**named("a.weight", components), **named("b.weight", components)})
    model = Tied()
    tt.load(model, tmp_path)
    assert model.a.weight is model.b.weight
    assert torch.equal(model.b.weight.dequantize(), values.view(6, 64))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(6, 10), (6, 3, 2, 2)])
@pytest.mark.parametrize("per_row", [True, False])
def test_bytes(dtype, shape, per_row):
    generator = torch.Generator().manual_seed(0)
    codes = (torch.randn(shape, generator=generator) * 40).to(dtype)
    scale = torch.rand((6, *[1] * (len(shape) - 1)) if per_row else (), generator=generator).to(BF16)
    spare = {"m.input_scale": torch.ones(()), "m.output_scale": torch.ones(())}
    with opened({"m.weight._data": codes, "m.weight._scale": scale, **spare}) as checkpoint:
        assert checkpoint.format == "quanto"
        assert list(checkpoint) == ["m.weight"]
        assert torch.equal(checkpoint["m.weight"].dequantize(), (codes.float() * scale.float()).to(BF16))


INT4 = named("m.weight", packed(12, 32, 4)[0])
DATA, SCALE, SHIFT = "m.weight._data._data", "m.weight._scale", "m.weight._shift"
INT8 = {"m.weight._data": torch.ones(6, 10).char(), SCALE: torch.ones(6, 1)}


@pytest.mark.parametrize(
    ("tensors", "told", "said"),
    [
        ({DATA: INT4[DATA], SHIFT: INT4[SHIFT]}, "qint4", "m.weight: its _scale is absent"),
        ({DATA: INT4[DATA], SCALE: INT4[SCALE]}, "qint4", "m.weight: its _shift is absent"),
        ({SCALE: INT4[SCALE], SHIFT: INT4[SHIFT]}, "qint4", "m.weight: it has neither ._data nor ._data._data"),
        ({**INT4, **INT8}, "qint4", "m.weight: it has both"),
        ({**INT4, SCALE: INT4[SCALE].int()}, "qint4", "its _scale is torch.int32, not torch.float16 or"),
        ({**INT4, SHIFT: INT4[SHIFT].char()}, "qint4", "its shifts is torch.int8, not torch.bfloat16"),
        ({**INT4, SHIFT: INT4[SHIFT][:3]}, "qint4", r"its shifts has shape \(3, 1\), not \(12, 1\)"),
        ({**INT4, SCALE: INT4[SCALE].view(3, 4)}, "qint4", r"its scales has shape \(3, 4\), not \(12, 1\)"),
        ({**INT4, DATA: INT4[DATA].char()}, "qint4", "its codes are torch.int8 of shape"),
        ({**INT4, DATA: INT4[DATA].view(-1)}, "qint4", r"its codes are torch.uint8 of shape \(192,\)"),
        (INT4, "qint2", "its 6 rows of bytes are not 12 groups as qint2"),
        (INT4, "qint8", "its codes are packed, but the quantization map says qint8"),
        (INT4, ["qint4"], "its codes are packed, but the quantization map says"),
        (
            named("m.weight", packed(1, 32, 4)[0]),
            None,
            "its 1 rows of bytes are not 1 groups as exactly one of qint4 and qint2",
        ),
        (INT8, "qint4", "it is stored as torch.int8, but the quantization map says qint4"),
        ({**INT8, SHIFT: torch.ones(6, 1)}, "qint8", "it has a _shift, which 8-bit codes do not have"),
        ({**INT8, SCALE: torch.ones(5, 1)}, "qint8", r"its _scale has shape \(5, 1\), not \(6, 1\)"),
        (
            {**INT8, "m.weight._data": torch.ones(6, 10)},
            "qint8",
            "its codes are torch.float32, not torch.int8 or float8",
        ),
        ({**INT8, "m.weight._data": torch.tensor(1).char()}, "qint8", "its codes have no dimensions"),
    ],
)
def test_what_is_wrong(tensors, told, said):
    text = fault(tensors, config={"_quanto_qmap": {"m": {"weights": told}}})
    assert re.search(said, text), text


@pytest.mark.parametrize("qmap", [[], {"m": None}, {"m": "qint4"}, None])
def test_strange_maps_say_nothing(qmap):
    with opened(INT4, config={"_quanto_qmap": qmap}) as checkpoint:
        assert not checkpoint.faults
        assert checkpoint.format == "quanto"
