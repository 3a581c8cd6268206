"""The choice of an encoder by device: compiled loops on the CPU, Triton kernels on a GPU.

Arguments and results are those of ``compiled``.  Where neither applies, callers use torch ops; all give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .. import compiled, gpu
from .looking import is_true


def can_read(values: Tensor) -> bool:
    """Return whether a compiled loop or a Triton kernel can read the memory of ``values``."""
    return gpu.can_read(values) or compiled.can_read(values)


def magnitudes(x: Tensor, width: int) -> Tensor | None:
    return gpu.magnitudes(x, width) if gpu.can_read(x) else compiled.magnitudes(x, width)


def extremes(x: Tensor, width: int) -> tuple[Tensor, Tensor] | None:
    return gpu.extremes(x, width) if gpu.can_read(x) else compiled.extremes(x, width)


def encode_rows(recipe: compiled.Recipe | None, values: Tensor, parts: Mapping[str, Tensor]) -> bool:
    if recipe is None or not gpu.can_read(values):
        return compiled.encode_rows(recipe, values, parts)
    if recipe.fields["is_searched"]:
        return False
    is_fine = gpu.encode_rows(recipe.fields, values, tuple(parts[name] for name in recipe.parts))
    return is_fine is not None and is_true(is_fine, unseen=True)


def encode_affine(x: Tensor, *args: Any, **kwargs: Any) -> bool:
    encode = gpu.encode_affine if gpu.can_read(x) else compiled.encode_affine
    return encode(x, *args, **kwargs)


def encode_float8(x: Tensor, *args: Any, **kwargs: Any) -> bool:
    encode = gpu.encode_float8 if gpu.can_read(x) else compiled.encode_float8
    return encode(x, *args, **kwargs)


def encode_nearest(x: Tensor, *args: Any, **kwargs: Any) -> bool:
    encode = gpu.encode_nearest if gpu.can_read(x) else compiled.encode_nearest
    return encode(x, *args, **kwargs)
