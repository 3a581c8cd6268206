"""Small floats with a scale: fp8 by tensor, row or block; the microscaling formats mxfp8, mxfp6, mxfp4; nvfp4."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import compiled
from .._dtypes import check_dtype
from ..errors import SchemeError
from ..geometry.views import Shape
from ..torch_private.observers import is_direct
from . import encoders
from .bits import lookup, pack_into, table_of
from .blocked import Blocked
from .blocks import Block, Grid, check_block, check_finite, code_part, grid_over
from .looking import is_true
from .nearest import count_above
from .scales import TINY, cover_scale, divide, raise_to, rounded_off, store_scale
from .scheme import Part, Parts, check_flags
from .tables import E2M1, E2M3
from .unchanged import find_zeros


class Element(NamedTuple):
    """A small float: its dtype, largest value, explicit mantissa bits and normal exponents.

    One without a dtype is packed: ``table`` has its values by code, the sign in the highest bit.
    """

    dtype: torch.dtype | None
    largest: float
    mantissa: int
    low: int
    high: int
    table: tuple[float, ...] = ()

    @property
    def bits(self) -> int:
        """Return how many bits a code takes."""
        return (len(self.table) - 1).bit_length() if self.table else 8


ELEMENTS = {
    "e4m3": Element(torch.float8_e4m3fn, 448.0, 3, -6, 8),
    "e5m2": Element(torch.float8_e5m2, 57344.0, 2, -14, 15),
    "e2m3": Element(None, 7.5, 3, 0, 2, E2M3),
    "e2m1": Element(None, 6.0, 1, 0, 2, E2M1),
}
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.float8_e4m3fn)
ROUNDINGS = ("even", "floor", "rceil")


def _below(table: tuple[float, ...]) -> tuple[float, ...]:
    """Return ascending thresholds: the code of x >= 0 is the number of thresholds below x.

    Halfway cases go to the even code: the threshold of an odd code is the middle, of an even one the float just before.
    """
    positive = torch.tensor(table[: len(table) // 2], dtype=torch.float64, device="cpu")
    middles = ((positive[1:] + positive[:-1]) / 2).float()
    middles[1::2] = torch.nextafter(middles[1::2], torch.zeros_like(middles[1::2]))
    return tuple(middles.tolist())


_BELOW = {name: _below(element.table) for name, element in ELEMENTS.items() if element.table}
_E4M3_LARGEST, _E4M3_SMALLEST = 448.0, 2.0**-6  # of block scales: normal numbers only, as torchao and NVIDIA do


_MANY = 2**10  # elements, from which on a table is faster than torch's conversion from float8

_KEEP = 2.0**-10
"""The relative change of the largest value of a block up to which ``reencode`` keeps its scale."""


@cache
def _table(name: str) -> Tensor:
    """Return the values of an element, float32, by code."""
    element = ELEMENTS[name]
    if element.dtype is None:
        return torch.tensor(element.table, device="cpu")
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(element.dtype).float()


@dataclass(frozen=True)
class ScaledFloat(Blocked):
    """Hold small floats ``q`` so that ``w ≈ q * scale`` (``* global_scale``), with one scale per block.

        qdata (*shape) float8_e4m3fn or float8_e5m2    for "e4m3" and "e5m2"
        qdata (*lead, ceil(K * bits / 8)) uint8        for "e2m1" and "e2m3": a dense stream of 4 or 6 bits
        scale (*lead, ceil(K / columns)) scale_dtype   1 row per ``block[0]`` rows; 1 where None
        global_scale () float32                        with ``global_scale``; nvfp4 keeps its scales in e4m3

    ``scale_dtype`` chooses the family: a float32, bfloat16 or float16 scale is ``amax / largest``; float8_e8m0fnu is a
    power of two found by ``scale_rounding`` (OCP "floor"; "even" first rounds amax to the element's mantissa; "rceil"
    never clips); float8_e4m3fn with ``global_scale = amax / (448 * largest)`` is nvfp4.  With ``global_divides`` the
    global scale is stored inverted, as by compressed-tensors: ``w ≈ q * (scale / global_scale)``.

    Error: half the distance between neighbours of ``q``, times the scale; at the largest code also what "floor" and
    "even" clip.  Zeros stay exact zeros.

    Encoding decoded values keeps the codes; "rceil" may double all codes of a block and halve its scale, which gives
    the same values.  Only fp8 elements under e4m3 scales may move, because a block need not use their largest code:
    there, give ``like=`` the parts.

    >>> scheme = ScaledFloat("e2m1", block=(1, 32), scale_dtype=torch.float8_e8m0fnu)
    >>> parts = scheme.encode(torch.tensor([6.0, 1.0]))
    >>> parts["qdata"].tolist(), parts["scale"].float().tolist()
    ([39], [1.0])
    """

    kind: ClassVar[str] = "scaled_float"

    element: str = "e4m3"
    block: Block = (1, None)
    scale_dtype: torch.dtype = torch.float32
    global_scale: bool = False
    scale_rounding: str = "even"
    global_divides: bool = False

    def __post_init__(self) -> None:
        name = "ScaledFloat"
        if self.element not in ELEMENTS:
            raise SchemeError(f"element must be one of {', '.join(ELEMENTS)}, got {self.element!r}", name=name)
        check_block(self.block, name)
        check_dtype(self.scale_dtype, SCALE_DTYPES, "scale_dtype", name)
        if self.scale_rounding not in ROUNDINGS:
            raise SchemeError(
                f"scale_rounding must be one of {', '.join(ROUNDINGS)}, got {self.scale_rounding!r}", name=name
            )
        check_flags(self, "global_scale", "global_divides")
        if self.global_scale and self.scale_dtype != torch.float8_e4m3fn:
            raise SchemeError(f"global_scale needs scale_dtype float8_e4m3fn, got {self.scale_dtype}", name=name)
        if self.global_divides and not self.global_scale:
            raise SchemeError("global_divides needs global_scale", name=name)

    @property
    def _element(self) -> Element:
        return ELEMENTS[self.element]

    # -- the interface ------------------------------------------------------------------------------------------

    def layout(self, shape: Shape) -> dict[str, Part]:
        grid = grid_over(shape, self.block)
        codes = code_part(shape, self._element.bits)
        parts = {"qdata": codes._replace(dtype=self._element.dtype or torch.uint8)}
        parts["scale"] = grid.scale_part(self.scale_dtype)
        if self.global_scale:
            parts["global_scale"] = Part((), torch.float32, 0)
        return parts

    def recipe(self, shape: Shape, dtype: torch.dtype) -> compiled.Recipe | None:
        is_power = self.scale_dtype == torch.float8_e8m0fnu
        if not is_power and (self._element.dtype is None or self.scale_dtype != torch.float32):
            return None
        return self._recipe(shape, dtype, self.scale_rounding if is_power else "")

    def _recipe(self, shape: Shape, dtype: torch.dtype, scales: str, whole: float = 1.0) -> compiled.Recipe | None:
        grid, element = grid_over(shape, self.block), self._element
        if 0 in shape or not (grid.height == 1 or grid.rows == 1):
            return None
        return compiled.recipe(
            compiled.NEAREST if element.dtype is None else compiled.FLOAT8,
            dtype,
            grid.columns,
            grid.run,
            parts=("qdata", "scale"),
            bits=element.bits,
            span=element.largest,
            lowest=-element.largest,
            highest=element.largest,
            mantissa=element.mantissa,
            bias=1 - element.low,
            thresholds=_BELOW.get(self.element, ()),
            scales=scales,
            top=element.high,
            whole=whole,
        )

    def _reencode(self, values: Tensor, held: Parts) -> dict[str, Tensor]:
        """Return the parts as ``encode`` does; a held scale stays if the largest value is near the end of its range."""
        if self.scale_dtype == torch.float8_e8m0fnu:
            return self.encode(values)
        amax = grid_over(tuple(values.shape), self.block).reduce(values, torch.amax, magnitude=True)
        check_finite(amax, values)
        fitted = self.empty(tuple(values.shape), values.dtype, values.device)
        self._fit(amax, fitted)
        if self.global_scale:
            change = fitted["global_scale"] / held["global_scale"] - 1
            if not is_true(change.abs() < _KEEP, unseen=False):
                return self.encode(values, like=fitted)
            self._fit(amax, fitted, held["global_scale"])
        # an e4m3 scale is so coarse that the largest value may have become the second largest code
        low = 0.92 if self.scale_dtype == torch.float8_e4m3fn else 1 - _KEEP
        reach = self._scales(held["scale"], held) * self._element.largest
        keep = (amax >= low * reach) & (amax <= (1 + _KEEP) * reach)
        chosen = torch.where(keep, held["scale"].float(), fitted["scale"].float()).to(self.scale_dtype)
        return self.encode(values, like={**fitted, "scale": chosen})

    def bound(self, parts: Parts, shape: Shape) -> Tensor:
        """Return half the distance to the next element, times the scale; more where the largest one clips."""
        grid = grid_over(shape, self.block)
        if 0 in shape:
            return torch.zeros(shape, device=parts["qdata"].device)
        element = self._element
        codes = self._elements(parts["qdata"].reshape(grid.rows, -1), grid.columns).abs().view(shape)
        exponent = torch.frexp(codes).exponent.clamp_min(element.low + 1) - 1
        half = torch.ldexp(torch.full_like(codes, 0.5), exponent - element.mantissa)
        step = grid.expand(self._scales(parts["scale"], parts))
        unit = self._scales(torch.ones_like(step), parts)
        stored = grid.expand(parts["scale"].float())
        error = half * step
        error = torch.where(codes == element.largest, torch.maximum(error, self._clipped(stored) * unit), error)
        bound = error * (1 + 2.0**-14)  # float32 arithmetic moves a tie by less
        return bound * ~find_zeros(grid, codes * step, step, None)

    # -- implementation -----------------------------------------------------------------------------------------

    def _encode(self, values: Tensor, parts: Parts, like: Parts | None) -> None:
        if like is None and self._try_encode(values, parts):
            return
        grid = grid_over(tuple(values.shape), self.block)
        amax = grid.reduce(values, torch.amax, magnitude=True)
        check_finite(amax, values)
        if like is None:
            self._fit(amax, parts)
        else:
            for name in parts.keys() - {"qdata"}:
                parts[name].copy_(like[name])
        self._quantize(grid, values, parts)

    def _try_encode(self, values: Tensor, parts: Parts) -> bool:
        if not self.global_scale:
            return super()._try_encode(values, parts)
        grid = grid_over(tuple(values.shape), self.block)
        amax = compiled.can_read(values) and compiled.magnitudes(values.view(grid.rows, grid.columns), grid.columns)
        if not isinstance(amax, Tensor):
            return False
        parts["global_scale"].copy_(self._whole(amax.max()))
        scales, whole = "over whole" if self.global_divides else "times whole", float(parts["global_scale"])
        return compiled.encode_rows(self._recipe(tuple(values.shape), values.dtype, scales, whole), values, parts)

    def _rows(self, grid: Grid, parts: Parts, start: int, stop: int) -> Tensor:
        x = self._elements(parts["qdata"].reshape(grid.rows, -1)[start:stop], grid.columns)
        x, scale = grid.align(x, self._scales(grid.pick(parts["scale"], start, stop), parts))
        return x.mul_(scale).reshape(stop - start, grid.columns)

    def _clipped(self, scale: Tensor) -> Tensor:
        """Return, by block, how far beyond the largest element a value may lie, before the global scale."""
        if self.scale_dtype != torch.float8_e8m0fnu:
            return rounded_off(scale, self.scale_dtype) * self._element.largest
        if self.scale_rounding == "rceil":
            return torch.zeros_like(scale)
        top = 2.0 ** (self._element.high + 1)
        if self.scale_rounding == "even":
            top -= 2.0 ** (self._element.high - self._element.mantissa - 1)
        return scale * (top - self._element.largest)

    def _scales(self, scale: Tensor, parts: Parts) -> Tensor:
        """Return the float32 factors of the codes."""
        scale = scale.float()
        if not self.global_scale:
            return scale
        return scale / parts["global_scale"] if self.global_divides else scale * parts["global_scale"]

    def _elements(self, codes: Tensor, columns: int) -> Tensor:
        if self._element.dtype is not None:
            if is_direct() and codes.device.type == "cpu" and codes.numel() >= _MANY:  # in a graph it would add a guard
                return _table(self.element).index_select(0, codes.reshape(-1).view(torch.uint8).int()).view(codes.shape)
            return codes.float()
        return lookup(codes, table_of(self._element.table, codes.device), self._element.bits, columns)

    def _fit(self, amax: Tensor, parts: Parts, unit: Tensor | None = None) -> None:
        """Write the scales that fit ``amax``, under the global scale ``unit`` if it is given."""
        largest = self._element.largest
        if self.scale_dtype == torch.float8_e8m0fnu:
            parts["scale"].copy_(self._power_of_two(amax))
        elif self.scale_dtype == torch.float8_e4m3fn:
            ratio = divide(amax, largest)
            if self.global_scale:
                if unit is None:
                    unit = self._whole(amax.max() if amax.numel() else amax.new_zeros(()))
                parts["global_scale"].copy_(unit)
                ratio = ratio * unit if self.global_divides else ratio / unit
            elif is_true((ratio > _E4M3_LARGEST).any(), unseen=False):
                raise SchemeError(
                    f"a scale of {float(ratio.max()):.4g} does not fit float8_e4m3fn", fix="Use global_scale=True."
                )
            parts["scale"].copy_(ratio.clamp(_E4M3_SMALLEST, _E4M3_LARGEST))
        else:
            parts["scale"].copy_(store_scale(divide(amax, largest), amax, self.scale_dtype))

    def _whole(self, amax: Tensor) -> Tensor:
        """Return the global scale for values of at most ``amax`` ()."""
        reach = amax.new_full((), _E4M3_LARGEST * self._element.largest)
        # 128 * TINY: then neither 1 / unit nor unit * 2**-6, the smallest block scale, is subnormal
        most = amax.clamp_min(128 * TINY * reach)
        return torch.where(amax > 0, most.reciprocal() * reach if self.global_divides else most / reach, 1.0)

    def _ends(self, grid: Grid, parts: Parts) -> tuple[Tensor, Tensor]:
        reach = self._scales(parts["scale"], parts) * self._element.largest
        return -reach, reach

    def _cover(self, grid: Grid, low: Tensor, high: Tensor, held: Parts) -> dict[str, Tensor]:
        amax = torch.maximum(high, -low)
        if self.scale_dtype == torch.float8_e8m0fnu:
            return {"scale": self._power_of_two(amax, "rceil")}
        ratio = divide(amax, self._element.largest)
        if self.scale_dtype != torch.float8_e4m3fn:
            return {"scale": cover_scale(ratio, amax, self.scale_dtype)}
        ratio = self._over_unit(ratio, held) * (1 + 2.0**-20)
        return {"scale": raise_to(ratio.clamp(_E4M3_SMALLEST, _E4M3_LARGEST), self.scale_dtype)}

    def _over_unit(self, ratio: Tensor, parts: Parts) -> Tensor:
        if not self.global_scale:
            return ratio
        return ratio * parts["global_scale"] if self.global_divides else ratio / parts["global_scale"]

    def _renew(self, grid: Grid, values: Tensor, held: Parts, shrink: bool) -> Parts:
        if self.scale_dtype == torch.float8_e4m3fn:
            amax = grid.reduce(values, torch.amax, magnitude=True)
            check_finite(amax, values)
            if self.global_scale:  # renewed if a block exceeds the largest block scale, or all are below the smallest
                top = self._over_unit(divide(amax.max(), self._element.largest), held)
                wide = (top > _E4M3_LARGEST * (1 + 2.0**-20)) | ((top < _E4M3_SMALLEST) & (top > 0))
                fitted = self.empty(grid.shape, values.dtype, values.device)
                self._fit(amax * 2, fitted)
                held = {**held, "global_scale": torch.where(wide, fitted["global_scale"], held["global_scale"])}
                return super()._renew(grid, values, held, shrink)
            self._fit(amax, self.empty(grid.shape, values.dtype, values.device))  # raises if no scale reaches
        return super()._renew(grid, values, held, shrink)

    def _between(self, grid: Grid, x: Tensor, parts: Parts, start: int, stop: int) -> tuple[Tensor, Tensor]:
        scale = self._scales(grid.pick(parts["scale"], start, stop), parts)
        x, scale = grid.align(x, scale)
        element, size = self._element, (stop - start, grid.columns)
        code = (x / torch.where(scale == 0, 1.0, scale)).clamp_(-element.largest, element.largest)
        exponent = (code.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_min_(2.0**element.low)
        step = exponent.mul_(2.0**-element.mantissa)
        below = code.div_(step).floor_()
        near = torch.where(x == 0, x, (below * step).mul_(scale))  # keeps the sign of 0
        return near.reshape(size), (below.add_(1).mul_(step)).mul_(scale).reshape(size)

    def _power_of_two(self, amax: Tensor, rounding: str | None = None) -> Tensor:
        """Return e8m0 scales: 2**-127 to 2**127, never NaN (byte 255); 1 for blocks of zeros."""
        element, rounding = self._element, rounding or self.scale_rounding
        if rounding == "rceil":
            bits = divide(amax, element.largest).view(torch.int32)
            exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).int()
        else:
            bits = amax.contiguous().view(torch.int32)
            if rounding == "even":
                bits = bits + (1 << (22 - element.mantissa))
            exponent = (bits >> 23) - 127 - element.high
        byte = (exponent + 127).clamp(0, 254)
        return torch.where(amax > 0, byte, 127).to(torch.uint8).view(torch.float8_e8m0fnu)

    def _divided(self, grid: Grid, parts: Parts, start: int, stop: int) -> tuple[Tensor, bool]:
        """Return the numbers that divide (True) or multiply (False) the rows ``start`` to ``stop``, and that flag."""
        scale = grid.pick(parts["scale"], start, stop)
        if self.global_scale and not self.global_divides:
            return (1.0 / parts["global_scale"]) / scale.float(), False
        return self._scales(scale, parts), True

    def _try_quantize(self, grid: Grid, values: Tensor, parts: Parts) -> bool:
        element = self._element
        if element.bits == 6:
            return False
        scale, divides = self._divided(grid, parts, 0, grid.rows)
        x, codes = values.view(grid.rows, grid.columns), parts["qdata"].view(grid.rows, -1)
        if element.dtype is not None:
            return encoders.encode_float8(x, grid.run, scale, codes, divides=divides, largest=element.largest)
        return encoders.encode_nearest(x, grid.run, scale, codes, divides=divides, thresholds=_BELOW[self.element])

    def _try_decode(self, grid: Grid, parts: Parts, start: int, stop: int, out: Tensor) -> bool:
        if self._element.bits == 6:
            return False
        codes = parts["qdata"].reshape(grid.rows, -1)[start:stop]
        scale = self._scales(grid.pick(parts["scale"], start, stop), parts)
        return compiled.decode_table(codes, grid.run, scale, _table(self.element), out, bits=self._element.bits)

    def _store_codes(self, grid: Grid, x: Tensor, parts: Parts, start: int, stop: int, out: Tensor) -> None:
        largest = self._element.largest  # every step from here on is in place
        scale, divides = self._divided(grid, parts, start, stop)
        x, scale = grid.align(x, scale)
        x = x.div_(scale) if divides else x.mul_(scale)
        x = x.clamp_(-largest, largest).reshape(stop - start, grid.columns)
        if self._element.dtype is not None:
            out.copy_(x)
            return
        width = self._element.bits
        codes = torch.signbit(x).to(torch.uint8) << (width - 1)
        pack_into(codes.add_(count_above(x.abs_(), _BELOW[self.element])), width, out)
