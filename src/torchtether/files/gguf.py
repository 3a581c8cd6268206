"""A reader of GGUF files: key-value pairs and tensor infos are read once, and used only after every check.

    "GGUF"  version u32 (2 or 3)  tensors u64  pairs u64
    pairs   key string, type u32, value
    infos   name string, rank u32, sizes u64 (fastest first), type u32, offset u64
    data    each tensor at a multiple of ``general.alignment`` (32)

Strings are a u64 length and UTF-8 bytes; everything is little endian.
Source: ggml ``docs/gguf.md``.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ..errors import CheckpointError
from .ggml import NUMBERED, Packing
from .header import HEADER_LIMIT, Header, Stored
from .reader import TensorFile
from .record import HIDDEN, KEY

MAGIC = b"GGUF"

PAIRS = "gguf"
"""The key of the metadata with the scalar pairs of a file, as JSON."""

ALIGNMENT = 32
COUNT_LIMIT = 2**16  # tensors, pairs, bytes of a name: ten times what large models have
_VALUES_LIMIT = 2**22  # strings and arrays in arrays: ten times the largest vocabulary with its merges
RANK_LIMIT = 4  # ggml's own
_DEPTH_LIMIT = 4  # arrays within arrays; llama.cpp has none
_PIECE = 2**20

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_UINT32 = 4


_PART_KEYS = ("split.no", "split.count", "split.tensors.count")


@dataclass(frozen=True)
class Part:
    """Which part of a file this is: its number from 0, how many there are, and the tensors of all, if it says so."""

    number: int
    count: int
    tensors: int | None


class RawValue(bytes):
    """The value of a pair with its type, as a file stores it."""


class GgufFile(TensorFile):
    """An open GGUF file: quantized tensors are uint8 (*lead, bytes per row), ``Stored.packing`` names their type.

    ``header.metadata`` has the key ``PAIRS``, and ``KEY`` in a file that has our record. Arrays (the vocabulary of a
    tokenizer) are skipped; ``raw_pairs`` reads them too. ``part`` says which part of a file it is; ``None`` if whole.
    """

    part: Part | None = None

    def raw_pairs(self) -> dict[str, RawValue]:
        """Return the value of every pair, as it is stored, except those of our record and about parts."""
        cursor = _Cursor(self, self._size)
        cursor.counts()
        made = {}
        for _ in range(cursor.pairs):
            key, start = cursor.key(), cursor.at
            cursor.value(key)
            raw = bytearray(cursor.at - start)
            self._read(memoryview(raw), start, key)
            made[key] = RawValue(raw)
        for key in (KEY, *_PART_KEYS):
            made.pop(key, None)
        return made

    def _parse(self) -> Header:
        cursor = _Cursor(self, self._size)
        tensors = cursor.counts()
        pairs: dict[str, tuple[int, Any]] = {}
        for _ in range(cursor.pairs):
            key = cursor.key()
            if key in pairs:
                cursor.fail("the file has this key twice", key)
            pairs[key] = cursor.value(key)
        alignment = _alignment(pairs, self.name)
        self.part = _take_part(pairs, self.name)
        infos: dict[str, tuple[Stored, int]] = {}
        for _ in range(tensors):
            key, stored, offset = cursor.info()
            if key in infos:
                cursor.fail("the file has two tensors of this name", key)
            if offset % alignment:
                cursor.fail(f"it begins at byte {offset} of the data, not at a multiple of {alignment}", key)
            infos[key] = stored, offset
        first = -(-cursor.at // alignment) * alignment
        made = {
            key: Stored(stored.dtype, stored.shape, first + offset, stored.packing)
            for key, (stored, offset) in infos.items()
        }
        _check_places(made, cursor.size, self.name)
        scalars = {key: value for key, (_, value) in pairs.items() if value is not None}
        ours = {KEY: scalars.pop(KEY)} if isinstance(scalars.get(KEY), str) else {}
        return Header(made, {**ours, PAIRS: json.dumps(scalars, sort_keys=True)})


class _Cursor:
    """A sequential reader of values; it allocates memory for a value only if the file is large enough to hold it."""

    def __init__(self, file: GgufFile, size: int) -> None:
        self.file, self.name, self.size = file, file.name, size
        self.at = self.pairs = self._values = 0
        self._start, self._piece = 0, memoryview(b"")

    def fail(self, what: str, key: str = "", fix: str = "") -> NoReturn:
        raise CheckpointError(what, name=f"{self.name}: {key}" if key else self.name, fix=fix)

    def take(self, count: int, what: str) -> memoryview:
        """Return the next ``count`` bytes."""
        if count > self.size - self.at:
            self.fail(f"{what} takes {count} bytes from byte {self.at} on, the file has {self.size} in all")
        if self.at + count > HEADER_LIMIT:
            self.fail(f"the pairs and infos before the data take more than {HEADER_LIMIT} bytes")
        skipped = self.at - self._start
        if skipped + count > len(self._piece):
            piece = bytearray(min(max(count, _PIECE), self.size - self.at))
            self.file._read(memoryview(piece), self.at, what)
            self._start, self._piece, skipped = self.at, memoryview(piece), 0
        self.at += count
        return self._piece[skipped : skipped + count]

    def number(self, code: str, what: str) -> Any:
        """Return the next number, of the ``struct`` type ``code``."""
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))
        return value

    def text(self, what: str, limit: int | None = None) -> str:
        """Return the next string, of at most ``limit`` bytes."""
        count = self.number("Q", what)
        if limit is not None and count > limit:
            self.fail(f"{what} has {count} bytes, more than {limit}")
        try:
            return bytes(self.take(count, what)).decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8: {error.reason} at byte {error.start}")

    def counts(self) -> int:
        """Check the magic and the version; return the number of tensors, and set ``pairs`` to the number of pairs."""
        if bytes(self.take(min(4, self.size), "magic")) != MAGIC:
            self.fail("it does not begin with 'GGUF'", fix="Is it a GGUF file?")
        version = self.number("I", "version")
        if version & 0xFFFF == 0:
            self.fail("it is big-endian, which cannot be read", fix="Convert it with gguf-py's gguf_convert_endian.")
        if version not in (2, 3):
            self.fail(f"it has version {version}, only 2 and 3 can be read", fix="Write it with a newer llama.cpp.")
        counts = self.number("Q", "tensor count"), self.number("Q", "pair count")
        for count, what in zip(counts, ("tensors", "key-value pairs"), strict=True):
            if count > COUNT_LIMIT:
                self.fail(f"it has {count} {what}, more than {COUNT_LIMIT}")
        self.pairs = counts[1]
        return int(counts[0])

    def key(self) -> str:
        """Return the key of the next pair."""
        return self.text("a key", COUNT_LIMIT)

    def value(self, key: str) -> tuple[int, Any]:
        """Return the type of the value of ``key``, which is next, and the value: ``None`` for an array."""
        kind = self.number("I", key)
        return kind, self._value(kind, key)

    def _value(self, kind: int, key: str) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind], key)
        if kind == _BOOL:
            value = self.number("B", key)
            if value > 1:
                self.fail(f"it is a bool with the value {value}, not 0 or 1", key)
            return bool(value)
        if kind == _STRING:
            return self.text(key)
        if kind != _ARRAY:
            self.fail(f"its value has the unknown type {kind}", key)
        self._pass_array(key, 1)
        return None

    def _pass_array(self, key: str, depth: int) -> None:
        kind, count = self.number("I", key), self.number("Q", key)
        size = 1 if kind == _BOOL else struct.calcsize(f"<{_NUMBERS[kind]}") if kind in _NUMBERS else 0
        if size:
            for at in range(0, self._fitting(count, size, key), _PIECE):
                self.take(min(_PIECE, count * size - at), key)
        elif kind == _STRING:
            for _ in range(self._spent(self._fitting(count, 8, key) // 8, key)):
                self.take(self.number("Q", key), key)
        elif kind == _ARRAY and depth < _DEPTH_LIMIT:
            for _ in range(self._spent(self._fitting(count, 12, key) // 12, key)):
                self._pass_array(key, depth + 1)
        else:
            what = "its arrays are nested too deeply" if kind == _ARRAY else f"it is an array of unknown type {kind}"
            self.fail(what, key)

    def _fitting(self, count: int, size: int, key: str) -> int:
        """Return the least bytes of ``count`` values; raise CheckpointError if fewer are left in the file."""
        if count * size > self.size - self.at:
            self.fail(f"its array has {count} values, the file has {self.size - self.at} bytes left", key)
        return count * size

    def _spent(self, count: int, key: str) -> int:
        """Return ``count``; raise CheckpointError if the arrays of the file have too many values to skip one by one."""
        self._values += count
        if self._values > _VALUES_LIMIT:
            self.fail(f"it has more than {_VALUES_LIMIT} strings in arrays", key)
        return count

    def info(self) -> tuple[str, Stored, int]:
        """Return the name of the next tensor, its dtype and shape, and its offset in the data."""
        key = self.text("a name", COUNT_LIMIT)
        if not key or key.startswith(HIDDEN):
            self.fail(f"names that are empty or begin with {HIDDEN} are not allowed", key or "a tensor")
        rank = self.number("I", key)
        if rank > RANK_LIMIT:
            self.fail(f"it has {rank} dimensions, more than {RANK_LIMIT}", key)
        shape = tuple(self.number("Q", key) for _ in range(rank))[::-1]
        number, offset = self.number("I", key), self.number("Q", key)
        packing = NUMBERED.get(number)
        if packing is None:
            self.fail(f"it has the unknown type {number}", key)
        if math.prod(max(size, 1) for size in shape) >= 2**60:  # torch computes strides in 64 bits
            self.fail(f"its shape {shape} has too many elements", key)
        return key, _stored(packing, shape, f"{self.name}: {key}"), offset


def _stored(packing: Packing, shape: tuple[int, ...], where: str) -> Stored:
    if packing.dtype is not None:
        return Stored(packing.dtype, shape, 0, packing.name)
    if not shape or shape[-1] % packing.elements:
        what = f"it is {packing.name} with shape {shape}, whose last size is not a multiple of {packing.elements}"
        raise CheckpointError(what, name=where)
    return Stored(torch.uint8, (*shape[:-1], shape[-1] // packing.elements * packing.nbytes), 0, packing.name)


def _alignment(pairs: Mapping[str, tuple[int, Any]], name: str) -> int:
    kind, value = pairs.get("general.alignment", (_UINT32, ALIGNMENT))
    if kind != _UINT32 or not value or value & (value - 1):
        raise CheckpointError(f"it is {value!r}, not a power of two in 32 bits", name=f"{name}: general.alignment")
    return int(value)


def _take_part(pairs: dict[str, tuple[int, Any]], name: str) -> Part | None:
    """Remove what ``pairs`` say about parts; return it, ``None`` for a whole file."""
    number, count, tensors = (pairs.pop(key, (_UINT32, None))[1] for key in _PART_KEYS)
    if not isinstance(count, int) or count < 2:
        return None
    if type(number) is not int or not 0 <= number < count or (tensors is not None and type(tensors) is not int):
        raise CheckpointError(f"it says that it is number {number!r} of {count} parts", name=name)
    return Part(number, count, tensors)


def _check_places(tensors: Mapping[str, Stored], size: int, name: str) -> None:
    """Raise CheckpointError if a tensor extends beyond the file or overlaps another one."""
    at, before = 0, ""
    for key, stored in sorted(tensors.items(), key=lambda one: (one[1].start, one[1].nbytes)):
        stop = stored.start + stored.nbytes
        if stop > size:
            raise CheckpointError(
                f"it ends at byte {stop}, the file has {size}", name=f"{name}: {key}", fix="Fetch the whole file."
            )
        if stored.nbytes and stored.start < at:
            what = f"it begins at byte {stored.start} and overlaps {before}, which ends at {at}"
            raise CheckpointError(what, name=f"{name}: {key}")
        if stored.nbytes:
            at, before = stop, key
