"""Reads and other work, collected and then done together by a few threads, in the order of the files."""

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
"""How many threads read. Two saturate the memory of small machines, four that of most larger ones."""

DEVICE_THREADS = max(2, min(8, _CORES))
"""How many threads read what goes on to a device: one copies 6 to 10 GB/s, a link takes 25 to 55 (not measured)."""


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


class Crew:
    """Threads that do jobs together, again and again: begun when they are first needed, gone after ``close``."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._turns: _Turns = queue.SimpleQueue()
        self._end: _End = weakref.ref(self, self._turns.put)

    def do(self, jobs: Sequence[Job], tick: Callable[[int], None], most: int | None = None) -> None:
        """Do every job, by ``most`` threads, begun in the order given; ``tick`` is told how much, on this thread.

        After the first error, of a job or of ``tick``, and after an interrupt no job is begun, those that run are
        waited for, and the error is raised.
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
                # without Python code: an interrupt may keep ``close`` from its work, and would be lost in a ``__del__``
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
        """Let the threads end, after what they do."""
        threads, self._threads = self._threads, []
        self._turns.put(self._end)
        for thread in threads:
            if thread.ident is not None:  # it has been started
                thread.join()


_End = weakref.ref[Crew]
"""Says that no turn follows."""

_Turns = queue.SimpleQueue[Callable[[Scratch], None] | _End]


def _take_turns(turns: _Turns, end: _End) -> None:
    space = Scratch()
    while (turn := turns.get()) is not end:
        cast(Callable[[Scratch], None], turn)(space)
    turns.put(end)  # the others end too


def together(jobs: Sequence[Job], tick: Callable[[int], None], most: int | None = None) -> None:
    """Do every job as ``Crew.do`` does. No thread is left in any case."""
    crew = Crew()
    try:
        crew.do(jobs, tick, most)
    finally:
        crew.close()


SLICE = SLOT
"""Bytes that one thread reads at once."""

_NEIGHBOURS = 512
"""Tensors that one call reads into; systems allow 1024, and old ones fewer."""

_FEW = 4
"""Tensors below which it does not matter how their memory is named."""

_WORTHWHILE = 2 * SLICE
"""Bytes below which threads cost more than they save."""

Buffer = tuple[str, memoryview]
"""A key, and memory that some of its bytes are for."""

Straight = Callable[[int, int, Scratch], bool]
"""Reads and uses some bytes itself, from an open file and a place in it, with scratch; says whether it did."""


class ReadableFile(Protocol):
    """What a batch asks of an open file: where each tensor lies in it, and bytes of it."""

    @property
    def descriptor(self) -> int | None: ...

    def stored(self, key: str) -> Stored: ...

    def read_bytes(self, buffers: Sequence[Buffer], at: int) -> None: ...


_Read = tuple[int, int, int, int, ReadableFile, str, Tensor, Passage | None]
"""In the order of the files: which file, the place in it, a number of its own, how many bytes are for whom, the way."""

_Part = tuple[str, Tensor, int, int]
"""A key, the tensor that it is for, and which of its bytes."""


class Batch:
    """What is to be read or done, in any order; ``run`` does it. Until then the memory is not touched.

    After an error in ``run`` the memory holds anything.
    """

    def __init__(self, ring: Ring | None = None, crew: Crew | None = None) -> None:
        self._reads: list[_Read] = []
        self._jobs: list[tuple[int, int, Job]] = []
        self._nbytes = 0
        self._ring = ring
        self._crew = crew
        self._passages: dict[torch.device, Passage] = {}

    def do(self, job: Job, nbytes: int) -> None:
        """Have ``job``, which takes about as long as ``nbytes`` to read, done beside the reads, before those."""
        self._jobs.append((0, len(self._jobs), job))
        self._nbytes += nbytes

    def passage(self, device: torch.device) -> Passage | None:
        """Return the way to the memory of ``device``; ``None`` if threads fill it without one."""
        found = self._passages.get(device)
        if found is not None or (self._ring is None and device.type == "cpu"):
            return found
        ring = self._ring = self._ring or Ring()
        if (lane := ring.lane(device)) is not None:
            found = self._passages[device] = Passage(ring, device, lane)
        return found

    def read(self, file: ReadableFile, key: str, out: Tensor, first: int = 0) -> None:
        """Have ``out``, of any strides, dtype and device, filled with ``key`` from its row ``first`` on.

        Bytes that need no change go straight there, unseen by autograd; others go through scratch of at most ``SLICE``
        per thread. What is for a device with streams goes through the ring, and is converted there.
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
        """Have each tensor filled with the bytes of the file from that place on.

        It is contiguous and on the CPU; or it is bytes of the device that ``passage`` goes to. The key is the one that
        an error names.
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
        """Have ``use`` called, on some thread, with those rows of ``key``, which it must not keep.

        With ``device``, to which there is a ``passage``, they are there, and ``use`` computes there.
        ``straight`` may do it all itself: it is given the open file, where in it the rows begin, and the scratch of its
        thread, and says whether it has. If not, the rows are read.
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
        """Read everything, and use it. Raise CheckpointError, naming the file and the key.

        What goes to a device with streams is there for all that its current stream does from now on.
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
        """Return the reads as jobs: what follows each other in a file is one, of at most ``SLICE``.

        What is larger is cut.
        """
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
    """Return address and length of each of the parts."""
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
