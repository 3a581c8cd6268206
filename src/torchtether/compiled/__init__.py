"""The loops over every element of a weight, compiled: what ``schemes`` computes with torch ops, with the same bits.

Every function says whether it did the work; where it did not (no compiler, another device or dtype, a tracer that must
see the ops) nothing is written, and the caller goes on with torch ops.
"""

from .loops import (
    BUILD,
    can_read,
    decode_affine,
    decode_table,
    encode_affine,
    encode_float8,
    encode_nearest,
    expect,
    extremes,
    is_at_hand,
    magnitudes,
)
from .recipe import AFFINE, FLOAT8, NEAREST, Recipe, encode_file, encode_rows, recipe

__all__ = [
    "AFFINE",
    "FLOAT8",
    "NEAREST",
    "Recipe",
    "BUILD",
    "can_read",
    "decode_affine",
    "decode_table",
    "encode_affine",
    "encode_file",
    "encode_float8",
    "encode_nearest",
    "encode_rows",
    "expect",
    "extremes",
    "is_at_hand",
    "magnitudes",
    "recipe",
]
