"""Optimizers: whether they belong to a model, and how their state follows a converted parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._checks import as_module, describe, describe_some
from ..errors import ArgumentError, OptimizerError

Optimizers = Optimizer | Iterable[Optimizer] | None
Journal = list[Callable[[], None]]
"""Functions that undo the steps taken, oldest first."""

_SHOWN = 5

_NUMBERS = {"step", "mu_product", "mu", "eta"}
"""Tensors of rank 0 of torch's optimizers that follow neither dtype nor device, even of a parameter of rank 0."""


def optimizers_of(optimizer: Optimizers) -> tuple[Optimizer, ...]:
    """Return one, several or no optimizers as a tuple."""
    if optimizer is None:
        return ()
    if hasattr(optimizer, "param_groups") and not isinstance(optimizer, type):
        return (optimizer,)  # type: ignore[return-value]
    is_several = isinstance(optimizer, Iterable) and not isinstance(optimizer, (Mapping, str, type))
    found: tuple[Any, ...] = tuple(optimizer) if is_several else (optimizer,)  # type: ignore[arg-type]
    for one in found:
        if not hasattr(one, "param_groups") or isinstance(one, type):
            raise ArgumentError(
                f"is {describe(one)}, not an optimizer",
                name="optimizer",
                fix="Give a torch.optim.Optimizer, or several.",
            )
    return found


# -- checks ------------------------------------------------------------------------------------------------------------


def check_optimizer(model: nn.Module, optimizer: Optimizers) -> None:
    """Raise OptimizerError unless the optimizer holds every trainable parameter of ``model``, and no other tensor.

    Also raise it for state on ``meta`` of a parameter that has values. Frozen parameters may be absent. Several
    optimizers are taken together; none, ``None`` or ``[]``, hold no parameter.

    Raises:
        OptimizerError: naming what the optimizer lacks, and what it holds that the model does not have (any more).

    >>> import torch, torchtether as tt
    >>> model = torch.nn.Linear(2, 2)
    >>> tt.check_optimizer(model, torch.optim.SGD([model.weight]))
    Traceback (most recent call last):
    torchtether.errors.OptimizerError: bias: is trainable, but not in the optimizer. Add it, freeze it, or ...
    """
    model = as_module(model)
    missing, foreign = _difference(model, optimizer)
    if missing or foreign:
        raise _error(missing, foreign)
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and any(_is_on_meta(one.state.get(parameter)) for one in optimizers_of(optimizer)):
            what = "has values, and its state in the optimizer is on meta, so steps would fail or change nothing"
            fix = "Delete the state (del optimizer.state[parameter]), and the next step makes it again."
            raise OptimizerError(what, name=name, fix=fix)


def check_belongs(model: nn.Module, optimizer: Optimizers) -> None:
    """Raise OptimizerError for an optimizer of another model, or of this one before its parameters were replaced.

    Less strict than ``check_optimizer``: an optimizer may train only a part of the model, or parameters of a loss, too.
    """
    optimizers = optimizers_of(optimizer)
    if not optimizers:
        return
    held = {id(parameter) for parameter in model.parameters()}
    for one in optimizers:
        parameters = [parameter for group in one.param_groups for parameter in group["params"]]
        if parameters and not any(id(parameter) in held for parameter in parameters):
            raise _error(*_difference(model, one))
    missing, foreign = _difference(model, optimizers)
    if missing and foreign:
        raise _error(missing, foreign)


def _difference(model: nn.Module, optimizer: Optimizers) -> tuple[list[str], list[str]]:
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    held: set[int] = set()
    foreign = []
    for one in optimizers_of(optimizer):
        for number, group in enumerate(one.param_groups):
            labels = group.get("param_names") or [f"index {i}" for i in range(len(group["params"]))]
            for label, parameter in zip(labels, group["params"], strict=True):
                held.add(id(parameter))
                if id(parameter) not in names:
                    foreign.append(f"group {number}, {label}, shape {tuple(parameter.shape)}")
    missing = [names[id(p)] for p in model.parameters() if p.requires_grad and id(p) not in held]
    return missing, foreign


def _error(missing: list[str], foreign: list[str]) -> OptimizerError:
    differences = []
    if missing:
        are = "is trainable" if len(missing) == 1 else "are trainable"
        differences.append(f"{are}, but not in the optimizer")
    if foreign:
        shown = describe_some(foreign, _SHOWN, between="; ")
        differences.append(f"the optimizer holds {len(foreign)} parameters that the model does not have ({shown})")
    fix = "Add it, freeze it, or build the optimizer from model.parameters()."
    return OptimizerError(", and ".join(differences), name=describe_some(missing, _SHOWN), fix=fix)


# -- following ---------------------------------------------------------------------------------------------------------


class Converted(NamedTuple):
    """A parameter with its dtype and device before the conversion."""

    held: Tensor
    dtype: torch.dtype
    device: torch.device


Before = tuple[Tensor, torch.dtype, torch.device]
"""The fields of a ``Converted``: a plain tuple costs a tenth of the time, and most conversions have no optimizer."""


