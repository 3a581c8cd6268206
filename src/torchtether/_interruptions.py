"""What must not come in between: signals while a model changes, a fork while a lock is held, garbage collections."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Lock = TypeVar("Lock", bound=Any)

Handler = Callable[[int, FrameType | None], Any]

_NUMBERS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGALRM", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
]
"""Those from whose handlers people raise: Ctrl-C, timeouts, the end of a job. To ask for each takes time."""

_SLICE = 0.1
"""Seconds after which a wait for a lock looks for signals."""


class Deferred:
    """Delay signal handlers that are written in Python: Ctrl-C raises at a safe point inside the block, or at its end.

    Python runs such a handler between any two bytecodes of the main thread, and what it raises (``KeyboardInterrupt``,
    the error of a timeout) comes from there: before the first line of an ``__exit__``, say, so that a lock stays held.
    The signals of ``_NUMBERS`` wait that have a handler in Python when the block begins; in other threads none runs.

        with Deferred() as signals:
            for tensor in tensors:
                signals.deliver()                           a safe point: what has waited is raised here
                new = signals.during(read, tensor)          takes long and changes nothing: nothing waits
                change(tensor, new)

    The handlers are in place again before what waits at the end is delivered, so nothing is lost. Blocks may be
    nested: what the inner one delivers waits in the outer one.
    """

    def __init__(self, waits: Callable[[FrameType | None], bool] | None = None) -> None:
        """Take ``waits``, which says of the frame in which a signal arrives whether it waits; by default all do."""
        self._waits = waits
        self._theirs: dict[int, Handler] = {}
        self._replaced: list[int] = []
        self._is_open = False
        self.waiting: list[int] = []
        """The signals that wait, each once."""

    def begin(self) -> None:
        """Make signals wait from now on."""
        if threading.get_ident() != threading.main_thread().ident:
            return
        try:
            for number in _NUMBERS:
                handler = signal.getsignal(number)
                if callable(handler) and not isinstance(handler, signal.Handlers):
                    self._theirs[number] = handler
                    self._replaced.append(number)
                    signal.signal(number, self._caught)  # Ctrl-C first: from here on it waits
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Restore the handlers of before, then tell them what has waited; raise what they raise."""
        try:
            while self._replaced:
                signal.signal(self._replaced[-1], self._theirs[self._replaced[-1]])
                self._replaced.pop()
        finally:  # one that is back already may raise at any time
            if self._replaced:
                self.end()
            self.deliver()

    def deliver(self) -> None:
        """Run the handlers of what has waited: a safe point. Raise what they raise."""
        while self.waiting:
            try:
                self._tell(self.waiting.pop(0), None)
            finally:
                self.deliver()  # the others too, whatever one raises

    def during(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Call ``function``, which may be left anywhere, and return its result; no signal waits meanwhile."""
        try:
            self._is_open = True
            self.deliver()
            return function(*args, **kwargs)
        finally:
            self._is_open = False

    def _caught(self, number: int, frame: FrameType | None) -> None:
        """Stand for every handler that is replaced."""
        if self._waits(frame) if self._waits is not None else not self._is_open:
            if number not in self.waiting:
                self.waiting.append(number)
            return
        was_open, self._is_open = self._is_open, False  # who cleans up after an error must not meet a second one
        self._tell(number, frame)
        self._is_open = was_open

    def _tell(self, number: int, frame: FrameType | None) -> None:
        handler = self._theirs[number]
        is_ours = isinstance(getattr(handler, "__self__", None), Deferred)
        handler(number, frame if is_ours or frame is not None else sys._getframe())

    def __enter__(self) -> Deferred:
        self.begin()
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


def take(lock: Lock, signals: Deferred) -> None:
    """Acquire ``lock``; raises what the handler of a signal raises that arrives meanwhile, without the lock."""
    while not lock.acquire(timeout=_SLICE):
        signals.deliver()


def renewed_after_fork(lock: Lock) -> Lock:
    """Return ``lock``, which is free in every forked process, unless the thread that forks holds it.

    Of the threads of a process a fork copies only the one that forks. What another one held at that moment would stay
    held for ever.
    """

    def renew() -> None:
        is_mine = getattr(lock, "_is_owned", None)  # a lock that is no RLock does not know its thread
        if is_mine is None or not is_mine():
            lock._at_fork_reinit()  # as threading's and logging's own locks do: there is no public way

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)
    return lock


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep Python from looking for reference cycles inside; reference counting frees as ever.

    Each look goes through all objects of the process, and objects by the ten thousand ask for several: half of the time
    of loading small tensors.  The switch is the process's: if two threads are inside, the first to leave puts it back.

    >>> with uncollected():
    ...     gc.isenabled()
    False
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
