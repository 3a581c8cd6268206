"""Integers with a scale and a float bias, as MLX, HQQ, optimum-quanto and GGUF's Q4_1 and Q5_1 store them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from .. import compiled
from .._dtypes import check_dtype, dtype_name
from ..errors import SchemeError
from ..geometry.views import Shape
from .bits import pack_into, unpack
from .blocked import Blocked
from .blocks import Block, Grid, check_block, check_finite, code_part, grid_over
from .looking import is_true
from .scales import cover_scale, divide, rounded_off, smallest_scale, store_scale
from .scheme import Part, Parts, check_flags
from .search import FITS, SMALLEST, half_quadratic, least_squares
from .stochastic import USED
from .unchanged import find_unchanged

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Biased(Blocked):
    """Hold unsigned integers ``q`` so that ``w ≈ q * scale + bias``, with one scale and one bias per block.

        qdata (*lead, ceil(K * bits / 8)) uint8       a dense stream of q
        scale (*lead, ceil(K / columns)) scale_dtype  1 row per ``block[0]`` rows; 1 where None; may be negative
        bias, like scale

    With ``bias_first`` it is ``w ≈ (q + bias) * scale``.  Either way both operations run in ``arithmetic``, each
    rounded to it.  MLX (``bias``), optimum-quanto (``-shift``) and, with ``bias_first``, HQQ (``-zero``) decode so in
    the dtype of their scales; GGUF decodes float16 scales in float32.

    The bias is the lowest value of its block; the scale is the range over 2**bits - 1, but at least half a unit in the
    last place of the largest magnitude.  The codes are those that decode nearest to the values, roundings of
    ``arithmetic`` included.  ``fit="mse"`` clips the range of each block where that lowers the sum of squared errors;
    ``fit="hqq"`` keeps the scale and moves the bias, by a step at most, by half-quadratic quantization, which makes
    most errors small.

    Error: half a step, the rounding of scale and bias over the range, and the two roundings of ``arithmetic``.

    Encoding decoded values keeps the values with ``like=`` the parts and with ``reencode``; the codes too, except those
    that decode to the same value in ``arithmetic``.  Without them a rounded bias may move every code of its block.

    >>> parts = Biased(bits=4, block=(1, 2)).encode(torch.tensor([1.0, 8.5, -3.0, -3.0]))
    >>> parts["qdata"].tolist(), parts["scale"].tolist()[0], parts["bias"].tolist()
    ([240, 0], 0.5, [1.0, -3.0])
    """

    kind: ClassVar[str] = "biased"

    bits: int = 4
    block: Block = (1, 64)
    scale_dtype: torch.dtype = torch.float32
    arithmetic: torch.dtype = torch.float32
    bias_first: bool = False
    fit: str = field(default="range", compare=False)

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 1 <= self.bits <= 8:
            raise SchemeError(f"bits must be an int from 1 to 8, got {self.bits!r}", name="Biased")
        check_block(self.block, "Biased")
        if self.fit not in (*FITS, "hqq"):
            raise SchemeError(f"fit must be one of {', '.join((*FITS, 'hqq'))}, got {self.fit!r}", name="Biased")
        for name in ("scale_dtype", "arithmetic"):
            check_dtype(getattr(self, name), FLOATS, name, "Biased")
        check_flags(self, "bias_first")

    @property
    def _steps(self) -> int:
        return (1 << self.bits) - 1

    # -- the interface ------------------------------------------------------------------------------------------

    def layout(self, shape: Shape) -> dict[str, Part]:
        scale = grid_over(shape, self.block).scale_part(self.scale_dtype)
        return {"qdata": code_part(shape, self.bits), "scale": scale, "bias": scale}

    def _reencode(self, values: Tensor, held: Parts) -> dict[str, Tensor]:
        """Return the parts as ``encode`` does, with the held scale and bias in blocks that they fit or give exactly."""
        grid = grid_over(tuple(values.shape), self.block)
        fitted = self._fit(grid, values)
        again = self.encode(values, like=held)
        ends = [grid.reduce(values, op) for op in (torch.amin, torch.amax)]
        first, last = (self._position(end, held["scale"].float(), held["bias"].float()) for end in ends)
        low, high = torch.minimum(first, last), torch.maximum(first, last)
        fits = (low >= -0.5) & (high <= self._steps + 0.5) & (high - low >= self._steps - 0.51)
        keep = fits | find_unchanged(lambda start, stop: self._rows(grid, again, start, stop), grid, values)
        if is_true(keep.all(), unseen=False):
            return again
        return self.encode(values, like={name: torch.where(keep, held[name], part) for name, part in fitted.items()})

    def bound(self, parts: Parts, shape: Shape) -> Tensor:
        """Return half a step, the rounding of scale and bias over the range, and the two roundings of a value."""
        grid = grid_over(shape, self.block)
        if 0 in shape:
            return torch.zeros(shape, device=parts["qdata"].device)
        step, bias = (grid.expand(parts[name].float()) for name in ("scale", "bias"))
        decoded = self.decode(parts, shape, torch.float32).abs()
        unit = step.abs() if self.bias_first else torch.ones_like(step)
        between = decoded / torch.where(step == 0, 1.0, step.abs()) if self.bias_first else (decoded + bias.abs())
        lost = torch.zeros_like(step)
        scaled = bias.abs() + self._steps if self.bias_first else self._steps
        for dtype in {self.scale_dtype, self.arithmetic}:  # decoding rounds scale and bias once more
            lost += rounded_off(step.abs(), dtype) * scaled + rounded_off(bias.abs(), dtype) * unit
        rounded = rounded_off(between, self.arithmetic) * unit + rounded_off(decoded, self.arithmetic)
        if self.fit != "range":  # values at the end codes may have been clipped by the search
            codes = unpack(parts["qdata"].reshape(grid.rows, -1), self.bits, grid.columns).view(shape)
            lost = lost + ((codes == 0) | (codes == self._steps)) * step.abs() * (self._steps * (1 / SMALLEST - 1))
        is_zero = (decoded == 0) & (step == 1) & (bias == 0)  # a block of zeros
        return (step.abs() * (0.5 + 2.0**-14) + lost + rounded) * ~is_zero  # MLX writes negative scales too

    # -- implementation -----------------------------------------------------------------------------------------

    def _encode(self, values: Tensor, parts: Parts, like: Parts | None) -> None:
        grid = grid_over(tuple(values.shape), self.block)
        if like is None:
            like = self._fit(grid, values)
        else:
            check_finite(grid.reduce(values, torch.amax, magnitude=True), values)
        for name in ("scale", "bias"):
            parts[name].copy_(like[name])
        self._quantize(grid, values, parts)

    def _rows(self, grid: Grid, parts: Parts, start: int, stop: int) -> Tensor:
        """Return the decoded rows from ``start`` to ``stop``, (stop - start, K) in ``arithmetic``."""
        codes = unpack(parts["qdata"].reshape(grid.rows, -1)[start:stop], self.bits, grid.columns)
        x, scale, bias = grid.align(codes.to(self.arithmetic), *self._numbers(grid, parts, start, stop))
        return self._value(x, scale, bias).reshape(stop - start, grid.columns)

    def _value(self, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        """Return the values of the codes ``x``; all arguments and operations are in ``arithmetic``."""
        return (x + bias) * scale if self.bias_first else x * scale + bias

    def _position(self, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        """Return the unrounded codes of ``x``, float32."""
        scale = torch.where(scale == 0, 1.0, scale)  # other writers may store 0 for a block of one value
        return x / scale - bias if self.bias_first else (x - bias) / scale

    def _fit(self, grid: Grid, values: Tensor) -> dict[str, Tensor]:
        """Return the scale and the bias that fit ``values``."""
        low, high = (grid.reduce(values, op) for op in (torch.amin, torch.amax))
        extent = torch.maximum(high - low, torch.maximum(high.abs(), low.abs()))
        check_finite(extent, values)
        largest = 0.99 * torch.finfo(self.arithmetic).max
        if is_true((extent > largest).any(), unseen=False):
            raise SchemeError(
                f"a range of {float(extent.max()):.4g} does not fit {dtype_name(self.arithmetic)}",
                fix="Use arithmetic=torch.float32.",
            )
        fitted = self._fitted(low, high, extent)
        if self.fit == "range" or values.numel() == 0:
            return fitted

        if self.fit == "hqq":
            scale, bias = fitted["scale"], fitted["bias"]
            moved = half_quadratic(grid, values, scale, bias, top=self._steps, bias_first=self.bias_first)
            return {"scale": scale, "bias": moved}

        def rounded(x: Tensor, parts: Parts, start: int, stop: int) -> Tensor:
            x, scale, bias = grid.align(x, *self._numbers(grid, parts, start, stop))
            codes = self._nearest(x, scale, bias).to(self.arithmetic)
            return self._value(codes, scale, bias).float().reshape(stop - start, grid.columns)

        middle, half = (low + high) / 2, (high - low) / 2

        def clipped(ratio: float) -> dict[str, Tensor]:
            return self._fitted(middle - half * ratio, middle + half * ratio, extent) if ratio < 1 else fitted

        return least_squares(grid, values, clipped, rounded)

    def _fitted(self, low: Tensor, high: Tensor, extent: Tensor) -> dict[str, Tensor]:
        """Return scale and bias for blocks from ``low`` to ``high`` whose magnitudes are at most ``extent``."""
        finest = torch.finfo(self.arithmetic).eps / 2
        if self.bias_first:  # the bias, in units of the scale, must fit, also after the scale is rounded
            finest = max(finest, 2 / torch.finfo(self.scale_dtype).max)
        scale = torch.maximum(divide(high - low, self._steps), extent * finest)
        scale = store_scale(scale.clamp_min(smallest_scale(self.arithmetic)), extent, self.scale_dtype)
        return {"scale": scale, "bias": self._bias(low / scale.float() if self.bias_first else low)}

    def _bias(self, bias: Tensor) -> Tensor:
        """Return ``bias`` as it is stored. Raise SchemeError if it is too large for that."""
        stored = (bias + 0.0).to(self.scale_dtype)  # + 0.0: the lowest value may be -0
        if not is_true(torch.isfinite(stored).all(), unseen=True):
            raise SchemeError(
                f"a bias of {float(bias.abs().max()):.4g} does not fit {dtype_name(self.scale_dtype)}",
                fix="Use scale_dtype=torch.float32.",
            )
        return stored

    def _ends(self, grid: Grid, parts: Parts) -> tuple[Tensor, Tensor]:
        scale, bias = (parts[name].to(self.arithmetic) for name in ("scale", "bias"))
        first, last = (self._value(torch.full_like(scale, code), scale, bias).float() for code in (0, self._steps))
        return first, last

    def _is_used(self, low: Tensor, high: Tensor, first: Tensor, last: Tensor) -> Tensor:
        return high - low >= USED * (last - first)

    def _cover(self, grid: Grid, low: Tensor, high: Tensor, held: Parts) -> dict[str, Tensor]:
        extent = torch.maximum(high - low, torch.maximum(high.abs(), low.abs()))
        # either end may lose this much to the rounding of the bias and of two operations
        slack = extent * (torch.finfo(self.scale_dtype).eps + 2 * torch.finfo(self.arithmetic).eps)
        scale = cover_scale(divide(high - low + 2 * slack, self._steps), extent, self.scale_dtype)
        bias = (low - slack) / scale.float() if self.bias_first else low - slack
        return {"scale": scale, "bias": self._bias(torch.where(extent > 0, bias, 0.0))}

    def _between(self, grid: Grid, x: Tensor, parts: Parts, start: int, stop: int) -> tuple[Tensor, Tensor]:
        x, scale, bias = grid.align(x, *self._numbers(grid, parts, start, stop))
        code = self._nearest(x, scale, bias)
        near = self._value(code.to(self.arithmetic), scale, bias).float()
        other = (code + torch.where((x > near) == (scale > 0), 1, -1)).clamp_(0, self._steps)
        far, size = self._value(other.to(self.arithmetic), scale, bias).float(), (stop - start, grid.columns)
        return near.reshape(size), far.reshape(size)

    def _store_codes(self, grid: Grid, x: Tensor, parts: Parts, start: int, stop: int, out: Tensor) -> None:
        numbers = self._numbers(grid, parts, start, stop)
        top, reach = self._steps, self._reach
        codes = compiled.encode_biased(x, grid.run, *numbers, bias_first=self.bias_first, top=top, reach=reach)
        if codes is None:
            codes = self._nearest(*grid.align(x, *numbers)).reshape(stop - start, grid.columns).to(torch.uint8)
        pack_into(codes, self.bits, out)

    def _numbers(self, grid: Grid, parts: Parts, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the scales and the biases of the rows, in ``arithmetic``."""
        scale, bias = (grid.pick(parts[name], start, stop).to(self.arithmetic) for name in ("scale", "bias"))
        return scale, bias

    @property
    def _reach(self) -> int:
        """Return how far from the rounded position the nearest code may be: the codes that a rounding can merge."""
        return 1 + int(self._steps * torch.finfo(self.arithmetic).eps)

    def _nearest(self, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        """Return the codes that decode nearest to ``x``; neighbours of the rounded position are tried too."""
        middle = self._position(x, scale.float(), bias.float()).round_().clamp_(0, self._steps)
        best, error = middle, self._error(middle, x, scale, bias)
        for away in (sign * distance for distance in range(1, self._reach + 1) for sign in (-1, 1)):
            other = (middle + away).clamp_(0, self._steps)
            its = self._error(other, x, scale, bias)
            best, error = torch.where(its < error, other, best), torch.minimum(its, error)
        return best

    def _error(self, codes: Tensor, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        return self._value(codes.to(self.arithmetic), scale, bias).float().sub_(x).abs_()
