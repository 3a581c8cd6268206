"""The compiled extension module, which is built when the package is installed, and the calls of its loops.

``sources/`` holds the C and C++, ``setup_build.py`` the command that builds it, and ``room.py`` binds it to torch. The
loops compute the same as the torch ops in ``schemes``, with the same bits; each function returns whether it did so.
If not (no module, another device or dtype, a tracer that must see the ops), nothing is written, and the caller goes on
with torch ops. ``weights/products`` calls the products of Weights, ``files`` the checksums and the threads that read.
"""

from .loops import (
    DTYPES,
    can_read,
    decode_affine,
    decode_table,
    encode_biased,
    extremes,
    fit_biased,
    is_at_hand,
    magnitudes,
)
from .recipe import (
    AFFINE,
    FLOAT8,
    NEAREST,
    Recipe,
    encode_affine,
    encode_file,
    encode_float8,
    encode_nearest,
    encode_rows,
    fit_scales,
    recipe,
)
from .room import level, native, state

__all__ = [
    "AFFINE",
    "DTYPES",
    "FLOAT8",
    "NEAREST",
    "Recipe",
    "can_read",
    "decode_affine",
    "decode_table",
    "encode_affine",
    "encode_biased",
    "encode_file",
    "encode_float8",
    "encode_nearest",
    "encode_rows",
    "extremes",
    "fit_biased",
    "fit_scales",
    "is_at_hand",
    "level",
    "magnitudes",
    "native",
    "recipe",
    "state",
]
