"""The speed of encoding and decoding, in GB/s of bf16, compared with memory and other packages. Run by hand:

    python -m tests.benchmarks.bench_encode [--size small|full] [--rounds 7] [--schemes NAME ...] [--threads 1]
                                            [--json FILE]

One bf16 matrix, 2048 by 4096 (512 by 512 small), is encoded and decoded to bf16 in one process; larger results would be
new memory at each call, and page faults most of the time. Contenders take turns,
figures are medians with the lowest and highest, ratios are medians of the ratios within a round. Machines are noisy:
compare ratios, and only within a run.

    memcpy        a copy of the same bf16 bytes into memory that is there already
    compiled      ours, with the compiled module
    torch ops     ours without it
"""

import argparse
import json
import statistics
import time
import warnings
from functools import partial
from pathlib import Path

import torch

import torchtether as tt
from torchtether import compiled
from torchtether.compiled import room
from torchtether.schemes import resolve

SIZES = {"full": (2048, 4096), "small": (512, 512)}
SCHEMES = ("int8", "int4", "fp8", "nf4", "mxfp8", "mxfp4")
COMPILED, OPS, MEMCPY = "compiled", "torch ops", "memcpy"


# -- contenders: each gives (encode, decode); both are called many times ----------------------------------------------


def memcpy(scheme, w):
    room = torch.empty_like(w)
    return partial(room.copy_, w), partial(room.copy_, w)


def ours(scheme, w):
    scheme = resolve(scheme)
    return partial(scheme.encode, w), tt.Weight.encode(w, scheme).dequantize


def torch_ops(scheme, w):
    encode, decode = ours(scheme, w)

    def without(work):
        kept, room._module = room._module, None
        try:
            return work()
        finally:
            room._module = kept

    return partial(without, encode), partial(without, decode)


def torchao(scheme, w):
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    config = {
        "int8": lambda: Int8WeightOnlyConfig(),
        "int4": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(64)),
        "fp8": lambda: Float8WeightOnlyConfig(),
    }[scheme]()

    def encode():
        layer = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, device="meta")
        layer.weight = torch.nn.Parameter(w, requires_grad=False)
        quantize_(layer, config)
        return layer.weight

    return encode, encode().dequantize


def quanto(scheme, w):
    from optimum.quanto import AbsmaxOptimizer, MaxOptimizer, qfloat8, qint4, qint8, quantize_weight

    def encode():
        if scheme == "int4":
            scale, shift = MaxOptimizer()(w, qint4, axis=0, group_size=64)
            return quantize_weight(w, qint4, axis=0, scale=scale, shift=shift, group_size=64)
        kind = {"int8": qint8, "fp8": qfloat8}[scheme]
        return quantize_weight(w, kind, axis=0, scale=AbsmaxOptimizer()(w, kind, axis=0))

    return encode, encode().dequantize


def bitsandbytes(scheme, w):
    import bitsandbytes.functional as F

    if scheme == "int8":
        codes, scale, _ = F.int8_vectorwise_quant(w.half())  # it takes float16 only
        return lambda: F.int8_vectorwise_quant(w.half()), lambda: F.int8_vectorwise_dequant(codes, scale)
    if scheme != "nf4":
        raise KeyError(scheme)
    codes, state = F.quantize_4bit(w, blocksize=64, quant_type="nf4")
    return lambda: F.quantize_4bit(w, blocksize=64, quant_type="nf4"), lambda: F.dequantize_4bit(codes, state)


CONTENDERS = {
    MEMCPY: memcpy,
    COMPILED: ours,
    OPS: torch_ops,
    "torchao": torchao,
    "quanto": quanto,
    "bitsandbytes": bitsandbytes,
}


def contenders(scheme, w):
    """Those that know the scheme and are installed; why the others are not there is printed."""
    found = {}
    for name, make in CONTENDERS.items():
        if name == COMPILED and compiled.native() is None:
            print(f"{scheme:6} {name}: {compiled.state()}")
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[name] = make(scheme, w)
        except (ImportError, KeyError, NotImplementedError, RuntimeError, AssertionError, TypeError) as error:
            print(f"{scheme:6} {name}: not compared, {type(error).__name__} {str(error).splitlines()[:1]}")
    return found


def measure(work, repeats):
    begun = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - begun) / repeats


def bars(seconds):
    """(what, figure, limit), figures as medians of ratios within a round."""
    peers = [name for name in seconds if name not in (MEMCPY, COMPILED, OPS)]
    for name in (COMPILED, OPS):
        if name in seconds and peers:
            ratio = [t / min(seconds[p][i] for p in peers) for i, t in enumerate(seconds[name])]
            yield f"{name} against the fastest peer", statistics.median(ratio), 1.0


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=SCHEMES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    w = torch.randn(SIZES[options.size], generator=torch.Generator().manual_seed(0)).bfloat16()
    rows, held = [], []
    for scheme in options.schemes:
        pairs = contenders(scheme, w)
        for i, direction in enumerate(("encode", "decode")):
            seconds = {name: [] for name in pairs}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for turn in range(options.rounds + 1):
                    for name, pair in pairs.items():
                        took = measure(pair[i], 1)
                        if turn:  # the first one touches memory, and compiles what peers compile
                            seconds[name].append(took)
            for name, runs in seconds.items():
                rate = [w.nbytes / took / 1e9 for took in runs]
                row = {"scheme": scheme, "direction": direction, "name": name, "rate": statistics.median(rate)}
                rows.append(row | {"runs": runs})
                print(
                    f"{scheme:6} {direction} {name:14} {row['rate']:7.2f} GB/s [{min(rate):.2f} .. {max(rate):.2f}]",
                    flush=True,
                )
            for what, figure, limit in bars(seconds):
                state = "held" if figure <= limit else "missed"
                held.append({"case": f"{scheme} {direction}", "bar": what, "figure": figure, "limit": limit})
                held[-1]["state"] = state
                print(f"{scheme:6} {direction} {state:7} {what}: {figure:.2f}, at most {limit:.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "bars": held}, indent=1))


if __name__ == "__main__":
    main()
