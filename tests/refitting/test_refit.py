"""``tt.refit`` writes the values of ``tt.quantize`` into the model's memory, from every kind of source."""

import copy
import zlib

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.catalog import each_quantized, few_schemes
from tests.loading.models import Fused, Odd, Slices, Storage, Turned
from tests.refitting.nets import bits, build, copied, is_same, is_unchanged, places
from torchtether.progress import Meter
from torchtether.refitting.report import checksum_by_all, checksum_of

SOURCES = {
    "path": lambda state, folder: _saved(state, folder),
    "open": lambda state, folder: tt.open(_saved(state, folder)),
    "state dict": lambda state, folder: state,
    "pairs": lambda state, folder: list(state.items()),
    "generator": lambda state, folder: ((name, tensor) for name, tensor in reversed(state.items())),
}
each_source = pytest.mark.parametrize("kind", SOURCES)


def _saved(state, folder):
    tt.save(state, folder / "source")
    return folder / "source"


# -- the law ----------------------------------------------------------------------------------------------------------


@each_quantized
@pytest.mark.parametrize("kind", ["path", "state dict", "generator"])
def test_the_values_are_those_of_quantize_in_the_memory_that_is_there(row, kind, tmp_path):
    rollout, trainer = build(1, row.scheme), build(2)
    before = places(rollout)
    report = tt.refit(rollout, SOURCES[kind](trainer.state_dict(), tmp_path))
    assert places(rollout) == before
    assert is_same(rollout, build(2, row.scheme))
    assert rollout.head.weight is rollout.emb.weight
    assert set(report.encoded) == {"emb.weight", "mid.weight"}
    assert report.left == ("freq",)


@each_source
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_floats_of_any_dtype_are_encoded_as_they_are(kind, dtype, tmp_path):
    rollout, trainer = build(1, "int8").to(torch.bfloat16), build(2).to(dtype)
    wanted = build(2).to(dtype)
    tt.quantize(wanted, {"emb.weight": "int8", "mid.weight": "int8"})
    tt.refit(rollout, SOURCES[kind](trainer.state_dict(), tmp_path))
    assert is_same(rollout, wanted.to(torch.bfloat16))
    assert rollout.mid.weight.dtype == rollout.mid.bias.dtype == torch.bfloat16


@few_schemes
@each_source
def test_weights_of_the_same_scheme_are_copied(row, kind, tmp_path):
    rollout, wanted = build(1, row.scheme), build(2, row.scheme)
    before = places(rollout)
    tt.refit(rollout, SOURCES[kind](wanted.state_dict(), tmp_path))
    assert places(rollout) == before
    assert is_same(rollout, wanted)


@each_source
def test_weights_of_another_scheme_are_decoded_and_encoded(kind, tmp_path):
    rollout, given = build(1, "int8"), build(2, "nf4")
    plain = build(1)
    tt.refit(rollout, SOURCES[kind](given.state_dict(), tmp_path))
    wanted = tt.dequantize(given)
    tt.refit(plain, SOURCES[kind](build(2, "nf4").state_dict(), tmp_path))
    assert is_same(plain, wanted)
    assert is_same(rollout, tt.quantize(wanted, {"emb.weight": "int8", "mid.weight": "int8"}))


@each_source
@pytest.mark.parametrize("kind_of_model", [Turned, Fused, Slices, Storage], ids=lambda kind: kind.__name__)
def test_every_kind_of_tie_is_filled_once_and_holds(kind_of_model, kind, tmp_path):
    torch.manual_seed(1)
    rollout = kind_of_model()
    torch.manual_seed(2)
    trainer = kind_of_model()
    before, ties = places(rollout), tt.find_ties(rollout)
    report = tt.refit(rollout, SOURCES[kind](trainer.state_dict(), tmp_path))
    assert places(rollout) == before
    assert is_same(rollout, trainer)
    assert tt.find_ties(rollout) == ties
    assert len(report.names) == len(report.checksums) < len(trainer.state_dict())


@each_source
def test_a_transposed_tie_of_weights_is_filled(kind, tmp_path):
    rollout, trainer, wanted = (Turned() for _ in range(3))
    tt.refit(wanted, trainer.state_dict())
    for model in (rollout, wanted):
        tt.quantize(model, {"emb.weight": "int8", "turned": "int8"})
    before = places(rollout)
    tt.refit(rollout, SOURCES[kind](trainer.state_dict(), tmp_path))
    assert places(rollout) == before
    assert is_same(rollout, wanted)
    assert torch.equal(rollout.turned.dequantize(), rollout.emb.weight.dequantize().t())


