"""What is trainable trains: an optimizer's update of a Weight is rounded stochastically, without a drift."""

import copy
import io
import math
import pickle
import warnings
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

import pytest
import torch

import torchtether as tt
from tests.catalog import SCHEMES, slow_but
from torchtether.schemes import same_bits
from torchtether.weights.ops import inplace

LEARNING = [
    row for row in SCHEMES[1:] if getattr(row.scheme, "bits", 8) != 1 and not isinstance(row.scheme, tt.Mastered)
]
"""One bit has no codes of both signs; a master takes updates as they are."""

OFTEN = {
    "int8",
    "int4",
    "uint4-asym",
    "biased4",
    "q4_k",
    "super-blocks-table",
    "fp8",
    "mxfp4",
    "nvfp4",
    "nf4",
    "nf4-double",
}
each_learning = pytest.mark.parametrize("row", slow_but(LEARNING, OFTEN))

FEW = {
    "int8": tt.int8(),
    "int4": tt.int4(32),
    "fp8": tt.fp8(),
    "mxfp4": tt.mxfp4(),
    "nvfp4": tt.nvfp4(),
    "nf4": tt.nf4(),
    "nf4-double": tt.nf4(double_quant=True),
}
few = pytest.mark.parametrize("scheme", FEW.values(), ids=FEW)


