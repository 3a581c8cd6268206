"""Tensors that are put together from parts of stored ones, as arithmetic on boxes: nothing here holds a value."""

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
"""From the first index to one past the last."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the stored tensor ``key``, and where it lies in a composite one.

    ``box`` has a range per dimension of the stored tensor.  ``dims[t]`` is the stored dimension that is dimension ``t``
    of the composite one, ``None`` where that is a new one of size 1; a stored dimension that is named nowhere has one
    index.  ``at[t]`` is where the box begins.

    With ``heads`` the box is one of the stored tensor after ``in_halves(heads)`` has put the indices of its dimension
    ``dim``, its rows, in another order.
    """

    key: str
    box: tuple[Range, ...]
    dims: tuple[int | None, ...]
    at: Shape
    heads: int = 0
    dim: int = 0

    @property
    def size(self) -> Shape:
        """Return the sizes of the box, as the composite tensor sees it."""
        ranges = [(0, 1) if dim is None else self.box[dim] for dim in self.dims]
        return tuple(stop - start for start, stop in ranges)

    @property
    def numel(self) -> int:
        return math.prod(stop - start for start, stop in self.box)


@dataclass(frozen=True, slots=True)
class CompositeTensor:
    """A tensor made of pieces that cover it, each element once; or, with ``lacks`` or ``wrong``, why there is none.

    ``keys`` are the names in the checkpoint that it comes from.
    """

    shape: Shape
    dtype: torch.dtype
    scheme: Scheme
    pieces: tuple[Piece, ...]
    keys: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    """What the checkpoint would need to have."""
    wrong: tuple[str, ...] = ()
    """What does not fit together."""
    is_stored: bool = False
    """Whether it is a stored tensor as it is, which no rule has cut, joined or transposed."""

    @property
    def is_broken(self) -> bool:
        return bool(self.lacks or self.wrong)


def whole(key: str, spec: WeightSpec) -> CompositeTensor:
    """Return the stored tensor ``key`` as it is."""
    shape = tuple(spec.shape)
    return CompositeTensor(shape, spec.dtype, spec.scheme, (Piece(key, *_frame(shape)),), (key,), is_stored=True)


@lru_cache(maxsize=4096)
def _frame(shape: Shape) -> tuple[tuple[Range, ...], Shape, Shape]:
    """Return ``box``, ``dims`` and ``at`` of all of a tensor, cached: thousands of tensors have a few shapes."""
    rank = len(shape)
    return tuple((0, size) for size in shape), tuple(range(rank)), (0,) * rank


def concatenated(given: Sequence[CompositeTensor], dim: int) -> CompositeTensor:
    """Return ``torch.cat(given, dim)``; sizes, dtypes and schemes fit."""
    pieces, offset = [], 0
    for one in given:
        pieces += [replace(piece, at=_set(piece.at, dim, piece.at[dim] + offset)) for piece in one.pieces]
        offset += one.shape[dim]
    return replace(
        given[0], is_stored=False, shape=_set(given[0].shape, dim, offset), pieces=tuple(pieces), keys=keys_of(given)
    )


def stacked(given: Sequence[CompositeTensor], dim: int) -> CompositeTensor:
    """Return ``torch.stack(given, dim)``; shapes, dtypes and schemes are equal."""
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
    """Return ``given.narrow(dim, start, stop - start)``: only the pieces that reach in there, cut."""
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
    """Return ``given``, whose pieces are whole heads of the stored tensors' dimension ``dim``, after ``in_halves``.

    ``heads`` counts those of a stored tensor.
    """
    pieces = tuple(replace(piece, heads=heads, dim=dim) for piece in given.pieces)
    return replace(given, is_stored=False, pieces=pieces)


def in_halves(rows: int, heads: int) -> torch.Tensor:
    """Return the order of ``rows`` rows in which the pairs of each head are two halves: even rows, then odd.

    With negative ``heads`` it is the inverse.

    >>> in_halves(8, 2).tolist(), in_halves(8, -2).tolist()
    ([0, 2, 1, 3, 4, 6, 5, 7], [0, 2, 1, 3, 4, 6, 5, 7])
    >>> in_halves(6, 1).tolist()
    [0, 2, 4, 1, 3, 5]
    """
    pairs = (heads, -1, 2) if heads > 0 else (-heads, 2, -1)
    return torch.arange(rows, device="cpu").view(pairs).transpose(1, 2).reshape(-1)


def keys_of(given: Sequence[CompositeTensor]) -> tuple[str, ...]:
    """Return all their keys, each once."""
    return tuple(dict.fromkeys(key for one in given for key in one.keys))


def _set(values: tuple, index: int, value: object) -> tuple:
    return (*values[:index], value, *values[index + 1 :])


def _insert(values: tuple, index: int, value: object) -> tuple:
    return (*values[:index], value, *values[index:])


def _remove(values: tuple, index: int) -> tuple:
    return (*values[:index], *values[index + 1 :])
