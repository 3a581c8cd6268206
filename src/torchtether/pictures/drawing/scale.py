"""The length of bars: proportional if all can be seen then, otherwise logarithmic."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_WIDEST = 64
"""The ratio of the largest to the smallest amount up to which proportional bars can all be seen."""

_SHORTEST = 0.03


@dataclass(frozen=True, slots=True)
class Scale:
    """Map positive amounts to lengths from 0 to 1, proportionally, or logarithmically if ``is_log``."""

    smallest: float
    largest: float

    @staticmethod
    def of(amounts: Iterable[float]) -> Scale:
        """Return a scale on which all of ``amounts`` can be seen.

        >>> Scale.of([10, 20]).is_log, Scale.of([4, 10**9]).is_log
        (False, True)
        """
        positive = [amount for amount in amounts if amount > 0] or [1]
        return Scale(min(positive), max(positive))

    @property
    def is_log(self) -> bool:
        return self.largest > _WIDEST * self.smallest

    def length(self, amount: float) -> float:
        """Return the length of ``amount``: 0 for nothing, 1 for the largest."""
        if amount <= 0:
            return 0.0
        if not self.is_log:
            return min(amount / self.largest, 1.0)
        done = math.log(max(amount, self.smallest) / self.smallest) / math.log(self.largest / self.smallest)
        return min(_SHORTEST + (1 - _SHORTEST) * done, 1.0)

    @property
    def ticks(self) -> tuple[float, ...]:
        """Return amounts to label: at most six powers of ten on a logarithmic scale; else quarters of the largest."""
        if not self.is_log:
            return tuple(self.largest * quarter / 4 for quarter in range(1, 5))
        first, last = math.ceil(math.log10(self.smallest)), math.floor(math.log10(self.largest))
        step = max(1, math.ceil((last - first + 1) / 6))
        return tuple(10.0**power for power in range(first, last + 1, step))
