"""Batches of reads and other jobs, which a few threads run together, in file order."""

from __future__ import annotations

import math
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Protocol, cast

import torch
from torch import Tensor

from ..geometry.views import Shape
from ..progress import Tick
from ..torch_private.processors import one_core
from .header import Stored
from .memory import SHIFT, clear_of, memory_of, pieces, scratch
from .ring import SLOT, STAGED, Passage, Ring
from .system import read_at_once

_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

THREADS = max(1, min(4, _CORES))
"""The number of reading threads. Two saturate the memory of small machines, four that of most larger ones."""

DEVICE_THREADS = max(2, min(8, _CORES))
"""The number of threads that read for a device: one copies 6 to 10 GB/s, a link takes 25 to 55 (not measured)."""


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


_TOLD = 16 * 2**20
"""Bytes after which a thread reports progress: each report wakes the calling thread, which takes a core."""


class Crew:
    """A reusable pool of threads, which start at the first use and end at ``close``."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._turns: _Turns = queue.SimpleQueue()
        self._end: _End = weakref.ref(self, self._turns.put)

    def do(self, jobs: Sequence[Job], tick: Callable[[int], None], most: int | None = None) -> None:
        """Run all jobs on at most ``most`` threads, starting them in order; report bytes to ``tick`` on this thread.

        After the first error, of a job or of ``tick``, or an interrupt, no further job starts; the running jobs finish,
        and then the error is raised.
        """
        count = min(most or THREADS, len(jobs))
        if count < 2:
            space = Scratch()
            for job in jobs:
                tick(job(space))
            return
        todo, done = iter(jobs), queue.SimpleQueue[int | BaseException | None]()
        lock, stop, inference = threading.Lock(), threading.Event(), torch.is_inference_mode_enabled()

        def turn(space: Scratch) -> None:
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


def together(jobs: Sequence[Job], tick: Callable[[int], None], most: int | None = None) -> None:
    """Run all jobs as ``Crew.do`` does. All threads have ended on return, also after an error."""
    crew = Crew()
    try:
        crew.do(jobs, tick, most)
    finally:
        crew.close()


SLICE = SLOT
"""Bytes that one thread reads at once."""

_NEIGHBOURS = 512
"""The most tensors that one ``preadv`` reads into; systems allow 1024, old ones fewer."""

_FEW = 4
"""The least tensors for which ``read_at_once`` is used: for fewer, the cost of ``memoryview`` objects is small."""

_WORTHWHILE = 2 * SLICE
"""Bytes below which threads cost more than they save."""

Buffer = tuple[str, memoryview]
"""A key, and memory to fill with some of its bytes."""

Straight = Callable[[int, int, Scratch], bool]
"""A function of (descriptor, byte offset, scratch) that reads and uses the bytes itself; returns whether it did."""


class ReadableFile(Protocol):
    """The interface of an open file to a batch: the location of each tensor, and its bytes."""

    @property
    def descriptor(self) -> int | None: ...

    def stored(self, key: str) -> Stored: ...

    def read_bytes(self, buffers: Sequence[Buffer], at: int) -> None: ...


_Read = tuple[int, int, int, int, ReadableFile, str, Tensor, Passage | None]
"""A read, sortable by file: id of the file, byte offset, serial number, bytes, file, key, target, passage."""

_Part = tuple[str, Tensor, int, int]
"""A key, the target tensor, and the first and last byte of the target."""


class Batch:
    """A collection of reads and jobs, which ``run`` executes. Until then the target memory is not touched.

    After an error in ``run`` the contents of the memory are undefined.
    """

    def __init__(self, ring: Ring | None = None, crew: Crew | None = None) -> None:
        self._reads: list[_Read] = []
        self._jobs: list[tuple[int, int, Job]] = []
        self._nbytes = 0
        self._ring = ring
        self._crew = crew
        self._passages: dict[torch.device, Passage] = {}

    def do(self, job: Job, nbytes: int) -> None:
        """Add ``job``, which starts before the reads; it takes about as long as reading ``nbytes``."""
        self._jobs.append((0, len(self._jobs), job))
        self._nbytes += nbytes

    def passage(self, device: torch.device) -> Passage | None:
        """Return the passage to the memory of ``device``; ``None`` if threads can fill that memory directly."""
        found = self._passages.get(device)
        if found is not None or (self._ring is None and device.type == "cpu"):
            return found
        ring = self._ring = self._ring or Ring()
        if (lane := ring.lane(device)) is not None:
            found = self._passages[device] = Passage(ring, device, lane)
        return found

    def read(self, file: ReadableFile, key: str, out: Tensor, first: int = 0) -> None:
        """Add a read of ``key``, from its row ``first`` on, into ``out`` of any strides, dtype and device.

        Bytes that need no conversion are read directly into ``out``, unseen by autograd; others go through scratch of
        at most ``SLICE`` per thread. Bytes for a device with streams go through the ring, and are converted there.
        """
        stored = file.stored(key)
        at = first * (stored.nbytes // stored.shape[0]) if first else 0
        passage = self.passage(out.device)
        is_reached = passage is not None or out.device.type == "cpu"
        if out.dtype == stored.dtype and is_reached and out.is_contiguous():
            place = out if passage is None else out.detach().view(-1).view(torch.uint8)
            self.fill([(file, key, stored.start + at, place)], passage)
            return
        out = out.detach()
        limit = (SLICE if passage is None else STAGED) * out.element_size()
        for piece in pieces(out, limit // max(stored.dtype.itemsize, out.element_size())):
            self._through(file, key, at, tuple(piece.shape), piece.copy_, passage=passage)
            at += piece.numel() * stored.dtype.itemsize

    def fill(self, places: Iterable[tuple[ReadableFile, str, int, Tensor]], passage: Passage | None = None) -> None:
        """Add reads for (file, key, byte offset, target): fill each target with bytes of the file from the offset on.

        Targets are contiguous CPU tensors, or uint8 tensors on the device of ``passage``. Errors name the key.
        """
        reads, number, total = self._reads, len(self._reads), 0
        for file, key, at, out in places:
            nbytes = out.nbytes
            reads.append((id(file), at, number, nbytes, file, key, out, passage))
            number += 1
            total += nbytes
        self._nbytes += total

    def rows(
        self,
        file: ReadableFile,
        key: str,
        start: int,
        stop: int,
        use: Callable[[Tensor], object],
        straight: Straight | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Add a call of ``use``, on some thread, with the rows ``start`` to ``stop`` of ``key``; it must not keep them.

        If ``device`` has a ``passage``, the rows are on that device, and ``use`` computes there.
        ``straight`` is tried first: it can read and use the rows itself, and returns whether it did. If not, the rows
        are read.
        """
        shape = file.stored(key).shape
        row = file.stored(key).nbytes // shape[0]
        passage = None if device is None else self.passage(device)
        self._through(file, key, start * row, (stop - start, *shape[1:]), use, straight, passage)

    def _through(
        self,
        file: ReadableFile,
        key: str,
        at: int,
        shape: Shape,
        use: Callable[[Tensor], object],
        straight: Straight | None = None,
        passage: Passage | None = None,
    ) -> None:
        stored = file.stored(key)
        at += stored.start
        nbytes = math.prod(shape) * stored.dtype.itemsize

        def job(space: Scratch) -> int:
            if passage is not None:
                passage.hand(file.read_bytes, key, at, shape, stored.dtype, use)
                return nbytes
            descriptor = file.descriptor
            if straight is None or descriptor is None or not straight(descriptor, at, space):
                given = space.take(shape, stored.dtype, at)
                file.read_bytes([(key, memory_of(given))], at)
                use(given)
            return nbytes

        self._jobs.append((id(file), at, job))
        self._nbytes += nbytes

    def run(self, tick: Tick) -> None:
        """Run all reads and jobs. Raise CheckpointError, naming the file and the key.

        Work that is queued afterwards on the current stream of a device sees the values read.
        """
        jobs = [job for _, _, job in sorted([*self._jobs, *self._joined()], key=itemgetter(0, 1))]
        self._reads, self._jobs = [], []
        passages, is_whole = list(self._passages.values()), False
        try:
            for passage in passages:
                passage.begin()
            if self._nbytes > _WORTHWHILE:
                do = together if self._crew is None else self._crew.do
                do(jobs, tick, DEVICE_THREADS if passages else None)
            else:
                space = Scratch()
                for job in jobs:
                    tick(job(space))
            is_whole = True
        finally:
            for passage in passages:
                passage.end(is_whole=is_whole)

    def _joined(self) -> list[tuple[int, int, Job]]:
        """Return the reads as jobs of at most ``SLICE`` bytes: adjacent reads are merged, larger ones split."""
        jobs: list[tuple[int, int, Job]] = []
        parts: list[_Part] = []
        first = size = 0
        before: ReadableFile | None = None
        way: Passage | None = None
        for _, at, _, nbytes, file, key, out, passage in sorted(self._reads):
            start = 0
            while start < nbytes:
                stop = nbytes if nbytes - start <= SLICE else start + SLICE
                follows = file is before and at + start == first + size and passage is way
                if not follows or size + stop - start > SLICE or len(parts) == _NEIGHBOURS:
                    if before is not None:
                        jobs.append((id(before), first, _reading(before, parts, first, size, way)))
                    before, way, parts, first, size = file, passage, [], at + start, 0
                parts.append((key, out, start, stop))
                size += stop - start
                start = stop
        if before is not None:
            jobs.append((id(before), first, _reading(before, parts, first, size, way)))
        return jobs


def _spans(parts: list[_Part]) -> list[int]:
    """Return the address and the length of each part, flattened."""
    found: list[int] = []
    for _, out, start, stop in parts:
        found += out.data_ptr() + start, stop - start
    return found


def _reading(file: ReadableFile, parts: list[_Part], at: int, size: int, passage: Passage | None) -> Job:
    def job(space: Scratch) -> int:
        if passage is not None:
            passage.bring(file.read_bytes, parts, at)
            return size
        descriptor = file.descriptor
        if descriptor is None or len(parts) < _FEW or not read_at_once(descriptor, _spans(parts), at, size):
            file.read_bytes([(key, memory_of(out)[start:stop]) for key, out, start, stop in parts], at)
        return size

    return job
