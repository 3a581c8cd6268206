"""Checkpoints as they are written: groups of tensors, each made when its turn comes, to one file or to shards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._checks import as_size
from ..errors import ArgumentError, CheckpointError, SchemeError, TieError
from ..files import (
    GGUF_SUFFIX,
    HEADERS,
    INDEX_SUFFIX,
    PICKLED,
    SUFFIX,
    FolderChange,
    Pairs,
    Record,
    beside,
    folder_for,
    format_index,
    gguf_packing,
    is_folder,
    put_in_place,
    read_beside,
    replacing,
    write_gguf,
    write_made,
)
from ..formats import AboutEmbeddings, Contained, Indexed, Writable, native, with_quantization
from ..geometry.views import Shape, contiguous_stride
from ..progress import Progress, Tick, ticking
from ..weights.spec import Tie, WeightSpec

_NO_DIGEST = "0" * 32
"""As long as a digest of a header."""


@dataclass
class ShardGroup:
    """A tensor with all that is tied to it, which stays in one shard: its keys, and what the record says.

    ``layout`` is known before any tensor is made, because the header comes first. ``weights`` are the quantized ones,
    in the words of ``format``.
    """

    format: Writable = native
    layout: dict[str, tuple[torch.dtype, Shape]] = field(default_factory=dict)
    ties: list[Tie] = field(default_factory=list)
    weights: dict[str, WeightSpec] = field(default_factory=dict)
    strides: dict[str, Shape] = field(default_factory=dict)
    copies: set[str] = field(default_factory=set)
    is_embedding: bool = False
    """Whether one of the names is that of an embedding, which some readers have no quantized module for."""

    @property
    def nbytes(self) -> int:
        """Return the bytes that are written for it."""
        made = [torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in self.layout.values()]
        return sum(tensor.nbytes for tensor in made)

    def put_weight(self, name: str, spec: WeightSpec) -> None:
        """Note ``name`` as a Weight of ``spec``. Raise SchemeError if the format has no words for it."""
        if self.format is not native and spec.stride != contiguous_stride(spec.shape):
            raise SchemeError(
                f"{self.format.name} has no words for a quantized weight with the strides {spec.stride}",
                name=name,
                fix="Save as 'native'.",
            )
        self.weights[name] = spec
        self.layout |= self.format.layout(name, spec)

    def put_tie(self, tie: Tie) -> None:
        """Note names that are one tensor. Raise TieError for views, which only our own format remembers."""
        view = next((pair for pair in zip(tie.names, tie.views, strict=True) if pair[1] is not None), None)
        if view is not None and self.format is not native:
            raise TieError(
                f"it is a view of {tie.owner}, and {self.format.name} has no words for views",
                name=view[0],
                fix="Save as 'native', or untie it.",
            )
        self.ties.append(tie)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of ``layout``, made now."""
        raise NotImplementedError(f"{type(self).__name__}.tensors")


def write_groups(
    groups: Sequence[ShardGroup],
    path: Path,
    *,
    format: Writable = native,
    max_shard_size: int | str | None = None,
    progress: Progress = None,
    verb: str = "save",
    metadata: Pairs | None = None,
) -> None:
    """Write all of ``groups`` to ``path``, a ``.safetensors`` file or a folder, in shards where it must be.

    A format that has files of its own writes one of those, with ``metadata`` in it.

    What ``format`` has to say beside the tensors goes into the JSON files of the folder, which keep what else they say.
    Every file is written beside its target, and put in place when all are written (``files/replacing.py``). Raises
    CheckpointError if two tensors have one key, before anything is written, or where the disk refuses.
    """
    check_target(path, format, max_shard_size=max_shard_size, metadata=metadata)
    check_keys(groups)
    if isinstance(format, Contained):
        _write_contained(groups, path, format, metadata, progress, verb)
        return
    plan = plan_files(groups, path, format, max_shard_size)
    total = sum(group.nbytes for group in groups)
    with folder_for(plan.folder), ticking(progress, total, verb) as tick, beside(*plan.targets) as written:
        headers = {}
        for target, shard, file in zip(plan.targets, plan.shards, written.files, strict=True):
            headers[target.name] = write_shard(shard, shard_tensors(shard), file, str(target), tick)
        written.sync()
        put_in_place(plan.change(written.pairs, headers))


