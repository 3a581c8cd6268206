"""The index of a checkpoint in several files: the shard of each tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .header import HEADER_LIMIT
from .names import SUFFIX, stem_of
from .opening import read_file
from .strict_json import check_extent, parse_object, short_repr

GGUF_SUFFIX = ".gguf"

PICKLED = (".pt", ".pth", ".bin")
"""The suffixes of files by ``torch.save``."""

HEADERS = "torchtether.headers"
"""The key in the metadata of an index for the digests of the headers of torchtether's shards, by file name."""

_VALUES = 2**20  # names; each takes some three hundred bytes


@dataclass(frozen=True)
class Index:
    """The contents of ``model.safetensors.index.json`` or ``pytorch_model.bin.index.json``: the file of each tensor."""

    path: Path
    weight_map: Mapping[str, str]
    metadata: Mapping[str, Any]

    @property
    def headers(self) -> Mapping[str, str] | None:
        """Return the digests of the headers of the shards, by file name; ``None`` in an index of another writer."""
        return self.metadata.get(HEADERS)

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the shards, in the order of their names."""
        return tuple(self.path.parent / name for name in sorted(set(self.weight_map.values())))


def index_of(shard: Path) -> Path | None:
    """Return the path of the index beside ``shard``, ``None`` if there is none.

    A folder may hold several checkpoints of transformers, which differ in their variant: that of
    ``model.int8-00001-of-00002.safetensors`` has the index ``model.safetensors.index.int8.json``. Files by
    ``torch.save`` are named likewise.
    """
    suffix = shard.suffix if shard.suffix in PICKLED else SUFFIX
    stem, *variant = (stem_of(shard.with_suffix(SUFFIX).name) or "").split(".", 1)
    path = shard.with_name(".".join([stem + suffix, "index", *variant, "json"]))
    return path if path.is_file() else None


def read_index(path: Path) -> Index:
    """Return the index at ``path``; raise CheckpointError unless all files that it names exist beside it."""
    index = parse_index(path)
    for file in index.files:
        if not file.is_file():
            raise CheckpointError(
                f"the index lists the file {file.name}, which does not exist", name=str(path), fix="Fetch every shard."
            )
    return index


def with_shards(indexes: Iterable[Path], exists: Callable[[Path], bool]) -> list[Path]:
    """Return those of ``indexes`` that have a shard: ``save_pretrained`` deletes old shards, and not their index."""
    return [path for path in indexes if any(map(exists, parse_index(path).files))]


def parse_index(path: Path) -> Index:
    """Return the index at ``path``; raise CheckpointError if it names a path elsewhere; files need not exist."""
    name = str(path)
    try:
        text = read_file(path, HEADER_LIMIT)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", name=name) from None
    found = parse_object(text, name=name, what="index", floats=True, values=_VALUES)
    weight_map, metadata = found.get("weight_map"), found.get("metadata") or {}
    if not isinstance(weight_map, dict) or not isinstance(metadata, dict):
        raise CheckpointError("the index has no object 'weight_map'", name=name, fix="Is it the index of a checkpoint?")
    plain: set[str] = set()  # checked names: many tensors are in few files
    for key, file in weight_map.items():
        if isinstance(file, str) and (file in plain or _is_plain_name(file)):
            plain.add(file)
        else:
            raise CheckpointError(
                f"the index assigns it to {short_repr(file)}, not to a file in its own folder", name=f"{name}: {key}"
            )
    if not weight_map:
        raise CheckpointError("the index lists no tensors", name=name, fix="Is it the index of a checkpoint?")
    index = Index(path, weight_map, metadata)
    if index.headers is not None and not isinstance(index.headers, dict):
        raise CheckpointError(f"{HEADERS} in its metadata is {short_repr(index.headers)}, not an object", name=name)
    return index


def _is_plain_name(name: str) -> bool:
    return (
        bool(name) and name not in {".", ".."} and not set(name) & set("/\\:\0") and name.endswith((SUFFIX, *PICKLED))
    )


def format_index(weight_map: Mapping[str, str], metadata: Mapping[str, Any], *, name: str) -> bytes:
    """Return the bytes of the index ``name``; equal arguments give equal bytes.

    Raises CheckpointError if it would exceed the limits of ``parse_index``.
    """
    record = {"metadata": dict(metadata), "weight_map": dict(weight_map)}
    text = (json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
    if len(text) > HEADER_LIMIT:
        raise CheckpointError(f"the index takes {len(text)} bytes, more than {HEADER_LIMIT}", name=name)
    check_extent(text, _VALUES, _VALUES, name=name, what="index")
    return text
