"""The header of a safetensors file: what it stores and where, believed only after every check."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CheckpointError
from ..schemes import Shape
from .dtypes import CODES, DTYPES, WITHOUT_TORCH
from .strict_json import VALUES, is_count, parse_object, said

HEADER_LIMIT = 100_000_000  # bytes; the reference reader and writer refuse more
_METADATA = "__metadata__"
_RANK_LIMIT = 64  # torch's own
_TENSOR_LIMIT = VALUES // 8  # a tensor of rank 2 takes eight values


@dataclass(frozen=True)
class Stored:
    """One tensor as a file stores it: contiguous, ``nbytes`` from ``start``, counted from the file's first byte.

    ``packing`` is what a file that has types of its own calls that of the tensor (GGUF: "Q4_K"); others leave it empty.
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
    """What one file stores. ``metadata`` is what its writer added, strings only."""

    tensors: Mapping[str, Stored]
    metadata: Mapping[str, str]


def parse_header(text: bytes, size: int, *, name: str) -> Header:
    """The header of a file of ``size`` bytes, of which ``text`` is the JSON after the 8 bytes of its length.

    Afterwards every tensor lies within the file, no two overlap, and no byte is left over.
    Raises CheckpointError, naming the file and the tensor, for anything else.
    """
    if text[:1] != b"{":
        raise CheckpointError("the header does not begin with '{'", name=name, fix="Is it a safetensors file?")
    entries = parse_object(text, name=name, what="header", floats=False)
    metadata = entries.pop(_METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{_METADATA} is not an object of strings", name=name)
    first = 8 + len(text)
    tensors: dict[str, Stored] = {}
    stops: dict[str, int] = {}
    for key, entry in entries.items():
        tensors[key], stops[key] = _stored(entry, first, where=f"{name}: {key}")
    at = first
    for key in sorted(tensors, key=lambda key: (tensors[key].start, stops[key])):
        if tensors[key].start != at:
            problem = "overlaps the tensor before it" if tensors[key].start < at else "leaves a gap before it"
            raise CheckpointError(
                f"it begins at byte {tensors[key].start} and {problem}, which ends at {at}", name=f"{name}: {key}"
            )
        at = stops[key]
    if at != size:
        problem = "is cut short" if at > size else "holds bytes that no tensor covers"
        raise CheckpointError(f"the file {problem}: its tensors end at byte {at}, it has {size}", name=name)
    return Header(tensors, metadata)


def _stored(entry: Any, first: int, *, where: str) -> tuple[Stored, int]:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError("the entry needs dtype, shape and data_offsets", name=where)
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        known = "a dtype that torch does not have" if code in WITHOUT_TORCH else "no dtype of the format"
        raise CheckpointError(f"it has dtype {said(code)}, {known}", name=where)
    if not isinstance(shape, list) or len(shape) > _RANK_LIMIT or not all(is_count(n) for n in shape):
        raise CheckpointError(f"it has the bad shape {said(shape)}", name=where)
    if math.prod(max(n, 1) for n in shape) >= 2**60:  # also with a 0 in it, torch computes strides in 64 bits
        raise CheckpointError(f"it has the impossible shape {shape}", name=where)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(is_count(n) for n in offsets):
        raise CheckpointError(f"it has the bad data_offsets {said(offsets)}", name=where)
    if code == "F4":
        if not shape or shape[-1] % 2:
            raise CheckpointError(f"it is F4 with shape {shape}, whose last size must be even", name=where)
        shape = [*shape[:-1], shape[-1] // 2]
    stored = Stored(DTYPES[code], tuple(shape), first + offsets[0])
    if offsets[1] - offsets[0] != stored.nbytes:
        raise CheckpointError(
            f"its data_offsets span {offsets[1] - offsets[0]} bytes, {code} of shape {shape} takes {stored.nbytes}",
            name=where,
        )
    return stored, first + offsets[1]


def format_header(
    tensors: Mapping[str, tuple[torch.dtype, Shape]], metadata: Mapping[str, str], *, name: str
) -> tuple[bytes, dict[str, int]]:
    """The bytes that open a file of ``tensors``, the length included, and the byte of the file at which each begins.

    The same arguments give the same bytes: metadata sorted by key, tensors by item size (largest first, which keeps
    every one aligned) and then by name. Raises CheckpointError for what the format cannot hold.
    """
    if len(tensors) > _TENSOR_LIMIT:
        raise CheckpointError(
            f"{len(tensors)} tensors in one file are more than {_TENSOR_LIMIT}", name=name, fix="Save in shards."
        )
    for key, (dtype, _) in tensors.items():
        if dtype not in CODES:
            raise CheckpointError(f"safetensors has no dtype for {dtype}", name=key, fix="Convert the tensor first.")
        if key == _METADATA:
            raise CheckpointError("this name is reserved by the format", name=key, fix="Rename the tensor.")
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
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise CheckpointError(f"the header takes {len(text)} bytes, the format allows {HEADER_LIMIT}", name=name)
    first = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {key: first + at for key, at in start.items()}
