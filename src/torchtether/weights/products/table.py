"""The table that selects the kernel for a product, with the measurement behind each row.

Measured at 4096 x 4096, times relative to dense ``F.linear`` in the same dtype, medians of interleaved runs, by
``python -m tests.benchmarks.bench_compute``. EPYC is family 26 with AVX-512 BF16 and VNNI, 2026-11-24 and 25: processor
time beside other work, or time on an idle core, the least of many calls. "Fast halves" are dtypes of 16 bits that torch
multiplies with the vectors of this processor (``has_fast_halves``); elsewhere dense products of many such rows take ten
times as long as float32.
Rows for CUDA: an H100, 2026-11-26, ``python -m tests.gpu``; up to 16 rows of inputs in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

from ... import compiled
from ...gpu.serving import has_triton
from ...torch_private.processors import has_arm_bfloat16, has_fast_float16, has_tiles
from . import bitsandbytes_4bit, int8pack, int_mm, scaled_mm
from .layout import DTYPES, KINDS, STREAM, Layout

HALVES = (torch.bfloat16, torch.float16)


class KernelChoice(NamedTuple):
    """A row of the table: ``kernel`` is for at most ``rows`` rows of input, and weights of ``elements`` or more.

    ``fast_halves`` is the required ``has_fast_halves(dtype)``, ``rounds`` whether inputs are rounded, ``blocks`` the
    required ``has_blocks()``, ``amx`` the required ``has_amx()``; ``None`` matches either value. ``device`` is the type
    of the device.
    """

    kernel: str
    kinds: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    fast_halves: bool | None
    rounds: bool | None
    rows: int
    measured: str
    elements: int = 0
    device: str = "cpu"
    blocks: bool | None = None
    amx: bool | None = None


ANY = 1 << 62
INTEGERS = ("INT8", "UINT8", "INT4")


def _bf16(
    amx: bool, kernel: str, kinds: tuple[str, ...], rounds: bool | None, rows: int, measured: str
) -> KernelChoice:
    return KernelChoice(kernel, kinds, (torch.bfloat16,), True, rounds, rows, measured, blocks=True, amx=amx)


TABLE = (
    # AVX2 without AVX-512, and all other processors: on ARM the values are tested in an emulator, times not measured
    KernelChoice(
        "compiled",
        KINDS,
        HALVES,
        False,
        None,
        ANY,
        "AVX2, three shapes, batch 1: int8 .32 to .43, int4 .28 to .31, nf4, fp8 .60 to .70; batch 512: .29 to .55;"
        " EPYC of family 23, 1 thread, batch 1: Q4_0 .35, MLX 4 bits .35, Q4_1 .39, Q4_K .42, Q5_K .69, Q6_K .82."
        " SSE2 alone (EPYC of family 26), 2 threads, float32, batch 1: int8 .78, int4 3.2, nf4 4.0, fp8 11",
    ),
    # AVX-512 with BF16 and VNNI, and AMX
    _bf16(
        True,
        "compiled",
        ("INT4",),
        False,
        7,
        "Xeon, 2 threads, 4, 8 rows: .45, .79, in blocks 8, 16: .74, .73; groups of 32 .42, .80, in blocks .86, .84",
    ),
    _bf16(
        True,
        "compiled",
        ("INT4",),
        True,
        10,
        "Xeon, 2 threads, 8, 12, 16 rows: .60, .81, 1.0, in blocks: .74, .72, .69",
    ),
    _bf16(
        True,
        "compiled",
        ("INT8", "UINT8"),
        None,
        7,
        "Xeon, 2 threads, 4, 8, 12 rows: .51, .83, 1.2, in blocks 8, 16: .83, .82; inputs rounded: .50, .66, .84, in"
        " blocks: .60, .64",
    ),
    _bf16(True, "compiled", ("TABLE4",), None, 4, "Xeon, 2 threads, 4, 8 rows: .62, 1.1, in blocks: .66, .68"),
    _bf16(True, "compiled", ("E4M3", "E5M2"), None, 3, "Xeon, 2 threads, 4, 8 rows: fp8 .94, 1.6, in blocks: .80, .78"),
    _bf16(
        True,
        "compiled",
        (STREAM,),
        None,
        12,
        "Xeon, 2 threads, 4, 8, 16 rows: Q4_K .43, .79, 1.5, in blocks: 1.2, 1.2, 1.2, 64: 1.1; Q6_K 1.3, 2.0, 3.3,"
        " in blocks 1.8, 1.8, 1.8, 64: 1.4",
    ),
    _bf16(
        True,
        "blocks",
        KINDS,
        None,
        ANY,
        "Xeon, 2 threads, batch 16, 64, 256, 512, 1024: int8 .87, .70, .94, .88, 1.07, int4 .72, .62, .86, .81, .98,"
        " fp8 .81, .67, .96, .85, 1.04, nf4 .66, .62, .86, .85, .98; inputs rounded: int8 .64, .49, .54, .51, .62, int4"
        " .72, .62, .90, .85, 1.04; chunks, 512: 1.1 to 1.2",
    ),
    # AVX-512 with BF16 and VNNI, without AMX
    _bf16(
        False,
        "compiled",
        ("INT4",),
        True,
        24,
        "EPYC, 1 thread, 1, 8, 16, 24 rows: .10, .45, .68, .83, in blocks from 8 on: .93, .86, .82",
    ),
    _bf16(
        False,
        "compiled",
        ("INT4",),
        False,
        12,
        "EPYC, 1 thread, 1, 4, 8, 16, 24 rows: .12, .40, .70, 1.05, 1.27, in blocks from 4 on: 1.1, 1.1, 1.07, 1.08;"
        " groups of 32, 16 and 24: 1.24, 1.50, in blocks 1.6, 1.55",
    ),
    _bf16(
        False,
        "compiled",
        ("INT8", "UINT8"),
        True,
        8,
        "EPYC, 1 thread, 1, 4, 8, 12 rows: .17, .28, .45, .61, in blocks from 4 on: .47, .49, .49",
    ),
    _bf16(
        False,
        "compiled",
        ("INT8", "UINT8"),
        False,
        12,
        "EPYC, 1 thread, 1, 4, 8, 12, 16 rows: int8 .19, .45, .75, .98, 1.05, in blocks from 4 on: 1.06, 1.09, 1.1,"
        " 1.05; Q8_0 .20, .66, 1.1, 1.4, 1.6, in blocks 1.5, 1.4, 1.4, 1.3",
    ),
    _bf16(
        False,
        "compiled",
        (STREAM,),
        None,
        12,
        "EPYC, 2 threads, 1, 4, 8, 12, 16 rows: Q4_K .17, .58, .87, 1.06, 1.3, in blocks from 4 on: 1.06, 1.07, 1.05,"
        " 1.05; Q6_K .42, 1.05, 1.7, 1.95, 2.2, in blocks 2.1, 2.0, 1.75, 1.7; MLX 8 bits .32, .86, 1.2, 1.4, 1.55, in"
        " blocks 2.4, 2.15, 2.1, 2.0",
    ),
    _bf16(
        False,
        "compiled",
        ("TABLE4",),
        None,
        6,
        "EPYC, 1 thread, 1, 4, 6, 8 rows: nf4 .20, .66, .91, 1.17, in blocks from 4 on: 1.05, 1.13, 1.09",
    ),
    _bf16(
        False,
        "compiled",
        ("E4M3", "E5M2"),
        None,
        3,
        "EPYC, 1 thread, 1, 3, 4 rows: fp8 .38, .98, 1.05, in blocks 1.0 for 3 and .96 for 4",
    ),
    _bf16(
        False,
        "blocks",
        KINDS,
        None,
        ANY,
        "EPYC, 1 thread, three shapes, batch 8, 16, 64, 512: int8 .97, .99, 1.01, .99, int4 .88, .92, .98, 1.0,"
        " fp8 .93, .95, .98, .99, nf4 .98, .99, 1.01, 1.0; inputs rounded: int8 .53, .57, .56, .54, int4 .61, .62, .60,"
        " .57. 4096 x 4096: Q4_K 1.07, 1.0, 1.03; int_mm without the rounding 1.3, 1.1, .78, .54; chunks, int8 1.3,"
        " 1.3, 1.15, 1.10",
    ),
    # AVX-512 without BF16, and with AMX: the same kernels as above, without VNNI those of AVX2
    KernelChoice(
        "compiled",
        ("INT8",),
        HALVES,
        True,
        True,
        2,
        "AVX-512 Xeon with AMX, at the level of AVX2, 4096 x 4096 bfloat16, 1 row: .47 of dense; else not measured",
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
        "AVX-512 Xeon at the level of AVX2, 2048 x 2048 bfloat16, 1 thread, int8, batch 5: .93, 8: 1.7, 16: 3.0, 32:"
        " 20, in chunks 4.1, 4.8, 4.2, 4.7; int4, batch 8: 1.7, 16: 4.1, in chunks 9.7, 6.3; 852 M parameters, 1 row:"
        " Q8_0 22 GB/s, where a plain read takes 23; with VNNI, and else: not measured",
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
    # float32 on all processors; for more rows the result has the bits of F.linear of the decoded values
    KernelChoice(
        "compiled",
        KINDS,
        (torch.float32,),
        None,
        None,
        16,
        "AVX2, int8, batch 1, 4, 16, of dense: 4096 x 4096 .4, .2, .6; decoding first 6 to 20; EPYC of family 23, 1"
        " thread, batch 1: int8 .62, int4 .70, nf4 .70, fp8 .68, Q8_0 .84, Q4_1 .98, Q4_K 1.0, Q6_K 1.6; family 26, 2"
        " threads: nf4 .05, int8 .06, int4, Q4_1 .08, fp8, Q8_0 .09; before, 1 thread: Q4_K .34, Q6_K .60",
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
        " Batch 16: 1.2, decoding first 2.6; small layers keep their bits there. EPYC of family 23, 1 thread, batch 1,"
        " 576 x 576: int8 1.6, int4, nf4, fp8, Q8_0 2.1 to 2.3, Q4_1 2.8, Q4_K 3.6: dense reads from the cache. Family"
        " 26, 2 threads, 576 x 576: int8 .45, Q8_0, nf4 .54, int4, fp8 .57, Q4_1 .66; 1536 x 576: int8 .28 to Q4_1 .48",
    ),
    # without the compiled module
    KernelChoice(
        "int8pack",
        ("INT8",),
        (torch.bfloat16,),
        None,
        False,
        4,
        "AVX-512, batch 1: .47, 8: .82, 32: 1.7; AVX2, batch 1: .7; float16, AVX2, 2048 x 2048: 1.6 to 3 of chunks",
    ),
    # CUDA; for more rows, and if the function of a row returns None, weights are decoded in pieces
    KernelChoice(
        "int_mm",
        ("INT8",),
        tuple(DTYPES),
        None,
        True,
        ANY,
        "4096 rows, with the rounding of inputs: 28672 x 8192 1.08 of dense, 4096 x 4096 1.38; from 17 rows on",
        device="cuda",
    ),
    KernelChoice(
        "scaled_mm",
        ("E4M3", "TABLE4", STREAM),
        (torch.bfloat16,),
        None,
        True,
        ANY,
        "float8, 4096 rows, inputs rounded: 28672 x 8192 0.56 of dense, 4096 x 4096 0.78; others not measured",
        device="cuda",
    ),
    KernelChoice(
        "triton",
        KINDS,
        tuple(DTYPES),
        None,
        False,
        16,
        "one row int8 0.51, int4 0.43, nf4 0.46, mxfp4 0.45, fp8 0.50; 16 rows 0.59 to 1.02; 28672 x 8192: one row 0.49"
        ", 0.34, 0.35, 0.38, 0.49; 16 rows 0.56 to 1.04; called from Python, 4096 x 4096 takes 45 us, dense 17",
        device="cuda",
    ),
    # without Triton, or if its kernels do not fit
    KernelChoice(
        "bitsandbytes",
        ("TABLE4",),
        tuple(DTYPES),
        None,
        False,
        16,
        "one row 0.65, 16 rows 2.3; 28672 x 8192: 0.61, 2.1; it reads the codes as they lie, too",
        device="cuda",
    ),
    KernelChoice(
        "int8pack",
        ("INT8",),
        tuple(DTYPES),
        None,
        False,
        16,
        "not measured; of torch 2.13 to 2.15 (int8mm.cu) one thread reads a row of the weight byte by byte, 16 rows of"
        " input in the time of one: it may take longer than dense, decoding first longer still",
        device="cuda",
    ),
)
"""The first row that fits is used; if none does, weights are decoded in chunks of rows and multiplied by torch."""

TAKES: dict[str, Callable[[Layout], bool]] = {
    "compiled": lambda layout: compiled.native() is not None,
    "blocks": lambda layout: has_blocks(),
    "triton": lambda layout: has_triton(),
    "int_mm": int_mm.takes,
    "int8pack": int8pack.takes,
    "scaled_mm": scaled_mm.takes,
    "bitsandbytes": bitsandbytes_4bit.takes,
}
"""For each kernel, the test of whether it is available and supports a layout."""


def has_blocks() -> bool:
    """Return whether the compiled module multiplies many rows of bfloat16, faster than torch.

    It does with AVX-512 BF16 and VNNI. Where a processor has AMX, but the module was built without it, oneDNN's
    products of many rows are faster.
    """
    return has_amx() or (compiled.native() is not None and compiled.level() == "avx512_bf16" and not has_tiles())


def has_amx() -> bool:
    """Return whether the compiled module multiplies many rows of bfloat16 by AMX."""
    return compiled.native() is not None and compiled.level() == "avx512_amx"


@lru_cache(maxsize=2)
def has_fast_halves(dtype: torch.dtype) -> bool:
    """Return whether torch multiplies matrices of ``dtype``, of 16 bits, with the vectors of this processor.

    It does for bfloat16 with AVX-512 (measured on a Xeon), and on ARM if oneDNN reports support (not measured); for
    float16 with AVX-512 if oneDNN reports support, such as with AVX512-FP16 (not measured).
    """
    if "AVX512" in torch.backends.cpu.get_cpu_capability():
        return dtype is torch.bfloat16 or has_fast_float16()
    return dtype is torch.bfloat16 and has_arm_bfloat16()


def kernels_for(layout: Layout, dtype: torch.dtype, device: str = "cpu") -> tuple[tuple[str, int], ...]:
    """Return the kernels for a layout on a device type, best first, each with its most rows of input."""
    key = dtype if device == "cpu" else (dtype, device)
    found = layout.choices.get(key)
    if found is None:
        found = layout.choices[key] = tuple(_kernels_for(layout, dtype, device))
        if found and found[0][0] == "compiled":
            module = compiled.native()
            assert module is not None
            module.set_rows(layout.bound(), DTYPES[dtype], *_rows_of(found))
    return found


def _rows_of(found: tuple[tuple[str, int], ...]) -> tuple[int, int]:
    """Return the most rows for the compiled kernels, and the least that they multiply in blocks; 0 for never."""
    by_row = found[0][1]
    most = next((most for kernel, most in found if kernel == "blocks"), 0)
    return (most, by_row + 1) if most else (by_row, 0)


def _kernels_for(layout: Layout, dtype: torch.dtype, device: str) -> Iterator[tuple[str, int]]:
    for row in TABLE:
        is_place = row.device == device and (row.fast_halves is None or row.fast_halves == has_fast_halves(dtype))
        is_place = is_place and (row.blocks is None or row.blocks == has_blocks())
        is_place = is_place and (row.amx is None or row.amx == has_amx())
        fits = layout.kind in row.kinds and dtype in row.dtypes and layout.rows * layout.columns >= row.elements
        is_input = row.rounds is None or row.rounds == bool(layout.fields["activations"])
        if is_place and fits and is_input and TAKES[row.kernel](layout):
            yield row.kernel, row.rows
