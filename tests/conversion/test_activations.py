"""Dynamic activation quantization: how inputs are rounded, what keeps the setting, and what is not rounded."""

import copy
import io
import pickle

import pytest
import torch
import torch.ao.quantization.fx._decomposed
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import torchtether as tt
from tests.catalog import each_quantized
from tests.weights.kernel_cases import rounded as rounded_as_here
from torchtether import compiled
from torchtether.weights import weight as weight_module
from torchtether.weights.ops import product
from torchtether.weights.products import rounding
from torchtether.weights.spec import ACTIVATIONS

EPS = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2**-7, torch.float16: 2**-10}
both = pytest.mark.parametrize("to", ["int8", "float8"])


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer_of(scheme, to="int8", rows=48, columns=256, dtype=torch.float32, bias=True):
    torch.manual_seed(1)
    layer = tt.quantize(nn.Linear(columns, rows, bias=bias, dtype=dtype), {"weight": scheme}).requires_grad_(False)
    return tt.quantize_activations(layer, to)


def rounded(x, to):
    """The inputs as float64, rounded as torch's reference does (int8), or to the nearest of all float8 (by search)."""
    if to == "int8":
        ops, wide = torch.ops.quantized_decomposed, x.float()
        scale, zero = ops.choose_qparams_per_token(wide, torch.int8)
        return ops.quantize_per_token(wide, scale, zero, -128, 127, torch.int8).double() * scale
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    every = every[every.isfinite()]
    scale = x.double().abs().amax(-1, keepdim=True) / 448
    return every[((x.double() / scale).unsqueeze(-1) - every).abs().argmin(-1)] * scale


def exact(layer, x, to):
    values, bias = (t.detach().dequantize() if isinstance(t, tt.Weight) else t.detach() for t in layer.parameters())
    return F.linear(rounded(x, to), values.double(), bias.double())


def error(got, expected):
    return float((got.detach().double() - expected).norm() / expected.norm())


# -- the numbers ------------------------------------------------------------------------------------------------------


@both
@each_quantized
def test_every_scheme_multiplies_rounded_inputs(row, to):
    layer = layer_of(row.scheme, to, columns=64)
    x = gaussian(5, 64)
    got = layer(x)
    assert error(got, exact(layer, x, to)) <= 2e-3  # a tie of rounding may fall the other way
    tt.quantize_activations(layer, None)
    plain = layer(x)
    assert 3e-3 < error(got, plain.double()) < (0.02 if to == "int8" else 0.05)
    assert torch.equal(layer(x), plain)


@both
@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("scheme", [tt.int8(), tt.int4(32), tt.int4(), tt.fp8(), tt.nf4()], ids=str)
@pytest.mark.parametrize("shape", [(256,), (1, 256), (2, 3, 256), (0, 256), (40, 256)], ids=str)
def test_every_dtype_and_shape(scheme, dtype, shape, to):
    layer = layer_of(scheme, to, dtype=dtype)
    x = (gaussian(*shape) * 100).to(dtype)
    got = layer(x)
    turned = layer(x.mT.contiguous().mT) if len(shape) > 1 else got
    assert (got.dtype, got.shape) == (dtype, (*shape[:-1], 48))
    codes, scale = rounding.codes_of(x, to)
    values = layer.weight.dequantize().double()
    expected = F.linear(codes.double() * scale.double(), values, layer.bias.double())
    assert (got.double() - expected).norm() <= EPS[dtype] * expected.norm()
    assert (got - turned).norm() <= EPS[dtype] * got.norm()


