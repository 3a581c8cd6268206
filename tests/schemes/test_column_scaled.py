"""ColumnScaled: the laws over the schemes that it may wrap, and its own promises."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import torchtether as tt
from tests.schemes import laws
from tests.strategies import examples
from torchtether.errors import SchemeError
from torchtether.schemes import Biased, SuperBlocks
from torchtether.schemes.column_scaled import COLUMNS
from torchtether.weights.ops import graph_ops
from torchtether.weights.products import rounding

SCHEMES = (
    tt.sinq(),
    tt.sinq(3, 8, symmetric=True),
    tt.sinq(8, None),
    tt.ColumnScaled(tt.Affine(block=(None, None))),
    tt.ColumnScaled(tt.Affine(block=(2, 16))),
    tt.ColumnScaled(Biased(4, (1, 16))),
    tt.ColumnScaled(tt.nf4(block_size=8)),
    tt.ColumnScaled(SuperBlocks(3, 8, 16, offset=4)),
    tt.ColumnScaled(tt.fp8()),
)
OFTEN = (0, 1, 6, 7)
every_scheme = pytest.mark.parametrize(
    "scheme",
    [pytest.param(one, marks=() if i in OFTEN else pytest.mark.slow) for i, one in enumerate(SCHEMES)],
    ids=str,
)


def keeps_values(scheme, w):
    """Writing back what was read, and an update of nothing, change no value."""
    shape, parts = tuple(w.shape), scheme.encode(w)
    for dtype in (torch.float32, w.dtype):
        decoded = scheme.decode(parts, shape, dtype)
        if bool(decoded.isfinite().all()):
            for again in (scheme.reencode(decoded, parts), scheme.update(decoded, parts)):
                assert laws.same(scheme.decode(again, shape, dtype), decoded)


@every_scheme
@examples(5)
@given(w=laws.values(least=2))
def test_laws(scheme, w):
    if isinstance(scheme.scheme, SuperBlocks) and float(w.abs().max()) > 1e4:  # its super scales are float16
        w = laws.make((4, 40), "normal", 0)
    laws.check_parts(scheme, w)
    keeps_values(scheme, w)
    for shape in ((1, *w.shape), (*w.shape[:-1], 1, w.shape[-1]), (w.numel(),)):
        laws.check_views(scheme, w, shape)


@every_scheme
@pytest.mark.parametrize("shape", [(7, 40), (3, 5, 24)], ids=str)
@pytest.mark.parametrize("chunk", [1, 90])
def test_small_pieces_change_no_bit(scheme, shape, chunk, monkeypatch):
    laws.check_chunks(scheme, laws.make(shape, "mixed", 3), monkeypatch, chunk)


@every_scheme
def test_values_that_are_not_finite_are_refused_and_records_survive(scheme):
    laws.check_not_finite(scheme)
    laws.check_json(scheme)


def columns_of(scheme, w):
    return scheme.encode(w)[COLUMNS]


def rms(x, dim):
    return x.double().square().mean(dim).sqrt()


def test_what_is_rounded_has_rows_and_columns_alike():
    """That is Sinkhorn's promise, for each group of columns that has scales of its own."""
    w = torch.randn(300, 64) * torch.logspace(-1, 1, 300).unsqueeze(1) * torch.logspace(1, -1, 64)
    for scheme, width in ((tt.sinq(4, 32), 32), (tt.sinq(4, None), 64)):
        for x in (w / columns_of(scheme, w)).split(width, 1):
            columns = rms(x / rms(x, 1).unsqueeze(1), 0)
            assert columns.max() / columns.min() < 1.01
    assert rms(w, 0).max() / rms(w, 0).min() > 50


