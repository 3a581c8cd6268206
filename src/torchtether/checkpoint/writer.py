"""Writing of checkpoints: groups of tensors, each made just before it is written, to one file or to shards."""

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

from .._checks import as_size, check_unicode
from ..errors import ArgumentError, CheckpointError, SchemeError, TieError
from ..files import (
    GGUF_SUFFIX,
    HEADERS,
    INDEX_SUFFIX,
    KEY,
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
    is_taken,
    names_of_parts,
    put_in_place,
    read_beside,
    replacing,
    write_gguf,
    write_made,
)
from ..formats import Contained, ForLinear, Indexed, Writable, native, with_quantization
from ..geometry.views import Shape, contiguous_stride
from ..progress import Progress, Tick, ticking
from ..weights.spec import Tie, WeightSpec

_NO_DIGEST = "0" * 32
"""A placeholder with the length of a header's digest."""


@dataclass
class ShardGroup:
    """A tensor and all that is tied to it, which go to one shard: their keys, and their entries of the record.

    ``layout`` must be known before the tensors are made, because the header comes first. ``weights`` are the specs of
    quantized weights, which ``format`` stores.
    """

    format: Writable = native
    layout: dict[str, tuple[torch.dtype, Shape]] = field(default_factory=dict)
    ties: list[Tie] = field(default_factory=list)
    weights: dict[str, WeightSpec] = field(default_factory=dict)
    strides: dict[str, Shape] = field(default_factory=dict)
    copies: set[str] = field(default_factory=set)
    is_linear: bool = True
    """Whether all names belong to ``nn.Linear``: many readers have no quantized module for another."""

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of its tensors."""
        made = [torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in self.layout.values()]
        return sum(tensor.nbytes for tensor in made)

    def put_weight(self, name: str, spec: WeightSpec) -> None:
        """Add ``name`` as a Weight of ``spec``. Raise SchemeError if the format cannot store it."""
        if self.format is not native and spec.stride != contiguous_stride(spec.shape):
            raise SchemeError(
                f"{self.format.name} cannot store a quantized weight with the strides {spec.stride}",
                name=name,
                fix="Save as 'native'.",
            )
        self.weights[name] = spec
        self.layout |= self.format.layout(name, spec)

    def put_tie(self, tie: Tie) -> None:
        """Add a tie. Raise TieError for a view, which only the native format records."""
        view = next((pair for pair in zip(tie.names, tie.views, strict=True) if pair[1] is not None), None)
        if view is not None and self.format is not native:
            raise TieError(
                f"it is a view of {tie.owner}, and {self.format.name} cannot store views",
                name=view[0],
                fix="Save as 'native', or untie it.",
            )
        self.ties.append(tie)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every key of ``layout`` with its tensor, made on demand."""
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
    stem: str = "model",
    config: Callable[[], Mapping[str, Any]] | None = None,
) -> None:
    """Write ``groups`` to ``path``, a ``.safetensors`` file or a folder, in shards if they exceed ``max_shard_size``.

    In a folder, the names of the files begin with ``stem``.

    A format with its own kind of file (GGUF) writes one such file, with ``metadata`` in it.

    Metadata of ``format`` that is not in the tensor files goes into the JSON files of the folder, and replaces no other
    entries; a new ``config.json`` has those of ``config()``, too. Every file is written beside its target, and renamed
    when all are written (``files/replacing.py``). Raises CheckpointError if two tensors have the same key, before
    anything is written, or if the system cannot write.
    """
    check_target(path, format, max_shard_size=max_shard_size, metadata=metadata)
    check_keys(groups)
    if isinstance(format, Contained):
        _write_contained(groups, path, format, metadata, progress, verb)
        return
    plan = plan_files(groups, path, format, max_shard_size, stem, config)
    total = sum(group.nbytes for group in groups)
    with folder_for(plan.folder), ticking(progress, total, verb) as tick, beside(*plan.targets) as written:
        headers = {}
        for target, shard, file in zip(plan.targets, plan.shards, written.files, strict=True):
            made = (pair for group in shard for pair in group.tensors())
            headers[target.name] = write_shard(shard, made, file, str(target), tick)
        written.sync()
        put_in_place(plan.change(written.pairs, headers))


