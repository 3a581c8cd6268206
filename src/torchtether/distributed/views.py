"""Aliases that are views of a sharded parameter: properties that compute the view of the owner when they are read.

A rank has some rows of the owner.  A slice or a transpose of those is not a shard that FSDP2 could manage, so the
alias is not a parameter once the owner is sharded.  Its gradient flows into the owner's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import TieError
from ..geometry.views import Shape, View, contiguous_stride, extent
from ..ties.names import named_tensors
from ..torch_private.modules import set_transient, tables_of
from ..weights.spec import Tie
from ..weights.weight import Weight

_KEY = "_torchtether_views"
_MARK = "_torchtether_has_views"


@dataclass(frozen=True)
class ViewAlias:
    """Describe the tensor ``leaf`` of a module as a ``view`` of the parameter ``home_leaf`` of the module ``home``."""

    name: str
    leaf: str
    owner: str
    home: nn.Module
    home_leaf: str
    view: View
    detached: bool
    """Whether it was frozen, or a buffer, so that no gradient flows through it."""
    is_parameter: bool
    is_persistent: bool
    order: tuple[str, ...]
    """All names of the module's table that held it, in order."""

    def held(self) -> Tensor:
        """Return the owner in its current state: sharded, or gathered."""
        return tables_of(self.home).parameters[self.home_leaf]  # type: ignore[return-value]

    def now(self) -> Tensor:
        """Return the view of the owner in its current state. Raises TieError for a slice of a sharded owner."""
        held = self.held()
        steps = narrow_permute_of(tuple(held.shape), self.view)
        if isinstance(held, DTensor) and (steps is None or steps.box != tuple((0, size) for size in held.shape)):
            raise TieError(
                f"is a view (size {list(self.view.size)}) of {self.owner}, which is sharded now",
                name=self.name,
                fix=f"Use it in forward, or call unshard() before, or take the view of {self.owner}.full_tensor().",
            )
        made = viewed(held, self.view)
        return made.detach() if self.detached else made


# -- geometry ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NarrowPermute:
    """Hold a view as ``narrow`` in each dimension, then ``permute``; backward copies less than with ``as_strided``."""

    box: tuple[tuple[int, int], ...]
    order: tuple[int, ...]