@examples(10)
@given(power=st.integers(-20, 20), seed=st.integers(0, 99))
def test_scales_do_not_depend_on_the_size_of_rows(power, seed):
    w, scheme = laws.make((12, 48), "normal", seed), tt.sinq(4, 16)
    rows = torch.arange(12).sub(6).sign().mul(power // 2).exp2().unsqueeze(1)
    torch.testing.assert_close(columns_of(scheme, w * 2.0**power), columns_of(scheme, w), rtol=1e-6, atol=0)
    torch.testing.assert_close(columns_of(scheme, w * rows), columns_of(scheme, w), rtol=1e-2, atol=0)


def test_columns_of_zeros_and_of_one_large_number_have_scales_that_work():
    w = torch.zeros(4, 16)
    assert torch.equal(columns_of(tt.sinq(), w), torch.ones(16))
    w[1, 3] = 1e9
    for scheme in (tt.sinq(), tt.sinq(fit="mse")):
        parts = scheme.encode(w)
        assert parts[COLUMNS].isfinite().all()
        torch.testing.assert_close(scheme.decode(parts, (4, 16), torch.float32), w)


def test_a_group_may_be_far_wider_than_the_matrix():
    w, wide = laws.make((4, 16), "normal", 1), tt.sinq(4, 2**40)
    parts, one_group = wide.encode(w), tt.sinq(4, None).encode(w)
    assert parts.keys() == one_group.keys()
    assert all(torch.equal(part, one_group[name]) for name, part in parts.items())


def test_columns_that_large_inputs_meet_are_rounded_more_finely():
    """Outputs of inputs that are large where weights are small, as those of trained layers: half the error at most."""
    size = torch.logspace(-1, 1, 256)[torch.randperm(256, generator=torch.Generator().manual_seed(0))]
    w, x = laws.make((128, 256), "normal", 1) * size, laws.make((64, 256), "normal", 2) / size
    exact = F.linear(x, w)

    def error(scheme):
        return float((F.linear(x, tt.Weight.encode(w, scheme).dequantize()) - exact).norm() / exact.norm())

    for bits in (3, 4):
        assert error(tt.sinq(bits)) < 0.5 * error(tt.Affine(bits=bits, symmetric=False, block=(1, 64)))


def test_in_place_ops_keep_the_scales_of_columns():
    """So rows that are a shard, or a slice, can be written where the others need the same scales."""
    weight = tt.Weight.encode(laws.make((8, 128), "mixed", 0), tt.sinq())
    held = weight.parts[COLUMNS].clone()
    weight[2:5].mul_(3.0)
    weight.add_(0.25)
    assert torch.equal(weight.parts[COLUMNS], held)


@pytest.mark.parametrize("shape", [(16, 64), (3, 16, 64)])
@pytest.mark.parametrize("how", ["to_empty", "materialize"])
def test_new_values_in_empty_memory_have_column_scales_of_their_own(how, shape):
    def draw(module):
        torch.manual_seed(5)
        nn.init.normal_(module.weight)

    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(shape, device="cpu" if how == "to_empty" else "meta"))
    tt.quantize(model, {"weight": tt.sinq(4, 32)})
    if how == "to_empty":
        with tt.swapping(model):
            model.to_empty(device="cpu")
        draw(model)
    else:
        tt.materialize(model, init=draw)
    torch.manual_seed(5)
    again = tt.Weight.encode(torch.randn(shape), tt.sinq(4, 32))
    for name, part in model.weight.parts.items():
        assert torch.equal(part, again.parts[name]), name


def test_zeros_are_made_like_empty_memory():
    """FSDP2 pads shards with them."""
    weight = torch.empty_like(tt.Weight.encode(torch.randn(16, 64), tt.sinq(4, 32)))
    padding = weight.new_zeros((20, 64))
    assert isinstance(padding, tt.Weight)
    assert torch.equal(padding.dequantize(), torch.zeros(20, 64))
    assert torch.equal(padding.parts[COLUMNS], weight.parts[COLUMNS])


def test_masters_go_around_it_and_nothing_else_in_it():
    weight = tt.Weight.encode(torch.randn(4, 64), tt.Mastered(tt.sinq()))
    assert list(weight.parts) == ["qdata", "scale", "zero_point", COLUMNS, "master"]
    for inner in (tt.Plain(), tt.Mastered(tt.int4()), tt.sinq(), "int4"):
        with pytest.raises(SchemeError, match="ColumnScaled: "):
            tt.ColumnScaled(inner)
    with pytest.raises(SchemeError, match="at least 2 dimensions"):
        tt.Weight.encode(torch.randn(64), tt.sinq())


