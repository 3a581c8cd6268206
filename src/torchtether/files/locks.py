"""Locks on files and folders; they leave no files behind, and end with their process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckpointError
from .names import parse_hidden

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

HAS_LOCKS = fcntl is not None

PATIENCE = 60.0
"""Seconds that a save waits for another one to put its files in place, which takes a few renames."""


def hold(descriptor: int) -> None:
    """Lock the file, so that no process removes it as a leftover, until ``descriptor`` closes or this process ends."""
    if fcntl is not None:
        with contextlib.suppress(OSError):  # a file system without locks; ``remove_leftovers`` does nothing there
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock ``folder`` during the block, so that no process takes it for a leftover."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        hold(descriptor)
        yield
    finally:
        os.close(descriptor)


def try_to_own(descriptor: int) -> None:
    """Lock the file for this process alone; raise OSError if another holds it, or the file system has no locks."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def has_locks(folder: Path) -> bool:
    """Return whether the file system of ``folder`` has locks for folders; raises OSError if it cannot be opened."""
    if fcntl is None:
        return False
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try_to_own(descriptor)
    except BlockingIOError:
        pass
    except OSError:  # NFS has none
        return False
    finally:
        os.close(descriptor)
    return True


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Exclude other threads and processes that lock ``folder``, as far as its file system supports locks.

    The lock is on the folder itself. A hidden folder that this process fills needs none: it is locked by ``held``.
    Raises CheckpointError if the lock is not free within ``PATIENCE`` seconds.
    """
    hidden = parse_hidden(folder.name)
    if fcntl is None or (hidden is not None and hidden[1] == os.getpid()):
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        end = time.monotonic() + PATIENCE
        while not _takes(descriptor):
            if time.monotonic() > end:
                raise CheckpointError(
                    f"another save has not ended within {PATIENCE:.0f} s", name=str(folder), fix="Save again."
                )
            time.sleep(0.005)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough: a forked child has the descriptor, too
        os.close(descriptor)


def _takes(descriptor: int) -> bool:
    """Try to lock; return ``False`` if another has the lock, ``True`` also if the file system has no locks."""
    try:
        try_to_own(descriptor)
    except BlockingIOError:
        return False
    except OSError:  # see ``has_locks``
        pass
    return True
