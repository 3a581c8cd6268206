"""Folders of checkpoints: made when needed, or all at once."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckpointError
from .leftovers import remove_leftovers
from .locks import held
from .names import name_beside, short
from .replacing import sync_folder


@contextlib.contextmanager
def folder_for(path: Path) -> Iterator[None]:
    """Make ``path`` a folder; a new one goes after an error, with its new parents, if it is empty.

    Raises CheckpointError if it cannot be one.
    """
    new = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    try:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot be made a folder: {error.strerror}", name=str(path)) from None
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for folder in new:
                folder.rmdir()
        raise


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder to fill, and put it at ``path`` by one rename: no reader sees a part of it.

    After an error or an interrupt nothing is left; a killed process leaves a hidden folder beside ``path``, which the
    next that is to be there takes with it.
    Raises CheckpointError if ``path`` is there already and not an empty folder, or where the disk refuses.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError("it is there already", name=str(path), fix="Give a new or an empty folder.")
    with folder_for(target.parent):
        remove_leftovers(target.parent, short(target.name).__eq__)
        temporary = name_beside(target)
        try:
            try:
                temporary.mkdir()
                with held(temporary):
                    yield temporary
                os.replace(temporary, target)
                sync_folder(target.parent)
            except OSError as error:
                raise CheckpointError(f"cannot be written: {error.strerror or error}", name=str(path)) from error
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        finally:  # what an interrupt has kept from it
            shutil.rmtree(temporary, ignore_errors=True)


def is_folder(path: Path) -> bool:
    """Return whether there is a folder at ``path``."""
    return path.is_dir()
