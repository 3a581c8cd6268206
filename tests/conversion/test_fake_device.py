"""Conversions to a GPU that is not there: fake tensors say which device each tensor, part, grad and state is on."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import torchtether as tt
from tests.catalog import each_scheme

CUDA = torch.device("cuda:0")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(16, 64)
        self.mid = nn.Linear(64, 64)
        self.head = nn.Linear(64, 16, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("steps", torch.zeros(3))


def devices(model):
    found = set()
    for tensor in (*model.parameters(), *model.buffers()):
        parts = tensor.parts.values() if isinstance(tensor, tt.Weight) else (tensor,)
        found |= {tensor.device, *(part.device for part in parts)}
    return found


@each_scheme
@pytest.mark.parametrize("how", ["convert", "swapping"])
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
            assert dict(model.named_parameters(remove_duplicate=False)) == before or all(
                now is before[name] for name, now in model.named_parameters(remove_duplicate=False)
            )


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_grads_and_state_follow(optimizer):
    with FakeTensorMode():
        model = Net()
        held = optimizer(model.parameters(), lr=0.1, **({"momentum": 0.9} if optimizer is torch.optim.SGD else {}))
        model.head(model.mid(model.emb(torch.zeros(2, dtype=torch.int64)))).sum().backward()
        held.step()
        tt.convert(model, device=CUDA, optimizer=held)
        assert {p.grad.device for p in model.parameters()} == {CUDA}
        state = [value for p in model.parameters() for value in held.state[p].values() if torch.is_tensor(value)]
        assert {value.device for value in state if value.dim()} == {CUDA}
