"""The scheme that changes no value: a tensor that only carries its tie record."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..geometry.views import Shape
from .blocks import rows
from .scheme import Part, Parts, Scheme


@dataclass(frozen=True)
class Plain(Scheme):
    """Hold a tensor as it is, so that its tie record travels with it.

        tensor (*shape) any dtype    w = tensor

    >>> import torch
    >>> Plain().decode(Plain().encode(torch.ones(2)), (2,), torch.float64)
    tensor([1., 1.], dtype=torch.float64)
    """

    kind: ClassVar[str] = "plain"
    transparent: ClassVar[bool] = True

    def layout(self, shape: Shape) -> dict[str, Part]:
        return {"tensor": Part(tuple(shape), None, math.prod(shape[1:]))}

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        return {"tensor": values.detach()}

    def decode(self, parts: Parts, shape: Shape, dtype: torch.dtype) -> Tensor:
        return parts["tensor"].to(dtype)

    def decode_into(self, parts: Parts, shape: Shape, start: int, stop: int, out: Tensor) -> None:
        out.copy_(rows(parts["tensor"], start, stop))

    def convert(self, parts: Parts, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"tensor": parts["tensor"].to(dtype)}

    def bound(self, parts: Parts, shape: Shape) -> Tensor:
        return torch.zeros((), device=parts["tensor"].device)

    def gather(self, parts: Parts, shape: Shape, index: Tensor, dtype: torch.dtype) -> Tensor:
        return parts["tensor"].index_select(0, index).to(dtype)
