"""Inputs rounded on the device have the bits that torch ops give there; e4m3 comes from an instruction of the GPU."""

import pytest
import torch

from tests.weights.rounding_cases import DTYPES, KINDS, numbers, same, with_torch_ops
from torchtether.gpu import encoding
from torchtether.weights.products import rounding


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounded_rows(kind, dtype, device):
    generator = torch.Generator().manual_seed(0)
    for columns in (33, 1000, 4096, 12288):
        x = numbers(generator, (16, columns), dtype).to(device)
        for call in (rounding.units_of, rounding.codes_of)[: 1 + (kind in rounding.ROWS)]:
            for got, expected in zip(call(x, kind), with_torch_ops(call, x, kind), strict=True):
                assert same(got, expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_number_becomes_the_float8_that_torch_makes_of_it(dtype, device, gpu):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x, largest = x[x.isfinite()].view(1, -1).to(device), torch.finfo(dtype).max
    codes = torch.empty(x.shape, dtype=dtype, device=device)
    assert encoding.encode_float8(x, x.shape[1], torch.ones(1, 1, device=device), codes, divides=True, largest=largest)
    assert torch.equal(codes.view(torch.uint8), x.float().clamp(-largest, largest).to(dtype).view(torch.uint8))