@pytest.mark.skipif(compiled.native() is None, reason="nothing compiled is there")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", [tt.int4(), tt.int4(32), tt.int4(64, symmetric=True), tt.int8(), tt.fp8()], ids=str)
def test_compiled_kernels_round_as_torch_does(scheme, dtype, monkeypatch):
    layer, x = layer_of(scheme, dtype=dtype, columns=1000 // 128 * 128), gaussian(4, 896).to(dtype)
    x[2] *= 300
    x[3, 5] = 1000
    by_kernel = layer(x)
    monkeypatch.setattr(product, "by_kernel", lambda *_: None)
    monkeypatch.setattr(weight_module, "SHORTCUTS", {})
    by_torch = layer(x)
    for one, other in zip(by_kernel, by_torch, strict=True):
        assert (one - other).norm() <= EPS[dtype] * other.norm()


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", [tt.int8(), tt.int4(), tt.nf4()], ids=str)
def test_rows_are_rounded_by_themselves(scheme, dtype, to):
    layer, x = layer_of(scheme, to, bias=False, dtype=dtype), gaussian(5, 256)
    x[1] *= 1e6
    x[2] = 0
    x[3] *= 2.0**-128
    x = x.to(dtype)
    whole = layer(x)
    values = layer.weight.dequantize().double()
    expected = F.linear(rounded_as_here(x, to), values)
    for got, meant, one in zip(whole, expected, x, strict=True):
        for made in (got, layer(one)):  # which another kernel may answer
            assert (made.double() - meant).norm() <= 2 * EPS[dtype] * meant.norm() + 2.0**-130  # subnormal ones
    assert torch.equal(whole[2], torch.zeros(48, dtype=dtype))
    assert whole[3].isfinite().all()


@both
@pytest.mark.parametrize("scheme", [tt.int8(), tt.int4(), tt.fp8()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_is_not_finite_gives_nan(scheme, dtype, to):
    layer, x = layer_of(scheme, to, dtype=dtype), gaussian(4, 256).to(dtype)
    x[0, 0], x[1, 3], x[2, 200] = torch.inf, torch.nan, -torch.inf
    out = layer(x)
    assert out[:3].isnan().all()
    assert out[3].isfinite().all()


# -- in blocks --------------------------------------------------------------------------------------------------------

blocks = pytest.mark.parametrize("to", list(rounding.BLOCKS))
SCHEMES = {"mxfp8": tt.mxfp8(), "mxfp4": tt.mxfp4(), "nvfp4": tt.ScaledFloat("e2m1", (1, 16), torch.float8_e4m3fn)}
"""What rounds weights as inputs are rounded; of nvfp4 without the power of two that each row has."""


def spread(*shape):
    """Numbers of very different size, zeros, and a row of numbers so small that some are subnormal."""
    x = gaussian(*shape) * gaussian(*shape, seed=3).mul(4).exp()
    x[..., :20] = 0
    x[1], x[2] = 0, x[2] * 2.0**-130
    return x


def rounded_in_blocks(x, to):
    made = rounding.blocks_of(x.reshape(-1, x.shape[-1]), to)
    scale = made.scale.double() if made.power is None else made.scale.double() * made.power.double()
    values = (made.values.double() * scale.unsqueeze(-1)).flatten(1)
    return values[:, : x.shape[-1]].reshape(x.shape)


@blocks
@pytest.mark.parametrize("columns", [256, 40])
def test_blocks_are_rounded_as_weights_are(to, columns):
    x = spread(9, columns)
    made = rounding.blocks_of(x, to)
    if made.power is not None:
        assert torch.equal(made.power.log2(), made.power.log2().round())
        assert (x.abs().amax(1, keepdim=True) <= 6 * 448 * made.power).all()
        x = x / made.power
    parts = SCHEMES[to].encode(torch.nn.functional.pad(x, (0, -columns % rounding.BLOCKS[to])))
    wanted = SCHEMES[to].decode(parts, (9, made.values[0].numel()), torch.float32)
    assert torch.equal((made.values * made.scale.unsqueeze(-1)).flatten(1), wanted)
    assert torch.equal(made.scale, parts["scale"].float())
    if to == "mxfp8":
        assert torch.equal(made.values.flatten(1), parts["qdata"].float())
    else:
        assert torch.equal(rounding.e2m1_codes(made.values).flatten(1), parts["qdata"])


@blocks
@each_quantized
def test_every_scheme_multiplies_inputs_rounded_in_blocks(row, to):
    layer, x = layer_of(row.scheme, to, columns=64), gaussian(5, 64)
    got, plain = layer(x), F.linear(x, layer.weight.dequantize(), layer.bias)
    expected = F.linear(rounded_in_blocks(x, to), layer.weight.dequantize().double(), layer.bias.double())
    assert error(got, expected) <= 1e-5
    assert 0.005 < error(got, plain.double()) < {"mxfp8": 0.05, "mxfp4": 0.25, "nvfp4": 0.2}[to]


@blocks
@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("scheme", [tt.int8(), tt.nvfp4(), tt.mxfp8()], ids=str)
@pytest.mark.parametrize("shape", [(256,), (2, 3, 256), (0, 256), (40, 256)], ids=str)
def test_blocks_of_every_dtype_and_shape(scheme, dtype, shape, to):
    layer, x = layer_of(scheme, to, dtype=dtype), (gaussian(*shape) * 100).to(dtype)
    got = layer(x)
    assert (got.dtype, got.shape) == (dtype, (*shape[:-1], 48))
    expected = F.linear(rounded_in_blocks(x, to), layer.weight.dequantize().double(), layer.bias.double())
    assert (got.double() - expected).norm() <= EPS[dtype] * expected.norm()


@blocks
def test_rows_in_blocks_are_rounded_by_themselves(to):
    layer, x = layer_of(tt.int8(), to, bias=False), spread(6, 256)
    x[3] *= 1e30
    whole = layer(x)
    values = layer.weight.dequantize().double()
    for got, meant, one in zip(whole, F.linear(rounded_in_blocks(x, to), values), x, strict=True):
        for made in (got, layer(one)):
            assert (made.double() - meant).norm() <= 2e-5 * meant.norm() + 2.0**-130
    assert not whole[1].any()
    x[4, 5], x[5, 250], x[0, 3] = torch.inf, torch.nan, -torch.inf
    made = layer(x)
    assert made[[0, 4, 5]].isnan().all()
    assert torch.equal(made[1:4], whole[1:4])


@blocks
def test_blocks_in_compiled_code(to):
    layer, x = layer_of(tt.int8(), to), gaussian(5, 256).requires_grad_()
    torch._dynamo.reset()
    made = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(made, layer(x))
    made.sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.dequantize().sum(0).expand(5, -1))


def test_stacks_are_rounded_for_where_they_are_named():
    model = nn.ParameterDict({"experts": gaussian(3, 32, 64), "head": gaussian(8, 64)})
    tt.quantize(model, {"*": "int8"}).requires_grad_(False)
    tt.quantize_activations(model, "mxfp8")
    assert (model["experts"].spec.activations, model["head"].spec.activations) == (None, "mxfp8")
    tt.quantize_activations(model, "int8", only="experts")
    rows, offs = gaussian(7, 64), torch.tensor([2, 2, 7], dtype=torch.int32)
    made = F.grouped_mm(rows, model["experts"].transpose(1, 2), offs=offs)
    values, x = model["experts"].dequantize().double(), rounded(rows, "int8").double()
    assert error(made, torch.cat([x[:2] @ values[0].T, x[2:] @ values[2].T])) <= 2e-3
    assert error(made, torch.cat([rows[:2].double() @ values[0].T, rows[2:].double() @ values[2].T])) > 3e-3


# -- graphs -----------------------------------------------------------------------------------------------------------


@both
def test_gradients_pass_as_if_nothing_were_rounded(to):
    layer, x, up = layer_of(tt.int8(), None), gaussian(5, 256).requires_grad_(), gaussian(5, 48, seed=2)
    layer.requires_grad_()
    expected = torch.autograd.grad(layer(x), (x, *layer.parameters()), up)
    tt.quantize_activations(layer, to)
    out = layer(x)
    assert error(out, exact(layer, x.detach(), to)) <= 2e-3
    for got, wanted in zip(torch.autograd.grad(out, (x, *layer.parameters()), up), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), out)


@both
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [(tt.int8(), torch.bfloat16), (tt.int8(), torch.float32), (tt.Affine(bits=3, block=(1, 32)), torch.float32)],
    ids=["a kernel", "no kernel", "no layout"],
)
def test_compiled_code_follows(scheme, dtype, backend, to):
    layer, x = layer_of(scheme, None, dtype=dtype), gaussian(5, 256).to(dtype)
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    torch.testing.assert_close(compiled(x), layer(x))
    plain = layer(x)
    tt.quantize_activations(layer, to)
    torch.testing.assert_close(compiled(x), layer(x))
    assert not torch.equal(compiled(x), plain)
    assert graphs.frame_count == 2
    x.requires_grad_()
    compiled(x).sum().backward()
    found, x.grad = x.grad, None
    layer(x).sum().backward()
    torch.testing.assert_close(found, x.grad)


