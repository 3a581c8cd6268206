"""Threads that read ranges of files ahead, while another thread does something with the bytes that are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from torch import Tensor

from .. import compiled
from .crew import CORES
from .header import Stored
from .memory import memory_of

READERS = max(2, min(12, CORES))
"""The number of threads that read for a device. Beside an H100, on 16 cores, 10 to 15 were alike."""

PIECE = 2**19
"""The most bytes that one of them reads at once. All of them share a buffer, so that it is still in the cache when the
device copies from it."""

_READERS_OF_PYTHON = max(2, min(8, CORES))
"""The same of Python's threads, which wait for each other's turn: 2.1 GB took 61 ms with 8, 91 with 12, 50 without."""

_PIECE_OF_PYTHON = 4 * 2**20
"""The most bytes that one of those reads at once. Each piece costs some calls under Python's lock."""

Buffer = tuple[str, memoryview]
"""A key, and memory to fill with some of its bytes."""


class ReadableFile(Protocol):
    """The interface of an open file to a batch: the location of each tensor, and its bytes."""

    @property
    def descriptor(self) -> int | None: ...

    def stored(self, key: str) -> Stored: ...

    def read_bytes(self, buffers: Sequence[Buffer], at: int) -> None: ...


class Readers:
    """Threads that read, of the compiled module if there is one; they start at the first use and end at ``close``."""

    def __init__(self) -> None:
        self._compiled: Any = None
        self._pool: ThreadPoolExecutor | None = None
        self._kept: dict[int, Tensor] = {}
        """The memory of reads that may be under way, by id."""

    def start(
        self, file: ReadableFile, memory: Tensor, parts: Sequence[tuple[str, int]], at: int
    ) -> Callable[[], None]:
        """Begin to fill contiguous ``memory`` with the bytes of ``file`` from ``at`` on.

        ``parts`` are keys and the numbers of bytes that belong to each, in order, for errors.

        Returns a function that waits for the end, and raises the error of the file.
        """
        whole, nbytes = memory_of(memory), sum(count for _, count in parts)
        buffers, first = list[Buffer](), 0
        for key, count in parts:
            buffers.append((key, whole[first : first + count]))
            first += count
        descriptor, native = file.descriptor, compiled.native()
        if descriptor is None or native is None:
            return self._start_in_python(file, buffers, at)
        if self._compiled is None:
            self._compiled = native.open_readers(READERS, PIECE)
        self._kept[id(memory)] = memory
        number = native.start_read(self._compiled, descriptor, memory.data_ptr(), at, nbytes)

        def wait() -> None:
            if not native.finish_read(self._compiled, number):
                file.read_bytes(buffers, at)  # raises the error
            del self._kept[id(memory)]

        return wait

    def _start_in_python(self, file: ReadableFile, buffers: Sequence[Buffer], at: int) -> Callable[[], None]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_READERS_OF_PYTHON, "torchtether")
        begun = [self._pool.submit(file.read_bytes, piece, start) for piece, start in _cut(buffers, at)]

        def wait() -> None:
            for one in begun:
                one.result()

        return wait

    def close(self) -> None:
        """Wait for reads under way, and end the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._compiled = self._pool = None  # the compiled module waits when its object is freed
        self._kept.clear()


def _cut(buffers: Sequence[Buffer], at: int) -> list[tuple[list[Buffer], int]]:
    """Return the buffers in pieces of bounded size, each with its place in the file."""
    made: list[tuple[list[Buffer], int]] = [([], at)]
    size = 0
    for key, memory in buffers:
        while memory:
            if size == _PIECE_OF_PYTHON:
                made.append(([], at))
                size = 0
            some = memory[: _PIECE_OF_PYTHON - size]
            made[-1][0].append((key, some))
            memory = memory[len(some) :]
            size, at = size + len(some), at + len(some)
    return made
