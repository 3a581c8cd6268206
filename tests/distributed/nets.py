"""A small tied model with every case of sharding, and the rows of it that a rank has."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torchtether as tt
from torchtether.geometry.shards import box_of, local_of
from torchtether.weights.ops.rows import cut_rows


class Tied(nn.Module):
    """Embedding tied to the head, rows that do not divide, two blocks, buffers of both kinds."""

    def __init__(self, vocab=101, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(2))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("freqs", torch.arange(width) / width, persistent=False)
        self.register_buffer("extra", torch.ones(3))

    def forward(self, x):
        h = self.emb(x) + self.freqs
        for block in self.body:
            h = h + torch.relu(block(h))
        return self.head(h) * self.extra[0]


def tokens():
    return torch.arange(12) * 7 % 101


def build(*, vocab=101, mesh=None, on_meta=True, quantize=None):
    """Return the model on ``meta``, sharded block by block."""
    if on_meta:
        with tt.on_meta():
            model = Tied(vocab)
    else:
        model = Tied(vocab)
    if quantize:
        tt.quantize(model, quantize)
    for block in model.body:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loaded(path, *, vocab=101, **options):
    """Return the model as one process loads it."""
    with tt.on_meta():
        model = Tied(vocab)
    tt.load(model, path, **options)
    return model


def step(model, optimizer):
    """Train one step; return its loss."""
    loss = nn.functional.cross_entropy(model(tokens()), tokens())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def rows_of(tensor, rank, world):
    """Return the rows that ``torch.chunk`` gives to ``rank``."""
    chunks = torch.chunk(tensor.detach(), world)
    return chunks[rank] if rank < len(chunks) else tensor.detach()[:0]


def same_rows(tensor, wanted):
    """Return whether ``tensor`` is this rank's shard of ``wanted``, bit for bit, scheme and parts included."""
    if not isinstance(tensor, DTensor):
        return _same(tensor, wanted)
    if tuple(tensor.shape) != tuple(wanted.shape) or tensor.dtype != wanted.dtype:
        return False
    box, local = box_of(tensor), local_of(tensor)
    if isinstance(wanted, tt.Weight):
        if not isinstance(local, tt.Weight) or local.scheme != wanted.scheme or local.tie != wanted.tie:
            return False
        rows = (
            cut_rows(wanted, *box[0])
            if not wanted.scheme.transparent
            else {"tensor": wanted.values_of()[slice(*box[0])]}
        )
        return all(torch.equal(_bits(part), _bits(local.parts[name])) for name, part in rows.items())
    return not isinstance(local, tt.Weight) and torch.equal(local, wanted[tuple(slice(*one) for one in box)])


def _same(tensor, wanted):
    if isinstance(tensor, tt.Weight) or isinstance(wanted, tt.Weight):
        return isinstance(tensor, tt.Weight) and all(
            torch.equal(_bits(part), _bits(wanted.parts[name])) for name, part in tensor.parts.items()
        )
    return tensor.dtype == wanted.dtype and torch.equal(tensor, wanted)


def _bits(part):
    return part.detach().contiguous().reshape(-1).view(torch.uint8)