def _trained(scheme, shape=(4, 64), dtype=torch.float32, seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return torch.nn.Parameter(tt.Weight.encode(values, scheme))


def _decoded(scheme, parts, shape):
    return scheme.decode(parts, shape, torch.float32)


# -- rounding ---------------------------------------------------------------------------------------------------------


@each_learning
def test_the_mean_of_many_updates_is_the_update(row):
    weight, draws = _trained(row.scheme), 120
    before = weight.to(torch.float32).dequantize().detach()
    step = 0.01 * torch.randn(before.shape, generator=torch.Generator().manual_seed(1))
    step[0, :8] = 0.3 * step[0].abs().max() + before.abs().max()  # beyond the range of what was there
    torch.manual_seed(2)
    made = torch.stack(
        [_decoded(row.scheme, row.scheme.update(before + step, weight.parts), before.shape) for _ in range(draws)]
    )
    arithmetic = torch.finfo(getattr(row.scheme, "arithmetic", torch.float32)).eps
    off = (made.mean(0) - before - step).abs()
    allowed = 5.5 * made.std(0) / math.sqrt(draws) + 2 * arithmetic * (before + step).abs().max()
    # where one draw in thousands goes the other way, none may have: that is off by at most a few parts of a gap
    gap = 2 * row.scheme.bound(row.scheme.update(before + step, weight.parts), tuple(before.shape)).expand_as(off)
    assert (off <= allowed + 0.06 * gap).all()
    assert off.mean() <= allowed.mean() + 1e-6


UNEVEN = ["int4", "nf4", "nf4-double", "q4_k", "biased4"]
NOTHING = [(row, (4, 64)) for row in SCHEMES[1:]]
NOTHING += [(row, shape) for row in SCHEMES if row.id in UNEVEN for shape in ((1, 1), (3, 7), (5, 33))]


@pytest.mark.parametrize(("row", "shape"), NOTHING, ids=[f"{row.id}-{list(shape)}" for row, shape in NOTHING])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_of_nothing_changes_no_bit(row, shape, dtype):
    weight = _trained(row.scheme, shape, dtype=dtype)
    before, values = {name: part.clone() for name, part in weight.parts.items()}, weight.dequantize().detach()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", tt.TrainingWarning)
        weight.add_(torch.zeros(weight.shape, dtype=dtype), alpha=-1e-2)
        weight.mul_(1.0)
        weight.addcdiv_(torch.zeros(weight.shape, dtype=dtype), torch.ones(weight.shape, dtype=dtype), value=-0.1)
    assert same_bits(weight.dequantize().detach(), values)
    if getattr(row.scheme, "arithmetic", dtype).itemsize == 4:  # that of 16 bits makes some codes equal
        assert all(same_bits(weight.parts[name], part) for name, part in before.items())


@few
def test_a_step_far_below_a_code_is_not_lost_in_16_bits(scheme):
    weight = _trained(scheme, (64, 64), torch.bfloat16)
    before = weight.to(torch.float32).dequantize().detach()
    torch.manual_seed(0)
    with torch.no_grad():
        for _ in range(50):
            weight.add_(torch.full(weight.shape, -2e-4, dtype=torch.bfloat16))
    moved = (weight.to(torch.float32).dequantize() - before).mean()
    assert moved.item() == pytest.approx(-0.01, abs=4e-3)


@few
def test_the_seed_says_what_an_update_becomes(scheme):
    def train(seed):
        weight = _trained(scheme)
        torch.manual_seed(seed)
        with torch.no_grad():
            weight.mul_(0.99).add_(torch.full(weight.shape, 0.003))
        return weight.parts

    first, again, other = train(1), train(1), train(2)
    assert all(same_bits(first[name], again[name]) for name in first)
    assert not same_bits(first["qdata"], other["qdata"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_foreach_and_fused_optimizers_round_alike(dtype):
    def train(**how):
        weights = [_trained(scheme, dtype=dtype, seed=i) for i, scheme in enumerate(FEW.values())]
        optimizer = torch.optim.AdamW(weights, lr=1e-2, weight_decay=0, **how)
        torch.manual_seed(3)
        for weight in weights:
            weight.grad = torch.linspace(-1, 1, weight.numel()).view(weight.shape).to(dtype)
        optimizer.step()
        return [weight.dequantize().detach() for weight in weights], [optimizer.state[w]["exp_avg"] for w in weights]

    single, state = train(foreach=False)
    for how in ({"foreach": True}, {"fused": True}):
        made, its = train(**how)
        assert all(torch.equal(a, b) for a, b in zip(state, its, strict=True))
        for a, b in zip(single, made, strict=True):
            if dtype == torch.float32:
                assert torch.equal(a, b)
            else:  # of 16 bits, the fused one rounds once where the others round thrice
                assert (a != b).float().mean() < 0.1


@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("scheme", [tt.int8(), tt.Mastered(tt.int8())], ids=["int8", "master"])
def test_a_transposed_tie_takes_the_updates_of_both_names(scheme, how):
    weight = _trained(scheme, (64, 64))
    turned = torch.nn.Parameter(weight.detach().t())
    before = weight.detach().t().clone().dequantize()
    grads = torch.randn(64, 64), torch.randn(64, 64).t()  # strided as the parameters are, which fused ops need
    weight.grad, turned.grad = grads
    torch.optim.SGD([weight, turned], lr=0.1, **how).step()
    wanted = before - 0.1 * (grads[0].t() + grads[1])
    assert (turned.dequantize() - wanted).abs().max() < 3 * wanted.abs().max() / 127


@pytest.mark.parametrize("scheme", [tt.int8(), tt.Mastered(tt.int8())], ids=["int8", "master"])
def test_an_op_writes_frozen_parts_once_for_each_name(scheme):
    weight = tt.Weight.encode(torch.randn(16, 64), scheme)
    before = weight.dequantize()
    torch._foreach_neg_([weight, weight.t()])
    assert torch.equal(weight.dequantize(), before)


def test_a_frozen_weight_and_its_copies_round_to_the_nearest():
    weight = _trained(tt.int8())
    state = torch.get_rng_state()
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)))
        weight.clamp_(-1, 1)
        weight.requires_grad_(False).add_(1e-3)
        weight.data.add_(1e-3)
    assert torch.equal(torch.get_rng_state(), state)


def test_data_of_what_is_trained_is_trained():
    weight = _trained(tt.int8())
    before = weight.dequantize().detach()
    torch.manual_seed(0)
    for _ in range(50):
        weight.data.add_(-1e-3)
    assert (weight.dequantize() - before).mean().item() == pytest.approx(-0.05, abs=1e-2)


def _reloaded(tensor):
    saved = io.BytesIO()
    torch.save({"state": tensor}, saved)
    saved.seek(0)
    return torch.load(saved, weights_only=True)["state"]


