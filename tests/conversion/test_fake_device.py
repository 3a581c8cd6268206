"""Conversions to an absent GPU: Weights of fake parts are converted, and report the device that they are on.

Plain fake tensors cannot be exchanged: they keep their device as an attribute of their own.
"""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import torchtether as tt
from tests.catalog import FEW, SCHEMES

CUDA = torch.device("cuda:0")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(16, 64)
        self.mid = nn.Linear(64, 64, bias=False)
        self.head = nn.Linear(64, 16, bias=False)
        self.head.weight = self.emb.weight


def devices(model):
    found = set()
    for weight in model.parameters():
        found |= {weight.device, *(part.device for part in weight.parts.values())}
    return found


EACH = [("convert", row) for row in SCHEMES] + [("swapping", row) for row in FEW]


@pytest.mark.parametrize(("how", "row"), EACH, ids=[f"{how}-{row.id}" for how, row in EACH])
def test_every_part_goes_there_and_back(row, how):
    real = tt.quantize(Net(), {"mid.weight": row.scheme, "emb.weight": row.scheme})
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = Net()
        for name in ("mid", "emb"):
            held = getattr(real, name).weight
            getattr(model, name).weight = nn.Parameter(held.detach().map(mode.from_tensor), False)
        model.head.weight = model.emb.weight
        before = dict(model.named_parameters(remove_duplicate=False))
        for place in (CUDA, torch.device("cpu")):
            if how == "convert":
                tt.convert(model, device=place)
            else:
                with tt.swapping(model):
                    model.to(place, non_blocking=True)
            assert devices(model) == {place}
            assert all(now is before[name] for name, now in model.named_parameters(remove_duplicate=False))
