"""HQQ: every packing that is read, from tensors made here; settings as tensors, and faults by name."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.formats.folders import fault, opened

BF16 = torch.bfloat16
PACKINGS = {8: "8bit_u8", 4: "4bit_u8", 2: "2bit_u8", 1: "1bit_u8"}
CONFIG = {"quantization_config": {"quant_method": "hqq"}}


def text(words):
    return torch.tensor([ord(letter) for letter in words], dtype=torch.uint8)


def flag(value):
    return torch.tensor(int(value), dtype=torch.uint8)


def made(rows, columns, group_size, bits, dtype=BF16, seed=0, as_float=False):
    """Tensors of one module, and what they decode to: a difference and a product, each rounded."""
    generator = torch.Generator().manual_seed(seed)
    groups, count = rows * columns // group_size, 8 // bits
    codes = torch.randint(0, 2**bits, (groups, group_size), generator=generator)
    scale, zero = (torch.randn(groups, 1, generator=generator).mul(3).to(dtype) for _ in range(2))
    values = ((codes - zero.double()).to(dtype).double() * scale.double()).to(dtype)
    steps = groups // count
    words = torch.zeros(steps, group_size, dtype=torch.int64)
    for group in range(groups):
        words[group % steps] |= codes[group] << bits * (count - 1 - group // steps)
    words = words.to(torch.uint8)
    tensors = {
        "W_q": words.view(dtype) if as_float else words,
        "scale": scale,
        "zero": zero,
        "shape": torch.tensor([rows, columns]),
        "nbits": torch.tensor(bits, dtype=torch.int32),
        "axis": torch.tensor(1, dtype=torch.int32),
        "group_size": torch.tensor(group_size, dtype=torch.int32),
        "packing": text(PACKINGS[bits]),
        "compute_dtype": text(str(dtype)),
        "view_as_float": flag(as_float),
        "quant_scale": flag(False),
        "quant_zero": flag(False),
        "stores_quant_config": flag(True),
    }
    return {f"m.{key}": tensor for key, tensor in tensors.items()}, values.view(rows, columns)


@given(
    rows=st.sampled_from((8, 16, 24)),
    per_row=st.integers(1, 3),
    group_size=st.sampled_from((8, 20, 64)),
    bits=st.sampled_from(list(PACKINGS)),
    dtype=st.sampled_from((BF16, torch.float16, torch.float32)),
    as_float=st.booleans(),
    seed=st.integers(0, 2**31 - 1),
)
def test_every_packing(rows, per_row, group_size, bits, dtype, as_float, seed):
    per_row = 1 if group_size * bits % 8 else per_row
    tensors, values = made(rows, per_row * group_size, group_size, bits, dtype, seed, as_float)
    with opened({**tensors, "m.bias": torch.ones(rows)}, config=CONFIG) as checkpoint:
        assert checkpoint.format == "hqq"
        assert not checkpoint.faults
        assert list(checkpoint) == ["m.bias", "m.weight"]
        weight = checkpoint["m.weight"]
        assert weight.dtype == dtype
        assert torch.equal(weight.dequantize(), values)


GOOD = made(6, 64, 32, 4)[0]


def changed(**tensors):
    both = {**GOOD, **{f"m.{key}": tensor for key, tensor in tensors.items()}}
    return {key: tensor for key, tensor in both.items() if tensor is not None}


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (changed(scale=None), "m.weight: its scale is absent"),
        (changed(scale=None, zero=None, zero_scale=torch.ones(2, 12, 1)), "a combined zero_scale is not supported"),
        (changed(shape=None), "its shape is absent"),
        (changed(W_q=None), "it has settings, but no W_q"),
        (changed(axis=torch.tensor(0)), r"its axis is 0, and only groups of columns \(axis 1\) are supported"),
        (changed(axis=torch.tensor([1, 1])), r"its setting m.axis has shape \(2,\), not one number"),
        (changed(axis=torch.tensor(1.0)), "its setting m.axis is torch.float32, not integers"),
        (changed(packing=text("3bit_32")), "its packing is '3bit_32', not one of 8bit_u8"),
        (changed(packing=torch.zeros(1000).byte()), "its setting m.packing takes 1000 bytes"),
        (changed(compute_dtype=text("__import__('os')")), r"its compute_dtype is \"__import__\('os'\)\""),
        (changed(quant_zero=flag(True)), "its quant_zero is set"),
        (
            changed(group_size=torch.tensor(48)),
            r"its group_size is 48, which does not divide the columns of shape \(6, 64\)",
        ),
        (changed(group_size=torch.tensor(0)), "its group_size is 0, which does not divide"),
        (changed(group_size=torch.tensor(-32)), "its group_size is -32, which does not divide"),
        (
            changed(shape=torch.tensor([6, 66]), group_size=torch.tensor(33)),
            "its group_size is 33, but groups of 4-bit codes must fill",
        ),
        (changed(shape=torch.tensor([6])), r"its shape is \(6,\), not two positive integers"),
        (changed(shape=torch.tensor([-6, -64])), r"its shape is \(-6, -64\)"),
        (changed(shape=torch.tensor([5, 96])), r"it has 15 groups, but codes of 4 bits require a multiple of 2"),
        (
            changed(shape=torch.tensor([8, 64])),
            r"its W_q is torch.uint8 of shape \(6, 32\), but shape \(8, 64\) in 4bit_u8",
        ),
        (changed(W_q=GOOD["m.W_q"].char()), "its W_q is torch.int8"),
        (changed(view_as_float=flag(True)), "needs torch.bfloat16 of 192 bytes"),
        (changed(scale=torch.ones(12, 1)), "its scales is torch.float32, not torch.bfloat16"),
        (changed(zero=torch.ones(11, 1).bfloat16()), r"its zeros has shape \(11, 1\), not \(12, 1\)"),
    ],
)
def test_what_is_wrong(tensors, said):
    got = fault(tensors, config=CONFIG)
    assert re.search(said, got), got
