"""The header of a safetensors file: dtype, shape and location of each tensor, used only after every check."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError
from ..geometry.views import Shape
from .dtypes import CODES, DTYPES, WITHOUT_TORCH
from .strict_json import VALUES, are_counts, check_extent, check_length, parse_object, short_repr

HEADER_LIMIT = 100_000_000  # bytes; the reference reader and writer refuse more
_METADATA = "__metadata__"
_RANK_LIMIT = 64  # torch's own
_TENSOR_LIMIT = VALUES // 8  # a tensor of rank 2 takes eight values
_METADATA_LIMIT = 2**17  # keys of the metadata
_ALIGNMENT = 64  # bytes; of the first tensor, as torch aligns memory, so that mapped tensors are aligned, too


class Stored(NamedTuple):
    """One tensor in a file: contiguous, ``nbytes`` bytes from byte ``start`` of the file.

    ``packing`` is the type of the tensor in a format with its own types (GGUF: "Q4_K"), and empty in others.
    """

    dtype: torch.dtype
    shape: Shape
    start: int
    packing: str = ""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """The tensors of one file, and ``metadata``: strings that its writer added."""

    tensors: Mapping[str, Stored]
    metadata: Mapping[str, str]


def parse_header(text: bytes, size: int, *, name: str) -> Header:
    """Return the header of a file of ``size`` bytes, of which ``text`` is the JSON after the 8 bytes of its length.

    Raises CheckpointError, naming the file and the tensor, unless every tensor lies within the file, no two overlap,
    and every byte belongs to one.
    """
    if text[:1] != b"{":
        raise CheckpointError("the header does not begin with '{'", name=name, fix="Is it a safetensors file?")
    entries = parse_object(text, name=name, what="header", floats=False, widest=_METADATA_LIMIT)
    metadata = entries.pop(_METADATA, None)
    metadata = {} if metadata is None else metadata  # other readers accept null, too
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{_METADATA} is not an object of strings", name=name)
    first = 8 + len(text)
    tensors: dict[str, Stored] = {}
    kinds: dict[tuple[str, Shape], _Kind] = {}
    at, is_in_order, new = 0, True, tuple.__new__  # it makes a Stored in a third of the time
    for key in list(entries):  # frees each entry as soon as it is parsed: there may be a quarter of a million
        try:
            dtype, shape, start, stop = _parsed(entries.pop(key), kinds)
        except CheckpointError as error:
            raise CheckpointError(error.what, name=f"{name}: {key}") from None
        tensors[key] = new(Stored, (dtype, shape, first + start, ""))
        is_in_order &= start == at
        at = stop
    end = first + at if is_in_order else _end(tensors, first, name)
    if end != size:
        problem = "is cut short" if end > size else "holds bytes that no tensor covers"
        raise CheckpointError(f"the file {problem}: its tensors end at byte {end}, it has {size}", name=name)
    return Header(tensors, metadata)


def _end(tensors: Mapping[str, Stored], first: int, name: str) -> int:
    """Return the end of the last tensor; raise CheckpointError if there is a gap or an overlap between two."""
    at = first
    for start, stop, key in sorted((one.start, one.start + one.nbytes, key) for key, one in tensors.items()):
        if start != at:
            problem = "overlaps the tensor before it" if start < at else "leaves a gap before it"
            raise CheckpointError(f"it begins at byte {start} and {problem}, which ends at {at}", name=f"{name}: {key}")
        at = stop
    return at


_Kind = tuple[torch.dtype, Shape, int]
"""The dtype, shape and bytes of a tensor."""


def _parsed(entry: Any, kinds: dict[tuple[str, Shape], _Kind]) -> tuple[torch.dtype, Shape, int, int]:
    """Return dtype and shape of an entry of the header, and its two offsets; raise CheckpointError without a name.

    ``kinds`` caches the results of ``_kind``: most tensors share a few dtypes and shapes.
    """
    try:
        code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError):
        raise CheckpointError("its entry in the header lacks dtype, shape or data_offsets") from None
    kind = kinds.get((code, tuple(shape))) if type(code) is str and are_counts(shape) else None
    if kind is None:
        kind = kinds[code, tuple(shape)] = _kind(code, shape)
    dtype, size, nbytes = kind
    if not are_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(f"its data_offsets {short_repr(offsets)} are not two byte offsets")
    start, stop = offsets
    if stop - start != nbytes:
        raise CheckpointError(f"its data_offsets span {stop - start} bytes, {code} of shape {size} takes {nbytes}")
    return dtype, size, start, stop


def _kind(code: Any, shape: Any) -> _Kind:
    """Return dtype, shape and bytes for the dtype and shape of a header; raise CheckpointError if they are invalid."""
    if not isinstance(code, str) or code not in DTYPES:
        known = "which torch does not have" if code in WITHOUT_TORCH else "which the format does not have"
        raise CheckpointError(f"it has dtype {short_repr(code)}, {known}")
    if not are_counts(shape) or len(shape) > _RANK_LIMIT:
        raise CheckpointError(f"its shape {short_repr(shape)} is not a list of at most {_RANK_LIMIT} sizes")
    if math.prod(shape if 0 not in shape else [n for n in shape if n]) >= 2**60:  # torch needs 64 bits beside a 0, too
        raise CheckpointError(f"its shape {shape} has too many elements")
    if code == "F4":
        if not shape or shape[-1] % 2:
            raise CheckpointError(f"it is F4 with shape {shape}, whose last size must be even")
        shape = [*shape[:-1], shape[-1] // 2]
    dtype, size = DTYPES[code], tuple(shape)
    return dtype, size, math.prod(size) * dtype.itemsize


def digest(text: bytes) -> str:
    """Return the digest of a header for an index; headers hold the checksums of the tensors, so digests differ."""
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def format_header(
    tensors: Mapping[str, tuple[torch.dtype, Shape]], metadata: Mapping[str, str], *, name: str
) -> tuple[bytes, dict[str, int]]:
    """Return the first bytes of a file of ``tensors``, length and header, and the byte at which each tensor begins.

    The same arguments give the same bytes: metadata sorted by key, tensors by item size (largest first, which keeps
    every one aligned) and then by name. The first begins at a multiple of 64 bytes: processors copy fastest between
    equally aligned addresses. Raises CheckpointError if the format cannot hold a tensor.
    """
    if len(tensors) > _TENSOR_LIMIT:
        raise CheckpointError(
            f"{len(tensors)} tensors in one file are more than {_TENSOR_LIMIT}", name=name, fix="Save in shards."
        )
    for key, (dtype, shape) in tensors.items():
        if dtype not in CODES:
            raise CheckpointError(f"safetensors has no dtype for {dtype}", name=key, fix="Convert the tensor first.")
        if CODES[dtype] == "F4" and not shape:  # torch counts pairs, and no shape of the file means one pair
            raise CheckpointError("safetensors cannot store a float4_e2m1fn_x2 tensor without dimensions", name=key)
        if key == _METADATA:
            raise CheckpointError("this name is reserved by the format", name=key, fix="Rename the tensor.")
        check_length(key, name=name)  # readers refuse it, too
    order = sorted(tensors, key=lambda key: (-tensors[key][0].itemsize, key))
    entries: dict[str, Any] = {_METADATA: {key: metadata[key] for key in sorted(metadata)}} if metadata else {}
    start: dict[str, int] = {}
    at = 0
    for key in order:
        dtype, shape = tensors[key]
        stop = at + math.prod(shape) * dtype.itemsize
        written = [*shape[:-1], shape[-1] * 2] if CODES[dtype] == "F4" else list(shape)
        entries[key] = {"dtype": CODES[dtype], "shape": written, "data_offsets": [at, stop]}
        start[key], at = at, stop
    try:
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError as error:
        raise CheckpointError(f"a name or metadata is not Unicode text: {error.reason}", name=name) from None
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    if len(text) > HEADER_LIMIT:
        raise CheckpointError(
            f"the header takes {len(text)} bytes, the format allows {HEADER_LIMIT}", name=name, fix="Save in shards."
        )
    check_extent(text, VALUES, _METADATA_LIMIT, name=name, what="header")
    first = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {key: first + at for key, at in start.items()}
