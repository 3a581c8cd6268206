"""Encoding on a GPU, by Triton kernels: extremes of runs, codes under given scales, and both with scales in one pass.

They take the arguments of the loops of ``compiled``, and give the same bits.  ``x`` (R, K) is contiguous, of a dtype
that ``can_read`` accepts; ``scale`` and ``zero``, float32, (R or 1, groups) have one entry per ``width`` columns;
``codes`` (R, bytes) may be the first columns of a wider table.  None of them waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .serving import on, serves

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
AFFINE, FLOAT8, NEAREST = range(3)

_BLOCK = 4096
"""Numbers that a program encodes at once."""

_WIDE = 8192
"""The most columns of a run that a program holds in registers; it reads the numbers of longer ones twice."""

_LONGEST = 1 << 17
"""The most columns of a run that one program processes; longer runs, perhaps only one, are left to torch ops."""


def can_read(values: Tensor) -> bool:
    """Return whether the kernels can read the memory of ``values``."""
    if not serves(values) or values.dtype not in FLOATS or not values.is_contiguous():
        return False
    return values.numel() > 0 and not (torch.is_grad_enabled() and values.requires_grad)


def magnitudes(x: Tensor, width: int) -> Tensor | None:
    """Return the largest magnitude of each run of ``width`` columns, (R, groups) float32; NaN if a run holds one."""
    found = _extremes(x, width, signed=False)
    return None if found is None else found[1]


def extremes(x: Tensor, width: int) -> tuple[Tensor, Tensor] | None:
    """Return the smallest and the largest value of each run of ``width`` columns, (R, groups) float32.

    One of them is NaN if the run holds one.
    """
    return _extremes(x, width, signed=True)


def _extremes(x: Tensor, width: int, *, signed: bool) -> tuple[Tensor, Tensor] | None:
    if not can_read(x) or width > _LONGEST:
        return None
    (rows, columns), groups = x.shape, -(-x.shape[1] // width)
    high = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    low = torch.empty_like(high) if signed else high
    width = min(width, columns)
    (block, runs), total, is_flat = _tile(width, _WIDE), rows * groups, columns % width == 0
    _launch(
        "find_extremes", -(-total // runs), x, low, high, total, width, columns, groups,
        SIGNED=signed, FLAT=is_flat, FULL=is_flat and width % block == 0, LOOPS=block < width, RUNS=runs, BLOCK=block,
    )  # fmt: skip
    return low, high


def encode_rows(fields: Mapping[str, Any], values: Tensor, parts: tuple[Tensor, ...]) -> Tensor | None:
    """Write scales and codes of all ``values`` in one pass, and return a flag, int32 (1,).

    ``fields`` are those of the compiled loops' recipe; ``parts`` the codes, the scales and the zero points, contiguous.
    If the flag is 0, a number was not finite, or too large, and ``parts`` are undefined.
    """
    columns, width = fields["columns"], fields["width"]
    if not can_read(values) or not _suits(width, columns, fields["bits"]) or width > _LONGEST:
        return None
    if not serves(values, *parts) or not all(map(Tensor.is_contiguous, parts)):
        return None
    codes, scale, *zero = parts
    is_fine = torch.ones(1, dtype=torch.int32, device=values.device)
    _encode(
        values.view(-1, columns), width, scale, zero[0] if zero else scale, codes, is_fine,
        kind=fields["kind"], bits=fields["bits"], stride=fields["stride"],
        divides=fields["kind"] != NEAREST and not fields["scales"],
        shifts=bool(zero), span=fields["span"], unit=fields["unit"], limits=(fields["lowest"], fields["highest"]),
        offset=fields["offset"], zero_offset=fields["zero_offset"], mantissa=fields["mantissa"], bias=fields["bias"],
        edges=fields["edges"], order=() if fields["is_ordered"] else fields["order"],
        power=fields["scales"], top=fields["top"],
    )  # fmt: skip
    for part in parts:
        _note_written(part)
    return is_fine


def encode_affine(
    x: Tensor,
    width: int,
    scale: Tensor,
    zero: Tensor | None,
    codes: Tensor,
    *,
    divides: bool,
    limits: tuple[int, int],
    offset: int,
    bits: int,
) -> bool:
    """Write round(x / scale + zero), clipped to ``limits``, plus ``offset``, to ``codes`` of 4 or 8 bits."""
    if not _can_encode(x, width, scale, codes, bits):
        return False
    return _encode(
        x, width, scale, scale if zero is None else zero, codes, None,
        kind=AFFINE, bits=bits, stride=codes.stride(0), divides=divides, shifts=zero is not None,
        limits=limits, offset=offset,
    )  # fmt: skip


def encode_float8(x: Tensor, width: int, scale: Tensor, codes: Tensor, *, divides: bool, largest: float) -> bool:
    """Write x / scale (or times), clipped to ``largest``, to ``codes`` (R, K), float8_e4m3fn or float8_e5m2."""
    if codes.dtype not in _FLOAT8 or not _can_encode(x, width, scale, codes, 8):
        return False
    mantissa, bias = _FLOAT8[codes.dtype]
    return _encode(
        x, width, scale, scale, codes, None,
        kind=FLOAT8, bits=8, stride=codes.stride(0), divides=divides, limits=(-largest, largest),
        mantissa=mantissa, bias=bias,
    )  # fmt: skip


_FLOAT8 = {torch.float8_e4m3fn: (3, 7), torch.float8_e5m2: (2, 15)}  # bits of the mantissa, bias of the exponent


def encode_nearest(
    x: Tensor,
    width: int,
    scale: Tensor,
    codes: Tensor,
    *,
    divides: bool,
    thresholds: tuple[float, ...],
    order: tuple[int, ...] | None = None,
) -> bool:
    """Write to ``codes``, two to a byte, the number of ascending ``thresholds`` below x / scale (or times).

    With ``order`` the code is ``order[number]``; without, the number is that of the magnitude, plus 8 for the sign.
    """
    size = 7 if order is None else 15
    if len(thresholds) > size or not _can_encode(x, width, scale, codes, 4):
        return False
    return _encode(
        x, width, scale, scale, codes, None,
        kind=NEAREST, bits=4, stride=codes.stride(0), divides=divides,
        edges=(*thresholds, *[float("inf")] * (size - len(thresholds))),
        order=() if order is None or tuple(order) == tuple(range(len(order))) else tuple(order),
    )  # fmt: skip


def _can_encode(x: Tensor, width: int, scale: Tensor, codes: Tensor, bits: int) -> bool:
    if not can_read(x) or not serves(x, scale, codes) or codes.stride(-1) != 1:
        return False
    return _suits(width, x.shape[1], bits)


def _suits(width: int, columns: int, bits: int) -> bool:
    """Return whether each run begins at a byte."""
    return bits == 8 or (bits == 4 and (width % 2 == 0 or width >= columns))


def _tile(width: int, most: int) -> tuple[int, int]:
    """Return the number of columns (a power of two) and the number of runs that a program takes."""
    block = max(2, min(1 << (width - 1).bit_length(), most if width <= most else _BLOCK))
    return block, max(1, _BLOCK // block)


def _encode(
    x: Tensor,
    width: int,
    scale: Tensor,
    zero: Tensor,
    codes: Tensor,
    is_fine: Tensor | None,
    *,
    kind: int,
    bits: int,
    stride: int,
    divides: bool,
    shifts: bool = False,
    span: float = 1.0,
    unit: float = 1.0,
    limits: tuple[float, float] = (0.0, 0.0),
    offset: int = 0,
    zero_offset: int = 0,
    mantissa: int = 0,
    bias: int = 0,
    edges: tuple[float, ...] = (),
    order: tuple[int, ...] = (),
    power: str = "",
    top: int = 0,
) -> bool:
    """Encode under given scales, or, if ``is_fine`` is given, under scales that the kernel computes and writes, too."""
    (rows, columns), fits = x.shape, is_fine is not None
    width, groups = min(width, columns), -(-columns // width)
    is_shared = not fits and scale.shape[0] == 1
    if not fits:
        scale, zero = scale.float().contiguous(), zero.float().contiguous()
    block, runs = _tile(width, _WIDE if fits else _BLOCK)
    pieces = 1 if fits else -(-width // block)
    words = [0, 0]
    for place, code in enumerate(order):
        words[place // 8] |= code << place % 8 * 4
    signed = tuple(word - (word >> 31 << 32) for word in words)
    total, is_flat = rows * groups, columns % width == 0 and (stride * 8 == columns * bits or rows == 1)
    _launch(
        "encode", -(-total // runs) * pieces,
        x, _bytes(scale), _bytes(zero) if fits else zero, _bytes(codes), scale if is_fine is None else is_fine,
        total, width, columns, groups, stride, pieces, float(span), float(unit), float(limits[0]), float(limits[1]),
        offset, zero_offset,
        KIND=kind, BITS=bits, FITS=fits, LOOPS=fits and block < width, DIVIDES=divides, SHIFTS=shifts,
        FLAT=is_flat, SHARED=is_shared, MANTISSA=mantissa, BIAS=bias,
        EDGES=edges, PLACES=_places(tuple(edges)), ORDER=signed if order else (),
        FULL=is_flat and width % block == 0, RUNS=runs, BLOCK=block, POWER=power, TOP=top,
    )  # fmt: skip
    return True


@lru_cache
def _places(edges: tuple[float, ...]) -> tuple[int, ...]:
    """Return 1 / a step, and the nearest multiples of the step to 15 ascending thresholds between -1 and 1.

    Empty if there is no step for which all are different.

    >>> _places((-0.5, *[0.1 * n for n in range(9)], *[float("inf")] * 5))
    (16, -8, 0, 2, 3, 5, 6, 8, 10, 11, 13)
    """
    finite = [edge for edge in edges if edge < float("inf")]
    if len(edges) != 15 or not finite or finite[0] < -1 or finite[-1] > 1:
        return ()
    for most in (8, 16, 32):
        places = [round(edge * most) for edge in finite]
        if len(set(places)) == len(places):
            return most, *places
    return ()


def _bytes(codes: Tensor) -> Tensor:
    return codes if codes.dtype == torch.uint8 or codes.itemsize != 1 else codes.view(torch.uint8)


def _launch(name: str, programs: int, *args: Any, **constants: Any) -> None:
    """Start ``programs`` of a kernel on the device of the first argument.

    Products and sums must not be fused (``enable_fp_fusion``): that rounds once where torch ops round twice.
    """
    kernel = getattr(import_module(".encoding_kernels", __package__), name)
    warps = 8 if constants["BLOCK"] * constants["RUNS"] > _BLOCK else 4
    with on(args[0]):
        kernel[(programs,)](*args, **constants, num_warps=warps, enable_fp_fusion=False)


def _note_written(out: Tensor) -> None:
    """Record a write for autograd, as any in-place op does."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
