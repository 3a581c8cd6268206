"""Triton's kernels without a GPU, in a child process: run by its interpreter, or compiled for absent GPUs.

    TRITON_INTERPRET=1 python -m tests.weights.triton_cases interpret SEED
    python -m tests.weights.triton_cases compile CAPABILITY [ID ...]

prints a JSON list of failures. Triton reads the variable when it is imported, hence the process.
"""

import json
import re
import sys
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch

import torchtether as tt
from tests.catalog import SCHEMES, SchemeRow
from tests.weights.kernel_cases import EPS, KINDS, inputs, moved, pick, unrounded
from torchtether.gpu import decoding, serving
from torchtether.schemes import Biased, SuperBlocks
from torchtether.schemes.bits import same_bits
from torchtether.weights.products import gpu
from torchtether.weights.products.layout import layout_of

F = torch.nn.functional
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INFINITE = float("inf")
SHAPES = [(1, 1), (3, 7), (5, 100), (17, 64), (18, 33), (20, 200), (33, 384), (6, 1030)]
ORDERED = [
    SchemeRow("int4-ordered", tt.Affine(bits=4, symmetric=False, block=(1, 16), act_order=True)),
    SchemeRow("int8-ordered", tt.Affine(block=(1, 8), act_order=True)),
    SchemeRow("int3-ordered-tall", tt.Affine(bits=3, block=(4, 32), act_order=True)),
]
WIDE = [
    SchemeRow("int8-group512", tt.int8(512)),
    SchemeRow("int4-group24", tt.int4(24)),
    SchemeRow("int4-group1024", tt.int4(1024, symmetric=True)),
    SchemeRow("nf4-uneven", tt.Codebook(tt.nf4().table, block_size=24)),
    SchemeRow("nf4-uneven-double", tt.Codebook(tt.nf4().table, block_size=24, nested=True, nested_block_size=16)),
    SchemeRow("biased8-fp16", Biased(8, (4, 32), torch.float16, torch.float16)),
    SchemeRow("biased1-tensor", Biased(1, (None, None), torch.float16, torch.bfloat16, bias_first=True)),
    SchemeRow("super-blocks-wide", SuperBlocks(4, 128, 2048, minimum=True)),
]
ROWS = [
    row
    for row in [*SCHEMES, *ORDERED, *WIDE]
    if 2 in row.ranks and row.scheme.decoder is row.scheme and layout_of(row.scheme, (32, 256)) is not None
]


