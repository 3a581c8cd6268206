"""Groups of ``bench_compute``: products with quantized weights beside dense ones, with the bars of this processor.

Bars are pairs: of processors with AVX2 only, and of those with AVX-512.
"""

import itertools
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

import torchtether as tt
from tests.benchmarks.contenders import (
    DENSE,
    SCHEMES,
    SHAPES,
    applied,
    called,
    limit,
    peer_linears,
    random_values,
    reader,
    repeated_weight,
    weight_of,
)
from tests.benchmarks.measuring import bar_here, in_fresh_process

ONE_ROW = {"int8": (0.5, 0.5), "int4": (0.32, 0.35), "nf4": (0.6, 0.5), "fp8": (0.65, 0.6)}
MORE_ROWS = {8: (1.0, 1.0), 16: (1.0, 1.0), 64: (1.0, 1.15), 512: (0.6, 1.15)}
ROUNDED = (0.4, 0.6)
"""512 rows of inputs rounded to int8."""

NEVER_SLOWER = 1.05
"""What is the same work can measure 5 % apart."""

CAST = 1.5
"""Casting the inputs takes 20 to 80 microseconds, a third of the fastest product; decoding the weight took four."""

NO_WAIT = 50
"""Milliseconds by which the first product of a process may be longer than a later one."""

HALF, BF16, E8M0 = torch.float16, torch.bfloat16, torch.float8_e8m0fnu
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
GGUF = {
    "Q8_0": tt.int8(32, scale_dtype=HALF),
    "Q4_0": tt.Affine(4, block=(1, 32), scale_dtype=HALF),
    "Q4_1": tt.Biased(4, (1, 32), HALF),
    "Q5_0": tt.Affine(5, block=(1, 32), scale_dtype=HALF),
    "Q5_1": tt.Biased(5, (1, 32), HALF),
    "Q2_K": tt.SuperBlocks(2, 16, scale_bits=4, minimum=True),
    "Q3_K": tt.SuperBlocks(3, 16, offset=4),
    "Q4_K": tt.SuperBlocks(4, 32, minimum=True),
    "Q5_K": tt.SuperBlocks(5, 32, minimum=True),
    "Q6_K": tt.SuperBlocks(6, 16, scale_bits=8, offset=32),
    "IQ4_NL": tt.SuperBlocks(4, 32, 32, 0, table=IQ4),
    "IQ4_XS": tt.SuperBlocks(4, 32, table=IQ4),
}
LOADED = {
    **GGUF,
    **{f"GPTQ {b} bits": tt.Affine(b, signed=False, symmetric=False, block=(1, 128), scale_dtype=HALF) for b in (2, 3)},
    "GPTQ 4 bits, ordered": tt.Affine(4, False, symmetric=False, block=(1, 128), act_order=True, scale_dtype=HALF),
    **{f"{b} bits, groups of 32": tt.Affine(b, block=(1, 32), scale_dtype=BF16) for b in (5, 6, 7)},
    **{f"MLX {b} bits": tt.Biased(b, (1, 64), BF16, BF16) for b in (2, 3, 4, 5, 6, 8)},
    **{f"HQQ {b} bits": tt.Biased(b, (1, 64), HALF, HALF, bias_first=True) for b in (1, 2, 3, 4, 8)},
    **{f"quanto {b} bits": tt.Biased(b, (1, 128), BF16, BF16) for b in (2, 4)},
    "bitsandbytes int8": tt.Affine(narrow_range=True, unit=7.874015718698502e-3),
    "bitsandbytes fp4": tt.fp4(),
    "nf4, two levels": tt.nf4(double_quant=True),
    "nvfp4": tt.nvfp4(),
    "mxfp4": tt.mxfp4(),
    "mxfp6": tt.ScaledFloat("e2m3", block=(1, 32), scale_dtype=E8M0),
    "mxfp8": tt.mxfp8(),
    "fp8, a scale per tensor": tt.fp8("tensor"),
    "fp8, a scale per block": tt.fp8("block"),
    "fp8 e5m2": tt.ScaledFloat("e5m2"),
}
"""What published formats hold beside the four of ``SCHEMES``."""


def products(size, batch, peers=False):
    read = reader() if batch == 1 else None
    for rows, columns in SHAPES[size]:
        values, x = random_values(rows, columns), torch.randn(batch, columns).bfloat16()
        contenders, bars = {DENSE: applied(values, x)}, []
        others = peer_linears(values) if peers else {}
        contenders |= {name: called(module, x) for name, module in others.items()}
        for scheme in SCHEMES:
            weight = weight_of(values, scheme)
            name = f"ours {scheme}"
            contenders[name] = applied(weight, x)
            if read is not None:
                contenders[f"limit {scheme}"] = limit(read, weight)
            most = bar_here(*(ONE_ROW[scheme] if batch == 1 else MORE_ROWS[batch]))
            bars.append((f"{_rows(batch)}: {scheme} against dense", name, (DENSE,), most))
            same = tuple(other for other in others if other.endswith(f" {scheme}"))
            if same:
                bars.append((f"{_rows(batch)}: {scheme} against the fastest peer", name, same, 1.0))
        yield f"{rows}x{columns}, {_rows(batch)}", contenders, bars


def _rows(batch):
    return f"{batch} row{'s' * (batch > 1)}"


def decode(size):
    """One row."""
    yield from products(size, 1, peers=True)


def batches(size):
    """8, 16 and 64 rows."""
    for batch in (8, 16, 64):
        yield from products(size, batch)


def prefill(size):
    """512 rows."""
    yield from products(size, 512)


