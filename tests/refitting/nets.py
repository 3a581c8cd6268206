"""A small model with ties and buffers of every kind, quantized or not, and the facts that a refit must not change."""

import torch
from torch import nn

import torchtether as tt

WIDTH = 64


class Net(nn.Module):
    """A tied embedding, a layer, a normalisation with running figures, and a buffer that no state dict has."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(48, WIDTH)
        self.mid = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 48, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("freq", torch.arange(4.0), persistent=False)

    def forward(self, tokens):
        return self.head(self.norm(torch.relu(self.mid(self.emb(tokens)))) * self.freq[1])


def build(seed, scheme=None):
    torch.default_generator.manual_seed(seed)
    model = Net().eval()
    with torch.no_grad():
        model.norm.running_mean.uniform_()
        model.norm.num_batches_tracked.fill_(seed)
    return model if scheme is None else tt.quantize(model, {"emb.weight": scheme, "mid.weight": scheme})


def tensors_of(model):
    """Return every plain tensor of the model by name, parts of Weights included; not copies."""
    found = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        for role, part in tensor.parts.items() if isinstance(tensor, tt.Weight) else [("", tensor.detach())]:
            found[f"{name} {role}"] = part
    return found


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def is_same(one, other):
    mine, theirs = tensors_of(one), tensors_of(other)
    return mine.keys() == theirs.keys() and all(torch.equal(bits(mine[key]), bits(theirs[key])) for key in mine)


def places(model):
    """Return what compiled graphs and optimizers hold of a model: ids of objects, and addresses of memory."""
    held = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    held |= {name: id(b) for name, b in model.named_buffers()}
    return held, {key: part.data_ptr() for key, part in tensors_of(model).items()}


def copied(model):
    return {key: part.clone() for key, part in tensors_of(model).items()}


def is_unchanged(model, before):
    return all(torch.equal(bits(part), bits(before[key])) for key, part in tensors_of(model).items())
