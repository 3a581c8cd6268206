"""Composite tensors, which consist of boxes of stored ones: arithmetic on boxes, without values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ..geometry.views import Shape
from ..schemes import Scheme
from ..weights.spec import WeightSpec

Range = tuple[int, int]
"""The first index, and one past the last."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the stored tensor ``key``, and its position in a composite tensor.

    ``box`` has a range per dimension of the stored tensor.  ``dims[t]`` is the stored dimension that becomes dimension
    ``t`` of the composite tensor, or ``None`` for a new dimension of size 1; the box has size 1 along a stored
    dimension that is not in ``dims``.  ``at[t]`` is the index at which the box begins in the composite tensor.

    With ``heads``, the box refers to the stored tensor with the indices of its dimension ``dim`` reordered by
    ``in_halves(heads)``. ``plus`` is added to each value.
    """

    key: str
    box: tuple[Range, ...]
    dims: tuple[int | None, ...]
    at: Shape
    heads: int = 0
    dim: int = 0
    plus: float = 0.0

    @property
    def is_cut(self) -> bool:
        """Return whether the box is just a part of the stored tensor, or all of it, unchanged."""
        return not self.heads and not self.plus

    @property
    def size(self) -> Shape:
        """Return the sizes of the box in the dimensions of the composite tensor."""
        ranges = [(0, 1) if dim is None else self.box[dim] for dim in self.dims]
        return tuple(stop - start for start, stop in ranges)

    @property
    def numel(self) -> int:
        return math.prod(stop - start for start, stop in self.box)


@dataclass(frozen=True, slots=True)
class CompositeTensor:
    """A tensor made of pieces that cover each element once; or, with ``lacks`` or ``wrong``, a broken one.

    ``keys`` are the names of its stored tensors in the checkpoint.
    """

    shape: Shape
    dtype: torch.dtype
    scheme: Scheme
    pieces: tuple[Piece, ...]
    keys: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    """Faults about tensors that the checkpoint lacks."""
    wrong: tuple[str, ...] = ()
    """Faults about tensors that do not fit together."""
    is_stored: bool = False
    """Whether it is an unchanged stored tensor: no rule has cut, joined or reordered it."""

    @property
    def is_broken(self) -> bool:
        return bool(self.lacks or self.wrong)


def whole(key: str, spec: WeightSpec) -> CompositeTensor:
    """Return the whole stored tensor ``key`` as a composite tensor."""
    shape = tuple(spec.shape)
    return CompositeTensor(shape, spec.dtype, spec.scheme, (Piece(key, *_frame(shape)),), (key,), is_stored=True)


@lru_cache(maxsize=4096)
def _frame(shape: Shape) -> tuple[tuple[Range, ...], Shape, Shape]:
    """Return ``box``, ``dims`` and ``at`` of a whole tensor; cached, because thousands of tensors have a few shapes."""
    rank = len(shape)
    return tuple((0, size) for size in shape), tuple(range(rank)), (0,) * rank


def concatenated(given: Sequence[CompositeTensor], dim: int) -> CompositeTensor:
    """Return ``torch.cat(given, dim)``; sizes, dtypes and schemes must fit."""
    pieces, offset = [], 0
    for one in given:
        pieces += [replace(piece, at=_set(piece.at, dim, piece.at[dim] + offset)) for piece in one.pieces]
        offset += one.shape[dim]
    return replace(
        given[0], is_stored=False, shape=_set(given[0].shape, dim, offset), pieces=tuple(pieces), keys=keys_of(given)
    )


def stacked(given: Sequence[CompositeTensor], dim: int) -> CompositeTensor:
    """Return ``torch.stack(given, dim)``; shapes, dtypes and schemes must be equal."""
    pieces = [
        replace(piece, dims=_insert(piece.dims, dim, None), at=_insert(piece.at, dim, i))
        for i, one in enumerate(given)
        for piece in one.pieces
    ]
    shape = _insert(given[0].shape, dim, len(given))
    return replace(given[0], is_stored=False, shape=shape, pieces=tuple(pieces), keys=keys_of(given))


def transposed(given: CompositeTensor, dim0: int, dim1: int) -> CompositeTensor:
    """Return ``given.transpose(dim0, dim1)``.

    >>> from torchtether.schemes import Plain
    >>> transposed(whole("w", WeightSpec.of((2, 3), torch.float32, Plain())), 0, 1).shape
    (3, 2)
    """
    order = list(range(len(given.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    pieces = [
        replace(piece, dims=tuple(piece.dims[d] for d in order), at=tuple(piece.at[d] for d in order))
        for piece in given.pieces
    ]
    return replace(given, is_stored=False, shape=tuple(given.shape[d] for d in order), pieces=tuple(pieces))


def narrowed(given: CompositeTensor, dim: int, start: int, stop: int) -> CompositeTensor:
    """Return ``given.narrow(dim, start, stop - start)``: the pieces that overlap the range, cut to it."""
    pieces = []
    for piece in given.pieces:
        at = piece.at[dim]
        first, last = max(start, at), min(stop, at + piece.size[dim])
        if first >= last:
            continue
        box, stored = piece.box, piece.dims[dim]
        if stored is not None:
            begin = box[stored][0]
            box = _set(box, stored, (begin + first - at, begin + last - at))
        pieces.append(replace(piece, box=box, at=_set(piece.at, dim, first - start)))
    return replace(given, is_stored=False, shape=_set(given.shape, dim, stop - start), pieces=tuple(pieces))


def selected(given: CompositeTensor, dim: int, index: int) -> CompositeTensor:
    """Return ``given.select(dim, index)``."""
    one = narrowed(given, dim, index, index + 1)
    pieces = [replace(piece, dims=_remove(piece.dims, dim), at=_remove(piece.at, dim)) for piece in one.pieces]
    return replace(one, shape=_remove(one.shape, dim), pieces=tuple(pieces))


def reordered(given: CompositeTensor, heads: int, dim: int = 0) -> CompositeTensor:
    """Return ``given`` with the indices of the stored dimension ``dim`` reordered by ``in_halves``.

    Each piece has whole heads along ``dim``. ``heads`` is the number of heads of a stored tensor.
    """
    pieces = tuple(replace(piece, heads=heads, dim=dim) for piece in given.pieces)
    return replace(given, is_stored=False, pieces=pieces)


def increased(given: CompositeTensor, plus: float) -> CompositeTensor:
    """Return ``given + plus``; it must be plain."""
    pieces = tuple(replace(piece, plus=piece.plus + plus) for piece in given.pieces)
    return replace(given, is_stored=False, pieces=pieces)


def in_halves(rows: int, heads: int) -> torch.Tensor:
    """Return the order of ``rows`` rows that turns the pairs of each head into two halves: even rows, then odd.

    Negative ``heads`` give the inverse.

    >>> in_halves(8, 2).tolist(), in_halves(8, -2).tolist()
    ([0, 2, 1, 3, 4, 6, 5, 7], [0, 2, 1, 3, 4, 6, 5, 7])
    >>> in_halves(6, 1).tolist()
    [0, 2, 4, 1, 3, 5]
    """
    pairs = (heads, -1, 2) if heads > 0 else (-heads, 2, -1)
    return torch.arange(rows, device="cpu").view(pairs).transpose(1, 2).reshape(-1)


def keys_of(given: Sequence[CompositeTensor]) -> tuple[str, ...]:
    """Return the keys of all ``given`` tensors, each once."""
    return tuple(dict.fromkeys(key for one in given for key in one.keys))


def _set(values: tuple, index: int, value: object) -> tuple:
    return (*values[:index], value, *values[index + 1 :])


def _insert(values: tuple, index: int, value: object) -> tuple:
    return (*values[:index], value, *values[index:])


def _remove(values: tuple, index: int) -> tuple:
    return (*values[:index], *values[index + 1 :])
