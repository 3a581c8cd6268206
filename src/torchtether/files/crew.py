"""Threads that read files: a reusable pool of them, and the memory that each uses."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import Tensor

from ..geometry.views import Shape
from ..torch_private.processors import one_core
from .memory import SHIFT, clear_of, scratch

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

THREADS = max(1, min(4, CORES))
"""The number of reading threads. Two saturate the memory of small machines, four that of most larger ones."""


class Scratch:
    """A scratch buffer of one thread. All its jobs reuse it, so that its pages fault only once."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def take(self, shape: Shape, dtype: torch.dtype, at: int) -> Tensor:
        """Return an uninitialised CPU tensor for bytes of a file from ``at`` on, valid until the next ``take``."""
        nbytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
        if self._memory is None or self._memory.nbytes < nbytes + SHIFT:
            self._memory = None  # free the old buffer before the new one is allocated
            self._memory = scratch((nbytes + SHIFT,), torch.uint8)
        first = clear_of(at, self._memory.data_ptr())
        return self._memory[first : first + nbytes].view(dtype).view(shape)


Job = Callable[[Scratch], int]
"""A function that does its work and returns the number of bytes processed."""

Within = Callable[[], AbstractContextManager[object]]
"""A function that returns the context in which a thread runs jobs."""

_TOLD = 16 * 2**20
"""Bytes after which a thread reports progress: each report wakes the calling thread, which takes a core."""


class Crew:
    """A reusable pool of threads, which start at the first use and end at ``close``."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._turns: _Turns = queue.SimpleQueue()
        self._end: _End = weakref.ref(self, self._turns.put)

    def do(
        self,
        jobs: Sequence[Job],
        tick: Callable[[int], None],
        most: int | None = None,
        *,
        within: Within = nullcontext,
        apart: bool = False,
    ) -> None:
        """Run all jobs on at most ``most`` threads, starting them in order; report bytes to ``tick`` on this thread.

        For one thread they run here, unless ``apart``. Jobs run in the context ``within()``, which each thread enters
        once, but ``tick`` does not.
        After the first error, of a job or of ``tick``, or an interrupt, no further job starts; the running jobs finish,
        and then the error is raised.
        """
        count = min(most or THREADS, len(jobs))
        if count < 2 and not apart:
            space = Scratch()
            for job in jobs:
                with within():
                    nbytes = job(space)
                tick(nbytes)
            return
        todo, done = iter(jobs), queue.SimpleQueue[int | BaseException | None]()
        lock, stop, inference = threading.Lock(), threading.Event(), torch.is_inference_mode_enabled()

        def turn(space: Scratch) -> None:
            try:
                one_core()
                nbytes = 0
                with torch.inference_mode(inference), torch.no_grad(), within():
                    while not stop.is_set():
                        with lock:
                            job = next(todo, None)
                        if job is None:
                            break
                        nbytes += job(space)
                        if nbytes >= _TOLD:
                            done.put(nbytes)
                            nbytes = 0
                if nbytes:
                    done.put(nbytes)
            except BaseException as error:
                done.put(error)
            finally:
                done.put(None)

        try:
            if not self._threads:
                self._turns = queue.SimpleQueue()
                # a callback without Python code: an interrupt may abort ``close``, and ``__del__`` would swallow it
                self._end = weakref.ref(self, self._turns.put)
            while len(self._threads) < count:
                ours = self._turns, self._end
                self._threads.append(threading.Thread(target=_take_turns, args=ours, name="torchtether", daemon=True))
                self._threads[-1].start()
            for _ in range(count):
                self._turns.put(turn)
            left = count
            while left:
                found = done.get()
                if isinstance(found, BaseException):
                    raise found
                if found is None:
                    left -= 1
                else:
                    tick(found)
        except BaseException:
            stop.set()
            self.close()
            raise

    def close(self) -> None:
        """End the threads after their current jobs, and wait for them."""
        threads, self._threads = self._threads, []
        self._turns.put(self._end)
        for thread in threads:
            if thread.ident is not None:  # only a started thread can be joined
                thread.join()


_End = weakref.ref[Crew]
"""The queue entry that ends a thread."""

_Turns = queue.SimpleQueue[Callable[[Scratch], None] | _End]


def _take_turns(turns: _Turns, end: _End) -> None:
    space = Scratch()
    while (turn := turns.get()) is not end:
        cast(Callable[[Scratch], None], turn)(space)
    turns.put(end)  # for the next thread


def together(
    jobs: Sequence[Job],
    tick: Callable[[int], None],
    most: int | None = None,
    *,
    within: Within = nullcontext,
    apart: bool = False,
) -> None:
    """Run all jobs as ``Crew.do`` does. All threads have ended on return, also after an error."""
    crew = Crew()
    try:
        crew.do(jobs, tick, most, within=within, apart=apart)
    finally:
        crew.close()
