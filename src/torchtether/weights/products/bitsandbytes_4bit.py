"""Calls of bitsandbytes' kernels for nf4 and fp4, on the parts in place; the library is imported at the first call.

bitsandbytes has the two codes of a byte in the other order: it decodes the columns 2i and 2i + 1 exchanged. So products
exchange the columns of their inputs, and read the codes in place. Decoding exchanges the codes first, in a pass over
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ...schemes.nested import unnest
from ...schemes.tables import FP4, NF4
from .fitting import fits
from .layout import DTYPES, Layout, Rows

_NAMES = {NF4: "nf4", FP4: "fp4"}
_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


@cache
def ops() -> Any:
    """Return the namespace of bitsandbytes' ops, ``None`` if it is not installed, lacks these two, or is broken."""
    try:
        import bitsandbytes  # noqa: F401
    except Exception:  # it can raise any error if a part of CUDA is missing
        return None
    found = torch.ops.bitsandbytes
    return found if hasattr(found, "gemm_4bit") and hasattr(found, "dequantize_4bit") else None


@cache
def is_installed() -> bool:
    """Return whether bitsandbytes is installed, without importing it, which takes seconds."""
    return find_spec("bitsandbytes") is not None


def takes(layout: Layout) -> bool:
    """Return whether codes are nf4 or fp4, and rows consist of whole blocks of a size that bitsandbytes supports."""
    fields = layout.fields
    fills = fields["group"] * fields["groups"] == layout.columns and fields["group"] in _SIZES
    return layout.kind == "TABLE4" and fields["table"] in _NAMES and fills and is_installed()


def linear(layout: Layout, parts: Sequence[Tensor], x: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return ``x @ weight.T + bias`` by ``gemm_4bit``; ``None`` if it does not support the arguments.

    x (..., K) float32, bfloat16 or float16    result (..., N)
    """
    if x.dtype not in DTYPES or not takes(layout) or not fits(layout, parts, x, bias) or ops() is None:
        return None
    exchanged = x.reshape(-1, layout.columns // 2, 2).flip(-1).view(-1, layout.columns)
    size, name = layout.fields["group"], _NAMES[layout.fields["table"]]
    shape, codes = (layout.rows, layout.columns), parts[0].view(-1, 1)
    made: Tensor = ops().gemm_4bit(exchanged, codes, shape, _absmax(layout, parts, 0, layout.rows), size, name, bias)
    return made.view(*x.shape[:-1], layout.rows)


def decode(
    layout: Layout, parts: Sequence[Tensor], dtype: torch.dtype, rows: Rows = None, out: Tensor | None = None
) -> Tensor | None:
    """Return the ``rows``, with the bits of ``Scheme.decode``; ``None`` if not supported.

        (count of rows, K) of ``dtype``, which is float32, bfloat16 or float16

    ``out`` is not used: the op allocates its result.
    """
    if dtype not in DTYPES or not takes(layout) or not all(part.is_contiguous() for part in parts) or ops() is None:
        return None
    start, stop = rows or (0, layout.rows)
    codes = parts[0].view(layout.rows, -1)[start:stop]
    exchanged = (codes << 4 | codes >> 4).view(-1, 1)
    shape, size = (stop - start, layout.columns), layout.fields["group"]
    absmax, name = _absmax(layout, parts, start, stop), _NAMES[layout.fields["table"]]
    return ops().dequantize_4bit(exchanged, absmax, size, name, shape, dtype)  # type: ignore[no-any-return]


def _absmax(layout: Layout, parts: Sequence[Tensor], start: int, stop: int) -> Tensor:
    """Return the absmax, float32, of the blocks of the rows from ``start`` to ``stop``."""
    first, last, nested = start * layout.fields["groups"], stop * layout.fields["groups"], layout.fields["nested"]
    if not nested:
        return parts[1].view(-1)[first:last]
    named = dict(zip(layout.parts, parts, strict=True))
    return unnest(named, nested, torch.arange(first, last, device=parts[1].device))
