"""Reading a computed flag, which waits for a GPU, and which has no value while a graph is traced."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..torch_private.tensors import is_fake


class _Unchecked(threading.local):
    flags: list[Tensor] | None = None


_unchecked = _Unchecked()


@contextmanager
def unchecked() -> Iterator[list[Tensor]]:
    """Have ``is_true`` on this thread not wait for a device to find errors, but return True.

    Yields a list of its flags, of one element each, that work queued later can read: nonzero where it was right to.
    After another one, everything that was computed in this context is undefined, and must be computed again outside.
    """
    before, _unchecked.flags = _unchecked.flags, []
    try:
        yield _unchecked.flags
    finally:
        _unchecked.flags = before


def is_true(flag: Tensor, *, unseen: bool) -> bool:
    """Return ``bool(flag)`` of one element; ``unseen`` while the compiler traces and for fake tensors, without values.

    ``unseen`` is True where a flag that is not true leads to an error, or to a slower way.

    >>> is_true(torch.ones(3).all(), unseen=False)
    True
    """
    if torch.compiler.is_compiling() or is_fake(flag):
        return unseen
    if unseen and _unchecked.flags is not None:
        _unchecked.flags.append(flag)
        return True
    return bool(flag)
