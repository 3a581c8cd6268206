"""Whether a flag that was computed may be looked at: on a GPU that waits, while a graph is traced nobody knows it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..torch_private.tensors import is_fake


def is_true(flag: Tensor, *, unseen: bool) -> bool:
    """Return the truth of ``flag`` (); ``unseen`` while the compiler traces, and of fake tensors: they have no numbers.

    >>> is_true(torch.ones(3).all(), unseen=False)
    True
    """
    return unseen if torch.compiler.is_compiling() or is_fake(flag) else bool(flag)
