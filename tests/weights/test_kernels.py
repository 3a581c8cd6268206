"""Products with quantized weights: equal results of every kernel, no crash, no stale caches, no leaked memory."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import torchtether as tt
from tests.catalog import SCHEMES, rand
from tests.weights.kernel_cases import EPS, as_on, choose, rounded
from torchtether import compiled
from torchtether.compiled import room
from torchtether.formats.gguf_blocks import TABLE as IQ4
from torchtether.schemes import Biased, SuperBlocks
from torchtether.torch_private import processors
from torchtether.weights.ops import graph_ops
from torchtether.weights.ops import product as product_module
from torchtether.weights.products import chunks, cpu, decoding, int8pack, table
from torchtether.weights.products.layout import KINDS, layout_of
from torchtether.weights.products.table import TABLE, kernels_for

needs_compiler = pytest.mark.skipif(compiled.native() is None, reason="nothing compiled is there")
LAID_OUT = [row for row in SCHEMES if layout_of(row.scheme, (8, 256)) is not None]
each_laid_out = pytest.mark.parametrize("row", LAID_OUT, ids=lambda row: row.id)


def weight_of(scheme, rows=24, columns=256, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tt.Weight.encode(torch.randn(rows, columns, generator=generator), scheme).to(dtype)


def is_near(got, x, weight, bias=None):
    values = weight.to(torch.float32).dequantize().double() if isinstance(weight, tt.Weight) else weight.double()
    wide = x.double()
    expected = F.linear(wide, values, None if bias is None else bias.double())
    allowed = EPS[got.dtype] * (F.linear(wide.abs(), values.abs()) + expected.abs()) + 1e-6
    return bool(((got.double() - expected).abs() <= allowed).all())


# -- every kernel, in processes of their own --------------------------------------------------------------------------


def _in_a_process(module, compiler, *arguments):
    command = [sys.executable, "-m", module, *arguments]
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "TORCHTETHER_COMPILE": compiler}
    return subprocess.run(command, cwd=root, capture_output=True, text=True, env=environment)


def _wrong_cases(seed, count, compiler, fast):
    found = _in_a_process("tests.weights.kernel_cases", compiler, str(seed), str(count), "1" if fast else "0")
    last = found.stderr.strip().splitlines()[-1:]
    assert found.returncode == 0, f"case {last} ended the process with {found.returncode}"
    return json.loads(found.stdout)


each_compiler = pytest.mark.parametrize(
    "compiler", [pytest.param("1", marks=needs_compiler), "0"], ids=["compiled", "torch-alone"]
)
each_machine = pytest.mark.parametrize(
    "fast", [pytest.param(False, marks=pytest.mark.slow), True], ids=["slow halves", "fast halves"]
)


@each_compiler
@each_machine
def test_every_kernel_is_right_for_any_shape_stride_offset_and_dtype(compiler, fast):
    assert not _wrong_cases(0, 120, compiler, fast)


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="protects pages as Linux does")
def test_no_kernel_reads_beyond_parts_and_inputs():
    found = _in_a_process("tests.weights.page_ends", "1")
    assert found.returncode == 0, (found.returncode, found.stderr[-2000:])
    assert int(found.stdout.split()[-1]) > 1000


@pytest.mark.slow
@each_compiler
@each_machine
def test_every_kernel_is_right_many_times_over(compiler, fast):
    assert not _wrong_cases(10_000, 500, compiler, fast)


@pytest.mark.parametrize("activations", [None, "int8", "float8"])
@pytest.mark.parametrize("is_fast", [False, True], ids=["slow halves", "fast halves"])
def test_strides_of_dimensions_of_size_one_say_nothing(activations, is_fast):
    strange = lambda x: [torch.as_strided(x, x.shape, (s, 1)) if len(x) == 1 else x for s in (0, 1, 7)]  # noqa: E731
    with as_on(is_fast), torch.no_grad():
        for columns in (1, 2, 3, 8, 33):
            for rows in (1, 2, 16):
                weight = weight_of(tt.int8(), rows, columns)
                weight.set_activations(activations)
                for count in (1, 3):
                    plain = rand(count, columns).bfloat16()
                    wanted = F.linear(plain, weight)
                    for x in (*strange(plain), plain.t().contiguous().t(), torch.cat([plain, plain], 1)[:, :columns]):
                        for held in (weight, weight.map(lambda part: strange(part)[1])):
                            assert torch.equal(F.linear(x, held), wanted)
                    if activations is None:
                        assert is_near(wanted, plain, weight)


GROUPED = [
    scheme
    for size in (8, 16, 32, 64, 128, 256, None)
    for scheme in (
        tt.int4(size or 1024),
        tt.int4(size or 1024, symmetric=True),
        tt.Affine(block=(1, size)),
        tt.Affine(signed=False, symmetric=False, block=(1, size)),
        tt.ScaledFloat("e4m3", block=(1, size)),
        tt.ScaledFloat("e5m2", block=(2, size)),
        tt.ScaledFloat("e2m1", block=(1, size)),
        tt.ScaledFloat("e2m3", block=(1, size)),
        *(tt.Affine(bits=bits, symmetric=bits % 2 == 0, block=(1, size)) for bits in (2, 3, 5, 6, 7)),
        *(Biased(bits, (1, size)) for bits in (1, 4, 8)),
        SuperBlocks(6, size or 1024, 1024, scale_bits=8, offset=32),
        SuperBlocks(4, size or 1024, 1024, minimum=True),
        SuperBlocks(4, size or 1024, 1024, table=IQ4),
    )
] + [tt.Codebook(tt.nf4().table, block_size=size) for size in (24, 32, 64, 128, 256)]


@needs_compiler
@pytest.mark.parametrize("scheme", GROUPED, ids=str)
def test_every_size_of_groups_and_every_count_of_rows(scheme):
    """Also the largest codes and inputs, all of one sign: sums of integers do not overflow."""
    for columns in (640, 1024):
        weight = weight_of(scheme, 6, columns)
        full = weight.map(lambda part: part.clone())
        codes = full.parts["qdata"].view(torch.uint8)
        codes.copy_(torch.tensor([[0xFF], [0x00], [0x80], [0x7F], [0x77], [0xF0]], dtype=torch.uint8).view(6, 1)
                    .expand(6, codes.numel() // 6).reshape(codes.shape))  # fmt: skip
        for held in (one.to(dtype) for one in (weight, full) for dtype in (torch.bfloat16, torch.float16)):
            is_number = held.dequantize().isfinite().all(-1)
            values = held.dequantize()[is_number].float()
            for count in (1, 7):
                most = torch.full((count, columns), 2 - 2.0**-7)  # what a signed byte and another hold the least of
                for x in (rand(count, columns), torch.full((count, columns), -1.0), torch.ones(count, columns), most):
                    inputs = x.to(held.dtype)
                    with torch.no_grad():
                        got = F.linear(inputs, held)
                    assert got[:, is_number].isfinite().all()
                    assert not got[:, ~is_number].isfinite().any()
                    assert is_near(got[:, is_number], inputs, values)


@needs_compiler
@pytest.mark.parametrize(
    "scheme",
    [tt.int8(), tt.int8(128, symmetric=False), tt.int4(), tt.int4(128), tt.int4(256), tt.fp8(), tt.nf4()],
    ids=str,
)
@pytest.mark.parametrize("columns", [256, 1024, 1100])
def test_many_rows_of_inputs_with_many_rows_of_codes(scheme, columns):
    """Codes are taken a few rows at a time there, and the last few are fewer; so are their scales, as they lie."""
    weight, bias = weight_of(scheme, 300, columns), rand(300).bfloat16()
    for count in (1, 11):
        x = rand(count, columns).bfloat16()
        with torch.no_grad():
            assert is_near(F.linear(x, weight, bias), x, weight, bias)


@needs_compiler
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize(
    "scheme",
    [
        *(tt.int8(), tt.int8(64), tt.int4(), tt.int4(32), tt.int4(16), tt.int4(24), tt.nf4(), tt.nvfp4()),
        *(tt.Codebook(tt.nf4().table, block_size=24), Biased(3), SuperBlocks(4, 32, 128, minimum=True)),
    ],
    ids=str,
)
def test_an_input_that_is_not_finite_reaches_every_result_wherever_it_stands(scheme, value):
    weight = weight_of(scheme, 9, 384)
    x = rand(384, 384).bfloat16()
    x.fill_diagonal_(value)
    with torch.no_grad():
        some = torch.cat([F.linear(x[i : i + 4], weight) for i in range(0, 384, 4)])
        alone = torch.cat([F.linear(x[i : i + 1], weight) for i in range(384)])
    assert not some.isfinite().any()
    assert not alone.isfinite().any()


@pytest.mark.parametrize("columns", [640, 1101])
@pytest.mark.parametrize("zero", [None, -128, -113, -112, 112, 127])
@pytest.mark.parametrize(
    "scheme",
    [tt.int8(), tt.int8(64, symmetric=False), tt.Affine(signed=False, symmetric=False, block=(2, None)), tt.nf4()]
    + [tt.int4(size) for size in (16, 32, 64, 384, 4096)],
    ids=str,
)
def test_many_rows_of_rounded_inputs_meet_any_zero_points(scheme, zero, columns):
    """Files may hold those that no encoder writes; codes less these may be more than a byte holds."""
    weight = weight_of(scheme, 50, columns)
    if zero is not None and "zero_point" in weight.parts:
        part = weight.parts["zero_point"]
        part.view(torch.uint8)[::3] = zero & 255
    weight.set_activations("int8")
    x = rand(21, columns).bfloat16()
    x[3:5] *= 1e4
    with torch.no_grad():
        got = F.linear(x, weight)
    assert is_near(got, rounded(x, "int8").float(), weight)


# -- decoding ---------------------------------------------------------------------------------------------------------


@needs_compiler
@each_laid_out
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (24, 256), (40, 200)], ids=str)
def test_decoded_rows_have_the_bits_of_the_scheme(row, shape):
    """Also of codes and scales that no encoder writes: nan, infinite, negative."""
    layout = layout_of(row.scheme, shape)
    if layout is None:
        return  # blocks across rows
    assert compiled.native() is not None
    assert compiled.native() is not None
    weight = weight_of(row.scheme, *shape, dtype=torch.float32)
    wild = weight.map(lambda part: part.clone())
    codes = wild.parts["qdata"].view(torch.uint8)
    codes.copy_(torch.randint(0, 256, codes.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)))
    for name in ("scale", "zero_point"):
        if name in wild.parts and wild.parts[name].itemsize == 1:
            part = wild.parts[name].view(torch.uint8)
            part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8))
    for held in (weight, wild):
        parts = layout.pick_from(held)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            expected = row.scheme.decode(held.parts, shape, dtype)
            same = {"rtol": 0, "atol": 0, "equal_nan": True}
            torch.testing.assert_close(cpu.decode(layout, parts, dtype), expected, **same)
            some = cpu.decode(layout, parts, dtype, (shape[0] // 2, shape[0]))
            torch.testing.assert_close(some, expected[shape[0] // 2 :], **same)
            index = torch.tensor([shape[0] - 1, 0, 0])
            torch.testing.assert_close(cpu.gather(layout, parts, dtype, index), expected[index], **same)
            room = torch.full((shape[0] + 1, shape[1]), 7.0, dtype=dtype)
            cpu.decode(layout, parts, dtype, out=room)
            torch.testing.assert_close(room[:-1], expected, **same)
            assert (room[-1] == 7).all()


SHAPES = {1: (192,), 2: (5, 96), 3: (3, 16, 64)}


@pytest.mark.parametrize("row", [row for row in SCHEMES if not row.scheme.transparent], ids=lambda row: row.id)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_dequantizing_gives_the_bits_of_the_scheme_in_any_shape(row, dtype):
    """Of 1 to 3 dimensions, whatever kernel decodes; other tests take these values as what is meant."""
    for rank in row.ranks:
        weight = tt.Weight.encode(rand(*SHAPES[rank]), row.scheme).to(dtype)
        expected = row.scheme.decode(weight.parts, SHAPES[rank], dtype)
        assert torch.equal(weight.dequantize(), expected)
        order = tuple(reversed(range(rank)))
        assert torch.equal(weight.permute(order).dequantize(), expected.permute(order))


EXTREME = (
    1.0,
    1 + 2.0**-8,
    257 / 256 / 3,
    2.0**-130,
    1e-38,
    2.0**-101,
    2.0**101,
    3e38,
    float("inf"),
    float("nan"),
    0.0,
)
"""Scales: of products halfway between two bfloat16, of subnormal ones, of infinite ones, and of none."""


BIASES = [
    *((4, torch.float32, torch.float32, False), (6, torch.float16, torch.float32, True)),
    *(
        (bits, kind, kind, first)
        for bits in (3, 8)
        for kind in (torch.bfloat16, torch.float16)
        for first in (True, False)
    ),
]
WIDE = (
    *(tt.int8(), tt.int8(128), tt.Affine(unit=1 / 3), tt.Affine(signed=False, symmetric=False, block=(1, None))),
    *(tt.int4(), tt.int4(128, symmetric=True), tt.int4(2048), tt.ScaledFloat("e2m1", block=(1, 64))),
    *(tt.fp8(), tt.fp8("block"), tt.ScaledFloat("e4m3", block=(1, 128))),
    *(tt.nf4(), tt.Codebook(tt.nf4().table, block_size=128)),
    *(tt.int4(16), tt.Affine(bits=3, block=(1, 64)), tt.Affine(bits=6, block=(1, 16), symmetric=False, unit=1 / 3)),
    *(tt.nvfp4(), tt.ScaledFloat("e2m3", block=(1, 32)), tt.ScaledFloat("e5m2", block=(1, 40))),
    *(Biased(bits, (1, 64), held, way, bias_first=first) for bits, held, way, first in BIASES),
    *(SuperBlocks(4, minimum=True), SuperBlocks(6, 16, scale_bits=8, offset=32), SuperBlocks(4, table=IQ4)),
    SuperBlocks(4, 32, 32, 0, table=IQ4),
    *(tt.Codebook(tuple(torch.linspace(-1, 1, count).tolist()), flat=False) for count in (20, 64, 128, 200)),
)


@needs_compiler
@pytest.mark.parametrize("scheme", WIDE, ids=str)
def test_wide_rows_have_the_bits_of_the_scheme_under_any_scale(scheme):
    """Also the sign of zero, and every code under every scale: many columns at once take other ways than few."""
    columns = 1280 if isinstance(scheme, tt.Codebook) else 1200
    weight = weight_of(scheme, 4 * len(EXTREME), columns, dtype=torch.float32)
    codes = weight.parts["qdata"].view(torch.uint8)
    codes.copy_(torch.randint(0, 256, codes.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(2)))
    rows, columns = weight.shape
    wild = torch.tensor(EXTREME).repeat_interleave(2) * torch.tensor([1.0, -1.0]).repeat(len(EXTREME))
    for name in ("scale", "absmax", "bias", "super_scale", "super_min"):
        if name in weight.parts and weight.parts[name].itemsize > 1:
            part = weight.parts[name]
            part.view(-1)[::2] = wild.repeat(part.numel())[: part.view(-1)[::2].numel()].to(part.dtype)
            words = part.view(torch.int32 if part.itemsize == 4 else torch.int16)
            words[part.isnan()] = torch.iinfo(words.dtype).max  # rounding such a NaN like a number would overflow
    if scheme == tt.fp8():
        weight.parts["qdata"].view(torch.uint8)[::2].clamp_(max=0x7E)  # rows without a code that is no number
    layout = weight.kernel_layout
    assert compiled.native() is not None
    index = torch.cat([torch.arange(rows - 1, -1, -1), torch.arange(rows)])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        expected = scheme.decode(weight.parts, (rows, columns), dtype)[index]
        got = cpu.gather(layout, layout.pick_from(weight), dtype, index)
        bits = torch.int32 if dtype is torch.float32 else torch.int16
        same = (got.view(bits) == expected.view(bits)) | (got.isnan() & expected.isnan())
        assert same.all(), (dtype, got[~same][:5], expected[~same][:5])


@needs_compiler
@pytest.mark.parametrize("index", [[24], [-1], [0, 2**40]])
def test_rows_that_do_not_exist_are_refused_before_one_is_written(index):
    weight = weight_of(tt.int8())
    with pytest.raises(IndexError):
        F.embedding(torch.tensor(index), weight)


@each_laid_out
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_an_embedding_gathers_from_the_storage_that_linear_reads(row, dtype):
    weight = weight_of(row.scheme)
    values = weight.dequantize()
    index = torch.tensor([[3, 0], [23, 3]], dtype=dtype)
    for where in (index, index.t(), index[:0], index[0, 0]):
        assert torch.equal(F.embedding(where, weight), F.embedding(where, values))


# -- the table --------------------------------------------------------------------------------------------------------


def test_every_row_of_the_table_has_its_measurement():
    for row in TABLE:
        assert row.kernel in product_module.KERNELS
        assert row.kernel in table.TAKES
        assert row.measured
        assert set(row.kinds) <= set(KINDS)


def test_the_table_falls_back_to_chunks():
    layout = layout_of(tt.int8(), (64, 256))
    assert choose(layout, torch.float64, 1) == "chunks"
    assert choose(layout, torch.float32, 1) == ("compiled" if compiled.native() is not None else "chunks")
    assert choose(layout, torch.bfloat16, 1) == ("compiled" if compiled.native() is not None else "int8pack")
    assert choose(layout_of(tt.nf4(), (64, 256)), torch.float32, 10**6) == "chunks"
    assert layout_of(tt.Plain(), (64, 256)) is None


@each_laid_out
def test_small_weights_are_multiplied_as_large_ones_are(row):
    """In float32, too, where sums are added in another order than torch's: they differ by roundings of float32."""
    for rows, columns in ((1, 1), (3, 40), (24, 256)):
        weight, bias = weight_of(row.scheme, rows, columns, torch.float32), rand(rows)
        for count in (1, 3, 9):
            x = rand(count, columns)
            with torch.no_grad():
                assert is_near(F.linear(x, weight, bias), x, weight, bias)


