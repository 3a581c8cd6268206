"""A plan applied to a few names at a time: those are loaded, and the rest does not change."""

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.checkpoint.test_round_trip import assert_same
from tests.loading.models import MODELS, Fused, Storage, Tied, build
from torchtether.files import TensorFile
from torchtether.ties.names import named_tensors


def applied(plan, *rounds):
    """The reports of ``plan.apply`` with each of ``rounds``."""
    try:
        return [plan.apply(only=only) for only in rounds]
    finally:
        plan.close()


def snapshot(model):
    return {
        name: (tensor, tensor.device, tensor.dtype, None if tensor.is_meta else tensor.detach().clone())
        for name, tensor in named_tensors(model).items()
    }


def assert_as_before(model, before, names):
    now = named_tensors(model)
    for name in names:
        tensor, device, dtype, values = before[name]
        assert now[name] is tensor, name
        assert (tensor.device, tensor.dtype, type(tensor)) == (device, dtype, type(before[name][0])), name
        assert values is None or torch.equal(tensor, values), name


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_only_what_is_named_is_loaded_and_a_later_apply_does_the_rest(tmp_path, meta, quantize):
    source = build(Tied)
    tt.save(source, tmp_path / "x", max_shard_size=300)
    model = build(Tied, meta=meta, seed=4)
    optimizer = torch.optim.AdamW(model.parameters())
    before = snapshot(model)
    plan = tt.plan_load(model, tmp_path / "x", quantize=quantize, dtype=torch.bfloat16, optimizer=optimizer)
    first = plan.apply(only="mid.*")
    rest = sorted(set(before) - {"mid.weight", "mid.bias"})
    assert_as_before(model, before, rest)
    assert sorted(first.on_meta) == (rest if meta else [])
    assert ("still on meta" in str(first)) == meta
    assert (first.tensors, first.tied) == (2, ())
    assert sorted(plan.left) == ["emb.weight", "norm.bias", "norm.weight", "steps"]
    assert torch.equal(model.mid.bias, source.mid.bias.bfloat16())
    assert isinstance(model.mid.weight, tt.Weight) == (quantize is not None)
    loaded = snapshot(model)
    (second,) = applied(plan, None)
    assert_as_before(model, loaded, ["mid.bias"])
    assert (second.tensors, second.on_meta, plan.left) == (4, (), ())
    assert first.bytes + second.bytes == plan.bytes
    again = build(Tied, meta=meta, seed=4)
    tt.load(again, tmp_path / "x", quantize=quantize, dtype=torch.bfloat16)
    assert_same(named_tensors(again), named_tensors(model))
    tt.check_optimizer(model, optimizer)


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_name_by_name_is_the_same_as_all_at_once(tmp_path, kind, meta):
    source = build(kind)
    tt.save(source, tmp_path / "x")
    model = build(kind, meta=meta, seed=3)
    plan = tt.plan_load(model, tmp_path / "x")
    applied(plan, *reversed(list(named_tensors(model))))
    assert plan.left == ()
    assert_same(named_tensors(source), named_tensors(model))
    assert tt.find_ties(model) == tt.find_ties(source)


@pytest.mark.parametrize(
    ("kind", "only", "together"),
    [
        (Tied, "head.*", {"emb.weight", "head.weight"}),
        (Fused, ["kt"], {"qkv", "q", "kt", "row"}),
        (Storage, ("bits", "b"), {"a", "b", "c", "x", "y", "z", "bits"}),
    ],
)
def test_what_is_tied_to_a_name_comes_with_it(tmp_path, kind, only, together):
    tt.save(build(kind), tmp_path / "x")
    model = build(kind, meta=True)
    (report,) = applied(tt.plan_load(model, tmp_path / "x"), only)
    assert {name for name, tensor in named_tensors(model).items() if not tensor.is_meta} == together
    assert set(report.on_meta) == set(named_tensors(model)) - together


