"""Atomic replacement of files: readers see the old or the new files, also after a crash, or beside other writers.

A single file is written beside its target, under a hidden name, synced, and renamed over it. A save to a folder may
write several files (shards, their index, ``config.json``), and must remove those of an older save. ``put_in_place``
makes them one change:

1. All new files of tensors are beside their targets, on the disk. Until here only hidden names are new.
2. The folder is locked (``locked``), so that two saves take turns. Now ``config.json``, based on its current contents,
   and the index are written beside their targets.
3. The mark ``STEM.safetensors.torn`` (``marks``) is put beside the targets, unless one rename suffices: there is only
   one file, or no new shard replaces an old one, so that the rename of the index is the change.
4. An old index is removed if new shards replace some of its own: other readers, which do not know the mark, find none.
5. The renames: first ``config.json``, then the shards, last the index or the single file.
6. Files of an older save under the same stem are removed: its index first, then the others. With them go JSON files
   that describe nothing but its quantization (``SETTINGS``): readers would apply them to the new files.
7. The mark is removed, then the lock is released.

After a power failure a disk may lack changes of names that nobody has synced, each for itself. So the folders are
synced before and after 3, before and after the one rename that suffices, and before 7.

So a crash before 3 leaves the old checkpoint, and a crash after 7 the new one. After a crash between, the mark says
what is left to do, and the next reader or save does it. A reader that cannot refuses the files (``marks.check_ended``);
the next save under the stem replaces them. ``config.json`` is the old or the new one at every moment, and no other file
is touched.

Where the file system has no locks, two saves may mix their renames. The index therefore has a digest of the header of
every shard, which has the checksums of its tensors; readers compare them, and refuse the shard of another save.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path

from .._interruptions import Deferred
from ..errors import CheckpointError
from .leftovers import remove_leftovers
from .locks import hold, locked
from .marks import Step, awaited, describe, end_saves
from .names import INDEX_SUFFIX, SUFFIX, mark_of, name_beside, short, stem_of
from .opening import BESIDE, SETTINGS, check_regular
from .system import IS_WINDOWS, sync, sync_folder, unwritable
from .writer import write_bytes


@contextlib.contextmanager
def replacing(*paths: Path) -> Iterator[list[FileIO]]:
    """Yield one open file per path for writing; at the end sync them, and rename them to ``paths`` in order.

    After an error, a full disk or a killed process the old files are unchanged; each file is replaced by a rename of
    its own. Symbolic links are followed. A new file gets the mode of the umask, a replaced one keeps its mode. A killed
    process leaves hidden files beside the targets, which the next write to these targets removes. Raises
    CheckpointError if the disk refuses.
    """
    with beside(*paths) as written:
        yield written.files
        written.sync()
        for folder in {Step(path, hidden).do().parent for hidden, path in written.pairs}:
            sync_folder(folder)


class Beside:
    """Temporary files beside their targets: ``files``, open for writing, and ``pairs`` of hidden path and target."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Path, Path]] = []
        self.files: list[FileIO] = []

    def sync(self) -> None:
        """Sync all files to the disk. They stay open, and so locked, until they are in place, except on Windows."""
        for file in self.files:
            sync(file.fileno())
            if IS_WINDOWS:  # it renames no open file
                file.close()

    def remove(self) -> None:
        """Close all files, and remove those that have not been renamed, unless a mark says that they will be."""
        for file in self.files:
            with contextlib.suppress(OSError):  # after ``sync`` nothing is lost; without it, nothing is kept
                file.close()
        left = [hidden for hidden, _ in self.pairs if os.path.lexists(hidden)]
        kept = {folder / name for folder in {hidden.parent for hidden in left} for name in awaited(folder)}
        for temporary in {*left} - kept:
            with contextlib.suppress(OSError):  # a read-only file system refuses even if there is nothing to remove
                temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def beside(*paths: Path) -> Iterator[Beside]:
    """Yield one open temporary file beside each of ``paths``; remove those that have not been renamed at the end.

    First, remove the leftovers of killed processes for the same targets. Raises CheckpointError if the disk refuses.
    """
    made = Beside()
    try:
        targets = [Path(os.path.realpath(path)) for path in paths]
    except OSError as error:  # the current folder has been removed
        raise unwritable(paths[0], error) from error
    for folder in {target.parent for target in targets}:
        remove_leftovers(folder, {short(target.name) for target in targets}.__contains__)
    try:
        try:
            for path, target in zip(paths, targets, strict=True):
                if target.is_dir():
                    raise CheckpointError("it is a folder", name=str(target), fix="Give the name of a file.")
                with contextlib.suppress(FileNotFoundError):  # root's rename would remove a device from the machine
                    check_regular(path, path.stat())
                temporary = name_beside(target)
                made.pairs.append((temporary, path))  # before the file exists: an interrupt may come in between
                _create(temporary, target, made.files)
            yield made
        except OSError as error:
            where = error.filename if isinstance(error.filename, str) else str(paths[0])
            raise unwritable(where, error) from error
        finally:
            made.remove()
    finally:  # again, because an interrupt may have aborted the first removal
        made.remove()