@pytest.mark.parametrize("way", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one)), _reloaded])
def test_a_copy_of_what_is_trained_is_trained_also_after_a_save(way):
    """State of schedule-free optimizers, which would stay where it is after training was resumed."""
    state = way(_trained(tt.int8()).detach().clone())
    assert not state.requires_grad
    before = state.dequantize()
    torch.manual_seed(0)
    for _ in range(50):
        state.add_(-1e-3)
    assert (state.dequantize() - before).mean().item() == pytest.approx(-0.05, abs=1e-2)
    frozen = way(_trained(tt.int8()).requires_grad_(False).detach())
    before = frozen.dequantize()
    assert torch.equal(frozen.add_(-1e-3).dequantize(), before)


@pytest.mark.parametrize("way", [lambda one: pickle.loads(pickle.dumps(one)), _reloaded])
@pytest.mark.parametrize("name", ["int8", "int4", "mxfp4", "int8 with a master"])
def test_the_flat_copy_of_what_is_trained_is_the_same_after_a_save(way, name):
    """State of Prodigy, which holds ``p.flatten().detach().clone()``."""
    schemes = {
        "int8": tt.int8(),
        "int4": tt.int4(32),
        "mxfp4": tt.mxfp4(),
        "int8 with a master": tt.Mastered(tt.int8()),
    }
    trained = _trained(schemes[name])
    state = trained.flatten().detach().clone()
    again = way(state)
    assert (type(again), again.spec, again.is_trained) == (tt.Weight, state.spec, True)
    assert all(same_bits(part, again.parts[key]) for key, part in state.parts.items())
    assert torch.equal(again.view(trained.shape).dequantize(), trained.dequantize())
    assert torch.equal(again - state, torch.zeros(trained.numel()))


@pytest.mark.parametrize("scheme", [tt.int8(), tt.int4(32, symmetric=True)], ids=["int8", "int4-symmetric"])
@pytest.mark.parametrize("way", ["copy_", "data"])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_values_that_are_written_again_and_again_do_not_grow(scheme, way, is_frozen):
    weight = _trained(scheme, (16, 64)).requires_grad_(not is_frozen)
    before = weight.dequantize().detach()
    for step in range(100):
        values = weight.dequantize().detach() + (-1) ** step * 1e-4
        if way == "copy_":
            with torch.no_grad():
                weight.copy_(values)
        else:
            weight.data = values
    assert (weight.dequantize() - before).norm() < 0.15 * before.norm()


@each_learning
def test_other_values_than_a_step_leaves_are_encoded_as_if_nothing_was_held(row):
    weight, values = _trained(row.scheme), torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        weight.copy_(values)
    assert same_bits(weight.dequantize().detach(), tt.Weight.encode(values, row.scheme).dequantize())


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("way", ["tt.load", "load_state_dict", "swapped"])
@each_learning
def test_what_a_load_gives_does_not_depend_on_what_was_held(row, way, is_frozen, tmp_path, monkeypatch):
    source = torch.nn.Linear(64, 8, bias=False)
    tt.save(source, tmp_path)
    state = {name: value.clone() for name, value in source.state_dict().items()}
    model = tt.quantize(source, row.scheme)
    expected = model.weight.dequantize().detach()
    model.requires_grad_(not is_frozen)
    with torch.no_grad():  # other scales, of about the same values
        model.weight.copy_(torch.randn(8, 64))
        model.weight.copy_(state["weight"] * 1.0005)
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", way == "swapped")
    tt.load(model, tmp_path) if way == "tt.load" else model.load_state_dict(state)
    assert same_bits(model.weight.dequantize().detach(), expected)


@pytest.mark.parametrize("way", ["tt.load", "load_state_dict", "swapped"])
def test_a_load_of_values_that_codes_have_sets_masters_back(way, tmp_path, monkeypatch):
    model = tt.quantize(torch.nn.Linear(64, 8, bias=False), "int8", master=torch.float32)
    state = {"weight": model.weight.dequantize().detach()}
    tt.save(state, tmp_path)
    assert not torch.equal(model.weight.parts["master"], state["weight"])
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", way == "swapped")
    tt.load(model, tmp_path) if way == "tt.load" else model.load_state_dict(state)
    assert torch.equal(model.weight.parts["master"], state["weight"])


