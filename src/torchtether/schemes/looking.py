"""Reading a computed flag, which waits for a GPU, and which has no value while a graph is traced."""

from __future__ import annotations

import torch
from torch import Tensor

from ..torch_private.tensors import is_fake


def is_true(flag: Tensor, *, unseen: bool) -> bool:
    """Return ``bool(flag)`` of shape (); ``unseen`` while the compiler traces and for fake tensors, without values.

    >>> is_true(torch.ones(3).all(), unseen=False)
    True
    """
    return unseen if torch.compiler.is_compiling() or is_fake(flag) else bool(flag)
