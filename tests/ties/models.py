"""Plain torch models with ties of every kind, as the patterns of real models have them."""

import torch
from torch import nn


def _bare(**tensors):
    model = nn.Module()
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            model.register_parameter(name, tensor)
        else:
            model.register_buffer(name, tensor)
    return model


def untied():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def two_way():
    model = nn.ModuleDict({"emb": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
    model["head"].weight = model["emb"].weight
    return model


def six_way():
    model = nn.ModuleDict({f"head{i}": nn.Linear(4, 6) for i in range(6)})
    for i in range(1, 6):
        model[f"head{i}"].weight = model["head0"].weight
        model[f"head{i}"].bias = model["head0"].bias
    return model


def shared_module():
    block = nn.Linear(4, 4)
    return nn.Sequential(block, nn.ReLU(), block)


def same_storage():
    weight = torch.randn(6, 4)
    return _bare(a=nn.Parameter(weight), b=nn.Parameter(weight.detach()))


def transposed():
    """A tied LoRA pair, as PEFT makes it."""
    weight = nn.Parameter(torch.randn(6, 4))
    return _bare(a=weight, b=nn.Parameter(weight.data.t()))


def fused():
    """A fused QKV matrix with its three slices."""
    qkv = nn.Parameter(torch.randn(12, 4))
    return _bare(qkv=qkv, q=nn.Parameter(qkv.data[:4]), k=nn.Parameter(qkv.data[4:8]), v=nn.Parameter(qkv.data[8:]))


def flat():
    """One flat parameter, every other one a view of it, and the parts of the flat one in order."""
    memory = torch.randn(20)
    return _bare(
        w=nn.Parameter(memory[:12].view(3, 4)),
        b=nn.Parameter(memory[12:16]),
        flat=nn.Parameter(memory),
        n=memory[16:18],
    )


def disjoint():
    """Slices of one storage that have no element in common, also where their bytes interleave."""
    rows, columns, even = torch.randn(6, 4), torch.randn(6, 4), torch.randn(8)
    return _bare(
        a=nn.Parameter(rows[:3]),
        b=nn.Parameter(rows[3:]),
        c=nn.Parameter(columns[:, :2]),
        d=nn.Parameter(columns[:, 2:]),
        e=nn.Parameter(even[::2]),
        f=nn.Parameter(even[1::2]),
    )


def overlapping():
    """Two slices that overlap, and no tensor that covers both."""
    memory = torch.randn(10)
    return _bare(a=nn.Parameter(memory[:6]), b=nn.Parameter(memory[3:9]))


def crossing():
    """Two strided slices whose bytes interleave, and which share one element."""
    memory = torch.randn(36)
    return _bare(a=nn.Parameter(memory[::6]), b=nn.Parameter(memory[4:30:4]))


def dtypes():
    memory = torch.randn(8)
    return _bare(a=nn.Parameter(memory), b=memory.view(torch.int32), c=memory.view(torch.bfloat16)[2:7])


def complex_real():
    memory = torch.randn(4, dtype=torch.complex64)
    return _bare(a=nn.Parameter(memory), b=torch.view_as_real(memory))


def buffers():
    """A buffer under two names, and a parameter that is also a (non-persistent) buffer."""
    model = nn.Module()
    model.register_buffer("a", torch.randn(3))
    model.register_buffer("b", model.a)
    model.p = nn.Parameter(torch.randn(3))
    model.register_buffer("cache", model.p.data, persistent=False)
    return model


def scalars():
    """A tie of rank 0; and empty tensors over one storage, which have no element to share."""
    scalar = torch.tensor(1.5)
    empty = torch.empty(0, 4)
    return _bare(a=nn.Parameter(scalar), b=scalar.detach(), e=nn.Parameter(empty), f=empty, g=empty[:, :2])


def reshaped():
    weight = nn.Parameter(torch.randn(6, 4))
    return _bare(a=nn.Parameter(weight.data.view(2, 12)), b=weight, c=nn.Parameter(weight.data.view(-1)))


MODELS = {
    untied: "",
    two_way: "emb.weight head.weight",
    six_way: " ".join(f"head{i}.weight" for i in range(6)) + "; " + " ".join(f"head{i}.bias" for i in range(6)),
    shared_module: "0.weight 2.weight; 0.bias 2.bias",
    same_storage: "a b",
    transposed: "a b",
    fused: "qkv q k v",
    flat: "flat w b n",
    disjoint: "",
    overlapping: "a b",
    crossing: "a b",
    dtypes: "a b c",
    complex_real: "a b",
    buffers: "p cache; a b",
    scalars: "a b",
    reshaped: "a b c",
}
"""Each model and its ties: names by group, the owner first."""
