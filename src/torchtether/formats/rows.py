"""Some rows of a weight without the others: which box of each stored tensor has them, whatever the order of its codes.

A format says along what its tensors have the rows (``Along``).  What it then unpacks is a weight of those rows alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..files import Stored
from ..geometry.views import Shape, View, contiguous_stride
from .entry import Entry


@dataclass(frozen=True)
class Along:
    """The rows of a weight lie along ``dim`` of a stored tensor, ``rows`` of them in ``count`` indices."""

    dim: int = 0
    count: int = 1
    rows: int = 1

    @property
    def multiple(self) -> int:
        """Return the smallest number of rows that share no index with others."""
        return self.rows // math.gcd(self.count, self.rows)


@runtime_checkable
class ByRows(Protocol):
    """Describe a format of which some rows of a weight can be read and unpacked alone."""

    def rows(self, entry: Entry, tensors: Mapping[str, Stored]) -> Mapping[str, Along] | None:
        """Return where the tensors of ``entry`` have its rows, by role; ``None`` if rows cannot be told apart.

        Tensors that are left out are needed whole. ``unpack`` finds under the option ``rows`` the first of the rows
        that it is given, and how many there were.
        """


@dataclass(frozen=True)
class Cut:
    """Describe rows ``first:last`` of a stored weight: ``entry`` is of these rows, ``views`` say where they are."""

    first: int
    last: int
    entry: Entry
    views: Mapping[str, View]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all of it."""
        return sum(math.prod(view.size) * view.dtype.itemsize for view in self.views.values())


def all_along(entry: Entry, tensors: Mapping[str, Stored], **known: Along) -> dict[str, Along] | None:
    """Return where tensors of ``entry`` have its rows: as dim 0, or as in ``known``, but for parts that all rows need.

    ``None`` if one has them elsewhere.
    """
    assert entry.spec is not None
    base = entry.spec.base
    layout, found = entry.spec.scheme.layout(base), dict(known)
    for role, key in entry.keys.items():
        shape = tensors[key].shape
        if role in known or (role in layout and layout[role].span == 0):
            continue
        if not shape or shape[0] != base[0]:
            return None
        found[role] = Along()
    return found


def cut_rows(entry: Entry, tensors: Mapping[str, Stored], along: Mapping[str, Along], start: int, stop: int) -> Cut:
    """Return the fewest rows that have ``start:stop`` among them and can be read alone; at least one."""
    assert entry.spec is not None
    spec, total = entry.spec, entry.spec.base[0]
    multiple = math.lcm(*(one.multiple for one in along.values()))
    first = min(start, total - 1) // multiple * multiple
    last = min(-(-max(stop, first + 1) // multiple) * multiple, total)
    base = (last - first, *spec.base[1:])
    mine = spec.shaped(base, tie=spec.tie).permute(spec.order)
    options = {**entry.options, "rows": (first, total)}
    made = entry._replace(shape=mine.shape, stride=mine.stride, spec=mine, options=options)
    views = {}
    for role, key in entry.keys.items():
        stored = tensors[key]
        views[role] = _view(stored, along.get(role), first, last)
    return Cut(first, last, made, views)


def _view(stored: Stored, along: Along | None, first: int, last: int) -> View:
    shape: Shape = tuple(stored.shape)
    stride = contiguous_stride(shape)
    if along is None:
        return View(stored.dtype, shape, stride)
    dim = along.dim
    begin, end = first * along.count // along.rows, min(-(-last * along.count // along.rows), shape[dim])
    return View(stored.dtype, (*shape[:dim], end - begin, *shape[dim + 1 :]), stride, begin * stride[dim])
