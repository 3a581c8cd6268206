"""Codes and values are the same bits on the device as on the CPU, for every scheme."""

from contextlib import suppress

import pytest
import torch

import torchtether as tt
from tests.catalog import each_quantized, each_scheme
from tests.gpu.models import raw, same
from torchtether.testing.draws import cases

SHAPES = ((64,), (1, 64), (33, 64), (12, 70), (8, 256), (3, 16, 64))
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def fitting(scheme):
    for case in cases(SHAPES):
        try:
            scheme.layout(case.shape)
        except tt.SchemeError:
            continue
        yield case


def encoded(scheme, values):
    try:
        return scheme.encode(values)
    except tt.SchemeError as error:
        return str(error)


@each_scheme
def test_encode_and_decode(row, device):
    count = 0
    for case in fitting(row.scheme):
        values = case.values()
        here, there = encoded(row.scheme, values), encoded(row.scheme, values.to(device))
        if isinstance(here, str) or isinstance(there, str):
            assert here == there, str(case)
            continue
        for role, part in here.items():
            assert there[role].device == device
            assert part.dtype == there[role].dtype
            assert part.shape == there[role].shape
            assert torch.equal(raw(part), raw(there[role])), f"{role} of {case}"
        for dtype in FLOATS:
            one, other = (row.scheme.decode(parts, case.shape, dtype) for parts in (here, there))
            assert torch.equal(raw(one), raw(other)), f"{dtype} of {case}"
        count += 1
    assert count


@each_quantized
def test_what_cannot_be_encoded_is_told_alike(row, device):
    values = torch.randn(16, 64)
    values[3, 5] = torch.nan
    assert encoded(row.scheme, values) == encoded(row.scheme, values.to(device))


@each_quantized
def test_rows_gathered_and_written(row, device):
    values, index = torch.randn(16, 64), torch.tensor([3, 0, 15, 3])
    here = tt.Weight.encode(values, row.scheme)
    there = here.to(device)
    assert torch.equal(raw(here.index_select(0, index)), raw(there.index_select(0, index.to(device))))
    one, other = (torch.nn.functional.embedding(index.to(w.device), w) for w in (here, there))
    assert torch.equal(raw(one), raw(other))
    for weight in (here, there):
        weight.copy_((values * 2).to(weight.device))
    assert same(here, there)


@each_quantized
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_weight_goes_there_and_back(row, device, dtype):
    weight = tt.Weight.encode(torch.randn(16, 64), row.scheme).to(dtype)
    there = weight.to(device)
    assert there.device == device
    assert same(there.cpu(), weight)
    assert same(there.t().cpu().t(), weight)
    assert torch.equal(raw(there.dequantize()), raw(weight.dequantize()))


def test_a_large_tensor_is_encoded_as_on_the_cpu(device):
    values = torch.randn(2048, 4096).bfloat16()
    for scheme in (tt.int8(), tt.int4(), tt.nf4(), tt.fp8(), tt.mxfp4(), tt.nvfp4()):
        assert same(tt.Weight.encode(values, scheme), tt.Weight.encode(values.to(device), scheme).cpu()), str(scheme)


@each_quantized
def test_values_written_from_the_cpu(row, device):
    """Near values keep scales, and rows that share a scale are compared with it, wherever the values come from."""
    codes = []
    for source in (torch.device("cpu"), device):
        weight = tt.Weight.encode(torch.linspace(-1, 1, 1024, device=device).view(16, 64), row.scheme)
        weight.copy_((weight.dequantize() * 0.99).to(source))
        with suppress(tt.UnsupportedOpError):  # where the rows cut a block
            weight[8:].copy_(torch.zeros(8, 64, device=source))
        codes.append(weight)
    assert same(*codes)
