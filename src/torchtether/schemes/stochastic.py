"""Stochastic rounding to one of two neighbours, so that the mean of many draws is the value.

The noise comes from torch's default generator of the device: ``torch.manual_seed`` makes it reproducible, and ranks
whose generators are in the same state round alike.

Source: Gupta et al., Deep Learning with Limited Numerical Precision (arXiv 1502.02551).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .nearest import count_above

USED = 0.5
"""The share of its range that a block must use; below it, the scale may shrink."""

PIECE = 1 << 16
"""Elements that are rounded at once: so few that the temporaries of a step reuse the same memory."""


def choose(x: Tensor, near: Tensor, far: Tensor) -> Tensor:
    """Return ``far`` with probability ``(x - near) / (far - near)``, else ``near``, also where both are equal.

    >>> choose(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0]))
    tensor([1., 3.])
    """
    share = (x - near).div_(far - near)
    return torch.where(torch.rand_like(share) < share, far, near)


def neighbours(x: Tensor, ascending: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return the lower and the upper neighbour of each element of ``x`` among two or more ``ascending`` numbers.

    >>> neighbours(torch.tensor([-9.0, 1.5, 2.0]), (0.0, 1.0, 2.0))
    (tensor([0., 1., 1.]), tensor([1., 2., 2.]))
    """
    levels = torch.tensor(ascending, dtype=torch.float32, device=x.device)
    below = count_above(x, ascending[1:-1]).view(-1).int()
    return levels.index_select(0, below).view(x.shape), levels.index_select(0, below + 1).view(x.shape)
