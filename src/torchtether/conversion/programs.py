"""The recorded program: ops on ``meta``, and the memory that they make, as numbers and geometry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ref:
    """A reference to a tensor: the number of its memory in the program, and the geometry over it."""

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool = False
    is_neg: bool = False


@dataclass
class Const:
    """A real tensor that entered the record; if it is not a copy, ``version`` is its version at that moment."""

    tensor: Tensor
    version: int | None = None


@dataclass(frozen=True)
class RecordedOp:
    """One recorded op. ``op`` is its name, so that a record can be pickled; empty for a constant."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    makes: tuple[tuple[int, Ref], ...]
    touches: frozenset[int]
    default_dtype: torch.dtype
    is_random: bool = False

    @property
    def fills(self) -> bool:
        """Return whether the step sets values; ``empty`` only makes memory."""
        return "empty" not in self.op


@dataclass
class Program:
    """The steps by number, and for each memory the numbers of the steps that make or write it."""

    steps: dict[int, RecordedOp] = field(default_factory=dict)
    history: dict[int, list[int]] = field(default_factory=dict)

    def slice(self, memories: Iterable[int]) -> list[int]:
        """Return the numbers of all steps on which the final contents of ``memories`` depend, in order."""
        needed, chosen, todo = set[int](), set[int](), list(memories)
        while todo:
            memory = todo.pop()
            if memory not in needed:
                needed.add(memory)
                for number in self.history.get(memory, ()):
                    if number not in chosen:
                        chosen.add(number)
                        todo += self.steps[number].touches
        return sorted(chosen)

    def knows(self, memory: int) -> bool:
        """Return whether all memories that ``memory`` depends on are made by steps, and a step sets its values."""
        numbers = self.slice([memory])
        steps = [self.steps[number] for number in numbers]
        made = {ref.memory for step in steps for _, ref in step.makes}
        touched = {m for step in steps for m in step.touches}
        return touched <= made and any(self.steps[number].fills for number in self.history.get(memory, ()))

    def is_random(self, memory: int) -> bool:
        return any(self.steps[number].is_random for number in self.slice([memory]))


@dataclass(frozen=True)
class Recipe:
    """A program and the reference of the tensor that it computes."""

    program: Program
    ref: Ref

    def __deepcopy__(self, memo: dict[int, Any]) -> Recipe:
        return self  # it is immutable once the record is closed