def activations(size):
    """Inputs rounded to int8; the title says by how much of its norm rounding moves a product."""
    for (rows, columns), batch in itertools.product(SHAPES[size], (1, 8, 16, 512)):
        values, x = random_values(rows, columns), torch.randn(batch, columns).bfloat16()
        contenders, bars, moved = {DENSE: applied(values, x)}, [], []
        for scheme in ("int8", "int4"):
            exact, rounding = (nn.Linear(columns, rows, bias=False, device="meta") for _ in range(2))
            exact.weight, rounding.weight = weight_of(values, scheme), weight_of(values, scheme)
            tt.quantize_activations(rounding, "int8")
            contenders |= {f"ours {scheme}": called(exact, x), f"ours {scheme}, rounding": called(rounding, x)}
            other, most = (f"ours {scheme}", NEVER_SLOWER) if batch <= 16 else (DENSE, bar_here(*ROUNDED))
            against = "exact inputs" if batch <= 16 else "dense"
            what = f"{_rows(batch)} rounded: {scheme} against {against}"
            bars.append((what, f"ours {scheme}, rounding", (other,), most))
            wanted = exact(x).float()
            moved.append(f"{scheme} {float((rounding(x).float() - wanted).norm() / wanted.norm()):.2%}")
        yield f"{rows}x{columns}, {_rows(batch)} rounded (moves products by: {', '.join(moved)})", contenders, bars


def schemes(size):
    """One row with every other scheme that a format can load."""
    for rows, columns in SHAPES[size]:
        x = torch.randn(1, columns).bfloat16()
        contenders, bars = {DENSE: applied(random_values(rows, columns), x)}, []
        for name, scheme in LOADED.items():
            contenders[f"ours {name}"] = applied(repeated_weight(rows, columns, scheme), x)
            bars.append((f"1 row: {name} against dense", f"ours {name}", (DENSE,), 1.0))
        yield f"{rows}x{columns}, 1 row", contenders, bars


SINGLES = {"full": ((576, 576), (1536, 576), (4096, 4096)), "small": ((64, 256),)}
SINGLES["quick"] = SINGLES["full"]


def singles(size):
    """One row of float32, also with layers that are small; large ones with every scheme that a format can load."""
    kinds = {name: getattr(tt, name)() for name in SCHEMES} | {name: GGUF[name] for name in ("Q8_0", "Q4_1")}
    for rows, columns in SINGLES[size]:
        x, dense = torch.randn(1, columns), "dense float32"
        contenders, bars = {dense: applied(random_values(rows, columns).float(), x)}, []
        for name, scheme in (kinds | LOADED if columns == 4096 else kinds).items():
            contenders[f"ours {name}"] = applied(repeated_weight(rows, columns, scheme, torch.float32), x)
            bars.append((f"float32, 1 row: {name} against dense", f"ours {name}", (dense,), 0.6))
        yield f"{rows}x{columns}, 1 row of float32", contenders, bars


def autocast(size):
    """Float32 inputs under autocast, beside the same product without it."""
    rows, columns = SHAPES[size][0]
    values = random_values(rows, columns)

    def cast(weight, x):
        def run():
            with torch.autocast("cpu", torch.bfloat16):
                return F.linear(x, weight)

        return run

    for batch in (1, 64):
        x = torch.randn(batch, columns)
        contenders, bars = {DENSE: applied(values, x.bfloat16()), f"{DENSE}, autocast": cast(values, x)}, []
        for scheme in SCHEMES:
            weight, name = weight_of(values, scheme), f"ours {scheme}"
            contenders |= {name: applied(weight, x.bfloat16()), f"{name}, autocast": cast(weight, x)}
            bars.append((f"{_rows(batch)} under autocast: {scheme} against none", f"{name}, autocast", (name,), CAST))
        yield f"{rows}x{columns}, {_rows(batch)} under autocast", contenders, bars


STARTED = {None: "dense bf16", "int8": "int8", "int4": "int4", "Q4_K": "Q4_K"}


def first(size):
    """The first product of a process against a later one: a process each, nothing cached."""
    rows, columns = SHAPES[size][0]

    def found(rounds):
        seconds = {f"{name}, {which}": [] for name in STARTED.values() for which in ("first", "later")}
        for _, (scheme, name) in itertools.product(range(min(rounds, 3)), STARTED.items()):
            begun, later = in_fresh_process(first_product, scheme, rows, columns, torch.get_num_threads())
            seconds[f"{name}, first"].append(begun)
            seconds[f"{name}, later"].append(later)
        return seconds

    names, what = list(STARTED.values())[1:], "ms of the first product above a later one"
    bars = [(f"{name}: {what}", f"{name}, first", (f"{name}, later",), NO_WAIT) for name in names]
    yield f"{rows}x{columns}, a new process", found, bars


def first_product(scheme, rows, columns, threads):
    """Seconds that the first product of this process takes, and a later one."""
    torch.set_num_threads(threads)
    known = GGUF.get(scheme) or (scheme and getattr(tt, scheme)())
    weight = repeated_weight(rows, columns, known) if scheme else random_values(rows, columns)
    x, seconds = torch.randn(1, columns).bfloat16(), []
    for _ in range(12):
        start = time.perf_counter()
        F.linear(x, weight)
        seconds.append(time.perf_counter() - start)
    return seconds[0], statistics.median(seconds[2:])


GROUPS = {
    "decode": decode,
    "batches": batches,
    "prefill": prefill,
    "activations": activations,
    "schemes": schemes,
    "float32": singles,
    "autocast": autocast,
    "first": first,
}
