"""A checkpoint under the names of a model, with its tensors joined, cut and reordered by the rename rules."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..checkpoint.aliases import is_equal
from ..checkpoint.reader import Checkpoint
from ..errors import UnsupportedOpError
from ..files import scratch
from ..formats import Entry
from ..geometry.blocks import MemoryBlock
from ..geometry.views import Shape, View, extent
from ..progress import Tick, no_tick
from ..schemes import Plain
from ..weights.spec import WeightSpec
from ..weights.weight import Weight
from .named_tensors import NamedTensor
from .pieces import CompositeTensor, Piece, Range, in_halves, narrowed, whole
from .quantized_rows import RowPlan, plan_rows
from .steps import Rename, renamed

_PIECE = 4 * 2**20  # bytes per read of a piece that is not a whole tensor


class RenamedCheckpoint(Mapping[str, CompositeTensor]):
    """A checkpoint under the names of a model, with the reading methods of ``Checkpoint``.

        renamed[name]      the boxes of stored tensors that make up ``name``
        renamed.broken     tensors that the rules cannot compose, because a piece is missing or does not fit
        renamed.faults     faults of the rules themselves

    A tensor that is only renamed is read by the checkpoint. Composite plain tensors are read piece by piece, directly
    into place; composite Weights get copies of entries of stored parts, without decoding.
    """

    def __init__(self, checkpoint: Checkpoint, rename: Rename = None) -> None:
        self.checkpoint = checkpoint
        self._entries: Mapping[str, Entry] = checkpoint.entries
        listed = list(checkpoint)
        names = set(listed)
        hidden = [key for key in checkpoint.flat if key not in names]
        self.faults: list[str] = []
        self.broken: dict[str, CompositeTensor] = {}
        self._made: dict[str, CompositeTensor] = _AsStored(checkpoint)
        self._row_plans: dict[str, RowPlan] = {}
        self._keys: dict[str, str | None] = {key: key for key in (*listed, *hidden)}
        """The key in the checkpoint by name; ``None`` for a composite tensor."""
        self.listed: set[str] = names
        """Names that are unexpected if the model lacks them."""
        if rename is not None:
            self._rename(listed, hidden, rename)

    def _rename(self, listed: list[str], hidden: list[str], rename: Rename) -> None:
        stored = {key: self._made[key] for key in self._keys}
        every = [NamedTensor(key, stored[key], True) for key in listed] + [
            NamedTensor(key, stored[key], False) for key in hidden
        ]
        named, self.faults = renamed(every, rename)
        self.broken = {one.name: one.tensor for one in named if one.tensor.is_broken and one.listed}
        self._made = {}
        self._keys = {}
        self.listed = set()
        for one in sorted(named, key=lambda one: not one.listed):
            if one.tensor.is_broken:
                continue
            if one.name not in self._made:
                self._made[one.name] = one.tensor
                self._keys[one.name] = _key(one.tensor, stored)
                self.listed.update([one.name] if one.listed else [])
            elif one.listed:
                first, second = (" with ".join(keys) for keys in (self._made[one.name].keys, one.tensor.keys))
                self.faults.append(f"{one.name}: the checkpoint's {first} and {second} are both renamed to it")

    # -- names and specs ------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> CompositeTensor:
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, name: object) -> bool:
        return name in self._keys

    def keys_of(self, name: str) -> tuple[str, ...]:
        """Return the keys in the checkpoint from which ``name`` is composed."""
        key = self._keys[name]
        return self._made[name].keys if key is None else (key,)

    def is_as_it_is(self, name: str) -> bool:
        """Return whether ``name`` is an unchanged stored tensor, perhaps renamed."""
        return self._keys[name] is not None

    def stored(self, name: str) -> Entry | None:
        """Return the entry of ``name`` if it is an unchanged plain tensor and not an alias; else ``None``."""
        entry = self._entries.get(self._keys.get(name))  # type: ignore[arg-type]  # no entry has the key None
        return entry if entry is not None and entry.spec is None else None

    def cut(self, boxes: Mapping[str, Sequence[Range]]) -> RenamedCheckpoint:
        """Return this checkpoint with each name in ``boxes`` cut to that box: (start, stop) by dimension.

        Only the values in a box are read. Weights can be cut at multiples of the rows that share a block; ``check``
        raises for other cuts.
        """
        made = copy.copy(self)
        made._made, made._keys, made._row_plans = copy.copy(self._made), dict(self._keys), {}
        for name, box in boxes.items():
            key, one = self._keys[name], self._made[name]
            if key is not None:
                one = whole(key, self.checkpoint.spec(key))  # ``fit`` may have set its shape since
            if tuple(box) != tuple((0, size) for size in one.shape):
                for dim, (start, stop) in enumerate(box):
                    one = narrowed(one, dim, start, stop)
                made._made[name], made._keys[name] = one, None
        return made

    def rows_in(self, name: str) -> tuple[str, int | None] | None:
        """Return (key, ``None``) of a stored tensor ``name``, (key, first row) if it is rows of one; else ``None``."""
        key = self._keys[name]
        if key is not None:
            found = self.checkpoint.whole_key(key)
            return None if found is None else (found, None)
        made = self._made[name]
        if len(made.pieces) != 1 or not made.shape or 0 in made.shape:
            return None
        (piece,) = made.pieces
        found, spec = self.checkpoint.whole_key(piece.key), self.checkpoint.spec(piece.key)
        is_rows = piece.dims == tuple(range(len(spec.shape))) and piece.is_cut
        if found is None or not is_rows or piece.box[1:] != tuple((0, size) for size in spec.shape[1:]):
            return None
        return found, piece.box[0][0]

    def fit(self, name: str, shape: Shape) -> Shape:
        """Return the shape of ``name``; if the file stores none, set it to ``shape`` if this is possible."""
        key = self._keys[name]
        return self.spec(name).shape if key is None else self.checkpoint.fit(key, shape)

    def spec(self, name: str) -> WeightSpec:
        """Return the spec of ``name``, without reading it; the scheme of a plain tensor is ``Plain()``."""
        key = self._keys[name]
        if key is not None:
            return self.checkpoint.spec(key)
        made = self._made[name]
        if made.scheme.transparent:
            return WeightSpec.of(made.shape, made.dtype, Plain())
        try:
            return self._row_plan(name).spec
        except UnsupportedOpError:
            return WeightSpec.of(made.shape, made.dtype, made.scheme)

    def is_weight(self, name: str) -> bool:
        """Return whether ``name`` is stored as a Weight."""
        key = self._keys[name]
        if key is not None:
            return self.checkpoint.entries[self.checkpoint.find(key)[0]].spec is not None
        return not self._made[name].scheme.transparent

    def check(self, name: str) -> None:
        """Raise UnsupportedOpError if the Weights that make up ``name`` cannot be cut or joined as stored."""
        if self._keys[name] is not None:
            return
        made = self._made[name]
        if not made.scheme.transparent and (made.pieces or not made.shape):
            self._row_plan(name).check(self.checkpoint)

    def nbytes(self, name: str) -> int:
        """Return the number of bytes to read for ``name``."""
        key = self._keys[name]
        if key is not None:
            return self.checkpoint.nbytes(key)
        made = self._made[name]
        if not made.scheme.transparent:
            if 0 in made.shape:
                key = made.keys[0]
                return self.checkpoint.rows_nbytes(key, self.checkpoint.spec(key).base, 0, 0) or 0
            return self._row_plan(name).count(self.checkpoint)
        return sum(
            self.checkpoint.nbytes(piece.key) if self._is_whole(piece) else piece.numel * made.dtype.itemsize
            for piece in made.pieces
        )

    def _is_whole(self, piece: Piece) -> bool:
        return piece.is_cut and piece.box == tuple((0, size) for size in self.checkpoint.spec(piece.key).shape)

    def _row_plan(self, name: str) -> RowPlan:
        if name not in self._row_plans:
            self._row_plans[name] = plan_rows(self._made[name], self.checkpoint)
        return self._row_plans[name]

    # -- places in the file ---------------------------------------------------------------------------------------

    def find(self, name: str) -> tuple[Hashable, View | None]:
        """Return the stored tensor of ``name`` and its view of it; for several pieces, itself and ``None``."""
        key = self._keys[name]
        if key is not None:
            return self.checkpoint.find(key)
        made = self._made[name]
        return self._place(made.pieces[0]) if len(made.pieces) == 1 else (made, None)

    def _place(self, piece: Piece) -> tuple[Hashable, View]:
        """Return the stored tensor of ``piece``, and its view of it in the form of a tie record.

        A stored tensor with reordered rows or other values counts as a different tensor.
        """
        home: Hashable
        home, view = self.checkpoint.find(piece.key)
        home = home if piece.is_cut else (home, piece.heads, piece.dim, piece.plus)
        spec = self.checkpoint.spec(piece.key)
        offset = view.offset if view else 0
        for (start, _), step in zip(piece.box, spec.stride, strict=True):
            offset += start * step
        stride = tuple(1 if dim is None else spec.stride[dim] for dim in piece.dims)
        return home, View(spec.dtype, piece.size, stride, offset)

    def shares(self, one: str, other: str) -> bool:
        """Return whether the two names have a stored element in common."""
        return any(mine.overlaps(theirs) for mine in self._blocks(one) for theirs in self._blocks(other))

    def _blocks(self, name: str) -> list[MemoryBlock]:
        blocks = []
        for piece in self._made[name].pieces:
            home, view = self._place(piece)
            item = view.dtype.itemsize
            start = view.offset * item
            stop = start + extent(view.size, view.stride) * item
            blocks.append(MemoryBlock(home, start, stop, view.size, view.stride, item))
        return blocks

    def tied(self) -> Iterator[list[str]]:
        """Yield, for each tie that the file records, the names of the tied tensors in the model."""
        groups = [list(tie.names) for tie in self.checkpoint.ties]
        groups += [[owner, alias] for alias, owner in self.checkpoint.flat.items()]
        if not groups:
            return
        users: dict[str, list[str]] = {}
        for name in self._keys:
            for key in self.keys_of(name):
                users.setdefault(key, []).append(name)
        for keys in groups:
            yield list(dict.fromkeys(name for key in keys for name in users.get(key, ())))

    def is_mappable(self, name: str) -> bool:
        """Return whether a file stores ``name`` in the form that it has in memory; see ``Checkpoint``."""
        key = self._keys[name]
        return key is not None and self.checkpoint.is_mappable(key)

    def map(self, name: str) -> Tensor:
        """Map ``name``, which must be mappable, to private pages of its file."""
        key = self._keys[name]
        assert key is not None
        return self.checkpoint.map(key)

    # -- reading --------------------------------------------------------------------------------------------------

    def read_weight(self, name: str, *, device: torch.device | str = "cpu", tick: Tick = no_tick) -> Weight:
        """Read ``name``, which must be stored as a Weight, into new memory on ``device``."""
        key = self._keys[name]
        if key is None:
            made = self._made[name]
            if 0 in made.shape and not made.pieces:
                return self._rowless(made, device)
            return self._row_plan(name).read(self.checkpoint, device, tick)
        weight = self.checkpoint.read_whole(key, device, tick)
        assert isinstance(weight, Weight)
        return weight

    def _rowless(self, made: CompositeTensor, device: torch.device | str) -> Weight:
        """Return a Weight without rows; it still has the parts that all rows share."""
        scheme, key = made.scheme, made.keys[0]
        parts, layout = scheme.empty(made.shape, made.dtype, device), scheme.layout(made.shape)
        given = self.checkpoint.read_rows(key, self.checkpoint.spec(key).base, 0, 0)
        for role in (
            role for role, part in layout.items() if part.span == 0 and part.shape == tuple(given[role].shape)
        ):
            parts[role].copy_(given[role])
        return Weight(parts, WeightSpec.of(made.shape, made.dtype, scheme))

    def read_briefly(self, name: str, tick: Tick = no_tick) -> Tensor:
        """Return the values of ``name`` on the CPU, for short use; see ``Checkpoint.read_briefly``."""
        key = self._keys[name]
        if key is not None:
            return self.checkpoint.read_briefly(key, tick)
        made = self._made[name]
        if not made.scheme.transparent:
            return self.read_weight(name, tick=tick)
        values = scratch(made.shape, made.dtype)
        self.read_into(name, values, tick)
        return values

    def read_into(self, name: str, out: Tensor, tick: Tick = no_tick) -> None:
        """Fill the plain tensor ``out``, of any strides, dtype and device, with the values of ``name``."""
        key = self._keys[name]
        if key is not None:
            self.checkpoint.read_into(key, out, tick)
        elif not self._made[name].scheme.transparent:
            out.detach().copy_(self.read_weight(name, tick=tick).dequantize())
        else:
            for piece in self._made[name].pieces:
                self._read_piece(piece, _laid(out.detach(), piece), tick)

    def _read_piece(self, piece: Piece, place: Tensor, tick: Tick) -> None:
        if self._is_whole(piece):
            self.checkpoint.read_into(piece.key, place, tick)
            return
        if piece.heads:
            whole_one = self.checkpoint.read_briefly(piece.key, tick)
            start, stop = piece.box[piece.dim]
            rest = (slice(*range_) if i != piece.dim else slice(None) for i, range_ in enumerate(piece.box))
            order = in_halves(whole_one.shape[piece.dim], piece.heads)[start:stop]
            made = whole_one[tuple(rest)].index_select(piece.dim, order)
            place.copy_(_plus(made, piece.plus))
            return
        source, itemsize = self.checkpoint.get_slice(piece.key), self.checkpoint.spec(piece.key).dtype.itemsize
        for box in _bounded(piece.box, _PIECE // itemsize):
            given = source[tuple(slice(*range_) for range_ in box)]
            inner = tuple(
                slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, piece.box, strict=True)
            )
            place[inner].copy_(_plus(given, piece.plus))
            tick(given.nbytes)

    def is_same(self, one: str, other: str) -> bool:
        """Return whether two names hold the same bits in the same shape and dtype."""
        key, other_key = self._keys[one], self._keys[other]
        if key is not None and other_key is not None:
            return self.checkpoint.is_same(key, other_key)
        kind, other_kind = (self.spec(name).replace(tie=None) for name in (one, other))
        if (kind.shape, kind.dtype, kind.scheme) != (other_kind.shape, other_kind.dtype, other_kind.scheme):
            return False
        return self.find(one) == self.find(other) or is_equal(self.read_briefly(one), self.read_briefly(other))


class _AsStored(dict[str, CompositeTensor]):
    """Unchanged stored tensors by key, each made at its first use."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self._checkpoint = checkpoint

    def __missing__(self, key: str) -> CompositeTensor:
        made = self[key] = whole(key, self._checkpoint.spec(key))
        return made


