"""Small models of every kind for conversions, and snapshots of everything that a conversion must not change."""

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import torchtether as tt


class Tagged(nn.Parameter):
    """A Parameter subclass, as vLLM and others have, whose constructor has other required arguments."""

    def __new__(cls, data, tag):
        made = torch.Tensor._make_subclass(cls, data, True)
        made.tag = tag
        return made


class Net(nn.Module):
    """Holds modules by name; ``run`` is the forward over them."""

    def __init__(self, run, **modules):
        super().__init__()
        self.run = run
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.run(self, x)


def chain(*names):
    def run(net, x):
        for name in names:
            x = getattr(net, name)(x)
            x = x[0] if isinstance(x, tuple) else x
        return x

    return run


def plain():
    return Net(chain("a", "b"), a=nn.Linear(4, 4), b=nn.Linear(4, 4))


def frozen():
    net = plain()
    net.a.weight.requires_grad_(False)
    net.b.bias.requires_grad_(False)
    return net


def tied(count):
    net = Net(chain(*(f"l{i}" for i in range(count))), **{f"l{i}": nn.Linear(4, 4) for i in range(count)})
    for i in range(1, count):
        getattr(net, f"l{i}").weight = net.l0.weight
    return net


def view_slice():
    net = Net(chain("a", "b"), a=nn.Linear(4, 6, bias=False), b=nn.Linear(4, 3))
    net.run = lambda net, x: net.b(x) + net.a(x)[..., :3]
    net.b.weight = nn.Parameter(net.a.weight.data[2:5])
    return net


def view_transposed():
    net = Net(chain("a", "b"), a=nn.Linear(4, 6), b=nn.Linear(6, 4))
    net.b.weight = nn.Parameter(net.a.weight.data.t())
    return net


def tied_buffers():
    net = Net(lambda net, x: net.b(net.a(x) * net.scale) + net.b.scale + net.piece.sum())
    net.a, net.b = nn.Linear(4, 4), nn.Linear(4, 4)
    net.register_buffer("scale", torch.rand(4))
    net.b.register_buffer("scale", net.scale)
    net.register_buffer("piece", net.scale[:2])
    net.register_buffer("count", torch.tensor(3))
    net.register_buffer("scratch", torch.rand(2), persistent=False)
    return net


def buffer_is_parameter():
    net = plain()
    net.register_buffer("first", net.a.weight)
    net.register_buffer("row", net.b.weight.data[0])
    return net


def shared_module():
    layer = nn.Linear(4, 4)
    return Net(chain("a", "b", "a"), a=layer, b=layer)


def parametrized():
    return Net(chain("a", "b"), a=parametrizations.weight_norm(nn.Linear(4, 4)), b=nn.Linear(4, 4))


def old_weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Net(chain("a", "b"), a=nn.utils.weight_norm(nn.Linear(4, 4)), b=nn.Linear(4, 4))


def old_spectral_norm():
    return Net(chain("a", "b"), a=nn.utils.spectral_norm(nn.Linear(4, 4)), b=nn.Linear(4, 4))


def pruned():
    net = plain()
    prune.l1_unstructured(net.a, "weight", amount=0.5)
    return net


def lstm():
    return Net(chain("a", "b"), a=nn.LSTM(4, 4, num_layers=2), b=nn.Linear(4, 4))


def gru():
    return Net(chain("a", "b"), a=nn.GRU(4, 4, bidirectional=True), b=nn.Linear(8, 4))


def batch_norm():
    return Net(chain("a", "b"), a=nn.Linear(4, 4), b=nn.BatchNorm1d(4))


def containers():
    net = Net(lambda net, x: x @ net.many[0] + net.many[1] + net.named["shift"])
    net.many = nn.ParameterList([torch.rand(4, 4), torch.rand(4)])
    net.named = nn.ParameterDict({"shift": torch.rand(4)})
    return net


def subclass():
    net = plain()
    net.a.weight = Tagged(net.a.weight.data, tag="first")
    net.b.bias = Tagged(net.b.bias.data, tag="last")
    return net


def quantized():
    """A frozen base with a trainable adapter, and a trainable transparent Weight."""
    net = Net(chain("a", "b", "c"), a=nn.Linear(32, 32), b=nn.Linear(32, 4), c=nn.Linear(4, 4))
    net.run = lambda net, x: net.c(net.b(net.a(torch.cat([x] * 8, -1))))
    net.a.weight = nn.Parameter(tt.Weight.encode(net.a.weight.data, tt.int8()), requires_grad=False)
    net.c.weight = nn.Parameter(tt.Weight.encode(net.c.weight.data, tt.Plain()))
    return net


