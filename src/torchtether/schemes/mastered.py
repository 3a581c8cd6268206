"""Codes together with a float master, for quantization-aware training with a straight-through gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .._checks import describe
from .._dtypes import check_dtype, dtype_name
from ..errors import SchemeError
from ..geometry.views import Shape
from ..torch_private.tensors import is_fake
from .bits import same_bits
from .blocks import source
from .scheme import Part, Parts, Scheme

MASTER = "master"
"""The part that holds the floats."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Mastered(Scheme):
    """Hold the codes of ``scheme``, and the floats from which they were rounded.

        the parts of ``scheme``
        master (*shape) dtype    changed by in-place ops; the codes are those nearest to it

    Products, ``dequantize()`` and all other reads use the codes; the gradient goes straight through to the master
    (quantization-aware training, arXiv 1308.3432).  ``.to(dtype)`` leaves the dtype of the master as it is.

    ``tt.quantize(model, scheme, master=torch.float32)`` makes such Weights.  ``tt.quantize(model, scheme)`` drops the
    masters and keeps the codes, ``tt.save(..., masters="drop")`` leaves them out of the file; when a Weight of
    ``scheme`` is loaded into one with a master, its values become the master.

    >>> import torch, torchtether as tt
    >>> weight = tt.Weight.encode(torch.tensor([[1.0, 0.3]]), Mastered(tt.int4(symmetric=True)))
    >>> with torch.no_grad():
    ...     weight.sub_(1e-3).parts["master"], weight.dequantize()
    (tensor([[0.9990, 0.2990]]), tensor([[0.9324, 0.2664]]))
    """

    kind: ClassVar[str] = "mastered"

    scheme: Scheme
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        name = "Mastered"
        if not isinstance(self.scheme, Scheme) or self.scheme.transparent or isinstance(self.scheme, Mastered):
            got = str(self.scheme) if isinstance(self.scheme, Scheme) else describe(self.scheme)
            raise SchemeError(f"needs a scheme of codes, got {got}", name=name, fix="Give one such as tt.int8().")
        check_dtype(self.dtype, DTYPES, "dtype", name)

    def _as_class(self) -> str:
        return f"Mastered({self.scheme}, {dtype_name(self.dtype)})"

    @property
    def decoder(self) -> Scheme:
        return self.scheme

    def master(self, parts: Parts, shape: Shape) -> Tensor | None:
        return parts[MASTER]

    def layout(self, shape: Shape) -> dict[str, Part]:
        parts = self.scheme.layout(shape)
        if MASTER in parts:
            raise SchemeError(f"{type(self.scheme).__name__} has a part {MASTER!r} of its own")
        return {**parts, MASTER: Part(tuple(shape), self.dtype, math.prod(shape[1:]))}

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        values = source(values)
        master = torch.empty(values.shape, dtype=self.dtype, device=values.device).copy_(values)
        return {**self.scheme.encode(master), MASTER: master}

    def reencode(self, values: Tensor, held: Parts) -> dict[str, Tensor]:
        """Return ``held`` if the master has these values already, else encode them."""
        if torch.compiler.is_compiling() or values.is_meta or is_fake(values):
            return self.encode(values)
        master = values.to(self.dtype).reshape(held[MASTER].shape)
        return dict(held) if same_bits(master, held[MASTER]) else self.encode(values)

    def update(self, values: Tensor, held: Parts, *, shrink: bool = True) -> dict[str, Tensor] | None:
        return self.reencode(values, held)

    def adopt(self, given: Scheme, parts: Parts, shape: Shape) -> dict[str, Tensor] | None:
        if given.decoder != self.scheme:
            return None
        codes = {name: parts[name].clone() for name in self.scheme.layout(shape)}
        master = given.master(parts, shape)
        values = self.scheme.decode(codes, shape, self.dtype) if master is None else master.to(self.dtype, copy=True)
        return {**codes, MASTER: values}

    def decode(self, parts: Parts, shape: Shape, dtype: torch.dtype) -> Tensor:
        return self.scheme.decode(_codes(parts), shape, dtype)

    def decode_into(self, parts: Parts, shape: Shape, start: int, stop: int, out: Tensor) -> None:
        self.scheme.decode_into(_codes(parts), shape, start, stop, out)

    def gather(self, parts: Parts, shape: Shape, index: Tensor, dtype: torch.dtype) -> Tensor:
        return self.scheme.gather(_codes(parts), shape, index, dtype)

    def bound(self, parts: Parts, shape: Shape) -> Tensor:
        """Return the error of the codes, plus that of rounding the values to a 16-bit master."""
        bound = self.scheme.bound(_codes(parts), shape)
        if self.dtype.itemsize > 2:
            return bound
        info = torch.finfo(self.dtype)
        reach = self.decode(parts, shape, torch.float32).abs() + bound
        return bound + reach * info.eps + info.smallest_normal * info.eps

    def can_view(self, old: Shape, new: Shape) -> bool:
        return self.scheme.can_view(old, new)


def _codes(parts: Parts) -> dict[str, Tensor]:
    return {name: part for name, part in parts.items() if name != MASTER}
