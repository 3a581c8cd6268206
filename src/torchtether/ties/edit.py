"""Make a tie, and undo one."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._checks import as_module, check_flag, check_name, describe
from ..errors import ArgumentError, TieError
from ..torch_private.fsdp2 import fsdp2_states
from ..torch_private.modules import buffers_of, parameters_of
from .components import find_components
from .names import check_known, is_sharded, named_tensors
from .records import forget_ties, how_to_tie, record_ties


def tie(model: nn.Module, owner: str, alias: str, *, transpose: bool = False, rows: slice | None = None) -> None:
    """Make ``alias`` the object that ``owner`` names, or with ``transpose`` or ``rows`` a view over its memory.

    The old values of ``alias`` are lost.  An optimizer that was built before still holds the old parameter: tie first.
    The tie records of the Weights concerned are updated.

    Raises:
        TieError: there is no such name, shape, dtype or device differ, or a parameter would become a buffer.

    >>> import torch, torchtether as tt
    >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 2), torch.nn.Linear(2, 5, bias=False))
    >>> tt.tie(model, "0.weight", "1.weight"); model[0].weight is model[1].weight
    True
    """
    model = as_module(model)
    check_flag(transpose, "transpose")
    if rows is not None and not isinstance(rows, slice):
        raise ArgumentError(f"is {describe(rows)}, not a slice", name="rows", fix="Give slice(start, stop).")
    check_name(owner, "owner")
    check_name(alias, "alias")
    tensors = named_tensors(model)
    for name in (owner, alias):
        check_known(name, tensors)
        _check_changeable(model, name, tensors[name])
    held, given = tensors[alias], tensors[owner]
    if owner == alias:
        return
    if held is given and not transpose and rows is None:
        record_ties(model, (owner, alias))  # a module around this one, or cut from it, has other names
        return
    if isinstance(held, nn.Parameter) and not isinstance(given, nn.Parameter):
        raise TieError(f"is a parameter, {owner} is a buffer", name=alias, fix=how_to_tie(alias, owner))
    made = given
    if transpose or rows is not None:
        view = _view_for(owner, given.detach(), transpose, rows)
        made = nn.Parameter(view, requires_grad=held.requires_grad) if isinstance(held, nn.Parameter) else view
    for what in ("shape", "dtype", "device"):
        old, new = getattr(held, what), getattr(made, what)
        if old != new:
            old, new = (tuple(old), tuple(new)) if what == "shape" else (old, new)
            raise TieError(
                f"has {what} {old}, the tensor from {owner} has {new}", name=alias, fix="Make them equal before tying."
            )
    before = _component_names(model, alias)
    _register(model, alias, made)
    record_ties(model, {*before, owner, alias})


def _view_for(owner: str, given: Tensor, transpose: bool, rows: slice | None) -> Tensor:
    """Return the view of ``given`` that ``transpose`` and ``rows`` ask for. Raise TieError if it has no such view."""
    if rows is not None and (given.dim() == 0 or (rows.step is not None and rows.step < 1)):
        what = f"has shape {tuple(given.shape)}, of which rows={rows} is not a view"
        raise TieError(what, name=owner, fix="Give a slice with a positive step, of a tensor that has rows.")
    view = given if rows is None else given[rows]
    if transpose and view.dim() > 2:
        raise TieError(f"has {view.dim()} dimensions, transpose= takes two", name=owner, fix="Tie without transpose=.")
    return view.t() if transpose else view


def untie(model: nn.Module, name: str) -> None:
    """Make ``name`` a tensor of its own, with equal values; the tensors that it was tied to do not change.

    An optimizer that was built before does not hold the new parameter: untie first.  For a name that is not tied, as
    after its module was replaced, only the records of Weights change that still tie it.

    Raises:
        TieError: there is no such name, or its module itself is registered twice.

    >>> import torch, torchtether as tt
    >>> layer = torch.nn.Linear(2, 2); layer.register_parameter("again", layer.weight)
    >>> tt.untie(layer, "again"); tt.find_ties(layer)
    ()
    """
    model = as_module(model)
    check_name(name, "name")
    tensors = named_tensors(model)
    check_known(name, tensors)
    before = _component_names(model, name)
    if len(before) > 1:
        held = tensors[name]
        _check_changeable(model, name, held)
        made = held.detach().clone()
        if isinstance(held, nn.Parameter):
            made = nn.Parameter(made, requires_grad=held.requires_grad)
        else:
            made.requires_grad_(held.requires_grad)
        _register(model, name, made)
    record_ties(model, before)
    forget_ties(model, name)


def _component_names(model: nn.Module, name: str) -> tuple[str, ...]:
    return next(component.names for component in find_components(model) if name in component.names)


def _check_changeable(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Raise TieError for a lazy tensor, and for one under FSDP2, which restores its own parameters at every forward."""
    if is_lazy(tensor):
        raise TieError("is lazy and has no shape yet", name=name, fix="Run one forward first.")
    if is_sharded(tensor) and next(fsdp2_states(model), None) is not None:
        raise TieError("is under FSDP2, which would undo the change", name=name, fix="Tie or untie before fully_shard.")


def _register(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Register ``tensor`` as ``name``. The module is found in ``named_modules``, because getattr may find anything."""
    modules = dict(model.named_modules(remove_duplicate=False))
    path, _, leaf = name.rpartition(".")
    module = modules[path]
    twin = next((other for other, m in modules.items() if m is module and other != path), None)
    if twin is not None:
        raise TieError(
            f"its module is registered as {twin!r} too, so both names would change",
            name=name,
            fix="Deepcopy one module.",
        )
    if leaf in buffers_of(module):
        buffers_of(module)[leaf] = tensor
    elif isinstance(module, nn.RNNBase):
        setattr(module, leaf, tensor)  # keeps its flat list of weights in step
    else:
        parameters_of(module)[leaf] = tensor  # type: ignore[assignment]