@dataclass(frozen=True)
class FilePlan:
    """The files that a save makes: a shard for each of ``targets``, and others, whole, the index among them.

    ``texts`` returns those others, as they are to be now, by path, given the digests of the shards' headers.
    """

    folder: Path
    stem: str
    is_folder: bool
    targets: list[Path]
    shards: list[list[ShardGroup]]
    texts: Callable[[Mapping[str, str]], dict[Path, bytes]]

    def change(self, written: Sequence[tuple[Path, Path]], headers: Mapping[str, str]) -> FolderChange:
        """Return what puts the shards in place: hidden paths and targets, and the digests of their headers by name."""
        return FolderChange(self.folder, self.stem, written, partial(self.texts, headers), is_whole=self.is_folder)


def plan_files(
    groups: Sequence[ShardGroup], path: Path, format: Writable = native, max_shard_size: int | str | None = None
) -> FilePlan:
    """Plan where each of ``groups`` goes, and what is written beside."""
    shards = list(_shards(groups, _limit(max_shard_size)))
    is_folder = path.suffix != SUFFIX
    folder, stem = (path, "model") if is_folder else (path.parent, path.name.removesuffix(SUFFIX))
    is_indexed = len(shards) > 1 or (isinstance(format, Indexed) and format.is_indexed)
    names = _file_names(stem, len(shards)) if is_indexed else [f"{stem}{SUFFIX}"]

    def texts(headers: Mapping[str, str]) -> dict[Path, bytes]:
        found = _beside(groups, format, folder, is_folder)
        if is_indexed:
            found[f"{stem}{INDEX_SUFFIX}"] = _index(groups, shards, headers, name=str(folder / f"{stem}{INDEX_SUFFIX}"))
        return {folder / name: text for name, text in found.items()}

    texts(dict.fromkeys(names, _NO_DIGEST))  # what cannot be written is found before anything is
    return FilePlan(folder, stem, is_folder, [folder / name for name in names], shards, texts)


def check_target(
    path: Path, format: Writable, *, max_shard_size: int | str | None = None, metadata: Pairs | None = None
) -> None:
    """Raise CheckpointError if ``path`` is not what ``format`` writes to, or cannot take what is given."""
    if isinstance(format, Contained):
        if path.suffix != format.suffix:
            raise CheckpointError(
                f"{format.name} writes one file, whose name ends in {format.suffix}",
                name=str(path),
                fix="Give such a name.",
            )
        if max_shard_size is not None:
            raise CheckpointError(f"{format.name} has no shards", name="max_shard_size", fix="Leave it out.")
        return
    if path.suffix == GGUF_SUFFIX:
        raise CheckpointError(
            f"{format.name} does not write GGUF files", name=str(path), fix="Give format='gguf', or another name."
        )
    if path.suffix in PICKLED and not is_folder(path):  # a new folder of such a name is nobody's wish
        raise CheckpointError(
            f"{path.suffix} files are for torch.save to write",
            name=str(path),
            fix="Give a name that ends in .safetensors, or a folder.",
        )
    if metadata is not None:
        raise CheckpointError(f"{format.name} has no place for it", name="metadata", fix="Leave it out.")


def _write_contained(
    groups: Sequence[ShardGroup], path: Path, format: Contained, metadata: Pairs | None, progress: Progress, verb: str
) -> None:
    """Write all of ``groups`` to the one file ``path``; names of one tensor are stored once, under the first."""
    layout = {key: what for group in groups for key, what in group.layout.items()}
    packings = {name: format.packing(name, spec).name for group in groups for name, spec in group.weights.items()}
    for key, (dtype, shape) in layout.items():
        gguf_packing(key, dtype, shape, packings.get(key))
    total = sum(group.nbytes for group in groups)
    with folder_for(path.parent), ticking(progress, total, verb) as tick, replacing(path) as (file,):
        made = (pair for group in groups for pair in group.tensors())
        write_gguf(file, layout, packings, made, metadata or format.pairs({}), name=str(path), tick=tick)


