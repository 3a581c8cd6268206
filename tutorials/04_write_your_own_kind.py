"""Write a quantized kind of your own: 3 bits, and powers of a base, in under 60 lines, and use them everywhere.

You will be able to say how values become codes and back, check that everything else can rely on it, load a checkpoint
in it, train an adapter on top, save it, and cut it into shards. Needs: torch. Takes: seconds.
"""

# %% A model, and its checkpoint.
import copy
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

import torchtether as tt
from torchtether.schemes import Part, Scheme


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(100, 64)
        self.mid = nn.Linear(64, 64)
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        return self.head(torch.relu(self.mid(self.emb(tokens))))


torch.manual_seed(0)
source = Model()
folder = Path(tempfile.mkdtemp())
tt.save(source, folder / "model.safetensors")
tokens = torch.arange(12).view(3, 4)


# %% What goes wrong without us, silently: a wrapper as the recipes have it, which dequantizes for most ops.
class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        plain = torch.utils._pytree.tree_map_only(cls, lambda w: w.codes * w.scale, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


stock = copy.deepcopy(source)
scale = stock.mid.weight.detach().abs().max() / 127
stock.mid.weight = nn.Parameter(Wrapper((stock.mid.weight / scale).round(), scale), requires_grad=False)
before = stock.mid(torch.ones(64))
stock.load_state_dict({**source.state_dict(), "mid.weight": torch.zeros(64, 64)})  # all keys match, no error
assert torch.equal(stock.mid(torch.ones(64)), before)  # and nothing was loaded
assert type(stock.mid.weight + 0) is type(stock.mid.weight.clone()) is torch.Tensor  # a clone is 8 times the size
report = tt.testing.check_tensor_subclass(
    lambda: Wrapper(torch.randint(-9, 9, (4, 8)).float(), torch.tensor(0.1)), values=lambda w: w.codes * w.scale
)
print(report)  # which laws of nn.Module, optimizers and checkpoints it breaks, and what a user loses
assert {"clone", "load-same", "load-plain", "share-memory"} <= {result.law for result in report.failed}


# %% The first kind: whole numbers from -3 to 3 times a scale per row. Eight codes in three bytes.
@dataclass(frozen=True)
class ThreeBits(Scheme):
    kind: ClassVar[str] = "three-bits"

    def layout(self, shape):
        if not shape or shape[-1] % 8:
            raise tt.SchemeError(f"three-bits packs 8 columns, got shape {shape}")
        lead, row = shape[:-1], shape[-1] * (torch.Size(shape[1:-1]).numel() if len(shape) > 1 else 0)
        return {
            "qdata": Part((*lead, shape[-1] // 8 * 3), torch.uint8, row or 0),
            "scale": Part((*lead, 1), torch.float32, row or 0),
        }

    def encode(self, values):
        self.check(tuple(values.shape))
        x = values.float()
        scale = x.abs().amax(-1, keepdim=True) / 3 if x.numel() else x.new_zeros((*x.shape[:-1], 1))
        if not x.is_meta and not scale.isfinite().all():
            raise tt.SchemeError("three-bits cannot hold values that are not finite")
        codes = (x / torch.where(scale > 0, scale, 1)).round().clamp(-3, 3).to(torch.int32) + 4
        bits = torch.arange(3, device=x.device, dtype=torch.int32)
        planes = (codes.view(*x.shape[:-1], x.shape[-1] // 8, 8, 1) >> bits) & 1  # (..., columns / 8, 8 codes, 3 bits)
        places = torch.arange(8, device=x.device, dtype=torch.int32).view(8, 1)
        return {"qdata": (planes << places).sum(-2).to(torch.uint8).flatten(-2), "scale": scale}

    def decode(self, parts, shape, dtype):
        planes = parts["qdata"].view(*shape[:-1], shape[-1] // 8, 1, 3).int()
        places = torch.arange(8, device=planes.device).view(8, 1)
        codes = (((planes >> places) & 1) << torch.arange(3, device=planes.device)).sum(-1)
        return ((codes - 4).view(shape) * parts["scale"]).to(dtype)

    def bound(self, parts, shape):
        return parts["scale"] * 0.501


# %% The second: sign and logarithm, 8 bits. Small weights keep their digits, whatever the largest is.
@dataclass(frozen=True)
class LogScale(Scheme):
    kind: ClassVar[str] = "log-scale"
    base: float = 1.125

    def layout(self, shape):
        row = torch.Size(shape[1:]).numel() if len(shape) > 0 else 0
        if not shape:
            raise tt.SchemeError("log-scale needs a dimension")
        return {"qdata": Part(tuple(shape), torch.int8, row), "scale": Part((1,), torch.float32, 0)}

    def encode(self, values):
        self.check(tuple(values.shape))
        x = values.float()
        scale = x.abs().amax().reshape(1) if x.numel() else x.new_zeros(1)
        if not x.is_meta and not scale.isfinite().all():
            raise tt.SchemeError("log-scale cannot hold values that are not finite")
        steps = torch.log(x.abs() / torch.where(scale > 0, scale, 1)) / torch.log(torch.tensor(self.base))
        codes = (127 + steps.round()).clamp_min(0)  # 127 is the largest, 0 is nothing
        return {"qdata": (codes * x.sign()).to(torch.int8), "scale": scale}

    def decode(self, parts, shape, dtype):
        codes = parts["qdata"].float()
        return (torch.pow(self.base, codes.abs() - 127) * codes.sign() * parts["scale"]).to(dtype)

    def bound(self, parts, shape):
        grown = self.decode(parts, shape, torch.float32).abs() * (self.base**0.5 - 1)
        return grown * 1.001 + parts["scale"] * self.base**-126


# %% Everything else here relies on what `check_scheme` checks. Run it while you write; it says what a user would lose.
for scheme in (ThreeBits(), LogScale()):
    print(tt.testing.check_scheme(scheme).check())
    make = lambda scheme=scheme: tt.Weight.encode(torch.randn(8, 64), scheme)  # noqa: E731
    tt.testing.check_tensor_subclass(make).check()

# %% Load into them, on the way in. Ties are quantized once.
with tt.on_meta():
    model = Model()
tt.load(model, folder / "model.safetensors", quantize={"mid.weight": LogScale(), "emb.weight": ThreeBits()})
print(model.emb.weight)
print(model.mid.weight)
assert model.head.weight is model.emb.weight
assert model.emb.weight.nbytes == 100 * (64 * 3 // 8 + 4)
assert (model.mid.weight.dequantize() - source.mid.weight).abs().max() < 0.01

# %% Train an adapter on top: gradients pass through the frozen weights.
model.requires_grad_(False)
down, up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
nn.init.zeros_(up.weight)
model.mid.register_forward_hook(lambda module, given, made: made + up(down(given[0])))
optimizer = torch.optim.AdamW([*down.parameters(), *up.parameters()], lr=0.01)
frozen = model.mid.weight.dequantize()
losses = []
for _ in range(20):
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 2
assert torch.equal(model.mid.weight.dequantize(), frozen)

# %% Save and open again: bit for bit, tied, and in the kind that the file names.
tt.save(model, folder / "small.safetensors")
with tt.open(folder / "small.safetensors") as checkpoint:
    assert isinstance(checkpoint.spec("mid.weight").scheme, LogScale)
    assert torch.equal(checkpoint["emb.weight"].dequantize(), model.emb.weight.dequantize())
    assert [tie.names for tie in checkpoint.ties] == [("emb.weight", "head.weight")]

# %% Shards are rows, cut without decoding: `span` in the layout says which bytes go with which row.
top, bottom = model.mid.weight.split(32)
assert top.parts["qdata"].data_ptr() == model.mid.weight.parts["qdata"].data_ptr()  # the same memory
assert torch.equal(torch.cat([top, bottom]).dequantize(), model.mid.weight.dequantize())

# %% Now break it: write `+ 3` for `+ 4` in ThreeBits.encode, run again, and read which laws break and what that loses.
