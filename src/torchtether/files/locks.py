"""Locks on files and folders; they leave no files behind, and end with their process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckpointError
from .names import parse_hidden
from .system import fcntl

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


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Exclude other threads and processes that lock ``folder``; yield whether its file system has locks for folders.

    The lock is on the folder itself. A hidden folder that this process fills needs none: it is locked by ``held``.
    Raises CheckpointError if the lock is not free within ``PATIENCE`` seconds.
    """
    hidden = parse_hidden(folder.name)
    if fcntl is None or (hidden is not None and hidden[1] == os.getpid()):
        yield fcntl is not None
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        end = time.monotonic() + PATIENCE
        while (taken := _takes(descriptor)) is None:
            if time.monotonic() > end:
                raise CheckpointError(
                    f"another save has not ended within {PATIENCE:.0f} s", name=str(folder), fix="Save again."
                )
            time.sleep(0.005)
        yield taken
    finally:
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough: a forked child has the descriptor, too
        finally:  # an interrupt may come before the unlocking: the next save would wait for this process
            os.close(descriptor)


def _takes(descriptor: int) -> bool | None:
    """Try to lock; return ``None`` if another has the lock, ``False`` if the file system has no locks."""
    try:
        try_to_own(descriptor)
    except BlockingIOError:
        return None
    except OSError:  # NFS has no locks for folders
        return False
    return True
