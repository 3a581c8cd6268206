"""The base class for schemes that users write: codes of some bits, and some numbers per block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._checks import describe
from ..errors import SchemeError
from ..geometry.views import Shape
from .bits import pack_into, unpack
from .blocked import Blocked
from .blocks import Block, Grid, check_block, check_finite, code_part, grid_over, rows
from .looking import is_true
from .scales import TINY
from .scheme import Part, Parts
from .stochastic import USED
from .unchanged import find_unchanged


@dataclass(frozen=True)
class BlockScheme(Blocked):
    """Hold codes of ``bits`` bits, and float32 numbers (a scale, say) for each block, by four methods.

        qdata (*lead, ceil(K * bits / 8)) uint8       a dense stream of codes from 0 to 2**bits - 1
        each of ``numbers``: (*lead, ceil(K / columns)) float32    1 row per ``block[0]`` rows; 1 where None

    Derive a frozen dataclass from it, give it a ``kind`` and defaults of its own for ``bits`` (1 to 8) and ``block``
    (rows, columns; ``None``: all of them), and write four methods of float32 tensors, whose results are checked:

        fit(x)                    the numbers of blocks with the values ``x`` (..., elements): {"scale": (...)}
        to_codes(x, scale)        the unrounded codes of the values; they are rounded and clipped afterwards
        to_values(codes, scale)   the values of the codes
        error(codes, scale)       the largest error of the decoded values

    Updates of optimizers are rounded stochastically, without a drift if ``fit`` clips nothing.

    The last three take values or codes, and then ``numbers``, in that order; all broadcast against each other.  This
    class does the rest: packing, incomplete blocks, dtypes, values that are not finite, ``meta``, compiled graphs, rows
    and shards.  A number called ``scale`` is at least the smallest normal float32, and 1 for a block of zeros, so that
    the methods may divide by it.

    ``tt.testing.check_scheme`` checks that the four methods agree with each other.

    >>> @dataclass(frozen=True)
    ... class ThreeBits(BlockScheme):
    ...     kind: ClassVar[str] = "doc-three-bits"
    ...     bits: int = 3
    ...     def fit(self, x):
    ...         return {"scale": x.abs().amax(-1) / 3}
    ...     def to_codes(self, x, scale):
    ...         return x / scale + 3
    ...     def to_values(self, codes, scale):
    ...         return (codes - 3) * scale
    ...     def error(self, codes, scale):
    ...         return scale / 2
    >>> parts = ThreeBits().encode(torch.tensor([[-3.0, 0.4, 2.0]]))
    >>> ThreeBits().decode(parts, (1, 3), torch.float32), parts["qdata"].shape
    (tensor([[-3.,  0.,  2.]]), torch.Size([1, 2]))
    """

    numbers: ClassVar[tuple[str, ...]] = ("scale",)
    """The names of the numbers that ``fit`` returns for each block."""

    bits: int = 8
    block: Block = (1, None)

    def __post_init__(self) -> None:
        name = type(self).__name__
        if type(self.bits) is not int or not 1 <= self.bits <= 8:
            raise SchemeError(f"bits must be an int from 1 to 8, got {self.bits!r}", name=name)
        check_block(self.block, name)
        if not isinstance(self.numbers, tuple) or not self.numbers or "qdata" in self.numbers:
            raise SchemeError(f"numbers must be a tuple of names other than qdata, got {self.numbers!r}", name=name)

    # -- for subclasses to write --------------------------------------------------------------------------------
    # type checkers let a subclass name its numbers only if the types of both kinds of arguments are Any

    def fit(self, x: Tensor) -> dict[str, Tensor]:
        """Return the ``numbers`` of blocks whose values are ``x`` (..., elements), each (...)."""
        raise NotImplementedError(self._unwritten("fit"))

    def to_codes(self, x: Tensor, /, *numbers: Any, **named: Any) -> Tensor:
        """Return the unrounded codes of the values ``x``; codes beyond the ends are clipped afterwards."""
        raise NotImplementedError(self._unwritten("to_codes"))

    def to_values(self, codes: Tensor, /, *numbers: Any, **named: Any) -> Tensor:
        """Return the values of ``codes`` (whole numbers, float32)."""
        raise NotImplementedError(self._unwritten("to_values"))

    def error(self, codes: Tensor, /, *numbers: Any, **named: Any) -> Tensor:
        """Return the largest error of values that were encoded as ``codes``."""
        raise NotImplementedError(self._unwritten("error"))

    # -- the interface ------------------------------------------------------------------------------------------

    def layout(self, shape: Shape) -> dict[str, Part]:
        part = grid_over(shape, self.block).scale_part(torch.float32)
        return {"qdata": code_part(shape, self.bits), **dict.fromkeys(self.numbers, part)}

    def _reencode(self, values: Tensor, held: Parts) -> dict[str, Tensor]:
        """Return the parts as ``encode`` does, with the held numbers in blocks whose values they give exactly."""
        grid = grid_over(tuple(values.shape), self.block)
        again = self.encode(values, like=held)
        keep = find_unchanged(lambda start, stop: self._rows(grid, again, start, stop), grid, values)
        fitted = self._fitted(grid, values)
        return self.encode(values, like={name: torch.where(keep, held[name], part) for name, part in fitted.items()})

    def _renew(self, grid: Grid, values: Tensor, held: Parts, shrink: bool) -> Parts:
        fitted = self._fitted(grid, values)
        low, high = self._span(grid, values, held)
        keep = (low >= -_SLACK) & (high <= (1 << self.bits) - 1 + _SLACK)
        if shrink:
            first, last = self._span(grid, values, fitted)
            keep &= high - low >= USED * (last - first)
        if is_true(keep.all(), unseen=False):
            return held
        keep |= find_unchanged(lambda start, stop: self._rows(grid, held, start, stop), grid, values)
        return {**held, **{name: torch.where(keep, held[name], part) for name, part in fitted.items()}}

    def _span(self, grid: Grid, values: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
        """Return the lowest and the highest unrounded code of each block."""

        def positions(start: int, stop: int) -> Tensor:
            x, *numbers = self._aligned(grid, parts, rows(values, start, stop).float(), start, stop)
            return self._whole(self.to_codes(x, *numbers), x, "to_codes").reshape(stop - start, grid.columns)

        low, high = (grid.reduce_rows(positions, op, values.device) for op in (torch.amin, torch.amax))
        return low, high

    def _between(self, grid: Grid, x: Tensor, parts: Parts, start: int, stop: int) -> tuple[Tensor, Tensor]:
        x, *numbers = self._aligned(grid, parts, x, start, stop)

        def values(codes: Tensor) -> Tensor:
            return self._whole(self.to_values(codes, *numbers), x, "to_values")

        below = self._whole(self.to_codes(x, *numbers), x, "to_codes").floor().clamp(0, (1 << self.bits) - 2)
        low, high = values(below), values(below + 1)
        passed = ((x < low) & (low < high)) | ((x > low) & (low > high))
        if not is_true(~passed.any(), unseen=False):  # to_codes has rounded up: without this, updates would drift
            before = values((below - 1).clamp_min(0))
            low, high = torch.where(passed, before, low), torch.where(passed, low, high)
        return low.reshape(stop - start, grid.columns), high.reshape(stop - start, grid.columns)

    def bound(self, parts: Parts, shape: Shape) -> Tensor:
        grid = grid_over(shape, self.block)
        codes, *numbers = self._aligned(grid, parts, self._codes(grid, parts, 0, grid.rows), 0, grid.rows)
        return self._whole(self.error(codes, *numbers), codes, "error").reshape(shape)

    # -- implementation -----------------------------------------------------------------------------------------

    def _unwritten(self, method: str) -> str:
        return f"{type(self).__name__}: it has no {method}(). It needs fit, to_codes, to_values and error."

    def _encode(self, values: Tensor, parts: Parts, like: Parts | None) -> None:
        if values.numel() == 0:
            return
        grid = grid_over(tuple(values.shape), self.block)
        check_finite(grid.reduce(values, torch.amax, magnitude=True), values)
        found = self._fitted(grid, values) if like is None else like
        for name in self.numbers:
            parts[name].copy_(found[name])
        self._quantize(grid, values, parts)

    def _store_codes(self, grid: Grid, x: Tensor, parts: Parts, start: int, stop: int, out: Tensor) -> None:
        x, *numbers = self._aligned(grid, parts, x, start, stop)
        codes = self._whole(self.to_codes(x, *numbers), x, "to_codes").round().clamp(0, (1 << self.bits) - 1)
        if is_true(codes.isnan().any(), unseen=False):
            fix = "Divide by no number that may be 0: only `scale` is never."
            raise SchemeError("to_codes gives codes that are not a number", name=type(self).__name__, fix=fix)
        pack_into(codes.reshape(stop - start, grid.columns).to(torch.uint8), self.bits, out)

    def _rows(self, grid: Grid, parts: Parts, start: int, stop: int) -> Tensor:
        codes, *numbers = self._aligned(grid, parts, self._codes(grid, parts, start, stop), start, stop)
        return self._whole(self.to_values(codes, *numbers), codes, "to_values").reshape(stop - start, grid.columns)

    def _codes(self, grid: Grid, parts: Parts, start: int, stop: int) -> Tensor:
        packed = parts["qdata"].reshape(grid.rows, -1) if grid.rows else parts["qdata"].flatten(0, -2)
        return unpack(packed[start:stop], self.bits, grid.columns).float()

    def _aligned(self, grid: Grid, parts: Parts, x: Tensor, start: int, stop: int) -> tuple[Tensor, ...]:
        return grid.align(x, *(grid.pick(parts[name], start, stop) for name in self.numbers))

    def _fitted(self, grid: Grid, values: Tensor) -> dict[str, Tensor]:
        """Return the numbers of every block, by ``fit``, of ``grid.scale_shape``."""
        pieces = [(0, grid.rows)] if grid.height is None else grid.chunks()
        found = [self._fit_rows(grid, rows(values, start, stop).float()) for start, stop in pieces]
        return {name: torch.cat([one[name] for one in found]).view(grid.scale_shape) for name in self.numbers}

    def _fit_rows(self, grid: Grid, x: Tensor) -> dict[str, Tensor]:
        """Return the numbers (blocks of rows, groups) of whole rows (R, K); blocks at the edges are fitted apart."""
        matrix = x.shape[0] if grid.height in (None, 1) else min(grid.shape[-2], x.shape[0])
        height, width = grid.height or x.shape[0], grid.width or grid.columns
        bands = [
            torch.cat([self._fit(across) for across in _runs(band, width, 4)], 3)
            for band in _runs(x.unflatten(0, (x.shape[0] // matrix, matrix)).unsqueeze(0), height, 2)
        ]
        found = torch.cat(bands, 2).flatten(1, 2)
        return dict(zip(self.numbers, found, strict=True))

    def _fit(self, blocks: Tensor) -> Tensor:
        """Return the numbers (count, matrices, bands, groups) of (1, matrices, bands, height, groups, width) values."""
        x = blocks.squeeze(0).transpose(2, 3).flatten(3)
        found = self.fit(x)
        shape = tuple(x.shape[:-1])
        wanted = dict.fromkeys(self.numbers, shape)
        given: object = describe(found)
        if isinstance(found, dict):
            given = {n: tuple(one.shape) if isinstance(one, Tensor) else describe(one) for n, one in found.items()}
        if given != wanted:
            raise SchemeError(
                f"fit gives {given}, for values of shape {tuple(x.shape)} it must give {wanted}",
                name=type(self).__name__,
                fix="Reduce the last dimension, without keepdim; say in `numbers` what there is.",
            )
        for name, one in found.items():
            if not is_true(one.isfinite().all(), unseen=True):
                fix = "A block may hold one value, or only zeros: its range is 0 then."
                raise SchemeError(f"fit gives a {name} that is not finite", name=type(self).__name__, fix=fix)
        if "scale" in found:
            smallest = torch.where(x.abs().amax(-1) > 0, TINY, 1.0)
            found["scale"] = torch.where(found["scale"].abs() < TINY, smallest, found["scale"])
        return torch.stack([found[name].float() for name in self.numbers])

    def _whole(self, made: Tensor, x: Tensor, what: str) -> Tensor:
        """Expand ``made`` to the shape of ``x``."""
        if not isinstance(made, Tensor):
            raise SchemeError(f"{what} gives {describe(made)}, not a tensor", name=type(self).__name__)
        try:
            return made.expand(x.shape)
        except RuntimeError:
            got = f"shape {tuple(made.shape)}, which does not broadcast to that of the codes, {tuple(x.shape)}"
            raise SchemeError(f"{what} gives {got}", name=type(self).__name__) from None


_SLACK = 2.0**-10  # in codes: by so much arithmetic may move a value that lies on the last code


def _runs(x: Tensor, size: int, dim: int) -> list[Tensor]:
    """Return ``x`` with ``dim`` cut into runs of ``size``, as two dimensions; a shorter last run is a second tensor."""
    length = x.shape[dim]
    size = min(size, length)
    whole = length // size * size
    made = [x.narrow(dim, 0, whole).unflatten(dim, (whole // size, size))]
    if whole < length:
        made.append(x.narrow(dim, whole, length - whole).unflatten(dim, (1, length - whole)))
    return made