@both
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own
def test_exported_and_traced_programs_round(to):
    layer, x = layer_of(tt.int4(), to), gaussian(5, 256)
    program = torch.export.export(layer, (x,))
    torch.testing.assert_close(program.module()(x), layer(x))
    assert not any("torchtether" in str(node.target) for node in program.run_decompositions().graph.nodes)
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.trace(layer, x)(x), layer(x))


@pytest.mark.parametrize("to", ACTIVATIONS)
def test_experts_round_or_refuse(to):
    """Blocks of nested nf4 cross these matrices. A use without a transpose would round gradients, not inputs."""
    model = nn.ParameterDict({"experts": gaussian(3, 48, 128)})
    tt.quantize(model, {"experts": tt.nf4(True)}).requires_grad_(False)
    rows, offs = gaussian(9, 128).requires_grad_(), torch.tensor([3, 5, 9], dtype=torch.int32)
    plain = F.grouped_mm(rows, model["experts"].transpose(1, 2), offs=offs)
    tt.quantize_activations(model, to, only="experts")
    made = F.grouped_mm(rows, model["experts"].transpose(1, 2), offs=offs)
    values = model["experts"].dequantize().double()
    x = (rounded if to in ("int8", "float8") else rounded_in_blocks)(rows.detach(), to).double()
    expected = torch.cat([x[a:b] @ values[i].t() for i, (a, b) in enumerate([(0, 3), (3, 5), (5, 9)])])
    assert error(made, expected) < 1e-4
    up = gaussian(9, 48)
    one, two = (torch.autograd.grad(out, rows, up)[0] for out in (plain, made))
    torch.testing.assert_close(one, two)
    for call in (F.grouped_mm, torch.compile(F.grouped_mm, backend="aot_eager")):
        with pytest.raises(Exception, match="multiplied without a transpose, cannot round their inputs"):
            call(gaussian(9, 48), model["experts"], offs=offs)


