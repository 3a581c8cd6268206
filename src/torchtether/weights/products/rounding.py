"""Dynamic activations: inputs of products, rounded to 8 or 4 bits at each call.

    int8      codes of -127 to 127, each row with a scale: largest of the row / 127
    float8    float8_e4m3fn, each row with a scale: largest of the row / 448
    mxfp8     as ``mxfp8()`` rounds weights: float8_e4m3fn, 32 of a row with a power of two
    mxfp4     as ``mxfp4()`` does: e2m1, 32 of a row with a power of two
    nvfp4     e2m1, 16 of a row with a scale in e4m3, each row with a power of two

The global scale of ``nvfp4()`` covers all rows, so that the rounding of a row would depend on the rest of its batch:
here each row has one of its own, a power of two, by which a product can be multiplied without rounding.

The compiled kernels round to int8 themselves. On CUDA devices torch multiplies codes with codes (``int_mm.py`` and
``scaled_mm.py``); elsewhere the rounded inputs take the path of all inputs, which gives the same numbers and saves no
time. Triton's kernels (``gpu/rounding.py``) round in one pass there, with the same bits as the torch ops of this file.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...gpu import rounding as kernels
from ...schemes.scales import divide

ROWS, BLOCKS = ("int8", "float8"), {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
"""Kinds with one scale per row, and kinds with one scale per block of so many columns."""

_LARGEST = {"int8": 127, "float8": 448}
_ONE = {"int8": 128.0, "float8": 512.0}
_SMALLEST = torch.finfo(torch.float32).tiny
_E4M3 = (2.0**-6, 448.0)  # the range of block scales, without subnormals, as in the scheme
_E2M1 = 6.0


class Blocks(NamedTuple):
    """Rows of inputs, rounded to ``values * scale * power``, padded with zeros to whole blocks.

        values (M, G, block) float32, each a number of e4m3 or e2m1    scale (M, G) float32, each of e8m0 or e4m3
        power (M, 1) float32, or ``None`` for 1

    If a row is not finite, one of its scales is NaN.
    """

    values: Tensor
    scale: Tensor
    power: Tensor | None


def codes_of(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return the codes of ``x`` (..., K), as int8 or float8_e4m3fn, and their (..., 1) float32 scales.

    float64 inputs are rounded in float64, with float64 scales. If a row is not finite, its scale is NaN, and its codes
    of int8 are 0.
    """
    made = kernels.codes(x, kind)
    if made is not None:
        return made
    codes, scale = _codes_of(x, kind)
    return codes.nan_to_num(0.0).to(torch.int8) if kind == "int8" else codes, scale


def _codes_of(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return the same with codes of int8 as they are computed: in float32, or float64, and perhaps NaN."""
    wide = x if x.dtype is torch.float64 else x.float()
    scale = divide(wide.abs().amax(-1, keepdim=True), _LARGEST[kind]).clamp_min(_SMALLEST)
    codes = wide / scale
    scale = scale.where(scale < torch.inf, torch.nan)
    return codes.round() if kind == "int8" else codes.to(torch.float8_e4m3fn), scale


def blocks_of(x: Tensor, kind: str) -> Blocks:
    """Round ``x`` (M, K) in blocks, computed in float32 for any dtype."""
    size = BLOCKS[kind]
    wide = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))
    largest = wide.abs().amax(-1)
    is_finite, power = largest < torch.inf, None
    if kind == "nvfp4":
        power = _power_above(divide(largest.amax(-1, keepdim=True), _E2M1 * _E4M3[1]))
        wide = wide / power.unsqueeze(-1)
        scale = divide(largest / power, _E2M1).clamp(*_E4M3).to(torch.float8_e4m3fn).float()
    elif kind == "mxfp8":
        scale = _power_above(divide(largest, _E4M3[1]))
    else:  # rounding to the significand of e2m1 may raise the exponent
        scale = (_power_below(largest, 1 << 21) * 0.25).clamp_min(2.0**-127)
    scale = scale.where(largest > 0, 1.0) if power is None else scale
    codes = (wide / scale.unsqueeze(-1)).nan_to_num(0.0)
    values = codes.clamp(-448, 448).to(torch.float8_e4m3fn).float() if kind == "mxfp8" else _nearest_e2m1(codes)
    return Blocks(values, scale.where(is_finite, torch.nan), power)


def _power_below(x: Tensor, more: int = 0) -> Tensor:
    """Return the largest power of two up to ``x``, after adding ``more`` to its bits; 0 for subnormal numbers."""
    return ((x.contiguous().view(torch.int32) + more) & 0x7F800000).view(torch.float32)


def _power_above(x: Tensor) -> Tensor:
    """Return the smallest normal power of two that is not less than ``x``."""
    below = _power_below(x)
    return torch.where(below < x, below * 2, below).clamp_min(_SMALLEST)


def _nearest_e2m1(x: Tensor) -> Tensor:
    """Return the numbers of e2m1 nearest to ``x``, halfway cases to the even code: 0, .5, 1, 1.5, 2, 3, 4, 6."""
    y = x.abs().clamp_max(_E2M1)
    step = torch.where(y < 2, 0.5, torch.where(y < 4, 1.0, 2.0))
    return ((y / step).round() * step).copysign(x)


def e2m1_codes(values: Tensor) -> Tensor:
    """Return the e2m1 codes of ``values`` (..., K), two to a byte, the first in the low half: (..., K / 2)."""
    y = values.abs()
    codes = torch.where(y < 2, y * 2, torch.where(y < 5, y + 2, 7.0)).to(torch.uint8) | (
        values.signbit().to(torch.uint8) << 3
    )
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def units_of(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Round ``x`` (..., K) to ``units * scale``, with one scale per row; units are between -4 and 4.

    Units are exact in the dtype of ``x``, except for float16 in blocks, where units may be below 2**-24.
    """
    made = kernels.units(x, kind, BLOCKS.get(kind))
    if made is not None:
        return made
    if kind in ROWS:
        codes, scale = _codes_of(x, kind)
        return codes.to(x.dtype) / _ONE[kind], scale * _ONE[kind]
    rows = x.reshape(-1, x.shape[-1])
    blocks = blocks_of(rows, kind)
    power = _power_below(rows.abs().amax(-1, keepdim=True).float()).clamp_min(_SMALLEST)
    power = power.where(power < torch.inf, 1.0)  # a block scale is NaN then
    scale = blocks.scale if blocks.power is None else blocks.scale * (blocks.power / power)
    by = scale / power if blocks.power is None else scale
    units = (blocks.values * by.unsqueeze(-1)).flatten(1)[:, : x.shape[-1]]
    power = power.double() if x.dtype is torch.float64 else power
    return units.to(x.dtype).view(x.shape), power.view(*x.shape[:-1], 1)


def scaled(sums: Tensor, scale: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return ``sums * scale + bias``, computed in the dtype of ``scale`` (..., 1) and rounded once to ``dtype``."""
    out = kernels.scaled(sums, scale, dtype, bias=bias)
    if out is not None:
        return out
    made = sums.to(scale.dtype) * scale
    return (made if bias is None else made + bias).to(dtype)


def rounded(x: Tensor, kind: str) -> Tensor:
    """Round ``x``; the conversion to its dtype may round once more. Gradients pass unchanged."""
    units, scale = units_of(x.detach(), kind)
    made = (units.to(scale.dtype) * scale).to(x.dtype)
    return x + (made - x.detach()) if torch.is_grad_enabled() and x.requires_grad else made