@each_source
def test_odd_tensors_are_filled(kind, tmp_path):
    rollout, trainer = Odd(), Odd()
    rollout.wide, trainer.wide = torch.zeros(2, 3, dtype=torch.int64), trainer.wide.clone()
    tt.refit(rollout, SOURCES[kind](trainer.state_dict(), tmp_path))
    assert is_same(rollout, trainer)


def test_what_cannot_be_written_to_is_a_fault():
    rollout = Odd()
    with pytest.raises(tt.LoadError, match=r"wide: some of its elements share memory"):
        tt.refit(rollout, Odd().state_dict())
    with torch.device("meta"):
        on_meta = nn.Linear(2, 2)
    with pytest.raises(tt.LoadError, match="weight: it is on meta, and has no memory to write to"):
        tt.refit(on_meta, nn.Linear(2, 2).state_dict())


# -- what holds the model goes on -------------------------------------------------------------------------------------


def test_a_graph_compiled_before_gives_the_new_values():
    rollout, tokens = build(1, "int8"), torch.arange(12)
    compiled = torch.compile(rollout, backend="aot_eager")
    with torch.no_grad():
        old = compiled(tokens)
        tt.refit(rollout, build(2).state_dict())
        new = compiled(tokens)
        assert torch.equal(new, compiled(tokens))
        assert not torch.allclose(old, new)
        assert torch.allclose(new, build(2, "int8")(tokens), atol=1e-5)