@needs_compiler
@each_laid_out
def test_the_number_of_threads_changes_no_product(row):
    """Threads share few, some and many rows of a weight in different ways."""
    threads = torch.get_num_threads()
    for rows, columns in ((9, 8192), (77, 1312), (300, 608)):
        weight, x = weight_of(row.scheme, rows, columns), rand(3, columns).bfloat16()
        found = []
        try:
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                with torch.no_grad():
                    found += [torch.cat((F.linear(x, weight), F.linear(x[:1], weight)))]
        finally:
            torch.set_num_threads(threads)
        assert is_near(found[0], torch.cat((x, x[:1])), weight)
        assert all(torch.equal(found[0], other) for other in found[1:])


# -- what stands in the way is left to the general path ---------------------------------------------------------------


@each_laid_out
def test_a_function_in_the_place_of_torch_s_sees_each_product_once(row, monkeypatch):
    """Tools that count operations (calflops, DeepSpeed's profiler) put functions of their own under torch's names."""
    monkeypatch.setattr(product_module, "SCRATCH", 2**14)  # so that the larger weight is decoded in pieces
    monkeypatch.setattr(product_module, "CACHED", 2**14)
    calls = []
    for place, name in ((F, "linear"), (torch, "matmul"), (torch.Tensor, "matmul"), (torch, "mm"), (torch, "addmm")):
        called = getattr(place, name)
        counted = lambda *args, called=called, **kwargs: calls.append(called) or called(*args, **kwargs)  # noqa: E731
        monkeypatch.setattr(place, name, counted)
    for rows, dtype, count in product((24, 600), (torch.bfloat16, torch.float32), (1, 64)):
        frozen, x = weight_of(row.scheme, rows, dtype=dtype), rand(2, count, 256).to(dtype)
        weights = [frozen, frozen.detach().requires_grad_()]
        if row.scheme == tt.int8():
            weights.append(tt.Weight(frozen.parts, frozen.spec.replace(activations="int8")))
        for weight, given in product(weights, (x, x.clone().requires_grad_())):
            calls.clear()
            F.linear(given, weight)
            torch.matmul(given, weight.t())
            assert calls == [torch._C._nn.linear, torch._C._VariableFunctions.matmul], (rows, dtype, count, calls)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forward AD imports torch.jit
