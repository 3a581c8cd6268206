"""Write quantization schemes of your own: 3 bits, and powers of a base, in a dozen lines each, and use them everywhere.

You will be able to define how values are encoded and decoded, check that a scheme keeps all laws, load a checkpoint in
it, train an adapter on top, save it, and shard it over two processes. Needs: torch. Takes: half a minute.
"""

# %% A model whose head is tied to its embedding.
import copy
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

import torchtether as tt


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(101, 64)
        self.mid = nn.Linear(64, 64)
        self.head = nn.Linear(64, 101, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        return self.head(torch.relu(self.mid(self.emb(tokens))))


TOKENS = torch.arange(12)


# %% What goes wrong without us, silently: a wrapper subclass as in PyTorch's tutorials, which dequantizes for most ops.
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


def without_us(source):
    stock = copy.deepcopy(source)
    scale = stock.mid.weight.detach().abs().max() / 127
    stock.mid.weight = nn.Parameter(Wrapper((stock.mid.weight / scale).round(), scale), requires_grad=False)
    before = stock.mid(torch.ones(64))
    stock.load_state_dict({**source.state_dict(), "mid.weight": torch.zeros(64, 64)})  # all keys match, no error
    assert torch.equal(stock.mid(torch.ones(64)), before)  # and nothing was loaded
    assert type(stock.mid.weight + 0) is type(stock.mid.weight.clone()) is torch.Tensor  # a clone is no Wrapper
    report = tt.testing.check_tensor_subclass(
        lambda: Wrapper(torch.randint(-9, 9, (4, 8)).float(), torch.tensor(0.1)), values=lambda w: w.codes * w.scale
    )
    print(report)  # which laws of nn.Module, optimizers and checkpoints it breaks, and what a user loses
    assert {"clone", "load-same", "load-plain", "share-memory"} <= {result.law for result in report.failed}


# %% The first scheme: integers from -3 to 4 times a scale, in blocks of 16 columns. Eight codes take three bytes.
# `tt.BlockScheme` does packing, blocks, dtypes and checks; a scheme defines the meaning of codes and numbers. Parts
# of other kinds need a `tt.Scheme`, whose `layout` gives a `tt.Part(shape, dtype, span)` for each (guides, extending).
@dataclass(frozen=True)
class ThreeBits(tt.BlockScheme):
    kind: ClassVar[str] = "three-bits"  # its name in files
    bits: int = 3
    block: tuple = (1, 16)  # rows and columns that share a scale

    def fit(self, x):
        return {"scale": x.abs().amax(-1) / 3}

    def to_codes(self, x, scale):
        return x / scale + 3

    def to_values(self, codes, scale):
        return (codes - 3) * scale

    def error(self, codes, scale):
        return scale / 2


# %% The second: sign and logarithm, 8 bits, a scale per row. Small weights stay precise beside large ones.
@dataclass(frozen=True)
class LogScale(tt.BlockScheme):
    kind: ClassVar[str] = "log-scale"
    base: float = 1.125

    def fit(self, x):
        return {"scale": x.abs().amax(-1)}

    def to_codes(self, x, scale):
        steps = torch.log(x.abs() / scale) / math.log(self.base)
        return 128 + x.sign() * (steps + 127).clamp_min(0)  # 1 and 255 are the largest values, 128 is zero

    def to_values(self, codes, scale):
        return (codes - 128).sign() * self.base ** ((codes - 128).abs() - 127) * scale

    def error(self, codes, scale):
        return self.to_values(codes, scale).abs() * (self.base**0.5 - 1) * 1.001 + scale * self.base**-126


# %% Other code relies on the laws that `check_scheme` checks. Run it while you write; it says what a user would lose.
def keeps_the_laws(scheme):
    print(tt.testing.check_scheme(scheme).check())
    tt.testing.check_tensor_subclass(lambda: tt.Weight.encode(torch.randn(8, 64), scheme)).check()


# %% Load a float checkpoint in these schemes. Tied tensors are encoded once.
def loaded(path, source):
    with tt.on_meta():
        model = Model()
    tt.load(model, path, quantize={"mid.weight": LogScale(), "emb.weight": ThreeBits()})
    print(model.emb.weight, model.mid.weight, sep="\n")
    assert model.head.weight is model.emb.weight
    assert model.emb.weight.nbytes == 101 * (64 * 3 // 8 + 4 * 4)  # codes, and 4 scales, per row
    assert (model.mid.weight.dequantize() - source.mid.weight).abs().max() < 0.01
    return model


# %% Train an adapter on top: gradients pass through the frozen weights.
def adapted(model):
    frozen = model.requires_grad_(False).mid.weight.dequantize()
    down, up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
    nn.init.zeros_(up.weight)
    hook = model.mid.register_forward_hook(lambda module, given, made: made + up(down(given[0])))
    optimizer = torch.optim.AdamW([*down.parameters(), *up.parameters()], lr=0.01)
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(model(TOKENS), TOKENS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    hook.remove()
    assert losses[-1] < losses[0] / 2
    assert torch.equal(model.mid.weight.dequantize(), frozen)


# %% Save and open again: bit for bit the same, tied, and in the scheme that the file names.
def saved(model, path):
    tt.save(model, path)
    with tt.open(path) as checkpoint:
        assert isinstance(checkpoint.spec("mid.weight").scheme, LogScale)
        assert torch.equal(checkpoint["emb.weight"].dequantize(), model.emb.weight.dequantize())
        assert [tie.names for tie in checkpoint.ties] == [("emb.weight", "head.weight")]


# %% Shard: FSDP2 on two processes, each reading its own rows of the codes, and the file they write is the same.
def sharded(rank, folder, wanted):
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    with tt.on_meta():
        model = Model()
    tt.distributed.shard(model, tt.distributed.plan_units(model, [nn.Linear]))
    tt.distributed.load(model, folder / "small.safetensors")
    own = model.emb.weight.to_local()
    assert isinstance(own.scheme, ThreeBits)
    assert own.shape[0] == (51, 50)[rank]
    assert model.head.weight is model.emb.weight
    torch.testing.assert_close(model(TOKENS), wanted)
    tt.distributed.save(model, folder / "again.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.manual_seed(0)
    source = Model()
    without_us(source)
    keeps_the_laws(ThreeBits())
    keeps_the_laws(LogScale())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tt.save(source, folder / "model.safetensors")
        model = loaded(folder / "model.safetensors", source)
        adapted(model)
        saved(model, folder / "small.safetensors")
        # not "spawn": tutorial 05 says why
        torch.multiprocessing.start_processes(sharded, (folder, model(TOKENS)), nprocs=2, start_method="forkserver")
        assert (folder / "again.safetensors").read_bytes() == (folder / "small.safetensors").read_bytes()

# %% Now break it: write `+ 2` for `+ 3` in ThreeBits.to_codes, run again, and read which laws break and what is lost.
