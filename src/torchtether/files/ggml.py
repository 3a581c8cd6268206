"""The tensor types of GGUF: the elements and bytes of a block."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Packing(NamedTuple):
    """A type of GGUF: its number and name, elements and bytes of a block, and the torch dtype, if there is one."""

    number: int
    name: str
    elements: int
    nbytes: int
    dtype: torch.dtype | None = None


_PLAIN = (
    Packing(0, "F32", 1, 4, torch.float32),
    Packing(1, "F16", 1, 2, torch.float16),
    Packing(24, "I8", 1, 1, torch.int8),
    Packing(25, "I16", 1, 2, torch.int16),
    Packing(26, "I32", 1, 4, torch.int32),
    Packing(27, "I64", 1, 8, torch.int64),
    Packing(28, "F64", 1, 8, torch.float64),
    Packing(30, "BF16", 1, 2, torch.bfloat16),
)
_BLOCKS = (
    Packing(2, "Q4_0", 32, 18),
    Packing(3, "Q4_1", 32, 20),
    Packing(6, "Q5_0", 32, 22),
    Packing(7, "Q5_1", 32, 24),
    Packing(8, "Q8_0", 32, 34),
    Packing(9, "Q8_1", 32, 40),
    Packing(10, "Q2_K", 256, 84),
    Packing(11, "Q3_K", 256, 110),
    Packing(12, "Q4_K", 256, 144),
    Packing(13, "Q5_K", 256, 176),
    Packing(14, "Q6_K", 256, 210),
    Packing(15, "Q8_K", 256, 292),
    Packing(16, "IQ2_XXS", 256, 66),
    Packing(17, "IQ2_XS", 256, 74),
    Packing(18, "IQ3_XXS", 256, 98),
    Packing(19, "IQ1_S", 256, 50),
    Packing(20, "IQ4_NL", 32, 18),
    Packing(21, "IQ3_S", 256, 110),
    Packing(22, "IQ2_S", 256, 82),
    Packing(23, "IQ4_XS", 256, 136),
    Packing(29, "IQ1_M", 256, 56),
    Packing(34, "TQ1_0", 256, 54),
    Packing(35, "TQ2_0", 256, 66),
    Packing(39, "MXFP4", 32, 17),
    Packing(40, "NVFP4", 64, 36),
    Packing(41, "Q1_0", 128, 18),
)

PACKINGS: dict[str, Packing] = {packing.name: packing for packing in (*_PLAIN, *_BLOCKS)}
"""By name."""

NUMBERED: dict[int, Packing] = {packing.number: packing for packing in PACKINGS.values()}

PLAIN: dict[torch.dtype, Packing] = {packing.dtype: packing for packing in _PLAIN if packing.dtype is not None}
"""The types that are torch dtypes, by dtype."""
