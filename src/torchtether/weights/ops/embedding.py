"""The rule for ``F.embedding``: gather the rows first, then decode them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...torch_private.observers import is_observed, is_tracing
from ...torch_private.tensors import as_plain
from ..dispatch import SHORTCUTS, rule
from ..products import cpu, decoding
from ..weight import Weight
from .product import records_graph, traced

aten = torch.ops.aten

_is_compiling = torch.compiler.is_compiling


@rule(torch.nn.functional.embedding)
def embedding(op: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return ``weight[input]``; rows are gathered before they are decoded, so the whole table is never decoded."""
    max_norm = kwargs.get("max_norm", args[1] if len(args) > 1 else None)
    if isinstance(weight, Weight) and is_tracing():
        return _plain_embedding(op, input, traced(weight), *args, **kwargs)
    if isinstance(weight, Weight) and max_norm is None and not records_graph(weight):
        padding = kwargs.get("padding_idx", args[0] if args else None)
        if isinstance(input, Tensor) and _is_row(weight, padding):  # else torch raises its own error
            made = gather(weight, input)
            SHORTCUTS[op] = cpu.shortcut_gather  # for the next call
            return made
    return _plain_embedding(op, input, weight, *args, **kwargs)


def _is_row(weight: Weight, padding_idx: int | None) -> bool:
    return padding_idx is None or (weight.dim() > 0 and -weight.shape[0] <= padding_idx < weight.shape[0])


def _plain_embedding(op: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    with as_plain():
        made: Tensor = op(input, weight, *args, **kwargs)
    return made


@rule(aten.embedding.default)
def embedding_rows(op: Any, weight: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return ``weight[indices]`` as ``embedding`` does, below autograd."""
    if not isinstance(weight, Weight):
        raise TypeError("the indices of an embedding cannot be a Weight")
    return gather(weight, indices)


def gather(weight: Weight, indices: Tensor) -> Tensor:
    """Return the decoded rows that ``indices`` (any shape, integer) name: ``(*indices.shape, *weight.shape[1:])``."""
    layout = None if _is_compiling() else weight.kernel_layout  # None for a permuted Weight
    if layout is not None and not is_observed():
        made = decoding.gather(layout, layout.pick_from(weight), weight._spec.dtype, indices)
        if made is not None:
            return made
    if not weight.spec.is_contiguous or weight.scheme.transparent:
        return weight.values_of().index_select(0, indices.reshape(-1)).view(*indices.shape, *weight.shape[1:])
    rows = weight.scheme.gather(weight.parts, weight.spec.base, indices.reshape(-1), weight.dtype)
    return rows.view(*indices.shape, *weight.shape[1:])
