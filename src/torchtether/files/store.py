"""All files of a checkpoint as one store: its tensors by key, and their record."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .._checks import describe_some
from ..errors import CheckpointError
from ..geometry.views import Shape, View
from ..progress import Tick, no_tick
from .batch import Batch
from .dcp import DcpFile, is_dcp
from .gguf import MAGIC, GgufFile
from .gguf_parts import check_parts, first_parts, paths_of_parts
from .header import Header, Stored
from .hub import local_path
from .index import GGUF_SUFFIX, PICKLED, Index, read_index, with_shards
from .marks import check_ended
from .memory import allocate_each
from .names import INDEX_SUFFIX, SUFFIX, check_every_shard, stem_of
from .opening import Closing, found_at, read_beside
from .pickled import PickledFile
from .reader import TensorFile, begins_with
from .record import KEY, Record, parse_record
from .ring import Ring
from .strict_json import short_repr

_ZIP = b"PK\x03\x04"

_PICKLED_STEM = "pytorch_model"
"""The stem of files by ``torch.save`` that transformers writes, with ``.bin`` or ``.bin.index.json``.

Other ``.bin`` files in a folder are not checkpoints."""


class Store(Closing):
    """The open files of a checkpoint, checked against each other; keys are stored keys, aliases are not resolved.

    header   the tensors and the metadata of all files
    record   the union of their records: ties, weights, strides, checksums
    flat     ``alias: owner`` pairs of other writers: valid for lookups of an alias, never listed as keys
    """

    index: Index | None
    record: Record
    has_record: bool
    flat: dict[str, str]

    def __init__(self, path: Path | str, revision: str | None = None) -> None:
        self.path: Path = local_path(path, revision)
        self.name: str = str(self.path)
        with _readable(self.name):
            paths, self.index = _find_files(self.path)
        self.files: list[TensorFile] = []
        self._of_thread = threading.local()
        try:
            with _readable(self.name):
                for file in paths:
                    self.files.append(_kind(file)(file))
            check_parts(self.files)
            self._home = _homes(self.files, self.index)
            self.header: Header = Header(
                {key: self._home[key].header.tensors[key] for key in sorted(self._home)},
                # the first of the parts of a GGUF file has its pairs
                {key: value for file in reversed(self.files) for key, value in file.header.metadata.items()},
            )
            self.record, self.has_record = _record(self.files, self.index)
            self.flat = {} if self.has_record else _flat_pairs(self.header, self.index)
        except BaseException:
            self.close()
            raise

    @property
    def ring(self) -> Ring:
        """Return the pinned buffers for all reads to devices by this thread; they are allocated on first use."""
        if not hasattr(self._of_thread, "ring"):  # threads may share a checkpoint, but not a ring
            self._of_thread.ring = Ring()
        return self._of_thread.ring  # type: ignore[no-any-return]

    @property
    def folder(self) -> Path:
        """Return the folder of the files."""
        return self.files[0].path.parent

    def file_of(self, key: str) -> TensorFile:
        """Return the file that stores ``key``."""
        return self._home[key]

    def stored(self, key: str) -> Stored:
        """Return dtype, shape and location of ``key``."""
        return self.header.tensors[key]

    def read(self, key: str, tick: Tick = no_tick) -> Tensor:
        """Return the tensor as stored, contiguous, in memory of its own."""
        return self._home[key].read(key, tick)

    def read_into(self, key: str, out: Tensor, tick: Tick = no_tick) -> None:
        """Fill ``out`` with the values of ``key``, whatever its strides, dtype and device."""
        self._home[key].read_into(key, out, tick, self.ring)

    def read_later(self, key: str, out: Tensor, batch: Batch, first: int | None = None) -> None:
        """Add ``read_into``, from row ``first`` on, to ``batch``."""
        self._home[key].read_later(key, out, batch, first)

    def make_later(self, wanted: Iterable[tuple[str, Shape]], batch: Batch) -> list[Tensor]:
        """Return a new CPU tensor for each (key, dense strides), in the stored dtype; ``batch`` fills it when it runs.

        It takes a third of the time of ``allocate`` and ``read_later``, which matters for thousands of tensors.
        """
        homes, tensors = self._home, self.header.tensors
        places = [(homes[key], key, tensors[key], stride) for key, stride in wanted]
        made = allocate_each([(stored.shape, stored.dtype, stride, stored.start) for _, _, stored, stride in places])
        batch.fill((file, key, stored.start, out) for (file, key, stored, _), out in zip(places, made, strict=True))
        return made

    def read_view(self, key: str, view: View) -> Tensor:
        """Return the elements of ``key`` that ``view`` selects, contiguous, in new memory."""
        return self._home[key].read_view(key, view)

    def is_equal(self, key: str, other: str) -> bool:
        """Return whether two keys store the same bits, compared in bounded pieces."""
        one, two = self.stored(key), self.stored(other)
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            return False
        return all(
            mine == theirs
            for mine, theirs in zip(self._home[key].pieces(key), self._home[other].pieces(other), strict=True)
        )

    def beside(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the JSON objects beside the files that may announce a format, by file name; see ``read_beside``.

        Raises CheckpointError also if a save has replaced the files since they were opened, because the JSON files may
        then describe the new ones.
        """
        found = read_beside(self.folder)
        with _readable(self.name):
            _check_ended(self.path)
        for file in self.files:
            file.check_in_place()
        return found

    def check_sizes(self) -> None:
        """Raise CheckpointError if a file has become shorter since it was opened."""
        with _readable(self.name):
            for file in self.files:
                file.check_size()

    def release(self) -> None:
        """Finish the work of the pinned buffers of this thread and free them."""
        if hasattr(self._of_thread, "ring"):
            self._of_thread.ring.close()

    def close(self) -> None:
        """Close the files: nothing can be read afterwards; tensors that were read stay."""
        for file in self.files:
            file.close()
        self.release()


