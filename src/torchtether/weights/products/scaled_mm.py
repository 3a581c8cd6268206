"""torch's own product of float8 with float8 on GPUs, for inputs that are rounded to float8_e4m3fn by row.

    weight's scales        recipe of the weight    of the inputs           compute capability
    one for each row       RowWise                 RowWise                 8.9, and 9.0 on
    one for all            RowWise, repeated       RowWise                 8.9, and 9.0 on
    one for 128 of a row   BlockWise1x128          BlockWise1x128          9.0 alone, CUDA 12.9
    one for 128 x 128      BlockWise128x128        BlockWise1x128          9.0 alone, CUDA 12.9

The scale of a row of inputs is repeated where blocks are asked for, so that all compute with the same codes. Source:
``aten/src/ATen/native/cuda/ScaledBlas.cpp``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from . import fitting, rounding
from .layout import DTYPES, Layout

BLOCK = 128


def takes(layout: Layout) -> bool:
    """Return whether codes are e4m3 under float32 scales of a known grid, and inputs are rounded to float8."""
    fields = layout.fields
    is_plain = layout.kind == "E4M3" and fields["scale"] == DTYPES[torch.float32] and not fields["global_scale"]
    if not is_plain or fields["activations"] != 2 or layout.rows % 16 or layout.columns % 16:
        return False
    if fields["groups"] == 1:
        return fields["height"] in (1, layout.rows)
    is_square = fields["height"] == BLOCK and layout.rows % BLOCK == 0
    return fields["group"] == BLOCK and layout.columns % BLOCK == 0 and (fields["height"] == 1 or is_square)


def linear(layout: Layout, parts: Sequence[Tensor], x: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return ``x @ weight.T + bias`` by ``F.scaled_mm``; ``None`` where the call does not suit, or on the CPU.

    x bfloat16    result bfloat16, rounded once more before the bias where scales are of blocks
    """
    if x.dtype is not torch.bfloat16 or not takes(layout) or not x.is_cuda or not fitting.fits(layout, parts, x, bias):
        return None
    is_blocked = layout.fields["groups"] > 1
    if not _is_able(fitting.capability(x.device), is_blocked):
        return None
    codes, scale = parts[0].view(layout.rows, layout.columns), parts[1]
    inputs, steps = rounding.codes_of(x.reshape(-1, layout.columns), "float8")
    multiply = by_blocks if is_blocked else by_rows
    return multiply(layout, codes, scale, inputs, steps, bias).view(*x.shape[:-1], layout.rows)


def by_rows(layout: Layout, codes: Tensor, scale: Tensor, inputs: Tensor, steps: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product where the weight has one scale for each row, or for all.

    inputs (M, K), codes (N, K) float8_e4m3fn    steps (M, 1), scale (N or 1 elements) float32    result (M, N) bfloat16
    """
    each = scale.reshape(1, -1).expand(1, layout.rows).contiguous()
    rows = ScalingType.RowWise
    return scaled_mm(inputs, codes.t(), steps, rows, each, rows, bias=bias, output_dtype=torch.bfloat16)


def by_blocks(
    layout: Layout, codes: Tensor, scale: Tensor, inputs: Tensor, steps: Tensor, bias: Tensor | None
) -> Tensor:
    """Return the product where the weight has one scale for each 1 x 128, or 128 x 128, codes.

    Scales lie as the op wants them, which takes a copy of them for each call: a 128th, or less, of the codes' bytes.
    """
    groups, is_square = layout.fields["groups"], layout.fields["height"] == BLOCK
    each = steps.expand(-1, groups).t().contiguous().t()  # (M, K / 128), columns first
    grid = scale.view(-1, groups)
    # (K / 128, filled up to a multiple of 4, N / 128), or (N, K / 128), columns first
    grid = torch.nn.functional.pad(grid, (0, -groups % 4)).t() if is_square else grid.t().contiguous().t()
    recipe = ScalingType.BlockWise128x128 if is_square else ScalingType.BlockWise1x128
    made = scaled_mm(inputs, codes.t(), each, ScalingType.BlockWise1x128, grid, recipe, output_dtype=torch.bfloat16)
    return made if bias is None else made + bias


def _is_able(capability: tuple[int, int], is_blocked: bool) -> bool:
    if not is_blocked:
        return capability >= (9, 0) or capability == (8, 9)
    return capability[0] == 9 and _cuda_version() >= (12, 9)


def _cuda_version() -> tuple[int, ...]:
    return tuple(int(number) for number in (torch.version.cuda or "0").split("."))
