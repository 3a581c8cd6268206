"""Calls of the compiled loops on tensors.

``x`` (R, K) is contiguous, of a float dtype that ``can_read`` accepts; ``scale`` and ``zero``, float32, (R or 1,
groups) have one entry per ``width`` columns; ``codes`` (R, bytes) may be the first columns of a wider table.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ..torch_private.observers import is_direct
from .room import native

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The numbers of the dtypes in the loops."""


def can_read(values: Tensor) -> bool:
    """Return whether the loops are available and can read the memory of ``values``.

    New tensors here name their device and dtype: a caller may have set another default.
    """
    if library_for(values) is None or values.dtype not in DTYPES or not values.is_contiguous():
        return False
    return values.numel() > 0 and values.data_ptr() % values.itemsize == 0 and not values.is_neg()


def is_at_hand(*tensors: Tensor) -> bool:
    """Return whether the loops are available for these tensors: on the CPU, under no tracer, without a graph."""
    return library_for(*tensors) is not None


def library_for(*tensors: Tensor) -> ModuleType | None:
    """Return the module of the loops if they are available and may read these tensors, else ``None``."""
    if not is_direct():
        return None
    library = native()
    if library is None or not all(type(t) is Tensor and t.device.type == "cpu" for t in tensors):
        return None
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return None
    return library


def magnitudes(x: Tensor, width: int) -> Tensor | None:
    """Return the largest magnitude of each run of ``width`` columns, (R, groups) float32; NaN if a run holds one."""
    library = library_for(x)
    if library is None or not can_read(x):
        return None
    rows, columns = x.shape
    out = torch.empty((rows, -(-columns // width)), dtype=torch.float32, device="cpu")
    if rows == 1 and columns % width == 0:  # threads share rows
        rows, columns = columns // width, width
    library.magnitudes(x.data_ptr(), DTYPES[x.dtype], 0, rows, columns, width, out.data_ptr())
    return out


def extremes(x: Tensor, width: int) -> tuple[Tensor, Tensor] | None:
    """Return the smallest and the largest value of each run of ``width`` columns, (R, groups) float32.

    One of them is NaN if the run holds one.
    """
    library = library_for(x)
    if library is None or not can_read(x):
        return None
    rows, columns = x.shape
    low, high = (torch.empty((rows, -(-columns // width)), dtype=torch.float32, device="cpu") for _ in range(2))
    library.extremes(x.data_ptr(), DTYPES[x.dtype], 0, rows, columns, width, low.data_ptr(), high.data_ptr())
    return low, high


def encode_biased(
    x: Tensor, width: int, scale: Tensor, bias: Tensor, *, bias_first: bool, top: int, reach: int
) -> Tensor | None:
    """Return the codes up to ``top`` that decode nearest to ``x`` in the dtype of ``scale`` and ``bias``, (R, K) uint8.

    Codes up to ``reach`` away from the rounded position are tried.
    """
    library = library_for(x, scale)
    if library is None or not can_read(x):
        return None
    (by, stride), its = one_per_run(scale), one_per_run(bias)[0]
    codes = torch.empty(x.shape, dtype=torch.uint8, device="cpu")
    library.encode_biased(
        *(x.data_ptr(), DTYPES[x.dtype], 0, *x.shape, width, by.data_ptr(), its.data_ptr(), stride),
        *(bias_first, top, reach, DTYPES[scale.dtype], codes.data_ptr()),
    )
    return codes


def fit_biased(
    x: Tensor, width: int, scale: Tensor, bias: Tensor, *, bias_first: bool, top: int, weights: tuple[float, ...]
) -> Tensor | None:
    """Return ``bias`` (R, groups) moved as by ``half_quadratic``, with one round per entry of ``weights``."""
    library = library_for(x, scale)
    if library is None or not can_read(x):
        return None
    moved, by = bias.to(torch.float32, copy=True), scale.float().contiguous()
    rounds = torch.tensor(weights, dtype=torch.float32, device="cpu")
    library.fit_biased(
        *(x.data_ptr(), DTYPES[x.dtype], 0, *x.shape, width, by.data_ptr(), moved.data_ptr()),
        *(bias_first, top, DTYPES[bias.dtype], rounds.data_ptr(), len(rounds)),
    )
    return moved.to(bias.dtype)


def decode_affine(
    codes: Tensor,
    width: int,
    scale: Tensor,
    zero: Tensor | float,
    out: Tensor,
    *,
    bits: int,
    unit: float,
) -> bool:
    """Write ((codes - zero) * scale) * unit to ``out`` (R, K), of a float dtype."""
    library = library_for(codes, scale, out)
    if library is None or bits not in (4, 8) or not _can_write(out) or codes.stride(-1) != 1:
        return False
    (scale, stride), lows = one_per_run(scale), one_per_run(zero)[0] if isinstance(zero, Tensor) else None
    library.decode_affine(
        *(codes.data_ptr(), -8 if codes.dtype == torch.int8 else bits, 0, *out.shape, width, codes.stride(0)),
        *(scale.data_ptr(), None if lows is None else lows.data_ptr(), stride, 0.0 if lows is not None else zero),
        *(unit, out.data_ptr(), DTYPES[out.dtype], out.stride(0)),
    )
    note_written(out)
    return True


def decode_table(codes: Tensor, width: int, scale: Tensor, table: Tensor, out: Tensor, *, bits: int) -> bool:
    """Write table[codes] * scale to ``out`` (R, K) of a float dtype; ``table``, float32, has a value for every code."""
    library = library_for(codes, scale, table, out)
    if library is None or bits not in (4, 8) or not _can_write(out) or codes.stride(-1) != 1:
        return False
    assert table.shape == (1 << bits,)
    (scale, stride), (rows, columns), step = one_per_run(scale), out.shape, codes.stride(0)
    if rows == 1 and columns % width == 0 and width * bits % 8 == 0:  # threads share rows
        rows, columns, step, stride = columns // width, width, width * bits // 8, 1
    library.decode_table(
        *(codes.data_ptr(), bits, 0, rows, columns, width, step, scale.data_ptr(), stride, table.data_ptr()),
        *(out.data_ptr(), DTYPES[out.dtype], out.stride(0) if rows == out.shape[0] else columns),
    )
    note_written(out)
    return True


def _can_write(out: Tensor) -> bool:
    return out.dtype in DTYPES and out.stride(-1) == 1 and out.numel() > 0 and out.data_ptr() % out.itemsize == 0


def one_per_run(scale: Tensor) -> tuple[Tensor, int]:
    """Return ``scale`` (R or 1, groups) as contiguous float32, and the distance between its rows."""
    scale = scale.float().contiguous()
    return scale, scale.shape[1] if scale.shape[0] > 1 else 0


def note_written(out: Tensor) -> None:
    """Record a write for autograd, as any in-place op does."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
