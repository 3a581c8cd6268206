"""The values of a Weight seen in one dimension, over the same parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import SchemeError
from ..geometry.views import Shape
from .scheme import Part, Parts, Scheme


@dataclass(frozen=True)
class Flattened(Scheme):
    """Hold the parts of ``inner`` for ``shape``, with the values in one dimension: the scheme of ``weight.view(-1)``.

    Code that flattens tensors temporarily, such as FSDP2, makes such views; a view in ``shape`` is the original Weight
    again.  It has no ``kind``, so it cannot be stored.
    """

    inner: Scheme
    shape: Shape

    def layout(self, shape: Shape) -> dict[str, Part]:
        if torch.Size(shape).numel() != torch.Size(self.shape).numel():
            raise SchemeError(f"a flat view of {self.shape} cannot have shape {tuple(shape)}")
        return self.inner.layout(self.shape)

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        return self.inner.encode(values.reshape(self.shape))

    def reencode(self, values: Tensor, held: Parts) -> dict[str, Tensor]:
        return self.inner.reencode(values.reshape(self.shape), held)

    def update(self, values: Tensor, held: Parts, *, shrink: bool = True) -> dict[str, Tensor] | None:
        return self.inner.update(values.reshape(self.shape), held, shrink=shrink)

    def master(self, parts: Parts, shape: Shape) -> Tensor | None:
        master = self.inner.master(parts, self.shape)
        return None if master is None else master.view(shape)

    def decode(self, parts: Parts, shape: Shape, dtype: torch.dtype) -> Tensor:
        return self.inner.decode(parts, self.shape, dtype).view(shape)

    def bound(self, parts: Parts, shape: Shape) -> Tensor:
        return self.inner.bound(parts, self.shape).expand(self.shape).reshape(shape)

    def can_view(self, old: Shape, new: Shape) -> bool:
        return old == new

    def to_json(self) -> dict[str, Any]:
        raise SchemeError("a flat view of a Weight cannot be stored", fix=f"View it as {self.shape} first.")