@dataclass(frozen=True)
class Halves(tt.Scheme):
    kind: ClassVar[str] = "training-halves"

    def layout(self, shape):
        return tt.int8().layout(shape)

    def encode(self, values):
        return tt.int8().encode(values)

    def decode(self, parts, shape, dtype):
        return tt.int8().decode(parts, shape, dtype)

    def bound(self, parts, shape):
        return tt.int8().bound(parts, shape)


def test_a_scheme_without_a_way_says_so_once():
    weight = _trained(Halves())
    with torch.no_grad():
        with pytest.warns(tt.TrainingWarning, match=r"requires_grad_\(False\)") as told:
            weight.add_(1e-3)
        weight.add_(1e-3)
    assert len(told) == 1
    assert "\n" not in str(told[0].message)


@pytest.mark.parametrize(
    ("scheme", "warns"),
    [
        (tt.Affine(bits=1), True),
        (tt.sinq(1), True),
        (tt.Codebook((0.0, 1.0)), True),
        (tt.Codebook((-1.0, 1.0), block_size=20), True),
        (tt.Codebook((-1.0, 1.0)), False),
        (tt.Biased(bits=1), False),
        (tt.SuperBlocks(1, 32, minimum=True), False),
        (tt.Affine(bits=2), False),
    ],
    ids=str,
)
def test_few_schemes_of_one_bit_have_no_way(monkeypatch, scheme, warns):
    monkeypatch.setattr(inplace, "_warned", set())
    weight = torch.nn.Parameter(tt.Weight.encode(torch.randn(8, 256), scheme))
    with warnings.catch_warnings(record=True) as told, torch.no_grad():
        warnings.simplefilter("always")
        weight.add_(1e-3)
    assert [one.category for one in told] == [tt.TrainingWarning] * warns


STATE = {
    "empty_like": lambda weight: torch.nn.init.constant_(torch.empty_like(weight), 0.1),
    "new_zeros": lambda weight: weight.new_zeros(weight.shape),
    "new_empty": lambda weight: weight.new_empty(weight.shape).zero_(),
}


@pytest.mark.parametrize(
    "step",
    [
        lambda state, grad: state.mul_(0.9).add_(grad, alpha=0.1),
        lambda state, grad: state.lerp_(grad, 0.1),
        lambda state, grad: torch._foreach_addcmul_([state], [grad], [grad]),
    ],
    ids=["add_", "lerp_", "_foreach_addcmul_"],
)
@pytest.mark.parametrize("make", STATE.values(), ids=STATE)
def test_state_of_an_optimizer_that_is_quantized_is_told_once(monkeypatch, make, step):
    """As that of Yogi and Conda: rounded to codes, small steps are lost, and nothing else says so."""
    monkeypatch.setattr(inplace, "_warned", set())
    weight = torch.nn.Parameter(_trained(tt.int8()).detach())
    state = make(weight.detach())
    with torch.no_grad():
        with pytest.warns(tt.TrainingWarning, match="zeros_like") as told:
            step(state, torch.randn(weight.shape))
        step(state, torch.randn(weight.shape))
    assert [one.filename for one in told] == [__file__]


def _foreach_copied(weight):
    """As some averages of a model begin."""
    made = torch.empty_like(weight)
    torch._foreach_copy_([made], [weight])
    return made


@pytest.mark.parametrize(
    "make",
    [
        lambda weight: torch.empty_like(weight).copy_(weight),
        lambda weight: torch.empty_like(weight).normal_(),
        _foreach_copied,
        lambda weight: weight.detach().clone(),
        lambda weight: torch.nn.Parameter(torch.empty_like(weight)).data.fill_(1),
        lambda weight: weight.new_zeros((weight.shape[0] + 1, *weight.shape[1:]))[:-1].copy_(weight),
    ],
    ids=["copied into", "random", "copied into with others", "clone", "parameter", "rows of what pads"],
)
def test_weights_with_values_are_no_such_state(monkeypatch, make):
    monkeypatch.setattr(inplace, "_warned", set())
    weight = _trained(tt.int8()).detach()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        make(weight).add_(torch.randn(weight.shape))


@pytest.mark.parametrize("make", STATE.values(), ids=STATE)
def test_state_with_a_master_is_told_nothing(monkeypatch, make):
    """What is added goes to the master."""
    monkeypatch.setattr(inplace, "_warned", set())
    weight = _trained(tt.Mastered(tt.int8())).detach()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        make(weight).add_(torch.full(weight.shape, 1e-4))


