"""Products on CUDA: with fake tensors, that calls fit and do not synchronise; and values, where the CPU has the op."""

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch._functorch.aot_autograd import aot_module_simplified
from torch.utils._python_dispatch import TorchDispatchMode

import torchtether as tt
from tests.catalog import FEW, SCHEMES, slow_but
from tests.fake_cuda import CopyError, NoCopies, fake_cuda
from torchtether import compiled
from torchtether.schemes.bits import table_of
from torchtether.weights.ops import grouped, product
from torchtether.weights.products import chunks, cpu, fitting, int8pack, int_mm, rounding, scaled_mm
from torchtether.weights.products.layout import layout_of
from torchtether.weights.products.table import kernels_for

MATRICES = [row for row in SCHEMES if 2 in row.ranks]
QUANTIZED = [row for row in MATRICES if not row.scheme.transparent]
STACKS = [row for row in SCHEMES if 3 in row.ranks and not row.scheme.transparent]
QUICK = {"int8", "int4-sym-group32", "biased4", "q4_k", "fp8-block", "nvfp4", "nf4-double", "sinq"}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS, COLUMNS = 128, 256
EPS = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
each_scheme = pytest.mark.parametrize("row", slow_but(QUANTIZED, QUICK))
each_stack = pytest.mark.parametrize("row", slow_but(STACKS, QUICK))


@pytest.fixture(autouse=True)
def _no_graph():
    with torch.no_grad():
        yield


def on_cuda(scheme, shape=(ROWS, COLUMNS), dtype=torch.bfloat16, activations=None):
    spec = tt.WeightSpec.of(shape, dtype, scheme).replace(activations=activations)
    return tt.Weight(scheme.empty(shape, dtype, "cuda"), spec)


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda")


def facts(tensor):
    return tuple(tensor.shape), tensor.dtype, str(tensor.device)


def weight_of(scheme, shape=(ROWS, COLUMNS), dtype=torch.float32):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return tt.Weight.encode(values, scheme).to(dtype)


def inputs(rows, dtype=torch.float32):
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(2)).to(dtype)


def is_near(made, wanted, eps):
    return (made.double() - wanted).norm() <= eps * wanted.norm()


# -- shapes, dtypes, devices, and nothing that waits -------------------------------------------------------------------


@each_scheme
@pytest.mark.parametrize("limit", [product.ON_CUDA, 1 << 14], ids=["whole", "in pieces"])
def test_products(row, limit, monkeypatch):
    monkeypatch.setattr(product, "ON_CUDA", limit)
    with fake_cuda(), NoCopies():
        for dtype in DTYPES:
            weight, bias = on_cuda(row.scheme, (2 * ROWS, COLUMNS), dtype), empty(2 * ROWS, dtype=dtype)
            for rows in (1, 5, 16, 17, 64) if dtype is torch.bfloat16 else (3, 17):
                x, wanted = empty(rows, COLUMNS, dtype=dtype), ((rows, 2 * ROWS), dtype, "cuda:0")
                assert facts(F.linear(x, weight)) == wanted
                assert facts(F.linear(x, weight, bias)) == wanted
                assert facts(torch.mm(empty(rows, 2 * ROWS, dtype=dtype), weight)) == facts(x)  # as backward calls it
            assert facts(F.linear(empty(2, 3, COLUMNS, dtype=dtype), weight)) == ((2, 3, 2 * ROWS), dtype, "cuda:0")


@each_scheme
def test_embeddings_and_values(row):
    with fake_cuda(), NoCopies():
        for dtype in DTYPES:
            weight = on_cuda(row.scheme, dtype=dtype)
            index = torch.empty(2, 3, dtype=torch.int64, device="cuda")
            assert facts(F.embedding(index, weight)) == ((2, 3, COLUMNS), dtype, "cuda:0")
            assert facts(weight.dequantize()) == ((ROWS, COLUMNS), dtype, "cuda:0")
            assert facts(weight.t().dequantize()) == ((COLUMNS, ROWS), dtype, "cuda:0")


