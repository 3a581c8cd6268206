"""Triton's kernels without a GPU: their results under its interpreter, and their compilation for absent GPUs."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torchtether as tt
from torchtether.gpu import decoding, serving
from torchtether.gpu import rounding as kernels
from torchtether.weights.ops import grouped
from torchtether.weights.products import gpu, rounding

needs_triton = pytest.mark.skipif(not serving.has_triton(), reason="triton is not installed")


def wrong_cases(folder, *arguments, interprets, module="triton_cases"):
    command = [sys.executable, "-W", "ignore", "-m", f"tests.weights.{module}", *arguments]
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(folder)}
    environment["TRITON_INTERPRET"] = "1" if interprets else "0"
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr[-2000:]
    return json.loads(found.stdout)


@needs_triton
def test_numbers_are_those_of_torch_ops_for_every_scheme(tmp_path):
    """Decoded bit for bit, all rows, some, or those that are named; products as near to float64 as those of a CPU."""
    assert not wrong_cases(tmp_path, "interpret", "0", interprets=True)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5, 6, 7])
def test_numbers_are_those_of_torch_ops_for_every_scheme_and_shape(tmp_path, seed):
    assert not wrong_cases(tmp_path, "interpret", str(seed), interprets=True)


@needs_triton
def test_kernels_compile_to_machine_code(tmp_path):
    """What interprets need not compile; and no instruction flushes small numbers, nor contracts where bits count.

    A product of fewer columns than its threads read together has wrong numbers, which only a GPU shows.
    """
    assert not wrong_cases(tmp_path, "compile", "90", "nvfp4", "q6_k", "int4", "int2-group8", interprets=False)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "89", "90", "100", "120"])
def test_kernels_compile_to_machine_code_for_every_scheme(tmp_path, capability):
    assert not wrong_cases(tmp_path, "compile", capability, interprets=False)


@needs_triton
def test_inputs_are_rounded_as_by_torch_ops(tmp_path):
    """Bit for bit, for all kinds, dtypes and forms of rows; and so are sums scaled."""
    assert not wrong_cases(tmp_path, "interpret", "0", interprets=True, module="rounding_cases")


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_inputs_of_every_shape_are_rounded_as_by_torch_ops(tmp_path, seed):
    assert not wrong_cases(tmp_path, "interpret", str(seed), "every", interprets=True, module="rounding_cases")


@needs_triton
def test_rounding_compiles_to_machine_code(tmp_path):
    """With IEEE's divisions, and reads of 16 bytes where rows are aligned."""
    assert not wrong_cases(tmp_path, "compile", "90", interprets=False, module="rounding_cases")


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "89", "90", "100"])
def test_rounding_compiles_to_machine_code_for_every_dtype(tmp_path, capability):
    assert not wrong_cases(tmp_path, "compile", capability, "every", interprets=False, module="rounding_cases")


# -- what they leave to torch ops -------------------------------------------------------------------------------------


def answers(weight, x, bias=None, dtype=torch.bfloat16, **kwargs):
    """Whether the three calls take a weight, in the order linear, decode, gather."""
    layout = weight.kernel_layout
    parts = layout.pick_from(weight)
    index = torch.zeros(2, dtype=torch.int64, device=x.device)
    made = (
        gpu.linear(layout, parts, x, bias),
        gpu.decode(layout, parts, dtype, **kwargs),
        gpu.gather(layout, parts, dtype, index),
    )
    return [one is not None for one in made]


@pytest.fixture
def takes_cpu(monkeypatch):
    """As if tensors here were on a GPU that runs kernels, which write nothing."""
    kernel = mock.MagicMock()
    monkeypatch.setattr(serving, "DEVICES", {"cpu"})
    monkeypatch.setattr(serving, "has_triton", lambda: True)
    monkeypatch.setattr(serving, "runs_on", lambda device: True)
    monkeypatch.setattr(decoding, "_kernels", lambda: kernel)
    monkeypatch.setattr(kernels, "_kernels", lambda: kernel)
    return kernel


def weight_of(scheme, dtype=torch.bfloat16):
    with mock.patch.object(serving, "DEVICES", set()):  # kernels encode, too
        return tt.Weight.encode(torch.randn(24, 256), scheme).to(dtype)


def test_tensors_that_are_not_on_a_gpu_are_left():
    assert answers(weight_of(tt.int8()), torch.zeros(1, 256).bfloat16()) == [False] * 3


