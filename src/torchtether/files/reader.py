"""A reader of safetensors files: the header once, then any tensor by position, directly into the target memory."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn, SupportsIndex

import torch
from torch import Tensor

from ..errors import ArgumentError, CheckpointError
from ..geometry.views import Shape, View, extent
from ..progress import Tick, no_tick
from .batch import Batch
from .header import HEADER_LIMIT, Header, Stored, digest, parse_header
from .memory import PIECE, allocate, memory_of, private_map, scratch
from .opening import Closing, open_file
from .readers import Buffer
from .ring import Ring
from .system import advice, read_into


def begins_with(path: Path, magic: bytes) -> bool:
    """Return whether the file at ``path`` can be read and begins with ``magic``."""
    try:
        descriptor = open_file(path)
    except (OSError, CheckpointError):
        return False
    try:
        return os.read(descriptor, len(magic)) == magic
    except OSError:
        return False
    finally:
        os.close(descriptor)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_CLOSED = "the checkpoint is closed, open it again"


_SEEK = 4096
"""The least bytes of a contiguous run for which separate reads are cheaper than reading the gaps, too."""


def _is_worth_apart(size: Shape, stride: Shape, item: int, reach: int) -> bool:
    """Return whether to read elements with gaps run by run: if the runs are long, and gaps a quarter of all or more."""
    run, order = 1, sorted((step, count) for count, step in zip(size, stride, strict=True) if count > 1)
    for step, count in order:
        if step != run:
            break
        run *= count
    return run * item >= _SEEK and 4 * math.prod(size) <= 3 * reach


class TensorFile(Closing):
    """An open safetensors file: ``header`` is checked, and tensors are read by position. Threads may share it.

    Raises CheckpointError, naming the file and the tensor, if the file is invalid or shrinks.
    """

    def __init__(self, path: Path | str) -> None:
        self.path: Path = Path(path)
        self.name: str = str(path)
        self._map: mmap.mmap | None = None
        try:
            self._descriptor = open_file(path)
        except OSError as error:  # a checkpoint may have more shards than the process may open
            raise CheckpointError(f"cannot be read: {error.strerror}", name=self.name, fix=advice(error)) from None
        try:
            self._size = os.fstat(self._descriptor).st_size
            self.header: Header = self._parse()
        except BaseException:
            self.close()
            raise

    def _parse(self) -> Header:
        return parse_header(self._header_text(), self._size, name=self.name)

    def _header_text(self) -> bytes:
        size, length = self._size, bytearray(8)
        if size < 8:
            raise CheckpointError(f"the file has {size} bytes, a safetensors file has 8 or more", name=self.name)
        self._read(memoryview(length), 0, "header")
        count = int.from_bytes(length, "little")
        if count > HEADER_LIMIT:
            raise CheckpointError(
                f"the header takes {count} bytes, the format allows {HEADER_LIMIT}",
                name=self.name,
                fix="Is it a safetensors file?",
            )
        if 8 + count > size:
            raise CheckpointError(f"the header takes {count} bytes, the file has {size}", name=self.name)
        text = bytearray(count)
        self._read(memoryview(text), 8, "header")
        return bytes(text)

    def header_digest(self) -> str:
        """Return the digest of the header, to compare with the one in an index by torchtether."""
        return digest(self._header_text())

    def check_in_place(self) -> None:
        """Raise CheckpointError if the path now names another file than the open one."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.path), os.fstat(self._descriptor)):
                return
        raise CheckpointError("the file was replaced while it was open", name=self.name, fix="Open it again.")

    def check_size(self) -> None:
        """Raise CheckpointError if the file has become shorter since it was opened, or was closed."""
        if self._descriptor < 0:
            raise CheckpointError(f"the file cannot be read: {_CLOSED}", name=self.name)
        size = os.fstat(self._descriptor).st_size
        if size < self._size:
            raise CheckpointError(
                f"the file had {self._size} bytes when it was opened, and has {size} now",
                name=self.name,
                fix="Fetch it again.",
            )

    def stored(self, key: str) -> Stored:
        """Return dtype, shape and location of ``key``."""
        return self.header.tensors[key]

    def read(self, key: str, tick: Tick = no_tick) -> Tensor:
        """Return the tensor ``key`` as stored, contiguous, in memory of its own."""
        stored = self.stored(key)
        made = allocate(stored.shape, stored.dtype, at=stored.start)
        self.read_into(key, made, tick)
        return made

    def read_into(self, key: str, out: Tensor, tick: Tick = no_tick, ring: Ring | None = None) -> None:
        """Fill ``out``, of the shape of ``key`` and any strides, dtype and device, with its values.

        If ``out`` is contiguous, on the CPU and of the stored dtype, bytes are read directly into it; otherwise they go
        through pieces of bounded size; those for a device with streams go through ``ring``.
        """
        batch = Batch(ring)
        self.read_later(key, out, batch)
        torch.autograd.graph.increment_version(out)  # autograd does not see the write
        batch.run(tick)

    def read_later(self, key: str, out: Tensor, batch: Batch, first: int | None = None) -> None:
        """Add ``read_into`` to ``batch``; with ``first``, for as many rows of ``key`` from there on as ``out`` has."""
        stored, shape = self.stored(key), out.shape
        wanted = stored.shape if first is None else (min(shape[0], stored.shape[0] - first), *stored.shape[1:])
        if shape != wanted:
            raise CheckpointError(f"it has shape {stored.shape}, not {tuple(shape)}", name=f"{self.name}: {key}")
        if 0 not in shape:
            batch.read(self, key, out, first or 0)

    def is_mappable(self, key: str) -> bool:
        """Return whether ``map`` can return ``key``: it is not empty, and aligned to its item size."""
        stored = self.stored(key)
        return stored.nbytes > 0 and stored.start % stored.dtype.itemsize == 0

    def map(self, key: str) -> Tensor:
        """Return the tensor ``key`` over private pages of the file, which the system reads on first use.

        Its storage has only the bytes of the tensor. Writes copy the pages; the file does not change. The file may be
        deleted or replaced, but if it is truncated, the next use of a lost page ends this process (SIGBUS).
        """
        stored = self.stored(key)
        if self._map is None:
            try:
                self._map = private_map(self._descriptor)
            except (OSError, ValueError) as error:
                self._fail(f"cannot be mapped: {_CLOSED if self._descriptor < 0 else error}", key)
        if stored.start + stored.nbytes > len(self._map):
            stop = stored.start + stored.nbytes
            self._fail(f"the file is cut short: it has {len(self._map)} bytes, the tensor ends at byte {stop}", key)
        made = torch.frombuffer(self._map, dtype=torch.uint8, count=stored.nbytes, offset=stored.start)
        return made.view(stored.dtype).view(stored.shape)

    def read_view(self, key: str, view: View) -> Tensor:
        """Return the elements of ``key`` that ``view`` selects from its stored bytes, contiguous, in new memory.

        No bytes before the first or after the last element are read; gaps are read through scratch of bounded size.
        """
        bits = _BITS.get(view.dtype.itemsize, view.dtype)  # torch cannot copy some dtypes
        made = allocate(view.size, bits)  # not malloc, where freed pieces of 4 MiB would leave holes
        if made.numel():
            item = view.dtype.itemsize
            if (view.offset + extent(view.size, view.stride)) * item > self.stored(key).nbytes:
                self._fail(f"{view} extends beyond the {self.stored(key).nbytes} bytes of the tensor", key)
            self._gather(key, made, view.stride, self.stored(key).start + view.offset * item)
        return made.view(view.dtype)

    def _gather(self, key: str, out: Tensor, stride: Shape, at: int) -> None:
        size, item = tuple(out.shape), out.element_size()
        reach = extent(size, stride)
        if out.is_contiguous() and all(n == 1 or s == t for n, s, t in zip(size, stride, out.stride(), strict=True)):
            self._read(memory_of(out), at, key)
        elif reach * item <= PIECE and not _is_worth_apart(size, stride, item, reach):
            given = scratch((reach,), out.dtype)
            self._read(memory_of(given), at, key)
            out.copy_(given.as_strided(size, stride))
        else:  # cut along the longest stride, so that the halves hardly overlap in the file
            dim = max((d for d in range(out.dim()) if size[d] > 1), key=lambda d: stride[d])
            half = size[dim] // 2
            self._gather(key, out.narrow(dim, 0, half), stride, at)
            self._gather(key, out.narrow(dim, half, size[dim] - half), stride, at + half * stride[dim] * item)

    def pieces(self, key: str) -> Iterator[bytearray]:
        """Yield the bytes of ``key`` in pieces of bounded size."""
        stored = self.stored(key)
        for at in range(0, stored.nbytes, PIECE):
            piece = bytearray(min(PIECE, stored.nbytes - at))
            self._read(memoryview(piece), stored.start + at, key)
            yield piece

    def _read(self, memory: memoryview, at: int, key: str) -> None:
        for place in range(0, len(memory), PIECE):
            part = memory[place : place + PIECE]
            self.read_bytes([(key, part)], at + place)

    @property
    def descriptor(self) -> int | None:
        """Return the descriptor of the file with all tensors, as placed by ``stored``; ``None`` for several files."""
        return self._descriptor

    def read_bytes(self, buffers: Sequence[Buffer], at: int) -> None:
        """Fill the buffers in order with the bytes of the file from ``at`` on."""
        self._fill_all(self._descriptor, buffers, at)

    def _fill_all(self, descriptor: int, buffers: Sequence[Buffer], at: int, file: str = "the file") -> None:
        """Fill the buffers in order with the bytes of ``descriptor`` from ``at`` on; errors describe it as ``file``."""
        rest = list(buffers)
        while rest:
            key, memory = rest[0]
            try:
                count = read_into(descriptor, [memory for _, memory in rest], at)
            except OSError as error:
                why = _CLOSED if descriptor < 0 else error.strerror
                self._fail(f"{file} cannot be read: {why}", key)
            if count == 0:
                self._fail(f"{file} is cut short: nothing follows byte {at}, {len(memory)} more bytes are needed", key)
            at += count
            while rest and count >= len(rest[0][1]):
                count -= len(rest.pop(0)[1])
            if count:
                rest[0] = (rest[0][0], rest[0][1][count:])

    def _fail(self, what: str, key: str) -> NoReturn:
        raise CheckpointError(what, name=f"{self.name}: {key}") from None

    def close(self) -> None:
        """Close the file: nothing can be read afterwards; tensors that were read or mapped stay."""
        self._map = None  # the last tensor over the mapping frees it
        descriptor, self._descriptor = self._descriptor, -1  # an interrupt may leave it open, not close another file
        if descriptor >= 0:
            os.close(descriptor)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse a copy: it would close the descriptor, whose number the system then gives to another file."""
        raise ArgumentError("an open file cannot be copied or pickled", name=self.name, fix="Open its path again.")

    def __del__(self) -> None:
        if hasattr(self, "_descriptor") and os is not None:  # None when the interpreter ends
            self.close()
