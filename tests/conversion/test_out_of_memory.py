"""``torch.OutOfMemoryError`` at any copy: with ``atomic="full"`` everything is as it was."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchtether as tt
from tests.conversion.models import KINDS, rig, snapshot

aten = torch.ops.aten
kinds = pytest.mark.parametrize(
    "kind", ["plain", "tied_3", "view_slice", "view_transposed", "tied_buffers", "quantized", "batch_norm"]
)


class Full(TorchDispatchMode):
    """Memory that ends with the ``at``-th copy."""

    OPS = (aten._to_copy.default, aten.clone.default, aten.copy_.default)

    def __init__(self, at):
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op in self.OPS:
            self.count += 1
            if self.count - 1 == self.at:
                raise torch.OutOfMemoryError("injected")
        return op(*args, **kwargs or {})


def each_failure(run, model, optimizer=None, most=500):
    """``run`` fails at each of its copies in turn, and changes nothing; at last it succeeds. Returns their number."""
    before, ties = snapshot(model, optimizer), tt.find_ties(model)
    for at in range(most):
        mode = Full(at)
        try:
            with mode:
                run()
        except torch.OutOfMemoryError:
            assert snapshot(model, optimizer) == before, f"copy {at}"
            assert tt.find_ties(model) == ties
        else:
            assert mode.count == at
            return at
    raise AssertionError(f"more than {most} copies")


@kinds
def test_convert(kind):
    made = rig(KINDS[kind])
    run = partial(tt.convert, made.model, dtype=torch.float64, optimizer=made.optimizer, atomic="full")
    assert each_failure(run, made.model, made.optimizer) > 1
    made.step()


@kinds
def test_quantize_and_dequantize(kind):
    made = rig(KINDS[kind])
    matrices = {name: "int8" for name, p in made.model.named_parameters() if p.dim() == 2}
    if not matrices or kind in ("quantized", "view_slice"):
        pytest.skip("it has no plain matrix, or a slice of one")
    run = partial(tt.quantize, made.model, matrices, optimizer=made.optimizer, atomic="full")
    assert each_failure(run, made.model, made.optimizer) > 0
    run = partial(tt.dequantize, made.model, optimizer=made.optimizer, atomic="full")
    assert each_failure(run, made.model, made.optimizer) > 0


def test_refit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    tt.quantize(model, {"1.weight": "int8"})
    given = {"0.weight": torch.randn(16, 8), "0.bias": torch.randn(16), "1.weight": torch.randn(8, 16)}
    given["1.bias"] = torch.randn(8)
    assert each_failure(partial(tt.refit, model, given, atomic="full"), model) > 4
