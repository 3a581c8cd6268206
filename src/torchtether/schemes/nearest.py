"""Which of a few values is nearest: the step from numbers to codes of a table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


def count_above(x: Tensor, thresholds: Sequence[float]) -> Tensor:
    """How many of the ascending ``thresholds`` (at most 255) lie strictly below each element of ``x``, as uint8.

    >>> count_above(torch.tensor([0.0, 0.5, 2.0]), (0.5, 1.0)).tolist()
    [0, 0, 2]
    """
    if len(thresholds) > 32:
        edges = torch.tensor(thresholds, dtype=x.dtype, device=x.device)
        return torch.bucketize(x, edges, out_int32=True).to(torch.uint8)
    # A few comparisons are faster than a search, and those that give numbers of the dtype of x faster than bools.
    count, is_above = x.new_zeros(x.shape), x.new_empty(x.shape)
    for threshold in thresholds:
        count += torch.gt(x, threshold, out=is_above)
    return count.to(torch.uint8)


@lru_cache(maxsize=64)
def nearest_codes(table: tuple[float, ...]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """The thresholds between the values of ``table``, ascending, and the code of each value between them.

    A number halfway goes to the lower value.  Of equal values (0 and -0) the first code is used.

    >>> nearest_codes((1.0, -1.0))
    ((0.0,), (1, 0))
    """
    first: dict[float, int] = {}
    for code, value in enumerate(table):
        first.setdefault(value, code)
    ascending = sorted(first)
    values = np.array(ascending, dtype=np.float32)  # numpy, because a compiler may be tracing torch just now
    middles = (values[1:] + values[:-1]) / np.float32(2)
    return tuple(middles.tolist()), tuple(first[value] for value in ascending)
