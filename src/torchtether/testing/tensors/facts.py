"""The facts of a tensor of any class, compared one by one, so that a law can name the difference."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from ...schemes import same_bits
from ...torch_private.dispatching import is_traceable_wrapper_subclass
from ..law import Broken

_NEVER = {"_is_param"}  # an attribute that torch sets on a Parameter of a subclass


def facts_of(tensor: Tensor, at: str = "") -> dict[str, Any]:
    """Return class, shape, dtype, device, attributes and values of a tensor by name; inner tensors under their path."""
    facts: dict[str, Any] = {
        f"{at}class": type(tensor),
        f"{at}shape": tuple(tensor.shape),
        f"{at}dtype": tensor.dtype,
        f"{at}device": tensor.device.type,
    }
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        facts[f"{at}inner tensors"] = tuple(names)
        facts[f"{at}stride"] = tuple(tensor.stride())
        facts[f"{at}metadata"] = context
        for name in names:
            facts |= facts_of(getattr(tensor, name), f"{at}{name}.")
        return facts
    own = vars(tensor) if type(tensor) not in (Tensor, torch.nn.Parameter) else {}
    for name, value in own.items():
        if name not in _NEVER:
            facts |= facts_of(value, f"{at}{name}.") if isinstance(value, Tensor) else {f"{at}{name}": value}
    if not is_wrapper(tensor) and not tensor.is_meta:
        facts[f"{at}values"] = tensor.detach().as_subclass(Tensor)
    return facts


def same(made: Tensor, given: Tensor, how: str, *, but: Collection[str] = ()) -> None:
    """Raise Broken with the first fact in which ``made``, the result of ``how``, differs from ``given``.

    ``but`` names facts that may differ, at any depth.
    """
    before, after = facts_of(given), facts_of(made)
    for name, value in before.items():
        if name.rpartition(".")[2] in but:
            continue
        if name not in after:
            raise Broken(f"{how} loses its {name}")
        if not equal(after[name], value):
            difference = f"{short(after[name])}, was {short(value)}"
            raise Broken(f"{how} changes its {name}" + ("" if isinstance(value, Tensor) else f": {difference}"))


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether the tensor has no memory itself, because its class keeps it in other tensors."""
    if type(tensor) in (Tensor, torch.nn.Parameter) or tensor.is_meta:
        return False
    try:
        return is_traceable_wrapper_subclass(tensor) or (tensor.numel() > 0 and tensor.data_ptr() == 0)
    except RuntimeError:  # newer torch refuses ``data_ptr`` of a wrapper
        return True


def leaves(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that ``tensor`` is made of."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from leaves(getattr(tensor, name))
    elif is_wrapper(tensor):
        for value in vars(tensor).values():
            if isinstance(value, Tensor):
                yield from leaves(value)
    else:
        yield tensor


def memories(tensor: Tensor) -> set[int]:
    """Return the storage addresses of all ``leaves`` of ``tensor``."""
    return {leaf.untyped_storage().data_ptr() for leaf in leaves(tensor) if leaf.numel()} - {0}


def equal(a: Any, b: Any, depth: int = 4) -> bool:
    """Return whether two facts are equal: tensors bit by bit, objects without their own ``==`` field by field."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            return False
        return a.shape == b.shape and a.dtype == b.dtype and (a.is_meta or b.is_meta or same_bits(a, b))
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key], depth) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y, depth) for x, y in zip(a, b, strict=True))
    has_equality = getattr(type(a), "__eq__", None) is not object.__eq__
    if depth and not has_equality and hasattr(a, "__dict__") and not isinstance(a, type):
        return a is b or equal(vars(a), vars(b), depth - 1)
    try:
        return bool(a == b)
    except Exception:
        return repr(a) == repr(b)


def short(value: Any, longest: int = 60) -> str:
    """Return a fact as text of at most ``longest`` characters."""
    text = " ".join((value.__name__ if isinstance(value, type) else str(value)).split())
    return text if len(text) <= longest else text[: longest - 3] + "..."
