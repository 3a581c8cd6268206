"""Marks of saves that exchange several files, and the end of a save whose process has died.

The mark of a save lists what it will do (``describe``): hidden files, whole and on the disk, that get the names of the
checkpoint, and files that go. If its process dies in between, the next read or save does the rest (``end_saves``).

A save to several folders, one of which holds the others, puts the list into the mark of the outer folder, which is
written last and removed last: a save whose outer mark is not there has not begun, or is done.

The list comes with the folder, which may be anybody's. So it may name only files of the stems of its marks, regular
ones, in its own folder or one below that has a mark of the same save. It has the size and time of each file, before and
after: if a file has others, somebody has written to the folder since, and nothing is done.

The marks of the inner folders have the stamps from before. If the outer mark is not there, they show that nothing has
changed yet; a folder that was moved out of the outer one in between is refused.
"""

from __future__ import annotations

import json
import os
import platform
import stat
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._interruptions import Deferred
from ..errors import CheckpointError
from .locks import locked
from .names import INDEX_SUFFIX, MARK_SUFFIX, SUFFIX, mark_of, parse_hidden, short, stem_of
from .opening import BESIDE, read_file
from .strict_json import parse_object
from .system import sync_folder

_ABOUT = "A save that exchanges the files here has not ended. torchtether ends it when it reads or writes them."
_LIMIT = 2**24  # bytes
_VALUES = 2**18  # for 30 000 files

_STILL = 2.0
"""Seconds without a rename after which a save by another machine is dead: some file systems lock on one only."""

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
            found |= {step.hidden.name for step in _Plan(leader, plan).steps if step.hidden}
    return found


# -- what a mark says -------------------------------------------------------------------------------------------------


def describe(marks: Sequence[Path], steps: Sequence[Step]) -> list[bytes]:
    """Return the contents of each of ``marks``, the last of which is that of the outer folder."""
    if not marks:
        return []
    outer, plan = marks[-1].parent, dict[str, Any](about=_ABOUT, host=platform.node())
    with suppress(ValueError):  # a file elsewhere, as by a symbolic link, or folders side by side
        renamed = {_name(outer, step.path) for step in steps if step.hidden}
        plan["marks"] = [_name(outer, mark) for mark in marks[:-1]]
        plan["renames"] = [
            [_name(outer, step.hidden), _name(outer, step.path), _stamp(step.hidden), _stamp(step.path)]
            for step in steps
            if step.hidden
        ]
        plan["removes"] = [
            [_name(outer, step.path), _stamp(step.path)]
            for step in steps
            if step.hidden is None and _name(outer, step.path) not in renamed
        ]
        stems = {(step.path.parent, stem) for step in steps if (stem := stem_of(step.path.name)) is not None}
        heads = [folder / f"{stem}{end}" for folder, stem in sorted(stems) for end in (SUFFIX, INDEX_SUFFIX)]
        plan["absent"] = [
            name for head in heads if not os.path.lexists(head) and (name := _name(outer, head)) not in renamed
        ]
    parts = [_describe_part(mark, marks[-1].name, steps) for mark in marks[:-1]]
    return [json.dumps(one).encode() for one in (*parts, plan)]


def _describe_part(mark: Path, leader: str, steps: Sequence[Step]) -> dict[str, Any]:
    part = dict[str, Any](about=_ABOUT)
    part["part of"] = leader
    with suppress(ValueError):
        inside = [step.path for step in steps if os.path.realpath(step.path.parent) == os.path.realpath(mark.parent)]
        part["before"] = [[_name(mark.parent, path), _stamp(path)] for path in inside]
    return part


def _name(outer: Path, path: Path) -> str:
    """Return the path of ``path`` from ``outer``, whichever way it is given; raise ValueError if it is elsewhere."""
    real = Path(os.path.realpath(path.parent)) / path.name
    return real.relative_to(os.path.realpath(outer)).as_posix()


def _stamp(path: Path) -> Stamp:
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(path)
    return [found.st_size, found.st_mtime_ns]


def _read(mark: Path) -> dict[str, Any]:
    """Return the contents of a mark; empty if it cannot be read."""
    with suppress(OSError, CheckpointError):
        return parse_object(read_file(mark, _LIMIT), name=str(mark), what="mark", values=_VALUES, widest=_VALUES)
    return {}


def _leader(mark: Path, plan: dict[str, Any]) -> Path:
    """Return the mark that has the list of the save that ``mark`` belongs to."""
    name = plan.get("part of")
    if isinstance(name, str) and name == Path(name).name and name.endswith(MARK_SUFFIX):
        return Path(os.path.realpath(mark.parent)).parent / name  # of a link, or of ".", another folder is the parent
    return mark


class _Unfit(Exception):
    """Why the rest of a save cannot be done."""


