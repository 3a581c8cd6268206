"""Small models with every kind of tie, and the data of one training step for each."""

import torch
import torch.nn.functional as F
from torch import nn

import torchtether as tt

D = 16
BATCH = 12
"""Divides by 2, 3 and 4 ranks, so that the mean over ranks is the mean over the batch."""


class Block(nn.Module):
    def __init__(self, width=D):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, bias=0.0):
        return x + self.mlp(torch.tanh(self.attn(self.norm(x))) + bias)


class GPT(nn.Module):
    """Two names: embedding and head."""

    def __init__(self, vocabulary=24, layers=2, width=D):
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Stack(nn.Module):
    """A unit that owns a name of the embedding, as T5's encoder and decoder do."""

    def __init__(self, emb, layers=1):
        super().__init__()
        self.emb = emb
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, ids, memory=0.0):
        x = self.emb(ids) + memory
        for layer in self.layers:
            x = layer(x)
        return x


class T5(nn.Module):
    """Four names: one embedding module under three, and the head."""

    def __init__(self, vocabulary=24, shares_module=True):
        super().__init__()
        self.shared = nn.Embedding(vocabulary, D)
        make = (lambda: self.shared) if shares_module else (lambda: nn.Embedding(vocabulary, D))
        self.encoder, self.decoder = Stack(make()), Stack(make())
        self.head = nn.Linear(D, vocabulary, bias=False)
        for module in (self.encoder.emb, self.decoder.emb, self.head):
            module.weight = self.shared.weight

    def forward(self, ids):
        return self.head(self.decoder(ids, self.encoder(ids).mean(1, keepdim=True)))


class ALBERT(nn.Module):
    """One block under every layer's name."""

    def __init__(self, vocabulary=24):
        super().__init__()
        self.emb = nn.Embedding(vocabulary, D)
        block = Block()
        self.layers = nn.ModuleList([block, block, block])
        self.head = nn.Linear(D, vocabulary, bias=False)

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class CrossLayer(GPT):
    """Blocks of their own, whose attention weights are one parameter across layers."""

    def __init__(self, vocabulary=24):
        super().__init__(vocabulary, layers=4)
        for layer in self.layers[1:]:
            layer.attn.weight = self.layers[0].attn.weight
        self.layers[3].mlp[0].weight = self.layers[1].mlp[0].weight