@contextlib.contextmanager
def _readable(name: str) -> Iterator[None]:
    """Raise CheckpointError, naming ``name``, for an OSError in the block: a folder or a disk that cannot be read."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", name=name) from error


def _kind(path: Path) -> type[TensorFile]:
    """Return the reader for the file at ``path``, by its name or by a magic number that no safetensors file has.

    ``torch.save`` writes zip files under any name: those of Lightning end in ``.ckpt``, others have no suffix.
    """
    if path.suffix in PICKLED or (path.suffix != SUFFIX and begins_with(path, _ZIP)):
        return PickledFile
    if path.is_dir():
        return DcpFile
    return GgufFile if path.suffix == GGUF_SUFFIX or begins_with(path, MAGIC) else TensorFile


def _homes(files: list[TensorFile], index: Index | None) -> dict[str, TensorFile]:
    homes: dict[str, TensorFile] = {}
    for file in files:
        tensors = file.header.tensors
        if not homes.keys().isdisjoint(tensors):
            key = next(key for key in tensors if key in homes)
            raise CheckpointError(f"{homes[key].path.name} also stores this name", name=f"{file.name}: {key}")
        homes.update(dict.fromkeys(tensors, file))
    if index is not None:
        _check_index(files, index)
        _check_headers(files, index)
    return homes


def _check_index(files: list[TensorFile], index: Index) -> None:
    """Raise CheckpointError unless the index names exactly the keys of each file."""
    named: dict[str, str] = {}
    for file in files:
        keys = file.names if isinstance(file, PickledFile) else file.header.tensors  # its index has aliases
        named.update(dict.fromkeys(keys, file.path.name))
    if named == index.weight_map:
        return
    for key, name in index.weight_map.items():
        if named.get(key) != name:
            where = f"is in {named[key]}" if key in named else "is in no shard"
            raise CheckpointError(f"the index assigns it to {name}, but it {where}", name=f"{index.path}: {key}")
    for key, name in named.items():
        if key not in index.weight_map:
            raise CheckpointError("the index does not list it", name=f"{index.path.parent / name}: {key}")


def _check_headers(files: list[TensorFile], index: Index) -> None:
    """Raise CheckpointError if the index is of another save than the shards; see ``replacing``."""
    if index.headers is None:
        return
    for file in files:
        known, found = index.headers.get(file.path.name), file.header_digest()
        if known != found:
            raise CheckpointError(
                f"its header has digest {found}, but {index.path.name} lists {short_repr(known)}",
                name=file.name,
                fix="Save again, or fetch all files of one save.",
            )


def _record(files: list[TensorFile], index: Index | None) -> tuple[Record, bool]:
    everything = {key: one for file in files for key, one in file.header.tensors.items()}
    is_in_parts = len(files) > 1 and isinstance(files[0], GgufFile)  # the first has the record of all
    found = [
        parse_record(file.header.metadata[KEY], everything if is_in_parts else file.header.tensors, name=file.name)
        for file in files
        if KEY in file.header.metadata
    ]
    where = str(index.path) if index else files[0].name
    record = Record.union(found, name=where)
    for tie in record.ties:
        for alias in tie.aliases:
            if (alias in everything or alias in record.weights) and alias not in record.copies:
                raise CheckpointError(
                    f"one shard stores it, another one lists it as an alias of {tie.owner}", name=f"{where}: {alias}"
                )
    if index is not None and isinstance(index.metadata.get(KEY), str):
        whole = parse_record(index.metadata[KEY], everything, name=str(index.path))
        if whole.metadata() != record.with_checksums({}).metadata():  # only the records of files have checksums
            what = "the record in the index differs from the records in the shards"
            raise CheckpointError(what, name=str(index.path), fix="Save it again.")
    return record, bool(found)


def _flat_pairs(header: Header, index: Index | None) -> dict[str, str]:
    pairs = {**header.metadata, **(index.metadata if index else {})}
    return {
        alias: owner
        for alias, owner in pairs.items()
        if alias not in header.tensors and isinstance(owner, str) and owner in header.tensors
    }


# -- which files -------------------------------------------------------------------------------------------------------


def _find_files(path: Path) -> tuple[tuple[Path, ...], Index | None]:
    """Return the files of the checkpoint at ``path`` (a file, a folder, an index), and its index if it has one.

    In a folder, safetensors files have precedence over ``pytorch_model.bin``, as in transformers. A folder with neither
    may hold one GGUF file, in one part or in several. A path of one part is a path of all.

    Raises CheckpointError if there is no checkpoint, if there are several, or if a save of it has not ended.
    """
    _check_ended(path)
    if path.is_dir():
        return ((path,), None) if is_dcp(path) else _find_in_folder(path)
    if found_at(path) is None:
        raise CheckpointError("there is no such file or folder", name=str(path))
    if path.suffix == ".json":
        index = read_index(path)
        return index.files, index
    return paths_of_parts(path), None


def _check_ended(path: Path) -> None:
    """End a save to ``path``, a file or a folder, whose process has died; raise CheckpointError if it cannot end."""
    if path.is_dir():
        check_ended(path)
    elif stem := stem_of(path.name):
        check_ended(path.parent, stem)


def _visible(folder: Path, suffix: str) -> list[Path]:
    """Return the files of ``folder`` that end in ``suffix`` and are not hidden, in the order of their names."""
    return sorted(file for file in folder.glob(f"*{suffix}") if not file.name.startswith("."))


def _find_in_folder(folder: Path) -> tuple[tuple[Path, ...], Index | None]:
    indexes = sorted(folder.glob(f"*{INDEX_SUFFIX}"))
    files, single, pickled = _visible(folder, SUFFIX), folder / f"model{SUFFIX}", folder / f"{_PICKLED_STEM}.bin"
    if not indexes and not files:
        single, index_of_pickled = pickled, folder / f"{pickled.name}.index.json"
        files, indexes = ([path] if path.is_file() else [] for path in (pickled, index_of_pickled))
    if indexes and (len(indexes) > 1 or single in files):
        indexes = with_shards(indexes, Path.is_file)
    if indexes and (len(indexes) > 1 or single in files):
        names = ", ".join(file.name for file in sorted([*indexes, *([single] if single in files else [])]))
        raise CheckpointError(
            f"the folder holds several checkpoints: {names}", name=str(folder), fix="Give the path of one."
        )
    if indexes:
        index = read_index(indexes[0])
        return index.files, index
    if single in files:
        return (single,), None
    if files:
        check_every_shard(folder, (file.name for file in files))
        return tuple(files), None
    others = first_parts(file.name for file in _visible(folder, GGUF_SUFFIX))
    if len(others) > 1:  # usually one model in several quantized types
        names = ", ".join(others)
        raise CheckpointError(
            f"the folder holds several GGUF files: {names}", name=str(folder), fix="Give the path of one."
        )
    if not others:
        inner = sorted(one.name for one in folder.iterdir() if one.is_dir() and not one.name.startswith("."))
        inner = [name for name in inner if _visible(folder / name, SUFFIX) or _visible(folder / name, GGUF_SUFFIX)]
        raise CheckpointError(
            f"the folder holds no safetensors file, and no {pickled.name}",
            name=str(folder),
            fix=f"Give the path of a folder in it that does: {describe_some(inner, 8)}." if inner else "",
        )
    return paths_of_parts(folder / others[0]), None
