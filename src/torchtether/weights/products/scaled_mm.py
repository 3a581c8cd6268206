"""torch's products of small floats with small floats on GPUs, for inputs that are rounded to the same kind.

    weight's scales        recipe of the weight          recipe of the inputs    compute capability
    one for each row       RowWise                       RowWise                 8.9, and 9.0 on
    one for all            RowWise, repeated             RowWise                 8.9, and 9.0 on
    both, up to 256 rows   TensorWise 1, multiplied      TensorWise 1            9.0
    one for 128 of a row   BlockWise1x128                BlockWise1x128          9.0 alone, CUDA 12.9
    one for 128 x 128      BlockWise128x128              BlockWise1x128          9.0 alone, CUDA 12.9
    mxfp8                  BlockWise1x32, swizzled       the same                10.0 on, CUDA 12.8
    mxfp4                  BlockWise1x32, swizzled       the same                10.0 and 10.3, torch with MSLK
    nvfp4                  BlockWise1x16, swizzled,      the same                10.0 on, CUDA 12.8
                           and TensorWise

The compiler of torch 2.13 replaces the op by ``torch._scaled_mm``, which reads scales of blocks in another layout, and
asserts that no scales are swizzled. So graphs have the op for "rows" alone (``is_compiled``).

cuBLAS, which torch calls on 9.0, has no RowWise product of few rows and many columns: torchao's raises on an H100 for
9216 columns and up to 256 rows (its issue 4582), where TensorWise ones work. So few rows are scaled afterwards there.

``use_fast_accum`` stays off: on an H100 the product takes a tenth less time, but sums of 8192 products of one sign were
13 % off.

For blocks of 128, the scale of a row of inputs is repeated, so that all recipes compute with the same codes, and rows
are padded to a multiple of 8, as cuBLAS requires (NVIDIA's TransformerEngine has observed that). Scales of weights, a
128th to an eighth of the bytes of the codes, are rearranged at each call: a cached copy would have to follow every
write to the weight, also between replays of a CUDA graph.
Source: ``aten/src/ATen/native/cuda/ScaledBlas.cpp``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from ...gpu import rounding as kernels
from ...schemes.tables import E2M1
from ...torch_private.tensors import is_fake
from . import fitting, rounding
from .layout import DTYPES, SCALES, STREAM, Layout

BLOCK = 128
FEW = 256
"""The most rows of inputs for which cuBLAS may have no product with scales of rows."""
_SWIZZLED = SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE  # one for each recipe


def takes(layout: Layout) -> bool:
    """Return whether there is a recipe for the codes, the scales and the activations of the layout."""
    return recipe_of(layout) is not None


def is_compiled(layout: Layout) -> bool:
    """Return whether the compiler may see the product: it has no recipe, or one that the compiler supports."""
    return recipe_of(layout) in (None, "rows")


def recipe_of(layout: Layout) -> str | None:
    """Return the recipe for a layout: "rows", "strips" or "squares" of 128, or the kind of its activations."""
    fields, kind = layout.fields, layout.activations
    if layout.rows % 16 or layout.columns % (32 if kind in rounding.BLOCKS else 16):
        return None
    is_e4m3 = layout.kind == "E4M3"
    if kind == "float8" and is_e4m3 and fields["scale"] == DTYPES[torch.float32] and not fields["global_scale"]:
        return _recipe_of_float8(layout)
    is_row = fields["height"] == 1 and fields["group"] == rounding.BLOCKS.get(kind or "")
    is_e2m1 = layout.kind in ("TABLE4", STREAM) and fields["table"] == E2M1 and not fields["is_flat"]
    if not is_row or fields["scale"] != SCALES[_SCALE[kind or ""]]:
        return None
    return kind if (is_e4m3 if kind == "mxfp8" else is_e2m1) else None


_SCALE = {"mxfp8": torch.float8_e8m0fnu, "mxfp4": torch.float8_e8m0fnu, "nvfp4": torch.float8_e4m3fn}


def _recipe_of_float8(layout: Layout) -> str | None:
    fields = layout.fields
    if fields["groups"] == 1:
        return "rows" if fields["height"] in (1, layout.rows) else None
    if fields["group"] != BLOCK or layout.columns % BLOCK:
        return None
    if fields["height"] == BLOCK and layout.rows % BLOCK == 0:
        return "squares"
    return "strips" if fields["height"] == 1 else None


def linear(layout: Layout, parts: Sequence[Tensor], x: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return ``x @ weight.T + bias`` by ``F.scaled_mm``; ``None`` on the CPU, or if not supported.

    x bfloat16    result bfloat16, rounded once more before the bias if scales are per block
    """
    recipe = recipe_of(layout)
    if x.dtype is not torch.bfloat16 or recipe is None or not x.is_cuda or not fitting.fits(layout, parts, x, bias):
        return None
    if not _is_able(recipe, fitting.capability(x.device)):
        return None
    if recipe == "mxfp4" and is_fake(x):  # torch 2.13 expects half of the scales if tensors are fake
        return None
    rows = x.reshape(-1, layout.columns).contiguous()
    count = rows.shape[0]
    if recipe in rounding.BLOCKS:
        made = by_small_blocks(layout, parts, rounding.blocks_of(rows, recipe), bias)
    else:
        codes, scale = parts[0].view(layout.rows, layout.columns), parts[1]
        multiply, step = (by_rows, 1) if recipe == "rows" else (by_blocks, 8)
        rows = torch.nn.functional.pad(rows, (0, 0, 0, -count % step)) if count % step else rows
        made = multiply(layout, codes, scale, *rounding.codes_of(rows, "float8"), bias)[:count]
    return made.view(*x.shape[:-1], layout.rows)


