"""Locks on files and folders that leave nothing behind, and go when their process does."""

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
"""Seconds for which a save waits until another one has put its files in place, which takes a few renames."""


def hold(descriptor: int) -> None:
    """Keep other processes from taking the file for a leftover, until ``descriptor`` is closed or this process gone."""
    if fcntl is not None:
        with contextlib.suppress(OSError):  # some file systems have no locks; ``remove_leftovers`` sees to that
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other processes from taking ``folder`` for a leftover, inside the block."""
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
def locked(folder: Path) -> Iterator[None]:
    """Keep other threads and processes out for the same folder, as far as the locks of its file system reach.

    The lock is on the folder itself. A hidden folder that this process fills is its alone, and held already. Raises
    CheckpointError if another has been inside for ``PATIENCE`` seconds.
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
                    f"another save has been at work here for {PATIENCE:.0f} s", name=str(folder), fix="Save again."
                )
            time.sleep(0.005)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor, too
        os.close(descriptor)


def _takes(descriptor: int) -> bool:
    """Return whether the lock is taken, or there is none to take."""
    try:
        try_to_own(descriptor)
    except BlockingIOError:
        return False
    except OSError:  # NFS has none for folders
        pass
    return True