def _key(made: CompositeTensor, stored: Mapping[str, CompositeTensor]) -> str | None:
    """Return the key of the stored tensor that ``made`` equals as a whole; ``None`` if there is none."""
    if len(made.pieces) != 1:
        return None
    given = stored[made.pieces[0].key]
    return given.keys[0] if made is given or made.pieces == given.pieces else None


def _plus(values: Tensor, plus: float) -> Tensor:
    """Return ``values + plus``, with the precision of float32 or more."""
    return values.to(torch.promote_types(values.dtype, torch.float32)) + plus if plus else values


def _laid(out: Tensor, piece: Piece) -> Tensor:
    """Return the view of ``out`` that ``piece`` fills, with the dimensions of the stored tensor."""
    for dim, (start, size) in enumerate(zip(piece.at, piece.size, strict=True)):
        out = out.narrow(dim, start, size)
    for dim in reversed(range(len(piece.dims))):
        if piece.dims[dim] is None:
            out = out.select(dim, 0)
    kept = [dim for dim in piece.dims if dim is not None]
    out = out.permute([kept.index(dim) for dim in sorted(kept)])
    for dim in range(len(piece.box)):
        if dim not in kept:
            out = out.unsqueeze(dim)
    return out


def _bounded(box: tuple[tuple[int, int], ...], limit: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield boxes of at most ``limit`` elements that make up ``box``, in storage order."""
    count = 1
    for start, stop in box:
        count *= stop - start
    dim = next((dim for dim, (start, stop) in enumerate(box) if stop - start > 1), None)
    if count <= limit or dim is None:
        if count:
            yield box
        return
    start, stop = box[dim]
    step = max(1, limit // (count // (stop - start)))
    for at in range(start, stop, step):
        yield from _bounded((*box[:dim], (at, min(at + step, stop)), *box[dim + 1 :]), limit)