@pytest.mark.parametrize("scheme", [tt.int8(), tt.int4(), tt.nf4()], ids=["int8", "int4", "nf4"])
def test_modes_and_transforms_see_the_product(scheme):
    weight, x = weight_of(scheme), rand(3, 256).bfloat16()
    with torch.no_grad():
        F.linear(x, weight)  # so that the kernel is known, and could be called without looking around
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        F.linear(x, weight)
    assert counter.get_total_flops() == 2 * 3 * 24 * 256
    assert is_near(torch.vmap(lambda one: F.linear(one, weight))(x), x, weight)
    assert torch.func.jvp(lambda one: F.linear(one, weight), (x,), (x,))[1].shape == (3, 24)
    with torch.no_grad(), forward_ad.dual_level():
        assert forward_ad.unpack_dual(F.linear(forward_ad.make_dual(x, x), weight)).tangent is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert F.linear(x.float(), weight.to(torch.float32)).dtype == torch.bfloat16


@pytest.mark.parametrize("device", ["cpu", "meta", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("scheme", [tt.int8(), tt.int4(), tt.fp8(), tt.nf4()], ids=["int8", "int4", "fp8", "nf4"])
def test_fake_and_meta_tensors_know_the_shape(scheme, device):
    """No kernel touches them. A torch without CUDA cannot index fake tensors of it."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        layout = scheme.layout((24, 256))
        parts = {n: torch.empty(p.shape, dtype=p.dtype or torch.bfloat16, device=device) for n, p in layout.items()}
        weight = tt.Weight(parts, tt.WeightSpec.of((24, 256), torch.bfloat16, scheme))
        x = torch.empty(2, 3, 256, dtype=torch.bfloat16, device=device)
        with torch.no_grad():
            out = F.linear(x, weight)
            rows = F.embedding(torch.zeros(2, 3, dtype=torch.int64, device=device), weight)
    assert (out.shape, out.dtype, out.device.type) == ((2, 3, 24), torch.bfloat16, device)
    assert (rows.shape, rows.device.type) == ((2, 3, 256), device)


def test_the_default_device_is_not_that_of_the_product():
    weight, x, index = weight_of(tt.int8()), rand(3, 256).bfloat16(), torch.tensor([3])
    with torch.no_grad(), torch.device("meta"):
        out, rows = F.linear(x, weight), F.embedding(index, weight)
    assert is_near(out, x, weight)
    assert torch.equal(rows, weight.dequantize()[index])


def _is_refused(x, weight, bias):
    try:
        F.linear(x, weight, bias)
    except RuntimeError:
        return True
    return False


def test_what_torch_refuses_is_refused():
    weight, x = weight_of(tt.int8()), rand(3, 256).bfloat16()
    values = weight.dequantize()
    for bad, bias in ((x[:, 1:], None), (x.float(), None), (x, rand(23).bfloat16()), (x, rand(24)), (x[0, 0], None)):
        with torch.no_grad():
            assert _is_refused(bad, weight, bias) == _is_refused(bad, values, bias)
    with torch.no_grad(), pytest.raises(RuntimeError, match="cannot be multiplied"):  # not of some shape of ours
        F.linear(rand(256, 2).bfloat16(), weight)
    assert _is_refused(x.float(), weight, None)
    for mixed in (rand(24).bfloat16().to("meta"), rand(24).bfloat16().to("meta").requires_grad_()):
        assert _is_refused(x, values, mixed)
        assert _is_refused(x, weight, mixed)


@pytest.mark.parametrize("padding", [24, -25, 99])
def test_a_padding_row_that_is_not_there_is_refused(padding):
    weight, index = weight_of(tt.int8()), torch.tensor([1, 0])
    for held in (weight.dequantize(), weight):
        for _ in range(2):  # the second time by the shortcut
            assert torch.equal(F.embedding(index, held, padding_idx=-24), held.dequantize()[index])
            with pytest.raises(AssertionError, match="Padding_idx must be within num_embeddings"):
                F.embedding(index, held, padding_idx=padding)


@pytest.mark.parametrize("index", [[1], None], ids=str)
def test_what_is_no_index_is_refused_by_torch(index):
    with pytest.raises(TypeError, match="must be Tensor"):
        F.embedding(index, weight_of(tt.int8()))


def test_zeros_that_take_no_memory_are_inputs():
    for scheme in (tt.int8(), tt.int4()):
        weight, zeros = weight_of(scheme), torch._efficientzerotensor((3, 256), dtype=torch.bfloat16)
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(F.linear(zeros, weight, torch.ones(24).bfloat16()), torch.ones(3, 24).bfloat16())


@needs_compiler
def test_the_kernel_takes_only_parts_as_the_scheme_lays_them_out():
    layout, weight, x = layout_of(tt.int8(), (24, 256)), weight_of(tt.int8()), rand(1, 256).bfloat16()
    codes, scale, *rest = layout.pick_from(weight)
    assert cpu.linear(layout, [codes, scale, *rest], x, None) is not None
    freed = codes.clone()
    freed.untyped_storage().resize_(0)
    late = torch.cat([codes[:1], codes])[1:]  # not at the beginning of its storage, and freed its address is not null
    assert cpu.linear(layout, [late, scale, *rest], x, None) is not None
    late.untyped_storage().resize_(0)
    short = codes.clone()
    short.untyped_storage().resize_(100)
    for bad in (
        codes[:-1],
        codes.t().contiguous().t(),
        codes.to(torch.int32),
        codes.to("meta"),
        freed,
        late,
        short,
        None,
    ):
        assert cpu.linear(layout, [bad, scale, *rest], x, None) is None
        assert cpu.decode(layout, [bad, scale, *rest], torch.bfloat16) is None
    assert cpu.linear(layout, [codes], x, None) is None
    assert cpu.linear(layout, [codes, scale, scale], x, None) is None
    for bad in (scale.double(), scale[:3], scale.expand(24, 2)[:, :1].repeat(1, 2)):
        assert cpu.linear(layout, [codes, bad, *rest], x, None) is None
    negated = torch._neg_view(x)  # reads as -x, and its memory does not say so
    assert cpu.linear(layout, [codes, scale, *rest], negated, None) is None
    assert cpu.linear(layout, [codes, scale, *rest], x, torch._neg_view(rand(24).bfloat16())) is None


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit is old
def test_a_trace_sees_what_else_takes_the_shortcut():
    """Behind its back the first result would be that of every input."""
    weight, x, index = weight_of(tt.int8()), rand(3, 256).bfloat16(), torch.tensor([1, 0])
    with torch.no_grad():
        F.linear(x, weight), F.embedding(index, weight)  # from here on it is there
        assert cpu.shortcut_linear((x, weight), None) is not None
        both = lambda one, some: (F.linear(one, weight), F.embedding(some, weight))  # noqa: E731
        traced = torch.jit.trace(both, (x, index), check_trace=False)  # it multiplies decoded weights
        product, rows = traced(x * 3, index + 5)
    assert is_near(product, x * 3, weight)
    assert torch.equal(rows, weight.dequantize()[index + 5])


@pytest.mark.parametrize(("capability", "machine", "bfloat16", "float16"), [
    ("AVX512", "x86_64", True, True), ("AVX2", "x86_64", False, False), ("DEFAULT", "aarch64", True, False),
    ("SVE256", "arm64", True, False), ("DEFAULT", "riscv64", False, False),
])  # fmt: skip
@pytest.mark.parametrize("is_supported", [True, False])
def test_halves_are_fast_where_torch_has_vectors_for_them(
    capability, machine, bfloat16, float16, is_supported, monkeypatch
):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(processors.platform, "machine", lambda: machine)
    says = SimpleNamespace(**{f"_is_mkldnn_{kind}_supported": lambda: is_supported for kind in ("bf16", "fp16")})
    monkeypatch.setattr(processors, "torch", SimpleNamespace(ops=SimpleNamespace(mkldnn=says)))
    found = [table.has_fast_halves.__wrapped__(dtype) for dtype in (torch.bfloat16, torch.float16)]
    assert found == [bfloat16 and (is_supported or capability == "AVX512"), float16 and is_supported]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("limit", [1 << 30, 1 << 12], ids=["whole", "chunks"])
def test_a_gradient_without_vectors_for_halves_is_summed_in_float32(limit, dtype, monkeypatch):
    monkeypatch.setattr(product_module, "CACHED", limit)
    monkeypatch.setattr(product_module, "SCRATCH", limit)
    weight, up = weight_of(tt.int8(), 1024).to(dtype).requires_grad_(False), rand(5, 1024).to(dtype)
    exact = up.double() @ weight.dequantize().double()
    for fast in (False, True):
        monkeypatch.setattr(table, "has_fast_halves", lambda dtype, fast=fast: fast)
        made = chunks.times(up, weight.dequantize())
        assert made.dtype == (dtype if fast or dtype.itemsize > 2 else torch.float32)
        x = rand(5, 256).to(dtype).requires_grad_()
        F.linear(x, weight).backward(up)
        assert x.grad.dtype == dtype
        off = (x.grad.double() - exact).abs().max() / exact.abs().max()
        assert off <= (4 if fast else 1) * max(torch.finfo(dtype).eps, 1e-14) + 1e-6 * (dtype is torch.float32)


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forward AD imports torch.jit
def test_the_shortcut_is_taken_only_by_who_may():
    """A Weight whose kernel is known, a plain input of its dtype, no graph, nobody who looks on."""
    layout, weight = layout_of(tt.int8(), (23, 256)), weight_of(tt.int8(), 23)
    x, index = rand(2, 256).bfloat16(), torch.tensor([1, 0])
    with torch.no_grad():
        F.linear(x, weight)
        F.embedding(index, weight)
        assert torch.equal(
            cpu.shortcut_linear((x, weight, None), None), cpu.linear(layout, layout.pick_from(weight), x, None)
        )
        assert torch.equal(cpu.shortcut_gather((index, weight), None), weight.dequantize()[index])
        for bad in (x.float(), x[:, 1:], x[:0], x.t(), x.to("meta"), weight, [1.0], None, torch._neg_view(x)):
            assert cpu.shortcut_linear((bad, weight, None), None) is None
        for bad in (weight.t(), weight.to(torch.float32), weight_of(tt.Plain()), x, None, 3):
            assert cpu.shortcut_linear((x, bad, None), None) is None
        for bad in (index.float(), index[:0], index[[True, False]].bool(), None):
            assert cpu.shortcut_gather((bad, weight), None) is None
        assert cpu.shortcut_linear((x, weight, x), None) is None
        assert cpu.shortcut_linear((x, weight), {}) is not None
        for args, names in (
            ((x, weight), {"bias": None}),
            ([x, weight], None),
            ((x,), None),
            ((x, weight, None, 1), None),
        ):
            assert cpu.shortcut_linear(args, names) is None
        assert cpu.shortcut_gather((index, weight), {"max_norm": None, "sparse": True}) is not None
        assert cpu.shortcut_gather((index, weight), {"padding_idx": 22}) is not None
        for padding in (23, -1, -24, "a", 1 << 70):
            assert cpu.shortcut_gather((index, weight), {"padding_idx": padding}) is None
        for args, names in (((index, weight), {"max_norm": 1.0}), ((index, weight, None), None), ((index,), {})):
            assert cpu.shortcut_gather(args, names) is None
        with pytest.raises(IndexError):
            cpu.shortcut_gather((torch.tensor([23]), weight), None)
        for look in (FlopCounterMode(display=False), FakeTensorMode(), forward_ad.dual_level(), torch.autocast("cpu")):
            with look:
                assert cpu.shortcut_linear((x, weight, None), None) is None
        torch.vmap(lambda one: [cpu.shortcut_linear((x, weight, None), None) is None or pytest.fail("vmap"), one][1])(x)
        freed = weight.map(lambda part: part.clone())
        assert cpu.shortcut_linear((x, freed, None), None) is None  # its layout has not been asked for
        assert freed.kernel_layout is layout
        assert cpu.shortcut_linear((x, freed, None), None) is not None
        freed.parts["scale"].untyped_storage().resize_(0)
        assert cpu.shortcut_linear((x, freed, None), None) is None
    bias, trained = rand(23).bfloat16(), weight.clone().requires_grad_()
    assert trained.kernel_layout is layout
    assert cpu.shortcut_linear((x, weight, bias), None) is not None
    up = x.clone().requires_grad_(), bias.clone().requires_grad_()
    for given in ((up[0], weight, bias), (x, trained, bias), (x, weight, up[1])):
        assert cpu.shortcut_linear(given, None) is None
        assert F.linear(*given).requires_grad
    assert cpu.shortcut_gather((index, trained), None) is None
    assert F.embedding(index, trained).requires_grad


@needs_compiler
def test_the_shortcut_knows_how_many_rows_its_kernel_is_for():
    weight = weight_of(tt.int8(), 1024, 1024, dtype=torch.float32)
    (_, most), *_ = kernels_for(weight.kernel_layout, torch.float32)
    x = rand(3 * most, 1024)
    with torch.no_grad():
        F.linear(x[:1], weight)  # from here on the kernel is known
        assert cpu.shortcut_linear((x[:most], weight), None) is not None
        for many in (x[: most + 1], x.view(3, most, 1024)):
            assert cpu.shortcut_linear((many, weight), None) is None
            assert torch.equal(F.linear(many, weight), F.linear(many, weight.dequantize()))


@needs_compiler
def test_threads_call_at_once():
    weight, x = weight_of(tt.int4(), 300, 512), rand(4, 512).bfloat16()
    with torch.no_grad():
        expected = F.linear(x, weight)

        def run(_):
            with torch.no_grad():
                return all(torch.equal(F.linear(x, weight), expected) for _ in range(200))

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(run, range(4)))


WITHOUT_MEMORY = """
import resource, torch, torch.nn.functional as F, torchtether as tt
from torchtether.weights.products import cpu
from torchtether.weights.ops import graph_ops
torch.set_num_threads(2)
torch.set_grad_enabled(False)
small = tt.Weight.encode(torch.randn(8, 2**14), SCHEME).to(torch.bfloat16)
wide = tt.Weight.encode(torch.ones(2, 2**24), SCHEME).to(torch.bfloat16)
x, told = torch.ones(1, 2**14).bfloat16(), (list(small.parts.values()), graph_ops.text_of(small.spec))
expected, room = F.linear(x.expand(64, -1), small), torch.ones(2, 2**24, dtype=torch.bfloat16)
torch.ops.torchtether.linear.default(x.expand(64, -1), None, *told)
cpu.decode(wide.kernel_layout, wide.kernel_layout.pick_from(wide), torch.bfloat16, out=room)  # threads are there
many = x.expand(2**17, -1)  # which takes no memory
calls = {
    "product": lambda: F.linear(many, small),
    "op of graphs": lambda: torch.ops.torchtether.linear.default(many, None, *told),
    "product by several threads": lambda: F.linear(room[:1], wide),
    "decoding": lambda: cpu.decode(
        wide.kernel_layout, wide.kernel_layout.pick_from(wide), torch.bfloat16, out=room
    ),
}
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + 2**23,) * 2)
for name, call in calls.items():
    try:
        call()
        print(name, "went on")
    except (MemoryError, RuntimeError) as error:
        print(name, "memory" in str(error), str(error).count(chr(10)))
