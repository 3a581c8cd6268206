"""Cutting and joining the parts of a Weight along dim 0, in the same way for every scheme.

It needs only ``Part.span``: the number of elements that one dim-0 entry of a part covers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..._dtypes import select_rows
from ...errors import SchemeError, UnsupportedOpError
from ...schemes import part_rows, same_bits
from ..weight import Weight
from .padding import is_padded, keep_padding, mark_rows


def first_rows(weight: Tensor, count: int) -> Tensor:
    """Return the first ``count`` rows of ``weight``, which may be padded; plain tensors are cut as they are."""
    if not isinstance(weight, Weight):
        return weight[:count]
    if weight.scheme.transparent:
        made = weight.around(weight.values_of()[:count])
    elif count == weight.shape[0]:
        made = weight.map(torch.ops.aten.alias.default)
    else:
        base = (count, *weight.spec.base[1:])
        spec = weight.spec.shaped(base, tie=weight.tie)
        is_filled = is_padded(weight) and count  # where a rank has no rows, its copies of shared parts must not change
        cut = weight._cut if is_filled else shared_by_rows(weight)
        made = weight.with_parts(cut_rows(weight, 0, count), spec, cut=cut)
    return mark_rows(made, weight) if is_padded(weight) or count < weight.shape[0] else keep_padding(made, weight)


def cut_rows(weight: Weight, start: int, stop: int) -> dict[str, Tensor]:
    """Return the parts of rows ``start:stop`` of the base tensor, as views.

    Raises UnsupportedOpError where a block would be cut in two, or the scheme does not take so few rows.

    The first rows of a padded Weight may end within a block: only padding lies behind them.
    """
    base = weight.spec.base
    ends_in_padding = is_padded(weight) and start == 0
    cuts = part_rows(weight.scheme.layout(base), base, start, stop, ends_in_padding=ends_in_padding)
    try:
        weight.scheme.layout((stop - start, *base[1:]))
    except SchemeError as error:
        raise UnsupportedOpError(
            f"rows {start}:{stop} of a Weight of shape {tuple(base)} do not fit its scheme: {error}",
            fix="Call .dequantize() first.",
        ) from None
    return {name: weight.parts[name].detach() if cut is None else weight.parts[name][cut] for name, cut in cuts.items()}


def shared_by_rows(weight: Weight) -> tuple[str, ...]:
    """Return the names of the parts that all rows of ``weight`` use: ``cut_rows`` leaves them whole."""
    base = weight.spec.base
    row = math.prod(base[1:])
    layout = weight.scheme.layout(base).items()
    whole = (n for n, p in layout if p.span == 0 and not (row == 0 and p.shape and p.shape[0] == base[0]))
    return tuple(dict.fromkeys((*weight._cut, *whole)))


def take_rows(weight: Weight, index: Tensor) -> dict[str, Tensor] | None:
    """Return copies of the parts of the rows in the 1-D ``index``; ``None`` where rows share an entry."""
    shape = weight.spec.base
    row = math.prod(shape[1:])
    taken = {}
    for name, part in weight.scheme.layout(shape).items():
        held = weight.parts[name]
        if part.span == 0:
            taken[name] = held.clone()
        elif part.span == row:
            taken[name] = select_rows(held, index)
        elif row % part.span == 0 and held.shape[0] == shape[0] * (row // part.span):
            rows = select_rows(held.view(shape[0], row // part.span, *held.shape[1:]), index)
            taken[name] = rows.flatten(0, 1)
        else:
            return None
    return taken


def join_rows(weights: Sequence[Weight]) -> dict[str, Tensor] | None:
    """Return the parts of the Weights joined along dim 0; ``None`` if the joined values must be encoded again."""
    first = weights[0]
    layouts = [weight.scheme.layout(weight.spec.base) for weight in weights]
    joined = {}
    for name in first.parts:
        held = [weight.parts[name] for weight in weights]
        spans = {layout[name].span for layout in layouts}
        if len(spans) != 1:
            return None
        (span,) = spans
        if span == 0 and math.prod(first.shape[1:]) == 0 and held[0].dim() and held[0].shape[0] == first.shape[0]:
            joined[name] = torch.cat(held)
        elif span == 0:
            if not all(same_bits(held[0], other) for other in held[1:]):
                return None
            joined[name] = held[0].clone()
        elif any(math.prod(weight.spec.base) % span for weight in weights[:-1]):
            return None
        else:
            joined[name] = torch.cat(held)
    return joined
