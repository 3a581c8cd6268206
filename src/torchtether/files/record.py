"""The record of a file about its tensors: ties, quantized weights, strides and checksums, in one metadata key.

    "torchtether": {"v": 1, "ties": [...], "weights": {...}, "strides": {...}, "copies": [...], "dtypes": {...},
                    "crc32": {...}}

    ties     Tie.to_json() each; the owner is a stored tensor, a weight, or a hidden storage (below)
    weights  name: WeightSpec.to_json() and "parts"; part p of weight n is the tensor n.p
    strides  name: the strides of a stored tensor that is dense and not contiguous; its data are in row-major order
    copies   aliases that are also stored, for readers that need every key; equal to the view in the tie
    dtypes   name: the dtype that a weight computes in, where another format stores it: few of them record it
    crc32    key: the CRC-32 of its bytes in the file, as zlib and PNG compute it, in 8 lower-case hex digits

Each file that torchtether writes has the checksums of all its tensors; an index has none. ``torchtether verify``
compares them; loading and opening do not, because disks, file systems and networks have their own checksums. A GGUF
file has the same text, without checksums, in a pair of this key.

Offsets of views count from the first byte of their owner *in memory*, that is, after its strides are restored. A tie
whose owner begins with ``torchtether.storage.`` is memory that no named tensor covers whole: stored flat, gaps zero.

The reader validates every entry: an alias cannot chain, shadow a stored tensor, reach past its owner, overlap itself or
be larger than its owner, so that a small file cannot need much memory.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .._dtypes import dtype_from_name, dtype_name
from ..errors import CheckpointError, SchemeError, TetherError
from ..geometry.views import Shape, View, contiguous_stride, extent, is_dense
from ..weights.spec import Tie, WeightSpec
from .dtypes import CODES
from .header import Stored
from .strict_json import VALUES, check_extent, check_length, is_count, parse_object, short_repr

KEY = "torchtether"
HIDDEN = "torchtether.storage."
_FIELDS = {"v", "ties", "weights", "strides", "copies", "dtypes", "crc32"}
_CHECKSUM = re.compile(r"[0-9a-f]{8}")
_WHAT = "torchtether record"
_RESERVED = {"", "__metadata__"}


@dataclass(frozen=True)
class Record:
    """The facts about stored tensors that a safetensors header cannot express."""

    ties: tuple[Tie, ...] = ()
    weights: Mapping[str, WeightSpec] = field(default_factory=dict)
    strides: Mapping[str, Shape] = field(default_factory=dict)
    copies: frozenset[str] = frozenset()
    checksums: Mapping[str, int] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    def with_checksums(self, checksums: Mapping[str, int]) -> Record:
        """Return the same record with these CRC-32 values of stored tensors, by key."""
        return replace(self, checksums=checksums)

    @staticmethod
    def union(records: Iterable[Record], *, name: str) -> Record:
        """Return the union of ``records``; raise CheckpointError if two of them contain one name."""
        ties: list[Tie] = []
        weights: dict[str, WeightSpec] = {}
        strides: dict[str, Shape] = {}
        copies: set[str] = set()
        dtypes: dict[str, torch.dtype] = {}
        checksums: dict[str, int] = {}
        seen: set[str] = set()
        for record in records:
            names = {known for tie in record.ties for known in tie.names} | record.weights.keys()
            if not seen.isdisjoint(names):
                raise CheckpointError("two shards have records of this name", name=f"{name}: {min(seen & names)}")
            seen |= names
            ties += record.ties
            weights |= record.weights
            strides |= record.strides
            copies |= record.copies
            dtypes |= record.dtypes
            checksums |= record.checksums
        ties.sort(key=lambda tie: tie.owner)
        return Record(tuple(ties), weights, strides, frozenset(copies), checksums, dtypes)

    def metadata(self) -> dict[str, str]:
        """Return the metadata of a file of these tensors: this record, and ``alias: owner`` pairs for other readers."""
        made = {KEY: self._text(), "format": "pt"}  # accelerate and huggingface_hub refuse files without the latter
        for tie in self.ties:
            for alias, view in zip(tie.aliases, tie.views[1:], strict=True):
                if view is None and alias not in made:
                    made[alias] = tie.owner
        return made

    def check_extent(self, count: int, *, name: str) -> None:
        """Raise CheckpointError, naming the file, if it is too large for ``parse_record`` with ``count`` tensors."""
        check_extent(self._text().encode(), _values(count), VALUES, name=name, what=_WHAT)

    def _text(self) -> str:
        record: dict[str, Any] = {"v": 1}
        if self.ties:
            record["ties"] = [tie.to_json() for tie in sorted(self.ties, key=lambda tie: tie.owner)]
        if self.weights:
            record["weights"] = {name: weight_to_json(spec) for name, spec in self.weights.items()}
        if self.strides:
            record["strides"] = {name: list(stride) for name, stride in self.strides.items()}
        if self.copies:
            record["copies"] = sorted(self.copies)
        if self.dtypes:
            record["dtypes"] = {name: dtype_name(dtype) for name, dtype in self.dtypes.items()}
        if self.checksums:
            record["crc32"] = {key: f"{checksum:08x}" for key, checksum in self.checksums.items()}
        return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _values(count: int) -> int:
    """Return the most JSON values in a record of ``count`` stored tensors: a small file must need little memory.

    A tensor needs one value for its checksum; a Weight needs about twenty for all its parts. A view needs a dozen, and
    there may be twenty thousand views of one tensor.
    """
    return min(VALUES, 2**18 + 32 * count)


def part_key(name: str, part: str) -> str:
    """Return the key under which part ``part`` of the Weight ``name`` is stored."""
    return f"{name}.{part}"


def part_keys(name: str, spec: WeightSpec) -> dict[str, str]:
    """Return the keys of the stored parts of the Weight ``name``, by part."""
    return {part: part_key(name, part) for part in spec.scheme.layout(spec.base)}


def parse_record(text: str, stored: Mapping[str, Stored], *, name: str) -> Record:
    """Return the record in the metadata of the file ``name``, which stores ``stored``.

    Raises CheckpointError if the record is invalid or contradicts ``stored``.
    """
    found = parse_object(text, name=name, what=_WHAT, floats=True, values=_values(len(stored)))
    if found.get("v") != 1 or not found.keys() <= _FIELDS:
        raise CheckpointError(
            f"the torchtether record has version {short_repr(found.get('v'))} and the fields "
            f"{', '.join(sorted(found))[:80]}, this package reads version 1",
            name=name,
            fix="Upgrade torchtether.",
        )
    for key in sorted(_FIELDS - {"v"}):
        kind = list if key in ("ties", "copies") else dict
        if not isinstance(found.setdefault(key, kind()), kind):
            raise CheckpointError(f"the field {key!r} of the torchtether record is not a {kind.__name__}", name=name)
    weights = parse_weights(found["weights"], stored, name=name)
    parts = {stored_key for key, spec in weights.items() for stored_key in part_keys(key, spec).values()}
    strides = {key: _strides(entry, stored.get(key), where=f"{name}: {key}") for key, entry in found["strides"].items()}
    if not all(isinstance(key, str) for key in found["copies"]):
        raise CheckpointError("the field 'copies' of the torchtether record has values that are not names", name=name)
    checksums = {key: _checksum(entry, key, stored, name=name) for key, entry in found["crc32"].items()}
    dtypes = {key: _dtype(entry, where=f"{name}: {key}") for key, entry in found["dtypes"].items()}
    record = Record(_ties(found["ties"], name), weights, strides, frozenset(found["copies"]), checksums, dtypes)
    _check_ties(record, stored, parts, name)
    return record


# -- weights ----------------------------------------------------------------------------------------------------------


def weight_to_json(spec: WeightSpec) -> dict[str, Any]:
    """Return the JSON entry of a Weight of ``spec``, for ``parse_weights``."""
    return {**spec.replace(tie=None).to_json(), "parts": list(spec.scheme.layout(spec.base))}


def parse_weights(entries: Mapping[str, Any], stored: Mapping[str, Stored], *, name: str) -> dict[str, WeightSpec]:
    """Return the spec of each Weight in ``entries``, by name; ``stored`` has their parts.

    Raises CheckpointError, naming the file ``name`` and the Weight, for an invalid entry, or a part that is absent or
    has another dtype or shape.
    """
    return {key: _weight(entry, key, stored, where=f"{name}: {key}") for key, entry in entries.items()}


def parse_weight_entries(text: str, stored: Mapping[str, Stored], *, name: str) -> dict[str, Any]:
    """Return the entries in ``text``, a JSON object by the name of a Weight, for ``parse_weights``."""
    return parse_object(text, name=name, what=_WHAT, floats=True, values=_values(len(stored)))


def check_parts(
    key: str, spec: WeightSpec, found: Mapping[str, Stored | Tensor], *, name: str, fix: str = "Is a shard missing?"
) -> None:
    """Raise CheckpointError unless ``found`` has each part of the Weight ``key``, with the right dtype and shape.

    ``fix`` says what to do about a part that is absent.
    """
    for part, (dtype, shape) in layout_of(spec).items():
        one = found.get(part_key(key, part))
        if one is None:
            raise CheckpointError(f"its part {part_key(key, part)!r} is not stored", name=name, fix=fix)
        if (one.dtype, tuple(one.shape)) != (dtype, shape):
            what = f"its part {part!r} is {one.dtype} {tuple(one.shape)}, {spec.scheme} needs {dtype} {shape}"
            raise CheckpointError(what, name=name)


def _weight(entry: Any, key: str, stored: Mapping[str, Stored], *, where: str) -> WeightSpec:
    if not isinstance(entry, dict) or not isinstance(entry.get("parts"), list):
        raise CheckpointError("the record of this weight has no list of parts", name=where)
    unknown = sorted(entry.keys() - {"shape", "dtype", "scheme", "stride", "activations", "parts"})
    if unknown:
        raise CheckpointError(f"the record of this weight has unknown fields: {', '.join(unknown)[:80]}", name=where)
    if key in stored or key in _RESERVED:
        raise CheckpointError("the record lists it as a weight, the file stores it as a plain tensor", name=where)
    try:
        spec = WeightSpec.from_json({name: value for name, value in entry.items() if name != "parts"})
        layout = layout_of(spec)
    except TetherError as error:
        raise CheckpointError(f"the record of this weight is invalid: {str(error)[:200]}", name=where) from None
    except Exception as error:  # a scheme, perhaps of another package, got fields of the wrong type
        raise CheckpointError(
            f"the record of this weight is invalid: {type(error).__name__}: {str(error)[:200]}", name=where
        ) from None
    if not spec.dtype.is_floating_point or list(layout) != entry["parts"]:
        listed = short_repr(entry["parts"])
        what = f"the record of this weight lists the parts {listed}, {spec.scheme} in {spec.dtype} has {list(layout)}"
        raise CheckpointError(what, name=where)
    check_parts(key, spec, stored, name=where)
    return spec


def layout_of(spec: WeightSpec) -> dict[str, tuple[torch.dtype, Shape]]:
    """Return the dtype and shape of each part of a Weight of ``spec``, in order.

    Raises CheckpointError if its strides do not match its shape, and the errors of its scheme for invalid fields.
    """
    if spec.stride != contiguous_stride(spec.shape) and not is_dense(spec.shape, spec.stride):
        raise CheckpointError(f"the strides {spec.stride} do not fit the shape {spec.shape}")
    parts = spec.scheme.layout(spec.base)
    return {name: (part.dtype or spec.dtype, tuple(part.shape)) for name, part in parts.items()}


# -- strides ----------------------------------------------------------------------------------------------------------


def _strides(entry: Any, stored: Stored | None, *, where: str) -> Shape:
    if stored is None:
        raise CheckpointError("the record has strides for it, the file does not store it", name=where)
    fits = isinstance(entry, list) and len(entry) == len(stored.shape) and all(is_count(n) for n in entry)
    if not fits or not is_dense(stored.shape, tuple(entry)):
        raise CheckpointError(f"the strides {short_repr(entry)} are not dense for shape {stored.shape}", name=where)
    return tuple(entry)


def _dtype(entry: Any, *, where: str) -> torch.dtype:
    try:
        dtype = dtype_from_name(entry)
    except SchemeError:
        dtype = torch.uint8
    if not dtype.is_floating_point or dtype.itemsize == 1:
        raise CheckpointError(f"a weight cannot compute in the dtype {short_repr(entry)}", name=where)
    return dtype


# -- checksums --------------------------------------------------------------------------------------------------------


def _checksum(entry: Any, key: str, stored: Mapping[str, Stored], *, name: str) -> int:
    if key not in stored:
        raise CheckpointError("the record has a checksum for it, the file does not store it", name=f"{name}: {key}")
    if not isinstance(entry, str) or not _CHECKSUM.fullmatch(entry):
        raise CheckpointError(f"the checksum {str(entry)[:80]!r} is not 8 lower-case hex digits", name=f"{name}: {key}")
    return int(entry, 16)


# -- ties -------------------------------------------------------------------------------------------------------------


def _ties(entries: list[Any], name: str) -> tuple[Tie, ...]:
    try:
        return tuple(Tie.from_json(entry) for entry in entries)
    except (TetherError, TypeError) as error:
        raise CheckpointError(f"a tie in the record is invalid: {str(error)[:200]}", name=name) from None


def _owner(key: str) -> str:
    """Return the weight that other formats store under ``key``, such as ``weight_packed``, or ``W_q`` of SINQ."""
    return f"{key[:-4]}.weight" if key.endswith(".W_q") else key.rpartition("_")[0]


def _check_ties(record: Record, stored: Mapping[str, Stored], parts: set[str], name: str) -> None:
    seen: set[str] = set()
    copies = set(record.copies)
    spelled = {_owner(key) for key in stored} if record.ties else set()
    for tie in record.ties:
        where = f"{name}: {tie.owner}"
        if tie.owner in record.weights:
            spec = record.weights[tie.owner]
            nbytes, limit = None, math.prod(spec.shape)
        elif tie.owner in stored and tie.owner not in parts:
            spec, nbytes = None, stored[tie.owner].nbytes
        elif tie.owner in spelled and not any(tie.views):
            spec, nbytes = None, 0  # another format may store it under a key of ``_owner``; its reader checks that
        else:
            raise CheckpointError("the record lists it as the owner of a tie, the file does not store it", name=where)
        for alias, view in zip(tie.names, tie.views, strict=True):
            what = f"{name}: {alias}"
            if alias in seen:
                raise CheckpointError("two ties of the record contain this name", name=what)
            seen.add(alias)
            check_length(alias, name=name)
            if alias == tie.owner:
                continue
            if alias in copies:
                copies.discard(alias)
            elif alias in stored or alias in record.weights:
                raise CheckpointError(f"the file stores it, the record lists it as an alias of {tie.owner}", name=what)
            if alias in _RESERVED or alias.startswith(HIDDEN) or alias in parts:
                raise CheckpointError("an alias cannot have this name, which is reserved or in use", name=what)
            if view is None:
                continue
            if spec is not None:
                _check_weight_view(view, spec, limit, what)
            else:
                assert nbytes is not None
                _check_view(view, nbytes, what)
    if copies:
        raise CheckpointError("the record lists it as a copy, but in no tie", name=f"{name}: {min(copies)}")


def _check_view(view: View, nbytes: int, where: str) -> None:
    """Check in Python integers that the alias stays within its owner's bytes and visits no byte twice."""
    if view.dtype not in CODES or len(view.size) > 64:
        raise CheckpointError(f"an alias cannot have dtype {view.dtype} and {len(view.size)} dimensions", name=where)
    item = view.dtype.itemsize
    reach = (view.offset + extent(view.size, view.stride)) * item
    if reach > nbytes:
        raise CheckpointError(f"the alias ends at byte {reach}, its owner has {nbytes} bytes", name=where)
    if math.prod(max(n, 1) for n in view.size) * item > max(nbytes, 16):
        raise CheckpointError(f"the alias of size {view.size} is larger than its owner of {nbytes} bytes", name=where)
    if view.overlaps_itself:
        raise CheckpointError(f"the alias of size {view.size} and stride {view.stride} overlaps itself", name=where)


def _check_weight_view(view: View, spec: WeightSpec, limit: int, where: str) -> None:
    """Check that the alias is the Weight with permuted dimensions, or a range of its rows."""
    if view.dtype != spec.dtype and not view.dtype.is_floating_point:
        raise CheckpointError(f"an alias of a {spec.dtype} weight cannot have dtype {view.dtype}", name=where)
    if not is_weight_view(view, spec, limit):
        raise CheckpointError(f"an alias of size {view.size} is neither the permuted weight nor rows of it", name=where)


def is_weight_view(view: View, spec: WeightSpec, limit: int) -> bool:
    """Return whether a record can hold ``view``: the Weight of ``limit`` elements, permuted, or a range of its rows."""
    dims = sorted(zip(view.size, view.stride, strict=True))
    if dims == sorted(zip(spec.shape, spec.stride, strict=True)) and view.offset == 0:
        return True
    row = limit // max(spec.shape[0], 1)
    is_rows = view.size[1:] == spec.shape[1:] and view.stride == spec.stride and view.offset % max(row, 1) == 0
    return is_rows and spec.is_contiguous and view.offset + view.size[0] * row <= limit
