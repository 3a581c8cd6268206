"""The subject of the laws: makes tensors of the class under test, reads their values, and uses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..law import NotApplicable

Read = Callable[[Tensor], Tensor]
Linear = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Subject:
    """Make, read and use a tensor of the class under test."""

    make: Callable[[], Tensor]
    read: Read | None
    linear: Linear | None

    def make_tensor(self, seed: int = 0) -> Tensor:
        """Return a new tensor; its values depend on ``seed`` if ``make`` draws them from torch's generator."""
        torch.manual_seed(seed)
        return self.make()

    def parameter(self, seed: int = 0, *, requires_grad: bool = False) -> nn.Parameter:
        """Return ``make_tensor(seed)`` as a Parameter."""
        made = self.make_tensor(seed)
        if requires_grad and not made.is_floating_point():
            raise NotApplicable(f"its dtype is {made.dtype}, which has no gradients")
        if isinstance(made, nn.Parameter):
            return made.requires_grad_(requires_grad)  # type: ignore[return-value]
        return nn.Parameter(made, requires_grad=requires_grad)

    def values(self, tensor: Tensor) -> Tensor:
        """Return the values of ``tensor`` as a plain tensor."""
        with torch.no_grad():
            made = self._read(tensor)
        return made.detach()

    def _read(self, tensor: Tensor) -> Tensor:
        kind = type(tensor)
        if kind in (Tensor, nn.Parameter):
            return tensor
        if self.read is not None:
            return self.read(tensor)
        if hasattr(tensor, "full_tensor"):  # DTensor
            return self._read(tensor.full_tensor())
        if kind.dequantize is not Tensor.dequantize:
            return self._read(tensor.dequantize())
        names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
        inner = [getattr(tensor, name) for name in names]
        if inner and all(one.shape == tensor.shape and one.dtype == tensor.dtype for one in inner):
            return self._read(inner[0])
        raise NotApplicable("its values cannot be read: give values=, or write dequantize() for the class")

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return ``x @ weight.T``."""
        return (self.linear or F.linear)(x, weight)

    def tied(self, seed: int = 0, *, requires_grad: bool = False) -> Tied:
        """Return a module that holds the parameter under two names."""
        return Tied(self.parameter(seed, requires_grad=requires_grad))


class Tied(nn.Module):
    """Hold one Parameter as ``emb.weight`` and ``head.weight``."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.emb, self.head = nn.Module(), nn.Module()
        self.emb.register_parameter("weight", weight)
        self.head.register_parameter("weight", weight)

    @property
    def weight(self) -> nn.Parameter:
        return self.head.weight  # type: ignore[return-value]
