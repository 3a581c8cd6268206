"""Reading of a part of a stored tensor (rows, columns, one of many experts) without the rest."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, UnsupportedOpError
from ..files import Store
from ..formats import Entry, is_in_parts
from ..geometry.views import Shape, View, contiguous_stride
from ..weights.spec import WeightSpec
from ..weights.weight import Weight

Index = int | slice | EllipsisType
Rows = Callable[[Entry, Shape, int, int], dict[str, Tensor]]
"""A function of (entry, shape, start, stop) that reads the parts of rows of a stored Weight, viewed in the shape."""


class TensorSlice:
    """Read parts of a tensor of a checkpoint by ``[...]``, as from a plain tensor: integers, slices, ``...``.

        piece.shape, piece.dtype    shape and dtype of the whole tensor
        piece[2:5]                  rows, on the CPU, in new memory, contiguous
        piece[:, :8]                columns: rows are read in bounded pieces, and cut

    Elements before the first and after the last requested one are not read.  A quantized tensor can be sliced by whole
    rows, at multiples of the rows that share a block, which gives a ``Weight``. If its format lays out codes
    differently from the native one, all of it is read.
    """

    def __init__(
        self,
        store: Store,
        entry: Entry,
        view: View | None,
        spec: WeightSpec,
        name: str,
        whole: Callable[[], Tensor],
        rows: Rows,
    ) -> None:
        self.name: str = name
        self.shape: Shape = spec.shape
        self.dtype: torch.dtype = spec.dtype
        self._store, self._entry, self._view, self._spec, self._whole = store, entry, view, spec, whole
        self._read_parts = rows

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Tensor:
        entries = self._checked(index if isinstance(index, tuple) else (index,))
        if self._entry.spec is not None and not self._entry.spec.scheme.transparent:
            if is_in_parts(self._entry, self._store.header.tensors):
                return self._rows(entries)
            return self._whole()[entries].clone()
        view = self._view
        if view is None:  # values are stored in row-major order, whatever their strides in memory
            view = View(self.dtype, self.shape, contiguous_stride(self.shape))
        elif self._entry.stride != contiguous_stride(self._entry.shape):  # the alias has strides over that memory
            return self._whole()[entries].clone(memory_format=torch.contiguous_format)
        part = _meta(view.size, view.stride)[entries]
        made = View(view.dtype, tuple(part.shape), tuple(part.stride()), view.offset + int(part.storage_offset()))
        return self._store.read_view(next(iter(self._entry.keys.values())), made)

    def _checked(self, index: tuple[Any, ...]) -> tuple[int | slice, ...]:
        """Return one index or slice per dimension; torch raises IndexError for one out of range."""
        entries: list[int | slice] = []
        for one in index:
            if one is Ellipsis and index.count(Ellipsis) == 1:
                entries += [slice(None)] * (len(self.shape) - len(index) + 1)
            elif isinstance(one, slice):
                entries.append(one)
            elif isinstance(one, (bool, Tensor)) or not hasattr(one, "__index__"):
                raise CheckpointError(
                    f"a {type(one).__name__} is not an index",
                    name=self.name,
                    fix="Give integers, slices, and '...' once.",
                )
            else:
                entries.append(operator.index(one))
        entries += [slice(None)] * (len(self.shape) - len(entries))
        _meta(self.shape, contiguous_stride(self.shape))[tuple(entries)]
        return tuple(entries)

    def _rows(self, entries: tuple[int | slice, ...]) -> Tensor:
        """Read rows of a Weight, as rows of its parts. Raise UnsupportedOpError if a block would be cut."""
        whole, order = self._entry.spec, self._spec.order
        assert whole is not None
        layout = whole.scheme.layout(whole.base)
        start, stop, only = 0, whole.base[0] if whole.base else 1, None
        for dim, one in enumerate(entries):
            size = self.shape[dim]
            first, last, step = one.indices(size) if isinstance(one, slice) else (one % size, one % size + 1, 1)
            if (first, last, step) == (0, size, 1) and isinstance(one, slice):
                if order[dim] == 0:
                    start, stop = 0, size
                continue
            if order[dim] != 0 or step != 1 or (len(order) == 1 and any(p.span > 1 for p in layout.values())):
                raise UnsupportedOpError(
                    f"of a weight in {whole.scheme} only a range of whole rows can be read",
                    name=self.name,
                    fix="Read rows (or the whole), and cut the values: .dequantize().",
                )
            start, stop, only = (first, last, None) if isinstance(one, slice) else (first, last, dim)
        if stop <= start:
            start = stop = 0
        if self._view is not None and self._view.offset:
            row = contiguous_stride(whole.base)[0]
            start, stop = start + self._view.offset // row, stop + self._view.offset // row
        try:
            parts = self._read_parts(self._entry, whole.base, start, stop)
        except UnsupportedOpError as error:
            raise error.named(self.name) from None
        base = (stop - start, *whole.base[1:])
        made = Weight(parts, whole.shaped(base).replace(dtype=self.dtype).permute(order))
        return made if only is None else made.select(only, 0).map(lambda part: part, cut=())  # type: ignore[attr-defined,no-any-return]

    def __repr__(self) -> str:
        return f"TensorSlice({self.name!r}, shape={self.shape}, dtype={self.dtype})"


def _meta(size: Shape, stride: Shape) -> Tensor:
    return torch.empty_strided(size, stride, dtype=torch.uint8, device="meta")
