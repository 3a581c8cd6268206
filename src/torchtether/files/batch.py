"""Batches of reads and other jobs, which a few threads run together, in file order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor

from ..geometry.views import Shape
from ..progress import Tick, no_tick
from .crew import Crew, Job, Scratch, together
from .memory import memory_of, pieces
from .readers import ReadableFile
from .ring import SLOT, STAGED, Handing, Passage, Ring, Transfer, Transfers
from .system import read_at_once

SLICE = 4 * 2**20
"""Bytes that one thread reads at once into memory of the CPU."""

_NEIGHBOURS = 512
"""The most tensors that one ``preadv`` reads into; systems allow 1024, old ones fewer."""

_FEW = 4
"""The least tensors for which ``read_at_once`` is used: for fewer, the cost of ``memoryview`` objects is small."""

_WORTHWHILE = 2 * SLICE
"""Bytes below which threads cost more than they save."""

Straight = Callable[[int, int, Scratch], bool]
"""A function of (descriptor, byte offset, scratch) that reads and uses the bytes itself; returns whether it did."""


_Read = tuple[int, int, int, int, ReadableFile, str, Tensor, Passage | None]
"""A read, sortable by file: id of the file, byte offset, serial number, bytes, file, key, target, passage."""

_Part = tuple[str, Tensor, int, int]
"""A key, the target tensor, and the first and last byte of the target."""


Doubt = tuple[Tensor, Callable[["Batch"], None]]
"""A flag on a device, 0 if the result of a job is wrong, and a function that adds the job in a safe form."""


class Batch:
    """A collection of reads and jobs, which ``run`` executes. Until then the target memory is not touched.

    After an error in ``run`` the contents of the memory are undefined.
    """

    def __init__(self, ring: Ring | None = None, crew: Crew | None = None) -> None:
        self._reads: list[_Read] = []
        self._jobs: list[tuple[int, int, Job]] = []
        self._transfers: list[tuple[int, int, Transfer]] = []
        self._nbytes = 0
        self._most = 1
        """The most bytes that one job brings to a device."""
        self._ring = ring
        self._crew = crew
        self._passages: dict[torch.device, Passage] = {}
        self.doubts: list[Doubt] = []
        """Results of jobs that ``run`` looks at when all have ended, so that no job waits for its device."""

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
        is_plain = out.is_contiguous() and not (out.is_conj() or out.is_neg())
        if out.dtype == stored.dtype and is_reached and is_plain:
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
        self._nbytes += nbytes
        if passage is not None:
            handing = Handing(passage, shape, stored.dtype, use)
            for start, stop in handing.pieces():
                place, part = partial(_place, handing, start, stop), [(key, stop - start)]
                transfer = Transfer(passage, file, at + start, part, place, handing.arrived)
                self._transfers.append((id(file), at, transfer))  # pieces of one tensor stay together
                self._most = max(self._most, stop - start)
            return

        def job(space: Scratch) -> int:
            descriptor = file.descriptor
            if straight is None or descriptor is None or not straight(descriptor, at, space):
                given = space.take(shape, stored.dtype, at)
                file.read_bytes([(key, memory_of(given))], at)
                use(given)
            return nbytes

        self._jobs.append((id(file), at, job))

    def run(self, tick: Tick) -> None:
        """Run all reads and jobs. Raise CheckpointError, naming the file and the key.

        Work that is queued afterwards on the current stream of a device sees the values read.
        """
        self._join()
        jobs = [job for _, _, job in sorted(self._jobs, key=itemgetter(0, 1))]
        transfers = [transfer for _, _, transfer in sorted(self._transfers, key=itemgetter(0, 1))]
        self._jobs, self._transfers, passages = [], [], list(self._passages.values())
        is_much, self._nbytes, is_whole = self._nbytes > _WORTHWHILE, 0, False
        try:
            for passage in passages:
                passage.begin(self._most)
            if not is_much:
                Crew().do(jobs, tick, 1)
            elif jobs:
                (together if self._crew is None else self._crew.do)(jobs, tick)
            if transfers:
                self._transfer(transfers, tick, apart=is_much)
            for passage in passages:
                passage.end()
            is_whole = True
        finally:  # an interrupt may also come while the passages end
            if passages and not is_whole and self._ring is not None:
                self._ring.close()  # waits for all that is queued
                self._passages.clear()
        self._settle()

    def _transfer(self, transfers: list[Transfer], tick: Tick, *, apart: bool) -> None:
        """Run ``transfers``; if ``apart``, on another thread, because interrupts come to this one."""
        assert self._ring is not None
        run = Transfers(self._ring)
        steps: list[Callable[[], int]] = [*(partial(run.add, transfer) for transfer in transfers), run.end]
        jobs: list[Job] = [partial(_step, step) for step in steps]

        def within() -> AbstractContextManager[object]:
            with ExitStack() as stack:
                for passage in self._passages.values():
                    stack.enter_context(passage.entered())
                return stack.pop_all()

        do = together if apart and self._crew is None else (self._crew or Crew()).do
        do(jobs, tick, 1, within=within, apart=apart)

    def _settle(self) -> None:
        """Run the jobs again whose results are wrong."""
        if not self.doubts:
            return
        doubts, again = list(self.doubts), Batch(self._ring, self._crew)
        self.doubts.clear()
        for device in dict.fromkeys(flag.device for flag, _ in doubts):
            some = [doubt for doubt in doubts if doubt[0].device == device]
            for is_right, (_, add) in zip(torch.cat([flag.view(1) for flag, _ in some]).tolist(), some, strict=True):
                if not is_right:
                    add(again)
        again.run(no_tick)

    def _join(self) -> None:
        """Make jobs and transfers of the reads: adjacent ones are merged, larger ones split.

        A job has at most ``SLICE`` bytes, a transfer ``SLOT``.
        """
        parts: list[_Part] = []
        first = size = limit = 0
        before: ReadableFile | None = None
        way: Passage | None = None

        def close() -> None:
            if before is None:
                return
            if way is None:
                self._jobs.append((id(before), first, _reading(before, parts, first, size)))
            else:
                self._transfers.append((id(before), first, _transfer_of(way, before, parts, first)))
                self._most = max(self._most, size)

        for _, at, _, nbytes, file, key, out, passage in sorted(self._reads):
            start = 0
            while start < nbytes:
                follows = file is before and at + start == first + size and passage is way
                if not follows or nbytes - start > limit - size or len(parts) == _NEIGHBOURS:
                    close()
                    before, way, parts, first, size = file, passage, [], at + start, 0
                    limit = SLICE if passage is None else SLOT
                stop = min(start + limit - size, nbytes)
                parts.append((key, out, start, stop))
                size += stop - start
                start = stop
        close()
        self._reads = []


def _place(handing: Handing, start: int, stop: int) -> list[Tensor]:
    return [handing.place(start, stop)]


def _step(step: Callable[[], int], space: Scratch) -> int:
    return step()


def _spans(parts: list[_Part]) -> list[int]:
    """Return the address and the length of each part, flattened."""
    found: list[int] = []
    for _, out, start, stop in parts:
        found += out.data_ptr() + start, stop - start
    return found


def _transfer_of(passage: Passage, file: ReadableFile, parts: list[_Part], at: int) -> Transfer:
    counts = [(key, stop - start) for key, _, start, stop in parts]
    return Transfer(passage, file, at, counts, lambda: [out[start:stop] for _, out, start, stop in parts])


def _reading(file: ReadableFile, parts: list[_Part], at: int, size: int) -> Job:
    def job(space: Scratch) -> int:
        descriptor = file.descriptor
        if descriptor is None or len(parts) < _FEW or not read_at_once(descriptor, _spans(parts), at, size):
            file.read_bytes([(key, memory_of(out)[start:stop]) for key, out, start, stop in parts], at)
        return size

    return job
