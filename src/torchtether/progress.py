"""Progress of long jobs: bytes done, time, and peak memory."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

Progress = bool | Callable[[int, int], Any] | None
"""``True`` for a bar on stderr, or a function that is called with (bytes done, bytes in all)."""

Tick = Callable[[int], None]
"""A function that is called with the number of bytes that have just been read or written."""


def no_tick(nbytes: int) -> None:
    """Do nothing: the ``Tick`` for callers without progress."""


@contextmanager
def ticking(progress: Progress, total: int, verb: str) -> Iterator[Tick]:
    """Yield the ``Tick`` that reports to ``progress``; ``total`` bytes in all, ``verb`` before the bar."""
    if not progress:
        yield no_tick
    elif callable(progress):
        done = 0

        def tell(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            progress(done, total)

        yield tell
    elif sys.stderr is None:  # closed, or a process without a console: there is nowhere to draw
        yield no_tick
    else:
        from tqdm import tqdm  # type: ignore[import-untyped]  # not needed to import the package

        with tqdm(total=total, unit="B", unit_scale=True, desc=verb, file=sys.stderr) as bar:
            yield bar.update


_SAMPLES = 600
"""The most samples of a timeline: more than a picture can show."""


class Sample(NamedTuple):
    """Bytes above those before the load, at one moment, in seconds since it began."""

    seconds: float
    anonymous: int
    mapped: int


class Meter:
    """The duration and the peak memory of a block, above the memory before it.

    ``peak`` is anonymous memory, ``mapped_peak`` resident pages of mapped files; ``None`` where the system does not
    report them. A thread samples every two milliseconds, so shorter peaks may be missed. ``timeline`` holds the
    samples; in a long block each is the highest of several.
    """

    def __enter__(self) -> Meter:
        self.seconds: float = 0.0
        self.peak: int | None = None
        self.mapped_peak: int | None = None
        self._samples: list[Sample] = []
        self._stride = 1
        self._looks = 0
        self._done = threading.Event()
        self._status = _open_status()
        self._end = weakref.finalize(self, _end, self._done, self._status)  # first: an interrupt here calls no __exit__
        self._before = resident_memory(self._status)
        self._highest = self._before
        self._thread = threading.Thread(target=_watch, args=(weakref.ref(self), self._done), daemon=True)
        self._start = time.perf_counter()
        if self._before is not None:
            self._thread.start()
        return self

    def look(self) -> None:
        """Take a sample."""
        now = resident_memory(self._status)
        if now is not None and self._highest is not None and self._before is not None:
            self._highest = Resident(*map(max, self._highest, now))
            self._note(time.perf_counter() - self._start, now, self._before)

    def _note(self, moment: float, now: Resident, before: Resident) -> None:
        """Add a sample, or merge it into the last one; above ``_SAMPLES`` samples, merge every two."""
        sample = Sample(moment, now.anonymous - before.anonymous, now.mapped - before.mapped)
        if self._looks % self._stride and self._samples:
            self._samples[-1] = _higher(self._samples[-1], sample)
        else:
            self._samples.append(sample)
        self._looks += 1
        if len(self._samples) > _SAMPLES:
            pairs = zip(self._samples[::2], self._samples[1::2], strict=False)
            self._samples = [_higher(*pair) for pair in pairs] + self._samples[len(self._samples) // 2 * 2 :]
            self._stride *= 2
            self._looks = len(self._samples) * self._stride

    @property
    def timeline(self) -> tuple[Sample, ...]:
        """Return the samples in order of time."""
        return tuple(self._samples)

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self._done.set()
        if self._before is not None and self._highest is not None:
            self._thread.join()
            self.look()
            self.peak = self._highest.anonymous - self._before.anonymous
            self.mapped_peak = self._highest.mapped - self._before.mapped
        self._status = None
        self._end()


def _watch(meter: weakref.ref[Meter], done: threading.Event) -> None:
    """Sample until ``done``, or until the meter is freed: an interrupt may come before ``__exit__`` begins."""
    while not done.wait(0.002) and (held := meter()) is not None:
        held.look()
        del held


def _end(done: threading.Event, status: int | None) -> None:
    """Stop the thread of a meter, and close its file."""
    done.set()
    if status is not None:
        os.close(status)


def _higher(one: Sample, two: Sample) -> Sample:
    return Sample(one.seconds, max(one.anonymous, two.anonymous), max(one.mapped, two.mapped))


_STATUS = Path("/proc/self/status")
_RESIDENT = re.compile(rb"^RssAnon:\s*(\d+) kB\nRssFile:\s*(\d+) kB", re.MULTILINE)


class Resident(NamedTuple):
    """Resident bytes of the process: anonymous memory, and pages of mapped files."""

    anonymous: int
    mapped: int


def _open_status() -> int | None:
    """Return an open descriptor of ``_STATUS``, or ``None``: opening it for each read would take four times as long."""
    try:
        return os.open(_STATUS, os.O_RDONLY | os.O_CLOEXEC) if hasattr(os, "pread") else None
    except OSError:
        return None


def resident_memory(status: int | None = None) -> Resident | None:
    """Return the resident bytes now, read from the descriptor ``status``; ``None`` where the system reports none."""
    try:
        found = _RESIDENT.search(_STATUS.read_bytes() if status is None else os.pread(status, 2**14, 0))
    except OSError:
        return None
    return None if found is None else Resident(*(int(kilobytes) * 1024 for kilobytes in found.groups()))
