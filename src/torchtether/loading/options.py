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

Device = torch.device | str | Mapping[str, torch.device | str | None] | None
"""One device for all tensors, or one per glob, as for ``Dtype``."""


@dataclass(frozen=True)
class LoadOptions:
    """Hold the arguments of ``tt.load`` that decide which steps a plan has; ``tt.load`` describes those that it has."""

    quantize: Rules = None
    dtype: Dtype = None
    device: Device = None
    strict: bool = True
    ties: Ties = "match"
    rename: Rename = None
    is_refit: bool = False
    """Whether values alone are wanted: real non-persistent buffers take theirs, and ties of the file do not matter."""


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes that values may be converted between while they are loaded."""


def fault(name: str, what: str) -> str:
    """Return the one line that says ``what`` is wrong with the tensor or argument ``name``."""
    return " ".join(f"{name}: {what}".split())
