"""Protection from interruptions: signals while a model changes, forks while a lock is held, garbage collections."""

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
"""Signals whose handlers commonly raise: Ctrl-C, timeouts, the end of a job. Checking every signal takes time."""

_SLICE = 0.1
"""Seconds between two checks for signals while a thread waits for a lock."""


class Deferred:
    """Delay signal handlers that are written in Python: Ctrl-C raises at a safe point inside the block, or at its end.

    Python runs such a handler between any two bytecodes of the main thread. Its exception (``KeyboardInterrupt``, the
    error of a timeout) is raised at that point, for instance before the first line of an ``__exit__``, so that a lock
    stays held. This class delays the signals of ``_NUMBERS`` that have a handler in Python when the block begins. In
    a thread other than the main one it does nothing: Python runs no handlers there.

        with Deferred() as signals:
            for tensor in tensors:
                signals.deliver()                           a safe point: handlers of waiting signals run here
                new = signals.during(read, tensor)          takes long and changes nothing: signals are not delayed
                change(tensor, new)

    At the end the original handlers are restored before waiting signals are delivered, so no signal is lost. Blocks
    may be nested: signals that the inner block delivers wait in the outer one.
    """

    def __init__(self, waits: Callable[[FrameType | None], bool] | None = None) -> None:
        """Delay each signal for which ``waits(frame)`` is true, ``frame`` being the interrupted one; by default all."""
        self._waits = waits
        self._theirs: dict[int, Handler] = {}
        self._replaced: list[int] = []
        self._is_open = False
        self.waiting: list[int] = []
        """Numbers of the waiting signals, each once."""

    def begin(self) -> None:
        """Delay signals from now on."""
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
        """Restore the original handlers, then call those of waiting signals; raise what they raise."""
        try:
            while self._replaced:
                number = self._replaced[-1]
                if signal.getsignal(number) == self._caught:  # else the block has set another, which stays
                    signal.signal(number, self._theirs[number])
                self._replaced.pop()
        finally:  # a handler that is restored already may raise at any time
            if self._replaced:
                self.end()
            self.deliver()

    def deliver(self) -> None:
        """Call the handlers of waiting signals: a safe point. Raise what they raise."""
        while self.waiting:
            try:
                self._handle(self.waiting.pop(0), None)
            finally:
                self.deliver()  # the others too, whatever one raises

    def during(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Call ``function``, which may be interrupted anywhere, and return its result; signals are not delayed."""
        try:
            self._is_open = True
            self.deliver()
            return function(*args, **kwargs)
        finally:
            self._is_open = False

    def _caught(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in place of its original handler: delay it, or call that handler."""
        if self._waits(frame) if self._waits is not None else not self._is_open:
            if number not in self.waiting:
                self.waiting.append(number)
            return
        was_open, self._is_open = self._is_open, False  # a second error must not interrupt clean-up after the first
        self._handle(number, frame)
        self._is_open = was_open

    def _handle(self, number: int, frame: FrameType | None) -> None:
        handler = self._theirs[number]
        is_ours = isinstance(getattr(handler, "__self__", None), Deferred)
        handler(number, frame if is_ours or frame is not None else sys._getframe())

    def __enter__(self) -> Deferred:
        self.begin()
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


def take(lock: Lock, signals: Deferred) -> None:
    """Acquire ``lock``. If the handler of a signal raises meanwhile, raise that without the lock."""
    while not lock.acquire(timeout=_SLICE):
        signals.deliver()


def renewed_after_fork(lock: Lock) -> Lock:
    """Return ``lock``, made free in every forked child process, unless the forking thread holds it.

    A fork copies only the thread that calls it. A lock that another thread held would stay held for ever in the child.
    """

    def renew() -> None:
        is_mine = getattr(lock, "_is_owned", None)  # only an RLock knows which thread holds it
        if is_mine is None or not is_mine():
            lock._at_fork_reinit()  # threading and logging do the same with their locks: there is no public way

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)
    return lock


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable Python's cyclic garbage collector inside the block; reference counting still frees objects.

    A collection visits all objects of the process, and creating tens of thousands of objects triggers several: half of
    the time of loading small tensors.  The switch is process-wide: of two threads inside, the first to leave restores
    it.

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
