"""Folders of checkpoints: created when needed, or put in place by one rename."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckpointError
from .leftovers import remove_leftovers
from .locks import held
from .names import name_beside, short
from .opening import found_at
from .system import IS_WINDOWS, sync_folder, unwritable


@contextlib.contextmanager
def folder_for(path: Path) -> Iterator[None]:
    """Create the folder ``path`` and its parents; after an error remove the new ones that are empty.

    Raises CheckpointError if it cannot be created.
    """
    new = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    try:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"the folder cannot be created: {error.strerror}", name=str(path)) from None
        yield
        for folder in new:
            sync_folder(folder.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            for folder in new:
                folder.rmdir()
        raise


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder to fill, and put it at ``path`` by one rename: no reader sees a part of it.

    After an error or an interrupt nothing is left. A killed process leaves a hidden folder beside ``path``, which the
    next call for the same ``path`` removes. An empty folder at ``path`` is replaced, and the new one gets its mode.
    Raises CheckpointError if ``path`` exists and is not an empty folder, or if the disk refuses.
    """
    target = Path(os.path.realpath(path))
    if is_taken(target) or (target.is_dir() and any(target.iterdir())):
        raise CheckpointError("it is there already", name=str(path), fix="Give a new or an empty folder.")
    _check_replaceable(path, target)
    with folder_for(target.parent):
        remove_leftovers(target.parent, short(target.name).__eq__)
        temporary = name_beside(target)
        try:
            try:
                temporary.mkdir()
                if target.is_dir():  # it may be closed to others, also while it is filled
                    mode = stat.S_IMODE(target.stat().st_mode)
                    if mode != stat.S_IMODE(temporary.stat().st_mode):  # some file systems have no modes to change
                        os.chmod(temporary, mode)
                with held(temporary):
                    yield temporary
                for inner, _, _ in os.walk(temporary):
                    sync_folder(Path(inner))
                if IS_WINDOWS and target.is_dir():  # no rename replaces it
                    target.rmdir()
                os.replace(temporary, target)
                sync_folder(target.parent)
            except OSError as error:
                raise unwritable(path, error) from error
            except CheckpointError as error:  # the caller does not know the hidden folder
                shown = error.name.replace(str(temporary), str(path))
                raise type(error)(error.what, name=shown, fix=error.fix) from error.__cause__
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        finally:  # again, because an interrupt may have aborted the first removal
            shutil.rmtree(temporary, ignore_errors=True)


def _check_replaceable(path: Path, target: Path) -> None:
    """Raise CheckpointError if a rename cannot replace the folder ``target``, or would leave this process without one.

    The shell that called this process would stay in the old folder, too, and see nothing there.
    """
    if os.path.ismount(target):
        raise CheckpointError("a mount point cannot be replaced", name=str(path), fix="Give a new folder in it.")
    with contextlib.suppress(OSError):  # one of the two does not exist
        if os.path.samefile(target, os.curdir):
            what = "the current folder cannot be replaced"
            raise CheckpointError(what, name=str(path), fix="Give a new folder, or call from another one.")


def is_taken(path: Path) -> bool:
    """Return whether there is something else than a folder at ``path``. Raise CheckpointError if nobody may know."""
    try:
        return found_at(path) is not None and not path.is_dir()
    except OSError as error:  # of a folder that may not be entered, or a name that is too long
        raise unwritable(path, error) from error


def is_folder(path: Path) -> bool:
    """Return whether there is a folder at ``path``."""
    return path.is_dir()