def follow(optimizer: Optimizers, changed: Iterable[Before], journal: Journal | None = None) -> None:
    """Move state tensors to their parameter's device, and to its dtype where they had its old one.

    A state tensor changes dtype if it had the parameter's old one, float or complex, and is no counter such as
    ``step``: moments follow; float32 state of a bfloat16 parameter does not, nor do scales of 8-bit moments, nor what
    the optimizer lists in ``non_castable_tensor_keys``.  Counters (integers of rank 0, and what torch's optimizers call
    ``step``) stay on the CPU unless the optimizer is fused or capturable.  State on ``meta`` has no values; it is
    deleted, and the next step creates it again.

    ``journal`` gets a function per state tensor that restores it.
    """
    optimizers = _with_wrapped(optimizers_of(optimizer))
    changes = [Converted(*before) for before in changed] if optimizers else []
    for one in optimizers:
        kept = _keys_of_one_dtype(one)
        on_device = {
            id(parameter): bool(group.get("fused") or group.get("capturable"))
            for group in one.param_groups
            for parameter in group["params"]
        }
        for change in changes:
            state = one.state.get(change.held)
            if isinstance(state, dict) and (change.dtype, change.device) != (change.held.dtype, change.held.device):
                _follow_one(one, change, state, kept, on_device.get(id(change.held), False), journal)


def _with_wrapped(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return the optimizers, and those in their attributes that have a state of their own: Lookahead's, for example."""
    found = list(optimizers)
    for one in found:  # which grows
        for value in getattr(one, "__dict__", {}).values():
            is_one = hasattr(value, "param_groups") and hasattr(value, "state") and not isinstance(value, type)
            if is_one and all(value.state is not other.state for other in found):
                found.append(value)
    return found


def _follow_one(
    optimizer: Optimizer,
    change: Converted,
    state: dict[str, Any],
    kept: set[Any],
    steps_move: bool,
    journal: Journal | None,
) -> None:
    if change.device.type == "meta" != change.held.device.type and _is_on_meta(state):
        if journal is not None:
            journal.append(lambda: optimizer.state.__setitem__(change.held, state))
        del optimizer.state[change.held]
        return
    if any(isinstance(value, Tensor) and value.dtype == torch.uint8 for value in state.values()):
        change = change._replace(dtype=change.held.dtype)  # bitsandbytes: floats are tables and scales of 8-bit codes
    moved = change._replace(dtype=change.held.dtype)
    for key, old in list(state.items()):
        new = _followed(old, moved if key in kept else change, steps_move, key in _NUMBERS)
        if new is not old:
            if journal is not None:
                journal.append(lambda key=key, old=old: state.__setitem__(key, old))  # type: ignore[misc]
            state[key] = new
            del old, new  # at most one state tensor exists twice


def _is_on_meta(state: Any) -> bool:
    """Return whether a tensor of a parameter's state has no values."""
    return isinstance(state, dict) and any(isinstance(value, Tensor) and value.is_meta for value in state.values())


def _keys_of_one_dtype(optimizer: Optimizer) -> set[Any]:
    """Return the keys of state whose dtype even ``load_state_dict`` of the optimizer, or of one that it wraps, keeps.

    bitsandbytes lists them: its kernels take moments that are not of 8 bits as float32, whatever the parameter is.
    """
    found: list[Any] = [optimizer]
    for one in found:  # which grows
        held = [value for value in getattr(one, "__dict__", {}).values() if hasattr(value, "param_groups")]
        found += [value for value in held if all(value is not other for other in found)]
    return {key for one in found for key in getattr(one, "non_castable_tensor_keys", None) or ()}


def _followed(value: Any, change: Converted, steps_move: bool, is_number: bool) -> Any:
    """Return ``value`` as it follows ``change``; ``is_number`` if its key is one of ``_NUMBERS``."""
    if isinstance(value, Tensor):
        dtype, device = value.dtype, value.device
        is_float = dtype.is_floating_point or dtype.is_complex
        keeps_dtype = value.dim() == 0 and (is_number or change.held.dim() > 0)
        is_counter = value.dim() == 0 and (is_number or not is_float)
        both = all(one.is_floating_point or one.is_complex for one in (change.dtype, change.held.dtype))
        if both and not keeps_dtype and dtype == change.dtype:
            dtype = change.held.dtype
            if value.is_complex() and not dtype.is_complex:
                value = value.real  # as for the parameter itself, where torch has warned
        if device == change.device and (not is_counter or steps_move or device.type != "cpu"):
            device = change.held.device
        return value if (dtype, device) == (value.dtype, value.device) else value.detach().to(device, dtype)
    if isinstance(value, list):
        made = [_followed(item, change, steps_move, is_number) for item in value]
        return made if any(new is not old for new, old in zip(made, value, strict=True)) else value
    if isinstance(value, dict):
        mapped = {key: _followed(item, change, steps_move, is_number) for key, item in value.items()}
        return mapped if any(mapped[key] is not value[key] for key in value) else value
    return value
