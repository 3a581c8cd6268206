"""The rules for ``F.linear`` and ``matmul``, which run above aten, in ``__torch_function__``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...torch_private.observers import is_observed, is_tracing
from ...torch_private.tensors import as_plain
from ..dispatch import FOLDS, SHORTCUTS, rule
from ..products import cpu, rounding
from ..weight import Weight
from .product import by_parts, decoded_linear, is_batch, is_strided, plain_linear, records_graph, traced


@rule(torch.nn.functional.linear)
def linear(op: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``input @ weight.T + bias``.

    Where a graph is recorded, autograd runs on the Weight itself: it saves the Weight, not its values, and lets the
    gradient of ``input`` through whether or not the Weight is frozen.
    """
    if not isinstance(weight, Weight):
        return plain_linear(op, input, weight, bias)
    observed = is_observed()
    if observed and is_tracing():
        kind, values = weight.spec.activations, traced(weight)
        return plain_linear(op, input if kind is None else rounding.rounded(input, kind), values, bias)
    if records_graph(input, weight, bias):
        return plain_linear(op, input, weight, bias)
    if not observed:
        made = by_parts(weight, input, bias)
        if made is not None:
            SHORTCUTS[op] = cpu.shortcut_linear  # for the next call
            return made
    input, bias = (t.values_of() if isinstance(t, Weight) else t for t in (input, bias))  # type: ignore[assignment]
    return decoded_linear(op, input, weight, bias)


@rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__)
def matmul(op: Any, first: Any, second: Any, **kwargs: Any) -> Any:
    """Return the product; a batch of matrices is multiplied as one matrix with all of their rows."""
    with as_plain():
        if op is Tensor.__rmatmul__:
            op, first, second = torch.matmul, second, first
        if not kwargs and _is_matrix(second) and is_batch(first):
            return op(first.flatten(0, -2), second).view(*first.shape[:-1], second.shape[1])
        if not kwargs and _is_matrix(first) and is_strided(second):
            columns = second.transpose(-1, -2)  # A @ B = (B.T @ A.T).T, so the rows of B.T make one matrix
            return op(columns.flatten(0, -2), first.t()).view(*columns.shape[:-1], first.shape[0]).transpose(-1, -2)
        return op(first, second, **kwargs)


def _is_matrix(weight: Any) -> bool:
    return isinstance(weight, Weight) and weight.dim() == 2


FOLDS.update(dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__), matmul))
FOLDS[torch.nn.functional.linear] = plain_linear