def test_an_optimizer_keeps_its_state_and_must_be_that_of_the_model():
    rollout = build(1, "int8")
    optimizer = torch.optim.AdamW(rollout.parameters(), lr=1e-3)
    rollout(torch.arange(12)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    tt.refit(rollout, build(2).state_dict(), optimizer=optimizer)
    after = optimizer.state_dict()
    assert all(torch.equal(after["state"][i]["exp_avg"], before["state"][i]["exp_avg"]) for i in before["state"])
    kept = copied(rollout)
    with pytest.raises(tt.OptimizerError):
        tt.refit(rollout, build(3).state_dict(), optimizer=torch.optim.SGD(build(1).parameters()))
    assert is_unchanged(rollout, kept)


@each_source
@pytest.mark.parametrize("scheme", ["int8", tt.Plain(), None], ids=str)
def test_what_was_saved_for_a_backward_is_known_to_be_gone(scheme, kind, tmp_path):
    layer = nn.Linear(64, 64, bias=False)
    if scheme is not None:
        tt.quantize(layer, scheme)
    loss = layer(torch.randn(2, 64, requires_grad=True)).sum()
    tt.refit(layer, SOURCES[kind](nn.Linear(64, 64, bias=False).state_dict(), tmp_path))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- buffers that are computed ----------------------------------------------------------------------------------------


@each_source
def test_a_computed_buffer_takes_what_the_source_has_and_else_stays(kind, tmp_path):
    rollout, trainer = build(1, "int8"), build(2)
    with tt.on_meta():
        rebuilt = build(1)
    tt.materialize(rebuilt)
    for model in (rollout, rebuilt):
        report = tt.refit(model, SOURCES[kind](trainer.state_dict(), tmp_path))
        assert torch.equal(model.freq, torch.arange(4.0))
        assert report.left == ("freq",)
        rest = {"freq": torch.full((4,), 5.0)}
        report = tt.refit(model, SOURCES[kind](trainer.state_dict() | rest, tmp_path))
        assert torch.equal(model.freq, rest["freq"])
        assert report.left == ()
        with pytest.raises(tt.LoadError, match=r"freq: the checkpoint has shape \(5,\), the model has \(4,\)"):
            tt.refit(model, SOURCES[kind](trainer.state_dict() | {"freq": torch.ones(5)}, tmp_path))


# -- faults -----------------------------------------------------------------------------------------------------------


def _without(state, name):
    return {key: tensor for key, tensor in state.items() if key != name}


def _with(state, name, value):
    return state | {name: value}


FAULTS = {
    "never came": (lambda s: _without(s, "mid.bias"), "mid.bias: the checkpoint does not have it"),
    "unknown": (lambda s: _with(s, "mid.extra", torch.ones(2)), "mid.extra: the model does not have it"),
    "shape": (lambda s: _with(s, "mid.bias", torch.ones(3)), r"mid.bias: the checkpoint has shape \(3,\)"),
    "dtype": (lambda s: _with(s, "mid.bias", torch.ones(64, dtype=torch.int8)), "mid.bias: the checkpoint has torch"),
    "tie": (lambda s: _with(s, "head.weight", s["emb.weight"] + 1), "weight: the model ties it to .*weight, the"),
    "nan": (lambda s: _with(s, "mid.weight", s["mid.weight"] / 0), "mid.weight: 4096 of 4096 values are not finite"),
    "one inf": (lambda s: _with(s, "emb.weight", _spoilt(s["emb.weight"])) | {"head.weight": _spoilt(s["emb.weight"])},
                "emb.weight: 1 of 3072 values are not finite"),
}  # fmt: skip


def _spoilt(tensor):
    made = tensor.clone()
    made[-1, -1] = float("-inf")
    return made


@each_source
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_listed_and_what_can_be_listed_is_unchanged(fault, kind, tmp_path):
    change, text = FAULTS[fault]
    rollout = build(1, "int8")
    before = copied(rollout)
    source = SOURCES[kind](change(build(2).state_dict()), tmp_path)
    with pytest.raises(tt.LoadError, match=text) as caught:
        tt.refit(rollout, source)
    assert len(caught.value.faults) == 1
    assert "\n" not in str(caught.value)
    if kind in ("pairs", "generator"):
        assert "tensors have been written" in str(caught.value)
        assert torch.equal(rollout.norm.running_mean, build(2).norm.running_mean)
    else:
        assert is_unchanged(rollout, before)


def test_all_faults_are_listed_at_once():
    state = build(2).state_dict()
    for i, (change, _) in enumerate(FAULTS.values()):
        state = change(state) if i in (0, 1, 5) else state
    state["x"] = "text"
    for source in (state, list(state.items())):
        with pytest.raises(tt.LoadError) as caught:
            tt.refit(build(1, "int8"), source)
        assert len(caught.value.faults) == 4


def test_values_that_a_scale_cannot_hold_are_found_before_the_first_change(tmp_path):
    scheme = tt.Affine(bits=4, block=(1, 16), scale_dtype=torch.float16)
    rollout, trainer = build(1, scheme), build(2)
    before = copied(rollout)
    with torch.no_grad():
        trainer.mid.weight[3, 3] = 1e30
    for source in (trainer.state_dict(), SOURCES["path"](trainer.state_dict(), tmp_path)):
        with pytest.raises(tt.LoadError, match=r"mid.weight: a scale of .* does not fit float16"):
            tt.refit(rollout, source)
        assert is_unchanged(rollout, before)


def test_plain_tensors_take_what_is_not_finite():
    rollout, trainer = build(1, "int8"), build(2)
    with torch.no_grad():
        trainer.mid.bias[0] = float("nan")
        trainer.norm.running_mean[1] = float("inf")
    tt.refit(rollout, trainer.state_dict())
    assert torch.equal(bits(rollout.mid.bias), bits(trainer.mid.bias))


@pytest.mark.parametrize("source", [3, None, b"x", torch.ones(2), nn.Linear(2, 2), nn.Linear], ids=str)
def test_what_is_no_source_is_refused(source):
    with pytest.raises(tt.ArgumentError, match="source: is "):
        tt.refit(nn.Linear(2, 2), source)


# -- names ------------------------------------------------------------------------------------------------------------


class Qkv(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.gate, self.up = nn.Linear(32, 64), nn.Linear(32, 64)
        self.experts = nn.Parameter(torch.randn(12, 8, 32))


def published():
    state = {f"{name}_proj.{leaf}": torch.randn(*shape) for name in "qkv" for leaf, shape in
             (("weight", (32, 32)), ("bias", (32,)))}  # fmt: skip
    state |= {"gate_up.weight": torch.randn(128, 32), "gate_up.bias": torch.randn(128)}
    return state | {f"experts.{i}.w": torch.randn(8, 32) for i in range(12)}


RULES = [
    tt.Concat(["q_proj", "k_proj", "v_proj"], "qkv"),
    tt.Split("gate_up", ["gate", "up"]),
    tt.Stack(r"experts\.(\d+)\.w", "experts"),
]


@each_source
@pytest.mark.parametrize("scheme", ["int8", tt.int4(group_size=16), "nf4", tt.fp8("tensor")], ids=str)
def test_fused_and_split_names_are_encoded_as_the_whole_is(scheme, kind, tmp_path):
    state = published()
    whole = {"qkv.weight": torch.cat([state[f"{n}_proj.weight"] for n in "qkv"])}
    whole |= {"qkv.bias": torch.cat([state[f"{n}_proj.bias"] for n in "qkv"])}
    for leaf in ("weight", "bias"):
        whole[f"gate.{leaf}"], whole[f"up.{leaf}"] = state[f"gate_up.{leaf}"].chunk(2)
    whole["experts"] = torch.stack([state[f"experts.{i}.w"] for i in range(12)])
    rollout, wanted = Qkv(), Qkv()
    wanted.load_state_dict(whole)
    for model in (rollout, wanted):
        tt.quantize(model, {"*weight": scheme, "experts": scheme})
    before = places(rollout)
    report = tt.refit(rollout, SOURCES[kind](state, tmp_path), rename=RULES)
    assert places(rollout) == before
    assert is_same(rollout, wanted)
    assert sorted(report.names) == sorted(name for name, _ in rollout.named_parameters())


@each_source
def test_a_piece_that_never_came_is_named(kind, tmp_path):
    rollout = tt.quantize(Qkv(), "int8")
    for lost in ("k_proj.weight", "experts.7.w"):
        state = _without(published(), lost)
        with pytest.raises(tt.LoadError, match="no tensor of the checkpoint for 'k_proj'|but not number 7|without"):
            tt.refit(rollout, SOURCES[kind](state, tmp_path), rename=RULES)
    with pytest.raises(tt.LoadError, match=r"rename: .*Concat.* matches no name"):
        tt.refit(rollout, SOURCES[kind](published(), tmp_path), rename=[*RULES, tt.Concat(["x1", "x2"], "x")])


# -- the report -------------------------------------------------------------------------------------------------------


def test_the_report_tells_what_was_written_and_ranks_can_compare_it(tmp_path):
    state = build(2).state_dict()
    reports = [tt.refit(build(1, "int8"), SOURCES[kind](state, tmp_path)) for kind in SOURCES]
    assert len({report.checksum for report in reports}) == 1
    assert all(report.checksums == reports[0].checksums for report in reports)
    wanted, report = build(2, "int8"), reports[0]
    for name, found in report.checksums.items():
        tensor = wanted.get_parameter(name) if name in dict(wanted.named_parameters()) else wanted.get_buffer(name)
        parts = tensor.parts.values() if isinstance(tensor, tt.Weight) else [tensor]
        assert found == zlib.crc32(b"".join(bits(part).numpy().tobytes() for part in parts))
    assert report.nbytes == sum(t.nbytes for t in [*wanted.parameters(), *wanted.buffers()]) - wanted.freq.nbytes
    assert str(report).startswith("8 tensors, 2 of them encoded, ")
    assert f"checksum {report.checksum:08x}" in str(report)
    other = tt.refit(build(1, "int8"), build(3).state_dict())
    assert other.checksum != report.checksum
    assert {name for name in report.names if other.checksums[name] != report.checksums[name]} >= {"emb.weight"}


def test_checksums_of_turned_tensors_hold_no_copy_of_them():
    def turned(value):
        return nn.ParameterList([torch.full((3 * 2**12, 2**10), value).t() for _ in range(2)])

    model, source = turned(1.0), turned(2.0)
    with Meter() as meter:
        report = tt.refit(model, source.state_dict())
        meter.look()
    assert all(bool((tensor == 2).all()) and tensor.stride() == (1, 2**10) for tensor in model)
    assert set(report.checksums.values()) == {zlib.crc32(source[0].detach().contiguous().numpy().tobytes())}
    if meter.peak is not None:
        assert meter.peak < model[0].nbytes // 2


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(3 * 2**20)[::3],
        torch.ones(5, dtype=torch.complex64).mul(1j).conj(),
        torch.ones(5, dtype=torch.complex64).mul(1j).conj().imag,
        torch.ones(()),
        torch.ones(0, 3),
        tt.Weight.encode(torch.ones(8, 64), tt.int4(32)).t(),
    ],
    ids=["transposed", "with gaps", "conjugated", "negated", "scalar", "empty", "Weight"],
)
def test_checksums_are_those_of_the_values_in_order_wherever_they_lie(tensor):
    parts = tensor.parts.values() if isinstance(tensor, tt.Weight) else [tensor]
    stored = b"".join(part.resolve_conj().resolve_neg().contiguous().numpy().tobytes() for part in parts)
    assert checksum_by_all(tensor) == checksum_of(tensor) == zlib.crc32(stored)
