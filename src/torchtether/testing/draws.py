"""Test tensors: a case fixes shape, dtype, pattern and seed, and torch draws the numbers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._dtypes import dtype_name
from ..geometry.views import Shape

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes of test values."""

PATTERNS = ("normal", "zeros", "constant", "spike", "tiny", "large", "positive", "negative", "zero_rows", "mixed_rows")
"""The patterns that ``filled`` draws: most bugs of quantization do not show on normally distributed values."""

SHAPES: tuple[Shape, ...] = (
    (1,), (7,), (64,), (70,), (1, 1), (3, 5), (1, 64), (12, 64), (5, 70), (4, 128), (2, 256), (2, 3, 16), (2, 5, 64),
    (3, 1, 128),
)  # fmt: skip
"""A few shapes of each kind: one to three dimensions, even and odd sizes, one row, one element."""


def filled(shape: Shape, dtype: torch.dtype, pattern: str, seed: int) -> Tensor:
    """Return a tensor of ``shape`` and ``dtype`` with values of ``pattern``; finite in every float dtype.

    >>> filled((2, 3), torch.float16, "constant", seed=0)
    tensor([[0.3701, 0.3701, 0.3701],
            [0.3701, 0.3701, 0.3701]], dtype=torch.float16)
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    if pattern == "zeros":
        values = torch.zeros(shape)
    elif pattern == "constant":
        values = torch.full(shape, 0.37)
    elif pattern == "spike" and values.numel():
        values = values * 1e-3
        values.view(-1)[seed % values.numel()] = 50.0
    elif pattern == "tiny":
        values = values * 1e-6
    elif pattern == "large":
        values = values * 1e3
    elif pattern == "positive":
        values = values.abs() + 0.1
    elif pattern == "negative":
        values = -values.abs() - 0.1
    elif pattern == "zero_rows" and values.dim():
        values[::2] = 0
    elif pattern == "mixed_rows" and values.dim():
        values = values * torch.logspace(-4, 2, values.shape[0]).view(-1, *[1] * (values.dim() - 1))
    return values.to(dtype)


class Case(NamedTuple):
    """Describe one test tensor."""

    shape: Shape
    dtype: torch.dtype
    pattern: str
    seed: int

    def values(self) -> Tensor:
        return filled(*self)

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {dtype_name(self.dtype)} {self.pattern!r}"


def cases(shapes: tuple[Shape, ...], seed: int = 0) -> list[Case]:
    """Return a case for every shape with half of the patterns, always with the first; dtypes take turns.

    ``seed`` shifts the choice of patterns and dtypes, and changes the numbers.
    """
    return [
        Case(shape, FLOATS[(i + j // 2) % len(FLOATS)], pattern, 31 * i + j + seed)
        for i, shape in enumerate(shapes, seed % 97)
        for j, pattern in enumerate(PATTERNS)
        if j == 0 or (i + j) % 2
    ]
