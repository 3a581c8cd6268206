"""The values of a Weight: with their gradient, and outside of torch as lists, numpy arrays and DLPack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import UnsupportedOpError
from .wrapping import Wrapping


class Exporting(Wrapping):
    """A wrapper whose values are exported as copies.

    Torch's own methods would raise without naming a remedy, or read the wrapper's null storage.
    """

    def tolist(self) -> Any:
        """Return the values as nested lists of numbers."""
        return self.dequantize().tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the values as a numpy array with its own memory, for ``numpy.asarray``."""
        if copy is False:
            raise ValueError("copy=False: a numpy array cannot share the memory of a Weight")
        values = self.dequantize().detach().cpu().numpy()
        return values if dtype is None else values.astype(dtype, copy=False)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as a numpy array with its own memory, with ``force``.

        Raises UnsupportedOpError without ``force``.
        """
        if not force:
            raise UnsupportedOpError(
                "a numpy array cannot share the memory of a Weight",
                fix="Call .numpy(force=True) for a copy of the values, or write it by tt.save (accelerate: then "
                "cpu_offload(..., state_dict=tt.open(path)) reads from the disk).",
            )
        return self.__array__()

    def __dlpack__(self, **options: Any) -> Any:
        raise UnsupportedOpError("DLPack cannot share the memory of a Weight", fix="Call .dequantize() on it first.")

    def apply_(self, callable: Callable[..., Any]) -> Self:
        """Raise UnsupportedOpError: torch would write to memory that a Weight does not have."""
        raise UnsupportedOpError("apply_ cannot write to a Weight", fix="Call .dequantize(), and copy_() the result.")


class Dequantize(torch.autograd.Function):
    """Decode a Weight that requires grad; the gradient of the values is the gradient of the Weight."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Any) -> Tensor:
        values: Tensor = weight.values_of()
        return values.clone() if weight.scheme.transparent else values

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad
