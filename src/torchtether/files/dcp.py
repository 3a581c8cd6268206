"""A reader of folders by torch.distributed.checkpoint as one file: any bytes of any tensor; no code in it is run."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from ..errors import CheckpointError
from ..geometry.groups import overlapping
from ..geometry.views import Shape
from ..torch_private.tensors import checkpoint_offset_of
from ..weights.spec import WeightSpec
from .dcp_metadata import MetadataUnpickler
from .dtypes import CODES
from .header import HEADER_LIMIT, Header, Stored
from .memory import memory_of
from .opening import found_at, open_file
from .pickle_calls import load_to_meta
from .reader import TensorFile
from .readers import Buffer
from .record import KEY, layout_of, part_key
from .strict_json import short_repr
from .system import read_into

METADATA = ".metadata"
"""The file in such a folder that describes the contents of the others."""

OPTIMIZER = "torchtether.optimizer."
"""The prefix of the keys under which torchtether stores the state of an optimizer."""

MOST_OPEN = 256
"""How many files of a folder stay open; a process may often open 1024, and there may be one for each of more ranks."""

_LIMIT = 2**30  # bytes of a .metadata file; one for 10,000 tensors on 1,000 ranks has some hundred million


@dataclass
class _Chunk:
    """A box of a tensor, and the byte range of a file that holds it as an archive by ``torch.save``."""

    offsets: Shape
    sizes: Shape
    file: str
    start: int
    nbytes: int
    place: int | None = None
    """The byte of the file at which its values begin; ``None`` until ``_place`` has read it."""
    held: memoryview | None = None
    """Its values, if the file does not hold them in row-major order."""


def _is_overlapping(chunks: Sequence[_Chunk]) -> bool:
    """Return whether two of the boxes share an element; sweep along the dimension that separates most of them."""
    if len(chunks) < 2 or not chunks[0].sizes:
        return len(chunks) > 1
    along = max(range(len(chunks[0].sizes)), key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}))
    spans = [(chunk.offsets[along], chunk.offsets[along] + chunk.sizes[along]) for chunk in chunks]
    for i, j in overlapping(spans):
        one, two = chunks[i], chunks[j]
        pairs = zip(one.offsets, one.sizes, two.offsets, two.sizes, strict=True)
        if all(a < b + m and b < a + n for a, n, b, m in pairs):
            return True
    return False


class DcpFile(TensorFile):
    """An open folder by ``torch.distributed.checkpoint`` (``FileSystemWriter``), with the tensors whose keys begin with
    ``prefix``, which is removed; without a prefix, all but the optimizer state that torchtether stored.

    ``.metadata`` is a pickle, in which only the dataclasses of torch's package are accepted, as bags of fields. Values
    that are not tensors are ignored. Only requested bytes are read.
    """

    def __init__(self, path: Path | str, prefix: str = "") -> None:
        self._prefix = prefix
        self._chunks: dict[str, list[_Chunk]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._shapes: dict[str, Shape] = {}
        self._open: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._lock = threading.Lock()
        self._folder = Path(path)
        super().__init__(self._folder / METADATA)
        self.name = str(path)

    def _parse(self) -> Header:
        try:
            if self._size > _LIMIT:
                raise CheckpointError(f"{METADATA} has {self._size} bytes, more than {_LIMIT}", name=str(self._folder))
            with os.fdopen(os.dup(self._descriptor), "rb") as file:
                found = MetadataUnpickler(file).load()
            tensors = self._tensors(found)
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle can make Python raise any error
            words = " ".join(str(error).split())[:200]
            raise CheckpointError(f"{METADATA} cannot be read: {words}", name=str(self._folder)) from None
        record = tensors.pop(KEY, None)
        if record is None or self._prefix:
            return Header(tensors, {})
        if record.nbytes > HEADER_LIMIT:
            what = f"its torchtether record has {record.nbytes} bytes, more than {HEADER_LIMIT}"
            raise CheckpointError(what, name=str(self._folder))
        text = bytearray(record.nbytes)
        self._fill(KEY, memoryview(text), 0)
        noted = text.decode("utf-8", "replace")
        return Header(_in_layout(tensors, noted), {KEY: noted, "format": "pt"})

    def _tensors(self, found: Any) -> dict[str, Stored]:
        places = {}
        for index, info in found.storage_data.items():
            if getattr(index, "offset", None) is not None and isinstance(index.fqn, str):  # only tensors have an offset
                places[index.fqn, _counts(index.offset, f"{self._folder}: {index.fqn}")] = info
        tensors: dict[str, Stored] = {}
        at = 0
        for name in sorted(found.state_dict_metadata):
            entry = found.state_dict_metadata[name]
            if not hasattr(entry, "chunks") or not isinstance(name, str):
                continue
            is_optimizer = name.startswith(OPTIMIZER)
            if not name.startswith(self._prefix) or (is_optimizer and not self._prefix):
                continue
            key, where = name.removeprefix(self._prefix), f"{self._folder}: {name}"
            dtype, shape = _kind(entry.properties), _counts(entry.size, where)
            if not isinstance(dtype, torch.dtype) or dtype not in CODES:
                raise CheckpointError(f"it has dtype {short_repr(dtype)}, which cannot be read", name=where)
            self._chunks[key] = self._chunks_of(name, entry.chunks, shape, places, where)
            self._dtypes[key], self._shapes[key] = dtype, shape
            for chunk in self._chunks[key]:
                self._check_place(chunk, math.prod(chunk.sizes) * dtype.itemsize, where)
            tensors[key] = Stored(dtype, shape, at)
            at += tensors[key].nbytes
        return tensors

    def _check_place(self, chunk: _Chunk, nbytes: int, where: str) -> None:
        """Raise CheckpointError unless the file of ``chunk`` is there and can hold its ``nbytes`` bytes of values."""
        size = self._sizes.get(chunk.file)
        if size is None:
            path = self._folder / chunk.file
            if not path.is_file():
                what = "is not a regular file" if path.exists() else "does not exist"
                raise CheckpointError(f"its chunk is in {chunk.file}, which {what}", name=where)
            size = self._sizes[chunk.file] = path.stat().st_size
        if nbytes > chunk.nbytes or chunk.start + chunk.nbytes > size:
            what = f"its chunk of {nbytes} bytes is listed as {chunk.nbytes} from byte {chunk.start} of {chunk.file}"
            raise CheckpointError(f"{what}, which has {size}", name=where, fix="Fetch the whole file.")

    def _chunks_of(
        self, name: str, given: Sequence[Any], shape: Shape, places: Mapping[Any, Any], where: str
    ) -> list[_Chunk]:
        chunks = []
        for one in given:
            offsets, sizes = _counts(one.offsets, where), _counts(one.sizes, where)
            fits = len(offsets) == len(sizes) == len(shape)
            if not fits or any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
                raise CheckpointError(f"its chunk at {offsets} of size {sizes} exceeds its shape {shape}", name=where)
            if 0 in sizes:
                continue
            info = places.get((name, offsets))
            if info is None or getattr(info, "transform_descriptors", None):
                what = "is in no file" if info is None else "is compressed, which cannot be read"
                raise CheckpointError(f"its chunk at {offsets} {what}", name=where)
            file = info.relative_path
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(f"its chunk is in {short_repr(file)}, not in a file of the folder", name=where)
            start, nbytes = _counts((info.offset, info.length), where)
            chunks.append(_Chunk(offsets, sizes, file, start, nbytes))
        if _is_overlapping(chunks):
            raise CheckpointError("its chunks overlap", name=where)
        covered = sum(math.prod(chunk.sizes) for chunk in chunks)
        if covered != math.prod(shape):  # chunks are disjoint: equal counts mean full coverage
            raise CheckpointError(f"its chunks cover {covered} of {math.prod(shape)} elements", name=where)
        return chunks

    # -- reading --------------------------------------------------------------------------------------------------

    def is_mappable(self, key: str) -> bool:
        return False

    @property
    def descriptor(self) -> int | None:
        return None

    def read_bytes(self, buffers: Sequence[Buffer], at: int) -> None:
        """Fill the buffers in order, from byte ``at`` of a virtual file of all tensors, sorted by key."""
        for key, memory in buffers:
            self._fill(key, memory, at - self.header.tensors[key].start)
            at += len(memory)

    def _fill(self, key: str, memory: memoryview, first: int) -> None:
        """Fill ``memory`` with the bytes of ``key`` from ``first`` on."""
        chunks, item, shape = self._chunks[key], self._dtypes[key].itemsize, self._shapes[key]
        start, stop = first // item, -(-(first + len(memory)) // item)
        for chunk in chunks:
            for at, inside, count in _runs(shape, chunk.offsets, chunk.sizes, start, stop):
                low, high = max(at * item, first), min((at + count) * item, first + len(memory))
                if low < high:
                    place, inner = self._place(chunk, key), inside * item + low - at * item
                    wanted = memory[low - first : high - first]
                    if chunk.held is not None:
                        wanted[:] = chunk.held[inner : inner + len(wanted)]
                    else:
                        with self._file(chunk.file, key) as descriptor:
                            self._fill_all(descriptor, [(key, wanted)], place + inner, chunk.file)

    @contextlib.contextmanager
    def _file(self, file: str, key: str) -> Iterator[int]:
        """Open ``file``; the first MOST_OPEN stay open until ``close``."""
        descriptor = self._open.get(file)
        is_kept = descriptor is not None
        if descriptor is None:
            try:
                descriptor = open_file(self._folder / file)
            except OSError as error:
                self._fail(f"{file} cannot be read: {error.strerror}", key)
            with self._lock:
                if len(self._open) < MOST_OPEN:  # else, or if another thread was faster, it is closed after use
                    is_kept = self._open.setdefault(file, descriptor) == descriptor
        try:
            yield descriptor
        finally:
            if not is_kept:
                os.close(descriptor)

    def _place(self, chunk: _Chunk, key: str) -> int:
        """Return the byte of the file at which the values of ``chunk`` begin, from the pickle in front of them."""
        if chunk.place is None:
            with self._file(chunk.file, key) as descriptor:
                source = _Slice(descriptor, chunk.start, chunk.nbytes)
                chunk.place = chunk.start + self._place_within(source, chunk, key)
        return chunk.place

    def _place_within(self, source: _Slice, chunk: _Chunk, key: str) -> int:
        """Return the byte of the archive at which its values begin; hold values that are stored in another order."""
        where = f"{self._folder}: {key}"
        try:
            found = load_to_meta(source, name=where)
            storage = checkpoint_offset_of(found.untyped_storage())
            place: int = storage + found.storage_offset() * found.element_size()
        except CheckpointError:
            raise
        except Exception as error:
            words = " ".join(str(error).split())[:200]
            raise CheckpointError(f"its chunk in {chunk.file} cannot be read: {words}", name=where) from None
        is_there = place + found.nbytes <= chunk.nbytes and found.untyped_storage().nbytes() >= found.nbytes
        if (tuple(found.shape), found.dtype) != (chunk.sizes, self._dtypes[key]) or not is_there:
            raise CheckpointError(f"its chunk in {chunk.file} differs from {METADATA}", name=where)
        if not found.is_contiguous() or found.is_conj() or found.is_neg():
            source.seek(0)
            values = torch.load(cast(Any, source), weights_only=True)
            chunk.held = memory_of(values.resolve_conj().resolve_neg().contiguous())
        return place

    def close(self) -> None:
        """Close the files: nothing can be read afterwards."""
        for descriptor in getattr(self, "_open", {}).values():
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._open = {}
        super().close()


class _Slice(io.RawIOBase):
    """A byte range of a file, as a file."""

    def __init__(self, descriptor: int, start: int, nbytes: int) -> None:
        self._descriptor, self._start, self._nbytes, self._at = descriptor, start, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = (0, self._at, self._nbytes)[whence] + offset
        return self._at

    def readinto(self, memory: Any) -> int:
        view = memoryview(memory).cast("B")[: max(self._nbytes - self._at, 0)]
        count = read_into(self._descriptor, [view], self._start + self._at) if view else 0
        self._at += count
        return count


def is_dcp(path: Path) -> bool:
    """Return whether ``path`` is a folder by ``torch.distributed.checkpoint``; raise OSError if it is hidden."""
    found = found_at(path / METADATA)
    return found is not None and stat.S_ISREG(found.st_mode)


def _kind(properties: Any) -> Any:
    values = getattr(properties, "values", None)
    return values[0] if values else properties.dtype


def _counts(values: Any, where: str) -> tuple[int, ...]:
    found = tuple(values)
    if len(found) > 64 or not all(type(value) is int and 0 <= value < 2**60 for value in found):
        raise CheckpointError(f"{METADATA} has {short_repr(found)}, which cannot be sizes", name=where)
    return found


def _runs(shape: Shape, offsets: Shape, sizes: Shape, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Yield (element of the tensor, element of the box, count) for each run of a box that is contiguous in both.

    Rows of the first dimension outside of the elements ``first:last`` are left out.

    >>> list(_runs((4, 6), (2, 0), (2, 6), 0, 24)), list(_runs((2, 6), (0, 3), (2, 3), 0, 12))
    ([(12, 0, 12)], [(3, 0, 3), (9, 3, 3)])
    """
    depth, inner = len(shape), 1
    while depth and sizes[depth - 1] == shape[depth - 1]:
        depth -= 1
        inner *= shape[depth]
    if depth <= 1:
        yield (offsets[0] * inner if depth else 0), 0, (sizes[0] * inner if depth else inner)
        return
    count = sizes[depth - 1] * inner
    row = math.prod(shape[1:])
    low, high = max(offsets[0], first // row), min(offsets[0] + sizes[0], -(-last // row))
    ranges = [
        range(low, high),
        *(range(o, o + s) for o, s in zip(offsets[1 : depth - 1], sizes[1 : depth - 1], strict=True)),
    ]
    for index in itertools.product(*ranges):
        at = inside = 0
        for dim, place in enumerate((*index, offsets[depth - 1])):
            at = at * shape[dim] + place
            inside = inside * sizes[dim] + place - offsets[dim]
        yield at * inner, inside * inner, count


def _in_layout(tensors: dict[str, Stored], record: str) -> dict[str, Stored]:
    """Return ``tensors``, with parts of Weights in the shapes of their schemes.

    Some parts are stored in another shape, with one row per row of the Weight.
    """
    try:
        weights = {
            name: WeightSpec.from_json({k: v for k, v in entry.items() if k != "parts"})
            for name, entry in json.loads(record)["weights"].items()
        }
    except Exception:
        return tensors  # the parser of the record reports the error
    for name, spec in weights.items():
        for part, (dtype, shape) in layout_of(spec).items():
            key = part_key(name, part)
            stored = tensors.get(key)
            if stored is not None and stored.dtype == dtype and math.prod(stored.shape) == math.prod(shape):
                tensors[key] = stored._replace(shape=shape)
    return tensors