@dataclass(frozen=True)
class FilePlan:
    """The files of a save: a shard for each of ``targets``, and text files, such as the index.

    ``texts`` takes the digests of the shards' headers, and returns the contents of the text files by path.
    """

    folder: Path
    stem: str
    is_folder: bool
    targets: list[Path]
    shards: list[list[ShardGroup]]
    texts: Callable[[Mapping[str, str]], dict[Path, bytes]]

    def change(self, written: Sequence[tuple[Path, Path]], headers: Mapping[str, str]) -> FolderChange:
        """Return the change that renames ``written``, (hidden path, target); ``headers`` has digests by name."""
        return FolderChange(self.folder, self.stem, written, partial(self.texts, headers), is_whole=self.is_folder)


def plan_files(
    groups: Sequence[ShardGroup],
    path: Path,
    format: Writable = native,
    max_shard_size: int | str | None = None,
    stem: str = "model",
    config: Callable[[], Mapping[str, Any]] | None = None,
) -> FilePlan:
    """Plan the file of each group, and the text files; ``config()`` gives the entries of a new ``config.json``."""
    shards = list(_shards(groups, _limit(max_shard_size)))
    is_folder = path.suffix != SUFFIX
    folder, stem = (path, stem) if is_folder else (path.parent, path.name.removesuffix(SUFFIX))
    is_indexed = len(shards) > 1 or (isinstance(format, Indexed) and format.is_indexed)
    count = len(shards)
    numbers = [f"-{i:05d}-of-{count:05d}" for i in range(1, count + 1)] if is_indexed else [""]
    names = [f"{stem}{number}{SUFFIX}" for number in numbers]

    def texts(headers: Mapping[str, str]) -> dict[Path, bytes]:
        found = _beside(groups, format, folder, is_folder, config or dict)
        if is_indexed:
            found[f"{stem}{INDEX_SUFFIX}"] = _index(groups, shards, headers, name=str(folder / f"{stem}{INDEX_SUFFIX}"))
        return {folder / name: text for name, text in found.items()}

    texts(dict.fromkeys(names, _NO_DIGEST))  # raises errors before anything is written
    return FilePlan(folder, stem, is_folder, [folder / name for name in names], shards, texts)


def check_target(
    path: Path, format: Writable, *, max_shard_size: int | str | None = None, metadata: Pairs | None = None
) -> None:
    """Raise CheckpointError if ``format`` cannot write to ``path``, or does not support the other arguments."""
    if path.parts[:1] == ("hf:",):  # a read of it would fetch what the Hub has
        fix = "Give a local path, and upload what is written there."
        name = f"hf://{path.as_posix()[4:]}"  # a Path keeps one slash
        raise CheckpointError("it is a name of the Hub, to which nothing is written", name=name, fix=fix)
    if isinstance(format, Contained):
        if path.suffix != format.suffix:
            raise CheckpointError(
                f"{format.name} writes one file, whose name ends in {format.suffix}",
                name=str(path),
                fix="Give such a name.",
            )
        if len(names_of_parts(path.name)) > 1:
            what = "it is the name of one of several parts, and all would be written to it"
            raise CheckpointError(what, name=str(path), fix="Give the name of a whole file.")
        if max_shard_size is not None:
            raise CheckpointError(f"{format.name} has no shards", name="max_shard_size", fix="Leave it out.")
        return
    if path.suffix == GGUF_SUFFIX:
        raise CheckpointError(
            f"{format.name} does not write GGUF files", name=str(path), fix="Give the format gguf, or another name."
        )
    if path.suffix != SUFFIX and is_taken(path):
        fix = "Give a name that ends in .safetensors, or a folder."
        raise CheckpointError("it is a file, and would be the name of a folder", name=str(path), fix=fix)
    if path.suffix in PICKLED and not is_folder(path):  # nobody would want a new folder of such a name
        raise CheckpointError(
            f"only torch.save writes {path.suffix} files",
            name=str(path),
            fix="Give a name that ends in .safetensors, or a folder.",
        )
    if metadata is not None:
        raise CheckpointError(f"{format.name} cannot store it", name="metadata", fix="Leave it out.")


def _write_contained(
    groups: Sequence[ShardGroup], path: Path, format: Contained, metadata: Pairs | None, progress: Progress, verb: str
) -> None:
    """Write all of ``groups`` to the file ``path``; a tied tensor is stored once, under its first name."""
    layout = {key: what for group in groups for key, what in group.layout.items()}
    packings = {name: format.packing(name, spec).name for group in groups for name, spec in group.weights.items()}
    for key, (dtype, shape) in layout.items():
        gguf_packing(key, dtype, shape, packings.get(key))
    pairs, record = dict(metadata or format.pairs({})), record_of(groups)
    if record != Record():
        record.check_extent(len(layout), name=str(path))
        pairs[KEY] = record.metadata()[KEY]
    total = sum(group.nbytes for group in groups)
    with folder_for(path.parent), ticking(progress, total, verb) as tick, replacing(path) as (file,):
        made = (pair for group in groups for pair in group.tensors())
        write_gguf(file, layout, packings, made, pairs, name=str(path), tick=tick)


