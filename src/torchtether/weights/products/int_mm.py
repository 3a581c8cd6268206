"""torch's own product of 8-bit integers with 8-bit integers, for inputs that are rounded to int8."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import fitting, rounding
from .layout import Layout

LEAST = 17
"""With fewer rows of input, ``torch._int_mm`` refuses to multiply on CUDA."""


def takes(layout: Layout) -> bool:
    """Return whether codes are int8 with one scale for each row, or for all, and inputs are rounded to int8."""
    fields = layout.fields
    is_plain = layout.kind == "INT8" and fields["groups"] == 1 and fields["zero"] < 0 and fields["offset"] == 0
    return is_plain and fields["activations"] == 1 and fields["height"] in (1, layout.rows)


def linear(layout: Layout, parts: Sequence[Tensor], x: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return ``x @ weight.T + bias`` by ``torch._int_mm``; ``None`` where the call does not suit.

    Sums are exact, then float32 with the scales and the bias, and rounded once to the dtype of ``x``. On CUDA sides
    must be multiples of 8, and the capability 7.5 or more.
    """
    codes, scale = parts[0], parts[1]
    if not takes(layout) or codes.shape != (layout.rows, layout.columns) or not fitting.fits(layout, parts, x, bias):
        return None
    if x.is_cpu and not codes.data_ptr():  # its storage is freed, or it holds zeros without memory
        return None
    x2 = x.reshape(-1, layout.columns)
    if not x.is_cpu and not _takes_on_cuda(layout, x2):
        return None
    inputs, steps = rounding.codes_of(x2, "int8")
    sums = _multiply(inputs.nan_to_num(0.0).to(torch.int8), codes)
    out: Tensor = sums.float() * steps * (scale.float().reshape(1, -1) * layout.fields["unit"])
    if bias is not None:
        out += bias
    return out.to(x.dtype).view(*x.shape[:-1], layout.rows)


def _multiply(inputs: Tensor, codes: Tensor) -> Tensor:
    """Return ``inputs @ codes.T``, (M, K) and (N, K) int8, as int32.

    torch 2.13 gives the strides of both to oneDNN, also those of dimensions of size 1, which say nothing. Where oneDNN
    refuses them, the result is memory that nobody has written. Views from a flat tensor have the strides that it takes.
    """
    rows, columns = codes.shape
    flat = codes.reshape(-1)
    turned = flat.view(1, rows) if columns == 1 else flat.view(rows, columns).t()
    return torch._int_mm(inputs.reshape(-1).view(inputs.shape), turned)


def _takes_on_cuda(layout: Layout, x: Tensor) -> bool:
    is_able = fitting.capability(x.device) >= (7, 5)
    return is_able and x.shape[0] >= LEAST and layout.rows % 8 == 0 and layout.columns % 8 == 0