def test_tensors_that_something_looks_on_are_left(takes_cpu):
    weight, x = weight_of(tt.int8()), torch.zeros(1, 256).bfloat16()
    assert answers(weight, x) == [True] * 3
    mode = FakeTensorMode()
    fake = mode.from_tensor(x)
    layout = weight.kernel_layout
    parts = [mode.from_tensor(part) for part in layout.pick_from(weight)]
    assert gpu.linear(layout, parts, fake, None) is None
    assert gpu.decode(layout, parts, torch.bfloat16) is None
    with mode:
        assert gpu.linear(layout, parts, fake, None) is None
        assert gpu.decode(layout, parts, torch.bfloat16) is None
    assert torch.func.vmap(
        lambda x: torch.tensor(float(gpu.linear(layout, layout.pick_from(weight), x, None) is None))
    )(x)


KINDS = [*rounding.ROWS, *rounding.BLOCKS]


def is_rounded_by_kernels(kernel, x, run=lambda work, x: work(x)):
    """Whether kernels take all calls, or torch ops all."""

    def rounds(call, kind):
        return lambda x: call(x, kind)[0].float()

    calls = [rounds(rounding.units_of, kind) for kind in KINDS] + [rounds(rounding.codes_of, k) for k in rounding.ROWS]
    calls.append(lambda x: rounding.scaled(x.contiguous(), x[:, :1].float(), torch.bfloat16))
    taken = set()
    for call in calls:
        kernel.reset_mock()
        run(call, x)
        taken.add(bool(kernel.mock_calls))
    assert len(taken) == 1
    return taken.pop()


def as_dual(work, x):
    with torch.autograd.forward_ad.dual_level():
        return work(torch.autograd.forward_ad.make_dual(x, x))


def as_fake(work, x):
    with FakeTensorMode() as mode:
        return work(mode.from_tensor(x))


def compiled_whole(work, x):
    torch._dynamo.reset()
    return torch.compile(work, backend="eager", fullgraph=True)(x)


def as_traced(work, x):
    with contextlib.suppress(RuntimeError):  # it has no op for a view of another dtype
        torch.jit.trace(work, x, check_trace=False)


OBSERVERS = {
    "compiler": compiled_whole,
    "fake tensors": as_fake,
    "make_fx": lambda work, x: make_fx(work)(x),
    "vmap": lambda work, x: torch.func.vmap(work)(x.unsqueeze(0)),
    "forward AD": as_dual,
    "jit.trace": as_traced,
}


@pytest.mark.parametrize("run", OBSERVERS.values(), ids=OBSERVERS)
def test_rounding_that_something_looks_on_is_left(takes_cpu, run):
    x = torch.ones(3, 64).bfloat16()
    assert is_rounded_by_kernels(takes_cpu, x)
    assert not is_rounded_by_kernels(takes_cpu, x, run)


def test_inputs_that_do_not_fit_are_left(takes_cpu):
    x = torch.ones(3, 64)
    for fit in (x, x.half(), x.bfloat16(), x.t().contiguous().t(), x[:, ::2], x[:1].expand(3, -1)):
        assert is_rounded_by_kernels(takes_cpu, fit)
    for other in (x[:0], x.as_subclass(type("Other", (torch.Tensor,), {}))):
        assert not is_rounded_by_kernels(takes_cpu, other)
    takes_cpu.reset_mock()
    for kind in KINDS:
        units, scale = rounding.units_of(x.double(), kind)
        assert units.dtype is scale.dtype is torch.float64
        assert rounding.scaled(units, scale, torch.float64).dtype is torch.float64
    assert not takes_cpu.mock_calls


def test_sums_that_do_not_fit_are_left(takes_cpu):
    sums, steps, scale = torch.ones(3, 8, dtype=torch.int32), torch.ones(3, 1), torch.ones(8)
    scaled, half = kernels.scaled, torch.bfloat16
    assert scaled(sums, steps, half, scale=scale, bias=scale) is not None
    assert scaled(sums, steps, half, scale=scale[:1].view(1, 1)) is not None
    assert scaled(sums.t().contiguous().t(), steps, half) is None
    assert scaled(sums.long(), steps, half) is None
    assert scaled(sums, steps.double(), half) is None
    assert scaled(sums, steps[:1], half) is None
    assert scaled(sums, steps, torch.float64) is None
    for wrong in (scale[:7], scale.double(), scale.to(torch.float8_e4m3fn)):
        assert scaled(sums, steps, half, scale=wrong) is None
        assert scaled(sums, steps, half, bias=wrong) is None


def test_products_that_do_not_fit_are_left(takes_cpu):
    weight = weight_of(tt.int8())
    zeros = lambda *shape, dtype=torch.bfloat16: torch.zeros(shape, dtype=dtype)  # noqa: E731
    for x in (
        zeros(16, 256),
        zeros(256),
        zeros(2, 8, 256),
        zeros(0, 256),
        zeros(256, 3).t(),
        zeros(1, 256).expand(9, 256),
    ):
        assert answers(weight, x, zeros(24))[0]
    for x in (zeros(17, 256), zeros(1, 255), zeros(), zeros(1, 256, dtype=torch.float64)):
        assert not answers(weight, x)[0]
    for bias in (zeros(23), zeros(24, dtype=torch.float32), zeros(1, 24)):
        assert not answers(weight, zeros(1, 256), bias)[0]
    weight.set_activations("int8")
    assert not answers(weight, zeros(1, 256))[0]