def by_rows(layout: Layout, codes: Tensor, scale: Tensor, inputs: Tensor, steps: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product for a weight with one scale per row, or one for all.

    inputs (M, K), codes (N, K) float8_e4m3fn    steps (M, 1), scale (N or 1 elements) float32    result (M, N) bfloat16
    """
    if inputs.shape[0] <= FEW and fitting.capability(inputs.device)[0] == 9:
        one, whole = steps.new_ones(1), ScalingType.TensorWise
        sums = scaled_mm(inputs, codes.t(), one, whole, one, whole, output_dtype=torch.float32)
        made = kernels.scaled(sums, steps, torch.bfloat16, scale=scale, bias=bias)
        if made is None:
            sums = sums * steps * scale.reshape(1, -1)
            made = (sums if bias is None else sums + bias).to(torch.bfloat16)
        return made
    each = scale.reshape(1, -1).expand(1, layout.rows).contiguous()
    rows, added = ScalingType.RowWise, None if bias is None else bias.contiguous()  # cuBLAS ignores its stride
    return scaled_mm(inputs, codes.t(), steps, rows, each, rows, bias=added, output_dtype=torch.bfloat16)


def by_blocks(
    layout: Layout, codes: Tensor, scale: Tensor, inputs: Tensor, steps: Tensor, bias: Tensor | None
) -> Tensor:
    """Return the product for a weight with one scale per 1 x 128 or 128 x 128 codes."""
    groups, is_square = layout.fields["groups"], layout.fields["height"] == BLOCK
    each = steps.expand(-1, groups).t().contiguous().t()  # (M, K / 128), columns first
    grid = scale.view(-1, groups)
    # (K / 128 padded to a multiple of 4, N / 128), or (N, K / 128), columns first
    grid = torch.nn.functional.pad(grid, (0, -groups % 4)).t() if is_square else grid.t().contiguous().t()
    recipe = ScalingType.BlockWise128x128 if is_square else ScalingType.BlockWise1x128
    made = scaled_mm(inputs, codes.t(), each, ScalingType.BlockWise1x128, grid, recipe, output_dtype=torch.bfloat16)
    return made if bias is None else made + bias


def by_small_blocks(layout: Layout, parts: Sequence[Tensor], inputs: rounding.Blocks, bias: Tensor | None) -> Tensor:
    """Return the product for weights and inputs with scales per 16 or 32 columns: mxfp8, mxfp4, nvfp4.

    result (M, N) bfloat16. The bias is added last: torch supports none for mxfp4, and inputs may have powers of two.
    """
    codes, scale = parts[0].view(layout.rows, -1), parts[1].view(layout.rows, -1)
    if layout.activations == "mxfp8":
        left = inputs.values.to(torch.float8_e4m3fn).flatten(1)
    else:
        left = rounding.e2m1_codes(inputs.values).flatten(1).view(torch.float4_e2m1fn_x2)
        codes = codes.view(torch.float4_e2m1fn_x2)
    if inputs.power is None:
        steps, recipe = (inputs.scale.view(torch.int32) >> 23).to(torch.uint8), [ScalingType.BlockWise1x32]
        left_scales, right_scales = [_e8m0(steps)], [_e8m0(scale)]
    else:
        recipe = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
        one = inputs.power.new_ones(1)
        left_scales = [swizzled(inputs.scale.to(torch.float8_e4m3fn)), one]
        right_scales = [swizzled(scale), _global_scale(layout, parts, one)]
    swizzles = [*_SWIZZLED[: len(recipe)]]
    made = scaled_mm(
        left, codes.t(), left_scales, recipe, right_scales, recipe, swizzles, swizzles, output_dtype=torch.bfloat16
    )
    if inputs.power is not None:
        made = (made * inputs.power).to(made.dtype)
    return made if bias is None else made + bias


def _e8m0(steps: Tensor) -> Tensor:
    return swizzled(steps.view(torch.uint8)).view(torch.float8_e8m0fnu)


def _global_scale(layout: Layout, parts: Sequence[Tensor], one: Tensor) -> Tensor:
    """Return the factor of all scales of a weight, (1,) float32."""
    how = layout.fields["global_scale"]
    return one if how == 0 else parts[2].view(1) if how == 1 else parts[2].view(1).reciprocal()


def swizzled(scale: Tensor) -> Tensor:
    """Return the scales (R, G), of one byte each, in the order in which tensor cores read them.

    Tiles of 128 x 4, padded with zeros, are contiguous, in row-major order of tiles. In a tile the scale of row r and
    column c is at ``r % 32 * 16 + r // 32 * 4 + c``. Source: cuBLAS, "1D Block Scaling Factors Layout".
    """
    rows, groups = scale.shape
    filled = torch.nn.functional.pad(scale.view(torch.uint8), (0, -groups % 4, 0, -rows % 128))
    tiles = filled.view(-(-rows // 128), 4, 32, -(-groups // 4), 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scale.dtype)


def _is_able(recipe: str, capability: tuple[int, int]) -> bool:
    if recipe == "rows":
        return capability >= (9, 0) or capability == (8, 9)
    if torch.compiler.is_compiling():
        return False
    if recipe in ("strips", "squares"):
        return capability[0] == 9 and _cuda_version() >= (12, 9)
    if recipe == "mxfp4":
        return capability[0] == 10 and "USE_MSLK" in torch.__config__.show()
    return capability >= (10, 0) and _cuda_version() >= (12, 8)


def _cuda_version() -> tuple[int, ...]:
    return tuple(int(number) for number in (torch.version.cuda or "0").split("."))
