"""Marks of saves that exchange several files, and the end of a save whose process has died.

The mark of a save lists what it will do (``describe``): hidden files, whole and on the disk, that get the names of the
checkpoint, and files that go. If its process dies in between, the next read or save does the rest (``end_saves``).

A save to several folders, one of which holds the others, puts the list into the mark of the outer folder, which is
written last and removed last: a save whose outer mark is not there has not begun, or is done.

The list comes with the folder, which may be anybody's. So it may name only files that a save writes, in its own folder
or one below. It has the size and time of each file, before and after: if a file has others, somebody has written to the
folder since, and nothing is done.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._interruptions import Deferred
from ..errors import CheckpointError
from .locks import locked
from .names import MARK_SUFFIX, mark_of, parse_hidden, short, stem_of
from .opening import BESIDE, read_file
from .system import sync_folder

_ABOUT = "A save that exchanges the files here has not ended. torchtether ends it when it reads or writes them."
_LIMIT = 2**24  # bytes

Stamp = list[int] | None
"""The size and the time of the last change of a file, in ns; ``None`` of no file."""


@dataclass(frozen=True)
class Step:
    """Give the file ``hidden`` the name ``path``; without it, remove ``path``."""

    path: Path
    hidden: Path | None = None

    def do(self) -> Path:
        """Do it, and return the path that has changed."""
        if self.hidden is None:
            self.path.unlink(missing_ok=True)
            return self.path
        target = Path(os.path.realpath(self.path))
        os.replace(self.hidden, target)
        return target


def marks_in(folder: Path, stem: str | None = None) -> list[Path]:
    """Return the marks of saves to ``folder`` under ``stem``, or under any."""
    marks = [mark_of(folder, stem)] if stem else sorted(folder.glob(f"*{MARK_SUFFIX}"))
    return [mark for mark in marks if os.path.lexists(mark)]


def check_ended(folder: Path, stem: str | None = None) -> None:
    """End saves to ``folder`` whose processes have died; raise CheckpointError if one cannot be ended."""
    for mark in marks_in(folder, stem):
        if why := _end(mark):
            raise CheckpointError(f"a save to this checkpoint has not ended: {why}", name=str(mark), fix="Save again.")


def end_saves(folder: Path, stem: str) -> None:
    """End the save to ``folder`` under ``stem`` whose process has died, if that is possible."""
    for mark in marks_in(folder, stem):
        _end(mark)


def awaited(folder: Path) -> set[str]:
    """Return the names of hidden files in ``folder`` that are the only copy of what a marked save has written."""
    found = set()
    for mark in marks_in(folder):
        plan = _read(mark)
        leader = _leader(mark, plan)
        plan = _read(leader) if leader != mark else plan
        with suppress(_Unfit):
            found |= {step.hidden.name for step in _Plan(leader.parent, plan).steps if step.hidden}
    return found


# -- what a mark says -------------------------------------------------------------------------------------------------


def describe(marks: Sequence[Path], steps: Sequence[Step]) -> list[bytes]:
    """Return the contents of each of ``marks``, the last of which is that of the outer folder."""
    about = {"about": _ABOUT}
    try:
        plan = about | _listed(marks, steps)
        part = about | {"part of": marks[-1].name}
    except (ValueError, IndexError):  # a file elsewhere, as by a symbolic link, folders side by side, or no marks
        plan = part = about
    return [json.dumps(plan if mark is marks[-1] else part).encode() for mark in marks]


def _listed(marks: Sequence[Path], steps: Sequence[Step]) -> dict[str, Any]:
    outer, renames = marks[-1].parent, [(step.hidden, step.path) for step in steps if step.hidden]
    removed = {step.path for step in steps} - {path for _, path in renames}
    return {
        "marks": [_name(outer, mark) for mark in marks[:-1]],
        "renames": [
            [_name(outer, hidden), _name(outer, path), _stamp(hidden), _stamp(path)] for hidden, path in renames
        ],
        "removes": [[_name(outer, step.path), _stamp(step.path)] for step in steps if step.path in removed],
    }


def _name(outer: Path, path: Path) -> str:
    """Return the path of ``path`` from ``outer``; raise ValueError if it is elsewhere."""
    real = Path(os.path.realpath(path.parent)) / path.name
    if path.is_symlink():
        raise ValueError(path)
    return real.relative_to(os.path.realpath(outer)).as_posix()


def _stamp(path: Path) -> Stamp:
    with suppress(FileNotFoundError, NotADirectoryError):
        found = path.lstat()
        return [found.st_size, found.st_mtime_ns]
    return None


def _read(mark: Path) -> dict[str, Any]:
    """Return the contents of a mark; empty if it cannot be read."""
    with suppress(OSError, ValueError, RecursionError):  # a CheckpointError is a ValueError
        found = json.loads(read_file(mark, _LIMIT))
        if isinstance(found, dict):
            return found
    return {}


def _leader(mark: Path, plan: dict[str, Any]) -> Path:
    """Return the mark that has the list of the save that ``mark`` belongs to."""
    name = plan.get("part of")
    if isinstance(name, str) and name == Path(name).name and name.endswith(MARK_SUFFIX):
        return mark.parent.parent / name
    return mark


class _Unfit(Exception):
    """Why the rest of a save cannot be done."""


class _Plan:
    """The list in a mark in ``folder``, checked: it names nothing but files of a checkpoint there."""

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self._folder = folder
        if not all(isinstance(plan.get(key), list) for key in ("marks", "renames", "removes")):
            raise _Unfit("its mark does not say what is left to do")
        try:
            renames = [(self._hidden(one, name), self._target(name), after, before)
                       for one, name, after, before in plan["renames"]]  # fmt: skip
            removes = [(self._target(name), before) for name, before in plan["removes"]]
            self.marks = [self._target(name) for name in plan["marks"]]
        except (TypeError, ValueError, AttributeError):
            raise _Unfit("its mark lists what is no file of a checkpoint") from None
        self.steps = [Step(path, hidden) for hidden, path, *_ in renames] + [Step(path) for path, _ in removes]
        self._stamps = [(path, after, before) for _, path, after, before in renames]
        self._stamps += [(path, None, before) for path, before in removes]

    def check(self) -> None:
        """Raise _Unfit unless every file is as it was when the mark was written, or as the save would leave it."""
        for step, (path, after, before) in zip(self.steps, self._stamps, strict=True):
            found = _stamp(path)
            if found not in (None, after, before):
                raise _Unfit(f"{path.name} has been changed since")
            if step.hidden and after not in (found, _stamp(step.hidden)):
                raise _Unfit(f"the file {step.hidden.name} is missing")

    def _inside(self, name: str) -> Path:
        *outer, last = name.split("/")
        if len(outer) > 1 or not last or set(name) & set("\\:\0") or {"", ".", ".."} & {*outer, last}:
            raise ValueError(name)
        folder = self._folder.joinpath(*outer)
        if outer and folder.is_symlink():
            raise ValueError(name)
        return folder / last

    def _target(self, name: str) -> Path:
        path = self._inside(name)
        if stem_of(path.name) is None and path.name not in BESIDE:
            raise ValueError(name)
        return path

    def _hidden(self, name: str, target: str) -> Path:
        path, wanted = self._inside(name), self._target(target)
        found = parse_hidden(path.name)
        if found is None or found[0] != short(wanted.name) or path.parent != wanted.parent:
            raise ValueError(name)
        return path


# -- the end of a save ------------------------------------------------------------------------------------------------


def _end(mark: Path) -> str:
    """Do what is left of the save of ``mark``, when no process is at it; return why that is not possible, or ''."""
    leader = _leader(mark, _read(mark))
    folders = [leader.parent, *([mark.parent] if mark.parent != leader.parent else [])]
    try:
        with ExitStack() as stack:
            if not all([stack.enter_context(locked(folder)) for folder in folders]):  # the outer first, as in a save
                return "without locks nobody can tell whether its process runs"
            if not os.path.lexists(mark):
                return ""
            if not os.path.lexists(leader):  # it has not begun, or is done
                _remove([mark])
                return ""
            plan = _Plan(leader.parent, _read(leader))
            for folder in sorted({made.parent for made in plan.marks} - {*folders}):
                stack.enter_context(locked(folder))
            plan.check()
            with Deferred():
                _finish(plan, leader)
    except _Unfit as error:
        return str(error)
    except OSError as error:
        return f"{error.strerror or error}"
    return ""


def _finish(plan: _Plan, leader: Path) -> None:
    changed = {leader.parent}
    for step in plan.steps:
        if step.hidden is None or os.path.lexists(step.hidden):
            changed.add(step.do().parent)
    for folder in changed:
        sync_folder(folder)
    _remove([*plan.marks, leader])


def _remove(marks: Iterable[Path]) -> None:
    for mark in marks:
        mark.unlink(missing_ok=True)
        sync_folder(mark.parent)
