"""A scheme that wraps another and adds a scale per column, to balance rows and columns before rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._checks import describe
from ..errors import SchemeError
from ..geometry.views import Shape
from . import blocks
from .blocked import Blocked
from .blocks import check_finite, pieces, rows, source
from .looking import is_true
from .scales import TINY
from .scheme import Part, Parts, Scheme, row_unit

COLUMNS = "column_scale"
"""The part that holds the scales of the columns."""

ROUNDS = 4
"""How often rows and columns are balanced in turn; more rounds change a scale by less than a thousandth."""

_MOST = 64.0  # the largest column scale; its inverse is the smallest


@dataclass(frozen=True)
class ColumnScaled(Scheme):
    """Hold a matrix as one of ``scheme`` whose columns are multiplied by scales: ``w ≈ scheme's value * column_scale``.

        the parts of ``scheme``
        column_scale (*shape[:-2], K) float32    one row per matrix; every row of the matrix needs it

    The scales balance the values before ``scheme`` rounds them: among the columns that share a scale of ``scheme``,
    rows and columns are divided in turn by their root mean squares until these are alike (Sinkhorn's iteration).  A
    column of small weights, which often meets large inputs in language models, is then rounded in small steps.  No data
    is needed.  The scales of ``scheme`` contain the divisors of the rows.

    Products multiply their inputs by ``column_scale`` and go on as ``scheme`` does.  In-place ops keep the column
    scales and encode the parts of ``scheme`` again.  ``tt.sinq()`` is such a scheme for integers.

    Error: that of ``scheme`` times the column scale, plus two roundings of float32.

    Source: SINQ, Sinkhorn-normalized quantization (arXiv 2509.22944); its measure is the standard deviation.

    >>> from torchtether.schemes import Affine
    >>> parts = ColumnScaled(Affine(bits=4)).encode(torch.tensor([[8.0, 1.0], [8.0, -1.0]]))
    >>> parts["column_scale"].tolist(), parts["qdata"].shape
    ([2.8284270763397217, 0.3535533845424652], torch.Size([2, 1]))
    """

    kind: ClassVar[str] = "column_scaled"

    scheme: Scheme

    def __post_init__(self) -> None:
        inner = self.scheme
        if (
            not isinstance(inner, Scheme)
            or inner.transparent
            or inner.decoder is not inner
            or not hasattr(inner, "kind")
        ):
            got = str(inner) if isinstance(inner, Scheme) else describe(inner)
            fix = "Give one such as tt.int4(); a master goes around it."
            raise SchemeError(f"needs a scheme of codes, got {got}", name="ColumnScaled", fix=fix)
        if isinstance(inner, ColumnScaled):
            raise SchemeError(f"columns have one scale, got {inner}", name="ColumnScaled", fix="Give what is in it.")

    def _as_class(self) -> str:
        return f"ColumnScaled({self.scheme})"

    # -- the interface ------------------------------------------------------------------------------------------

    def layout(self, shape: Shape) -> dict[str, Part]:
        if len(shape) < 2:
            fix = "Use the scheme without column scales."
            raise SchemeError(f"column scales need at least 2 dimensions, got shape {tuple(shape)}", fix=fix)
        parts = self.scheme.layout(shape)
        if COLUMNS in parts:
            raise SchemeError(f"{type(self.scheme).__name__} has a part {COLUMNS!r} of its own")
        span = math.prod(shape[1:]) if len(shape) > 2 else 0
        return {**parts, COLUMNS: Part((*shape[:-2], shape[-1]), torch.float32, span)}

    def empty(self, shape: Shape, dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
        """Return uninitialised parts with column scales of 0, which ``reencode`` does not keep."""
        parts = super().empty(shape, dtype, device)
        parts[COLUMNS].zero_()
        return parts

    def encode(self, values: Tensor, *, like: Parts | None = None) -> dict[str, Tensor]:
        """Return the parts of ``values``; with ``like``, under the column scales of those parts."""
        values = source(values)
        shape = tuple(values.shape)
        parts = self.empty(shape, values.dtype, values.device)
        if values.is_meta:
            return parts
        parts[COLUMNS].copy_(_balanced(values, self._width) if like is None else like[COLUMNS])
        for start, stop in self._pieces(shape):
            some = values[start:stop].float()
            divided = some / _columns(parts, shape, start, stop)
            if like is not None:
                divided = torch.where(some == 0, some, divided)  # scales of empty parts are 0, and 0 / 0 is nan
            self.scheme.encode_into(divided, self._cut(parts, shape, start, stop))
        return parts

    def decode(self, parts: Parts, shape: Shape, dtype: torch.dtype) -> Tensor:
        shape, ranges = tuple(shape), self._pieces(tuple(shape))
        out = torch.empty(shape if len(ranges) > 1 else 0, dtype=dtype, device=parts[COLUMNS].device)
        for start, stop in ranges:
            some = self.scheme.decode(self._cut(parts, shape, start, stop), (stop - start, *shape[1:]), torch.float32)
            some = some.mul_(_columns(parts, shape, start, stop))
            if len(ranges) == 1:
                return some.to(dtype)
            out[start:stop].copy_(some)
        return out

    def decode_into(self, parts: Parts, shape: Shape, start: int, stop: int, out: Tensor) -> None:
        wide = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32, device=out.device)
        self.scheme.decode_into(self._inner(parts), shape, start, stop, wide)
        matrix = torch.arange(start, stop, device=out.device) // max(shape[-2], 1)
        scale = parts[COLUMNS].view(-1, shape[-1])
        out.copy_(wide.mul_(scale if len(shape) == 2 else scale.index_select(0, matrix)))

    def gather(self, parts: Parts, shape: Shape, index: Tensor, dtype: torch.dtype) -> Tensor:
        scale = parts[COLUMNS] if len(shape) == 2 else parts[COLUMNS].index_select(0, index)
        made = self.scheme.gather(self._inner(parts), shape, index, torch.float32)
        return made.mul_(scale.unsqueeze(-2)).to(dtype)

    def bound(self, parts: Parts, shape: Shape) -> Tensor:
        scale = _columns(parts, shape, 0, shape[0])
        inner = self._inner(parts)
        decoded = self.scheme.decode(inner, shape, torch.float32).abs()
        return (self.scheme.bound(inner, shape) + decoded * 2.0**-22) * scale

    def reencode(self, values: Tensor, held: Parts) -> dict[str, Tensor]:
        """Return the parts of ``scheme.reencode`` under the held column scales; unchanged values keep their codes.

        Where the held scales are those of empty parts (``to_empty``), they are computed anew.
        """
        values = source(values)
        if values.is_meta:
            return self.encode(values)
        divided = self._divided(values, held)
        if not is_true(divided.isfinite().all(), unseen=True):  # nobody has set the scales yet, or ``values`` are not
            return self.encode(values)
        return {**self.scheme.reencode(divided, self._inner(held)), COLUMNS: held[COLUMNS]}

    def update(self, values: Tensor, held: Parts, *, shrink: bool = True) -> dict[str, Tensor] | None:
        values = source(values)
        if values.is_meta:
            return self.encode(values)
        made = self.scheme.update(self._divided(values, held), self._inner(held), shrink=shrink)
        return None if made is None else {**made, COLUMNS: held[COLUMNS]}

    def can_view(self, old: Shape, new: Shape) -> bool:
        """Return whether ``scheme`` can view ``old`` as ``new``, and both have equally many matrices."""
        is_same = len(old) > 1 < len(new) and old[-1] == new[-1] and math.prod(old[:-2]) == math.prod(new[:-2])
        return is_same and self.scheme.can_view(old, new)

    # -- implementation -----------------------------------------------------------------------------------------

    @property
    def _width(self) -> int | None:
        """Return the number of columns per scale of ``scheme``, which holds the row divisors; ``None`` for all."""
        return self.scheme._block[1] if isinstance(self.scheme, Blocked) else None

    def _divided(self, values: Tensor, held: Parts) -> Tensor:
        """Return ``values`` over the held column scales; values equal to the held ones become ``scheme``'s exactly."""
        shape = tuple(values.shape)
        scale, kept = _columns(held, shape, 0, shape[0]), self.scheme.decode(self._inner(held), shape, torch.float32)
        return torch.where((kept * scale).to(values.dtype) == values, kept, values.float() / scale)

    def _inner(self, parts: Parts) -> dict[str, Tensor]:
        return {name: part for name, part in parts.items() if name != COLUMNS}

    def _pieces(self, shape: Shape) -> list[tuple[int, int]]:
        """Return ranges along dim 0, of about ``CHUNK`` elements, that cut no block of ``scheme``."""
        row, layout = math.prod(shape[1:]), self.scheme.layout(shape)
        if row == 0 or any(part.span == 0 for part in layout.values()) or torch.compiler.is_compiling():
            return [(0, shape[0])]
        unit = row_unit(layout, row)
        return pieces(0, shape[0], max(1, blocks.CHUNK // row // unit) * unit) or [(0, 0)]

    def _cut(self, parts: Parts, shape: Shape, start: int, stop: int) -> dict[str, Tensor]:
        """Return the parts of ``scheme`` for the slices ``start`` to ``stop`` along dim 0."""
        inner = self._inner(parts)
        if (start, stop) == (0, shape[0]):
            return inner
        row, layout = math.prod(shape[1:]), self.scheme.layout(shape)
        return {n: p[start * row // layout[n].span : -(-stop * row // layout[n].span)] for n, p in inner.items()}


def _columns(parts: Parts, shape: Shape, start: int, stop: int) -> Tensor:
    """Return the column scales of the slices ``start`` to ``stop`` along dim 0, with dimensions that broadcast."""
    scale = parts[COLUMNS]
    return (scale if len(shape) == 2 else scale[start:stop]).unsqueeze(-2)


def _balanced(values: Tensor, width: int | None) -> Tensor:
    """Return the column scales of each matrix, (..., K) float32; those of ``width`` columns have geometric mean 1."""
    count, columns = values.shape[-2:]
    if values.numel() == 0:
        return torch.ones((), device=values.device).expand(*values.shape[:-2], columns)
    starts = range(0, math.prod(values.shape[:-1]), count)
    width = min(width or columns, columns)  # a group may be wider than the matrix
    scales = [_balance(values, start, start + count, width) for start in starts]
    return torch.stack(scales).view(*values.shape[:-2], columns)


def _balance(values: Tensor, first: int, last: int, width: int) -> Tensor:
    """Return the column scales of the matrix in the rows ``first`` to ``last``, each ``width`` columns on their own."""
    columns = values.shape[-1]
    is_whole = torch.compiler.is_compiling()
    ranges = [(first, last)] if is_whole else pieces(first, last, max(1, blocks.CHUNK // columns))
    top = torch.stack([rows(values, *some).abs().amax().float() for some in ranges]).amax()
    check_finite(top, values)
    shrunk = 1 / top.clamp_min(TINY)
    step = columns if is_whole else max(1, blocks.CHUNK // ((last - first) * width)) * width
    starts = range(0, columns, step)
    found = [_balance_columns(values, first, last, (at, min(at + step, columns)), width, shrunk) for at in starts]
    return torch.cat(found)


def _balance_columns(
    values: Tensor, first: int, last: int, among: tuple[int, int], width: int, factor: Tensor
) -> Tensor:
    """Return the scales of the columns ``among``, (start, stop), of the rows ``first`` to ``last`` times ``factor``.

    Sums are float64, so that their order hardly matters and all devices find the same scales. Squares are computed once
    where they are at most ``CHUNK`` numbers, else in each round.
    """
    columns = among[1] - among[0]
    groups = -(-columns // width)
    ranges = [(first, last)]
    if not torch.compiler.is_compiling():
        ranges = pieces(first, last, max(1, blocks.CHUNK // columns))

    def squares(start: int, stop: int) -> Tensor:
        x = (rows(values, start, stop)[:, slice(*among)].float() * factor).double().square_()
        return pad(x, (0, groups * width - columns)).view(-1, groups, width).transpose(0, 1).contiguous()

    held = squares(*ranges[0]) if len(ranges) == 1 else None
    square = torch.ones(groups, width, dtype=torch.float64, device=values.device)
    for _ in range(ROUNDS):
        total = torch.zeros_like(square)
        for some in ranges:
            x = squares(*some) if held is None else held
            share = x @ square.reciprocal().unsqueeze(-1)
            total += (torch.where(share > 0, share, 1.0).reciprocal().transpose(1, 2) @ x).squeeze(1)
        is_used = total > 0
        middle = torch.where(is_used, total, 1.0).log().sum(1, keepdim=True)
        middle /= is_used.sum(1, keepdim=True).clamp_min(1)
        square = torch.where(is_used, total / middle.exp(), 1.0).clamp_(_MOST**-2, _MOST**2)
    return square.sqrt().float().view(-1)[:columns]
