"""The joined checksum of pieces is that of all bytes, with every implementation."""

import random
import zlib
from concurrent.futures import ThreadPoolExecutor

from hypothesis import example, given
from hypothesis import strategies as st

from torchtether.files.checksum import _WAITING, _WORTH, Checksum, crc32, joined

BYTES = random.Random(0).randbytes(3 * 2**14)


@given(st.integers(0, 70), st.integers(0, len(BYTES) - 70), st.integers(0, 2**32 - 1))
@example(3, 4096, 2**32 - 1)
@example(0, 0, 7)
@example(1, len(BYTES) - 70, 0)
def test_it_is_that_of_zlib_wherever_the_bytes_lie_and_whatever_goes_before(at, length, start):
    piece = memoryview(BYTES)[at : at + length]
    assert crc32(piece, start) == zlib.crc32(piece, start)


def test_bytes_of_any_kind_are_taken():
    wanted = zlib.crc32(BYTES)
    assert crc32(BYTES) == crc32(bytearray(BYTES)) == crc32(memoryview(BYTES).cast("H")) == wanted
    assert crc32(memoryview(bytearray(BYTES)), 0) == wanted


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_checksums_make_one(one, two):
    assert joined(zlib.crc32(one), zlib.crc32(two), len(two)) == zlib.crc32(one + two)


@given(st.integers(0, 2**32 - 1), st.integers(1, 2**40))
def test_bytes_that_are_zero_may_be_many(first, length):
    half = length // 2
    zeros = joined(joined(0, 0, half), 0, length - half)
    assert joined(joined(first, 0, half), 0, length - half) == joined(first, zeros, length)


def test_pieces_large_and_small_in_any_mixture():
    block = bytes(range(256)) * (_WORTH // 256 + 1)
    pieces = [memoryview(block)[i : i + size] for i, size in enumerate([3, _WORTH + 1, 0, _WORTH, 7, *[_WORTH] * 9, 1])]
    with ThreadPoolExecutor(1) as aside:
        checksum = Checksum(aside)
        for _ in range(2):
            for piece in pieces:
                checksum.add(piece)
                assert sum(part.piece is not None for part in checksum._parts) <= _WAITING
            assert checksum.value() == zlib.crc32(b"".join(pieces))
        assert checksum.value() == 0
