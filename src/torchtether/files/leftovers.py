"""What killed processes have left of hidden files and folders in which targets come into being."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from .locks import HAS_LOCKS, try_to_own
from .names import parse_hidden


def remove_leftovers(folder: Path, is_target: Callable[[str], object]) -> None:
    """Remove what killed processes left in ``folder`` of the targets that ``is_target`` names, as ``short`` has them.

    A leftover is one whose process no longer runs here, and which nobody holds: on a shared file system its process may
    run on another machine. What cannot be told, or not be removed, stays.
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
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        finally:
            os.close(descriptor)


def _runs(process: int) -> bool:
    """Return whether a process of this number runs here, perhaps another one that has been given the number since."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
