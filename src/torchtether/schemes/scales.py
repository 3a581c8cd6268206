"""The rounding of scales to the dtype in which they are stored, never to 0, and the error of that rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dtypes import dtype_name
from ..errors import SchemeError
from .looking import is_true

TINY = float(torch.finfo(torch.float32).tiny)
"""The smallest normal float32: a device that flushes subnormals must not turn a scale into 0."""


def smallest_scale(dtype: torch.dtype) -> float:
    """Return the smallest scale that is not rounded to 0 by ``dtype`` or by a device without subnormals."""
    info = torch.finfo(dtype)
    return max(TINY, info.smallest_normal * info.eps)  # the product: the smallest subnormal


def store_scale(scale: Tensor, extreme: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``scale`` rounded to ``dtype``: at least ``smallest_scale``, and 1 for blocks whose ``extreme`` is 0."""
    scale = scale.clamp_min(smallest_scale(dtype))
    stored = torch.where(extreme > 0, scale, 1.0).to(dtype)
    if not is_true(torch.isfinite(stored).all(), unseen=True):
        raise SchemeError(
            f"a scale of {float(scale.max()):.4g} does not fit {dtype_name(dtype)}",
            fix="Use scale_dtype=torch.float32.",
        )
    return stored


def raise_to(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``scale`` (float32, not negative) rounded up to ``dtype``: the least number that is not below it.

    >>> raise_to(torch.tensor([1.0, 1.001]), torch.bfloat16).tolist()
    [1.0, 1.0078125]
    """
    stored = scale.to(dtype)
    bits = stored.view(_INTEGERS[dtype.itemsize])  # of non-negative floats, the next larger one has the next bits
    return torch.where(stored.float() < scale, bits + 1, bits).view(dtype)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def cover_scale(scale: Tensor, extreme: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``store_scale`` rounded up, so that the result reaches every value that ``scale`` reaches."""
    smallest = torch.finfo(dtype).smallest_normal
    return store_scale(raise_to(scale * (1 + 2.0**-22), dtype).float().clamp_min(smallest), extreme, dtype)


def divide(x: Tensor, number: float) -> Tensor:
    """Return ``x / number``, rounded once on every device (a GPU would multiply by the reciprocal)."""
    return x / x.new_full((), number)


def rounded_off(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return how much larger a scale may have been before it was rounded to ``dtype``: half its last unit."""
    info = torch.finfo(dtype)
    half = info.eps / 2
    return (scale * (half / (1 - half))).clamp_min(info.smallest_normal * half)


def reciprocal(scale: Tensor) -> Tensor:
    """Return ``1 / scale``, and 1 where ``scale`` is too small to divide by."""
    return 1.0 / torch.where(scale.abs() < TINY, 1.0, scale)
