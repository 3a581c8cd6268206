"""Select the box of each stored tensor that holds some rows of a weight, so that they are read without the others.

A format gives, for each tensor, the dimension along which the rows lie (``Along``). It then unpacks the boxes as a
weight of those rows alone.
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
    """Describe a format whose weights can be read and unpacked by rows."""

    def rows(self, entry: Entry, tensors: Mapping[str, Stored]) -> Mapping[str, Along] | None:
        """Return where the rows lie in each tensor of ``entry``, by role; ``None`` if they cannot be separated.

        A tensor without an ``Along`` is needed whole. ``unpack`` gets the option ``rows``: the index of the first row
        that it unpacks, and the number of all rows.
        """


@dataclass(frozen=True)
class Cut:
    """Describe rows ``first:last`` of a stored weight: their entry, and a view of each stored tensor, by role."""

    first: int
    last: int
    entry: Entry
    views: Mapping[str, View]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all views."""
        return sum(math.prod(view.size) * view.dtype.itemsize for view in self.views.values())


def all_along(entry: Entry, tensors: Mapping[str, Stored], **known: Along) -> dict[str, Along] | None:
    """Return where rows lie if every tensor has them along dim 0, except as in ``known``; else ``None``.

    Parts that all rows share, such as a scale for all, are left out.
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
    """Return the smallest range of rows that contains ``start:stop`` and can be read alone; at least one row."""
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
