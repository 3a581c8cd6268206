"""Small models with ties of every kind, for tests of saving and loading."""

import torch
from torch import nn


class Tied(nn.Module):
    """An embedding whose weight is also the head's: one Parameter under two names."""

    def __init__(self, vocabulary=12, width=8):
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width)
        self.mid = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens):
        return self.head(self.norm(torch.relu(self.mid(self.emb(tokens)))))


class Turned(Tied):
    """Also a transposed view of the embedding, as PEFT makes."""

    def __init__(self):
        super().__init__()
        self.turned = nn.Parameter(self.emb.weight.detach().t())


class Fused(nn.Module):
    """A fused projection, and Parameters that are slices of it."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(6, 4))
        self.q = nn.Parameter(self.qkv.detach()[:2])
        self.kt = nn.Parameter(self.qkv.detach()[2:4].t())
        self.register_buffer("row", self.qkv.detach()[5])


class Slices(nn.Module):
    """Overlapping slices of memory that no Parameter covers whole, with a gap that belongs to nobody."""

    def __init__(self):
        super().__init__()
        whole = torch.randn(8, 4)
        self.a = nn.Parameter(whole[0:3])
        self.b = nn.Parameter(whole[2:5])
        self.c = nn.Parameter(whole[4:8, ::2])


class Storage(nn.Module):
    """Two Parameters and a buffer over one storage, a three-way object tie, and views of another dtype."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(3, 4))
        self.b = nn.Parameter(self.a.detach())
        self.register_buffer("c", self.a.detach())
        self.x = nn.Parameter(torch.randn(4))
        self.y = self.z = self.x
        self.register_buffer("bits", self.x.detach().view(torch.int32))


class Odd(nn.Module):
    """Strides, ranks, sizes and dtypes that are not the usual ones."""

    def __init__(self):
        super().__init__()
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.conv = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("complex", torch.randn(2, dtype=torch.complex64))
        self.register_buffer("codes", torch.arange(5, dtype=torch.uint8))
        self.register_buffer("f8", torch.randn(4).to(torch.float8_e4m3fn))
        self.register_buffer("wide", torch.arange(3).expand(2, 3))


MODELS = (Tied, Turned, Fused, Slices, Storage, Odd)


def build(kind, *, meta=False, seed=1, dtype=torch.float32):
    """A model of ``kind``; what ``torch.device("meta")`` does not catch is put there."""
    torch.default_generator.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta" if meta else "cpu"):
            return kind()
    finally:
        torch.set_default_dtype(before)


class Counted(nn.Linear):
    """Returns a tensor as extra state, and takes one."""

    calls = 0

    def get_extra_state(self):
        return torch.tensor(self.calls)

    def set_extra_state(self, state):
        self.calls = state.item()
