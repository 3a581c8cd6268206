"""Factory ops on a Weight: those that allocate return a Weight, those that fill with values a plain tensor."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...schemes import Scheme
from ..dispatch import ATTACHED, rule
from ..weight import Weight
from .padding import mark_padded

aten = torch.ops.aten

_UNFILLED = "_unfilled"
ATTACHED.add(_UNFILLED)


def is_unfilled(weight: Weight) -> bool:
    """Return whether ``weight`` comes from a factory op and holds at most a constant: it may be optimizer state."""
    return _UNFILLED in weight.__dict__ and not isinstance(weight, torch.nn.Parameter)


def mark_filled(weight: Weight) -> None:
    """Tell that ``weight`` has got values that are no constant, as of another tensor, or random ones."""
    weight.__dict__.pop(_UNFILLED, None)


def _mark_unfilled(made: Weight) -> Weight:
    made.__dict__[_UNFILLED] = True
    return made


@rule(aten.empty_like.default)
def empty_like(op: Any, weight: Weight, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Weight | Tensor:
    """Allocate a Weight like this (for ``to_empty``); parts that all rows share are zeroed: indices stay in range."""
    dtype = dtype or weight.dtype
    if weight.scheme.transparent or not dtype.is_floating_point:
        made = _like(op, weight, dtype=dtype, **kwargs)
        return weight.around(made) if weight.scheme.transparent else made
    parts = weight.scheme.empty(weight.spec.base, dtype, kwargs.get("device") or weight.device)
    for name, part in weight.scheme.layout(weight.spec.base).items():
        if part.span == 0:
            parts[name].zero_()
    return _mark_unfilled(weight.with_parts(parts, weight.spec.replace(dtype=dtype)))


@rule(aten.new_empty.default, aten.new_zeros.default)
def new_rows(
    op: Any, weight: Weight, size: Sequence[int], *, dtype: torch.dtype | None = None, **kwargs: Any
) -> Weight | Tensor:
    """Return zeros: a Weight if only the number of rows differs (sharding pads with it), else a plain tensor."""
    same_rows = len(size) == weight.dim() > 0 and tuple(size[1:]) == tuple(weight.shape[1:])
    if not same_rows or dtype not in (None, weight.dtype) or not weight.spec.is_contiguous:
        return _like(op, weight, size, dtype=dtype, **kwargs)
    if weight.scheme.transparent:
        made = weight.around(_like(op, weight, size, dtype=dtype, **kwargs))
    else:
        zeros = torch.zeros((), dtype=weight.dtype, device=kwargs.get("device") or weight.device).expand(tuple(size))
        made = Weight.encode(zeros, weight.scheme)
        shared = [name for name, part in weight.scheme.layout(weight.spec.base).items() if part.span == 0]
        if shared:  # rows of this Weight will be copied into the new one: both need the same shared parts
            held = {name: weight.parts[name].detach().to(zeros.device, copy=True) for name in shared}
            made = made.with_parts(_zeros_beside(weight.scheme, zeros, {**made.parts, **held}))
    facts = {"tie": weight.tie, "activations": weight.spec.activations, "trained": weight.is_trained}
    made._spec = made.spec.replace(**facts)
    return mark_padded(_mark_unfilled(made))


def _zeros_beside(scheme: Scheme, zeros: Tensor, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``parts`` with the codes of zeros under their scales, where the scheme can encode with given scales."""
    if "like" not in inspect.signature(scheme.encode).parameters or zeros.is_meta:
        return parts
    return {**parts, **{n: p for n, p in scheme.encode(zeros, like=parts).items() if n == "qdata"}}  # type: ignore[call-arg]


@rule(
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty_strided.default,
)
def plain_like(op: Any, weight: Weight, *args: Any, **kwargs: Any) -> Tensor:
    """Return a plain tensor: optimizers keep their state in these, which quantization would destroy."""
    return _like(op, weight, *args, **kwargs)


def _like(op: Any, weight: Weight, *args: Any, **kwargs: Any) -> Tensor:
    """Run ``op`` on a ``meta`` tensor with the Weight's geometry; the result lies on the Weight's device."""
    model = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device="meta")
    kwargs["device"] = kwargs.get("device") or weight.device
    made: Tensor = op(model, *args, **kwargs)
    return made
