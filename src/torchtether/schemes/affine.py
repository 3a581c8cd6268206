"""Integers of 1 to 8 bits with a scale, and perhaps a zero point, such as int8 and int4."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from .. import compiled
from .._dtypes import check_dtype, dtype_name
from ..errors import SchemeError
from ..geometry.views import Shape
from . import encoders
from .bits import pack_into, unpack
from .blocked import Blocked
from .blocks import Block, Grid, check_block, check_finite, code_part, grid_over, source
from .looking import is_true
from .scales import cover_scale, divide, rounded_off, store_scale
from .scheme import Part, Parts, check_flags
from .search import FITS, SMALLEST, Search, find_scales
from .unchanged import find_unchanged, find_zeros

SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Affine(Blocked):
    """Hold integers ``q`` so that ``w ≈ (q - zero_point) * scale``, with one scale per block.

        qdata (*shape) int8, uint8 if unsigned        where bits == 8
        qdata (*lead, ceil(K * bits / 8)) uint8       below: a dense stream of q + 2**(bits - 1) if signed, of q if not
        scale (*lead, ceil(K / columns)) scale_dtype  1 row per ``block[0]`` rows; 1 where None
        zero_point, like scale, int8 (uint8)          unless symmetric: then 0 (unsigned: 2**(bits - 1))
        g_idx (K,) int32                              with act_order: the group of each column

    ``block`` is (rows, columns) under one scale, ``None`` meaning all: ``(None, None)`` tensor, ``(1, None)`` row,
    ``(1, 128)`` group.  Symmetric scales are ``amax / (2**bits - 1) * 2``: both ends of the range lose half a step.
    ``narrow_range`` drops the lowest code, so that the largest value is kept exactly (optimum-quanto, bitsandbytes).
    ``reciprocal`` multiplies by ``1 / scale`` (torchao) where the default divides (compressed-tensors): ties at half
    a step differ.  Scales are rounded to ``scale_dtype`` before they divide.  ``unit`` is a constant that multiplies
    last, ``w ≈ ((q - zero_point) * scale) * unit``: bitsandbytes stores row maxima, and 1/127 is its unit.
    ``fit="mse"`` gives each block a scale under which the sum of its squared errors is less, if it finds one.  It says
    how to encode and not what is held, so it makes no difference between two schemes.

    Error: half a step, ``scale / 2``, plus the rounding of the scale over the range; at its ends also the clipped part.

    Encoding decoded values keeps the codes with ``like=`` the parts and with ``reencode``.  Without them it keeps them
    with ``narrow_range`` (the largest value is a code), and nearly always without ``symmetric``; the symmetric full
    range moves its scale.

    >>> parts = Affine(bits=4, block=(1, 2)).encode(torch.tensor([1.0, -7.5, 0.0, 0.0]))
    >>> parts["qdata"].tolist(), parts["scale"].tolist()
    ([9, 136], [1.0, 1.0])
    """

    kind: ClassVar[str] = "affine"

    bits: int = 8
    signed: bool = True
    symmetric: bool = True
    block: Block = (1, None)
    act_order: bool = False
    scale_dtype: torch.dtype = torch.float32
    narrow_range: bool = False
    reciprocal: bool = False
    unit: float = 1.0
    fit: str = field(default="range", compare=False)

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 1 <= self.bits <= 8:
            raise SchemeError(f"bits must be an int from 1 to 8, got {self.bits!r}", name="Affine")
        check_block(self.block, "Affine")
        check_dtype(self.scale_dtype, SCALE_DTYPES, "scale_dtype", "Affine")
        check_flags(self, "signed", "symmetric", "act_order", "narrow_range", "reciprocal")
        if self.narrow_range and (not self.symmetric or self.bits == 1):
            raise SchemeError("narrow_range needs a symmetric scheme of 2 bits or more", name="Affine")
        if not (isinstance(self.unit, float) and 2.0**-64 <= self.unit <= 2.0**64):
            raise SchemeError(f"unit must be a positive float, got {self.unit!r}", name="Affine")
        if self.fit not in FITS:
            raise SchemeError(f"fit must be one of {', '.join(FITS)}, got {self.fit!r}", name="Affine")
        if self.act_order and self.block[1] is None:
            raise SchemeError(f"act_order needs groups of columns, got block {self.block}", name="Affine")

    # -- the integers -------------------------------------------------------------------------------------------

    @property
    def _lowest(self) -> int:
        return -(1 << (self.bits - 1)) + self.narrow_range

    @property
    def _highest(self) -> int:
        return (1 << (self.bits - 1)) - 1

    @property
    def _steps(self) -> int:
        return self._highest - self._lowest

    @property
    def _offset(self) -> int:
        """Return the difference of stored and signed codes; zero points have it only if unsigned."""
        return 0 if self.signed and self.bits == 8 else 1 << (self.bits - 1)

    @property
    def _zero_offset(self) -> int:
        return 0 if self.signed else 1 << (self.bits - 1)

    # -- the interface ------------------------------------------------------------------------------------------

    def layout(self, shape: Shape) -> dict[str, Part]:
        grid = grid_over(shape, self.block)
        if self.act_order and len(shape) < 2:
            raise SchemeError(f"act_order needs at least 2 dimensions, got shape {tuple(shape)}")
        codes = code_part(shape, self.bits)
        parts = {"qdata": codes._replace(dtype=torch.int8) if self.bits == 8 and self.signed else codes}
        parts["scale"] = grid.scale_part(self.scale_dtype)
        if not self.symmetric:
            parts["zero_point"] = grid.scale_part(torch.int8 if self.signed else torch.uint8)
        if self.act_order:
            parts["g_idx"] = Part((shape[-1],), torch.int32, 0)
        return parts

    def encode(self, values: Tensor, *, like: Parts | None = None, g_idx: Tensor | None = None) -> dict[str, Tensor]:
        """Return the parts of ``values``.

        Args:
            like: parts whose scales, zero points and column groups are reused; values beyond their range clip.
            g_idx: (K,) ints, the group of each column, with ``act_order``; default: groups of neighbours.
        """
        values = source(values)
        parts = self.empty(tuple(values.shape), values.dtype, values.device)
        if not values.is_meta:
            self._encode(values, parts, like, g_idx)
        return parts

    def recipe(self, shape: Shape, dtype: torch.dtype) -> compiled.Recipe | None:
        grid = grid_over(shape, self.block)
        is_plain = self.scale_dtype == torch.float32 and not (self.act_order or self.reciprocal)
        if not is_plain or not (grid.height == 1 or grid.rows == 1) or 0 in shape:
            return None
        return compiled.recipe(
            compiled.AFFINE,
            dtype,
            grid.columns,
            grid.run,
            parts=("qdata", "scale") if self.symmetric else ("qdata", "scale", "zero_point"),
            bits=self.bits,
            span=self._span,
            unit=self.unit,
            lowest=self._lowest,
            highest=self._highest,
            offset=self._offset,
            zero_offset=self._zero_offset,
            **(self._search.fields if self.fit != "range" else {}),
        )

    def reencode(self, values: Tensor, held: Parts) -> dict[str, Tensor]:
        """Return the parts as ``encode`` does, with the held scale and zero point where they fit or are exact.

        They fit if the values lie within their range and use it. The test for exact values is for parts of other
        writers, whose scales may be negative, or larger than the values need.
        """
        values = source(values)
        if values.is_meta or values.numel() == 0:
            return self.encode(values, g_idx=held.get("g_idx"))
        grid, g_idx = grid_over(tuple(values.shape), self.block), held.get("g_idx")
        fitted = self._fit(grid, values, g_idx)
        scale = _divisor(self._step(held["scale"]))
        ends = [grid.reduce(values, op, g_idx=g_idx) / scale for op in (torch.amin, torch.amax)]
        low, high = torch.minimum(*ends), torch.maximum(*ends)
        if self.symmetric:
            is_used = torch.maximum(high, -low) >= max(self._highest, 1) * (1 - 2.0**-10)  # an end of the range
        else:
            # a rounded zero point may have cost one step of the range
            is_used = high.clamp_min(0) - low.clamp_max(0) >= max(self._steps - 1.01, 0.49 * self._steps)
            zero = held["zero_point"].float() - self._zero_offset
            low, high = low + zero, high + zero
        keep = is_used & (low >= self._lowest - 0.5) & (high <= self._highest + 0.5)
        if not is_true(keep.all(), unseen=False):
            again = self.encode(values, like=held)
            keep |= find_unchanged(lambda start, stop: self._rows(grid, again, start, stop), grid, values, g_idx)
        chosen = {name: torch.where(keep, held[name], part) for name, part in fitted.items()}
        return self.encode(values, like={**held, **chosen})

    def bound(self, parts: Parts, shape: Shape) -> Tensor:
        """Return half a step, the rounding of the scale over the range, and 2**-14 of a step for float32 arithmetic."""
        grid = grid_over(shape, self.block)
        g_idx = parts.get("g_idx")
        reach = self._steps / 2 if self.symmetric else self._steps
        stored = grid.expand(parts["scale"].float().abs(), g_idx)
        bound = self._step(stored) * (0.5 + 2.0**-14) + rounded_off(stored, self.scale_dtype) * self.unit * reach
        if self.fit != "range" and 0 not in shape:
            codes = (
                unpack(parts["qdata"].reshape(grid.rows, -1), self.bits, grid.columns).view(shape).int() - self._offset
            )
            clipped = self._step(stored) * (reach * (1 / SMALLEST - 1))
            bound = bound + clipped * ((codes == self._lowest) | (codes == self._highest))
        if self.bits == 1:  # one bit may round a whole block to 0
            return bound
        return bound * ~find_zeros(grid, self.decode(parts, shape, torch.float32), stored, g_idx)

    # -- implementation -----------------------------------------------------------------------------------------

    def _encode(self, values: Tensor, parts: Parts, like: Parts | None, g_idx: Tensor | None = None) -> None:
        if g_idx is not None and not self.act_order:
            raise SchemeError("g_idx was given to a scheme without act_order", fix="Use Affine(act_order=True).")
        if like is None and self._try_encode(values, parts):
            return
        grid = grid_over(tuple(values.shape), self.block)
        if self.act_order:
            order = like["g_idx"] if g_idx is None and like is not None else g_idx
            g_idx = self._order(grid, order, values.device).to(torch.int32)
        if like is None:
            found: Parts = self._fit(grid, values, g_idx)
        else:
            check_finite(grid.reduce(values, torch.amax, magnitude=True), values)
            found = {name: like[name] for name in parts.keys() - {"qdata", "g_idx"}}
        if g_idx is not None:
            found = {**found, "g_idx": g_idx}
        for name, part in found.items():
            parts[name].copy_(part)
        self._quantize(grid, values, parts)

    def _rows(self, grid: Grid, parts: Parts, start: int, stop: int) -> Tensor:
        g_idx = parts.get("g_idx")
        codes = parts["qdata"].reshape(grid.rows, -1)[start:stop]
        x = unpack(codes, self.bits, grid.columns).float() if self.bits < 8 else codes.float()
        scale = grid.pick(parts["scale"], start, stop).float()
        if self.symmetric:
            x = x.sub_(self._offset) if self._offset else x
            x, scale = grid.align(x, scale, g_idx=g_idx)
        else:
            zero = self._zero_points(grid, parts, start, stop) + self._offset
            x, scale, zero = grid.align(x, scale, zero, g_idx=g_idx)
            x = x.sub_(zero)
        x = x.mul_(scale)
        return (x if self.unit == 1 else x.mul_(self.unit)).reshape(stop - start, grid.columns)

    def _zero_points(self, grid: Grid, parts: Parts, start: int, stop: int) -> Tensor:
        """Return the zero points of the rows as signed codes, float32."""
        return grid.pick(parts["zero_point"], start, stop).float() - self._zero_offset

    @property
    def _span(self) -> float:
        """Return the quotient of the extent of a block and its scale."""
        return (self._steps / 2 if self.symmetric else self._steps) * self.unit

    def _step(self, scale: Tensor) -> Tensor:
        """Return the distance between neighbours, float32."""
        return scale.float() if self.unit == 1 else scale.float() * self.unit

    def _order(self, grid: Grid, g_idx: Tensor | None, device: torch.device) -> Tensor:
        if g_idx is None:
            return torch.arange(grid.columns, device=device) // (self.block[1] or 1)
        fits = not (g_idx.dtype.is_floating_point or g_idx.dtype.is_complex) and g_idx.shape == (grid.columns,)
        if not fits or is_true(((g_idx < 0) | (g_idx >= grid.groups)).any(), unseen=False):
            got = f"{tuple(g_idx.shape)} {dtype_name(g_idx.dtype)}"
            raise SchemeError(f"g_idx must hold {grid.columns} group numbers below {grid.groups}, got {got}")
        return g_idx

    def _fit(self, grid: Grid, values: Tensor, g_idx: Tensor | None) -> dict[str, Tensor]:
        """Return the scale, and the zero point, that fit ``values``."""
        zero = torch.zeros((), device=values.device)
        if self.symmetric:
            low, high = zero, grid.reduce(values, torch.amax, magnitude=True, g_idx=g_idx)
        else:
            low, high = grid.extremes(values, g_idx)
            low, high = low.clamp_max(0), high.clamp_min(0)
        check_finite(high - low, values)
        fitted = self._fitted(low, high)
        if self.fit == "range" or values.numel() == 0:
            return fitted
        zeros = None if self.symmetric else fitted["zero_point"].float() - self._zero_offset
        peak = torch.maximum(high, -low)
        return {**fitted, "scale": find_scales(self._search, grid, values, peak, fitted["scale"], zeros, g_idx)}

    @property
    def _search(self) -> Search:
        return Search(self.bits, self._lowest, self._highest, self.unit, self.scale_dtype)

    def _fitted(self, low: Tensor, high: Tensor) -> dict[str, Tensor]:
        """Return the scale, and the zero point, for blocks with values from ``low`` to ``high``."""
        if self.symmetric:
            return {"scale": store_scale(divide(high, self._span), high, self.scale_dtype)}
        scale = store_scale(divide(high - low, self._span), high - low, self.scale_dtype)
        zero = (self._lowest - low / self._step(scale)).clamp_(self._lowest, self._highest).round_()
        return {"scale": scale, "zero_point": (zero + self._zero_offset).to(torch.int8 if self.signed else torch.uint8)}

    @property
    def _can_cover(self) -> bool:
        return self.bits > 1  # one bit has no code of the other sign

    def _ends(self, grid: Grid, parts: Parts) -> tuple[Tensor, Tensor]:
        zero = 0 if self.symmetric else parts["zero_point"].float() - self._zero_offset
        return self._value(self._lowest - zero, parts["scale"]), self._value(self._highest - zero, parts["scale"])

    def _value(self, steps: Tensor | int, scale: Tensor) -> Tensor:
        return steps * scale.float() if self.unit == 1 else steps * scale.float() * self.unit

    def _cover(self, grid: Grid, low: Tensor, high: Tensor, held: Parts) -> dict[str, Tensor]:
        low, high = low.clamp_max(0), high.clamp_min(0)
        if self.symmetric:
            step = torch.maximum(divide(high, self._highest), divide(low, self._lowest))
            return {"scale": cover_scale(divide(step, self.unit), step, self.scale_dtype)}
        extent = high - low
        middle = self._lowest - low / torch.where(extent > 0, extent, 1.0) * self._steps

        def step_of(zero: Tensor) -> Tensor:
            above, below = self._highest - zero, zero - self._lowest
            step = torch.where(high > 0, high / above, 0.0)
            return torch.maximum(step, torch.where(low < 0, -low / below, 0.0))

        zeros = [end.clamp_(self._lowest, self._highest) for end in (middle.floor(), middle.ceil())]
        steps = [step_of(zero) for zero in zeros]
        zero = torch.where(steps[0] <= steps[1], zeros[0], zeros[1]) + self._zero_offset
        step = torch.minimum(*steps)
        return {
            "scale": cover_scale(divide(step, self.unit), step, self.scale_dtype),
            "zero_point": zero.to(torch.int8 if self.signed else torch.uint8),
        }

    def _between(self, grid: Grid, x: Tensor, parts: Parts, start: int, stop: int) -> tuple[Tensor, Tensor]:
        scale = grid.pick(parts["scale"], start, stop).float()
        zeros = scale.new_zeros(1, 1).expand(scale.shape)
        zero = zeros if self.symmetric else self._zero_points(grid, parts, start, stop)
        x, scale, zero = grid.align(x, scale, zero, g_idx=parts.get("g_idx"))
        below = (x / _divisor(self._step(scale))).add_(zero).floor_().clamp_(self._lowest, self._highest - 1).sub_(zero)
        size = (stop - start, grid.columns)
        return self._value(below, scale).reshape(size), self._value(below + 1, scale).reshape(size)

    def _try_quantize(self, grid: Grid, values: Tensor, parts: Parts) -> bool:
        if self.act_order:
            return False
        scale = _divisor(self._step(grid.pick(parts["scale"], 0, grid.rows)))
        zero = None if self.symmetric else self._zero_points(grid, parts, 0, grid.rows)
        return encoders.encode_affine(
            values.view(grid.rows, grid.columns),
            grid.run,
            1.0 / scale if self.reciprocal else scale,
            zero,
            parts["qdata"].view(grid.rows, -1),
            divides=not self.reciprocal,
            limits=(self._lowest, self._highest),
            offset=self._offset,
            bits=self.bits,
        )

    def _try_decode(self, grid: Grid, parts: Parts, start: int, stop: int, out: Tensor) -> bool:
        if self.act_order or self.bits not in (4, 8):
            return False
        zero: Tensor | float = float(self._offset)
        if not self.symmetric:
            zero = self._zero_points(grid, parts, start, stop) + self._offset
        scale = grid.pick(parts["scale"], start, stop)
        codes = parts["qdata"].reshape(grid.rows, -1)[start:stop]
        return compiled.decode_affine(codes, grid.run, scale, zero, out, bits=self.bits, unit=self.unit)

    def _store_codes(self, grid: Grid, x: Tensor, parts: Parts, start: int, stop: int, out: Tensor) -> None:
        scale = _divisor(self._step(grid.pick(parts["scale"], start, stop)))
        zeros = scale.new_zeros(1, 1).expand(scale.shape)
        zero = zeros if self.symmetric else self._zero_points(grid, parts, start, stop)
        x, scale, zero = grid.align(x, scale, zero, g_idx=parts.get("g_idx"))
        x = x.mul_(1.0 / scale) if self.reciprocal else x.div_(scale)
        x = x if self.symmetric else x.add_(zero)
        x = x.round_().clamp_(self._lowest, self._highest).reshape(stop - start, grid.columns)
        x = x.add_(self._offset) if self._offset else x
        if self.bits == 8:
            out.copy_(x)
        else:
            pack_into(x.to(torch.int8).view(torch.uint8), self.bits, out)  # floats to uint8 take six times as long


def _divisor(scale: Tensor) -> Tensor:
    """Return ``scale``, and 1 where it is 0, as other writers store it for zeros."""
    return torch.where(scale == 0, 1.0, scale)
