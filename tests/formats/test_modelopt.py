"""ModelOpt: each kind of weight from tensors made here, mixed models, extra keys; faults by name."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.formats.folders import fault, opened

E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = torch.float8_e4m3fn


def config(algorithm="NVFP4", **more):
    return {"dtype": "float32", "quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm, **more}}


def made(kind, lead=(), rows=6, columns=64, group=None, per_row=False, seed=0):
    """Tensors of one weight by suffix, and what they decode to in float32."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*lead, rows, columns)
    if kind == "FP8":
        codes = torch.randn(shape, generator=generator).to(E4M3)
        scale = torch.rand((*lead, rows) if per_row else (), generator=generator)
        return {"": codes, "_scale": scale}, codes.float() * (scale.unsqueeze(-1) if per_row else scale)
    group = group or (16 if kind == "NVFP4" else 32)
    if kind == "MXFP8":
        codes = torch.randn(shape, generator=generator).to(E4M3)
        tensors, elements = {"": codes}, codes.float()
    else:
        codes = torch.randint(0, 16, shape, generator=generator)
        tensors = {"": (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)}
        elements = E2M1[codes]
    counts = (*lead, rows, columns // group)
    if kind == "NVFP4":
        tensors["_scale"] = torch.rand(counts, generator=generator).to(E4M3)
        tensors["_scale_2"] = torch.rand((), generator=generator)
        wide = tensors["_scale"].float() * tensors["_scale_2"]
    else:
        exponents = torch.randint(120, 135, counts, generator=generator)
        tensors["_scale"] = exponents.to(torch.uint8)
        wide = torch.ldexp(torch.ones(counts), exponents - 127)
    return tensors, elements * wide.repeat_interleave(group, -1)


def named(name, tensors):
    return {f"{name}{suffix}": tensor for suffix, tensor in tensors.items()}


@given(
    kind=st.sampled_from(("FP8", "NVFP4", "MXFP8", "MXFP4")),
    lead=st.sampled_from(((), (3,))),
    rows=st.integers(2, 7),
    columns=st.sampled_from((32, 64, 96)),
    per_row=st.booleans(),
    seed=st.integers(0, 2**31 - 1),
)
def test_every_kind(kind, lead, rows, columns, per_row, seed):
    tensors, values = made(kind, lead, rows, columns, per_row=per_row, seed=seed)
    spare = {"m.input_scale": torch.tensor(1.0), "m.k_scale": torch.tensor(1.0)}
    algorithm = "W4A8_MXFP4_FP8" if kind == "MXFP4" else kind
    with opened({**named("m.weight", tensors), **spare}, config=config(algorithm)) as checkpoint:
        assert checkpoint.format == "modelopt"
        assert not checkpoint.faults
        assert list(checkpoint) == ["m.weight"]
        assert torch.equal(checkpoint["m.weight"].dequantize(), values)
        if not lead and kind != "FP8" and kind[:2] != "MX":
            assert torch.equal(checkpoint.get_slice("m.weight")[1:2].dequantize(), values[1:2])


def test_a_mixed_model_with_its_config_beside():
    layers = {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4", "group_size": 32}}
    hf = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "exclude_modules": ["c*"]}}
    a, b = made("FP8"), made("NVFP4", group=32)
    tensors = {**named("a.weight", a[0]), **named("b.weight", b[0]), "c.weight": torch.ones(2, 2)}
    with opened(tensors, hf_quant_config=hf, config={"dtype": "float32"}) as checkpoint:
        assert checkpoint.format == "modelopt"
        assert not checkpoint.faults
        assert torch.equal(checkpoint["a.weight"].dequantize(), a[1])
        assert torch.equal(checkpoint["b.weight"].dequantize(), b[1])
        assert type(checkpoint["c.weight"]) is torch.Tensor


def test_the_second_scale_multiplies_the_first_before_the_codes():
    """Which is what ModelOpt does; multiplied in another order, values differ in their last place."""
    tensors, values = made("NVFP4", rows=64, columns=256)
    other = (E2M1.new_tensor(1.0) * tensors["_scale"].float()).repeat_interleave(16, -1)
    low, high = tensors[""] & 15, tensors[""] >> 4
    elements = E2M1[torch.stack((low, high), -1).flatten(-2).int()]
    assert not torch.equal((elements * other) * tensors["_scale_2"], values)
    with opened(named("m.weight", tensors), config=config()) as checkpoint:
        assert torch.equal(checkpoint["m.weight"].dequantize(), values)


