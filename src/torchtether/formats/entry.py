"""What a format says about one tensor of a model: what it is, and under which keys it is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..files import Header, Record
from ..schemes import Shape
from ..spec import WeightSpec


@dataclass(frozen=True)
class Entry:
    """One tensor as a checkpoint holds it. ``keys`` maps each of its roles to a stored key.

    A plain tensor has one role, ``tensor``; ``stride`` is then how it lay in memory. A quantized one has ``spec``, and
    the roles are those of its format.
    """

    keys: Mapping[str, str]
    shape: Shape
    stride: Shape
    dtype: torch.dtype
    spec: WeightSpec | None = None


class Format(Protocol):
    """A published way to spell quantized weights: pure functions on tensors and strings, no files."""

    @property
    def name(self) -> str:
        """What people call it."""

    def recognise(self, header: Header, record: Record, config: Mapping[str, Any]) -> dict[str, Entry] | None:
        """The quantized weights, by name, of a checkpoint in this format; ``None`` if it is not in this format."""

    def unpack(self, entry: Entry, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parts of the Weight that ``entry`` describes, from its stored tensors by role."""
