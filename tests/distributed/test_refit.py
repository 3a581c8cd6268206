"""``tt.refit`` on several ranks: from a sharded trainer to a rollout on one rank or all, sharded or not."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torchtether as tt
import torchtether.distributed
from tests.distributed.nets import Tied, build, same_rows, step, tokens
from tests.distributed.spawn import spawn

RULES = {"emb.weight": "int8", "body.0.0.weight": tt.int4(group_size=16), "body.1.0.weight": tt.fp8()}


def one_model(seed, rules=None):
    torch.manual_seed(seed)
    model = Tied()
    return model if rules is None else tt.quantize(model, rules)


def trained():
    """Return a model that two ranks have trained for some steps, and its tensors as one process would hold them."""
    torch.manual_seed(5)
    trainer = build(on_meta=False)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-2)
    for _ in range(2):
        step(trainer, optimizer)
    trainer.reshard()
    whole = one_model(0)
    whole.load_state_dict(
        {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in trainer.state_dict().items()}
    )
    return trainer, whole


def is_same(model, wanted):
    found, named = (dict(m.named_parameters()) | dict(m.named_buffers()) for m in (model, wanted))
    return found.keys() == named.keys() and all(same_rows(tensor, named[name]) for name, tensor in found.items())


# -- a rollout that is not sharded ------------------------------------------------------------------------------------


def streams():
    """Both ranks train, and the first also has the rollout; at most one whole tensor is held at a time."""
    trainer, whole = trained()
    wanted = tt.quantize(whole, RULES)

    def pieces():
        for name, tensor in trainer.state_dict().items():
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    if dist.get_rank():
        assert len(list(pieces())) == len(trainer.state_dict())
        return None
    rollout = one_model(1, RULES)
    before = [part.data_ptr() for weight in rollout.parameters() if isinstance(weight, tt.Weight)
              for part in weight.parts.values()]  # fmt: skip
    report = tt.refit(rollout, pieces())
    assert is_same(rollout, wanted)
    assert rollout.head.weight is rollout.emb.weight
    assert torch.equal(rollout.eval()(tokens()), wanted.eval()(tokens()))
    assert before == [part.data_ptr() for weight in rollout.parameters() if isinstance(weight, tt.Weight)
                      for part in weight.parts.values()]  # fmt: skip
    return report.waiting


def test_a_sharded_trainer_streams_to_a_rollout_of_one_rank():
    assert spawn(streams, 2)[0] == 0


def reads_shards():
    """Every rank has a rollout and reads the trainer's shards one after the other, also along other dims."""
    trainer, whole = trained()
    wanted = tt.quantize(whole, RULES)
    reports = []
    for source in (trainer.state_dict(), trainer.state_dict().items()):
        rollout = one_model(1, RULES)
        reports.append(tt.refit(rollout, source))
        assert is_same(rollout, wanted)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for placement in (Shard(1), Replicate()):
        rollout = one_model(1, RULES)
        state = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in trainer.state_dict().items()}
        for name in [name for name, tensor in state.items() if tensor.dim() == 2]:
            state[name] = distribute_tensor(state[name], mesh, [placement])
        reports.append(tt.refit(rollout, state))
        assert is_same(rollout, wanted)
    fused = {f"w{i}": distribute_tensor(torch.randn(5, 16), mesh, [Shard(0)]) for i in range(3)}
    layer = torch.nn.Linear(16, 15, bias=False)
    for source in (fused, fused.items()):
        rollout = tt.quantize(torch.nn.Linear(16, 15, bias=False), "int8")
        tt.refit(rollout, source, rename=tt.Concat(["^w0$", "^w1$", "^w2$"], "weight"))
        layer.weight.data = torch.cat([one.full_tensor() for one in fused.values()])
        assert torch.equal(rollout.weight.dequantize(), tt.Weight.encode(layer.weight, tt.int8()).dequantize())
    return [report.checksums for report in reports]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_shards_are_read_in_turn_and_ranks_agree(world):
    found = spawn(reads_shards, world)
    assert all(checksums == found[0][0] for reports in found for checksums in reports)


# -- a sharded rollout ------------------------------------------------------------------------------------------------


