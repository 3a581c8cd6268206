"""Dynamic activations: inputs of products rounded to 8 bits as they come, each row with a scale of its own.

    int8      codes of -127 to 127: scale = largest of the row / 127
    float8    float8_e4m3fn: scale = largest of the row / 448

The compiled kernels round to int8 themselves. On CUDA devices torch multiplies codes with codes (``int_mm.py`` and
``scaled_mm.py``), which no GPU has run yet; elsewhere the rounded inputs go where all inputs go, which gains no time
and gives the same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = {"int8": 127, "float8": 448}
_ONE = {"int8": 128.0, "float8": 512.0}
_SMALLEST = torch.finfo(torch.float32).tiny


def codes_of(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return the codes of ``x`` (..., K), as float32 or float8_e4m3fn, and their (..., 1) float32 scales.

    float64 inputs are rounded in float64, and have such codes and scales. Where a row is not finite, none of it is.
    """
    wide = x if x.dtype is torch.float64 else x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / _LARGEST[kind]).clamp_min(_SMALLEST)
    codes = wide / scale
    scale = scale.where(scale < torch.inf, torch.nan)
    return codes.round() if kind == "int8" else codes.to(torch.float8_e4m3fn), scale


def units_of(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Round ``x`` to ``units * scale``; units are exact in its dtype and between -1 and 1."""
    codes, scale = codes_of(x, kind)
    return codes.to(x.dtype) / _ONE[kind], scale * _ONE[kind]


def rounded(x: Tensor, kind: str) -> Tensor:
    """Round ``x``, in its own dtype, which may round once more. Gradients pass as if nothing were."""
    units, scale = units_of(x.detach(), kind)
    made = (units.to(scale.dtype) * scale).to(x.dtype)
    return x + (made - x.detach()) if torch.is_grad_enabled() and x.requires_grad else made
