"""Jobs done together by a few threads: reading, and what is done to what was read."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..geometry.views import Shape
from ..torch_private.processors import one_core
from .memory import SHIFT, clear_of, scratch

THREADS = max(1, min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))
"""How many threads read. Two saturate the memory of small machines, four that of most larger ones."""


class Scratch:
    """Scratch of one thread, used again by each of its jobs, so that its pages are touched for the first time once."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def take(self, shape: Shape, dtype: torch.dtype, at: int) -> Tensor:
        """Return an uninitialised CPU tensor, until the next ``take``, for what a file has from byte ``at`` on."""
        nbytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
        if self._memory is None or self._memory.nbytes < nbytes + SHIFT:
            self._memory = None  # the old one goes before the new one comes
            self._memory = scratch((nbytes + SHIFT,), torch.uint8)
        first = clear_of(at, self._memory.data_ptr())
        return self._memory[first : first + nbytes].view(dtype).view(shape)


Job = Callable[[Scratch], int]
"""Does its work and says how many bytes that was."""


_TOLD = 16 * 2**20
"""Bytes after which a thread says what it did: the calling thread wakes then, and takes a core from the others."""


def together(jobs: Sequence[Job], tick: Callable[[int], None]) -> None:
    """Do every job, by a few threads, begun in the order given; ``tick`` is told how much, on this thread.

    After the first error, of a job or of ``tick``, and after an interrupt no job is begun, those that run are waited
    for, and the error is raised. No thread is left in any case.
    """
    if len(jobs) < 2 or THREADS < 2:
        space = Scratch()
        for job in jobs:
            tick(job(space))
        return
    todo, done = iter(jobs), queue.SimpleQueue[int | BaseException | None]()
    lock, stop, inference = threading.Lock(), threading.Event(), torch.is_inference_mode_enabled()

    def work() -> None:
        space = Scratch()
        try:
            one_core()
            nbytes = 0
            with torch.inference_mode(inference), torch.no_grad():
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

    threads = [threading.Thread(target=work, name="torchtether", daemon=True) for _ in range(min(THREADS, len(jobs)))]
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        left = len(threads)
        while left:
            found = done.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                left -= 1
            else:
                tick(found)
    finally:
        stop.set()
        for thread in started:
            thread.join()
