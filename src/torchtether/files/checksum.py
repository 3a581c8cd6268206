"""CRC-32 of bytes in memory; while a file is written, a second thread shares the work with the writing thread."""

from __future__ import annotations

import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

from .. import compiled

_POLYNOMIAL = 0xEDB88320
_FOLDED = 4096  # bytes; below it zlib is as fast
_WORTH = 2**20  # bytes; a checksum of fewer takes less time than starting a job on the thread
_WAITING = 3


@dataclass
class _Part:
    length: int
    found: int = 0
    later: Future[int] | None = None
    piece: memoryview | None = None

    def settle(self) -> int:
        if self.later is not None:
            self.found = self.later.result()
        self.later = self.piece = None
        return self.found


class Checksum:
    """The CRC-32 of consecutive pieces; one thread reads the bytes of each piece once.

    ``aside`` computes pieces while the caller does other work; the caller computes the rest.  A piece must not change
    until ``value`` is called or three more pieces have been added.
    """

    def __init__(self, aside: ThreadPoolExecutor) -> None:
        self._aside = aside
        self._parts: list[_Part] = []
        self._waiting: list[_Part] = []

    def add(self, piece: memoryview) -> None:
        for part in self._waiting:
            if part.later is not None and part.later.done():
                part.settle()
        self._waiting = [part for part in self._waiting if part.later is not None]
        part = _Part(len(piece))
        self._parts.append(part)
        if len(piece) < _WORTH or len(self._waiting) == _WAITING:
            part.found = crc32(piece)
        else:
            part.later, part.piece = self._aside.submit(crc32, piece), piece
            self._waiting.append(part)

    def value(self) -> int:
        """Return the checksum of all pieces so far; drop them, so that the next checksum starts anew."""
        for part in reversed(self._waiting):
            if part.later is not None and part.piece is not None and part.later.cancel():
                part.found, part.later = crc32(part.piece), None
        parts, self._parts, self._waiting = self._parts, [], []
        whole = 0
        for part in parts:
            whole = joined(whole, part.settle(), part.length)
        return whole


def crc32(data: bytes | bytearray | memoryview, start: int = 0) -> int:
    """Return ``zlib.crc32(data, start)``; other Python threads run meanwhile.

    >>> crc32(bytes(range(250)) * 99, 5) == zlib.crc32(bytes(range(250)) * 99, 5)
    True
    """
    memory = memoryview(data)
    library = compiled.native() if memory.nbytes >= _FOLDED else None
    folded = None if library is None else library.fold_crc32(memory, start)
    if folded is None:
        return zlib.crc32(memory, start)
    return zlib.crc32(memory.cast("B")[memory.nbytes & -16 :], zlib.crc32(folded, 0xFFFFFFFF))


def joined(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two concatenated runs of bytes from the CRC-32 of each; the second has ``length`` bytes.

    A CRC is a remainder of polynomials: appended bytes multiply it by a power of x (as in zlib's crc32_combine).

    >>> joined(zlib.crc32(b"one"), zlib.crc32(b"and two"), 7) == zlib.crc32(b"oneand two")
    True
    """
    return (_times(first, _shift(length)) if first else 0) ^ second


@lru_cache(maxsize=64)
def _shift(length: int) -> int:
    """Return x to the power of 8 * length."""
    power, base = 1 << 31, 1 << 23  # 1, and x**8: the highest bit is the lowest power
    while length:
        if length & 1:
            power = _times(power, base)
        base = _times(base, base)
        length >>= 1
    return power


def _times(one: int, two: int) -> int:
    product = 0
    while one:
        if one & 1 << 31:
            product ^= two
        one = one << 1 & 0xFFFFFFFF
        two = two >> 1 ^ (_POLYNOMIAL if two & 1 else 0)
    return product
