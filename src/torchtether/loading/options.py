"""The arguments of a load in one object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from ..conversion.selection import Rules
from ..renaming.steps import Rename

Ties = Literal["match", "file", "model"]

Dtype = torch.dtype | Mapping[str, torch.dtype | None] | None
"""One dtype for all tensors, or one per glob over names; the first match wins, ``None`` is the default of ``load``."""

Device = torch.device | str | int | Mapping[str, torch.device | str | int | None] | None
"""One device for all tensors, or one per glob, as for ``Dtype``."""


@dataclass(frozen=True)
class LoadOptions:
    """Hold the arguments of ``tt.load``, which describes them, that decide the steps of a plan, and ``is_refit``."""

    quantize: Rules = None
    dtype: Dtype = None
    device: Device = None
    strict: bool = True
    ties: Ties = "match"
    rename: Rename = None
    is_refit: bool = False
    """Whether to load only values: real non-persistent buffers are loaded, too, and ties of the file are ignored."""


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes between which a load converts values."""

INTEGERS = (
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64
)  # fmt: skip
"""The dtypes whose values a load may widen."""


def fault(name: str, what: str) -> str:
    """Return the one-line fault ``what`` of the tensor or argument ``name``."""
    return " ".join(f"{name}: {what}".split())
