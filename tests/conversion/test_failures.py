"""A quantization that fails at any parameter, under ``atomic="full"``, leaves everything bit for bit as it was."""

from functools import partial

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.catalog import FEW
from tests.conversion.models import snapshot

RULES = ("emb.weight", "mid.weight", "rnn.weight_ih_l0")
QUANTIZED = [row for row in FEW if not row.scheme.transparent]


class _Uneven(nn.Module):
    """A tied pair, an RNN, and sizes that no group or block divides."""

    def __init__(self, dtype):
        super().__init__()
        self.emb, self.mid = nn.Embedding(37, 19, dtype=dtype), nn.Linear(19, 19, dtype=dtype)
        self.rnn, self.head = nn.GRU(19, 19, dtype=dtype), nn.Linear(19, 37, bias=False, dtype=dtype)
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        return self.head(self.rnn(self.mid(self.emb(tokens)))[0])


def _trained(dtype):
    model = _Uneven(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.arange(15).view(5, 3)).float().square().sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("row", QUANTIZED, ids=lambda row: row.id)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("verb", ["quantize", "dequantize"])
def test_a_failure_at_each_parameter_changes_nothing(row, dtype, verb, monkeypatch):
    model, optimizer = _trained(dtype)
    rules = dict.fromkeys(RULES, row.scheme)
    if verb == "dequantize":
        tt.quantize(model, rules, optimizer=optimizer)
    given = (model, rules) if verb == "quantize" else (model,)
    run = partial(getattr(tt, verb), *given, optimizer=optimizer)
    owner, method = (type(row.scheme), "encode") if verb == "quantize" else (tt.Weight, "values_of")
    work = getattr(owner, method)
    for at in range(len(RULES)):
        calls = iter(range(100))

        def failing(self, *args, at=at, calls=calls, **kwargs):
            if next(calls) == at:
                raise MemoryError("injected")
            return work(self, *args, **kwargs)

        before = snapshot(model, optimizer)
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, failing)
            with pytest.raises(MemoryError, match="injected"):
                run(atomic="full")
        assert snapshot(model, optimizer) == before
    run()
    model(torch.arange(15).view(5, 3)).float().sum().backward()
    assert model.head.weight is model.emb.weight
    tt.check_optimizer(model, optimizer)
