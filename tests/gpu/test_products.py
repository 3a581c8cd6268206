"""Products are within the bound of their dtype of float64's, in any shape and strides, compiled and under graphs."""

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchtether as tt
from tests.catalog import FEW, SCHEMES
from torchtether.weights.ops.graph_ops import text_of

ROWS = (1, 2, 8, 16, 17, 64)
SHAPES = ((32, 64), (128, 256), (17, 1100))
FACTOR = {torch.float32: 32, torch.bfloat16: 4, torch.float16: 4}
"""Roundings of ``sum(|x| |w|)`` that a product may be off: float32 adds in some order, the others round once more."""

few = pytest.mark.parametrize("row", FEW[1:], ids=[row.id for row in FEW[1:]])


def random(*shape, dtype, device, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def weight_of(scheme, shape, dtype, device):
    return tt.Weight.encode(random(*shape, dtype=torch.float32, device=device, seed=1), scheme).to(dtype)


def close(found, x, values, dtype):
    """``found`` is ``x @ values.T`` but for the roundings of ``dtype``."""
    x, values = x.detach().double(), values.detach().double()
    bound = FACTOR[dtype] * torch.finfo(dtype).eps * (x.abs() @ values.abs().T) + torch.finfo(dtype).tiny
    assert found.dtype == dtype
    assert bool(((found.double() - x @ values.T).abs() <= bound).all())


@pytest.mark.parametrize(
    ("row", "dtype"),
    [
        pytest.param(row, dtype, id=f"{row.id}-{dtype}")
        for dtype in FACTOR
        for row in (SCHEMES if dtype is torch.bfloat16 else FEW)[1:]
    ],
)
def test_linear(row, dtype, device):
    for shape in SHAPES:
        weight = weight_of(row.scheme, shape, dtype, device)
        values, bias = weight.dequantize(), random(shape[0], dtype=dtype, device=device, seed=2)
        for rows in ROWS:
            x = random(rows, shape[1], dtype=dtype, device=device)
            close(F.linear(x, weight), x, values, dtype)
            if shape is SHAPES[-1]:  # each case compiles kernels of its own, for 0.2 s: of all schemes, minutes
                with_bias = torch.cat([x, torch.ones_like(x[:, :1])], 1), torch.cat([values, bias[:, None]], 1)
                close(F.linear(x, weight, bias), *with_bias, dtype)


@contextmanager
def never_waiting():
    """Let calls that wait for the GPU raise; torch warns, once, that it does not see all of them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@few
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
def test_shapes_and_strides(row, dtype, device):
    weight = weight_of(row.scheme, (128, 256), dtype, device)
    values, x = weight.dequantize(), random(24, 256, dtype=dtype, device=device)
    wide = random(24, 512, dtype=dtype, device=device)
    for given in (x[::2], x.t().contiguous().t(), wide[:, ::2], wide[:, 7:263], x[:0], x[3]):
        found = F.linear(given, weight)
        assert found.shape == (*given.shape[:-1], 128)
        close(found.reshape(-1, 128), given.reshape(-1, 256), values, dtype)
    found = F.linear(x.view(2, 3, 4, 256), weight)
    assert found.shape == (2, 3, 4, 128)
    y = random(24, 128, dtype=dtype, device=device, seed=3)
    close(F.linear(y, weight.t()), y, values.t(), dtype)
    close(x @ weight.t(), x, values, dtype)
    close((weight @ x.t()).t().contiguous(), x, values, dtype)


@few
def test_backward_to_inputs(row, device):
    dtype = torch.bfloat16
    weight = nn.Parameter(weight_of(row.scheme, (128, 256), dtype, device), requires_grad=False)
    for rows in (1, 16, 40):
        x = random(rows, 256, dtype=dtype, device=device).requires_grad_()
        grad = random(rows, 128, dtype=dtype, device=device, seed=3)
        F.linear(x, weight).backward(grad)
        close(x.grad, grad, weight.dequantize().t(), dtype)


@few
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast(row, stored, device):
    """Products and gradients are those of arguments that are cast first; float32 inputs get float32 gradients."""
    weight = nn.Parameter(weight_of(row.scheme, (128, 256), stored, device), requires_grad=False)
    values, bias = weight.dequantize().bfloat16(), random(128, dtype=stored, device=device, seed=2)
    for rows in (1, 16, 40):
        x = random(rows, 256, dtype=torch.float32, device=device)
        cast = x.bfloat16()
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            close(F.linear(x, weight), cast, values, torch.bfloat16)
            with_bias = torch.cat([values, bias.bfloat16()[:, None]], 1)
            close(
                F.linear(x, weight, bias), torch.cat([cast, torch.ones_like(cast[:, :1])], 1), with_bias, torch.bfloat16
            )
        x.requires_grad_()
        with torch.autocast(device.type, torch.bfloat16):
            made = F.linear(x, weight)
        close(made, cast, values, torch.bfloat16)
        grad = random(rows, 128, dtype=torch.bfloat16, device=device, seed=3)
        made.backward(grad)
        assert x.grad.dtype == torch.float32
        close(x.grad.bfloat16(), grad, values.t(), torch.bfloat16)


ROUNDED = {"int8": 0.05, "float8": 0.05, "mxfp8": 0.05, "mxfp4": 0.25, "nvfp4": 0.2}
"""By how much of the size of an output rounding the inputs may move it."""

EXPERTS = {"int8": tt.int8(), "fp8": tt.fp8(), "nf4": tt.nf4(), "mxfp8": tt.mxfp8(), "sinq": tt.sinq()}


@few
@pytest.mark.parametrize("activations", ROUNDED)
def test_rounded_inputs(row, activations, device):
    """On every device the inputs are rounded alike, whichever op multiplies."""
    model = nn.Linear(256, 128, device=device, dtype=torch.bfloat16)
    tt.quantize(model, row.scheme).requires_grad_(False)
    tt.quantize_activations(model, activations)
    for rows in (1, 32, 130):
        x = random(rows, 256, dtype=torch.bfloat16, device=device)
        exact = F.linear(x.double(), model.weight.dequantize().double(), model.bias.double())
        made = model(x).double()
        assert (made - exact).norm() <= ROUNDED[activations] * exact.norm()
        here = copy.deepcopy(model).cpu().float()(x.cpu().float()).double()
        assert (made.cpu() - here).norm() <= 2.0**-7 * here.norm()
        x[0, 5] = torch.nan
        assert model(x)[0].isnan().all()


@pytest.mark.parametrize("scheme", EXPERTS)
@pytest.mark.parametrize("activations", [None, *ROUNDED])
def test_experts(scheme, activations, device):
    experts = tt.Weight.encode(random(4, 64, 128, dtype=torch.float32, device=device, seed=1), EXPERTS[scheme])
    experts = experts.to(torch.bfloat16)
    if scheme != "sinq":
        experts.set_activations(activations)
    here = experts.cpu().float()
    for counts in ([0, 2, 0, 1], [5, 1, 4, 9]):
        rows = random(sum(counts) + 1, 128, dtype=torch.bfloat16, device=device)
        offs = torch.tensor(counts, device=device).cumsum(0).int()
        made = F.grouped_mm(rows, experts.transpose(1, 2), offs=offs)
        wanted = F.grouped_mm(rows.cpu().float(), here.transpose(1, 2), offs=offs.cpu())
        assert not made[-1].any()
        assert (made.cpu() - wanted).norm() <= 2.0**-6 * wanted.norm()


@pytest.mark.parametrize("scheme", ["int8", "nf4", "sinq"])
@pytest.mark.parametrize("dtype", FACTOR, ids=str)
def test_experts_never_wait_for_the_device(scheme, dtype, device, gpu):
    experts = tt.Weight.encode(random(4, 64, 128, dtype=torch.float32, device=device, seed=1), EXPERTS[scheme])
    experts, rows = experts.to(dtype), random(6, 128, dtype=dtype, device=device)
    offs = torch.tensor([0, 2, 2, 5], device=device, dtype=torch.int32)
    parts = dict(experts.parts)

    def multiply():  # as the rule does: F.grouped_mm itself takes no float16
        return torch.ops.torchtether.grouped(rows, offs, list(parts.values()), text_of(experts.spec), True)

    multiply()
    with never_waiting():
        made = multiply()
    values = experts.dequantize().double()
    wanted = torch.cat([rows[:2].double() @ values[1].T, rows[2:5].double() @ values[3].T])
    assert (made[:5].double() - wanted).norm() <= 2.0**-6 * wanted.norm()
    assert not made[5].any()


def net(scheme, device, width=256):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)).to(
        device, torch.bfloat16
    )
    return tt.quantize(model, scheme).requires_grad_(False)


@few
def test_compiled(row, device):
    model = net(row.scheme, device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager" if device.type == "cpu" else "inductor")
    for rows in (1, 16, 48):
        x = random(rows, 256, dtype=torch.bfloat16, device=device)
        expected = model(x)
        torch.testing.assert_close(compiled(x), expected, rtol=0.05, atol=0.05 * expected.abs().max().item())
    torch._dynamo.reset()


@few
@pytest.mark.parametrize("rows", [1, 16, 48])
def test_captured_by_a_graph(row, rows, device, gpu):
    model = net(row.scheme, device)
    x = random(rows, 256, dtype=torch.bfloat16, device=device)
    side = gpu.Stream()
    side.wait_stream(gpu.current_stream())
    with gpu.stream(side):
        for _ in range(3):
            model(x)
    gpu.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = model(x)
    for seed in (5, 6):
        x.copy_(random(rows, 256, dtype=torch.bfloat16, device=device, seed=seed))
        graph.replay()
        expected = model(x)
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05 * expected.abs().max().item())


@few
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # of torch's own first one, which keeps its memory alive
def test_compiled_with_graphs(row, device, gpu):
    model = net(row.scheme, device)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        x = random(1, 256, dtype=torch.bfloat16, device=device, seed=seed)
        expected = model(x)
        torch.testing.assert_close(compiled(x).clone(), expected, rtol=0.05, atol=0.05 * expected.abs().max().item())
    torch._dynamo.reset()


@few
@pytest.mark.parametrize("rows", [1, 16, 48])
def test_nothing_is_kept_between_calls(row, rows, device, gpu):
    model = net(row.scheme, device)
    x = random(rows, 256, dtype=torch.bfloat16, device=device)
    for _ in range(2):
        model(x)
    before = gpu.memory_allocated()
    for _ in range(3):
        model(x)
        assert gpu.memory_allocated() == before


@few
def test_one_row_never_waits_for_the_device(row, device, gpu):
    """A product that asks the device for a number stalls whoever generates."""
    model = net(row.scheme, device)
    x = random(1, 256, dtype=torch.bfloat16, device=device)
    model(x)
    with never_waiting():
        model(x)