def fills_own_rows(path):
    """A rollout of sharded Weights is filled from a path, whole tensors, pieces and the trainer's own shards."""
    rules = {"emb.weight": "int8", "body.0.0.weight": tt.int4(group_size=16)}
    trainer, whole = trained()
    tt.distributed.save(trainer, path)
    state = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in trainer.state_dict().items()}
    wanted = tt.quantize(whole, rules)
    expected = wanted(tokens())
    for source in (path, state, list(state.items()), trainer.state_dict(), list(trainer.state_dict().items())):
        rollout = build(on_meta=False, quantize=rules)
        rollout(tokens())
        rollout.reshard()
        before = [
            (id(p), part.data_ptr())
            for p in rollout.parameters()
            for part in getattr(p.to_local(), "parts", {"": p.to_local()}).values()
        ]
        report = tt.refit(rollout, source, atomic="full")
        assert before == [
            (id(p), part.data_ptr())
            for p in rollout.parameters()
            for part in getattr(p.to_local(), "parts", {"": p.to_local()}).values()
        ]
        found = dict(rollout.named_parameters()) | dict(rollout.named_buffers())
        named = dict(wanted.named_parameters()) | dict(wanted.named_buffers())
        assert is_same(rollout, wanted), (type(source), [n for n in found if not same_rows(found[n], named[n])])
        assert torch.allclose(rollout(tokens()), expected, atol=1e-5)
        assert set(report.encoded) == set(rules)


def test_a_sharded_rollout_takes_its_own_rows(tmp_path):
    spawn(fills_own_rows, 2, tmp_path / "trainer")


def refuses():
    """Values that one rank's scheme cannot hold stop all ranks; a DTensor sharded otherwise is refused in one line."""
    rollout = build(on_meta=False, quantize={"emb.weight": "int8"})
    before = [p.to_local().clone() for p in rollout.parameters()]
    state = dict(one_model(3).state_dict())
    bad = state["emb.weight"].clone()
    bad[-1, 0] = float("nan")  # of the last rank
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    turned = distribute_tensor(state["emb.weight"], mesh, [Shard(1)])
    for value, text in ((bad, "not finite"), (turned, "Shard both alike")):
        given = state | {"emb.weight": value, "head.weight": value}
        with pytest.raises(tt.LoadError, match=text) as caught:
            tt.refit(rollout, given)
        assert "\n" not in str(caught.value)
        with pytest.raises(tt.LoadError, match=text):
            tt.refit(rollout, given.items(), atomic="full")
        for p, old in zip(rollout.parameters(), before, strict=True):
            local = p.to_local()
            parts = (
                zip(local.parts.values(), old.parts.values(), strict=True)
                if isinstance(local, tt.Weight)
                else [(local, old)]
            )
            assert all(torch.equal(one, other) for one, other in parts)


def test_what_stops_one_rank_stops_all_before_the_first_change():
    spawn(refuses, 2)


def stops():
    """Refit from tensors that end early on rank 1; return what this rank says, and whether a value has changed."""
    rollout = build(on_meta=False, quantize={})
    with torch.no_grad():
        for parameter in rollout.parameters():
            parameter.fill_(0.25)

    def arriving():
        yield from one_model(3).state_dict().items()
        if dist.get_rank() == 1:
            raise ValueError("rank one had enough")

    with pytest.raises(tt.LoadError) as caught:
        tt.refit(rollout, arriving())
    return str(caught.value), any(bool((p.to_local() != 0.25).any()) for p in rollout.parameters())


def test_a_rank_that_stops_after_others_have_written_is_not_said_to_have_changed_nothing():
    for text, is_changed in spawn(stops, 2):
        assert "rank one had enough" in text
        assert is_changed
        assert "Nothing was done" not in text
        assert "\n" not in text


def lacks(folder):
    """Refit from a path that is absent on rank 1; return what this rank says."""
    rollout = build(on_meta=False, quantize={"emb.weight": "int8"})
    try:
        tt.refit(rollout, folder / ("here", "absent")[dist.get_rank()])
    except tt.TetherError as error:
        return str(error)


def test_no_rank_waits_for_one_that_cannot_open_the_source(tmp_path):
    tt.save(one_model(3), tmp_path / "here")
    one, two = spawn(lacks, 2, tmp_path, timeout=20.0)
    assert "absent: there is no such file or folder" in two
    assert one.startswith("rank 1 failed: ")
    assert two in one


def test_rows_that_cut_a_block_are_refused():
    assert "cut a block" in spawn(cuts, 2)[0]


def cuts():
    torch.manual_seed(0)
    layer = tt.quantize(torch.nn.Linear(16, 8, bias=False), tt.Affine(block=(4, 16)))
    fully_shard(layer)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wide = tt.quantize(torch.nn.Linear(16, 10, bias=False), tt.int8())
    fully_shard(wide, mesh=mesh)
    tt.refit(wide, {"weight": torch.randn(10, 16)})
    tt.refit(layer, {"weight": torch.randn(8, 16)})
    try:
        odd = tt.quantize(torch.nn.Linear(16, 12, bias=False), tt.Affine(block=(4, 16)))
        fully_shard(odd)
        tt.refit(odd, {"weight": torch.randn(12, 16)})
    except tt.TetherError as error:
        return str(error)
    return ""