def test_a_model_on_new_memory_trains_without_a_warning(monkeypatch):
    """``to_empty`` makes the memory by ``empty_like``."""
    monkeypatch.setattr(inplace, "_warned", set())
    model = tt.quantize(torch.nn.Linear(64, 8), "int8").to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.requires_grad_())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 64)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_the_warning_names_the_step(monkeypatch):
    monkeypatch.setattr(inplace, "_warned", set())
    weight = torch.nn.Parameter(_trained(Halves()).detach())
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    weight.grad = torch.ones(weight.shape)
    with pytest.warns(tt.TrainingWarning) as told:
        optimizer.step()
    assert [one.filename for one in told] == [__file__]


@pytest.mark.usefixtures("cxx")
@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(tt.int8(), id="int8"),
        pytest.param(tt.nf4(), id="nf4", marks=pytest.mark.slow),
        pytest.param(tt.fp8(), id="fp8", marks=pytest.mark.slow),
    ],
)
def test_compiled_updates_are_rounded_stochastically(scheme):
    @torch.compile(fullgraph=True)
    def step(weight, grad):
        with torch.no_grad():
            weight.mul_(0.999)
            weight.add_(grad, alpha=-1e-2)

    def train(seed):
        weight = _trained(scheme)
        before = weight.dequantize().detach()
        torch.manual_seed(seed)
        step(weight, torch.ones(weight.shape))
        return (weight.dequantize() - before).detach(), before

    first, before = train(1)
    assert torch.equal(first, train(1)[0])
    assert not torch.equal(first, train(2)[0])
    mean = torch.stack([train(seed)[0] for seed in range(20)]).mean(0)
    assert mean.mean().item() == pytest.approx((-1e-3 * before - 1e-2).mean().item(), abs=4e-3)


# -- learning ---------------------------------------------------------------------------------------------------------

RATES = (1e-2, 1e-3, 1e-4, 1e-5)