class NoSmallFloats(TorchDispatchMode):
    """Raise for a selection of 8-bit floats, which CUDA leaves to ``gather`` from 17 rows on."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten.index_select.default or not is_small_float(args[0])
        return func(*args, **(kwargs or {}))


def is_small_float(tensor):
    return tensor.is_floating_point() and tensor.element_size() == 1


TALL = tt.ScaledFloat("e4m3", (32, 32), torch.float8_e8m0fnu)


@pytest.mark.parametrize("scheme", [tt.fp8(), tt.mxfp8(), tt.nvfp4(), TALL], ids=str)
def test_rows_of_small_floats_are_selected_as_bytes(scheme):
    index = torch.arange(0, ROWS, 4)
    for place in ("cpu", "cuda"):
        with fake_cuda() if place == "cuda" else nullcontext(), NoSmallFloats():
            weight = on_cuda(scheme) if place == "cuda" else weight_of(scheme)
            names = index if place == "cpu" else torch.empty(32, dtype=torch.int64, device=place)
            assert F.embedding(names, weight).shape == (32, COLUMNS)
            assert isinstance(weight.index_select(0, names), tt.Weight) is (scheme is not TALL)
            assert weight.dequantize().shape == (ROWS, COLUMNS)
    values = weight_of(scheme)
    assert torch.equal(F.embedding(index, values), values.dequantize()[index])


@each_stack
def test_experts(row, monkeypatch):
    """As many rows as groups or more, fewer, and pieces of the matrices; forward and backward.

    In other dtypes than bfloat16, and of sides that torch's op does not take, few rows.
    """
    monkeypatch.setattr(fitting, "capability", lambda device: (9, 0))
    for limit in (product.ON_CUDA, 1 << 14):
        monkeypatch.setattr(grouped, "ON_CUDA", limit)
        with fake_cuda(), NoCopies():
            experts, offs = on_cuda(row.scheme, (4, ROWS, COLUMNS)), torch.empty(4, dtype=torch.int32, device="cuda")
            for rows in (3, 64):
                made = F.grouped_mm(empty(rows, COLUMNS), experts.transpose(1, 2), offs=offs)
                assert facts(made) == ((rows, ROWS), torch.bfloat16, "cuda:0")
                assert facts(F.grouped_mm(made, experts, offs=offs)) == ((rows, COLUMNS), torch.bfloat16, "cuda:0")
            for dtype, count in ((torch.float16, ROWS), (torch.float32, ROWS), (torch.bfloat16, 24)):
                experts = on_cuda(row.scheme, (4, count, COLUMNS), dtype)
                made = grouped.grouped_mm(
                    torch.ops.aten._grouped_mm.default, empty(9, COLUMNS, dtype=dtype), experts.transpose(1, 2), offs
                )
                assert facts(made) == ((9, count), dtype, "cuda:0")


@pytest.mark.parametrize(("able", "is_one_op"), [((8, 9), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)])
def test_experts_by_the_op_of_torch_where_it_does_not_wait(able, is_one_op, monkeypatch):
    """On other generations it copies ``offs`` to the host (``_grouped_mm_fallback``), which fakes do not show."""
    monkeypatch.setattr(fitting, "capability", lambda device: able)
    with fake_cuda(), NoCopies():
        experts, offs = on_cuda(tt.int8(), (4, ROWS, COLUMNS)), torch.empty(4, dtype=torch.int32, device="cuda")
        for rows in (3, 64):
            x = empty(rows, COLUMNS)
            assert facts(F.grouped_mm(x, experts.transpose(1, 2), offs=offs)) == ((rows, ROWS), x.dtype, "cuda:0")
            assert grouped.torch_multiplies(x, experts) is is_one_op
            assert grouped.is_answered(x, experts, offs) is (is_one_op or rows == 3)


def test_what_waits_is_seen():
    with fake_cuda() as mode, NoCopies():
        with pytest.raises(CopyError):
            torch.zeros(257).to("cuda")
        with pytest.raises(Exception, match="local_scalar_dense"):
            empty(3).sum().item()
        assert mode is not None


def test_tables_are_kept_on_other_devices():
    meta = torch.device("meta")
    assert table_of((0.5, 1.0), meta) is table_of((0.5, 1.0), meta)
    assert table_of((0.5, 1.0), torch.device("cpu")) is not table_of((0.5, 1.0), torch.device("cpu"))


BLOCKS = tt.ScaledFloat(element="e4m3", block=(128, 128))
STRIPS = tt.ScaledFloat(element="e4m3", block=(1, 128))
ON_GPU = [
    (tt.int8(), "int8", "int_mm"),
    (tt.Affine(block=(None, None)), "int8", "int_mm"),
    (tt.fp8(), "float8", "scaled_mm"),
    (tt.fp8("tensor"), "float8", "scaled_mm"),
    (BLOCKS, "float8", "scaled_mm"),
    (STRIPS, "float8", "scaled_mm"),
]
SMALL = [
    (tt.mxfp8(), "mxfp8"),
    (tt.mxfp4(), "mxfp4"),
    (tt.nvfp4(), "nvfp4"),
    (tt.nvfp4(global_divides=True), "nvfp4"),
    (tt.ScaledFloat("e2m1", (1, 16), torch.float8_e4m3fn), "nvfp4"),
]
NOT_COMPILED = [(BLOCKS, "float8", (9, 0)), (STRIPS, "float8", (9, 0)), *((*pair, (10, 0)) for pair in SMALL)]


FAST = {"int8": "int8", "fp8": "float8"}
"""What inputs are rounded to, by the scheme with which torch multiplies them in 8 bits."""

COMPILED = [
    pytest.param(row, to, id=f"{row.id}-{to}", marks=() if to in (None, FAST.get(row.id)) else pytest.mark.slow)
    for row, to in itertools.product(FEW, (None, "int8", "float8", "mxfp8", "nvfp4"))
    if not row.scheme.transparent
]


@pytest.mark.parametrize(("row", "to"), COMPILED)
def test_compiled_without_a_break(row, to, monkeypatch):
    monkeypatch.setattr(fitting, "capability", lambda device: (10, 0) if to in rounding.BLOCKS else (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    graphs = []

    def keep(graph, inputs):
        graphs.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return graph.forward

    def block(x, weight, bias):
        return F.linear(x.relu(), weight, bias) @ weight

    torch._dynamo.reset()
    with fake_cuda():
        run = torch.compile(
            block, backend=lambda graph, inputs: aot_module_simplified(graph, inputs, fw_compiler=keep), fullgraph=True
        )
        made = run(empty(32, COLUMNS), on_cuda(row.scheme, activations=to), empty(ROWS))
        assert facts(made) == ((32, COLUMNS), torch.bfloat16, "cuda:0")
    assert len(graphs) == 1
    if to is not None and to == FAST.get(row.id):  # the compiler sees the rounding, and torch's product
        assert any("_int_mm" in name or "_scaled_mm" in name for name in graphs[0])


@pytest.mark.parametrize(("scheme", "to", "able"), NOT_COMPILED, ids=str)
def test_the_compiler_never_sees_scales_of_blocks(scheme, to, able, monkeypatch):
    """That of torch 2.13 passes them to ``torch._scaled_mm`` as they are, and raises for swizzled ones."""
    monkeypatch.setattr(fitting, "capability", lambda device: able)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.__config__, "show", lambda: "USE_MSLK=ON")
    seen = []

    def keep(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    with fake_cuda():
        run = torch.compile(
            F.linear, backend=lambda graph, inputs: aot_module_simplified(graph, inputs, fw_compiler=keep)
        )
        made = run(empty(32, COLUMNS), on_cuda(scheme, activations=to), empty(ROWS))
        assert facts(made) == ((32, ROWS), torch.bfloat16, "cuda:0")
    assert "torchtether.linear.default" in seen
    assert not any("scaled_mm" in name for name in seen)


# -- rounded inputs ----------------------------------------------------------------------------------------------------

each_small = pytest.mark.parametrize(("scheme", "to"), SMALL, ids=str)


@pytest.mark.parametrize(("scheme", "to", "engine"), ON_GPU, ids=str)
@pytest.mark.parametrize("is_below", [False, True], ids=["linear", "below autograd"])
def test_torch_multiplies_codes_with_codes(scheme, to, engine, is_below, monkeypatch):
    real, called = product.KERNELS[engine], []
    monkeypatch.setitem(product.KERNELS, engine, lambda *a: called.append(real(*a)) or called[-1])
    monkeypatch.setattr(fitting, "capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with fake_cuda(), NoCopies():
        weight, x, bias = on_cuda(scheme, activations=to), empty(2, 16, COLUMNS), empty(ROWS)
        flat = torch.addmm(bias, x.view(32, COLUMNS), weight.t()) if is_below else F.linear(x, weight, bias)
        assert facts(flat.view(2, 16, ROWS)) == ((2, 16, ROWS), torch.bfloat16, "cuda:0")
    assert len(called) == 1
    assert called[0] is not None


@pytest.mark.parametrize(("scheme", "to", "able"), [(tt.fp8(), "float8", (9, 0)), *NOT_COMPILED], ids=str)
def test_inputs_whose_columns_are_apart(scheme, to, able, monkeypatch):
    """torch's op multiplies rows that are contiguous."""
    monkeypatch.setattr(fitting, "capability", lambda device: able)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with fake_cuda(), NoCopies():
        weight = on_cuda(scheme, activations=to)
        for x in (empty(COLUMNS, 32).t(), empty(32, 2 * COLUMNS)[:, ::2], empty(4, COLUMNS, 8).transpose(1, 2)):
            assert facts(F.linear(x, weight)) == ((*x.shape[:-1], ROWS), torch.bfloat16, "cuda:0")


