"""The two ops that weights are for. Both are caught one Python hop above aten when no graph is recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dispatch import rule
from ..weight import Weight
from .rows import cut_rows

aten = torch.ops.aten

SCRATCH = 32 * 2**20
"""Bytes of decoded weight above which ``linear`` decodes and multiplies row chunks instead of the whole."""


def _records_graph(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


@rule(torch.nn.functional.linear)
def linear(op: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``input @ weight.T + bias``.

    Where a graph is recorded, autograd runs on the Weight itself: it saves the Weight, not its values, and lets the
    gradient of ``input`` through whether or not the Weight is frozen.
    """
    if _records_graph(input, weight, bias) or not isinstance(weight, Weight):
        with torch._C.DisableTorchFunctionSubclass():
            made: Tensor = op(input, weight, bias)
        return made
    input, bias = (t.values_of() if isinstance(t, Weight) else t for t in (input, bias))  # type: ignore[assignment]
    if weight.scheme.transparent or weight.numel() * weight.dtype.itemsize <= SCRATCH or not weight.spec.is_contiguous:
        return _plain_linear(op, input, weight.values_of(), bias)
    return _chunked_linear(op, input, weight, bias)


def _plain_linear(op: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        made: Tensor = op(input, weight, bias)
    return made


def _chunked_linear(op: Any, input: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Never holds more than SCRATCH bytes of decoded weight; falls back to the whole where rows cannot be cut there."""
    rows, columns = weight.shape
    step = max(SCRATCH // (columns * weight.dtype.itemsize) // 256 * 256, 256)
    spans = [part.span for part in weight.scheme.layout(weight.spec.base).values()]
    if any(span and step * columns % span for span in spans):
        return _plain_linear(op, input, weight.values_of(), bias)
    outs = []
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        chunk = weight.scheme.decode(cut_rows(weight, start, stop), (stop - start, columns), weight.dtype)
        outs.append(_plain_linear(op, input, chunk, None if bias is None else bias[start:stop]))
    return torch.cat(outs, dim=-1)


@rule(torch.nn.functional.embedding)
def embedding(op: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``weight[input]``: the rows are gathered first and decoded after, so the table is never decoded."""
    max_norm = kwargs.get("max_norm", args[1] if len(args) > 1 else None)
    if isinstance(weight, Weight) and max_norm is None and not _records_graph(weight):
        return gather(weight, input)
    with torch._C.DisableTorchFunctionSubclass():
        made: Tensor = op(input, weight, *args, **kwargs)
    return made


@rule(aten.embedding.default)
def embedding_rows(op: Any, weight: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """As ``embedding``, below autograd."""
    if not isinstance(weight, Weight):
        raise TypeError("the indices of an embedding cannot be a Weight")
    return gather(weight, indices)


def gather(weight: Weight, indices: Tensor) -> Tensor:
    """The decoded rows that ``indices`` (any shape, integer) name: shape ``(*indices.shape, *weight.shape[1:])``."""
    if not weight.spec.is_contiguous or weight.scheme.transparent:
        return weight.values_of().index_select(0, indices.reshape(-1)).view(*indices.shape, *weight.shape[1:])
    rows = weight.scheme.gather(weight.parts, weight.spec.base, indices.reshape(-1), weight.dtype)
    return rows.view(*indices.shape, *weight.shape[1:])