def _net(scheme, lr, steps=100):
    """Return the losses of a small net before and after training."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 16))
    x, y = torch.randn(256, 64), torch.randn(256, 16)
    if scheme is not None:
        tt.quantize(net, scheme)
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    losses = []
    for _ in range(steps + 1):
        loss = (net(x) - y).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses[0], losses[-1]


_dense_net = cache(partial(_net, None))


@pytest.mark.parametrize("lr", RATES)
def test_int8_learns_as_floats_do(lr):
    (_, dense), (_, made) = _dense_net(lr), _net(tt.int8(), lr)
    assert made <= 1.1 * dense + 5e-3


@pytest.mark.slow
@few
@pytest.mark.parametrize("lr", RATES[:3:2])
def test_no_scheme_drifts(scheme, lr):
    (_, dense), (before, after) = _dense_net(lr), _net(scheme, lr)
    assert after < before
    assert after <= dense + 0.3 * (before - dense)


# -- masters ----------------------------------------------------------------------------------------------------------


def _mastered(inner, dtype=torch.float32, rows=8):
    values = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0))
    return torch.nn.Parameter(tt.Weight.encode(values, tt.Mastered(inner, dtype))), values


@few
def test_an_update_goes_to_the_master_and_its_codes_follow(scheme):
    weight, values = _mastered(scheme)
    with torch.no_grad():
        for _ in range(3):
            weight.sub_(torch.full_like(values, 1e-6))
            values.sub_(1e-6)
    assert torch.equal(weight.parts["master"], values)
    assert torch.equal(weight.dequantize(), tt.Weight.encode(values, scheme).dequantize())


@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_step_in_float64_goes_to_a_smaller_master(master, way):
    layer = tt.quantize(torch.nn.Linear(64, 8).double(), "int8", master=master)
    before = layer.weight.parts["master"].clone()
    layer(torch.ones(1, 64, dtype=torch.float64)).sum().backward()
    torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0, **way).step()
    torch.testing.assert_close(before - layer.weight.parts["master"], torch.full_like(before, 0.1), rtol=0, atol=0.005)


def test_the_master_keeps_its_dtype_and_its_bits():
    weight, values = _mastered(tt.int8())
    layer = torch.nn.Linear(64, 8, bias=False)
    layer.weight = weight
    layer.to(torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    assert torch.equal(layer.weight.parts["master"], values)
    with torch.no_grad():
        layer.weight.clamp_(-100, 100)
        layer.weight.mul_(1.0)
    assert torch.equal(layer.weight.parts["master"], values)


@pytest.mark.slow
@few
@pytest.mark.parametrize("lr", RATES[::3])
def test_with_a_master_every_scheme_learns_where_floats_do(scheme, lr):
    (_, dense), (before, after) = _dense_net(lr), _net(tt.Mastered(scheme), lr)
    assert after < before or before - dense < 0.02
    assert after <= dense + 0.35 * (before - dense) or before - dense < 0.02


@pytest.fixture
def tied():
    net = torch.nn.Sequential(torch.nn.Embedding(32, 64), torch.nn.Linear(64, 32, bias=False))
    net[1].weight = net[0].weight
    return tt.quantize(net, {"0.weight": "int8"}, master=torch.float32)


def _step(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    net(torch.arange(8)).square().mean().backward()
    optimizer.step()


def test_masters_are_saved_kept_and_dropped(tied, tmp_path):
    _step(tied)
    tt.save(tied, tmp_path / "kept.safetensors")
    tt.save(tied, tmp_path / "dropped.safetensors", masters="drop")
    assert isinstance(tt.open(tmp_path / "kept.safetensors").spec("0.weight").scheme, tt.Mastered)
    assert tt.open(tmp_path / "dropped.safetensors").spec("0.weight").scheme == tt.int8()
    held = {name: part.clone() for name, part in tied[0].weight.parts.items()}
    values = tied[0].weight.dequantize().detach()

    again = torch.nn.Sequential(torch.nn.Embedding(32, 64), torch.nn.Linear(64, 32, bias=False))
    again[1].weight = again[0].weight
    tt.quantize(again, {"0.weight": "int8"}, master=torch.float32)
    tt.load(again, tmp_path / "kept.safetensors")
    assert all(same_bits(again[0].weight.parts[name], part) for name, part in held.items())
    tt.load(again, tmp_path / "dropped.safetensors")
    assert again[0].weight is again[1].weight
    assert all(same_bits(again[0].weight.parts[name], held[name]) for name in ("qdata", "scale"))
    assert torch.equal(again[0].weight.parts["master"], values)
    with pytest.raises(tt.CheckpointError, match="neither"):
        tt.save(tied, tmp_path / "x.safetensors", masters="no")


def test_a_dropped_file_fills_masters_on_meta(tied, tmp_path):
    tt.save(tied, tmp_path / "dropped.safetensors", masters="drop")
    with torch.device("meta"):
        ghost = torch.nn.Sequential(torch.nn.Embedding(32, 64), torch.nn.Linear(64, 32, bias=False))
        ghost[1].weight = ghost[0].weight
    tt.quantize(ghost, {"0.weight": "int8"}, master=torch.float32)
    tt.load(ghost, tmp_path / "dropped.safetensors")
    assert torch.equal(ghost[1].weight.parts["master"], tied[0].weight.dequantize())
    assert same_bits(ghost[1].weight.parts["qdata"], tied[0].weight.parts["qdata"])


def test_quantize_drops_and_adds_masters_without_touching_codes(tied):
    _step(tied)
    held = {name: part.clone() for name, part in tied[0].weight.parts.items()}
    parameter = tied[0].weight
    tt.quantize(tied, {"0.weight": "int8"})
    assert tied[1].weight is parameter
    assert parameter.scheme == tt.int8()
    assert all(same_bits(parameter.parts[name], held[name]) for name in ("qdata", "scale"))
    tt.quantize(tied, {"0.weight": "int8"}, master=torch.float32)
    assert all(same_bits(parameter.parts[name], held[name]) for name in ("qdata", "scale"))
    assert torch.equal(parameter.parts["master"], parameter.dequantize())


def test_a_state_dict_of_codes_fills_a_master(tied):
    codes = tt.Weight.encode(torch.randn(32, 64), tt.int8())
    tied[0].load_state_dict({"weight": codes})
    assert same_bits(tied[0].weight.parts["qdata"], codes.parts["qdata"])
    assert torch.equal(tied[0].weight.parts["master"], codes.dequantize())


@pytest.mark.parametrize("scheme", [tt.Plain(), tt.Mastered(tt.int8()), "int8"])
def test_a_master_needs_codes(scheme):
    with pytest.raises(tt.SchemeError, match="needs a scheme of codes"):
        tt.Mastered(scheme)


def test_a_master_in_text_is_told_from_a_dtype():
    with pytest.raises(
        tt.SchemeError, match=r"^Mastered: dtype must be one of torch\.float32, .*, got 'float32'\. Give"
    ):
        tt.quantize(torch.nn.Linear(4, 4), "int8", master="float32")


@torch.library.custom_op("torchtether_tests::halve", mutates_args=("weight",))
def _halve(gradient: torch.Tensor, weight: torch.Tensor) -> None:
    weight.mul_(0.5).sub_(gradient)


@few
def test_an_op_of_another_library_writes_to_a_weight(scheme):
    weight = _trained(scheme)
    before = weight.dequantize().detach()
    torch.manual_seed(0)
    with torch.no_grad():
        _halve(torch.full(weight.shape, 1e-3), weight)
    gap = 2 * scheme.bound(weight.parts, tuple(weight.shape)).max()
    assert (weight.dequantize() - before / 2 + 1e-3).abs().max() <= gap
    assert (weight.dequantize() - before / 2 + 1e-3).mean().abs() <= gap / 8


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("scheme", ["int8", tt.Plain()], ids=["int8", "plain"])
def test_a_step_is_compiled_with_graph_breaks(scheme, foreach):
    torch._dynamo.reset()
    layer = tt.quantize(torch.nn.Linear(64, 64), {"weight": scheme})
    optimizer, before = torch.optim.AdamW(layer.parameters(), 1e-2, foreach=foreach), layer.weight.dequantize().detach()
    layer(torch.ones(1, 64)).sum().backward()
    torch.compile(lambda: optimizer.step(), backend="eager")()
    assert not torch.equal(layer.weight.dequantize(), before)
    torch.compile(lambda: torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0), backend="eager")()


def test_a_compiled_step_follows_a_change_of_scheme():
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = tt.quantize(torch.nn.Linear(64, 64), "nf4", master=torch.float32)
    twin = copy.deepcopy(layer)
    optimizer, other = (torch.optim.AdamW(one.parameters(), 1e-3) for one in (layer, twin))
    step = torch.compile(lambda: optimizer.step(), backend="aot_eager")  # "eager" would dispatch each op by the scheme
    for scheme in ("nf4", "fp4", "int8"):
        for one in (layer, twin):
            tt.quantize(one, scheme, master=torch.float32, optimizer=(optimizer, other)[one is twin])
            one.zero_grad()
            one(torch.ones(1, 64)).sum().backward()
        step(), other.step()
        assert torch.allclose(layer.weight.dequantize(), twin.weight.dequantize(), atol=1e-5), scheme


@pytest.mark.parametrize("master", [None, torch.float32])
def test_a_step_with_grads_that_are_not_finite_says_what_to_do(master):
    layer = tt.quantize(torch.nn.Linear(64, 64), "nf4", master=master)
    optimizer, before = torch.optim.Adam(layer.parameters()), layer.weight.dequantize().detach()
    layer.weight.grad = torch.full((64, 64), math.nan)
    with pytest.raises(tt.SchemeError, match=r"in-place op on a Weight of shape \(64, 64\): 4096 .*skip steps"):
        optimizer.step()
    assert torch.equal(layer.weight.dequantize(), before)


@pytest.mark.parametrize("scheme", ["int8", "nf4", tt.Mastered(tt.int8()), tt.Plain()], ids=str)
@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_between_forward_and_backward_is_an_error(scheme, foreach):
    """As of plain parameters: the gradient would be that of the new values."""
    layer = tt.quantize(torch.nn.Linear(64, 8, bias=False), scheme)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, foreach=foreach)
    inputs = torch.ones(2, 64, requires_grad=True)
    layer(inputs).sum().backward()
    loss = layer(inputs).square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