# -- products ---------------------------------------------------------------------------------------------------------

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("scheme", [SCHEMES[0], SCHEMES[1], SCHEMES[7], tt.Mastered(tt.sinq())], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 33])
def test_products_are_those_of_the_decoded_values(scheme, dtype, rows):
    """In every way there is: with a graph, without one, in a compiled graph, and for the gradient of the inputs."""
    weight = tt.Weight.encode(laws.make((48, 256), "mixed", 1) * torch.logspace(-1, 1, 256), scheme).to(dtype)
    x, bias = laws.make((rows, 256), "normal", 2, dtype), laws.make((48,), "normal", 3, dtype)
    values = weight.to(torch.float32).dequantize().double()
    expected = F.linear(x.double(), values, bias.double())
    sums = F.linear(x.double().abs(), values.abs(), bias.double().abs())
    with torch.no_grad():
        made = [F.linear(x, weight, bias), torch.addmm(bias, x, weight.t()), x @ weight.t() + bias]
    turned = x.clone().requires_grad_()
    made.append(F.linear(turned, weight, bias))
    parts, told = list(weight.parts.values()), graph_ops.text_of(weight.spec)
    made.append(torch.ops.torchtether.linear.default(x, bias, parts, told))
    for got in made:
        assert got.dtype == dtype
        assert ((got.double() - expected).abs() <= 3 * UNIT[dtype] * sums + 2.0**-18 * sums).all()
    made[3].sum().backward()
    slope = values.abs().sum(0) * (3 * UNIT[dtype] + 2.0**-18)
    assert ((turned.grad.double() - values.sum(0)).abs() <= slope).all()


def test_in_a_compiled_graph_a_product_is_that_of_eager():
    torch._dynamo.reset()
    weight, x = tt.Weight.encode(torch.randn(48, 256), tt.sinq()).bfloat16(), torch.randn(3, 256).bfloat16()
    with torch.no_grad():
        made = torch.compile(F.linear, backend="aot_eager", fullgraph=True)(x, weight)
        assert torch.equal(made, F.linear(x, weight))


def test_inputs_that_are_rounded_are_so_before_they_are_scaled():
    weight = tt.Weight.encode(torch.randn(48, 256) * torch.logspace(-1, 1, 256), tt.sinq())
    x = torch.randn(2, 256)
    with torch.no_grad():
        exact = F.linear(x, weight)
        weight.set_activations("int8")
        made = F.linear(x, weight)
    expected = F.linear(rounding.rounded(x, "int8"), weight.dequantize())
    assert (made - expected).norm() < 1e-3 * (made - exact).norm()


def test_inputs_that_do_not_fit_are_torchs_to_refuse():
    weight = tt.Weight.encode(torch.randn(8, 64), tt.sinq())
    for x in (torch.randn(2, 1), torch.randn(2, 63), torch.randn(2, 64).double()):
        with pytest.raises(RuntimeError):
            F.linear(x, weight)


def test_experts_multiply_with_scales_of_their_own():
    weight = tt.Weight.encode(laws.make((3, 32, 64), "mixed", 0), tt.sinq()).to(torch.bfloat16)
    assert weight.parts[COLUMNS].shape == (3, 64)
    rows, ends = torch.randn(6, 64).bfloat16(), torch.tensor([2, 3, 6], dtype=torch.int32)
    got = F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    expected = F.grouped_mm(rows, weight.dequantize().transpose(1, 2), offs=ends)
    assert (got - expected).norm() <= 2**-7 * expected.norm()


# -- words and files --------------------------------------------------------------------------------------------------


def test_its_text_is_read_and_written():
    assert tt.quantize(torch.nn.Linear(64, 8), "sinq").weight.scheme == tt.sinq()
    for text in ("sinq", "sinq(bits=3)", "sinq(bits=3, group_size=32, symmetric=True)"):
        scheme = tt.schemes.scheme_from_text(text)
        assert tt.schemes.scheme_to_text(scheme) == text
    assert tt.schemes.scheme_to_text(tt.ColumnScaled(tt.fp8())) == "ColumnScaled(fp8)"


def test_a_tied_model_comes_back_from_shards(tmp_path):
    def make():
        last = torch.nn.Linear(64, 64, bias=False)
        made = torch.nn.Sequential(torch.nn.Embedding(64, 64), torch.nn.Linear(64, 64), last)
        last.weight = made[0].weight
        return made

    model = tt.quantize(make(), {"*.weight": tt.sinq(3, 32)})
    tt.save(model, tmp_path, max_shard_size=2000)
    with tt.on_meta():
        made = make()
    tt.load(made, tmp_path)
    assert made[2].weight is made[0].weight
    for name, parameter in model.named_parameters():
        assert torch.equal(made.get_parameter(name), parameter)
