"""An open checkpoint: a lazy mapping from names to tensors, for all kinds of files and formats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

import torch
from torch import Tensor

from .._checks import check_path
from .._interruptions import uncollected
from ..errors import CheckpointError, TetherError
from ..files import HIDDEN, Closing, Store, allocate, scratch
from ..formats import PLAIN, ByRows, Contents, Cut, Entry, Fitting, cut_rows, is_in_parts, native, recognise
from ..geometry.views import Shape, View, contiguous_stride
from ..progress import Tick, no_tick
from ..schemes import part_rows, same_bits, view_parts
from ..weights.spec import Tie, WeightSpec
from ..weights.weight import Weight
from .aliases import is_equal, view_of
from .slices import TensorSlice

_SMALL = 16 * 2**20  # the most bytes of a tensor that a format may read to recognise a checkpoint


class Checkpoint(Closing, Mapping[str, Tensor]):
    """Read tensors of a checkpoint by name, aliases included; nothing is read before it is accessed.

        checkpoint.ties      the ties: names of one tensor, owner first
        checkpoint.format    the format of quantized weights: "native", "gptq", ...; "safetensors" if there are none
        checkpoint.faults    the faults of quantized weights that cannot be read, by name
        checkpoint.spec(n)   shape, stride, dtype and scheme of ``n``, without reading it
        checkpoint.get_slice(n)[2:5]    rows of ``n``, without reading the rest

    Tied names share memory, in any order of access; to this end, tied tensors stay in memory until ``close``. Every
    other tensor is read at each access, into new memory. Quantized weights are ``Weight`` objects.

    >>> import torch, torchtether as tt, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tt.save({"w": torch.ones(2, 3)}, folder)
    ...     with tt.open(folder) as checkpoint:
    ...         print(list(checkpoint), checkpoint.spec("w").shape, checkpoint["w"].sum())
    ['w'] (2, 3) tensor(6.)
    """

    def __init__(self, path: Path | str, *, revision: str | None = None) -> None:
        check_path(path)
        with uncollected():
            self._open(Store(path, revision))

    def _open(self, store: Store) -> None:
        self.store: Store = store
        try:
            contents = Contents(
                store.header.tensors, store.header.metadata, store.record, store.beside(), self._read_small
            )
            format, found, entries = recognise(contents)
            if store.record.ties:
                _check_owners(store.record.ties, entries.keys() | found.faults.keys(), str(store.path))
        except BaseException:
            self.store.close()
            raise
        self._format = format
        self._fitting = format if isinstance(format, Fitting) else None
        self.path: Path = self.store.path
        self.format: str = format.name if format else PLAIN
        self.ties: tuple[Tie, ...] = tuple(tie for tie in self.store.record.ties if tie.owner not in found.faults)
        self.faults: Mapping[str, str] = found.faults | {
            alias: f"it is an alias of {tie.owner}: {found.faults[tie.owner]}"
            for tie in self.store.record.ties
            for alias in tie.aliases
            if tie.owner in found.faults and alias not in entries
        }
        """The faults of quantized weights that cannot be read, by name, aliases included."""
        self._padding = found.padding
        self._alias: dict[str, tuple[str, View | None]] = {
            alias: (tie.owner, view)
            for tie in self.ties
            for alias, view in zip(tie.aliases, tie.views[1:], strict=True)
        }
        self.entries: dict[str, Entry] = {name: e for name, e in entries.items() if name not in self._alias}
        """The entries of stored tensors by name: owners, and tensors that are not tied."""
        self.copies: Mapping[str, Entry] = {name: e for name, e in entries.items() if name in self._alias}
        """The entries of aliases that are stored, too."""
        self.flat: Mapping[str, str] = {a: owner for a, owner in store.flat.items() if owner in self.entries}
        """``alias: owner`` in the records of other writers; iteration leaves these aliases out."""
        self._tied = {tie.owner: tie for tie in self.ties}
        self._kept: dict[str, Tensor] = {}

    # -- a mapping ------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[str]:
        names = [*self.entries, *self._alias]
        return iter(sorted([name for name in names if not name.startswith(HIDDEN)]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __eq__(self, other: object) -> bool:
        return self is other  # a Mapping would read both, and ask tensors for a bool

    __hash__ = object.__hash__

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self.entries or name in self._alias or name in self.flat)

    def __getitem__(self, name: str) -> Tensor:
        owner, view = self.find(name)
        whole = self._kept.get(owner)
        if whole is None:
            whole = self.read(owner)
            if owner in self._tied or owner in self.flat.values():
                self._kept[owner] = whole
        return view_of(whole, view).detach()

    def get_slice(self, name: str) -> TensorSlice:
        """Return an object whose ``[...]`` reads a part of ``name`` without the rest, always into new memory.

        Indices of an alias count in the alias, not in its owner. Raises KeyError.

        >>> import torch, torchtether as tt, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tt.save({"w": torch.arange(12).view(4, 3)}, folder)
        ...     with tt.open(folder) as checkpoint:
        ...         print(checkpoint.get_slice("w")[1:3, :2].tolist())
        [[3, 4], [6, 7]]
        """
        owner, view = self.find(name)
        return TensorSlice(
            self.store,
            self.entries[owner],
            view,
            self.spec(name),
            f"{self.path}: {name}",
            lambda: self.read_briefly(name),
            self._rows_of,
        )

    def find(self, name: str) -> tuple[str, View | None]:
        """Return the stored owner of ``name``, and the view of ``name`` over it. Raise KeyError."""
        if name in self.entries:
            return name, None
        if name in self._alias:
            return self._alias[name]
        if name in self.flat:
            return self.flat[name], None
        if name in self.faults:
            raise CheckpointError(self.faults[name], name=f"{self.path}: {name}")
        raise KeyError(name)

    def spec(self, name: str) -> WeightSpec:
        """Return the spec of ``name``, without reading it; the scheme of a plain tensor is ``Plain()``."""
        owner, view = self.find(name)
        whole = self.entries[owner].kind
        if view is None:
            return whole
        return whole.replace(shape=view.size, stride=view.stride, dtype=view.dtype)

    def fit(self, name: str, shape: Shape) -> Shape:
        """Return the shape of ``name``; if its format stores none, set it to ``shape`` if this is possible."""
        owner, view = self.find(name)
        if view is None and self._fitting is not None:
            self.entries[owner] = self._fitting.fit(self.entries[owner], shape) or self.entries[owner]
        return self.spec(name).shape

    def is_padding(self, name: str) -> bool:
        """Return whether ``name`` is a tensor that its format adds to those of a model, and is all zeros."""
        return name in self._padding and not bool(self.read_briefly(name).any())

    def nbytes(self, name: str) -> int:
        """Return the number of bytes to read for ``name``."""
        entry = self.entries[self.find(name)[0]]
        return sum(self.store.stored(key).nbytes for key in entry.keys.values())

    # -- reading --------------------------------------------------------------------------------------------------

    def _read_small(self, key: str) -> Tensor:
        """Read a small stored tensor that a format needs to recognise a checkpoint."""
        nbytes = self.store.stored(key).nbytes
        if nbytes > _SMALL:
            raise CheckpointError(f"has {nbytes} bytes, more than a format can need", name=f"{self.path}: {key}")
        return self.store.read(key)

    def read(self, owner: str, *, device: torch.device | str = "cpu", tick: Tick = no_tick) -> Tensor:
        """Read the stored tensor or Weight ``owner`` into new memory on ``device``, with its strides and dtype."""
        return self._read(self.entries[owner], device=device, tick=tick, tie=self._tied.get(owner))

    def _read(
        self, entry: Entry, *, device: torch.device | str = "cpu", tick: Tick = no_tick, tie: Tie | None = None
    ) -> Tensor:
        if entry.spec is None:
            key = entry.keys["tensor"]
            made = allocate(entry.shape, entry.dtype, device, entry.stride, at=self.store.stored(key).start)
            self.store.read_into(key, made, tick)
            return made
        tensors: dict[str, Tensor] = {}
        for role, key in entry.keys.items():
            stored = self.store.stored(key)
            tensors[role] = allocate(stored.shape, stored.dtype, device, at=stored.start)
            self.store.read_into(key, tensors[role], tick)
        return self._unpack(entry, tensors, tie)

    def _unpack(self, entry: Entry, tensors: dict[str, Tensor], tie: Tie | None = None) -> Weight:
        """Return the Weight of ``entry`` from its stored ``tensors``, by role."""
        assert self._format is not None
        assert entry.spec is not None
        try:
            return Weight(self._format.unpack(entry, tensors), entry.spec.replace(tie=tie))
        except TetherError as error:
            raise CheckpointError(error.what, name=f"{self.path}: {next(iter(entry.keys.values()))}") from None

    def read_whole(self, name: str, device: torch.device | str = "cpu", tick: Tick = no_tick) -> Tensor:
        """Read the owner of ``name`` into new memory on ``device``; return the view of it that is ``name``."""
        owner, view = self.find(name)
        return view_of(self.read(owner, device=device, tick=tick), view)

    def read_rows(self, name: str, shape: Shape, start: int, stop: int) -> dict[str, Tensor]:
        """Read the parts of rows ``start:stop`` of the Weight ``name``, whose base is viewed in ``shape``.

        If its format does not allow reading rows, all of it is read. Raises UnsupportedOpError if a block is cut.
        """
        owner, view = self.find(name)
        entry = self.entries[owner]
        assert entry.spec is not None
        row = math.prod(shape[1:])
        first = view.offset // row if view else 0
        return self._rows_of(entry, (math.prod(entry.spec.base) // row, *shape[1:]), first + start, first + stop)

    def _rows_of(self, entry: Entry, shape: Shape, start: int, stop: int) -> dict[str, Tensor]:
        assert entry.spec is not None
        scheme = entry.spec.scheme
        cuts = part_rows(scheme.layout(shape), shape, start, stop)
        if not is_in_parts(entry, self.store.header.tensors):
            cut = self._cut(entry, shape, start, stop)
            if cut is None:
                made = self._read(entry)
                assert isinstance(made, Weight)
            else:
                read = {role: self.store.read_view(entry.keys[role], view) for role, view in cut.views.items()}
                made = self._unpack(cut.entry, read)
                each = shape[0] // entry.spec.base[0]
                shape = ((cut.last - cut.first) * each, *shape[1:])
                start, stop = start - cut.first * each, stop - cut.first * each
                cuts = part_rows(scheme.layout(shape), shape, start, stop)
            parts = view_parts(scheme, dict(made.parts), shape)
            return {role: parts[role] if cut is None else parts[role][cut] for role, cut in cuts.items()}
        return {
            role: self._entries_of(entry.keys[role], scheme.layout(shape)[role].shape, cut)
            for role, cut in cuts.items()
        }

    def _entries_of(self, key: str, shape: Shape, cut: slice | None) -> Tensor:
        """Read the entries ``cut`` along dim 0 of the tensor ``key``, viewed in ``shape``; all for ``None``."""
        stride = contiguous_stride(shape)
        first, size = (0, shape) if cut is None else (cut.start, (cut.stop - cut.start, *shape[1:]))
        return self.store.read_view(
            key, View(self.store.stored(key).dtype, size, stride, first * stride[0] if stride else 0)
        )

    def _cut(self, entry: Entry, shape: Shape, start: int, stop: int) -> Cut | None:
        """Return the cut of ``entry`` that contains rows ``start:stop`` of ``shape``; ``None`` to read all rows."""
        assert entry.spec is not None
        base, tensors = entry.spec.base, self.store.header.tensors
        along = self._format.rows(entry, tensors) if isinstance(self._format, ByRows) else None
        if along is None or not base or not base[0] or shape[0] % base[0]:
            return None
        each = shape[0] // base[0]
        return cut_rows(entry, tensors, along, start // each, -(-stop // each))

    def rows_nbytes(self, name: str, shape: Shape, start: int, stop: int) -> int | None:
        """Return the bytes that ``read_rows`` reads if the format does not store parts; else ``None``."""
        entry = self.entries[self.find(name)[0]]
        assert entry.spec is not None
        if is_in_parts(entry, self.store.header.tensors):
            return None
        cut = self._cut(entry, shape, start, stop)
        return self.nbytes(name) if cut is None else cut.nbytes

    def is_part_equal(self, one: str, other: str, part: str) -> bool:
        """Return whether two Weights have the same bits in ``part``."""
        entries = [self.entries[self.find(name)[0]] for name in (one, other)]
        if all(is_in_parts(entry, self.store.header.tensors) for entry in entries):
            return self.store.is_equal(*(entry.keys[part] for entry in entries))
        made = [self._read(entry) for entry in entries]
        return all(isinstance(m, Weight) for m in made) and same_bits(*(m.parts[part] for m in made))  # type: ignore[attr-defined]

    def read_briefly(self, name: str, tick: Tick = no_tick) -> Tensor:
        """Read ``name`` to the CPU, contiguous if plain, for short use; see ``files.scratch``."""
        owner, view = self.find(name)
        entry = self.entries[owner]
        if entry.spec is None and view is None:
            made = scratch(entry.shape, entry.dtype)
            self.store.read_into(entry.keys["tensor"], made, tick)
            return made
        return view_of(self._read(entry, tick=tick), view)

    def read_into(self, name: str, out: Tensor, tick: Tick = no_tick) -> None:
        """Fill the plain tensor ``out``, of any strides, dtype and device, with the values of ``name``."""
        owner, view = self.find(name)
        entry = self.entries[owner]
        if view is None and entry.spec is None:
            self.store.read_into(entry.keys["tensor"], out, tick)
            return
        values = self.read_whole(name, tick=tick)
        out.detach().copy_(values.dequantize() if isinstance(values, Weight) else values)

    def is_mappable(self, name: str) -> bool:
        """Return whether the file stores ``name`` as in memory: a contiguous tensor, or a Weight in native format."""
        owner, view = self.find(name)
        entry = self.entries[owner]
        as_it_is = view is None and entry.kind.is_contiguous if entry.spec is None else self._format is native
        return as_it_is and all(self.store.file_of(key).is_mappable(key) for key in entry.keys.values())

    def map(self, name: str) -> Tensor:
        """Map ``name``, which must be mappable, to private pages of its file."""
        owner, view = self.find(name)
        entry = self.entries[owner]
        tensors = {role: self.store.file_of(key).map(key) for role, key in entry.keys.items()}
        if entry.spec is None:
            return tensors["tensor"]
        return view_of(Weight(tensors, entry.spec.replace(tie=self._tied.get(owner))), view)

    def whole_key(self, name: str) -> str | None:
        """Return the key of the stored values of ``name``; ``None`` for views and Weights."""
        owner, view = self.find(name)
        entry = self.entries[owner]
        return entry.keys["tensor"] if view is None and entry.spec is None else None

    def is_same(self, one: str, other: str) -> bool:
        """Return whether two names have the same bits, shape and dtype: by their tie, or by comparison."""
        (home, view), (other_home, other_view) = self.find(one), self.find(other)
        if (home, view) == (other_home, other_view):
            return True
        return self._is_equal(self.entries[home], view, self.entries[other_home], other_view)

    def check_copy(self, alias: str) -> None:
        """Raise CheckpointError if the stored copy of ``alias`` differs from the view in its tie."""
        owner, view = self._alias[alias]
        if not self._is_equal(self.entries[owner], view, self.copies[alias], None):
            raise CheckpointError(
                f"its stored copy differs from {owner}, although the record lists it as an alias",
                name=f"{self.path}: {alias}",
                fix="Another tool has edited the file. Save it again with aliases='drop'.",
            )

    def _is_equal(self, one: Entry, view: View | None, other: Entry, other_view: View | None) -> bool:
        if view is None and other_view is None:
            return (one.shape, one.dtype, one.spec, one.keys.keys()) == (
                other.shape,
                other.dtype,
                other.spec,
                other.keys.keys(),
            ) and all(self.store.is_equal(key, other.keys[role]) for role, key in one.keys.items())
        return is_equal(view_of(self._read(one), view), view_of(self._read(other), other_view))

    def close(self) -> None:
        """Close the files: nothing can be read afterwards; tensors already returned stay valid."""
        self._kept.clear()
        self.store.close()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, format={self.format!r}, {len(self)} tensors, {len(self.ties)} ties)"


def open_checkpoint(path: Path | str, *, revision: str | None = None) -> Checkpoint:
    """Open the checkpoint at ``path``: a safetensors or GGUF file, a folder, an index, or a ``torch.save`` file.

    Text like ``"org/name"``, if nothing has that path, is a repository of the Hugging Face Hub at ``revision`` (a
    branch, a tag or a commit), and ``"hf://org/name/x.gguf"`` a file or a folder in one. huggingface_hub downloads the
    necessary files that its cache lacks, but no pickles. The path of a part of a GGUF file, ``x-00001-of-00003.gguf``,
    stands for all parts.

    A ``.pt``, ``.pth`` or ``.bin`` file must contain a state dict, read with ``weights_only=True``; tensors that shared
    storage when they were saved are tied.

    Raises CheckpointError, naming file and key, if a file is absent, damaged or inconsistent.

    >>> import torch, torchtether as tt, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tt.save(torch.nn.Linear(2, 3), folder)
    ...     with tt.open(folder) as checkpoint:
    ...         print(list(checkpoint), checkpoint["weight"].shape)
    ['bias', 'weight'] torch.Size([3, 2])
    """
    return Checkpoint(path, revision=revision)


def _check_owners(ties: tuple[Tie, ...], names: AbstractSet[str], path: str) -> None:
    """Raise CheckpointError for an owner of ``ties`` that is not one of ``names``."""
    for tie in ties:
        if tie.owner not in names:
            what = "the record lists it as the owner of a tie, the checkpoint does not store it"
            raise CheckpointError(what, name=f"{path}: {tie.owner}")