class _Plan:
    """The list in the mark ``leader``, checked: it names nothing but files of the checkpoints that have its marks."""

    def __init__(self, leader: Path, plan: dict[str, Any]) -> None:
        self._leader, self._folder, self._host = leader, leader.parent, plan.get("host")
        if not all(isinstance(plan.get(key), list) for key in ("marks", "renames", "removes", "absent")):
            raise _Unfit("its mark does not say what is left to do")
        try:
            self.marks = [self._mark(name) for name in plan["marks"]]
            renames = [(self._hidden(one, name), self._target(name), after, before)
                       for one, name, after, before in plan["renames"]]  # fmt: skip
            removes = [(self._target(name), before) for name, before in plan["removes"]]
            self._absent = [self._target(name) for name in plan["absent"]]
        except (TypeError, ValueError, AttributeError, OSError):  # of a name that is too long
            raise _Unfit("its mark lists what is no file of a checkpoint") from None
        self.steps = [Step(path, hidden) for hidden, path, *_ in renames] + [Step(path) for path, _ in removes]
        self._stamps = [(path, after, before) for _, path, after, before in renames]
        self._stamps += [(path, None, before) for path, before in removes]

    def check(self) -> None:
        """Raise _Unfit unless every file is as it was when the mark was written, or as the save would leave it."""
        left = set()
        for step, (path, after, before) in zip(self.steps, self._stamps, strict=True):
            try:
                found, hidden = _stamp(path), _stamp(step.hidden) if step.hidden else None
            except ValueError:
                raise _Unfit(f"{path.name} is no regular file") from None
            if found not in (None, after, before):
                raise _Unfit(f"{path.name} has been changed since")
            if step.hidden and after not in (found, hidden):
                raise _Unfit(f"the file {step.hidden.name} is missing")
            if found != after or hidden:
                left.add(path.parent)
        for path in self._absent:  # other libraries remove shards, and write what readers would prefer
            if os.path.lexists(path):
                raise _Unfit(f"{path.name} has been added since")
        for mark in self.marks:  # those who may write to the outer folder may not be allowed to write to the inner one
            if (mark.parent in left or os.path.lexists(mark)) and _leader(mark, _read(mark)) != self._leader:
                raise _Unfit(f"{mark.parent.name} has no mark of the same save")

    def is_still(self) -> bool:
        """Return whether no process on another machine is at it."""
        if self._host == platform.node():  # the locks tell
            return True
        before = self._here()
        time.sleep(_STILL)
        return self._here() == before

    def _here(self) -> list[bool]:
        steps = [path for step in self.steps for path in (step.path, step.hidden or step.path)]
        return [os.path.lexists(path) for path in (*steps, *self.marks, self._leader)]

    def _inside(self, name: str) -> Path:
        *outer, last = name.split("/")
        if len(outer) > 1 or not last or set(name) & set("\\:\0") or {"", ".", ".."} & {*outer, last}:
            raise ValueError(name)
        os.fsencode(name)  # raises ValueError for what is no name
        folder = self._folder.joinpath(*outer)
        if outer and folder.is_symlink():
            raise ValueError(name)
        return folder / last

    def _target(self, name: str) -> Path:
        path = self._inside(name)
        marks, stem = (self._leader, *self.marks), stem_of(path.name)
        if path in marks or not (
            mark_of(path.parent, stem) in marks
            if stem is not None
            else path.name in BESIDE and any(mark.parent == path.parent for mark in marks)
        ):
            raise ValueError(name)
        return path

    def _mark(self, name: str) -> Path:
        path = self._inside(name)
        if path.parent == self._folder or not name.endswith(MARK_SUFFIX):
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
    mark = Path(os.path.realpath(mark.parent)) / mark.name
    leader = _leader(mark, _read(mark))
    folders = [leader.parent, *([mark.parent] if mark != leader else [])]
    try:
        with ExitStack() as stack:
            if not all([stack.enter_context(locked(folder)) for folder in folders]):  # the outer first, as in a save
                return "without locks nobody can tell whether its process runs"
            if not os.path.lexists(mark):
                return ""
            said = _read(mark)
            is_stale = _leader(mark, said) != leader  # a later save has put up its mark while this one waited
            if not is_stale and not os.path.lexists(leader):
                _check_not_begun(mark.parent, said)
                _remove([mark])
                return ""
            if not is_stale:
                plan = _Plan(leader, _read(leader))
                if mark not in (leader, *plan.marks):
                    raise _Unfit("its mark is of another save than that of the folder around it")
                for folder in sorted({made.parent for made in plan.marks} - {*folders}):
                    stack.enter_context(locked(folder))
                plan.check()
                is_stale = not plan.is_still()
                if not is_stale:
                    with Deferred():
                        _finish(plan, leader)
    except _Unfit as error:
        return str(error)
    except OSError as error:
        return f"{error.strerror or error}"
    return _end(mark) if is_stale else ""


def _check_not_begun(folder: Path, part: dict[str, Any]) -> None:
    """Raise _Unfit unless the files in ``folder`` are those of before the save, by the mark in it."""
    try:
        if all(name == Path(name).name and _stamp(folder / name) == before for name, before in part["before"]):
            return
    except (TypeError, ValueError, KeyError):
        pass
    raise _Unfit("the folder around it, which has the list of what is left to do, is not there, or has another")


def _finish(plan: _Plan, leader: Path) -> None:
    changed, left = {leader.parent}, [step for step in plan.steps if not step.hidden or os.path.lexists(step.hidden)]
    for step in left:
        if step.hidden and step.path.name.endswith(INDEX_SUFFIX):  # other readers find none while shards are exchanged
            step.path.unlink(missing_ok=True)
    for step in left:
        changed.add(step.path.parent)
        if step.hidden:
            os.replace(step.hidden, step.path)  # unlike ``do`` it follows no link
        else:
            step.path.unlink(missing_ok=True)
    for folder in changed:
        sync_folder(folder)
    _remove([*plan.marks, leader])


def _remove(marks: Iterable[Path]) -> None:
    for mark in marks:
        mark.unlink(missing_ok=True)
        sync_folder(mark.parent)