class Biased(Block):
    """A block that owns a parameter itself."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(5, D) * 0.1)

    def forward(self, x):
        return super().forward(x, self.bias[: x.shape[1]])


class Owned(nn.Module):
    """A parameter that two blocks own, and one that a block and the root own."""

    def __init__(self, vocabulary=24):
        super().__init__()
        self.emb = nn.Embedding(vocabulary, D)
        self.layers = nn.ModuleList(Biased() for _ in range(4))
        self.layers[2].bias = self.layers[0].bias
        self.bias = self.layers[3].bias
        self.head = nn.Linear(D, vocabulary)

    def forward(self, ids):
        x = self.emb(ids) + self.bias[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Stand(nn.Module):
    """Multiplies with a buffer."""

    def __init__(self, tensor):
        super().__init__()
        self.register_buffer("table", tensor)

    def forward(self, x):
        return x @ self.table.t()


class ThreeWay(nn.Module):
    """Embedding, head, and a buffer inside a block: the same object, or a tensor over its memory."""

    def __init__(self, vocabulary=24, is_object=True):
        super().__init__()
        self.emb = nn.Embedding(vocabulary, D)
        self.layers = nn.ModuleList([Block(), Block()])
        self.layers[1].probe = Stand(self.emb.weight if is_object else self.emb.weight.detach())
        self.layers[1].register_forward_hook(lambda module, args, out: out + module.probe(out).mean(-1, keepdim=True))
        self.head = nn.Linear(D, vocabulary, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Functional(GPT):
    """The embedding is its own unit, and used outside of it."""

    def __init__(self, vocabulary=24):
        super().__init__(vocabulary)
        del self.head

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.emb.weight)


class Storage(GPT):
    """Two Parameter objects over one memory."""

    def __init__(self, vocabulary=24):
        super().__init__(vocabulary)
        self.head.weight = nn.Parameter(self.emb.weight.detach())


class Turned(GPT):
    """A head that holds the transpose of the embedding; with ``live`` it computes the transpose in forward."""

    def __init__(self, vocabulary=24, live=False):
        super().__init__(vocabulary)
        self.head = _Taken(self.emb) if live else _Product(self.emb.weight.detach().t())


class _Product(nn.Module):
    def __init__(self, values):
        super().__init__()
        self.weight = nn.Parameter(values)

    def forward(self, x):
        return x @ self.weight


class _Taken(nn.Module):
    def __init__(self, source):
        super().__init__()
        self.__dict__["source"] = source  # not a submodule

    def forward(self, x):
        return x @ self.source.weight.t()


class Fused(nn.Module):
    """Attention whose three weights are rows of one, which is used too, and a head over the first tokens."""

    def __init__(self, vocabulary=25, live=False):
        super().__init__()
        self.live = live
        self.emb = nn.Embedding(vocabulary, D)
        self.layers = nn.ModuleList(_FusedBlock(live) for _ in range(2))
        self.head = nn.Linear(D, vocabulary, bias=False)
        self.few = nn.Linear(D, 7, bias=False)
        self.register_buffer("probe", torch.zeros(3, 4))
        self.frozen = nn.Linear(D, 5, bias=False)
        if live:
            del self.few, self.probe, self.frozen
            return
        values = self.emb.weight.detach()
        self.few.weight = nn.Parameter(values[3:10])
        self.probe = values[2:5, 1:5]
        self.frozen.weight = nn.Parameter(values[:5], requires_grad=False)

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        weight = self.emb.weight
        few, probe, frozen = (
            (F.linear(x, weight[3:10]), weight[2:5, 1:5].detach(), F.linear(x, weight[:5].detach()))
            if self.live
            else (self.few(x), self.probe, self.frozen(x))
        )
        return self.head(x + few.mean(-1, keepdim=True)) * (1 + probe.mean()) + frozen.mean(-1, keepdim=True)


class _FusedBlock(nn.Module):
    def __init__(self, live):
        super().__init__()
        self.live = live
        self.qkv = nn.Linear(D, 3 * D)
        self.q, self.k, self.heads = (nn.Linear(D, D, bias=False) for _ in range(3))
        if live:
            del self.q, self.k, self.heads
            return
        values = self.qkv.weight.detach()
        self.q.weight = nn.Parameter(values[:D])
        self.k.weight = nn.Parameter(values[D : 2 * D])
        self.heads.weight = nn.Parameter(values[D : 2 * D].t())

    def forward(self, x):
        weight = self.qkv.weight
        q, k, h = (
            (F.linear(x, weight[:D]), F.linear(x, weight[D : 2 * D]), F.linear(x, weight[D : 2 * D].t()))
            if self.live
            else (self.q(x), self.k(x), self.heads(x))
        )
        return x + torch.tanh(self.qkv(x)).unflatten(-1, (3, D)).mean(-2) + torch.sigmoid(q) * k + h


class LoRA(nn.Module):
    """A frozen linear layer with a trainable low-rank adapter."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()


def lora(scheme, vocabulary=25, width=D, rules=None):
    """GPT with frozen quantized weights, tied embedding and head among them, and adapters in every block."""
    model = GPT(vocabulary, width=width)
    tt.quantize(model, rules or {"emb.weight": scheme, "*.attn.weight": scheme, "*.mlp.*.weight": scheme})
    model.requires_grad_(False)
    for layer in model.layers:
        layer.attn = LoRA(layer.attn)
        layer.mlp[2] = LoRA(layer.mlp[2])
    return model


def data(step, vocabulary=24):
    """Return the ids (BATCH, 5) of a step."""
    return torch.randint(0, vocabulary, (BATCH, 5), generator=torch.Generator().manual_seed(100 + step))


def loss_of(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())