@lru_cache(maxsize=4096)
def narrow_permute_of(shape: Shape, view: View) -> NarrowPermute | None:
    """Return ``view`` of a contiguous tensor of ``shape`` as ``NarrowPermute``; ``None`` if it is not of that form.

    >>> narrow_permute_of((6, 4), View(torch.float32, (4, 2), (1, 4), 8))
    NarrowPermute(box=((2, 4), (0, 4)), order=(1, 0))
    """
    if len(view.size) != len(shape) or 0 in shape:
        return None
    strides, left, starts = contiguous_stride(shape), view.offset, []
    for stride in strides:
        starts.append(left // stride)
        left %= stride
    order: list[int] = []
    for size, stride in zip(view.size, view.stride, strict=True):
        fits = [
            dim
            for dim, (step, whole, start) in enumerate(zip(strides, shape, starts, strict=True))
            if dim not in order and (step == stride or size == 1) and start + size <= whole
        ]
        if not fits:
            return None
        order.append(fits[0])
    sizes = {dim: size for dim, size in zip(order, view.size, strict=True)}
    return NarrowPermute(tuple((start, start + sizes[dim]) for dim, start in enumerate(starts)), tuple(order))


def viewed(held: Tensor, view: View) -> Tensor:
    """Return ``view`` of the contiguous tensor ``held``, in its dtype and over its memory; gradients flow through."""
    steps = narrow_permute_of(tuple(held.shape), view)
    if steps is None:
        return held.as_strided(view.size, view.stride, held.storage_offset() + view.offset)
    for dim, (start, stop) in enumerate(steps.box):
        if (start, stop) != (0, held.shape[dim]):
            held = held.narrow(dim, start, stop - start)
    return held if steps.order == tuple(range(held.dim())) else held.permute(steps.order)


# -- faults -----------------------------------------------------------------------------------------------------------


def view_faults(model: nn.Module, tie: Tie, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield a line for each view of ``tie`` that cannot follow its owner once that is sharded, with the reason."""
    owner = tensors[tie.owner]
    modules = dict(model.named_modules(remove_duplicate=False))
    views = {name: view for name, view in zip(tie.names, tie.views, strict=True) if view is not None}
    if not any(isinstance(tensors[name], nn.Parameter) for name in tie.names):
        return  # buffers are not sharded
    for name, view in views.items():
        alias, what = tensors[name], f"{name}: is a view (size {list(view.size)}) of {tie.owner}"
        end = view.offset + extent(view.size, view.stride)
        if not isinstance(owner, nn.Parameter):
            yield f"{what}, which is a buffer and not sharded. Make {tie.owner} the parameter, or call tt.untie."
        elif isinstance(owner, Weight) or isinstance(alias, Weight):
            yield f"{what}, which is quantized. Quantize neither, or tie the whole, or call tt.untie(model, {name!r})."
        elif isinstance(owner, DTensor) or isinstance(alias, DTensor):
            yield f"{what}, which is a DTensor already. Take the view in forward, or call tt.untie before that."
        elif view.offset < 0 or end > owner.numel() or view.dtype != owner.dtype:
            yield (
                f"{what} that reaches past its end, or has another dtype. Register a parameter that covers all of "
                f"{', '.join([tie.owner, *views])}, or call tt.untie(model, {name!r})."
            )
        elif isinstance(alias, nn.Parameter) and alias.requires_grad and not owner.requires_grad:
            yield f"{what}, which is frozen while the view is trained. Freeze both or neither, or call tt.untie."
        elif isinstance(modules[name.rpartition(".")[0]], nn.RNNBase):
            yield f"{what}, in a module that keeps a list of its weights. Call tt.untie(model, {name!r})."


# -- in place of parameters -------------------------------------------------------------------------------------------


def view_aliases(model: nn.Module, ties: Sequence[Tie]) -> list[tuple[nn.Module, ViewAlias]]:
    """Return every name of ``ties`` that is a view of a parameter, with its module."""
    modules, tensors = dict(model.named_modules(remove_duplicate=False)), named_tensors(model)
    found: dict[tuple[int, str], tuple[nn.Module, ViewAlias]] = {}
    for tie in ties:
        if not isinstance(tensors[tie.owner], nn.Parameter):
            continue
        home_path, _, home_leaf = tie.owner.rpartition(".")
        for name, view in zip(tie.names, tie.views, strict=True):
            if view is None:
                continue
            path, _, leaf = name.rpartition(".")
            module, tensor = modules[path], tensors[name]
            tables = tables_of(module)
            table = tables.parameters if leaf in tables.parameters else tables.buffers
            found[id(module), leaf] = (
                module,
                ViewAlias(
                    name=name,
                    leaf=leaf,
                    owner=tie.owner,
                    home=modules[home_path],
                    home_leaf=home_leaf,
                    view=view,
                    detached=not tensor.requires_grad,
                    is_parameter=table is tables.parameters,
                    is_persistent=leaf not in tables.transient,
                    order=tuple(table),
                ),
            )
    return list(found.values())


def replace_by_views(aliases: Sequence[tuple[nn.Module, ViewAlias]]) -> list[tuple[nn.Module, type[nn.Module], Any]]:
    """Replace the tensors ``aliases`` of the modules by views; return what ``restore_modules`` needs to undo it."""
    undo: list[tuple[nn.Module, type[nn.Module], Any]] = []
    for module, alias in aliases:
        tables = tables_of(module)
        undo.append((module, type(module), (dict(tables.parameters), dict(tables.buffers))))
        vars(module).setdefault(_KEY, {})[alias.leaf] = alias
        (tables.parameters if alias.is_parameter else tables.buffers).pop(alias.leaf)
        module.__class__ = _with_view(type(module), alias.leaf)  # type: ignore[arg-type]
    return undo


def restore_modules(undo: Sequence[tuple[nn.Module, type[nn.Module], Any]]) -> None:
    """Restore the modules as they were before ``replace_by_views``."""
    for module, kind, (parameters, buffers) in reversed(undo):
        module.__class__ = kind
        vars(module).pop(_KEY, None)
        tables = tables_of(module)
        for table, before in ((tables.parameters, parameters), (tables.buffers, buffers)):
            table.clear()
            table.update(before)


@lru_cache(maxsize=1024)
def _with_view(kind: type[nn.Module], leaf: str) -> type[nn.Module]:
    """Return a subclass of ``kind`` with a property ``leaf`` that computes the view."""

    def get(module: nn.Module) -> Tensor:
        alias = aliases_of(module).get(leaf)
        return alias.now() if alias is not None else nn.Module.__getattr__(module, leaf)  # type: ignore[return-value]

    def put(module: nn.Module, value: Any) -> None:
        alias = aliases_of(module).get(leaf)
        if alias is None:
            nn.Module.__setattr__(module, leaf, value)
            return
        fix = f"Write to {alias.owner}, or call tt.untie before sharding."
        raise TieError(f"is a view of {alias.owner} and cannot be set", name=alias.name, fix=fix)

    return type(kind.__name__, (kind,), {leaf: property(get, put), _MARK: True, "__module__": kind.__module__})


def aliases_of(module: nn.Module) -> Mapping[str, ViewAlias]:
    """Return the view aliases of ``module`` by leaf name."""
    return vars(module).get(_KEY) or {}


def has_views(kind: type) -> bool:
    """Return whether ``replace_by_views`` made the class."""
    return _MARK in vars(kind)


def register_views(model: nn.Module, twin: Mapping[int, nn.Module]) -> None:
    """Register the views on copies of ``model``'s modules, as tensors over the memory of the copied owner.

    ``twin`` maps the id of each module to its copy.
    """
    for module in model.modules():
        made = twin[id(module)]
        for leaf, alias in aliases_of(module).items():
            home = twin.get(id(alias.home))
            owner = tables_of(home).parameters[alias.home_leaf] if home is not None else None
            if owner is None:
                continue
            tensor = viewed(owner.detach(), alias.view)
            table: dict[str, Any] = tables_of(made).parameters if alias.is_parameter else tables_of(made).buffers
            if alias.is_parameter:
                table[leaf] = nn.Parameter(tensor, requires_grad=not alias.detached)
            else:
                table[leaf] = tensor
                set_transient(made, leaf, not alias.is_persistent)
            ordered = {name: table[name] for name in alias.order if name in table} | table
            table.clear()
            table.update(ordered)


def viewed_owners(model: nn.Module) -> set[int]:
    """Return the ids of the current tensors of all owners of views."""
    return {id(alias.held()) for module in model.modules() for alias in aliases_of(module).values()}


def spread(tensor: Tensor) -> Tensor:
    """Return an uninitialised contiguous tensor like ``tensor``, which views need; untouched CPU pages cost nothing."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
