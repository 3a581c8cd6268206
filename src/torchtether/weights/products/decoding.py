"""Decoding by the kernels of the device of the parts: all rows, ranges of rows, and indexed rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ...geometry.views import Shape
from ...schemes import Scheme
from ...torch_private.observers import is_observed
from . import bitsandbytes_4bit, cpu, gpu
from .layout import Layout, Rows, layout_of

DECODERS: dict[str, tuple[Callable[..., Tensor | None], ...]] = {
    "cpu": (cpu.decode,),
    "cuda": (gpu.decode, bitsandbytes_4bit.decode),
}
"""The decoders of ranges of rows, by device type, best first; with the signature of ``cpu.decode``."""

GATHERERS: dict[str, Callable[..., Tensor | None]] = {"cpu": cpu.gather, "cuda": gpu.gather}
"""The decoder of indexed rows, by device type; with the signature of ``cpu.gather``."""


def decode(
    layout: Layout, parts: Sequence[Tensor], dtype: torch.dtype, rows: Rows = None, out: Tensor | None = None
) -> Tensor | None:
    """Return the ``rows``, with the bits of ``Scheme.decode``; ``None`` if no kernel fits.

    (count of rows, K) of ``dtype``; perhaps at the beginning of ``out``, if that is given
    """
    for kernel in DECODERS.get(parts[0].device.type, ()):
        made = kernel(layout, parts, dtype, rows, out)
        if made is not None:
            return made
    return None


def gather(layout: Layout, parts: Sequence[Tensor], dtype: torch.dtype, index: Tensor) -> Tensor | None:
    """Return the rows at ``index``, with the bits of ``Scheme.gather``; ``None`` if no kernel fits.

    (*index.shape, K) of ``dtype``
    """
    kernel = GATHERERS.get(parts[0].device.type)
    return None if kernel is None else kernel(layout, parts, dtype, index)


def values(scheme: Scheme, parts: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return the result of ``scheme.decode``, by a kernel if one fits."""
    if is_observed() or (layout := _rows_of(scheme, tuple(shape))) is None:
        return scheme.decode(parts, shape, dtype)
    made = decode(layout, [parts[name] for name in layout.parts], dtype)
    return scheme.decode(parts, shape, dtype) if made is None else made.view(shape)


@lru_cache(maxsize=4096)
def _rows_of(scheme: Scheme, shape: Shape) -> Layout | None:
    """Return the layout of ``shape`` viewed as a matrix of rows; ``None`` if the scheme does not allow that view."""
    if not shape:
        return None
    matrix = (math.prod(shape[:-1]), shape[-1])
    return layout_of(scheme, matrix) if shape == matrix or scheme.can_view(shape, matrix) else None
