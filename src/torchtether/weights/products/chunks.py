"""Products with a weight decoded a few rows at a time into one scratch buffer, which stays in the cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, addmm, mm
from torch.nn.functional import linear as whole

from ...torch_private.observers import is_observed
from . import table

Decode = Callable[[int, int, Tensor | None], Tensor]
"""``decode(start, stop, out)`` returns rows of the weight, perhaps written to the beginning of ``out``."""


def linear(x: Tensor, bias: Tensor | None, rows: int, columns: int, step: int, decode: Decode) -> Tensor:
    """Return ``x @ weight.T + bias``, holding ``step`` rows of ``weight`` (rows, columns) at a time.

    x (..., columns)    result (..., rows)
    """
    if not x.is_cpu and not is_observed():  # transforms and forward AD do not support ``out``
        return in_place(x, bias, rows, columns, step, decode)
    outs, scratch = [], x.new_empty(step, columns)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        some = decode(start, stop, scratch)
        outs.append(whole(x, some, None if bias is None else bias[start:stop]))
    return torch.cat(outs, dim=-1)


def in_place(x: Tensor, bias: Tensor | None, rows: int, columns: int, step: int, decode: Decode) -> Tensor:
    """Return the result of ``linear``; write each product directly to its columns, which saves concatenation.

    No scratch is needed: on a GPU the allocator reuses the memory of one chunk for the next at once.
    """
    inputs = x.reshape(-1, x.shape[-1]) if x.dim() > 0 else x  # torch raises the error for other sizes
    out = x.new_empty(*x.shape[:-1], rows)
    made = out.view(-1, rows)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        if bias is None:
            mm(inputs, decode(start, stop, None).t(), out=made[:, start:stop])
        else:
            addmm(bias[start:stop], inputs, decode(start, stop, None).t(), out=made[:, start:stop])
    return out


def product(x: Tensor, rows: int, columns: int, step: int, decode: Decode) -> Tensor:
    """Return ``x @ weight``, the gradient of ``linear``, summed over chunks in float32 (or float64).

    x (M, rows)    result (M, columns)
    """
    scratch = x.new_empty(step, columns) if x.is_cpu else None
    wide = x.dtype if x.dtype.itemsize > 4 else torch.float32
    total = torch.zeros(x.shape[0], columns, dtype=wide, device=x.device)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        total += times(x[:, start:stop], decode(start, stop, scratch))
    return total.to(x.dtype)


def times(x: Tensor, values: Tensor) -> Tensor:
    """Return ``x @ values``, in float32 if torch has no vectorized product of 16-bit floats (300 times as slow).

    x (M, K)    values (K, N) of the same dtype    result (M, N) of it, or float32
    """
    return x.float() @ values.float() if is_slow(x) else x @ values


def is_slow(x: Tensor) -> bool:
    """Return whether torch multiplies ``x`` faster, and not less exactly, in float32."""
    return x.dtype in table.HALVES and x.is_cpu and not table.has_fast_halves(x.dtype)
