"""A writer of GGUF files, tensor by tensor: the same tensors and pairs give the same bytes."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from io import FileIO

import torch
from torch import Tensor

from .._dtypes import dtype_name
from ..errors import CheckpointError
from ..geometry.views import Shape
from ..progress import Tick, no_tick
from .ggml import PACKINGS, PLAIN, Packing
from .gguf import ALIGNMENT, COUNT_LIMIT, MAGIC, RANK_LIMIT, RawValue
from .strict_json import short_repr
from .writer import as_planned, write_bytes, write_tensor

Scalar = str | bool | int | float
Pairs = Mapping[str, Scalar | Sequence[Scalar]]
"""Key-value pairs: text, bools, whole numbers, 32-bit floats, and lists of one of them."""

_VERSION = 3
_INTEGERS = ((4, "I", 0, 2**32), (5, "i", -(2**31), 2**31), (10, "Q", 0, 2**64), (11, "q", -(2**63), 2**63))


def write_gguf(
    file: FileIO,
    layout: Mapping[str, tuple[torch.dtype, Shape]],
    packings: Mapping[str, str],
    made: Iterable[tuple[str, Tensor]],
    pairs: Pairs,
    *,
    name: str,
    tick: Tick = no_tick,
) -> None:
    """Write tensors, which ``made`` yields one at a time in any order, to ``file`` in the order of ``layout``.

    ``layout`` has dtype and shape by key; ``packings`` has the type of each quantized tensor, which is uint8 (*lead,
    bytes per row). Raises CheckpointError if GGUF cannot hold a tensor, or if it does not agree with ``layout``.
    """
    head, start, stop = _header(layout, packings, pairs, name)
    write_bytes(file, memoryview(head))
    for key, tensor in made:
        tensor = as_planned(tensor, key, layout, start)
        file.seek(start.pop(key))
        write_tensor(file, tensor, tick)
        del tensor
    if start:
        raise CheckpointError("it was planned, but no tensor was made for it", name=min(start))
    file.truncate(stop)


def gguf_packing(key: str, dtype: torch.dtype, shape: Shape, packing: str | None) -> tuple[Packing, Shape]:
    """Return the type of a tensor in the file, and its shape in elements; raise CheckpointError if GGUF has none."""
    if len(shape) > RANK_LIMIT:
        raise CheckpointError(f"it has {len(shape)} dimensions, GGUF allows {RANK_LIMIT}", name=key)
    if packing is not None:
        made = PACKINGS[packing]
        return made, (*shape[:-1], shape[-1] // made.nbytes * made.elements)
    if dtype not in PLAIN:
        known = ", ".join(map(dtype_name, PLAIN))
        raise CheckpointError(f"GGUF has no type for {dtype}, it has {known}", name=key, fix="Convert or leave it out.")
    return PLAIN[dtype], shape


def _header(
    layout: Mapping[str, tuple[torch.dtype, Shape]], packings: Mapping[str, str], pairs: Pairs, name: str
) -> tuple[bytes, dict[str, int], int]:
    """Return the bytes before the data, the start of each tensor in the file, and the size of the file."""
    _check_names("tensors", layout, name)
    _check_names("pairs", pairs, name)
    infos, offsets, at = [], {}, 0
    for key, (dtype, shape) in layout.items():
        packing, elements = gguf_packing(key, dtype, shape, packings.get(key))
        sizes = b"".join(struct.pack("<Q", size) for size in reversed(elements))
        infos.append(_text(key) + struct.pack("<I", len(elements)) + sizes + struct.pack("<IQ", packing.number, at))
        offsets[key] = at
        nbytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
        at += -(-nbytes // ALIGNMENT) * ALIGNMENT
    if pairs.get("general.alignment", ALIGNMENT) != ALIGNMENT:
        raise CheckpointError(f"it must be {ALIGNMENT}", name=f"{name}: general.alignment", fix="Leave it out.")
    try:
        written = [_text(key) + _value(value, f"{name}: {key}") for key, value in sorted(pairs.items(), key=_rank)]
    except UnicodeEncodeError as error:
        raise CheckpointError(f"a key or value is not Unicode text: {error.reason}", name=name) from None
    head = MAGIC + struct.pack("<IQQ", _VERSION, len(infos), len(written)) + b"".join(written) + b"".join(infos)
    head += b"\0" * (-len(head) % ALIGNMENT)
    return head, {key: len(head) + offset for key, offset in offsets.items()}, len(head) + at


def _check_names(what: str, names: Collection[object], file: str) -> None:
    """Raise CheckpointError, naming the file, for names that are no text, or that ``GgufFile`` would refuse."""
    if len(names) > COUNT_LIMIT:
        raise CheckpointError(f"{len(names)} {what} are more than {COUNT_LIMIT}", name=file)
    for name in names:
        if not isinstance(name, str):
            raise CheckpointError("a key of the metadata must be text", name=f"{file}: {short_repr(name)}")
        if (size := len(name.encode(errors="surrogatepass"))) > COUNT_LIMIT:
            what = f"the name has {size} bytes, more than {COUNT_LIMIT}"
            raise CheckpointError(what, name=f"{file}: {short_repr(name)}", fix="Shorten it.")


def _rank(pair: tuple[str, object]) -> tuple[bool, str]:
    """Return the sort key of a pair: the architecture first, as the format requires, then all others by key."""
    return pair[0] != "general.architecture", pair[0]


def _text(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Scalar | Sequence[Scalar], where: str) -> bytes:
    """Return the bytes of a value and its type; a list has the first type that can hold all its values."""
    if isinstance(value, RawValue):
        return value
    if isinstance(value, str | bool | int | float):
        kind, (raw,) = _typed([value], where)
        return struct.pack("<I", kind) + raw
    if not isinstance(value, Sequence):
        raise CheckpointError(f"GGUF has no type for a {type(value).__name__}", name=where, fix="Leave it out.")
    kind, items = _typed(value, where)
    return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(items)


def _typed(values: Sequence[Scalar], where: str) -> tuple[int, list[bytes]]:
    if all(isinstance(value, str) for value in values):
        return 8, [_text(str(value)) for value in values]
    if all(isinstance(value, bool) for value in values):
        return 7, [struct.pack("<B", value) for value in values]
    if all(type(value) is int for value in values):
        for kind, code, low, high in _INTEGERS:
            if all(low <= int(value) < high for value in values):
                return kind, [struct.pack(f"<{code}", value) for value in values]
    elif all(type(value) in (int, float) for value in values):
        with contextlib.suppress(OverflowError):
            return 6, [struct.pack("<f", value) for value in values]
    raise CheckpointError(f"GGUF has no type for the values {str(values)[:80]}", name=where, fix="Leave it out.")