def _beside(
    groups: Sequence[ShardGroup],
    format: Writable,
    folder: Path,
    is_folder: bool,
    config: Callable[[], Mapping[str, Any]],
) -> dict[str, bytes]:
    """Return the new JSON files that ``format`` changes, without entries of other formats about quantization."""
    specs = {name: spec for group in groups for name, spec in group.weights.items()}
    taken = {key for name, spec in specs.items() for key in format.layout(name, spec)}
    aliases = [name for group in groups for tie in group.ties for name in tie.aliases if tie.owner not in specs]
    said = format.announce(specs, [*(key for group in groups for key in group.layout if key not in taken), *aliases])
    others = [name for group in groups if not group.is_linear for name in group.weights]
    if others and isinstance(format, ForLinear):
        said = format.announce_others(said, others)
    if not is_folder:
        if said and format is not native:
            raise CheckpointError(
                f"{format.name} needs {' and '.join(sorted(said))} in the same folder",
                name=str(folder),
                fix="Give a folder.",
            )
        return {}
    there = read_beside(folder)
    if format is native:  # its tensor files have all metadata, so no JSON file is added
        said = {name: what for name, what in said.items() if name in there}
    made = {}
    for name in sorted({*said, *(["config.json"] if "config.json" in there else [])}):
        before = there[name] if name in there else config() if name == "config.json" else {}
        after = with_quantization(before, said.get(name, {}))
        if after != before:
            made[name] = _json(after)
    return made


def _json(value: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, which JSON can only store as an escape
        return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"


def check_keys(groups: Sequence[ShardGroup]) -> None:
    """Raise CheckpointError if a key is stored twice, is also the name of a Weight or an alias, or is not Unicode."""
    names = {name for group in groups for name in group.weights if name not in group.layout}
    names |= {alias for group in groups for tie in group.ties for alias in tie.aliases if alias not in group.copies}
    keys: set[str] = set()
    for group in groups:
        for key in group.layout:
            if key in keys or key in names:
                raise CheckpointError(
                    "two tensors would be stored under this name", name=key, fix="Rename one of them."
                )
            keys.add(key)
    for name in names | keys:
        check_unicode(name)


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


def record_of(groups: Sequence[ShardGroup]) -> Record:
    """Return the record of ties, strides and weights of ``groups``."""
    return Record(
        tuple(tie for group in groups for tie in group.ties),
        {name: spec for group in groups if group.format is native for name, spec in group.weights.items()},
        {name: stride for group in groups for name, stride in group.strides.items()},
        frozenset(name for group in groups for name in group.copies),
        dtypes={
            name: spec.dtype for group in groups if group.format is not native for name, spec in group.weights.items()
        },
    )


def write_shard(
    shard: Sequence[ShardGroup], made: Iterable[tuple[str, Tensor]], file: FileIO, name: str, tick: Tick
) -> str:
    """Write the groups, their record and the tensors ``made`` to ``file``; return the digest of its header."""
    layout = {key: what for group in shard for key, what in group.layout.items()}
    record = record_of(shard)
    record.with_checksums(dict.fromkeys(layout, 0)).check_extent(len(layout), name=name)
    return write_made(
        file, layout, made, lambda checksums: record.with_checksums(checksums).metadata(), name=name, tick=tick
    )


def _index(
    groups: Sequence[ShardGroup], shards: list[list[ShardGroup]], headers: Mapping[str, str], *, name: str
) -> bytes:
    """Return the index of several shards, with the record of all groups and, for other readers, ``alias: owner``.

    ``headers`` has the digest of each shard's header by file name.
    """
    record = record_of(groups)
    record.check_extent(sum(len(group.layout) for group in groups), name=name)
    flat = record.metadata()
    del flat["format"]
    weight_map = {
        key: file for file, shard in zip(headers, shards, strict=True) for group in shard for key in group.layout
    }
    total = sum(group.nbytes for group in groups)
    return format_index(weight_map, {**flat, HEADERS: dict(headers), "total_size": total}, name=name)
