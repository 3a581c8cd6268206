"""Dynamic activations: inputs of products rounded to 8 bits as they come, each row with a scale of its own.

    int8      codes of -127 to 127: scale = largest of the row / 127
    float8    float8_e4m3fn: scale = largest of the row / 448

The compiled kernels round to int8 themselves. On CUDA devices torch multiplies codes with codes (``engine_for``), which
no GPU has run yet; elsewhere the rounded inputs go where all inputs go, which gains no time and gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...geometry.views import Shape
from ...schemes import Affine, ScaledFloat, Scheme

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


# -- products of two tensors of 8 bits --------------------------------------------------------------------------------


def engine_for(
    kind: str, scheme: Scheme, shape: Shape, rows: int, dtype: torch.dtype, capability: tuple[int, int]
) -> str | None:
    """Return torch's product of codes and codes on a GPU: ``int_mm``, ``scaled_mm`` or None.

        int_mm      int8 with int8 codes, a scale per row, or one; more than 16 rows of inputs, sides multiples of 8
        scaled_mm   float8_e4m3fn both, a scale per row, outputs in bfloat16, sides multiples of 16; capability 9.0

    >>> from torchtether.schemes import int4, int8
    >>> engine_for("int8", int8(), (64, 64), 32, torch.bfloat16, (8, 0))
    'int_mm'
    >>> engine_for("int8", int4(), (64, 64), 32, torch.bfloat16, (8, 0)) is None
    True
    """
    if len(shape) != 2:
        return None
    if kind == "int8" and isinstance(scheme, Affine):
        is_plain = scheme.bits == 8 and scheme.signed and scheme.symmetric and not scheme.act_order
        fits = rows > 16 and shape[0] % 8 == 0 and shape[1] % 8 == 0
        by_rows = scheme.block in ((1, None), (None, None))
        return "int_mm" if is_plain and fits and by_rows and capability >= (7, 5) else None
    if kind == "float8" and isinstance(scheme, ScaledFloat):
        is_plain = scheme.element == "e4m3" and scheme.scale_dtype is torch.float32 and not scheme.global_scale
        fits = rows > 0 and shape[0] % 16 == 0 and shape[1] % 16 == 0 and dtype is torch.bfloat16
        return "scaled_mm" if is_plain and fits and scheme.block == (1, None) and capability >= (9, 0) else None
    return None


def int_mm(x: Tensor, scheme: Scheme, parts: Mapping[str, Tensor]) -> Tensor:
    """Return ``x @ weight.T`` of both sides as int8, summed exactly and rounded once to the dtype of ``x``.

    x (M, K)    result (M, N)
    """
    assert isinstance(scheme, Affine)
    codes, scale = codes_of(x, "int8")
    sums = torch._int_mm(codes.to(torch.int8), parts["qdata"].t())
    per_row = parts["scale"].reshape(1, -1).to(scale.dtype) * scheme.unit
    return (sums.to(scale.dtype) * scale * per_row).to(x.dtype)


def scaled_mm(x: Tensor, scheme: Scheme, parts: Mapping[str, Tensor]) -> Tensor:
    """Return ``x @ weight.T`` of both sides as float8_e4m3fn.

    x (M, K)    result (M, N)
    """
    codes, scale = codes_of(x, "float8")
    return torch._scaled_mm(codes, parts["qdata"].t(), scale, parts["scale"].reshape(1, -1), out_dtype=x.dtype)


ENGINES = {"int_mm": int_mm, "scaled_mm": scaled_mm}
