"""Double quantization: the absmax of each block as an 8-bit code of the dynamic type, as bitsandbytes stores it.

absmax (blocks,) uint8                          = dynamic[code] * nested_absmax + nested_offset
nested_absmax (ceil(blocks / block_size),) float32
nested_offset () float32
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .bits import table_of
from .blocks import fold
from .nearest import count_above, half_gaps, nearest_codes
from .scales import divide, reciprocal
from .scheme import Parts
from .tables import DYNAMIC

_THRESHOLDS, _ = nearest_codes(DYNAMIC)
_EXTREME = 16.0  # Gaussian weights stay below 3, and weights with 20-fold outliers below 8
ARITHMETIC = 2.0**-20
"""The error that float32 products and quotients may add, relative to absmax."""


def nest(amax: Tensor, block_size: int, parts: Parts) -> None:
    """Write ``amax`` (blocks,) to ``parts`` as codes under one float32 number per ``block_size`` of them."""
    if amax.numel() == 0:
        parts["nested_offset"].zero_()
        return
    mean = _mean(amax)
    mean = torch.where(mean.isfinite(), mean, _mean(amax * 2.0**-64) * 2.0**64)  # where the sum overflows
    offset = torch.where(amax.max() > _EXTREME * mean, torch.zeros_like(mean), mean)
    rest = amax - offset
    scale = fold(rest.abs(), block_size, 0, torch.amax)
    each = scale.repeat_interleave(block_size)[: rest.shape[0]]
    parts["absmax"].copy_(count_above(rest * reciprocal(each), _THRESHOLDS))
    parts["nested_absmax"].copy_(scale)
    parts["nested_offset"].copy_(offset)


def _mean(x: Tensor) -> Tensor:
    """Return the mean of ``x`` (n,), summed pairwise in an order that is the same on every device."""
    count = x.shape[0]
    x = F.pad(x, (0, (1 << (count - 1).bit_length()) - count))
    while x.shape[0] > 1:
        low, high = x.chunk(2)
        x = low + high
    return divide(x.view(()), count)


def nest_above(amax: Tensor, held: Parts, block_size: int) -> dict[str, Tensor]:
    """Return parts in which each absmax is the least representable one that is not below ``amax`` (blocks,).

    ``nested_absmax`` and ``nested_offset`` stay if they reach all of ``amax``, so that an absmax of ``held`` stays
    exact.
    """
    parts = {name: held[name].clone() for name in ("absmax", "nested_absmax", "nested_offset")}
    nest(amax, block_size, parts)
    index = torch.arange(amax.shape[0], device=amax.device) // block_size
    top = held["nested_absmax"].index_select(0, index) + held["nested_offset"]
    reaches = (amax <= top).all()
    for name in ("nested_absmax", "nested_offset"):
        parts[name] = torch.where(reaches, held[name], parts[name] * (1 + 2.0**-20))
    scale = parts["nested_absmax"].index_select(0, index)
    rest = (amax - parts["nested_offset"]) * reciprocal(scale)
    table = table_of(DYNAMIC, amax.device)
    code = torch.bucketize(rest, table, out_int32=True).clamp_max_(255)

    def value(code: Tensor) -> Tensor:
        return table.index_select(0, code.clamp(0, 255)).mul_(scale).add_(parts["nested_offset"])

    code = torch.where(value(code - 1) >= amax, code - 1, code)  # arithmetic may have moved it to a neighbour
    code = torch.where(value(code) < amax, code + 1, code).clamp_(0, 255)
    same = held["absmax"].int()  # under a scale of zero every code is the same number
    code = torch.where(value(same) == amax, same, code)
    parts["absmax"] = code.to(torch.uint8)
    return parts


def unnest(parts: Parts, block_size: int, index: Tensor) -> Tensor:
    """Return the absmax, float32, of the blocks ``index``."""
    codes = parts["absmax"].index_select(0, index)
    scale = parts["nested_absmax"].index_select(0, index // block_size)
    values = table_of(DYNAMIC, codes.device).index_select(0, codes.int())
    return values.mul_(scale).add_(parts["nested_offset"])


def nesting_error(parts: Parts, block_size: int, index: Tensor) -> Tensor:
    """Return the largest error of the absmax of the blocks ``index``."""
    scale = parts["nested_absmax"].index_select(0, index // block_size)
    gaps = torch.tensor(half_gaps(DYNAMIC), device=index.device)
    gap = gaps.index_select(0, parts["absmax"].index_select(0, index).int())
    return gap * scale + ARITHMETIC * (scale + parts["nested_offset"].abs())