assert torch.equal(F.linear(x.expand(64, -1), small), expected)
"""


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory as Linux does")
@pytest.mark.parametrize("scheme", ["tt.int4(8)", "tt.int8(32)", "tt.ScaledFloat('e4m3', block=(1, 32))"])
def test_without_memory_a_product_raises_and_the_process_lives(scheme):
    code = WITHOUT_MEMORY.replace("SCHEME", scheme)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, (found.returncode, found.stderr[-2000:])
    assert "went on" not in found.stdout
    assert "False" not in found.stdout


@needs_compiler
def test_a_bias_may_be_converted_while_a_product_runs():
    """Its old memory is free then, and soon holds something else."""
    weight, x = tt.Weight.encode(torch.ones(2**17, 64), tt.int8()).bfloat16(), torch.ones(8, 64).bfloat16()
    bias = torch.nn.Parameter(torch.ones(2**17).bfloat16(), requires_grad=False)
    with torch.no_grad():
        expected = F.linear(x, weight, bias)

    def run():
        with torch.no_grad():
            return all(torch.equal(F.linear(x, weight, bias), expected) for _ in range(30))

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        while not running.done():
            bias.data = torch.ones(2**17).bfloat16()
            time.sleep(1e-4)
        assert running.result()


@needs_compiler
@pytest.mark.parametrize("size", [32, 512], ids=["small", "large"])
@pytest.mark.parametrize("what", ["x", "bias", "gradient", "index"])
def test_memory_that_is_given_up_while_a_result_is_allocated_is_not_read(what, size, monkeypatch):
    """As where another thread runs meanwhile: torch lets it."""
    dtype, shape, reused = torch.bfloat16, (2, size), float("nan")
    if what == "bias":
        shape = (size,)
    if what == "index":
        dtype, shape, reused = torch.int64, (2,), 1
    old = bytearray(torch.zeros(shape, dtype=dtype).nbytes)
    memory = torch.frombuffer(old, dtype=dtype).view(shape)
    given = torch.nn.Parameter(memory.detach(), requires_grad=False)
    plain, weight = room.empty_on_cpu, weight_of(tt.int8(), size, size)
    layout, x = layout_of(tt.int8(), (size, size)), torch.zeros(2, size).bfloat16()
    parts = layout.pick_from(weight)

    def empty(*arguments):
        given.data = torch.zeros(shape, dtype=dtype)
        memory.fill_(reused)
        return plain(*arguments)

    calls = {
        "x": lambda: cpu.linear(layout, parts, given, None),
        "bias": lambda: cpu.linear(layout, parts, x, given),
        "gradient": lambda: cpu.gradient(layout, parts, given),
        "index": lambda: cpu.gather(layout, parts, dtype=torch.bfloat16, index=given),
    }
    wanted = weight.dequantize()[[0, 0]] if what == "index" else x
    monkeypatch.setattr(room, "empty_on_cpu", empty)
    room._bind(compiled.native())
    try:
        made = calls[what]()
    finally:
        monkeypatch.undo()
        room._bind(compiled.native())
    assert made is None or torch.equal(made, wanted)
    assert calls[what]() is not None or what == "gradient"  # which only some processors have


def test_int8pack_refuses_what_would_crash():
    for rows, columns in ((24, 250), (24, 8)):
        weight = weight_of(tt.int8(), rows, columns)
        layout = layout_of(tt.int8(), (rows, columns))
        assert int8pack.linear(layout, layout.pick_from(weight), rand(1, columns).bfloat16(), None) is None
    weight = weight_of(tt.int8())
    layout = layout_of(tt.int8(), (24, 256))
    room = torch.zeros(24 * 256 + 1, dtype=torch.int8)
    odd = room[1:].view(24, 256).copy_(weight.parts["qdata"])
    parts = [odd, *layout.pick_from(weight)[1:]]
    assert int8pack.linear(layout, parts, rand(1, 256).bfloat16(), None) is None
    parts, x = layout.pick_from(weight), rand(1, 256).bfloat16()
    assert int8pack.linear(layout, parts, x, rand(24).bfloat16()) is not None
    assert int8pack.linear(layout, parts, x, rand(24).bfloat16().to("meta")) is None
    assert int8pack.linear(layout, parts, torch._efficientzerotensor((1, 256), dtype=torch.bfloat16), None) is None
    for scheme in (tt.int8(128), tt.Affine(symmetric=False), tt.Affine(block=(None, None)), tt.Affine(unit=0.5)):
        other = weight_of(scheme)
        assert int8pack.linear(other.kernel_layout, other.kernel_layout.pick_from(other), rand(1, 256), None) is None


def test_int8pack_rounds_no_scale_and_adds_the_bias_before_it_rounds():
    scale, layout = torch.full((1, 1), 1 + 2.0**-8), layout_of(tt.int8(), (1, 16))  # between two numbers of bfloat16
    x, codes = torch.eye(3, 16).bfloat16(), torch.arange(1, 17, dtype=torch.int8).view(1, 16)
    expected = torch.tensor([1.0, 2.0, 3.0]).view(3, 1) * scale
    assert torch.equal(int8pack.linear(layout, (codes, scale), x, None), expected.bfloat16())
    bias = torch.tensor([2.0**-9]).bfloat16()  # half of what is between them
    assert torch.equal(int8pack.linear(layout, (codes, scale), x, bias), (expected + bias).bfloat16())


def test_inputs_that_are_not_finite_do_not_come_out_finite():
    for row in LAID_OUT:
        weight, x = weight_of(row.scheme), rand(2, 256).bfloat16()
        x[1, 100] = float("inf")
        with torch.no_grad():
            out = F.linear(x, weight)
        assert out[0].isfinite().all()
        assert not out[1].isfinite().any()


# -- nothing is kept --------------------------------------------------------------------------------------------------


@each_laid_out
def test_products_follow_writes_swaps_and_moves(row):
    """The kernel reads the parts themselves, so there is nothing that could be stale."""
    layer = torch.nn.Linear(256, 24, bias=False, dtype=torch.bfloat16)
    layer.weight = torch.nn.Parameter(weight_of(row.scheme), requires_grad=False)
    x = rand(1, 256).bfloat16()
    changes = (
        lambda: None,
        lambda: layer.weight.mul_(0.25),
        lambda: layer.weight.copy_(torch.eye(24, 256)),
        lambda: layer.weight.parts["qdata"].view(torch.uint8).fill_(0x11),
        lambda: layer.share_memory(),
        lambda: setattr(layer.weight, "data", weight_of(tt.int8(), seed=4)),
        lambda: torch.utils.swap_tensors(layer.weight, torch.nn.Parameter(weight_of(tt.nf4()), requires_grad=False)),
        lambda: layer.to(torch.float16).bfloat16(),
    )
    for change in changes:
        with torch.no_grad():
            change()
            assert is_near(layer(x), x, layer.weight)


def test_copies_and_pickles_carry_nothing_of_the_kernel():
    weight = weight_of(tt.int4())
    with torch.no_grad():
        F.linear(rand(1, 256).bfloat16(), weight)
    assert weight.kernel_layout is not None
    assert weight._attributes() == {}
    torch.save(weight, os.devnull)


# -- gradients --------------------------------------------------------------------------------------------------------


@each_laid_out
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (2, 3)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_gradients_through_a_frozen_weight_in_chunks(row, dtype, shape, with_bias, monkeypatch):
    monkeypatch.setattr(product_module, "CACHED", 256)
    monkeypatch.setattr(product_module, "SCRATCH", 256)
    weight = torch.nn.Parameter(weight_of(row.scheme, 600, dtype=dtype), requires_grad=False)
    values = weight.dequantize().double()
    x = rand(*shape, 256).to(dtype).requires_grad_()
    twin = x.detach().double().requires_grad_()
    bias = rand(600).to(dtype) if with_bias else None
    up = rand(*shape, 600).to(dtype) - 0.7
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = F.linear(x, weight, bias)
    out.backward(up)
    F.linear(twin, values, None if bias is None else bias.double()).backward(up.double())
    assert all(isinstance(t, tt.Weight) or t.numel() < weight.numel() for t in saved)
    assert is_near(out.detach(), x.detach(), weight, bias)
    allowed = EPS[dtype] * (up.double().abs() @ values.abs() + twin.grad.abs()) + 1e-6
    assert ((x.grad.double() - twin.grad).abs() <= allowed).all()


BATCHES = {
    "transposed": lambda x: x.view(2, 3, 256).transpose(0, 1),
    "repeated": lambda x: x[:1].expand(4, 5, 256),
    "every other": lambda x: x.view(3, 2, 256)[::2],
    "four": lambda x: x.view(1, 2, 3, 256).transpose(1, 2),
    "none": lambda x: x.view(2, 3, 256).transpose(0, 1)[:, :0],
    "the last of one": lambda x: x.view(1, 6, 256)[:, -1:],
    "one beside one": lambda x: x.view(6, 1, 256).transpose(0, 1),
}
PRODUCTS = {
    "linear": lambda x, weight: F.linear(x, weight, torch.ones(24).requires_grad_()),
    "linear without bias": lambda x, weight: F.linear(x, weight),
    "matmul": lambda x, weight: torch.matmul(x, weight.t()),
    "@": lambda x, weight: x @ weight.t(),
    "weight first": lambda x, weight: weight @ x.transpose(-1, -2),
    "rmatmul": lambda x, weight: weight.t().__rmatmul__(x),
}


@pytest.mark.parametrize("scheme", [tt.nf4(), tt.Plain()], ids=["nf4", "plain"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_batches_that_lie_in_any_order(scheme, batch, product):
    """Torch would repeat the Weight for each matrix of a batch that is not one matrix as it lies."""
    for frozen in (True, False):
        weight = weight_of(scheme, dtype=torch.float32).requires_grad_(not frozen)
        values = weight.detach().dequantize().requires_grad_(not frozen)
        results = []
        for held in (weight, values):
            leaf = rand(6, 256).requires_grad_()
            out = product(batch(leaf), held)
            out.square().sum().backward()
            results.append((out.detach(), leaf.grad, None if frozen else held.grad))
        for got, expected in zip(*results, strict=True):
            if expected is None:
                assert got is None
            else:
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)
        with torch.no_grad():
            torch.testing.assert_close(product(batch(rand(6, 256)), weight), results[1][0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_batches_that_lie_in_any_order_compile(product):
    torch._dynamo.reset()
    weight, compiled = weight_of(tt.int8(), dtype=torch.float32), torch.compile(product, backend="aot_eager")
    for count in (2, 3, 5):
        x = rand(count, 4, 256).transpose(0, 1).requires_grad_()
        torch.testing.assert_close(compiled(x, weight), product(x, weight.dequantize()), rtol=1e-4, atol=1e-3)


def test_chunks_never_decode_the_whole(monkeypatch):
    monkeypatch.setattr(product_module, "CACHED", 256)
    monkeypatch.setattr(cpu, "gradient", lambda *args: None)  # it decodes as many rows as it likes
    monkeypatch.setattr(tt.Affine, "decode", lambda *args: pytest.fail("decoded") if args[2][0] > 256 else None)
    weight = torch.nn.Parameter(weight_of(tt.int8(), 600), requires_grad=False)
    sizes, decode = [], cpu.decode
    counted = lambda *a: sizes.append(a[3][1] - a[3][0]) or decode(*a)  # noqa: E731
    monkeypatch.setitem(decoding.DECODERS, "cpu", (counted,))
    monkeypatch.setattr(product_module, "KERNELS", dict.fromkeys(product_module.KERNELS, lambda *args: None))
    if compiled.native() is not None:
        F.linear(rand(3, 256).bfloat16().requires_grad_(), weight).sum().backward()
        assert sizes == [256, 256, 88] * 2


@pytest.mark.parametrize("step", [1, 7, 40, 100])
def test_chunks_add_up(step):
    weight, x = rand(40, 16), rand(5, 16)
    assert torch.allclose(chunks.linear(x, None, 40, 16, step, lambda a, b, _: weight[a:b]), F.linear(x, weight))
    assert torch.allclose(
        chunks.product(x @ weight.t(), 40, 16, step, lambda a, b, _: weight[a:b]), x @ weight.t() @ weight
    )


# -- compiled graphs --------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Tied(torch.nn.Module):
    """A quantized transformer's linear parts, its head tied to its embedding."""

    def __init__(self, scheme, dtype=torch.bfloat16, width=64, layers=3):
        super().__init__()
        torch.manual_seed(0)
        self.emb = torch.nn.Embedding(96, width)
        self.layers = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.head = torch.nn.Linear(width, 96, bias=False)
        self.head.weight = self.emb.weight
        self.to(dtype)
        tt.quantize(self, {"*norm*": None, "*.bias": None, "*": scheme})
        self.requires_grad_(False)

    def forward(self, tokens):
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tokens(batch, length=1):
    return torch.arange(batch * length).view(batch, length) % 96


