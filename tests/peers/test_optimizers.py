"""8-bit optimizers of torchao and bitsandbytes on trainable Weights and on adapters."""

import warnings

import pytest
import torch
from torch import nn

import torchtether as tt

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    bnb = pytest.importorskip("bitsandbytes")
    ao = pytest.importorskip("torchao.optim")

MAKES = {
    "torchao-8": lambda p: ao.AdamW8bit(p, lr=1e-3),
    "torchao-4": lambda p: ao.AdamW4bit(p, lr=1e-3),
    "torchao-fp8": lambda p: ao.AdamWFp8(p, lr=1e-3),
    "bitsandbytes-adamw": lambda p: bnb.optim.AdamW8bit(p, lr=1e-3),
    "bitsandbytes-lion": lambda p: bnb.optim.Lion8bit(p, lr=1e-3),
    "bitsandbytes-32": lambda p: bnb.optim.AdamW32bit(p, lr=1e-3),
}
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


class Adapted(nn.Module):
    """A frozen int8 layer with an adapter of rank 32."""

    def __init__(self):
        super().__init__()
        self.base = tt.quantize(nn.Linear(256, 256), "int8").requires_grad_(False)
        self.down, self.up = nn.Linear(256, 32, bias=False), nn.Linear(32, 256, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def _nets(writes_in_place):
    yield Adapted()
    if not writes_in_place:  # torchao reads a parameter, and copies what it computed back: rounded to the nearest
        return
    trained = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    yield tt.quantize(trained, "int8")
    mastered = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    yield tt.quantize(mastered, "nf4", master=torch.float32)


def _train(net, optimizer, steps, dtype=torch.float32):
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    losses = []
    for _ in range(steps):
        loss = net(x).float().square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


@pytest.mark.parametrize("name", MAKES)
def test_what_they_step_learns_converts_and_resumes(name):
    """torchao compiles each of its steps, which takes a minute; the first stands for the others."""
    with torch.compiler.set_stance("force_eager" if name in ("torchao-4", "torchao-fp8") else "default"):
        _check_optimizer(MAKES[name], name)


def _check_optimizer(make, name):
    for net in _nets(name.startswith("bitsandbytes")):
        optimizer = make([p for p in net.parameters() if p.requires_grad])
        held = [p for p in net.parameters() if p.requires_grad]
        losses = _train(net, optimizer, 16)
        assert losses[-1] < 0.9 * losses[0]
        tt.check_optimizer(net, optimizer)

        optimizer.load_state_dict(optimizer.state_dict())
        assert _train(net, optimizer, 2)[0] < losses[-1] * 1.1

        scales = {k: v.dtype for k, v in optimizer.state[held[0]].items() if k.startswith(("absmax", "qmap"))}
        tt.convert(net, dtype=torch.bfloat16, optimizer=optimizer)
        assert all(a is b for a, b in zip(held, (p for p in net.parameters() if p.requires_grad), strict=True))
        assert {k: v.dtype for k, v in optimizer.state[held[0]].items() if k in scales} == scales
        assert _train(net, optimizer, 2, torch.bfloat16)[-1] < losses[-1] * 1.1