def _create(temporary: Path, target: Path, files: list[FileIO]) -> None:
    """Create ``temporary`` for ``target``, and append it, open, to ``files``."""
    if target.exists() and not os.access(target, os.W_OK):  # a rename would ignore its mode
        try:
            os.close(os.open(target, os.O_WRONLY | getattr(os, "O_CLOEXEC", 0)))  # tells the reason
        except OSError as error:
            raise unwritable(target, error, "Give another name.") from error
    _check_free(target)
    try:
        opener = partial(os.open, mode=0o666)  # within the call, so that no interrupt loses the descriptor
        files.append(FileIO(temporary, "xb+", opener=opener))
        hold(files[-1].fileno())
        with contextlib.suppress(FileNotFoundError):
            mode = stat.S_IMODE(target.stat().st_mode)
            if mode != stat.S_IMODE(temporary.stat().st_mode):  # some file systems refuse any change
                os.chmod(temporary, mode)
    except OSError as error:  # the error would name the temporary file, which the caller does not know
        raise unwritable(target, error) from error


def _check_free(path: Path) -> None:
    """Raise CheckpointError if Windows would neither replace nor remove ``path``, because a process uses it."""
    if IS_WINDOWS and os.path.lexists(found := os.path.realpath(path)):
        try:
            os.rename(found, found)  # changes nothing
        except OSError as error:
            fix = "Close it, and free the tensors that are mapped from it, or give another name."
            raise CheckpointError(f"cannot be replaced: {error.strerror or error}", name=str(path), fix=fix) from error


# -- several files as one change --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FolderChange:
    """The changes of a save to a folder, after its tensors are written; see ``put_in_place``.

    written    hidden path and target of each file of tensors, on the disk
    texts      called when the folder is locked; returns the bytes of the other files by path, including the index
    is_whole   whether these are all files under ``stem``, so that any others under it, and settings, are removed
    """

    folder: Path
    stem: str
    written: Sequence[tuple[Path, Path]]
    texts: Callable[[], Mapping[Path, bytes]]
    is_whole: bool


