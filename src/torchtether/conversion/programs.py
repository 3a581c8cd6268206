"""Ops on ``meta`` and the memory that they make, written down as numbers and geometry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ref:
    """A tensor, as geometry over memory number ``memory`` of its program."""

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool = False
    is_neg: bool = False


@dataclass
class Const:
    """A real tensor that entered the record; where it is not a copy, ``version`` tells whether it was changed since."""

    tensor: Tensor
    version: int | None = None


@dataclass(frozen=True)
class RecordedOp:
    """One op. ``op`` is its name, so that a record can be pickled; empty for a constant."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    makes: tuple[tuple[int, Ref], ...]
    touches: frozenset[int]
    default_dtype: torch.dtype
    is_random: bool = False

    @property
    def fills(self) -> bool:
        """Return whether the step gives values; ``empty`` gives memory only."""
        return "empty" not in self.op


@dataclass
class Program:
    """The steps by their number, and for each memory the numbers of those that make or write it."""

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
        """Return whether everything that ``memory`` depends on was made by a step, and something filled it."""
        numbers = self.slice([memory])
        steps = [self.steps[number] for number in numbers]
        made = {ref.memory for step in steps for _, ref in step.makes}
        touched = {m for step in steps for m in step.touches}
        return touched <= made and any(self.steps[number].fills for number in self.history.get(memory, ()))

    def is_random(self, memory: int) -> bool:
        return any(self.steps[number].is_random for number in self.slice([memory]))


@dataclass(frozen=True)
class Recipe:
    """How to compute one tensor."""

    program: Program
    ref: Ref

    def __deepcopy__(self, memo: dict[int, Any]) -> Recipe:
        return self  # nothing in it changes
