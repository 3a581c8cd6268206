"""Tables of the values of codes that others have defined: nf4, fp4, E2M1, E2M3 and the 8-bit dynamic type."""

from __future__ import annotations

import torch
from torch import Tensor

# The 4-bit NormalFloat of QLoRA (arXiv 2305.14314, appendix E), as float32 values.
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

# bitsandbytes' fp4 by bit pattern: sign, then 12 times the magnitude in an order of its own (not E2M1's).
_FP4_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4 = tuple(
    float(torch.tensor(sign * value, dtype=torch.float32, device="cpu") / 12.0) + 0.0  # code 8 is 0, not -0
    for sign in (1.0, -1.0)
    for value in _FP4_TWELFTHS
)

# Elements of OCP Microscaling, by code: the sign is the highest bit.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E2M3 = (*(m / 8 for m in range(8)), *((1 + m / 8) * 2.0**e for e in range(3) for m in range(8)))
E2M3 = (*_E2M3, *(-value for value in _E2M3))


def _edges(steps: int) -> Tensor:
    """Return ``torch.linspace(0.1, 1, steps + 1)`` as processors with AVX2 round it; others round some bits otherwise.

    One multiplication and addition are rounded at once there, counted from the nearer end.
    """
    low = torch.tensor(0.1, dtype=torch.float32, device="cpu").double()
    step = ((1 - low) / steps).float().double()
    index = torch.arange(steps + 1, dtype=torch.float64, device="cpu")
    return torch.where(index < (steps + 1) // 2, low + step * index, 1 - step * (steps - index)).float()


def _dynamic() -> tuple[float, ...]:
    values = [0.0, 1.0]
    for decade in range(7):
        edges = _edges(2**decade)
        middles = (edges[:-1] + edges[1:]) / 2
        power = 10 ** (decade - 6)
        values += (power * middles).tolist() + (-power * middles).tolist()
    return tuple(sorted(values))


DYNAMIC = _dynamic()
"""The 256 ascending values of the signed 8-bit dynamic type (arXiv 1511.04561), which bitsandbytes uses for absmax.

There are seven decades below 1; the ``i``-th from the smallest holds ``2**i`` midpoints of equal steps from 0.1 to 1 of
the decade, of either sign; and there are 0 and 1.

>>> len(DYNAMIC), DYNAMIC[127], DYNAMIC[255]
(256, 0.0, 1.0)
"""
