"""Kernels: products with quantized weights, and decoding, that read the parts as they lie.

``table.py`` says which kernel is used when, with its measurement. No layout but the scheme's own exists, so nothing is
derived, kept, or invalidated: moving, saving, ties, in-place writes and rows of embeddings see the same storage.

Where no kernel suits, and on all devices but CPUs and CUDA's, weights are decoded, a chunk of rows at a time, and
multiplied by torch; in a compiled graph the compiler fuses the decoding. No GPU has run any of that: fake tensors say
that the calls fit, and the CPU that their numbers are right, where torch has the op there, too.
"""

from . import bitsandbytes_4bit, chunks, cpu, decoding, fitting, gpu, int8pack, int_mm, rounding, scaled_mm
from .layout import DTYPES, PREFIX, Layout, layout_of
from .table import ANY, TABLE, choose, kernels_for

__all__ = [
    "ANY",
    "DTYPES",
    "PREFIX",
    "TABLE",
    "Layout",
    "bitsandbytes_4bit",
    "choose",
    "chunks",
    "fitting",
    "int8pack",
    "int_mm",
    "kernels_for",
    "layout_of",
    "cpu",
    "decoding",
    "gpu",
    "rounding",
    "scaled_mm",
]
