"""Cutting and joining the parts of a Weight along dim 0, for every scheme alike.

A part says how many elements one of its dim-0 entries covers (``Part.span``); that is all this needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import UnsupportedOpError
from ..schemes import Scheme, Shape, same_bits
from ..weight import Weight


def cut_rows(weight: Weight, start: int, stop: int) -> dict[str, Tensor]:
    """The parts of rows ``start:stop`` of the base tensor, as views. Raises where a block would be cut in two."""
    shape = weight.spec.base
    row = math.prod(shape[1:])
    layout = weight.scheme.layout(shape)
    cut = {}
    for name, part in weight.parts.items():
        span = layout[name].span
        if row == 0 and part.dim() and part.shape[0] == shape[0]:  # nothing to count spans in
            cut[name] = part[start:stop]
            continue
        if span == 0:
            cut[name] = part.detach()
            continue
        if start * row % span or (stop * row % span and stop != shape[0]):
            raise UnsupportedOpError(
                f"rows {start}:{stop} of a Weight of shape {tuple(shape)} cut a block of {span} elements of {name!r}",
                fix="Cut at multiples of the block, or call .dequantize() first.",
            )
        cut[name] = part[start * row // span : math.ceil(stop * row / span)]
    return cut


def view_parts(scheme: Scheme, parts: dict[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """The parts reshaped, without copying, to what ``scheme`` lays out for ``shape``."""
    return {name: parts[name].view(part.shape) for name, part in scheme.layout(shape).items()}


def take_rows(weight: Weight, index: Tensor) -> dict[str, Tensor] | None:
    """The parts of the rows named by the 1-D ``index``, copied; ``None`` where rows share an entry of a part."""
    shape = weight.spec.base
    row = math.prod(shape[1:])
    taken = {}
    for name, part in weight.scheme.layout(shape).items():
        held = weight.parts[name]
        if part.span == 0:
            taken[name] = held.clone()
        elif part.span == row:
            taken[name] = held.index_select(0, index)
        elif row % part.span == 0 and held.shape[0] == shape[0] * (row // part.span):
            rows = held.view(shape[0], row // part.span, *held.shape[1:]).index_select(0, index)
            taken[name] = rows.flatten(0, 1)
        else:
            return None
    return taken


def join_rows(weights: Sequence[Weight]) -> dict[str, Tensor] | None:
    """The parts of the Weights one below the other; ``None`` where they cannot be joined without re-encoding."""
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
