"""Products and rows of Weights with a group index for each column, as GPTQ with ``act_order`` writes them."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import torchtether as tt
from tests.strategies import examples

GROUPINGS = {
    "neighbours": lambda columns, size: torch.arange(columns) // size,
    "shuffled": lambda columns, size: (torch.arange(columns) // size)[torch.randperm(columns)],
    "uneven": lambda columns, size: torch.randint(-(-columns // size), (columns,)),
    "one group": lambda columns, size: torch.zeros(columns, dtype=torch.int64),
}


def weight_of(scheme, rows, columns, grouping, dtype=torch.float32):
    g_idx = GROUPINGS[grouping](columns, scheme.block[1])
    weight = tt.Weight.encode(torch.randn(rows, columns), scheme)
    weight.set_parts(scheme.encode(torch.randn(rows, columns) + 0.25, g_idx=g_idx))
    return weight.to(dtype)


@st.composite
def cases(draw):
    bits = draw(st.integers(2, 8))
    scheme = tt.Affine(
        bits=bits,
        signed=draw(st.booleans()),
        symmetric=draw(st.booleans()),
        block=(draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([3, 8, 16, 32, 128]))),
        act_order=True,
        scale_dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
    )
    rows, columns = draw(st.integers(1, 10)) * scheme.block[0], draw(st.integers(1, 300))
    return scheme, rows, columns, draw(st.sampled_from([*GROUPINGS])), draw(st.integers(0, 2**31))


@given(cases(), st.integers(1, 9), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
@examples(60)
def test_a_product_is_that_of_the_values(case, count, dtype):
    *drawn, seed = case
    torch.manual_seed(seed)
    weight = weight_of(*drawn, dtype=dtype)
    scheme, shape = weight.scheme, tuple(weight.shape)
    x, bias = torch.randn(count, shape[1], dtype=dtype), torch.randn(shape[0], dtype=dtype)
    values = scheme.decode(weight.parts, shape, torch.float32).double()
    exact, most = F.linear(x.double(), values, bias.double()), F.linear(x.double().abs(), values.abs())
    with torch.no_grad():
        found = F.linear(x, weight, bias).double()
    # one rounding of the result, sums of float32 in any order; where torch multiplies, values are rounded first
    allowed = torch.finfo(dtype).eps * (exact.abs() + most + 1e-5) + 2.0**-18 * (most + bias.double().abs())
    assert ((found - exact).abs() <= allowed).all()


@given(cases(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_rows_are_decoded_to_the_same_bits(case, dtype):
    *drawn, seed = case
    torch.manual_seed(seed)
    weight = weight_of(*drawn, dtype=dtype)
    expected = weight.scheme.decode(weight.parts, tuple(weight.shape), dtype)
    assert torch.equal(weight.dequantize(), expected)
    index = torch.randint(weight.shape[0], (5,))
    assert torch.equal(F.embedding(index, weight), expected[index])
    eye = torch.eye(weight.shape[1], dtype=torch.float32)
    assert torch.equal(F.linear(eye, weight.to(torch.float32)), weight.to(torch.float32).dequantize().t())


@pytest.mark.parametrize("group", [-1, 8, 2**31 - 1])
def test_a_group_that_is_not_there_is_an_error(group):
    weight = weight_of(tt.Affine(4, block=(1, 16), act_order=True), 8, 128, "shuffled")
    weight.parts["g_idx"][5] = group
    with torch.no_grad(), pytest.raises((IndexError, RuntimeError), match="out of"):
        F.linear(torch.ones(2, 128), weight)


def test_groups_that_are_changed_in_place_are_those_of_the_next_product():
    weight = weight_of(tt.Affine(4, block=(1, 16), act_order=True), 8, 128, "neighbours")
    x = torch.randn(3, 128)
    with torch.no_grad():
        F.linear(x, weight)
        weight.parts["g_idx"].copy_(GROUPINGS["shuffled"](128, 16))
        expected = F.linear(x, weight.scheme.decode(weight.parts, (8, 128), torch.float32))
        assert torch.allclose(F.linear(x, weight), expected, rtol=1e-4, atol=1e-4)
