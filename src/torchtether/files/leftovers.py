"""Removal of leftovers: hidden temporary files and folders of killed processes."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from .locks import HAS_LOCKS, try_to_own
from .marks import awaited
from .names import parse_hidden


def remove_leftovers(folder: Path, is_target: Callable[[str], object]) -> None:
    """Remove temporary files that killed processes left in ``folder``, if ``is_target(target)``, a name by ``short``.

    A temporary file is a leftover if its process does not run on this machine and no process holds its lock: on a
    shared file system the process may run on another machine. Files that cannot be locked or removed stay, and so do
    those that a mark lists.
    """
    if not HAS_LOCKS:
        return
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            found = parse_hidden(path.name)
            if found and is_target(found[0]) and not _runs(found[1]):
                _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            try_to_own(descriptor)
            if path.name in awaited(path.parent):  # asked last: a process may put up its mark, and die, at any time
                return
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        finally:
            os.close(descriptor)


def _runs(process: int) -> bool:
    """Return whether a process with this number runs on this machine; it may be another one that reuses the number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
