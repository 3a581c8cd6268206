"""A small model with ties, and comparisons for the tests of this folder."""

import torch
from torch import nn

import torchtether as tt

WORDS, D = 96, 64


class Net(nn.Module):
    """Frozen or trained; the head is tied to the embedding."""

    def __init__(self, width=D):
        super().__init__()
        self.emb = nn.Embedding(WORDS, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("steps", torch.arange(7))

    def forward(self, ids):
        x = self.emb(ids)
        return self.head(self.norm(x + self.down(torch.relu(self.up(x)))))


def net(seed=1, width=D, **kwargs):
    torch.manual_seed(seed)
    return Net(width).to(**kwargs)


def meta(width=D):
    with torch.device("meta"):
        return Net(width)


def plain_parts(tensor):
    """The plain tensors that hold ``tensor``, by role."""
    if not isinstance(tensor, tt.Weight):
        return {"": tensor.detach()}
    return {role: part.detach() for role, part in tensor.parts.items()}


def raw(tensor):
    """The bytes of the values of a tensor, on the CPU."""
    tensor = tensor.dequantize() if isinstance(tensor, tt.Weight) else tensor
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def same(one, other):
    """Whether two tensors have the same kind, dtype, shape and bits, wherever they are."""
    if type(one) is not type(other) or one.dtype != other.dtype or one.shape != other.shape:
        return False
    first, second = plain_parts(one), plain_parts(other)
    return first.keys() == second.keys() and all(
        p.dtype == q.dtype and p.shape == q.shape and torch.equal(raw(p), raw(q))
        for p, q in zip(first.values(), second.values(), strict=True)
    )


def tensors_of(model):
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers()])


def check_same(model, expected, device=None):
    """``model`` holds what ``expected`` holds, bit for bit, on ``device``, with its ties."""
    held, wanted = tensors_of(model), tensors_of(expected)
    assert held.keys() == wanted.keys()
    different = [name for name in held if not same(held[name], wanted[name])]
    assert not different
    if device is not None:
        assert {part.device for tensor in held.values() for part in plain_parts(tensor).values()} == {device}
    assert tt.find_ties(model) == tt.find_ties(expected)


def step(model, optimizer, device):
    """One step of training; its loss."""
    ids = torch.arange(8, device=device) % WORDS
    loss = nn.functional.cross_entropy(model(ids).float(), ids.roll(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
