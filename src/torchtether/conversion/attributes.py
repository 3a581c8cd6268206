"""Tensors on ``meta`` that modules keep outside of their parameters and buffers: attributes, lists, hidden modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..ties.names import named_tensors
from ..torch_private.modules import buffers_of, parameters_of
from .programs import Recipe

ORIGIN = "_tether_origin"
"""The attribute of a module that stands in for another one, of which it shares the attributes: that other module."""

_OWN = frozenset(vars(nn.Module()))
"""The attributes of every module: registered tensors, modules and hooks."""

_CLOSED = (type, ModuleType, Recipe)
"""Classes of objects that are not searched."""

_SCALARS = frozenset((bool, int, float, str, type(None)))
"""Classes of most entries of long containers, such as vocabularies."""

_DEPTH = 4
"""The most containers inside each other that are searched, so that a reference to a whole program ends somewhere."""


class Unregistered(NamedTuple):
    """What a model holds and does not register.

    ``tensors``  its tensors on ``meta``, each once, by the path to it
    ``modules``  modules in lists and other attributes, by the path; not one that has the model itself inside
    """

    tensors: dict[str, Tensor]
    modules: dict[str, nn.Module]


def unregistered(model: nn.Module) -> Unregistered:
    """Return the tensors on ``meta`` and the modules that ``model`` holds and does not register."""
    found: dict[int, tuple[str, Tensor]] = {}
    seen: dict[int, int] = {}  # a config that all modules of a model share is searched once
    known: set[int] = set()
    own = {id(model), id(vars(model).get(ORIGIN, model))}
    modules: dict[str, nn.Module] = {}
    roots = [("", model)]
    for place, root in roots:  # which grows
        if id(root) in known or (root is not model and any(id(module) in own for module in root.modules())):
            continue
        for path, module in root.named_modules(prefix=place):
            known |= {id(module), id(vars(module).get(ORIGIN, module))}
            before = f"{path}." if path else ""
            registered = () if root is model else chain(parameters_of(module).items(), buffers_of(module).items())
            for name, value in chain(registered, _held_by(module, seen)):
                if isinstance(value, nn.Module):
                    roots.append((before + name, value))
                elif value is not None and value.is_meta and value.is_leaf:  # weight_norm computes others again
                    found.setdefault(id(value), (before + name, value))
            if root is not model:
                modules[path] = module
    for tensor in named_tensors(model).values() if found else ():
        found.pop(id(tensor), None)
    return Unregistered(dict(found.values()), modules)


def attributes_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor in attributes of ``module``, also in lists, tuples, dicts and plain objects, with its path."""
    return ((name, value) for name, value in _held_by(module, {}) if isinstance(value, Tensor))


def _held_by(module: nn.Module, seen: dict[int, int]) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """Yield the tensors and the modules in attributes of ``module``, also in containers, with the path to each.

    ``seen`` has the containers that were searched, by id, and how deep; only what was not as deep is searched again.
    """
    return _found_in([(name, value) for name, value in vars(module).items() if name not in _OWN], seen, _DEPTH)


def _found_in(
    values: Iterable[tuple[str, Any]], seen: dict[int, int], depth: int
) -> Iterator[tuple[str, Tensor | nn.Module]]:
    for name, value in values:
        if isinstance(value, (Tensor, nn.Module)):
            yield name, value
        elif depth > seen.get(id(value), 0) and not isinstance(value, _CLOSED):
            seen[id(value)] = depth
            yield from _found_in(_entries(name, value), seen, depth - 1)


def _entries(name: str, value: Any) -> list[tuple[str, Any]]:
    entries: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        form, entries = "{}[{!r}]", dict.items(value)  # a subclass may compute its items
    elif isinstance(value, (list, tuple)):
        form, entries = "{}[{}]", enumerate(value)
    else:
        form, entries = "{}.{}", getattr(value, "__dict__", {}).items()
    return [(form.format(name, key), entry) for key, entry in entries if type(entry) not in _SCALARS]
