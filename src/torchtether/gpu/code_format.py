"""The facts about a weight with which the kernels are compiled; sizes and addresses come with each call."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

WHOLE = 1 << 27
"""The ``group`` of rows that are one group: the most columns that the kernels take, which count bits in int32."""


@dataclass(frozen=True)
class CodeFormat:
    """The decoding of codes: ``value = ((level + before) * scale) * unit + after``, each step rounded to float32.

    bits      of a code: 1 to 8, in a dense stream per row, or one over all rows (``is_flat``)
    level     of a code: itself (``source`` "unsigned", "signed"), a float ("e4m3", "e5m2"), or ``table[code]``
    before    ``-(zero point + offset)``, or a bias
    scale     "float" of any dtype, "e8m0", "e4m3", or "nested": ``dynamic[code] * extra[group // nested] + offset``
    after     minus a minimum, or a bias

    family    "simple"; "biased" and "biased_first": a bias comes after, or before; "super": scales are integers
              times a float for every ``nested`` of them; "ordered": each column names its group
    rounds    the dtype to which both steps of a bias are rounded: "float32", "bfloat16" or "float16"
    """

    bits: int
    source: str
    scale: str
    family: str = "simple"
    rounds: str = "float32"
    offset: float = 0.0
    unit: float = 1.0
    group: int = WHOLE
    nested: int = 1
    global_scale: str = "none"
    is_flat: bool = False
    table: tuple[int, ...] = ()
    is_e2m1: bool = False
    """Whether codes are numbers of e2m1, as the table has them, times scales of 8 bits: 16 bits hold that exactly."""
    dynamic: tuple[int, ...] = ()
    hashed: int = field(init=False, repr=False, compare=False)
    """Its hash, for which every launch asks; tables have up to 256 numbers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hashed", hash(tuple(getattr(self, one.name) for one in fields(self) if one.compare)))

    def __hash__(self) -> int:
        return self.hashed


def bits_of(values: Iterable[float]) -> tuple[int, ...]:
    """Return the bits of ``values`` as float32, in int32, because Python and some Tritons take -0.0 for 0.0.

    >>> bits_of([1.0, -0.0])
    (1065353216, -2147483648)
    """
    values = tuple(values)
    return struct.unpack(f"{len(values)}i", struct.pack(f"{len(values)}f", *values))