@pytest.mark.parametrize("scheme", [tt.int8(), tt.nf4()], ids=["int8", "nf4"])
@pytest.mark.parametrize("to", ACTIVATIONS)
def test_sums_of_float16_are_scaled_before_they_are_rounded(scheme, to):
    layer = nn.Linear(1024, 8, bias=False).half()
    nn.init.constant_(layer.weight, 100.0)
    tt.quantize_activations(tt.quantize(layer, scheme), to)
    for rows in (1, 4, 64):
        with torch.no_grad():
            made = layer(torch.full((rows, 1024), 0.01, dtype=torch.float16))
        assert (made / 1024 - 1).abs().max() < 0.2


@both
def test_autocast_rounds_too(to):
    layer, x = layer_of(tt.int8(), to), gaussian(5, 256)
    for grads in (False, True):
        with torch.set_grad_enabled(grads), torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
        assert out.dtype is torch.bfloat16
        assert error(out, exact(layer, x.bfloat16(), to)) < 2**-7


# -- what keeps it ----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(64, 256)
        self.head = nn.Linear(256, 64, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        return self.head(self.emb(ids))


def set_of(model):
    return {p.spec.activations if isinstance(p, tt.Weight) else "plain" for p in model.parameters()}


def _saved_and_loaded(model, folder):
    tt.save(model, folder / "m.safetensors")
    fresh = Tied()
    tt.load(fresh, folder / "m.safetensors")
    return fresh


def _loaded_again(model, folder, assign=None):
    other = Tied()
    if assign is None:
        tt.save(other, folder / "f.safetensors")
        tt.load(model, folder / "f.safetensors")
    else:
        model.load_state_dict(other.state_dict(), assign=assign)
    return model


def _swapped(model):
    with tt.swapping():
        return model.to(torch.bfloat16)


def _unpickled(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = tt.quantize(Tied(), {"emb.weight": "int8"})
    fresh.load_state_dict(torch.load(file, weights_only=True), assign=True)
    assert set_of(fresh) == {None}  # what a module is told stays with it
    return pickle.loads(pickle.dumps(model))


KEEPERS = {
    "convert": lambda model, _: tt.convert(model, dtype=torch.bfloat16),
    "to": lambda model, _: model.to(torch.bfloat16),
    "swapping": lambda model, _: _swapped(model),
    "quantize": lambda model, _: tt.quantize(model, {"emb.weight": "int4"}),
    "deepcopy": lambda model, _: copy.deepcopy(model),
    "pickle": lambda model, _: _unpickled(model),
    "save and load": _saved_and_loaded,
    "load": _loaded_again,
    "load_state_dict": lambda model, folder: _loaded_again(model, folder, assign=False),
    "load_state_dict, assign": lambda model, folder: _loaded_again(model, folder, assign=True),
}


@pytest.mark.parametrize("keeper", KEEPERS)
def test_it_stays_through(keeper, tmp_path):
    model = tt.quantize_activations(tt.quantize(Tied(), {"emb.weight": tt.int8()}), "int8")
    made = KEEPERS[keeper](model, tmp_path)
    assert set_of(made) == {"int8"}
    assert made.head.weight is made.emb.weight
    ids = torch.arange(8)
    with torch.no_grad():
        rounds = made(ids)
        plain = tt.quantize_activations(made, None)(ids)
    assert not torch.equal(rounds, plain)


def test_it_ends_with_dequantize():
    model = tt.quantize_activations(tt.quantize(Tied(), {"emb.weight": tt.int8()}), "int8")
    tt.quantize(tt.dequantize(model), {"emb.weight": tt.int8()})
    assert set_of(model) == {None}


def test_views_of_a_weight_round_too():
    weight = layer_of(tt.int8()).weight
    for view in (weight[:5], weight.detach(), weight.view(48, 256), weight.t().t(), weight.clone(), weight.t()):
        assert view.spec.activations == "int8"


def test_only_those_that_are_named():
    model = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("a", "b", "c")})
    tt.quantize(model, {"[ab].weight": "int8"})
    tt.quantize_activations(model, only="a*")
    assert [model[n].weight.spec.activations for n in "ab"] == ["int8", None]
    tt.quantize_activations(model, "float8", only=["b.*"])
    assert [model[n].weight.spec.activations for n in "ab"] == ["int8", "float8"]


