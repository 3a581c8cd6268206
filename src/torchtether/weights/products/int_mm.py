"""torch's product of 8-bit integers with 8-bit integers, for inputs that are rounded to int8."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...gpu import rounding as kernels
from . import fitting, rounding
from .layout import Layout

LEAST = 17
"""The least rows of input that ``torch._int_mm`` accepts on CUDA."""


def takes(layout: Layout) -> bool:
    """Return whether codes are int8 with one scale per row, or one for all, and inputs are rounded to int8."""
    fields = layout.fields
    is_plain = layout.kind == "INT8" and fields["groups"] == 1 and fields["zero"] < 0 and fields["offset"] == 0
    return is_plain and fields["activations"] == 1 and fields["height"] in (1, layout.rows)


def linear(layout: Layout, parts: Sequence[Tensor], x: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return ``x @ weight.T + bias`` by ``torch._int_mm``; ``None`` if it does not support the arguments.

    Sums are exact; scales and bias are applied in float32, and the result is rounded once to the dtype of ``x``. On
    CUDA, sides must be multiples of 8, and the compute capability at least 7.5.
    """
    codes, scale = parts[0], parts[1]
    if not takes(layout) or codes.shape != (layout.rows, layout.columns) or not fitting.fits(layout, parts, x, bias):
        return None
    if x.is_cpu and not codes.data_ptr():  # its storage is freed, or a tensor of zeros without memory
        return None
    x2 = x.reshape(-1, layout.columns)
    if not x.is_cpu and not _takes_on_cuda(layout, x2):
        return None
    inputs, steps = rounding.codes_of(x2, "int8")
    sums, unit = _multiply(inputs, codes), layout.fields["unit"]
    out = kernels.scaled(sums, steps, x.dtype, scale=scale, unit=unit, bias=bias)
    if out is None:
        out = sums.float() * steps * (scale.float().reshape(1, -1) * unit)
        if bias is not None:
            out += bias
    return out.to(x.dtype).view(*x.shape[:-1], layout.rows)


def _multiply(inputs: Tensor, codes: Tensor) -> Tensor:
    """Return ``inputs @ codes.T``, (M, K) and (N, K) int8, as int32.

    torch 2.13 passes the strides of both to oneDNN, also the arbitrary ones of dimensions of size 1. If oneDNN refuses
    them, the result is uninitialised memory. Views of a flat tensor have strides that oneDNN accepts.
    """
    rows, columns = codes.shape
    flat = codes.reshape(-1)
    turned = flat.view(1, rows) if columns == 1 else flat.view(rows, columns).t()
    return torch._int_mm(inputs.reshape(-1).view(inputs.shape), turned)


def _takes_on_cuda(layout: Layout, x: Tensor) -> bool:
    is_able = fitting.capability(x.device) >= (7, 5)
    return is_able and x.shape[0] >= LEAST and layout.rows % 8 == 0 and layout.columns % 8 == 0