def nvfp4(**changes):
    tensors = {**named("m.weight", made("NVFP4")[0]), **changes}
    return {key: tensor for key, tensor in tensors.items() if tensor is not None}


SCALE, SECOND = "m.weight_scale", "m.weight_scale_2"
FP8 = named("m.weight", made("FP8")[0])


@pytest.mark.parametrize(
    ("tensors", "more", "said"),
    [
        (nvfp4(**{SCALE: None}), {}, r"m.weight: it is torch.uint8 and has no scale \(m.weight_scale\)"),
        (nvfp4(**{SECOND: None}), {}, r"requires a second scale \(m.weight_scale_2\)"),
        (nvfp4(**{"m.weight": None}), {}, "m.weight: it has a scale \\(m.weight_scale.*\\), but no codes"),
        (nvfp4(**{"m.weight": torch.ones(6, 32)}), {}, "but its codes are torch.float32"),
        (nvfp4(**{"m.weight": torch.ones(6, 32).char()}), {}, "but its codes are torch.int8"),
        (nvfp4(**{"m.weight": torch.ones(6).byte()}), {}, r"its codes have shape \(6,\), and at least 2 dimensions"),
        (nvfp4(**{SCALE: torch.ones(6, 4)}), {}, "its scale is torch.float32, not torch.float8_e4m3fn"),
        (nvfp4(**{SCALE: torch.ones(6, 2).to(E4M3)}), {}, r"its scale has shape \(6, 2\), not \(6, 4\)"),
        (nvfp4(**{SECOND: torch.ones(3)}), {}, r"its global_scale has shape \(3,\), not \(\)"),
        (nvfp4(**{SECOND: torch.ones(()).half()}), {}, "its global_scale is torch.float16, not torch.float32"),
        (
            nvfp4(**{SCALE: torch.ones(6, 2).byte()}),
            {"quant_algo": None},
            r"its tensors are MXFP4, which has no second scale",
        ),
        (nvfp4(), {"group_size": 24}, "its 64 columns are not a multiple of its group_size 24"),
        (nvfp4(), {"group_size": 32}, r"its scale has shape \(6, 4\), not \(6, 2\)"),
        (nvfp4(), {"group_size": "16"}, "its group_size is '16', not a positive integer"),
        (nvfp4(), {"group_size": -1}, "its group_size is -1"),
        (nvfp4(), {"quant_algo": "FP8"}, "its tensors are NVFP4, but its quant_algo is FP8"),
        (FP8, {}, "its tensors are FP8, but its quant_algo is NVFP4"),
        (
            {"m.weight": torch.ones(3, 64).byte(), SCALE: torch.ones(6, 2)},  # int4, two rows to a byte
            {"quant_algo": "W4A16_AWQ"},
            r"its quant_algo is W4A16_AWQ \(int4\), which is not supported",
        ),
        (
            {**FP8, SCALE: torch.ones(5)},
            {"quant_algo": "FP8"},
            r"its scale has shape \(5,\); codes of shape \(6, 64\) need one scale",
        ),
        ({**FP8, SCALE: torch.ones(6).int()}, {"quant_algo": "FP8"}, "its scale is torch.int32, not torch.float16 or"),
        ({"m.weight": FP8["m.weight"]}, {"quant_algo": "FP8"}, "it is torch.float8_e4m3fn and has no scale"),
        (nvfp4(**{"m.pre_quant_scale": torch.ones(64)}), {}, "its layer has a pre_quant_scale"),
    ],
)
def test_what_is_wrong(tensors, more, said):
    shared = config()
    shared["quantization_config"] |= more
    text = fault(tensors, config=shared)
    assert re.search(said, text), text


@pytest.mark.parametrize("layers", [None, [], "all", {"m": None}, {"m": "NVFP4"}, {"m": {"quant_algo": 4}}])
def test_strange_lists_of_layers_say_nothing(layers):
    tensors, values = made("NVFP4")
    with opened(named("m.weight", tensors), config=config("MIXED_PRECISION", quantized_layers=layers)) as checkpoint:
        assert torch.equal(checkpoint["m.weight"].dequantize(), values)
