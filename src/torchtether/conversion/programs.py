"""The recorded program: ops on ``meta``, and the memory that they make, as numbers and geometry."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
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
    """One recorded op. ``op`` is its name, so that a record can be pickled; empty for a constant.

    ``state`` is the state of a random generator, for an op that draws numbers from it. ``is_random`` if an op draws
    numbers that the record does not determine: those of the generator that the caller has seeded, or not.
    ``default_dtype`` is ``None`` if the result does not depend on it.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    makes: tuple[tuple[int, Ref], ...]
    touches: frozenset[int]
    default_dtype: torch.dtype | None
    is_random: bool = False
    state: Ref | None = None

    @property
    def fills(self) -> bool:
        """Return whether the step sets values; ``empty`` only makes memory."""
        return "empty" not in self.op


@dataclass
class Program:
    """The steps by number, and for each memory the numbers of the steps that make or write it."""

    steps: dict[int, RecordedOp] = field(default_factory=dict)
    history: dict[int, list[int]] = field(default_factory=dict)
    _known: dict[int, bool] = field(default_factory=dict)
    """By memory, while the record is open: whether steps make all that its contents depend on."""

    def append(self, step: RecordedOp, written: Iterable[int] = ()) -> None:
        """Append ``step``, which writes to the memories ``written``, too."""
        number = len(self.steps)
        self.steps[number] = step
        made = {ref.memory for _, ref in step.makes}
        is_known = all(self._known.get(memory, False) for memory in step.touches)
        for memory in dict.fromkeys([*made, *written]):
            self.history.setdefault(memory, []).append(number)
            self._known[memory] = is_known and self._known.get(memory, memory in made)

    def keep(self, memories: Iterable[int]) -> None:
        """Keep only the steps on which the contents of ``memories`` depend; no step is appended afterwards."""
        self.steps = {number: self.steps[number] for number in self.slice(memories)}
        self.history = {m: [n for n in numbers if n in self.steps] for m, numbers in self.history.items()}
        self._known.clear()

    def slice(self, memories: Iterable[int]) -> list[int]:
        """Return the numbers of all steps on which the final contents of ``memories`` depend, in order."""
        chosen = set[int]()
        ends: dict[int, int] = {}  # steps from here on do not matter
        last = max(self.steps, default=-1)
        todo = [(memory, last + 1) for memory in memories]
        while todo:
            memory, end = todo.pop()
            if end <= ends.get(memory, 0):
                continue
            ends[memory] = end
            for number in self.history.get(memory, ()):
                if number < end and number not in chosen:
                    chosen.add(number)
                    todo += ((touched, number) for touched in self.steps[number].touches)
        return sorted(chosen)

    def knows(self, memory: int) -> bool:
        """Return whether steps make all that the contents of ``memory`` depend on, and one of them sets its values."""
        return self._known.get(memory, False) and any(self.steps[n].fills for n in self.history[memory])

    def is_random(self, memory: int) -> bool:
        return any(self.steps[number].is_random for number in self.slice([memory]))


class Copy:
    """The tensors of one deep copy, which share memory with each other alone. Only its identity counts."""


ORIGINAL = Copy()
"""The tensors that were recorded themselves."""


@dataclass(frozen=True)
class Recipe:
    """A program, the reference of the tensor that it computes, and the deep copy to which that tensor belongs."""

    program: Program
    ref: Ref
    copy: Copy = ORIGINAL

    def __deepcopy__(self, memo: dict[int, Any]) -> Recipe:
        return Recipe(self.program, self.ref, deepcopy(self.copy, memo))  # a program is immutable once it is closed
