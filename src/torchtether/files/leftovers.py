"""Hidden files and folders in which targets come into being, and what killed processes have left of them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_TEMPORARY = re.compile(r"\.(?P<target>.+)\.(?P<process>\d{1,9})\.[0-9a-f]{8}\.tmp", re.DOTALL)


def name_beside(target: Path) -> Path:
    """A new hidden name beside ``target`` that says whose it is: ``.NAME.PID.HEX.tmp``."""
    return target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")


def hold(descriptor: int) -> None:
    """Until ``descriptor`` is closed, or its process gone, no other process takes the file for a leftover."""
    if fcntl is not None:
        with contextlib.suppress(OSError):  # some file systems have no locks; ``remove_leftovers`` sees to that
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Inside, no other process takes ``folder`` for a leftover."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        hold(descriptor)
        yield
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path, is_target: Callable[[str], object]) -> None:
    """What killed processes left in ``folder`` is gone, of targets whose names ``is_target`` says are meant.

    A leftover is one whose process no longer runs here, and which nobody holds: on a shared file system its process may
    run on another machine. What cannot be told, or not be removed, stays.
    """
    if fcntl is None:
        return
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            found = _TEMPORARY.fullmatch(path.name)
            if found and is_target(found["target"]) and not _runs(int(found["process"])):
                _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        finally:
            os.close(descriptor)


def _runs(process: int) -> bool:
    """Whether a process of this number runs here, perhaps another one that has been given the number since."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