@pytest.mark.parametrize(
    ("shape", "rows", "dtype", "able"),
    [
        ((48, 60), 32, torch.bfloat16, (9, 0)),
        ((44, 64), 32, torch.bfloat16, (9, 0)),
        ((48, 64), 16, torch.bfloat16, (7, 0)),
        ((48, 64), 32, torch.bfloat16, (0, 0)),
    ],
)
def test_what_those_products_do_not_take(shape, rows, dtype, able, monkeypatch):
    monkeypatch.setattr(fitting, "capability", lambda device: able)
    with fake_cuda():
        for scheme, to, engine in (ON_GPU[0], ON_GPU[2]):
            weight = on_cuda(scheme, shape, dtype, to)
            layout, x = weight.kernel_layout, empty(rows, shape[1], dtype=dtype)
            assert product.KERNELS[engine](layout, layout.pick_from(weight), x, None) is None
            assert F.linear(x, weight).shape == (rows, shape[0])


def test_blocks_are_multiplied_on_one_generation_alone(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    with fake_cuda():
        for able, fits in (((8, 9), False), ((9, 0), True), ((10, 0), False)):
            monkeypatch.setattr(fitting, "capability", lambda device, able=able: able)
            weight = on_cuda(BLOCKS, activations="float8")
            made = scaled_mm.linear(weight.kernel_layout, weight.kernel_layout.pick_from(weight), empty(3, 256), None)
            assert (made is not None) is fits


@pytest.mark.parametrize("scheme", [BLOCKS, STRIPS], ids=str)
@pytest.mark.parametrize("rows", [1, 8, 33])
def test_rows_of_blocks_come_in_eights(scheme, rows, monkeypatch):
    """cuBLAS supports no others for inputs with scales of 128 columns: ``cublaslt_gemm.cu`` of TransformerEngine."""
    monkeypatch.setattr(
        scaled_mm, "scaled_mm", lambda a, *rest, **kwargs: seen.append(a.shape) or by_recipe(a, *rest, **kwargs)
    )
    monkeypatch.setattr(scaled_mm, "_is_able", lambda *_: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    seen, weight, x = [], weight_of(scheme, (256, 256), torch.bfloat16), inputs(rows, torch.bfloat16)
    layout = layout_of(scheme, (256, 256), "float8")
    made = scaled_mm.linear(layout, layout.pick_from(weight), x, None)
    assert seen == [(-(-rows // 8) * 8, 256)]
    assert is_near(made, rounding.rounded(x.double(), "float8") @ weight.dequantize().double().T, 2.0**-6)


@pytest.mark.parametrize("to", ["int8", "float8"])
@pytest.mark.parametrize(
    "scheme",
    [tt.int8(32), tt.int8(symmetric=False), tt.int4(32), tt.nf4(), tt.fp8("block"), tt.fp8(), tt.int8(), tt.mxfp4()],
    ids=str,
)
def test_schemes_that_those_products_do_not_know(scheme, to):
    known = {("int8", "int8"), ("float8", "fp8")}
    names = {name for name, _ in kernels_for(layout_of(scheme, (48, 256), to), torch.bfloat16, "cuda")}
    assert bool(names) == ((to, str(scheme)) in known)


@pytest.mark.parametrize("scheme", [tt.int8(), tt.Affine(block=(None, None), narrow_range=True, unit=1 / 127)], ids=str)
def test_integers_with_integers(scheme):
    weight, x, bias = weight_of(scheme), inputs(32), torch.randn(ROWS)
    layout = layout_of(scheme, (ROWS, COLUMNS), "int8")
    codes, scale = rounding.codes_of(x, "int8")
    wanted = (codes * scale).double() @ weight.dequantize().double().T + bias.double()
    assert is_near(int_mm.linear(layout, layout.pick_from(weight), x, bias), wanted, 1e-5)
    x[0, 1], x[1, 1] = torch.nan, torch.inf
    assert int_mm.linear(layout, layout.pick_from(weight), x, bias)[:2].isnan().all()


def by_recipe(a, b, scale_a, recipe_a, scale_b, recipe_b, bias=None, output_dtype=None):
    """What ``F.scaled_mm`` says of its arguments, in float64; and that the scales lie as CUDA asks for."""
    (m, k), n = a.shape, b.shape[1]
    if recipe_a is F.ScalingType.TensorWise:
        assert recipe_b is recipe_a
        assert scale_a.numel() == scale_b.numel() == 1
        left, right = scale_a, scale_b
    elif recipe_a is F.ScalingType.RowWise:
        assert scale_a.shape == (m, 1)
        assert scale_b.shape == (1, n)
        assert scale_b.is_contiguous()
        assert bias is None or bias.is_contiguous()
        left, right = scale_a, scale_b
    else:
        groups = k // 128
        assert scale_a.shape == (m, groups)
        assert scale_a.stride() == (1, m)
        left = scale_a.repeat_interleave(128, 1)
        if recipe_b is F.ScalingType.BlockWise128x128:
            filled = -(-groups // 4) * 4
            assert scale_b.shape == (filled, n // 128)
            assert scale_b.stride() == (1, filled)
            right = scale_b[:groups].repeat_interleave(128, 0).repeat_interleave(128, 1)
        else:
            assert scale_b.shape == (n, groups)
            assert scale_b.stride() == (1, n)
            right = scale_b.t().repeat_interleave(128, 0)
    made = (a.double() * left.double()) @ (b.double() * right.double())
    return (made if bias is None else made + bias.double()).to(output_dtype)


@pytest.mark.parametrize("scheme", [tt.fp8(), tt.fp8("tensor"), BLOCKS, STRIPS], ids=str)
@pytest.mark.parametrize("shape", [(256, 256), (384, 640)], ids=str)
@pytest.mark.parametrize("rows", [1, 33])
def test_floats_with_floats(scheme, shape, rows, monkeypatch):
    """The scales of weights and inputs reach torch's op where it reads them: it runs on no CPU for blocks."""
    monkeypatch.setattr(scaled_mm, "scaled_mm", by_recipe)
    weight, bias = weight_of(scheme, shape), torch.randn(2 * shape[0]).bfloat16()[::2]
    x = torch.randn(rows, shape[1]).bfloat16()
    layout = layout_of(scheme, shape, "float8")
    codes, scale = rounding.codes_of(x, "float8")
    multiply = scaled_mm.by_rows if layout.fields["groups"] == 1 else scaled_mm.by_blocks
    made = multiply(layout, weight.parts["qdata"], weight.parts["scale"], codes, scale, bias)
    wanted = (codes.double() * scale.double()) @ weight.dequantize().double().T + bias.double()
    assert made.dtype is torch.bfloat16
    assert is_near(made, wanted, 2.0**-8)


@pytest.mark.parametrize("scheme", [tt.fp8(), tt.fp8("tensor")], ids=str)
def test_few_rows_are_scaled_after_the_product_on_hopper(scheme, monkeypatch):
    """There cuBLAS has no product of few rows and many columns with scales of rows (torchao's issue 4582)."""
    layout, weight, bias = layout_of(scheme, (ROWS, COLUMNS), "float8"), weight_of(scheme), torch.randn(ROWS).bfloat16()
    seen = []
    monkeypatch.setattr(scaled_mm, "scaled_mm", lambda *a, **k: seen.append(a[3]) or by_recipe(*a, **k))
    for able in ((8, 9), (9, 0), (10, 0)):
        monkeypatch.setattr(fitting, "capability", lambda device, able=able: able)
        for rows in (1, 256, 257):
            codes, scale = rounding.codes_of(inputs(rows), "float8")
            made = scaled_mm.by_rows(layout, weight.parts["qdata"], weight.parts["scale"], codes, scale, bias)
            wanted = (codes.double() * scale.double()) @ weight.dequantize().double().T + bias.double()
            assert made.dtype is torch.bfloat16
            assert is_near(made, wanted, 2.0**-8)
            is_few = able == (9, 0) and rows <= 256
            assert seen.pop() is (F.ScalingType.TensorWise if is_few else F.ScalingType.RowWise)


def test_scales_are_swizzled_as_documented():
    """The scale of row r and column c lies in the tile of 128 x 4 it is in, at r % 32 * 16 + r // 32 * 4 + c % 4."""
    for rows, groups in ((128, 4), (1, 1), (130, 3), (300, 9)):
        scale = torch.randint(1, 255, (rows, groups), dtype=torch.uint8)
        made, across = scaled_mm.swizzled(scale), -(-groups // 4)
        assert made.shape == (-(-rows // 128) * 128 * across * 4,)
        for r, c in ((r, c) for r in range(rows) for c in range(groups)):
            tile, inner = r // 128 * across + c // 4, r % 128
            assert made[tile * 512 + inner % 32 * 16 + inner // 32 * 4 + c % 4] == scale[r, c]
        assert made.count_nonzero() == scale.numel()


def in_order(scale, rows, groups):
    """The scales (rows, groups), float64, which lie as tensor cores read them."""
    r, c = torch.arange(rows).unsqueeze(1), torch.arange(groups)
    at = (r // 128 * -(-groups // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    return scale.float()[at].double()


def codes_of(given):
    if given.dtype is torch.float8_e4m3fn:
        return given.double()
    both = given.view(torch.uint8)
    table = torch.tensor(tt.mxfp4()._element.table, dtype=torch.float64)
    return torch.stack([table[(both & 15).int()], table[(both >> 4).int()]], -1).flatten(1)


def by_blocks_of_few(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, output_dtype=None):
    """What ``F.scaled_mm`` says of mxfp8, mxfp4 and nvfp4, in float64; and what it checks on CUDA."""
    assert recipe_a == recipe_b
    swizzles = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    assert swizzle_a == swizzle_b == swizzles[: len(recipe_a)]  # ``check_swizzle_lengths`` of ScaledBlas.cpp
    assert a.stride(1) == b.stride(0) == 1
    left, right = codes_of(a), codes_of(b.t())
    size = {F.ScalingType.BlockWise1x32: 32, F.ScalingType.BlockWise1x16: 16}[recipe_a[0]]
    groups = left.shape[1] // size
    for side, (scale, *whole) in ((left, scale_a), (right, scale_b)):
        assert scale.dtype is (torch.float8_e8m0fnu if size == 32 else torch.float8_e4m3fn)
        assert scale.shape == (-(-side.shape[0] // 128) * 128 * -(-groups // 4) * 4,)
        side.mul_(in_order(scale, side.shape[0], groups).repeat_interleave(size, 1))
        assert len(whole) == len(recipe_a) - 1
        for one in whole:
            assert (one.numel(), one.dtype) == (1, torch.float32)
            side.mul_(one.double())
    return (left @ right.T).to(output_dtype)


@each_small
@pytest.mark.parametrize("shape", [(256, 256), (48, 96), (144, 640)], ids=str)
@pytest.mark.parametrize("rows", [1, 33, 130])
def test_small_floats_with_small_floats(scheme, to, shape, rows, monkeypatch):
    """Codes, scales and powers reach torch's op where it reads them; none of these runs on a CPU."""
    monkeypatch.setattr(scaled_mm, "scaled_mm", by_blocks_of_few)
    weight, bias = weight_of(scheme, shape), torch.randn(shape[0]).bfloat16()
    x = (torch.randn(rows, shape[1]) * torch.randn(rows, 1).mul(8).exp()).bfloat16()
    layout = layout_of(scheme, shape, to)
    for added in (None, bias):
        made = scaled_mm.by_small_blocks(layout, layout.pick_from(weight), rounding.blocks_of(x, to), added)
        units, power = rounding.units_of(x, to)  # what the CPU multiplies
        assert torch.equal((units.double() * power.double()).float(), rounding.rounded(x.float(), to))
        wanted = (units.double() @ weight.dequantize().double().T) * power.double()
        assert made.dtype is torch.bfloat16
        assert is_near(made, wanted if added is None else wanted + bias.double(), 2.0**-8)
    x[0, 3] = torch.nan
    assert scaled_mm.by_small_blocks(layout, layout.pick_from(weight), rounding.blocks_of(x, to), None)[0].isnan().all()


@each_small
def test_small_floats_on_generations_that_have_them(scheme, to, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.__config__, "show", lambda: "USE_MSLK=ON")
    with fake_cuda(), NoCopies():
        weight, bias = on_cuda(scheme, (48, COLUMNS), activations=to), empty(48)
        layout, wanted = weight.kernel_layout, ((2, 17, 48), torch.bfloat16, "cuda:0")
        for able in ((8, 9), (9, 0), (10, 0), (12, 0)):
            monkeypatch.setattr(fitting, "capability", lambda device, able=able: able)
            x = empty(2, 17, COLUMNS)
            made = scaled_mm.linear(layout, layout.pick_from(weight), x, bias)
            assert (made is not None) is (able >= (10, 0) and to != "mxfp4")  # torch counts half of its fake scales
            assert made is None or facts(made) == wanted
            assert facts(F.linear(x, weight, bias)) == wanted
            assert facts(F.linear(x[:1, :1], weight)) == ((1, 1, 48), torch.bfloat16, "cuda:0")


@pytest.mark.parametrize("to", ["int8", "float8", "nvfp4"])
@pytest.mark.parametrize("able", [(8, 0), (9, 0)], ids=str)
def test_experts_with_rounded_inputs(to, able, monkeypatch):
    monkeypatch.setattr(fitting, "capability", lambda device: able)
    offs_of = torch.int32
    with fake_cuda(), NoCopies():
        experts, offs = (
            on_cuda(tt.fp8(), (4, ROWS, COLUMNS), activations=to),
            torch.empty(4, dtype=offs_of, device="cuda"),
        )
        for rows in (3, 64):
            made = F.grouped_mm(empty(rows, COLUMNS), experts.transpose(1, 2), offs=offs)
            assert facts(made) == ((rows, ROWS), torch.bfloat16, "cuda:0")
            back = torch.ops.aten._grouped_mm.default(made, experts, offs)  # as autograd calls it
            assert facts(back) == ((rows, COLUMNS), torch.bfloat16, "cuda:0")


def by_group(a, b, scale_a, scale_b, offs, out_dtype):
    """What ``torch._scaled_grouped_mm`` says of its arguments, in float64; rows behind the last group are anything."""
    assert a.dtype is b.dtype is torch.float8_e4m3fn
    assert (a.stride(1), b.stride(1)) == (1, 1)
    assert scale_a.shape == a.shape[:1]
    assert scale_b.shape == (b.shape[0], b.shape[2])
    assert scale_b.stride(1) == 1
    out, start = torch.full((a.shape[0], b.shape[2]), torch.nan, dtype=torch.float64), 0
    for group, stop in enumerate(offs.tolist()):
        out[start:stop] = a[start:stop].double() @ b[group].double() * scale_b[group].double()
        start = max(start, stop)
    return (out * scale_a.double().unsqueeze(1)).to(out_dtype)


@pytest.mark.parametrize("to", ["int8", "float8", "mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("able", [(8, 0), (9, 0)], ids=str)
@pytest.mark.parametrize("counts", [[0, 2, 0, 1], [5, 1, 4, 9]], ids=str)
def test_experts_with_rounded_inputs_as_the_cpu_multiplies(to, able, counts, monkeypatch):
    monkeypatch.setattr(torch, "_scaled_grouped_mm", by_group)
    monkeypatch.setattr(fitting, "capability", lambda device: able)
    experts = weight_of(tt.fp8(), (4, ROWS, COLUMNS), torch.bfloat16)
    experts.set_activations(to)
    rows, offs = torch.randn(sum(counts) + 1, COLUMNS).bfloat16(), torch.tensor(counts).cumsum(0).int()
    made = grouped.on_cuda(rows, experts, offs, True)
    values, x = experts.dequantize().double(), rounding.rounded(rows.double(), to)
    each = [values[g] for g, count in enumerate(counts) for _ in range(count)]
    wanted = torch.stack([matrix @ one for one, matrix in zip(x, each, strict=False)])
    assert is_near(made[:-1], wanted, 2.0**-7)
    assert is_near(made[:-1], F.grouped_mm(rows, experts.transpose(1, 2), offs=offs)[:-1].double(), 2.0**-7)
    assert not made[-1].any()


# -- as they are -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integers_with_floats(dtype):
    weight, x, bias = weight_of(tt.int8(), dtype=dtype), inputs(5, dtype), torch.randn(ROWS).to(dtype)
    layout = weight.kernel_layout
    made = int8pack.linear(layout, layout.pick_from(weight), x, bias)
    wanted = x.double() @ weight.to(torch.float32).dequantize().double().T + bias.double()
    assert made.dtype is dtype
    assert is_near(made, wanted, EPS[dtype])


def test_integers_that_int32_does_not_count():
    with fake_cuda():
        for rows, fits in ((2**15 - 16, True), (2**15, False)):
            weight = on_cuda(tt.int8(), (rows, 2**16))
            made = int8pack.linear(weight.kernel_layout, weight.kernel_layout.pick_from(weight), empty(1, 2**16), None)
            assert (made is not None) is fits


def test_pieces_are_joined_where_a_transform_follows():
    values = torch.empty(40, 16, device="meta")
    multiply = lambda x: chunks.linear(x, None, 40, 16, 7, lambda start, stop, out: values[start:stop])  # noqa: E731
    assert torch.func.vmap(multiply)(torch.empty(3, 5, 16, device="meta")).shape == (3, 5, 40)
    assert multiply(torch.empty(5, 16, device="meta")).shape == (5, 40)


@each_scheme
@pytest.mark.parametrize("has_bias", [False, True], ids=["without bias", "with bias"])
def test_pieces_that_are_written_in_place(row, has_bias):
    """What a GPU does from 17 rows on, on the CPU: the whole product, with the values that the scheme decodes."""
    weight, x = weight_of(row.scheme, (2 * ROWS, COLUMNS)), inputs(19)
    bias = torch.randn(2 * ROWS) if has_bias else None
    made = chunks.in_place(x, bias, 2 * ROWS, COLUMNS, 64, product.decoder(weight))
    wanted = x.double() @ weight.dequantize().double().T
    assert is_near(made, wanted if bias is None else wanted + bias.double(), EPS[torch.float32])
    assert chunks.in_place(x.view(1, 19, COLUMNS), bias, 2 * ROWS, COLUMNS, 64, product.decoder(weight)).shape[0] == 1
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        chunks.in_place(x.view(38, COLUMNS // 2), bias, 2 * ROWS, COLUMNS, 64, product.decoder(weight))


@each_stack
@pytest.mark.parametrize("counts", [[0, 2, 0, 1], [3, 0, 0, 0], [5, 1, 4, 9]], ids=str)
@pytest.mark.parametrize("limit", [1 << 27, 1 << 14], ids=["whole", "in pieces"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_experts_in_use_are_found_without_waiting(row, counts, limit, dtype, monkeypatch):
    """What a GPU does, on the CPU: torch's op on the matrices that may be in use; rows behind the last group are 0."""
    monkeypatch.setattr(grouped, "ON_CUDA", limit)
    experts = weight_of(row.scheme, (4, 2 * ROWS, COLUMNS), dtype)
    offs, values = torch.tensor(counts).cumsum(0).int(), experts.dequantize().double()
    total = sum(counts)
    for is_transposed in (True, False):
        rows = torch.randn(total + 1, COLUMNS if is_transposed else 2 * ROWS).to(dtype)
        made = grouped.without_waiting(rows, experts, offs, is_transposed)
        each = [values[g].t() if is_transposed else values[g] for g, count in enumerate(counts) for _ in range(count)]
        wanted = torch.stack([one.double() @ matrix for one, matrix in zip(rows, each, strict=False)])
        assert made.dtype is dtype
        assert is_near(made[:total], wanted, 2.0**-6 if dtype is torch.bfloat16 else 1e-5)
        assert not made[total:].any()


@each_stack
def test_a_stack_is_one_matrix_for_kernels_where_its_blocks_allow(row):
    """The kernel of experts reads the parts of the stack as they are, also of its transpose."""
    stack = weight_of(row.scheme, (4, 16, COLUMNS))
    layout = grouped.layout_of_stack(stack.scheme.decoder, stack.spec.base)
    if layout is None:
        matrix = grouped.matrix_of(stack)
        assert isinstance(row.scheme, tt.ColumnScaled) or matrix is None or matrix.kernel_layout is None
        return
    parts = layout.pick_from(stack.transpose(1, 2))
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(parts, layout.pick_from(stack), strict=True))
    made = cpu.decode(layout, parts, torch.float32)
    assert made is None or torch.equal(made.view(stack.shape), stack.dequantize())


def test_the_cpu_has_the_kernels_that_it_had():
    layout = layout_of(tt.int8(), (ROWS, COLUMNS))
    names = [name for name, _ in kernels_for(layout, torch.bfloat16)]
    assert names[-1] == "int8pack"
    assert ("compiled" in names) is (compiled.native() is not None)
    assert "compiled" not in [name for name, _ in kernels_for(layout, torch.bfloat16, "cuda")]
    assert kernels_for(layout, torch.bfloat16, "xpu") == ()
