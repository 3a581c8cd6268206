"""Which kernel multiplies: one small table, with the measurement that put each row where it is.

Measured at 4096 x 4096, times relative to dense ``F.linear`` in the same dtype, medians of interleaved runs; again with
``python -m tests.benchmarks.bench_compute``. "Fast halves" are dtypes of 16 bits that torch multiplies with the vectors
of this processor (``has_fast_halves``); elsewhere dense products of many such rows take ten times as long as float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

from ... import compiled
from ...torch_private.processors import has_fast_float16
from . import int_mm
from .layout import DTYPES, KINDS, Layout

HALVES = (torch.bfloat16, torch.float16)


class KernelChoice(NamedTuple):
    """``kernel`` is for at most ``rows`` rows of input and at least ``elements`` of weight, where all else fits.

    ``rounds`` is whether inputs are rounded to int8, ``None`` for either.
    """

    kernel: str
    kinds: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    fast_halves: bool | None
    rounds: bool | None
    rows: int
    measured: str
    elements: int = 0


ANY = 1 << 62
INTEGERS = ("INT8", "UINT8", "INT4")

TABLE = (
    # AVX2 without AVX-512, and all other processors
    KernelChoice(
        "compiled",
        KINDS,
        HALVES,
        False,
        None,
        ANY,
        "AVX2, three shapes, batch 1: int8 .32 to .43, int4 .28 to .31, nf4, fp8 .60 to .70; batch 512: .29 to .55",
    ),
    # AVX-512, with or without BF16 and AMX: the same kernels, at the level of AVX2; torch's own products are faster
    KernelChoice(
        "compiled",
        ("INT8",),
        HALVES,
        True,
        True,
        2,
        "AVX-512 Xeon with AMX, 4096 x 4096 bfloat16, 1 row: .47 of dense; not measured with rounded inputs",
    ),
    KernelChoice(
        "int_mm",
        ("INT8",),
        HALVES,
        True,
        True,
        ANY,
        "AVX-512 Xeon with AMX, 4096 x 4096, without the rounding: batch 4: .70 of dense bfloat16, 16: .65, 64: .60,"
        " 512: .71; without AMX: not measured",
    ),
    KernelChoice(
        "compiled",
        INTEGERS,
        HALVES,
        True,
        None,
        16,
        "AVX-512 Xeon, 2048 x 2048 bfloat16, 1 thread, int8, batch 5: .93, 8: 1.7, 16: 3.0, 32: 20, in chunks 4.1, 4.8,"
        " 4.2, 4.7; int4, batch 8: 1.7, 16: 4.1, in chunks 9.7, 6.3; at the level of AVX2, 852 M parameters, 1 row:"
        " Q8_0 22 GB/s, where a plain read takes 23; else not measured",
    ),
    KernelChoice(
        "compiled",
        tuple(kind for kind in KINDS if kind not in INTEGERS),
        HALVES,
        True,
        None,
        4,
        "AVX-512: not measured; chunks in torch: 1.66 at batch 1",
    ),
    # float32 on all processors; above these rows it is what F.linear of the decoded values is, bit for bit
    KernelChoice(
        "compiled",
        KINDS,
        (torch.float32,),
        None,
        None,
        16,
        "AVX2, int8, batch 1, 4, 16, of dense: 4096 x 4096 .4, .2, .6; decoding first 6 to 20",
        elements=1 << 20,
    ),
    KernelChoice(
        "compiled",
        KINDS,
        (torch.float32,),
        None,
        None,
        4,
        "AVX2, int8, batch 1, 4, of dense: 576 x 576 .7, .5, 1536 x 576 .7; decoding first: 576 x 576 4.5, 2.4."
        " Batch 16: 1.2, decoding first 2.6; small layers keep their bits there",
    ),
    # without the compiled room
    KernelChoice(
        "int8pack",
        ("INT8",),
        (torch.bfloat16,),
        None,
        False,
        4,
        "AVX-512, batch 1: .47, 8: .82, 32: 1.7; AVX2, batch 1: .7; float16, AVX2, 2048 x 2048: 1.6 to 3 of chunks",
    ),
)
"""The first row that fits is taken; where none does, weights are decoded in chunks of rows and multiplied by torch."""


@lru_cache(maxsize=2)
def has_fast_halves(dtype: torch.dtype) -> bool:
    """Return whether torch multiplies matrices of ``dtype``, of 16 bits, with the vectors of this processor.

    bfloat16 with AVX-512 (measured on a Xeon); float16 where oneDNN says so, too: AVX512-FP16, say (not measured).
    """
    has_vectors = "AVX512" in torch.backends.cpu.get_cpu_capability()
    return has_vectors and (dtype is torch.bfloat16 or has_fast_float16())


def kernels_for(layout: Layout, dtype: torch.dtype) -> tuple[tuple[str, int], ...]:
    """Return the kernels for a weight on the CPU, best first, each with the most rows of input that it is for."""
    found = layout.choices.get(dtype)
    if found is None:
        found = layout.choices[dtype] = tuple(_kernels_for(layout, dtype))
        if found and found[0][0] == "compiled":
            module = compiled.native()
            assert module is not None
            module.set_most(layout.bound(), DTYPES[dtype], found[0][1])
    return found


def _kernels_for(layout: Layout, dtype: torch.dtype) -> Iterator[tuple[str, int]]:
    fields = layout.fields
    for row in TABLE:
        is_there = row.kernel != "compiled" or compiled.native() is not None
        if row.kernel == "int_mm":
            is_there = int_mm.takes(layout)
        fits = layout.kind in row.kinds and dtype in row.dtypes and layout.rows * layout.columns >= row.elements
        is_processor = row.fast_halves is None or row.fast_halves == has_fast_halves(dtype)
        is_input = row.rounds is None or row.rounds == bool(fields["activations"])
        if is_there and fits and is_processor and is_input:
            yield row.kernel, row.rows


def choose(layout: Layout | None, dtype: torch.dtype, rows: int) -> str:
    """Return the name of the kernel for ``rows`` rows of input: ``compiled``, ``int_mm``, ``int8pack`` or
    ``chunks``.

    >>> choose(None, torch.bfloat16, 1)
    'chunks'
    """
    fitting = kernels_for(layout, dtype) if layout is not None else ()
    return next((kernel for kernel, most in fitting if rows <= most), "chunks")
