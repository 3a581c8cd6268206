"""Tensors on ``meta`` that modules keep outside of their parameters and buffers: attributes, lists, caches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from ..ties.names import named_tensors
from .programs import Recipe

_OWN = frozenset(vars(nn.Module()))
"""The attributes of every module: registered tensors, modules and hooks."""

_CLOSED = (nn.Module, type, ModuleType, Recipe)
"""Classes of objects that are not searched."""

_SCALARS = frozenset((bool, int, float, str, type(None)))
"""Classes of most entries of long containers, such as vocabularies."""

_DEPTH = 4
"""The most containers inside each other that are searched, so that a reference to a whole program ends somewhere."""


def unregistered(model: nn.Module) -> dict[str, Tensor]:
    """Return each tensor on ``meta`` that ``model`` holds and does not register, once, by the path to it."""
    found: dict[int, tuple[str, Tensor]] = {}
    seen: dict[int, int] = {}  # a config that all modules of a model share is searched once
    for path, module in model.named_modules():
        for name, tensor in attributes_of(module, seen):
            if tensor.is_meta and tensor.is_leaf:  # others, as of weight_norm, are computed again from parameters
                found.setdefault(id(tensor), (f"{path}.{name}" if path else name, tensor))
    registered = {id(tensor) for tensor in named_tensors(model).values()} if found else set()
    return dict(entry for key, entry in found.items() if key not in registered)


def attributes_of(module: nn.Module, seen: dict[int, int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor in attributes of ``module``, also in lists, tuples, dicts and plain objects, with its path.

    ``seen`` has the containers that were searched, by id, and how deep; only what was not as deep is searched again.
    """
    values = [(name, value) for name, value in vars(module).items() if name not in _OWN]
    return _tensors_in(values, {} if seen is None else seen, _DEPTH)


def _tensors_in(values: Iterable[tuple[str, Any]], seen: dict[int, int], depth: int) -> Iterator[tuple[str, Tensor]]:
    for name, value in values:
        if isinstance(value, Tensor):
            yield name, value
        elif depth > seen.get(id(value), 0) and not isinstance(value, _CLOSED):
            seen[id(value)] = depth
            yield from _tensors_in(_entries(name, value), seen, depth - 1)


def _entries(name: str, value: Any) -> list[tuple[str, Any]]:
    entries: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        form, entries = "{}[{!r}]", dict.items(value)  # a subclass may compute its items
    elif isinstance(value, (list, tuple)):
        form, entries = "{}[{}]", enumerate(value)
    else:
        form, entries = "{}.{}", getattr(value, "__dict__", {}).items()
    return [(form.format(name, key), entry) for key, entry in entries if type(entry) not in _SCALARS]
