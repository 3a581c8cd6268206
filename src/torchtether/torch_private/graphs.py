"""Tensors that nodes of the autograd graph have saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def is_released(node: Any) -> bool:
    """Return whether backward has freed the saved tensors of ``node``, so that it cannot run again.

    Reads the raw saved variables first: the public accessors would run unpack hooks (recompute, read from disk).
    """
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            raw = getattr(node, name)
            saved = raw if isinstance(raw, (tuple, list)) else (raw,)
            if any(one.data is not None or one.unpack_hook is not None for one in saved):
                return False
            if name != "_raw_saved_tensors":
                getattr(node, name.removeprefix("_raw"))  # raises if freed; returns if nothing was saved
        except RuntimeError:
            return True
    return False


def saved_by(node: Any) -> Iterator[Tensor]:
    """Yield the tensors that ``node`` has saved, without running unpack hooks."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            try:
                raw = getattr(node, name)
                for one in raw if isinstance(raw, (tuple, list)) else (raw,):
                    if isinstance(one.data, Tensor):
                        yield one.data
            except RuntimeError:
                continue