def test_rows_of_experts_that_do_not_fit_are_left(takes_cpu):
    weight = weight_of(tt.int8())
    layout = weight.kernel_layout
    parts = layout.pick_from(weight)

    def made(x, ends):
        return gpu.linear_of_each(layout, parts, x, ends)

    x, ends = torch.zeros(5, 256).bfloat16(), torch.tensor([0, 2, 5], dtype=torch.int32)
    assert made(x, ends).shape == (5, 8)
    assert made(x.t().contiguous().t(), ends[::2]).shape == (5, 12)
    for wrong in (x[0], x[:0], x[:, :255], x.double(), x.view(1, 5, 256)):
        assert made(wrong, ends) is None
    for wrong in (ends.long(), ends[:0], ends.repeat(3)[:5], ends.view(1, 3)):
        assert made(x, wrong) is None
    few_bits = weight_of(tt.Affine(bits=3))
    layout = few_bits.kernel_layout
    parts = layout.pick_from(few_bits)
    assert made(x, ends) is None


def test_experts_of_other_sizes_are_left(takes_cpu):
    """A group without a matrix, or more rows than pay off: torch's op raises its own error, or multiplies."""
    with mock.patch.object(serving, "DEVICES", set()):
        stack = tt.Weight.encode(torch.randn(6, 8, 256), tt.int8()).to(torch.bfloat16)
    x, offs = torch.zeros(5, 256).bfloat16(), torch.tensor([0, 2, 2, 2, 4, 5], dtype=torch.int32)
    for weight in (stack, stack.transpose(1, 2)):
        assert grouped.by_each(x, weight, offs).shape == (5, 8)
        assert grouped.by_each(x.repeat(4, 1), weight, offs).shape == (20, 8)
        for rows, ends in ((x, offs[:3]), (x, offs.repeat(2)), (x[:, :8], offs), (x.repeat(5, 1), offs)):
            assert grouped.by_each(rows, weight, ends) is None


def test_rows_that_do_not_fit_are_left(takes_cpu):
    weight, x = weight_of(tt.int8()), torch.zeros(1, 256).bfloat16()
    assert answers(weight, x, dtype=torch.float64)[1:] == [False, False]
    wide = torch.zeros(24, 512).bfloat16()
    bad_rows = [{"rows": rows} for rows in ((-1, 24), (0, 25), (3, 2))]
    for wrong in (*bad_rows, {"out": wide[:, :256]}, {"out": wide.float()}):
        assert not answers(weight, x, **wrong)[1]
    layout = weight.kernel_layout
    assert gpu.gather(layout, layout.pick_from(weight), torch.bfloat16, torch.zeros(2, dtype=torch.int16)) is None


def test_parts_whose_memory_is_not_there_are_left(takes_cpu):
    weight, x = weight_of(tt.int8()), torch.zeros(1, 256).bfloat16()
    weight.parts["qdata"].untyped_storage().resize_(0)
    assert answers(weight, x) == [False] * 3
    weight = weight_of(tt.int8())
    layout = weight.kernel_layout
    codes, scale = layout.pick_from(weight)
    for parts in (
        (codes[:23], scale),
        (codes, torch.cat((scale, scale), 1)[:, :1]),
        (codes.t().contiguous().t(), scale),
    ):
        assert gpu.decode(layout, parts, torch.bfloat16) is None


def test_kernels_that_cannot_be_built_are_left_with_a_warning(monkeypatch):
    weight, x = weight_of(tt.int8()), torch.zeros(1, 256).bfloat16()
    monkeypatch.setattr(serving, "DEVICES", {"cpu"})
    monkeypatch.setattr(serving, "has_triton", lambda: True)
    monkeypatch.setitem(sys.modules, "torchtether.gpu.trial_kernel", None)
    serving.runs_on.cache_clear()
    try:
        with pytest.warns(UserWarning, match="gpu: Triton cannot build kernels for cpu"):
            assert answers(weight, x) == [False] * 3
        assert answers(weight, x) == [False] * 3
        assert torch.equal(tt.int8().encode(torch.ones(4, 8))["qdata"], torch.full((4, 8), 127, dtype=torch.int8))
    finally:
        serving.runs_on.cache_clear()


@pytest.mark.slow
def test_import_leaves_triton_alone():
    code = "import sys, torchtether; from torchtether.weights.products import gpu; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
