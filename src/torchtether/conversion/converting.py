"""``tt.convert``: ``.to()`` that keeps objects, ties, grads, hooks and attributes, and converts optimizer state."""

from __future__ import annotations

from operator import methodcaller

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .._checks import Model, as_device, as_module
from ..errors import ConversionError
from ..exchange.exchange import Atomic, Exchange
from ..exchange.optimizer_state import Optimizers
from ..exchange.refusals import format_names
from ..geometry.blocks import STOCK
from ..ties.components import Component, split_shared
from ..ties.spans import member_view, span_tensor
from ..torch_private.observers import not_followed
from ..weights.weight import Weight
from .overrides import warn_of_overrides


@not_followed
def convert(
    model: Model,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    optimizer: Optimizers = None,
    atomic: Atomic = "checked",
) -> Model:
    """Convert every float or complex tensor of ``model`` to ``dtype``, and move every tensor to ``device``.

    Returns ``model``.

    Parameters and buffers stay the same objects, with grads, hooks, ``requires_grad`` and attributes.  Tensors that
    share memory still do; it is converted once.  Tensors that have the dtype and device already are not touched.  A
    Weight takes ``dtype`` as its compute dtype; its codes and scales stay.  The state of ``optimizer`` (one or several)
    is converted too.  Without it the state of an optimizer that has stepped stays in the old dtype, and its next step
    fails in torch.

    ``atomic="checked"``: every error that can be foreseen comes before the first change, and memory peaks one tensor
    above the model.  ``atomic="full"``: even an error in the middle, out of memory included, changes nothing, but old
    and new tensors must fit in memory together.  Ctrl-C is delivered between two tensors: ``"full"`` then undoes all
    changes, ``"checked"`` leaves those made so far.  If it arrives later, it is delivered when all is done.

    Raises:
        ConversionError: ``dtype`` is no float dtype, a complex tensor would lose its imaginary part, a tensor is lazy,
            or on ``meta`` without values to move, or something holds it (a graph, a view, DDP).
        OptimizerError: the optimizer belongs to another model.

    >>> import torch, torchtether as tt
    >>> model = torch.nn.Linear(2, 2)
    >>> weight = model.weight
    >>> tt.convert(model, dtype=torch.bfloat16).weight is weight, weight.dtype
    (True, torch.bfloat16)
    """
    given, model = model, as_module(model)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ConversionError(f"dtype={dtype!r} is a {type(dtype).__name__}, not a dtype", fix="Give a torch.dtype.")
    if dtype is not None and not dtype.is_floating_point:
        raise ConversionError(
            f"cannot convert a model to {dtype}, which is not a float dtype",
            fix="To store weights in few bits, use tt.quantize.",
        )
    place = None if device is None else as_device(device)
    with Exchange(model, optimizer=optimizer, atomic=atomic, verb="convert") as exchange:
        unshared, components = split_shared(model, exchange.modules)
        unshared = [tensor for tensor in unshared if _differs(tensor, dtype, place)]
        work = [c for c in components if any(_differs(m.tensor, dtype, place) for m in c.members)]
        tensors = [*unshared, *(member.tensor for component in work for member in component.members)]
        for tensor in tensors:
            if type(tensor) not in STOCK or tensor.dtype.is_complex or (place is not None and tensor.is_meta):
                _check(tensor, dtype, place, exchange)
        _check_shared(work, dtype)
        exchange.check(tensors, stay_weights=place is None or place.type != "meta")
        if tensors:
            warn_of_overrides(model, exchange.modules)
        if place is None:
            exchange.put_each(
                unshared, map(methodcaller("to", dtype), unshared)
            )  # every one needs the new dtype, since nothing else can differ
        else:
            exchange.put_each(unshared, (converted(tensor, dtype, place) for tensor in unshared))
        for component in work:
            exchange.safe_point()
            if len(component.members) == 1:
                (member,) = component.members
                exchange.put(member.tensor, converted(member.tensor, dtype, place))
                continue
            span = converted(span_tensor(component), dtype, place)
            exchange.put_together((member.tensor, member_view(span, member)) for member in component.members)
    return given


def converted(tensor: Tensor, dtype: torch.dtype | None, device: torch.device | None) -> Tensor:
    """Return ``tensor``, detached, on ``device`` and, if it is floating point or complex, in ``dtype``."""
    if torch.is_grad_enabled():
        tensor = tensor.detach()
    if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.to(device=device)
    return tensor.to(dtype) if device is None else tensor.to(device, dtype)


def _differs(tensor: Tensor, dtype: torch.dtype | None, device: torch.device | None) -> bool:
    if dtype is not None and (held := tensor.dtype) is not dtype and (held.is_floating_point or held.is_complex):
        return True
    if device is not None and tensor.device != device:
        return True
    return type(tensor) not in STOCK and is_lazy(tensor)  # so that the exchange refuses it by name


def _check(tensor: Tensor, dtype: torch.dtype | None, device: torch.device | None, exchange: Exchange) -> None:
    """Raise ConversionError where ``.to`` would lose values silently, or fail after some tensors were changed."""
    if type(tensor) not in STOCK and is_lazy(tensor):
        return  # the exchange raises for it
    if device is not None and tensor.is_meta and device.type != "meta":
        raise ConversionError(
            f"is on meta and has no values to move to {device}",
            name=exchange.name(tensor),
            fix="Use tt.materialize or tt.load.",
        )
    if dtype is None:
        return
    if tensor.is_complex() and not dtype.is_complex:
        raise ConversionError(
            f"is {tensor.dtype}, and {dtype} would drop its imaginary part",
            name=exchange.name(tensor),
            fix="Keep it in a module of its own, or store torch.view_as_real of it.",
        )
    if dtype.itemsize < 2 and isinstance(tensor, Weight) and not tensor.scheme.transparent:
        raise ConversionError(
            f"is a Weight, and {dtype} cannot be its compute dtype",
            name=exchange.name(tensor),
            fix="Use two bytes or more.",
        )


def _check_shared(components: list[Component], dtype: torch.dtype | None) -> None:
    """Raise an error unless memory that several tensors share can be converted as one tensor."""
    for component in components:
        if len(component.members) == 1:
            continue
        span_tensor(component)
        if component.dtype is None and dtype is not None:
            dtypes = ", ".join(f"{format_names(m.names)} is {m.tensor.dtype}" for m in component.members)
            raise ConversionError(
                f"shares memory with a tensor of another dtype ({dtypes}), so it cannot become {dtype}",
                name=format_names(component.members[0].names),
                fix="Convert the device only, or call tt.untie on one.",
            )
