"""torch's product of floats with 8-bit integers, for CPUs without the compiled module and GPUs without Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .fitting import fits, is_plain
from .layout import Layout


def takes(layout: Layout) -> bool:
    """Return whether codes have one scale per row and no zero points."""
    fields = layout.fields
    return all(fields[name] == 1 for name in ("groups", "height", "unit")) and fields["zero"] < 0


def linear(layout: Layout, parts: Sequence[Tensor], x: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return ``x @ weight.T + bias`` by ``torch._weight_int8pack_mm``; ``None`` if that would crash or be wrong.

    On the CPU the op reads beyond the end if K is not a multiple of 16, crashes if memory is not aligned to 16 bytes,
    and rounds its sums to the dtype of ``x``. On CUDA the product is computed in float32 for any ``x``, and K is
    arbitrary, but codes are counted in int32. Scales, which the op would round on the CPU, and the bias are applied
    afterwards, in float32.
    """
    codes, scale = parts[0], parts[1]
    if not takes(layout) or codes.shape != (layout.rows, layout.columns) or not fits(layout, parts, x, bias):
        return None
    x2 = x.reshape(-1, layout.columns).contiguous()
    if x.is_cpu:
        if not is_plain(x, bias) or layout.columns % 16 or x.is_neg():
            return None
        if any(address % 16 or not address for address in (codes.data_ptr(), x2.data_ptr())):  # 0: freed, or all zeros
            return None
    elif codes.numel() >= 2**31:
        return None
    else:
        x2 = x2.float()
    sums = torch._weight_int8pack_mm(x2, codes, x2.new_ones(layout.rows))
    out = sums.float() * scale.reshape(-1)
    if bias is not None:
        out += bias
    return out.to(x.dtype).view(*x.shape[:-1], layout.rows)