def interpret_rightly():
    """Let the interpreter have bfloat16 as GPUs do: it cuts off where they round, and computes with the bits.

    And let ``tl.fma`` round once: Triton 3.7's rounds the product, too.
    """
    import numpy as np
    import triton.language as tl
    from triton.language import target_info
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def cast_impl(self, src, dst_type):
        pair = (src.dtype.scalar, dst_type.scalar)
        if pair == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16()
            return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
        if pair == (tl.bfloat16, tl.float32):
            return TensorHandle((src.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        return cast(self, src, dst_type)

    def create_dot(self, a, b, *args):
        wide = [cast_impl(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return dot(self, *wide, *args)

    def of_floats(name):
        theirs = getattr(InterpreterBuilder, name)

        def of_any(self, a, b):
            if a.dtype.scalar != tl.bfloat16:
                return theirs(self, a, b)
            made = theirs(self, *(cast_impl(self, x, tl.float32) for x in (a, b)))
            return cast_impl(self, TensorHandle(made.data, tl.float32), tl.bfloat16)

        setattr(InterpreterBuilder, name, of_any)

    def get_bf16(self, value):
        return cast_impl(self, TensorHandle(np.array([value], np.float32), tl.float32), tl.bfloat16)

    def create_fma(self, x, y, z):
        assert z.dtype.scalar == tl.float32
        product = x.data.astype(np.float64) * y.data  # exact; a sum with an odd last bit can be rounded once more
        total = product + z.data
        added = total - product
        error = (product - (total - added)) + (z.data - added)
        is_even = total.view(np.int64) & 1 == 0
        total = np.where(is_even & (error > 0), np.nextafter(total, np.inf), total)
        total = np.where(is_even & (error < 0), np.nextafter(total, -np.inf), total)
        return TensorHandle(total.astype(np.float32), tl.float32)

    InterpreterBuilder.create_fma = create_fma
    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = cast_impl, create_dot
    InterpreterBuilder.get_bf16 = get_bf16
    of_floats("create_fsub"), of_floats("create_fmul")
    target_info.current_target = lambda: None  # its conversions of float8 are not those of a GPU that is here


def encoded(values, scheme):
    """A Weight that torch ops, or the loops of the CPU, encode: these cases are about the other direction."""
    with mock.patch.object(serving, "DEVICES", set()):
        return tt.Weight.encode(values, scheme)


def any_codes(weight):
    """The same scales over all codes that there are, also those that ``encode`` does not write; and all of e8m0."""

    def changed(name, part):
        if name == "qdata" or part.dtype == torch.float8_e8m0fnu:
            bits = torch.arange(part.numel()) * 85 % 256  # 0 and 255, which may mean nan, are among the first
            return bits.to(torch.uint8).view(part.dtype).view(part.shape)
        return part

    return tt.Weight({name: changed(name, part) for name, part in weight.parts.items()}, weight.spec)


def same(got, expected):
    """The same bits; of nan there are many, and they may differ."""
    if got is None or got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    return same_bits(got.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0)) and same_bits(got.isnan(), expected.isnan())


def wrong_decoding(weight, dtype, generator):
    """Whole weights in each dtype; some rows, and rows that are named, in ``dtype``."""
    layout, (rows, columns) = weight.kernel_layout, weight.shape
    parts = layout.pick_from(weight)
    for each in DTYPES:
        if not same(gpu.decode(layout, parts, each), weight.to(each).dequantize()):
            yield f"decode {each}"
    expected = weight.to(dtype).dequantize()
    start = int(torch.randint(rows, (), generator=generator))
    stop = int(torch.randint(start, rows + 1, (), generator=generator))
    out = torch.full((rows, columns), 5.0, dtype=dtype)
    made = gpu.decode(layout, parts, dtype, (start, stop), out)
    if not same(made, expected[start:stop]) or bool((out[stop - start :] != 5).any()):
        yield f"decode {dtype} {start}:{stop}"
    index = torch.randint(-1, rows + 1, pick(generator, [(), (5,), (2, 3), (0,)]), generator=generator)
    index = index.to(pick(generator, [torch.int64, torch.int32]))
    index = index.t() if index.dim() == 2 else index
    named = (index >= 0) & (index < rows)  # of others, a row is nan
    taken = expected[index.long().clamp(0, rows - 1)].where(named.unsqueeze(-1), torch.nan)
    if not same(gpu.gather(layout, parts, dtype, index), taken):
        yield f"gather {dtype} {tuple(index.shape)} {index.dtype}"


def wrong_product(weight, count, dtype, kind, generator):
    layout, weight = weight.kernel_layout, weight.to(dtype)
    x = inputs(generator, count, weight.shape[1], dtype, kind)
    bias = torch.randn(2 * weight.shape[0], generator=generator).to(dtype)
    bias = pick(generator, (None, bias[: weight.shape[0]], bias[::2]))
    got = gpu.linear(layout, layout.pick_from(weight), x, bias)
    values = weight.to(torch.float32).dequantize().double()
    expected = F.linear(x.double(), values, None if bias is None else bias.double())
    what = f"linear {dtype} {kind} {tuple(x.shape)} {'bias' if bias is not None else ''}"
    if got is None or got.shape != expected.shape or got.dtype != dtype:
        return f"{what}: {None if got is None else tuple(got.shape)}"
    error = float(((got.double() - expected).abs() / allowed(expected, x, values, weight)).nan_to_num(INFINITE).max())
    return None if error <= 1 else f"{what}: {error}"


def allowed(expected, x, values, weight):
    """By how much the product ``expected`` of ``x`` with ``values`` may be off."""
    wide = x.double().abs()
    rounding = EPS[x.dtype] * (F.linear(wide, values.abs()) + expected.abs()) + 1e-6
    return rounding + F.linear(wide, (unrounded(weight) - values).abs())


def wrong_product_of_each(weight, dtype, generator):
    """Rows of inputs by matrices of their own: the weight as a stack of some, in whose groups there may be no row."""
    layout, weight = weight.kernel_layout, weight.to(dtype)
    rows, columns = weight.shape
    matrices = pick(generator, [count for count in range(1, rows + 1) if rows % count == 0])
    kind = pick(generator, ("plain", "turned", "every other", "expanded"))
    x = inputs(generator, pick(generator, (1, 5, 16)), columns, dtype, kind)
    ends = torch.randint(0, x.shape[0] + 1, (matrices,), generator=generator).sort().values.int()
    got = gpu.linear_of_each(layout, layout.pick_from(weight), x, ends)
    what = f"each {dtype} {kind} {tuple(x.shape)} {ends.tolist()}"
    if got is None:
        return what if decoding.tile_of_one(gpu._known(layout).form, rows // matrices, columns) else None
    values = weight.to(torch.float32).dequantize().double()
    whole = F.linear(x.double(), values)
    zeros = torch.zeros(x.shape[0], rows // matrices, dtype=torch.float64)
    group = (ends <= torch.arange(x.shape[0]).unsqueeze(1)).sum(1, keepdim=True).unsqueeze(2)
    expected, room = (
        torch.cat([one.view(x.shape[0], matrices, -1), zeros.unsqueeze(1)], 1).take_along_dim(group, 1).squeeze(1)
        for one in (whole, allowed(whole, x, values, weight))
    )
    if got.shape != expected.shape or got.dtype != dtype:
        return f"{what}: {tuple(got.shape)}"
    is_right = ((got.double() - expected).abs() <= room).all()
    return None if bool(is_right) else what


def interpret(seed):
    interpret_rightly()
    wrong = []
    for number, row in enumerate(ROWS, seed):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        rows, columns = SHAPES[number % len(SHAPES)]
        given = torch.randn(rows, columns, generator=generator)
        weight = encoded(given, row.scheme)
        if "g_idx" in weight.parts:
            groups = weight.parts["g_idx"][torch.randperm(columns, generator=generator)]
            with mock.patch.object(serving, "DEVICES", set()):
                weight = tt.Weight(row.scheme.encode(given, g_idx=groups), weight.spec)
        move = partial(moved, generator=generator)
        weight = weight.map(move)
        found = list(wrong_decoding(any_codes(weight).map(move), DTYPES[number % 3], generator))
        count = (1, 3, 16)[number // 3 % 3]
        kind = pick(generator, [kind for kind in KINDS if "cube" not in kind or count < 9])
        found.append(wrong_product(weight, count, DTYPES[number % 3], kind, generator))
        found.append(wrong_product_of_each(weight, DTYPES[number % 3], generator))
        wrong += [f"{row.id} {rows}x{columns}: {what}" for what in found if what]
    return wrong + wrong_levels(seed)


def wrong_levels(seed):
    """Products whose sums are scaled, or values exact, of rows that end within a tile, in every dtype of inputs."""
    generator, wrong = torch.Generator().manual_seed(seed), []
    fours = tt.int4(), tt.int4(32, symmetric=True), tt.int4(256), tt.mxfp4(), tt.nvfp4()
    for scheme in (*fours, tt.int8(), tt.fp8(), tt.mxfp8()):
        weight = encoded(torch.randn(18, 1096, generator=generator), scheme)
        for dtype, count in ((torch.bfloat16, 3), (torch.bfloat16, 16), (torch.float16, 8), (torch.float32, 2)):
            what = wrong_product(weight, count, dtype, "plain", generator)
            wrong += [f"{scheme} {count} rows: {what}"] if what else []
    return wrong + wrong_tiny_scales()


def wrong_tiny_scales():
    """Values that float16 has, under scales that it does not have."""
    weight, x = encoded(torch.full((18, 96), 2.0**-24), tt.mxfp4()).half(), torch.full((16, 96), 1024.0).half()
    layout = weight.kernel_layout
    got = gpu.linear(layout, layout.pick_from(weight), x, None)
    return [] if torch.equal(got, torch.full_like(got, 96 * 2.0**-14)) else [f"tiny scales: {got.flatten()[0]}"]


DOT = r"tt\.dot .*tensor<(?:\d+x)*(\d+)xb?f16, #ttg\.dot_op<\{opIdx = 0, parent = [^,]*, kWidth = (\d+)"
"""The columns of the first factor of a product by tensor cores, and how many of them each thread reads at once."""


def unasked_fusions(asm):
    """How many instructions round a product and a sum once, but for those that a kernel asks for by ``tl.fma``."""
    asked = re.findall(r" call .*@llvm\.fma\.(?:v(\d+))?f32\(", asm["llir"])
    made = re.findall(r"\bfma\.\w+\.(?:ftz\.)?(?:sat\.)?f32(x2)?", asm["ptx"])
    return sum(1 + bool(pair) for pair in made) - sum(int(width or 1) for width in asked)


def compiled_only(module, capability, seen=lambda ptx: None):
    """The kernels of ``module``; where they would be launched they are compiled, and ``seen`` is told the PTX."""
    import triton
    from triton.backends.compiler import GPUTarget

    class Driver:
        """A GPU as the compiler asks for it, without one."""

        get_current_device = get_current_stream = staticmethod(lambda *_: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", capability, 32))

    triton.runtime.driver.set_active(Driver())

    class Kernel:
        def __init__(self, name):
            self.kernel = getattr(module, name)

        def __getitem__(self, grid):
            return self.launch

        def launch(self, *args, enable_fp_fusion=True, **options):
            made = self.kernel.warmup(*args, grid=(1,), enable_fp_fusion=enable_fp_fusion, **options)
            assert made.asm["cubin"]
            assert ".ftz" not in made.asm["ptx"], "small numbers become 0"
            assert enable_fp_fusion or unasked_fusions(made.asm) == 0, "a product and a sum are rounded once"
            for columns, width in re.findall(DOT, made.asm["ttgir"]):
                assert int(columns) >= 4 * int(width), "four threads read some columns of a product twice"
            seen(made.asm["ptx"])

    serving.runs_on = lambda device: True
    names = [name for name, one in vars(module).items() if isinstance(one, triton.JITFunction)]
    return SimpleNamespace(**{name: Kernel(name) for name in names})


def compile_all(capability, ids):
    """Compile, where they would be launched, the kernels of the schemes ``ids``, or of all."""
    from torchtether.gpu import decoding_kernels

    found, wrong = compiled_only(decoding_kernels, capability), []
    decoding._kernels = lambda: found
    for number, row in enumerate(ROWS):
        if ids and row.id not in ids:
            continue
        weight = encoded(torch.randn(32, 4096), row.scheme)
        layout = weight.kernel_layout
        parts = layout.pick_from(weight)
        dtype = DTYPES[number % 3]
        try:
            gpu.decode(layout, parts, dtype)
            gpu.gather(layout, parts, dtype, torch.arange(3))
            for count in (1, 16):
                gpu.linear(layout, parts, torch.zeros(count, 4096, dtype=dtype), torch.zeros(32, dtype=dtype))
            gpu.linear_of_each(layout, parts, torch.zeros(3, 4096, dtype=dtype), torch.tensor([1, 3]).int())
            for columns in (16, 64, 256):
                try:
                    narrow = encoded(torch.randn(9000, columns), row.scheme)
                except tt.SchemeError:
                    continue
                layout = narrow.kernel_layout
                gpu.linear(layout, layout.pick_from(narrow), torch.zeros(3, columns, dtype=torch.bfloat16), None)
        except Exception as error:  # of many types
            wrong.append(f"{row.id} {dtype}: {error!r}")
    return wrong


if __name__ == "__main__":
    what, number, *ids = sys.argv[1:]
    serving.DEVICES.add("cpu")
    print(json.dumps(interpret(int(number)) if what == "interpret" else compile_all(int(number), ids)))
