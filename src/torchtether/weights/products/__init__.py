"""Kernels: products with quantized weights, and decoding, that read the parts as they lie.

``table.py`` says which kernel is used when, with its measurement. No layout but the scheme's own exists, so nothing is
derived, kept, or invalidated: moving, saving, ties, in-place writes and rows of embeddings see the same storage.

On CUDA devices (and all others) weights are decoded, a chunk of rows at a time, and multiplied by torch; in a compiled
graph the compiler fuses the decoding. Where inputs are rounded, too (``rounding.py``), torch's products of 8 bits are
called on CUDA. No GPU has run any of that: fake tensors say that the calls fit.
"""

from . import chunks, cpu, int8pack, int_mm, rounding
from .layout import DTYPES, PREFIX, Layout, layout_of
from .table import ANY, TABLE, choose, kernels_for

__all__ = [
    "ANY",
    "DTYPES",
    "PREFIX",
    "TABLE",
    "Layout",
    "choose",
    "chunks",
    "int8pack",
    "int_mm",
    "kernels_for",
    "layout_of",
    "cpu",
    "rounding",
]