def _beside(groups: Sequence[ShardGroup], format: Writable, folder: Path, is_folder: bool) -> dict[str, bytes]:
    """Return the JSON files beside the tensors that ``format`` changes, whole, without words of other formats."""
    specs = {name: spec for group in groups for name, spec in group.weights.items()}
    taken = {key for name, spec in specs.items() for key in format.layout(name, spec)}
    aliases = [name for group in groups for tie in group.ties for name in tie.aliases if tie.owner not in specs]
    said = format.announce(specs, [*(key for group in groups for key in group.layout if key not in taken), *aliases])
    embeddings = [name for group in groups if group.is_embedding for name in group.weights]
    if embeddings and isinstance(format, AboutEmbeddings):
        said = format.announce_embeddings(said, embeddings)
    if not is_folder:
        if said and format is not native:
            raise CheckpointError(
                f"{format.name} needs {' and '.join(sorted(said))} beside the tensors",
                name=str(folder),
                fix="Give a folder.",
            )
        return {}
    there = read_beside(folder)
    if format is native:  # its files say all, and tools that need a config.json have one there
        said = {name: what for name, what in said.items() if name in there}
    made = {}
    for name in sorted({*said, *(["config.json"] if "config.json" in there else [])}):
        before = there.get(name, {})
        after = with_quantization(before, said.get(name, {}))
        if after != before:
            made[name] = _json(after)
    return made


def _json(value: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half a character, which a config may spell by an escape, and only so
        return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"


def check_keys(groups: Sequence[ShardGroup]) -> None:
    """Raise CheckpointError if a key is stored twice, or is also the name of a Weight or an alias."""
    names = {name for group in groups for name in group.weights if name not in group.layout}
    names |= {alias for group in groups for tie in group.ties for alias in tie.aliases if alias not in group.copies}
    keys: set[str] = set()
    for group in groups:
        for key in group.layout:
            if key in keys or key in names:
                raise CheckpointError("two tensors would be stored under this key", name=key, fix="Rename one of them.")
            keys.add(key)


def _limit(size: int | str | None) -> int | None:
    try:
        return None if size is None else as_size(size, "max_shard_size")
    except ArgumentError as error:
        raise CheckpointError(error.what, name=error.name, fix=error.fix) from None


def _shards(groups: Sequence[ShardGroup], limit: int | None) -> Iterator[list[ShardGroup]]:
    shard: list[ShardGroup] = []
    size = 0
    for group in groups:
        if shard and limit is not None and size + group.nbytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(group)
        size += group.nbytes
    yield shard


def _file_names(stem: str, count: int) -> list[str]:
    return [f"{stem}-{i:05d}-of-{count:05d}{SUFFIX}" for i in range(1, count + 1)]


def _record(groups: Sequence[ShardGroup]) -> Record:
    return Record(
        tuple(tie for group in groups for tie in group.ties),
        {name: spec for group in groups if group.format is native for name, spec in group.weights.items()},
        {name: stride for group in groups for name, stride in group.strides.items()},
        frozenset(name for group in groups for name in group.copies),
    )


def shard_tensors(shard: Sequence[ShardGroup]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the groups, by key, each made when its turn comes."""
    return (pair for group in shard for pair in group.tensors())


def write_shard(
    shard: Sequence[ShardGroup], made: Iterable[tuple[str, Tensor]], file: FileIO, name: str, tick: Tick
) -> str:
    """Write the groups, their record and the tensors ``made`` to ``file``; return the digest of its header."""
    layout = {key: what for group in shard for key, what in group.layout.items()}
    record = _record(shard)
    record.with_checksums(dict.fromkeys(layout, 0)).check_extent(len(layout), name=name)
    return write_made(
        file, layout, made, lambda checksums: record.with_checksums(checksums).metadata(), name=name, tick=tick
    )


def _index(
    groups: Sequence[ShardGroup], shards: list[list[ShardGroup]], headers: Mapping[str, str], *, name: str
) -> bytes:
    """Return the index of several shards, with the whole record and, for other readers, ``alias: owner``.

    ``headers`` has the digest of each shard's header by the name of its file.
    """
    record = _record(groups)
    record.check_extent(sum(len(group.layout) for group in groups), name=name)
    flat = record.metadata()
    del flat["format"]
    weight_map = {
        key: file for file, shard in zip(headers, shards, strict=True) for group in shard for key in group.layout
    }
    total = sum(group.nbytes for group in groups)
    return format_index(weight_map, {**flat, HEADERS: dict(headers), "total_size": total}, name=name)