def put_in_place(*changes: FolderChange) -> None:
    """Apply ``changes``, each to another folder, as one change; the docstring of this module lists the steps.

    Raises CheckpointError if the disk refuses, or another save does not end. If that happens before the first rename,
    nothing has changed; after it, the folders stay marked, and the next reader or save does the rest. Signals wait
    while the files are renamed.
    """
    for change in changes:
        end_saves(change.folder, change.stem)
    with contextlib.ExitStack() as stack:
        for change in sorted(changes, key=lambda change: str(change.folder)):  # one order, against deadlocks
            stack.enter_context(locked(change.folder))
        steps: list[Step] = []
        is_torn = len(changes) > 1
        for change in changes:
            texts = change.texts()
            files = stack.enter_context(beside(*texts))
            for text, file in zip(texts.values(), files.files, strict=True):
                write_bytes(file, memoryview(text))
            files.sync()
            some, needs_mark = _steps(change, files.pairs)
            steps += some
            is_torn |= needs_mark
        for step in steps:
            _check_free(step.path)
        marks = [mark_of(change.folder, change.stem) for change in changes] if is_torn else []
        marks.sort(key=lambda mark: -len(mark.parts))  # that of the outer folder is last
        try:
            with Deferred():  # an interrupt between two renames would leave neither the old files nor the new ones
                _perform(steps, marks)
        except OSError as error:
            raise unwritable(changes[0].folder, error) from error
    for change in changes:
        if change.is_whole:
            remove_leftovers(change.folder, partial(_is_of, stem_of(short(change.stem + SUFFIX))))


def _is_of(stem: str | None, name: str) -> bool:
    return stem_of(name) == stem or name in BESIDE


def _perform(steps: Sequence[Step], marks: Sequence[Path]) -> None:
    """Put up ``marks``, do ``steps``, and remove the marks."""
    were_torn = any(map(os.path.lexists, marks))
    if marks:  # after a power failure they must find the files that they list
        _sync({step.hidden.parent for step in steps if step.hidden})
    try:
        for mark, text in zip(marks, describe(marks, steps), strict=True):
            with beside(mark) as made:
                write_bytes(made.files[0], memoryview(text))
                made.sync()
                sync_folder(Step(mark, made.pairs[0][0]).do().parent)
        changed = {steps[0].do().parent}
    except (OSError, CheckpointError):
        for mark in reversed(marks) if not were_torn else ():  # nothing has changed yet
            mark.unlink(missing_ok=True)
            sync_folder(mark.parent)
        raise
    decisive = max(at for at, step in enumerate(steps) if step.hidden)
    for at, step in enumerate(steps[1:], 1):
        if not marks and at in (decisive, decisive + 1):  # this rename is the change: it comes alone to the disk
            _sync(changed)
        changed.add(step.do().parent)
    _sync(changed)
    for mark in marks:
        mark.unlink(missing_ok=True)  # without locks another save may have removed it
        sync_folder(mark.parent)


def _sync(folders: Iterable[Path]) -> None:
    for folder in folders:
        sync_folder(folder)


def _steps(change: FolderChange, texts: Sequence[tuple[Path, Path]]) -> tuple[list[Step], bool]:
    """Return steps 4 to 6 of ``change``, and whether they need a mark."""
    index, mark = change.folder / f"{change.stem}{INDEX_SUFFIX}", mark_of(change.folder, change.stem)
    new = {target.name for _, target in (*change.written, *texts)}
    here = {path.name for path in change.folder.iterdir()}
    old: list[str] = []
    if change.is_whole or mark.name in here:
        old = [name for name in here - new - {mark.name} if stem_of(name) == change.stem]
    settings = sorted({*SETTINGS} & (here - new)) if change.is_whole else []
    old = [name for name in (*old, *settings) if not (change.folder / name).is_dir()]
    others = [pair for pair in texts if pair[1] != index]
    *first, (last, head) = [*others, *change.written, *(pair for pair in texts if pair[1] == index)]
    is_over = head == index and index.name in here and any(target.name in here for _, target in change.written)
    steps = [
        *([Step(Path(os.path.realpath(index)))] if is_over else []),
        *(Step(path, hidden) for hidden, path in (*first, (last, head))),
        *(Step(change.folder / name) for name in sorted(old, key=lambda name: (name != index.name, name))),
    ]
    rivals = {index.name, f"{change.stem}{SUFFIX}", *settings} & {*old}
    is_decided = head.name in here and not rivals and not others and not any(path.name in here for _, path in first)
    return steps, mark.name in here or (len(steps) > 1 and not is_decided)
