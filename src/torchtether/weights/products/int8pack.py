"""torch's own product with 8-bit integers, for machines without the compiled room."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .layout import Layout

_PLAIN = (Tensor, torch.nn.Parameter)


def linear(layout: Layout, parts: Sequence[Tensor], x: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return ``x @ weight.T + bias`` by ``torch._weight_int8pack_mm``; ``None`` where it would crash or be wrong.

    It reads beyond the end where K is not a multiple of 16, crashes where a storage does not begin at a multiple of 16
    bytes, and rounds its sums to the dtype of ``x``. Scales, which it would round, too, and the bias come after, in
    float32; so the result is rounded twice.
    """
    codes, scale = parts[0], parts[1]
    is_plain = all(layout.fields[name] == 1 for name in ("groups", "height", "unit")) and layout.fields["zero"] < 0
    if not is_plain or codes.shape != (layout.rows, layout.columns) or x.shape[-1:] != (layout.columns,):
        return None
    if bias is not None and (bias.dtype is not x.dtype or bias.shape != (layout.rows,) or not bias.is_cpu):
        return None
    if type(x) not in _PLAIN or type(bias) not in (*_PLAIN, type(None)):
        return None
    x2 = x.reshape(-1, layout.columns).contiguous()
    if (
        layout.columns % 16
        or x2.numel() == 0
        or x.is_neg()
        or not (codes.is_contiguous() and codes.is_cpu and x.is_cpu)
    ):
        return None
    if any(address % 16 or not address for address in (codes.data_ptr(), x2.data_ptr())):  # 0: freed, or all zeros
        return None
    sums = torch._weight_int8pack_mm(x2, codes, x.new_ones(layout.rows))
    out = sums.float() * scale.reshape(-1)
    if bias is not None:
        out += bias
    return out.to(x.dtype).view(*x.shape[:-1], layout.rows)
