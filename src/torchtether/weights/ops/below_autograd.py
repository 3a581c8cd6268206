"""Products below autograd, which calls ``mm`` and ``addmm`` with the Weight where it records a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...torch_private.observers import is_observed
from ..weight import Weight
from .graph_ops import in_graph
from .product import by_parts, decoded_linear, gradient, rounded_linear, same

aten = torch.ops.aten


def matrix_product(op: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    """Return ``mm``, ``addmm`` or ``linear`` of a matrix and a Weight, without decoding all of the Weight at once.

    ``None`` for every other call, which must decode it.
    """
    bias: Tensor | None
    if op is aten.mm.default:
        (x, weight), bias = args, None
    elif op is aten.addmm.default and not kwargs and len(args) == 3:
        bias, x, weight = args
        if not isinstance(bias, Tensor) or bias.dim() != 1:
            return None
    elif op is aten.linear.default and not kwargs:
        x, weight, bias = (*args, None)[:3]
    else:
        return None
    if not isinstance(weight, Weight) or isinstance(x, Weight) or isinstance(bias, Weight):
        return None
    if weight.dim() != 2 or weight.scheme.transparent or x.dtype is not weight.dtype or x.dim() == 0:
        return None
    is_mm = op is not aten.linear.default  # mm and addmm take a weight of (K, N)
    if weight.spec.is_contiguous is is_mm and not (is_mm and bias is None):
        return None
    is_gradient = is_mm and weight.spec.is_contiguous
    base = weight if weight.spec.is_contiguous else weight.map(same, weight.spec.permute(weight.spec.order))
    if not base.spec.is_contiguous:
        return None
    if torch.compiler.is_compiling():
        made = in_graph(x, base, bias, is_gradient)
        if made is None and base.spec.activations is not None and not is_gradient:
            return rounded_linear(x, base, bias)
        return made
    if is_gradient:
        return gradient(x, base)
    made = None if is_observed() else by_parts(base, x, bias)
    return decoded_linear(x, base, bias) if made is None else made
