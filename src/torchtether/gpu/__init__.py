"""Triton kernels for GPUs: decoding, encoding, rounding of inputs, and products of few rows, on tensors in place.

They compute the same as the torch ops in ``schemes``, with the same bits; each function returns whether it did so. If
not (no Triton, another device or dtype, a tracer that must see the ops), nothing is written, and the caller goes on
with torch ops. Triton comes with torch where torch is built for CUDA; it is imported when a tensor on a GPU first needs
it. ``TRITON_INTERPRET=1`` runs the kernels on the CPU, for tests without a GPU.
"""

from .encoding import (
    can_read,
    encode_affine,
    encode_float8,
    encode_nearest,
    encode_rows,
    extremes,
    magnitudes,
)
from .serving import serves

__all__ = [
    "can_read", "encode_affine", "encode_float8", "encode_nearest", "encode_rows", "extremes", "magnitudes",
    "serves",
]  # fmt: skip