def close(got, expected):
    """Within 3 % of the norm: bfloat16 through several layers, with weights that one of the two rounds to it first."""
    assert got.shape == expected.shape
    assert (got.double() - expected.double()).norm() <= 0.03 * expected.double().norm()


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(tt.int8(), id="int8"),
        pytest.param(tt.int4(32), id="int4", marks=pytest.mark.slow),
        pytest.param(tt.nf4(), id="nf4", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_a_tied_transformer_compiles_whole_and_once(scheme, grad):
    model = Tied(scheme)
    assert model.emb.weight is model.head.weight
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    if grad:
        model.layers[0].norm.weight.requires_grad_()
    for batch in (1, 2, 3, 5, 9):
        close(compiled(tokens(batch)), model(tokens(batch)))
    assert graphs.frame_count <= 3  # torch's own: a batch of 1, the first other size, and all others
    if grad:
        found = []
        for run in (compiled, model):
            run(tokens(3)).float().square().mean().backward()
            found.append(model.layers[0].norm.weight.grad)
            model.layers[0].norm.weight.grad = None
        close(*found)


def test_layers_of_one_shape_share_one_graph():
    model = Tied(tt.int8(), layers=4)
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    for layer in model.layers:
        layer.compile(fullgraph=True, backend=graphs)
    model(tokens(3))
    assert graphs.frame_count == 1


@needs_compiler
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, of its tree specs
def test_the_kernel_stands_in_the_compiled_graph_but_not_in_an_exported_one():
    model, seen = Tied(tt.int8()), []

    def backend(graph, inputs):
        return torch._dynamo.backends.common.aot_autograd(
            fw_compiler=lambda g, _: seen.extend(str(node.target) for node in g.graph.nodes) or g
        )(graph, inputs)

    torch._dynamo.reset()
    with torch.no_grad():
        close(torch.compile(model, fullgraph=True, backend=backend)(tokens(2)), model(tokens(2)))
        exported = torch.export.export(model, (tokens(2),))
        close(exported.module()(tokens(2)), model(tokens(2)))
    assert seen.count("torchtether.linear.default") == 7
    exported = exported.run_decompositions()
    assert "torchtether" not in " ".join(str(node.target) for node in exported.graph.nodes)


@pytest.mark.slow
@pytest.mark.usefixtures("cxx")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own
def test_a_tied_transformer_runs_in_inductor_and_aot_inductor(tmp_path):
    model = Tied(tt.int4(32), layers=1)
    torch._dynamo.reset()
    with torch.no_grad():
        expected = model(tokens(2))
        close(torch.compile(model, fullgraph=True)(tokens(2)), expected)
        exported = torch.export.export(model, (tokens(2),))
        path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
        close(torch._inductor.aoti_load_package(path)(tokens(2)), expected)


CACHED = """
import torch, torchtether as tt
from torch._dynamo.utils import counters
layer = tt.quantize(torch.nn.Linear(64, 8, dtype=torch.bfloat16), "int8").requires_grad_(False)
with torch.no_grad():
    x = torch.ones(2, 64).bfloat16()
    assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))
print(counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
@pytest.mark.usefixtures("cxx")
def test_a_graph_that_torch_keeps_on_disk_serves_until_the_code_changes(tmp_path):
    shutil.copytree(Path(tt.__file__).parent, tmp_path / "torchtether")
    environment = {"PYTHONPATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}

    def hits():
        command = [sys.executable, "-c", CACHED]
        found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
        assert found.returncode == 0, found.stderr
        return int(found.stdout)

    assert (hits(), hits()) == (0, 1)
    with open(tmp_path / "torchtether" / "schemes" / "affine.py", "a") as file:
        file.write("# decodes otherwise now\n")
    assert hits() == 0


OPS = torch.ops.torchtether


def told_and_parts(weight):
    return list(weight.parts.values()), graph_ops.text_of(weight.spec)


def test_ops_of_graphs_pass_torchs_own_checks():
    for scheme in (tt.int8(), tt.Affine(bits=3, block=(1, 8))):
        weight = weight_of(scheme)
        x, told = rand(3, 256).bfloat16(), told_and_parts(weight)
        for _ in range(2):  # by Python, and without
            for op in (OPS.linear, OPS.any_linear):
                torch.library.opcheck(op.default, (x, None, *told), test_utils="test_schema")
                assert is_near(op.default(x, None, *told), x, weight)
            torch.library.opcheck(OPS.linear.default, (x, None, *told), test_utils="test_faketensor")
            torch.library.opcheck(OPS.gradient.default, (x[:, :24], *told), test_utils="test_faketensor")


@pytest.mark.parametrize("row", SCHEMES, ids=lambda row: row.id)
def test_what_a_graph_is_told_of_a_weight_stands_between_quotes_and_says_all(row):
    """Inductor writes it into Python, and with ``cpp_wrapper`` into C++, where it escapes nothing."""
    weight = weight_of(row.scheme)
    weight.set_activations("int8")
    told = graph_ops.text_of(weight.spec)
    assert not set(told) & set('"\\\n')
    assert graph_ops._known(told).spec == weight.spec.replace(tie=None)


@each_machine
@each_laid_out
def test_in_a_graph_a_product_is_that_of_eager(row, fast):
    with as_on(fast):
        weight = weight_of(row.scheme, 25 + fast)  # of other sizes: what is remembered stays
        x, bias, told = rand(2, 3, 256).bfloat16(), rand(25 + fast).bfloat16(), told_and_parts(weight)
        for given in (x, x, x[0], x[0, 0], x[:, 0]):
            for added in (bias, None):
                with torch.no_grad():
                    expected = F.linear(given, weight, added)
                assert torch.equal(OPS.linear.default(given, added, *told), expected)
                assert torch.equal(OPS.any_linear.default(given, added, *told), expected)


@needs_compiler
def test_in_a_graph_what_no_kernel_takes_is_answered_all_the_same():
    """Each goes on to the op that Python answers, which sees the very arguments."""
    weight, x, bias = weight_of(tt.int8()), rand(3, 256).bfloat16(), rand(24).bfloat16()
    parts, told = told_and_parts(weight)
    OPS.linear.default(x, bias, parts, told)
    for given in (x[:0], rand(256, 3).bfloat16().t(), rand(2, 256, 3).bfloat16().transpose(1, 2)):
        assert is_near(OPS.linear.default(given, bias, parts, told), given, weight, bias)
    strided = rand(48).bfloat16()[::2]
    assert is_near(OPS.linear.default(x, strided, parts, told), x, weight, strided)
    turned = [part.t().contiguous().t() for part in parts]
    assert is_near(OPS.linear.default(x, bias, turned, told), x, weight, bias)
    wide = weight.to(torch.float64)
    assert is_near(OPS.linear.default(x.double(), None, *told_and_parts(wide)), x.double(), wide)


@needs_compiler
@each_machine
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", [tt.int8(), tt.fp8()], ids=["int8", "fp8"])
def test_in_a_graph_no_python_runs_for_as_many_rows_as_the_table_says(scheme, dtype, fast, monkeypatch):
    with as_on(fast):
        weight = weight_of(scheme, 1025 + fast, 1024, dtype=dtype)  # likewise
        (_, most), *_ = kernels_for(weight.kernel_layout, dtype)
        most = min(most, 40)
        x, told = rand(most + 1, 1024).to(dtype), told_and_parts(weight)
        OPS.linear.default(x[:1], None, *told)
        with monkeypatch.context() as patch:
            patch.setattr(graph_ops, "_known", lambda told: pytest.fail("Python ran"))
            made = OPS.linear.default(x[:most], None, *told)
        assert is_near(made, x[:most], weight)
        assert is_near(OPS.linear.default(x, None, *told), x, weight)


@needs_compiler
@pytest.mark.parametrize("wrong", ["x", "bias", "no bias", "parts", "text"])
def test_in_a_graph_a_wrong_call_raises(wrong):
    weight = weight_of(tt.int8())
    parts, told = told_and_parts(weight)
    given = {"x": rand(3, 256).bfloat16(), "bias": rand(24).bfloat16(), "parts": parts, "text": told}
    OPS.linear.default(*given.values())
    other = {"x": rand(3, 255).bfloat16(), "bias": rand(7).bfloat16(), "no bias": rand(0).bfloat16()}
    other |= {"parts": parts[:1], "text": "{}"}
    given[wrong.removeprefix("no ")] = other[wrong]
    with pytest.raises((RuntimeError, ValueError, IndexError, tt.SchemeError)):
        OPS.linear.default(*given.values())


@needs_compiler
@pytest.mark.parametrize("columns", [256, 255], ids=["taken", "refused"])
def test_in_a_graph_no_argument_is_held_afterwards(columns):
    weight, bias = weight_of(tt.int8()), rand(24).bfloat16()
    parts, told = told_and_parts(weight)
    x = rand(3, 256).bfloat16()
    OPS.linear.default(x, bias, parts, told)
    x = x[:, :columns]
    held = [x, bias, *parts]
    count = lambda: [t._use_count() for t in held]  # noqa: E731
    before = count()
    for _ in range(3):
        with contextlib.suppress(RuntimeError):
            made = OPS.linear.default(x, bias, parts, told)
            assert made._use_count() == torch.ones(1)._use_count()
    assert count() == before


@needs_compiler
def test_threads_run_graphs_at_once():
    weights = [weight_of(tt.int4(), 32, 512 * (1 + n)) for n in range(8)]
    xs = [rand(4, weight.shape[1]).bfloat16() for weight in weights]
    expected = [F.linear(x, weight) for x, weight in zip(xs, weights, strict=True)]

    def run(_):
        pairs = zip(xs, weights, strict=True)
        return [OPS.linear.default(x, None, *told_and_parts(w)) for _ in range(20) for x, w in pairs]

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(run, range(4)):
            assert all(map(torch.equal, found, expected))