KINDS = {
    kind.__name__: kind
    for kind in (
        plain, frozen, view_slice, view_transposed, tied_buffers, buffer_is_parameter, shared_module, parametrized,
        old_weight_norm, old_spectral_norm, pruned, lstm, gru, batch_norm, containers, subclass, quantized,
    )
}  # fmt: skip
KINDS |= {f"tied_{count}": lambda count=count: tied(count) for count in (2, 3, 6)}

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@dataclass
class Rig:
    """A model in training: its optimizer, its hooks, and a log of their calls."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    seen: list[tuple[str, str]]
    handles: list

    def step(self, update: bool = True) -> float:
        self.optimizer.zero_grad()
        first = next(p for p in self.model.parameters() if p.is_floating_point())
        x = torch.linspace(-1, 1, 12, device=first.device).view(3, 4).to(first.dtype)
        loss = self.model(x).square().mean()
        loss.backward()
        if update:
            self.optimizer.step()
        return loss.item()


def rig(kind: Callable[[], nn.Module], optimizer: str = "adamw", *, steps: int = 1) -> Rig:
    """Return an equal model, with equal optimizer state, grads, hooks and attributes, at every call."""
    torch.default_generator.manual_seed(0)
    made = Rig(kind(), None, [], [])
    made.optimizer = OPTIMIZERS[optimizer](made.model.parameters())
    for name, parameter in made.model.named_parameters():
        parameter.note = name
        if parameter.requires_grad:
            made.handles.append(parameter.register_hook(lambda grad, name=name: made.seen.append(("grad", name))))
            made.handles.append(
                parameter.register_post_accumulate_grad_hook(lambda p, name=name: made.seen.append(("post", name)))
            )
    for _ in range(steps):
        made.step()
    return made


def tensors_of(model):
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def bits(tensor):
    """Return the bytes of a tensor's values, so that NaNs compare; of a Weight, those of its parts."""
    if isinstance(tensor, tt.Weight):
        return tensor.spec, {name: bits(part) for name, part in tensor.parts.items()}
    if tensor.is_meta:
        return "meta", tuple(tensor.shape)
    flat = tensor.detach().contiguous().view(-1)
    return (
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b"",
    )


def snapshot(model, optimizer=None):
    """Return everything that a failed conversion must not change, comparable with ``==``."""
    shot = {}
    for name, tensor in tensors_of(model).items():
        grad = tensor.grad if tensor.is_leaf else None
        shot[name] = {
            "id": id(tensor),
            "type": type(tensor),
            "dtype": tensor.dtype,
            "device": tensor.device,
            "requires_grad": tensor.requires_grad,
            "values": bits(tensor),
            "memory": None if isinstance(tensor, tt.Weight) or tensor.is_meta else tensor.data_ptr(),
            "grad": None if grad is None else (id(grad), bits(grad)),
            "hooks": list((tensor._backward_hooks or {}).items()),
            "post": list((tensor._post_accumulate_grad_hooks or {}).items()),
            "attributes": attributes_of(tensor),
        }
    if optimizer is not None:
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                state = optimizer.state.get(parameter, {})
                shot[f"state {index}"] = (
                    id(parameter),
                    {k: (id(v), bits(v)) if isinstance(v, torch.Tensor) else v for k, v in state.items()},
                )
    shot["flag"] = torch.__future__.get_swap_module_params_on_conversion()
    return shot


def attributes_of(tensor):
    if isinstance(tensor, tt.Weight):
        return {**tensor._attributes(), "spec": tensor.spec, "cut": tensor._cut}
    return {k: v for k, v in tensor.__dict__.items() if not isinstance(v, torch.Tensor)}


def kept(model):
    """Return what a successful conversion must keep: id, class, requires_grad, hooks, attributes, presence of grads."""
    return {
        name: (
            id(tensor),
            type(tensor),
            tensor.requires_grad,
            id(tensor.grad) if tensor.is_leaf and tensor.grad is not None else None,
            list((tensor._backward_hooks or {}).items()),
            list((tensor._post_accumulate_grad_hooks or {}).items()),
            {k: v for k, v in tensor.__dict__.items() if k in ("note", "tag")},
        )
        for name, tensor in tensors_of(model).items()
    }


def watch(monkeypatch, wrap):
    """Wrap every conversion that ``convert`` does: ``wrap(call)`` replaces ``call(function, tensor, ...)``."""
    room = importlib.import_module("torchtether.conversion.converting")  # the package has a function of this name
    call, quick = wrap(lambda function, *arguments: function(*arguments)), room.methodcaller
    monkeypatch.setattr(room, "converted", partial(call, room.converted))
    monkeypatch.setattr(room, "methodcaller", lambda *asked: partial(call, quick(*asked)))
