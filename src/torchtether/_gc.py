"""Python's garbage collector, which waits while many objects are made that all stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep Python from looking for reference cycles inside; reference counting frees as ever.

    Each look goes through all objects of the process, and objects by the ten thousand ask for several: half of the time
    of loading small tensors.  The switch is the process's: if two threads are inside, the first to leave puts it back.

    >>> with uncollected():
    ...     gc.isenabled()
    False
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
