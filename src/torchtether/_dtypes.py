"""The names of dtypes in files and records, and tensors in a form that every device can copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import SchemeError

_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """Return ``torch.float32`` for ``"float32"``; raise SchemeError for anything that is not a dtype's name."""
    if not isinstance(name, str) or name not in _DTYPES:
        raise SchemeError(f"unknown dtype {name!r}")
    return _DTYPES[name]


def check_dtype(value: object, known: Sequence[torch.dtype], field: str, name: str) -> None:
    """Raise SchemeError about ``field`` of ``name`` unless ``value`` is one of ``known``; a dtype's name is text."""
    if value not in known:
        words = ", ".join(map(str, known))
        raise SchemeError(f"{field} must be one of {words}, got {value!r:.40}", name=name, fix="Give one of them.")


def copyable(tensor: Tensor) -> Tensor:
    """Return ``tensor`` without lazy conjugate or negative, 8-bit floats viewed as uint8.

    Not every device copies 8-bit floats into strided memory.
    """
    if tensor.is_floating_point() and tensor.element_size() == 1:
        return tensor.view(torch.uint8)
    return tensor.resolve_conj().resolve_neg()


def select_rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Return ``tensor.index_select(0, index)``, with 8-bit floats moved as uint8.

    For more than 16 rows on CUDA torch calls ``gather``, and not every version of it takes 8-bit floats.
    """
    if tensor.is_floating_point() and tensor.element_size() == 1:
        return tensor.view(torch.uint8).index_select(0, index).view(tensor.dtype)
    return tensor.index_select(0, index)