def test_a_step_is_done_once(tmp_path):
    tt.save(build(Tied), tmp_path / "x")
    model = build(Tied, seed=4)
    plan = tt.plan_load(model, tmp_path / "x")
    plan.apply(only="mid.*")
    with torch.no_grad():
        model.mid.bias.fill_(9)
    reports = applied(plan, ["mid.bias", "norm.*"], None, None)
    assert model.mid.bias.tolist() == [9] * 8
    assert [report.tensors for report in reports] == [2, 2, 0]


@pytest.mark.parametrize("only", ["midd.*", ["mid.*", "midd.*"]], ids=str)
def test_a_glob_that_matches_nothing_names_the_nearest(tmp_path, only):
    tt.save(build(Tied), tmp_path / "x")
    model = build(Tied, meta=True)
    plan = tt.plan_load(model, tmp_path / "x")
    with pytest.raises(
        tt.LoadError, match=r"midd\.\*: only= matches no tensor of the model, the nearest is 'mid\."
    ) as e:
        applied(plan, only)
    assert "\n" not in str(e.value)
    assert all(tensor.is_meta for tensor in named_tensors(model).values())


def test_after_an_error_the_plan_goes_on(tmp_path, monkeypatch):
    source = build(Tied)
    tt.save(source, tmp_path / "x")
    model = build(Tied, seed=4)
    plan = tt.plan_load(model, tmp_path / "x")
    honest = TensorFile.read_into

    def broken(self, key, *rest):
        if key == "norm.weight":
            raise tt.CheckpointError("cannot be read", name=key)
        honest(self, key, *rest)

    monkeypatch.setattr(TensorFile, "read_into", broken)
    with pytest.raises(tt.CheckpointError, match="norm"):
        plan.apply()
    assert "norm.weight" in plan.left
    assert "emb.weight" not in plan.left
    monkeypatch.undo()
    (report,) = applied(plan, None)
    assert report.tensors < 6
    assert_same(named_tensors(source), named_tensors(model))


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(2))
        self.b = nn.Parameter(torch.ones(3))
        self.register_buffer("freq", 1.0 / torch.arange(1, 4), persistent=False)


def test_recorded_buffers_wait_for_an_only_that_names_them(tmp_path):
    tt.save(Rotary(), tmp_path / "x")
    with tt.on_meta():
        model = Rotary()
    plan = tt.plan_load(model, tmp_path / "x")
    first, second, third = applied(plan, ["a", "freq"], "b", "freq")
    assert first.on_meta == ("b", "freq")
    assert second.on_meta == ("freq",)
    assert third.on_meta == ()
    assert torch.equal(model.freq, Rotary().freq)


@pytest.mark.parametrize("meta", [True, False])
def test_the_ties_of_the_file_come_with_the_names_concerned(tmp_path, meta):
    state = {name: tensor.clone() for name, tensor in build(Tied).state_dict().items()}
    tt.save({**state, "head.weight": torch.full((12, 8), 3.0)}, tmp_path / "x")
    model = build(Tied, meta=meta, seed=4)
    plan = tt.plan_load(model, tmp_path / "x", ties="file")
    plan.apply(only="mid.*")
    assert model.head.weight is model.emb.weight
    applied(plan, "head.weight", None)
    assert model.head.weight is not model.emb.weight
    assert model.head.weight.unique().tolist() == [3]
    assert torch.equal(model.emb.weight, state["emb.weight"])
    tt.save(build(Tied), tmp_path / "y")
    model = build(Tied, meta=meta, seed=4)
    tt.untie(model, "head.weight")
    plan = tt.plan_load(model, tmp_path / "y", ties="file")
    plan.apply(only="norm.*")
    assert model.head.weight is not model.emb.weight
    applied(plan, "head.weight", None)
    assert model.head.weight is model.emb.weight
    assert torch.equal(model.emb.weight, state["emb.weight"])
