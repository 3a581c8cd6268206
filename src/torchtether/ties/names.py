"""Every tensor of a model under every name that it has."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from .._checks import describe
from ..errors import ArgumentError, TieError
from ..geometry.blocks import STOCK
from ..torch_private.modules import buffers_of, parameters_of

Tensors = nn.Module | Mapping[str, Tensor]
"""A source of named tensors: a module, or a state dict of live tensors."""


def named_tensors(model: Tensors) -> dict[str, Tensor]:
    """Return every parameter, then every buffer, under each of its names, in module order.

    A mapping is returned sorted in the same way.
    """
    if isinstance(model, nn.Module):
        parameters: dict[str, Tensor] = {}
        buffers: dict[str, Tensor] = {}
        for path, module in model.named_modules(remove_duplicate=False):  # one walk for both saves time
            before = f"{path}." if path else ""
            for leaf, parameter in parameters_of(module).items():
                if parameter is not None:
                    parameters[before + leaf] = parameter
            for leaf, buffer in buffers_of(module).items():
                if buffer is not None:
                    buffers[before + leaf] = buffer
        return parameters | buffers
    if not isinstance(model, Mapping):
        fix = "Give a torch.nn.Module."
        raise ArgumentError(f"is {describe(model)}, not a module", name="model", fix=fix)
    for name, tensor in model.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ArgumentError(
                f"maps {name!r:.40} to {describe(tensor)}, not a name to a tensor",
                name="model",
                fix="Leave it out.",
            )
    return dict(sorted(model.items(), key=lambda item: not isinstance(item[1], nn.Parameter)))


_LONGEST = 300
"""The most characters of a name that is compared with others."""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the one of ``names`` that looks most like ``name``; empty if there are none.

    Long names are left out: the time grows with the square of their length, and a file may hold any.
    """
    if len(name) > _LONGEST:
        return ""
    short = [other for other in names if len(other) <= _LONGEST]
    return next(iter(difflib.get_close_matches(name, short, n=1, cutoff=0.0)), "")


def check_known(name: str, tensors: Iterable[str]) -> None:
    known = list(tensors)
    if name not in known:
        near = nearest(name, known)
        raise TieError("is not in the model", name=name, fix=f"The nearest name is {near!r}." if near else "")


def is_sharded(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor, of which this process holds a shard or a replica."""
    return type(tensor) not in STOCK and hasattr(tensor, "_local_tensor")
