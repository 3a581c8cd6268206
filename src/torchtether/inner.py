"""What wrapper subclasses do alike with the plain tensors that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from .schemes import dtype_from_name, dtype_name


def share(tensors: Iterable[Tensor]) -> None:
    """Every one of ``tensors`` lies in shared memory."""
    for tensor in tensors:
        tensor.share_memory_()


def are_shared(tensors: Iterable[Tensor]) -> bool:
    """Whether every one of ``tensors`` lies in shared memory."""
    return all(tensor.is_shared() for tensor in tensors)


def to_pickle(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """``tensors`` as plain pickle takes them, and the dtypes of those that travel as bytes.

    Plain pickle has no storages of float8 types.

    >>> to_pickle({"codes": torch.ones(1).to(torch.float8_e4m3fn), "scale": torch.ones(1)})
    ({'codes': tensor([56], dtype=torch.uint8), 'scale': tensor([1.])}, {'codes': 'float8_e4m3fn'})
    """
    float8 = {name: dtype_name(one.dtype) for name, one in tensors.items() if _is_float8(one)}
    return {name: one.view(torch.uint8) if name in float8 else one for name, one in tensors.items()}, float8


def from_pickle(tensors: Mapping[str, Tensor], float8: Mapping[str, str]) -> dict[str, Tensor]:
    """The inverse of ``to_pickle``; SchemeError for a name that is no dtype's."""
    return {name: one.view(dtype_from_name(float8[name])) if name in float8 else one for name, one in tensors.items()}


def _is_float8(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.itemsize == 1
