"""Names that are views of a sharded parameter: training, saving, loading and refusals, beside one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import torchtether as tt
from tests.distributed.models import Block, D, Fused, Turned, _FusedBlock, data
from tests.distributed.spawn import spawn
from tests.distributed.training import _made, compare, mesh_of, train, whole

WORDS = 25
KINDS = {
    "turned": (Turned, (Block,)),
    "turned, ends are units": (Turned, (Block, "emb", "head")),
    "fused": (Fused, (_FusedBlock,)),
    "fused, all are units": (Fused, (nn.Linear, "emb")),
}


def _sharded(make, units, dtype=torch.float64, inputs=True, **kwargs):
    model = _made(partial(make, WORDS), dtype)
    mesh = kwargs.pop("mesh", None) or mesh_of((dist.get_world_size(),))
    plan = tt.distributed.plan_units(model, units, mesh=mesh, inputs=(data(0, WORDS),) if inputs else None)
    assert not plan.faults, plan.faults
    return tt.distributed.shard(model, plan, **kwargs)


def _share():
    return {"share": slice(dist.get_rank(), None, dist.get_world_size()), "mean": True, "vocabulary": WORDS}


def check_training(kinds):
    """Compare with a model that views in forward, by AdamW, and with two parameters over one memory, by SGD."""
    for kind in kinds:
        make, units = KINDS[kind]
        reference = _made(partial(make, WORDS, live=True), torch.float64)
        expected = train(reference, vocabulary=WORDS)
        model = _sharded(make, units)
        assert {n for n, _ in model.named_parameters()} == {n for n, _ in reference.named_parameters()}
        compare(train(model, **_share()), expected, 1e-9)
        with torch.no_grad():  # the root stays gathered, by a forward that has no graph
            model(data(0, WORDS))
        train(model, 1, **_share())
        model.eval()(data(0, WORDS))
        model.train()

        two = _made(partial(make, WORDS), torch.float64)
        expected = train(two, vocabulary=WORDS, optimizer=torch.optim.SGD(two.parameters(), lr=0.3))
        early = _made(partial(make, WORDS), torch.float64)
        optimizer = torch.optim.SGD(early.parameters(), lr=0.3)
        tt.distributed.shard(early, tt.distributed.plan_units(early, units), optimizer=optimizer)
        tt.check_optimizer(early, optimizer)
        got = train(early, optimizer=optimizer, **_share())
        for (loss, _, mine), (wanted, _, theirs) in zip(got, expected, strict=True):
            torch.testing.assert_close(loss, wanted)
            for name, value in mine.items():
                torch.testing.assert_close(value, theirs[name])


def check_options():
    make, units = KINDS["fused"]
    reference = _made(partial(make, WORDS, live=True), torch.float64)
    expected = train(reference, vocabulary=WORDS)
    for options in (
        {"reshard_after_forward": False},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float64)},
        {"mesh": mesh_of((2, dist.get_world_size() // 2))} if dist.get_world_size() == 4 else {},
    ):
        compare(train(_sharded(make, units, **options), **_share()), expected, 1e-9)


def test_views_train_as_in_one_process():
    spawn(check_training, 3, ["turned, ends are units", "fused"], timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_views_in_other_units(world):
    spawn(check_training, world, list(KINDS), timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_options(world):
    spawn(check_options, world, timeout=200)


# -- files ------------------------------------------------------------------------------------------------------------


def _names(model):
    return {name: id(tensor) for name, tensor in model.named_parameters()}


def through_files(folder):
    for kind in ("turned", "fused"):
        make, units = KINDS[kind]
        model = _sharded(make, units, torch.float32)
        before = _names(model)
        held = {name: whole(tensor) for name, tensor in model.named_parameters()}
        state = model.state_dict()
        assert state.keys() == {name for name, _ in model.named_parameters()}
        model.load_state_dict(state)
        for format in ("safetensors", "dcp"):
            tt.distributed.save(model, folder / f"{kind} {format}", format=format)
        with pytest.raises(tt.CheckpointError, match=r"a view of it .* Save with aliases='drop'"):
            tt.distributed.save(model, folder / "copies", aliases="copy")
        for source in (f"{kind} one", f"{kind} safetensors", f"{kind} dcp", f"{kind} copies"):
            model.reshard()
            with torch.no_grad():
                for tensor in model.parameters():
                    tensor.to_local().fill_(9)
            tt.distributed.load(model, folder / source)
            assert _names(model) == before
            for name, tensor in model.named_parameters():
                assert torch.equal(whole(tensor), held[name]), (source, name)
            with tt.on_meta():
                fresh = make(WORDS)
            tt.distributed.shard(fresh, tt.distributed.plan_units(fresh, units))
            early = torch.optim.SGD(fresh.parameters(), lr=0.1)
            tt.distributed.load(fresh, folder / source)
            tt.check_optimizer(fresh, early)
            for name, tensor in fresh.named_parameters():
                assert torch.equal(whole(tensor), held[name]), (source, name)
            torch.testing.assert_close(fresh(data(0, WORDS)), model(data(0, WORDS)))
        with pytest.raises(tt.LoadError, match="has other values for it"):
            tt.distributed.load(model, folder / f"{kind} apart")
    with pytest.raises(tt.LoadError, match=r"emb\.weight: the checkpoint has only head\.weight, a view of it"):
        tt.distributed.load(_sharded(*KINDS["turned"], torch.float32), folder / "alias")


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_files_know_the_names(tmp_path, world):
    for kind in ("turned", "fused"):
        model = _made(partial(KINDS[kind][0], WORDS), torch.float32)
        tt.save(model, tmp_path / f"{kind} one")
        tt.save(model, tmp_path / f"{kind} copies", aliases="copy")
        apart = {name: tensor.detach() + i for i, (name, tensor) in enumerate(model.state_dict().items())}
        tt.save(apart, tmp_path / f"{kind} apart")
    model = _made(partial(Turned, WORDS), torch.float32)
    tt.save({n: t.detach().clone() for n, t in model.state_dict().items() if n != "emb.weight"}, tmp_path / "alias")
    spawn(through_files, world, tmp_path, timeout=200)
    for kind in ("turned", "fused"):
        one, many = (tmp_path / f"{kind} {what}" / "model.safetensors" for what in ("one", "safetensors"))
        assert many.read_bytes() == one.read_bytes()
        model = KINDS[kind][0](WORDS)
        tt.load(model, tmp_path / f"{kind} dcp")
        tt.check_ties(model)


# -- what is not there, and what cannot be ----------------------------------------------------------------------------


def check_reading():
    """Outside of forward: a transpose is a DTensor, rows are refused, and both are there while gathered."""
    model = _sharded(*KINDS["turned"])
    assert isinstance(model.head.weight, DTensor)
    assert torch.equal(model.head.weight.full_tensor(), whole(model.emb.weight).t())
    fused = _sharded(*KINDS["fused"])
    with pytest.raises(tt.TieError, match=r"few\.weight: is a view .* which is sharded now"):
        fused.few.weight  # noqa: B018
    with pytest.raises(tt.TieError, match=r"few\.weight: is a view of emb\.weight"):
        fused.few.weight = torch.zeros(7, D)
    assert isinstance(fused, FSDPModule)
    fused.unshard()
    values = fused.emb.weight
    assert torch.equal(fused.few.weight, values[3:10])
    assert fused.few.weight.requires_grad
    assert not fused.frozen.weight.requires_grad
    assert fused.probe.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    fused.reshard()
    assert type(fused.few).__name__ == "Linear"
    with pytest.raises(tt.TieError, match="under FSDP2"):
        tt.tie(model, "emb.weight", "norm.weight")


def check_failing():
    """A model that ``fully_shard`` refuses stays as it was."""
    model = _made(partial(Turned, WORDS), torch.float32)
    plan = tt.distributed.plan_units(model, Block)
    held, kind = model.head.weight, type(model.head)
    with pytest.raises(TypeError):
        tt.distributed.shard(model, plan, nonsense=True)
    assert model.head.weight is held
    assert type(model.head) is kind
    assert [str(tie) for tie in tt.find_ties(model)] == ["emb.weight = head.weight (view [16, 25] of it)"]
    other = _made(partial(Turned, WORDS), torch.float32)
    other.head.weight = nn.Parameter(other.emb.weight.detach().clone().t())
    with pytest.raises(tt.TieError, match=r"head\.weight: is not the view of emb\.weight that the plan has"):
        tt.distributed.shard(other, plan)
    with pytest.raises(
        tt.OptimizerError, match=r"head\.weight: is a view of emb\.weight, and the optimizer holds the view without"
    ):
        tt.distributed.shard(model, plan, optimizer=torch.optim.SGD([model.head.weight], lr=0.1))
    assert model.head.weight is held


def test_reading_a_view_outside_of_forward():
    spawn(check_reading, 2)


def test_a_refusal_leaves_the_model_as_it_was():
    spawn(check_failing, 2)


def _faults(model):
    return "\n".join(tt.distributed.plan_units(model, "emb", mesh=2).faults)


def test_views_that_cannot_follow_are_faults_whose_advice_works():
    model = Turned(WORDS)
    model.emb.weight.requires_grad_(False)
    assert "is frozen while the view is trained" in _faults(model)
    model.requires_grad_(False)
    assert not _faults(model)

    model = Turned(WORDS)
    tt.quantize(model, {"emb.weight": "int8"})
    said = _faults(model)
    assert "head.weight: is a view (size [16, 25]) of emb.weight, which is quantized" in said
    assert "tt.untie(model, 'head.weight')" in said
    tt.untie(model, "head.weight")
    assert "which is quantized" not in _faults(model)

    model = Turned(WORDS)
    pool = torch.randn(30, D)
    model.emb.weight, model.norm.weight = nn.Parameter(pool[:25]), nn.Parameter(pool[24])
    model.head.weight = nn.Parameter(torch.zeros(D, WORDS))
    model.more = nn.Embedding(10, D)
    model.more.weight = nn.Parameter(pool[20:])
    said = _faults(model)
    assert "more.weight: is a view (size [10, 16]) of emb.weight that reaches past it" in said
    tt.untie(model, "more.weight")
    assert not _faults(model)

    model = Turned(WORDS)
    model.register_buffer("one", torch.zeros(6, D))
    model.register_buffer("two", model.one[2:])
    assert not _faults(model)  # nobody shards buffers
    with pytest.raises(tt.TieError, match=r"head\.weight: .*FSDP1"):
        tt.distributed.plan_units(model, "emb", mesh=2).fsdp1_policy()


def test_a_view_costs_nothing():
    viewed, live = (tt.distributed.plan_units(Fused(WORDS, live=is_live), "layers.*", mesh=3) for is_live in (0, 1))
    assert viewed.held_bytes(0) == live.held_bytes(0)
    assert viewed.shard_bytes == live.shard_bytes
    assert viewed.unit_of("layers.1.q.weight").label == "layers.1"
    assert "qkv.weight = layers.0.q.weight (view [16, 16] of it)" in str(viewed)
