"""Values from another device are moved before they meet the values and scales of the Weight that takes them."""

import pytest
import torch

import torchtether as tt
from tests.catalog import COLUMNS, FEW, ROWS
from tests.fake_cuda import fake_cuda
from torchtether.weights import weight as weight_module
from torchtether.weights.ops import inplace


@pytest.fixture
def places(monkeypatch):
    """The devices of what a write compares with the Weight; fake tensors have no values to compare."""
    seen = []

    def same_bits(one, other):
        seen.append((one.device.type, other.device.type))
        return True

    def is_step(held, values):
        seen.append((held.device.type, values.device.type))
        return True

    for module in (inplace, weight_module):
        monkeypatch.setattr(module, "same_bits", same_bits)
    monkeypatch.setattr(inplace, "_is_step", is_step)
    return seen


@pytest.mark.parametrize("row", FEW, ids=[row.id for row in FEW])
@pytest.mark.parametrize("where", [("cuda", "cpu"), ("cpu", "cuda")], ids=str)
def test_values_are_moved_first(row, where, places):
    """Otherwise near values would not keep the scales, and rows that share a scale could not be compared with it."""
    with fake_cuda():
        held = tt.Weight.encode(torch.empty(ROWS, COLUMNS, device=where[0]), row.scheme)
        held.copy_(torch.empty(ROWS, COLUMNS, device=where[1]))
        held.copy_(torch.empty((), device=where[1]))
        assert set(places) <= {(where[0], where[0])}
        assert places or row.scheme.transparent


@pytest.mark.parametrize("scheme", [tt.nvfp4(), tt.fp8("tensor")], ids=str)
@pytest.mark.parametrize("is_plain", [True, False])
def test_shared_parts_of_rows_are_compared_on_one_device(scheme, is_plain, places):
    with fake_cuda():
        held, given = (
            tt.Weight.encode(torch.empty(ROWS, COLUMNS, device=device), scheme)[ROWS // 2 :]
            for device in ("cuda", "cpu")
        )
        held.copy_(given.dequantize() if is_plain else given)
        assert set(places) == {("cuda", "cuda")}
