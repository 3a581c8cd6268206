"""Writing a file so that readers see the old one or the new one, and nothing between."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path

from ..errors import CheckpointError
from .leftovers import hold, name_beside, remove_leftovers

TORN = b'{"torn": "the save that began here did not end"}\n'
"""What stands in the place of an index while the files that it is about are exchanged."""


@contextlib.contextmanager
def replacing(*paths: Path) -> Iterator[list[FileIO]]:
    """Inside, one open file per path to write to; afterwards they are at ``paths``, in that order, durable.

    Each file is written beside its target and renamed over it when all are written, so an error, a full disk or a
    killed process leaves the old ones as they were. Only the renames of several files over old ones can be torn; from
    the first to the last of them the last path, an index, says so. A symbolic link is followed. A new file gets the
    mode that the umask asks for, a replaced one keeps its own. A killed process leaves hidden files beside the targets,
    which the next to write there removes. Raises CheckpointError where the disk refuses.
    """
    with beside(*paths) as written:
        yield written.files
        written.sync()
        put_in_place(list(zip(written.temporary, paths, strict=True)))


class Beside:
    """Files that are being written beside their targets: ``files`` to write to, at the hidden paths ``temporary``."""

    def __init__(self) -> None:
        self.temporary: list[Path] = []
        self.files: list[FileIO] = []

    def sync(self) -> None:
        """All is on the disk, and the files are closed."""
        for file in self.files:
            os.fsync(file.fileno())
            file.close()


@contextlib.contextmanager
def beside(*paths: Path) -> Iterator[Beside]:
    """Inside, one open file beside each of ``paths``; afterwards those are gone that nobody has put in place.

    What killed processes left of the same targets is removed first. Raises CheckpointError where the disk refuses.
    """
    targets = [Path(os.path.realpath(path)) for path in paths]
    made = Beside()
    for folder in {target.parent for target in targets}:
        remove_leftovers(folder, {target.name for target in targets}.__contains__)
    try:
        for target in targets:
            if target.is_dir():
                raise CheckpointError("it is a folder", name=str(target), fix="Give the name of a file.")
            try:
                temporary, file = _beside(target)
            except OSError as error:  # it would name the file beside, which nobody knows
                what = f"cannot be written: {error.strerror or error}"
                raise CheckpointError(what, name=str(target)) from error
            made.temporary.append(temporary)
            made.files.append(file)
        yield made
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else str(paths[0])
        raise CheckpointError(f"cannot be written: {error.strerror or error}", name=where) from error
    finally:
        for temporary, file in zip(made.temporary, made.files, strict=True):
            file.close()
            temporary.unlink(missing_ok=True)


def put_in_place(pairs: Sequence[tuple[Path, Path]]) -> None:
    """The first of each pair, written and durable, is now the second, in that order; see ``replacing``."""
    targets = [Path(os.path.realpath(path)) for _, path in pairs]
    if sum(target.exists() for target in targets) > 1:
        _mark_torn(targets[-1])
    for (temporary, _), target in zip(pairs, targets, strict=True):
        os.replace(temporary, target)
    for folder in {target.parent for target in targets}:
        sync_folder(folder)


def _mark_torn(index: Path) -> None:
    """``index`` is one that nobody believes: beside it, old files and new ones may be mixed."""
    temporary, file = _beside(index)
    try:
        file.write(TORN)
        os.fsync(file.fileno())
        file.close()
        os.replace(temporary, index)
        sync_folder(index.parent)
    finally:
        file.close()
        temporary.unlink(missing_ok=True)


def _beside(target: Path) -> tuple[Path, FileIO]:
    temporary = name_beside(target)
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
    hold(descriptor)
    file = FileIO(descriptor, "wb", closefd=True)
    with contextlib.suppress(FileNotFoundError):
        os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
    return temporary, file


def sync_folder(folder: Path) -> None:
    """The names in ``folder`` are on the disk, where the file system can say so."""
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