@pytest.mark.parametrize(
    ("to", "only", "kind", "words"),
    [
        (
            "int4",
            None,
            tt.ArgumentError,
            "to: is 'int4', not one of 'int8', 'float8', 'mxfp8', 'mxfp4', 'nvfp4' or None",
        ),
        (8, None, tt.ArgumentError, "to: is 8"),
        ("int8", "c*", tt.RuleError, "c\\*: only= matches no Weight, the nearest is"),
        ("int8", 3, tt.ArgumentError, "only: 3 is neither a glob"),
    ],
)
def test_refusals_change_nothing(to, only, kind, words):
    model = tt.quantize(nn.ModuleDict({name: nn.Linear(8, 8) for name in ("a", "c")}), {"a.weight": "int8"})
    with pytest.raises(kind, match=words):
        tt.quantize_activations(model, to, only=only)
    assert model["a"].weight.spec.activations is None


def test_a_model_without_weights_is_refused():
    with pytest.raises(tt.RuleError, match="has no Weight"):
        tt.quantize_activations(nn.Linear(4, 4))
    with pytest.raises(tt.RuleError, match=r"no Weight of two or three dimensions\. Quantize its linear layers first"):
        tt.quantize_activations(tt.quantize(nn.Conv2d(8, 8, 3), {"weight": "nf4"}), only="weight")


def test_what_is_left_alone():
    x = gaussian(3, 256)
    plain, weight = nn.Linear(256, 8), layer_of(tt.int8(), None, rows=256).weight
    ways = [lambda: plain(x), lambda: x @ weight, lambda: F.embedding(torch.tensor([3]), weight), weight.dequantize]
    before = [way() for way in ways]
    weight.set_activations("int8")
    assert all(map(torch.equal, before, [way() for way in ways]))


@pytest.mark.parametrize("wrong", ["int3", 8, ["int8"], torch.int8])
def test_a_weight_takes_no_other_activations(wrong):
    weight = layer_of(tt.int8(), "int8").weight
    spec, layout = weight.spec, weight.kernel_layout
    for change in (weight.set_activations, lambda to: weight.spec.replace(activations=to)):
        with pytest.raises(tt.ArgumentError, match="^activations: is .*, not one of 'int8', "):
            change(wrong)
    assert (weight.spec, weight.kernel_layout) == (spec, layout)


def test_unknown_activations_of_a_file_are_refused():
    record = {**layer_of(tt.int8()).weight.spec.to_json(), "activations": "int3"}
    with pytest.raises(tt.SchemeError, match="unknown activations 'int3'"):
        tt.WeightSpec.from_json(record)
