"""The contenders in benchmarks of products: our Weights, other packages, and a plain read of memory."""

import ctypes
import importlib.util
import math
import shutil
import subprocess
import tempfile
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import torchtether as tt

SHAPES = {"full": ((4096, 4096), (11008, 4096), (32000, 2048)), "quick": ((4096, 4096),), "small": ((64, 256),)}
"""Rows and columns of the weights."""

SCHEMES = ("int8", "int4", "fp8", "nf4")
DENSE = "dense bf16"


def has(package):
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a module of a package that is not there
        return False


def peer_linears(values):
    """The peers that are installed, by name and bits, as functions of the inputs, around the weight ``values``."""
    made = {}

    def layer():
        one = nn.Linear(values.shape[1], values.shape[0], bias=False, dtype=values.dtype)
        one.weight = nn.Parameter(values.clone(), requires_grad=False)
        return nn.Sequential(one)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if has("torchao"):
            from torchao.quantization import Int8WeightOnlyConfig, quantize_

            module = layer()
            quantize_(module, Int8WeightOnlyConfig())
            made["torchao int8"] = module
        if has("optimum.quanto"):
            from optimum import quanto

            for scheme, kind in (("int8", quanto.qint8), ("int4", quanto.qint4), ("fp8", quanto.qfloat8)):
                module = layer()
                quanto.quantize(module, weights=kind)
                quanto.freeze(module)
                made[f"quanto {scheme}"] = module
        if has("bitsandbytes"):
            import bitsandbytes as bnb

            one = bnb.nn.Linear4bit(values.shape[1], values.shape[0], bias=False, quant_type="nf4")
            one.compute_dtype = torch.bfloat16
            one.weight = bnb.nn.Params4bit(values.clone(), requires_grad=False, quant_type="nf4", module=one)
            made["bitsandbytes nf4"] = one.to("cpu")
    rows, columns = values.shape
    if columns % 16 == 0:
        held = tt.Weight.encode(values, tt.int8())
        codes, scale = held.parts["qdata"], held.parts["scale"].view(-1).bfloat16()
        made["torch int8pack int8"] = lambda x: torch._weight_int8pack_mm(x, codes, scale)
    if rows % 16 == 0 and columns % 64 == 0:
        packed = torch._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, values.shape, dtype=torch.int32), 1)
        scales = torch.randn(columns // 64, rows, 2, dtype=torch.bfloat16)
        made["torch int4pack int4"] = lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 64, scales)
    return made


READING = """
extern "C" unsigned long long read_all(const unsigned long long* p, long long blocks) {
    unsigned long long found = 0;
#pragma omp parallel for schedule(static) reduction(^ : found)
    for (long long b = 0; b < blocks; b++) {
        const unsigned long long* q = p + b * 128;
        for (int i = 0; i < 128; i += 8) __builtin_prefetch(q + 256 + i);
        for (int i = 0; i < 128; i++) found ^= q[i];
    }
    return found;
}
"""


def reader():
    """A compiled function that reads blocks of 1024 bytes, with the threads of torch; None without a compiler."""
    if not shutil.which("g++"):
        return None
    with tempfile.TemporaryDirectory() as folder:
        flags = ["g++", "-O3", "-march=native", "-fPIC", "-fopenmp", "-x", "c++", "-c", "-", "-o", f"{folder}/read.o"]
        subprocess.run(flags, input=READING.encode(), check=True)
        subprocess.run(["g++", "-shared", f"{folder}/read.o", "-o", f"{folder}/read.so"], check=True)
        read = ctypes.CDLL(f"{folder}/read.so").read_all  # finds the OpenMP that torch has loaded
    read.argtypes, read.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_uint64
    return read


def limit(read, weight):
    """Reads as many bytes as the parts of the weight have."""
    blocks = sum(part.nbytes for part in weight.parts.values()) // 1024
    held = torch.ones(blocks * 1024, dtype=torch.uint8)
    return lambda: read(held.data_ptr(), blocks)


def weight_of(values, scheme):
    return nn.Parameter(tt.Weight.encode(values, getattr(tt, scheme)()), requires_grad=False)


def repeated_weight(rows, columns, scheme, dtype=torch.bfloat16):
    """A weight of random values, of which some rows were encoded and are repeated: encoding all can take a minute."""
    some = math.gcd(rows, 256)
    piece = tt.Weight.encode(random_values(some, columns).to(dtype), scheme)
    parts = dict(piece.parts)
    for name, part in scheme.layout((rows, columns)).items():
        if parts[name].shape != part.shape:
            parts[name] = parts[name].repeat(rows // some, *[1] * (len(part.shape) - 1))
        assert parts[name].shape == part.shape, name
    spec = tt.WeightSpec.of((rows, columns), dtype, scheme, None)
    return nn.Parameter(tt.Weight(parts, spec), requires_grad=False)


def random_values(rows, columns):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16()


def applied(weight, x):
    return lambda: F.linear(x, weight)


def called(module, *inputs):
    return lambda: module(*inputs)
