"""Calls that torch breaks silently under FSDP2 and DDP are repaired, or refused with the order that works."""

import copy
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import torchtether as tt
from tests.distributed.models import GPT, T5, Block, Stack, Storage, data, lora, loss_of
from tests.distributed.spawn import spawn
from tests.distributed.training import compare, mesh_of, train, whole
from torchtether.ties.records import recorded_ties

WORDS = 25
UNITS = (Block, "emb", "head")


def _made(make=GPT):
    torch.manual_seed(0)
    return make(WORDS)


def _sharded(model=None, forward=True):
    model = _made() if model is None else model
    tt.distributed.shard(model, tt.distributed.plan_units(model, UNITS))
    if forward:
        loss_of(model, data(0, WORDS)).backward()
        model.zero_grad()
    return model


def _share():
    return {"share": slice(dist.get_rank(), None, dist.get_world_size()), "mean": True, "vocabulary": WORDS}


# -- converting at the wrong moment -----------------------------------------------------------------------------------


def refused(error, text, function, *args, **kwargs):
    with pytest.raises(error, match=text) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)


def check_moments():
    model = _sharded(forward=False)
    refused(tt.SchemeError, "sharded already.*Quantize the plain model, then shard it", tt.quantize, model, "int8")
    refused(tt.TieError, "under FSDP2.*before fully_shard", tt.untie, model, "head.weight")
    refused(tt.TieError, "under FSDP2", tt.tie, model, "layers.0.attn.weight", "layers.1.attn.weight")
    refused(
        tt.ConversionError, "applied already", tt.distributed.shard, model, tt.distributed.plan_units(_made(), Block)
    )
    assert tt.convert(model, dtype=torch.float64) is model  # before the first forward that is all right
    loss_of(model, data(0, WORDS)).backward()
    refused(
        tt.ConversionError, "after its first forward.*before the first forward", tt.convert, model, dtype=torch.half
    )
    with tt.swapping():
        refused(tt.ConversionError, "after its first forward", model.to, torch.bfloat16)
    assert next(model.parameters()).dtype == torch.float64
    model.to(torch.bfloat16)
    refused(tt.ConversionError, r"was torch\.float64 at the first forward.*goes back", model, data(0, WORDS))
    model.to(torch.float64)
    loss_of(model, data(0, WORDS)).backward()

    quantized = _sharded(lora(tt.int8(), WORDS))
    refused(tt.ConversionError, "is a sharded Weight.*Dequantize the plain model", tt.dequantize, quantized)
    assert [str(tie) for tie in recorded_ties(quantized)] == ["emb.weight = head.weight"]
    tt.check_ties(quantized)


def check_ddp():
    inner = nn.Sequential(nn.Embedding(6, 8), nn.Linear(8, 6, bias=False))
    inner[1].weight = inner[0].weight
    wrapped = DistributedDataParallel(inner)
    held, ddp = inner[0].weight, "DistributedDataParallel"
    refused(tt.ConversionError, ddp, tt.quantize, wrapped, "int8")
    refused(tt.ConversionError, ddp, tt.quantize, inner, "int8")
    refused(tt.ConversionError, ddp, tt.convert, inner, dtype=torch.bfloat16)
    with tt.swapping():
        refused(tt.ConversionError, ddp, wrapped.to, torch.bfloat16)
        refused(tt.ConversionError, ddp, inner.load_state_dict, inner.state_dict(), assign=True)
    assert inner[0].weight is inner[1].weight is held
    assert held.dtype == torch.float32
    for verb, call in _verbs(wrapped):
        refused(tt.ConversionError, f"cannot {verb} under {ddp}.*Give the module inside it", call)


def check_ddp_wraps():
    """Wrapping sends the values of rank 0 to all and writes them back, on rank 0 too."""
    for scheme in (tt.int8(), tt.int4(16, symmetric=True), tt.nf4(), tt.Mastered(tt.int8())):
        torch.manual_seed(0)
        inner = tt.quantize(nn.Sequential(nn.Embedding(6, 32), nn.Linear(32, 6)), {"*.weight": scheme})
        with torch.no_grad():
            inner[0].weight.add_(1e-4)  # masters have other values than codes now
        before = [part.clone() for weight in (inner[0].weight, inner[1].weight) for part in weight.parts.values()]
        DistributedDataParallel(inner)
        after = [part for weight in (inner[0].weight, inner[1].weight) for part in weight.parts.values()]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True)), scheme


def _verbs(model):
    """Return the calls of ``tt.distributed`` on ``model`` that need its parameters, each with its verb."""
    verbs = tt.distributed
    with tempfile.TemporaryDirectory() as folder:
        tt.save({"weight": torch.ones(2)}, folder)
        yield "load", partial(verbs.load, model, folder)
        yield "plan", partial(verbs.plan_units, model, nn.Linear)
        yield "save", partial(verbs.state_dict, model)
        for format in ("safetensors", "dcp"):
            yield "save", partial(verbs.save, model, f"{folder}/{format}", format=format)
            assert not Path(folder, format).exists()


def test_converting_at_the_wrong_moment_is_refused():
    spawn(check_moments, 2)


def test_ddp_is_refused_before_anything_changes():
    spawn(check_ddp, 2)


def test_wrapping_in_ddp_changes_no_code():
    spawn(check_ddp_wraps, 2)


# -- loading behind FSDP2's back --------------------------------------------------------------------------------------


def check_loads():
    """Stock loads in the middle of training: the run goes on as in one process that loads the same."""
    source = _made(lambda words: GPT(words))
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(0.5)
    given = copy.deepcopy(source.state_dict())
    reference = _made()
    train(reference, 1, vocabulary=WORDS)
    reference.load_state_dict(given)
    expected = train(reference, 2, vocabulary=WORDS)
    for assigns, swaps, keys in [
        (False, False, "both"),
        (False, True, "both"),
        (True, True, "both"),
        (True, True, "alias"),
        (False, False, "alias"),
    ]:
        state = {n: t for n, t in given.items() if keys == "both" or n != "emb.weight"}
        model = _sharded(forward=False)
        train(model, 1, **_share())
        objects = list(model.parameters())
        if assigns:
            target = _sharded(_made(), forward=False).state_dict()
            for name in state:  # assignment needs DTensors
                target[name].copy_(_like(state[name], target[name]))
            state = {name: target[name].clone() for name in state}  # one tensor per key, as a loader gives them
            torch.__future__.set_swap_module_params_on_conversion(swaps)
            try:
                model.load_state_dict(state, assign=True, strict=False)
            finally:
                torch.__future__.set_swap_module_params_on_conversion(False)
        else:
            placed = {name: _like(value, dict(model.state_dict())[name]) for name, value in state.items()}
            model.load_state_dict(placed, strict=False)
        assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
        compare(train(model, 2, **_share()), expected, 1e-4)


def _like(value, held):
    return distribute_tensor(value, held.device_mesh, held.placements)


def check_assign():
    model = _sharded()
    state = model.state_dict()
    refused(
        tt.ConversionError,
        "would replace the parameters.*tt.distributed.load",
        model.load_state_dict,
        state,
        assign=True,
    )
    # before the first forward it is allowed, and every name is the object that FSDP2 gathers
    fresh = _sharded(forward=False)
    alias = {n: t.clone() for n, t in state.items() if n != "emb.weight"}
    fresh.load_state_dict(alias, assign=True, strict=False)
    assert fresh.head.weight is fresh.emb.weight
    assert torch.equal(whole(fresh.emb.weight), whole(alias["head.weight"]))
    torch.testing.assert_close(fresh(data(0, WORDS)), model(data(0, WORDS)))


def check_replaced():
    """Memory that was put under a parameter by hand is what the next forward gathers."""
    model, other = _sharded(), _sharded()
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine._local_tensor = theirs._local_tensor.clone() * 2
    for parameter in other.parameters():
        parameter.detach().mul_(2)
    torch.testing.assert_close(model(data(0, WORDS)), other(data(0, WORDS)))


def test_stock_loads_in_the_middle_of_training():
    spawn(check_loads, 2, timeout=120)


def test_assigning_is_refused_or_mended():
    spawn(check_assign, 2)


def compile_whole():
    """The compiler traces the hooks of a model that is compiled as a whole; the embedding's rows do not divide."""
    model = _made()
    tt.quantize(model, {"emb.weight": "int8"})
    wanted = model(data(0)).detach()
    tt.distributed.shard(model, tt.distributed.plan_units(model, UNITS))
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend="eager")(data(0)), wanted)


def test_the_hooks_are_not_compiled():
    spawn(compile_whole, 2)


def test_memory_that_was_replaced_is_found():
    spawn(check_replaced, 2)


# -- ties, optimizers, tensor parallelism, FSDP1 ----------------------------------------------------------------------


def check_optimizers():
    model = _made()
    early = torch.optim.AdamW(model.parameters())
    tt.distributed.shard(model, tt.distributed.plan_units(model, UNITS))
    refused(tt.OptimizerError, "are trainable, but not in the optimizer", tt.check_optimizer, model, early)
    tt.check_optimizer(model, torch.optim.AdamW(model.parameters()))
    stepped = _made()
    optimizer = torch.optim.AdamW(stepped.parameters())
    loss_of(stepped, data(0, WORDS)).backward()
    optimizer.step()
    plan = tt.distributed.plan_units(stepped, UNITS)
    refused(tt.OptimizerError, "has state", tt.distributed.shard, stepped, plan, optimizer=optimizer)
    stored = _made(Storage)
    plan = tt.distributed.plan_units(stored, UNITS)
    tt.distributed.shard(stored, plan)
    assert stored.head.weight is stored.emb.weight
    assert len(list(stored.parameters())) == len(list(_made().parameters()))


def check_parallel():
    """parallelize_module unties without a word; shard ties again, and training is that of one process."""
    reference = _made(partial(GPT, layers=1))
    expected = train(reference, vocabulary=WORDS)
    mesh = mesh_of((2, 2))
    data_mesh, tensor_mesh = mesh["replica"], mesh["shard"]
    model = _made(partial(GPT, layers=1))
    plan = tt.distributed.plan_units(model, ("emb", "head", Block), mesh=data_mesh)
    styles = {"emb": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, tensor_mesh, styles)
    assert model.head.weight is not model.emb.weight
    tt.distributed.shard(model, plan)
    assert model.head.weight is model.emb.weight
    got = train(model, vocabulary=WORDS, share=slice(data_mesh.get_local_rank(), None, 2), mean=True)
    compare(got, expected, 1e-4)

    other = _made(partial(GPT, layers=1))
    plan = tt.distributed.plan_units(other, ("emb", "head", Block), mesh=data_mesh)
    parallelize_module(other, tensor_mesh, {"emb": ColwiseParallel(), "head": ColwiseParallel()})
    refused(tt.TieError, "head.weight: has placements.*same placement", tt.distributed.shard, other, plan)


def check_wrapped(folder):
    """A module around a tied quantized model, as PEFT makes, has other names than the tie record; so has a part."""
    outer = nn.Sequential(lora(tt.int8(), WORDS))
    plan = tt.distributed.plan_units(outer, "0.layers.*")
    assert not plan.faults
    assert [str(tie) for tie in plan.ties] == ["0.emb.weight = 0.head.weight"]
    tt.distributed.shard(outer, plan)
    tt.check_ties(outer)
    tt.distributed.save(outer, folder)
    assert "0.emb.weight = 0.head.weight" in [str(tie) for tie in tt.open(folder).ties]
    whole = nn.Sequential(GPT(WORDS))
    tt.quantize(whole, {"0.emb.weight": "int8"})
    assert not tt.distributed.plan_units(whole[0], Block).faults


def check_fsdp1():
    for make, units in ((GPT, (Block, "emb", "head")), (partial(T5, shares_module=False), (Stack, Block))):
        reference = _made(make)
        expected = train(reference, vocabulary=WORDS)
        model = _made(make)
        plan = tt.distributed.plan_units(model, units)
        wrapped = FullyShardedDataParallel(
            model, auto_wrap_policy=plan.fsdp1_policy(), use_orig_params=True, device_id=torch.device("cpu")
        )
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.02)
        for step in range(3):
            ids = data(step, WORDS)[dist.get_rank() :: dist.get_world_size()]
            loss = loss_of(wrapped, ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            value = loss.detach().clone()
            dist.all_reduce(value)
            torch.testing.assert_close(value / dist.get_world_size(), expected[step][0], rtol=1e-4, atol=1e-4)
        assert any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
        refused(tt.ConversionError, "FSDP1", tt.convert, wrapped, dtype=torch.float64)
        for verb, call in _verbs(wrapped):
            refused(tt.ConversionError, rf"cannot {verb} under .*\(FSDP1\).*Use fully_shard", call)


def check_plan_fits():
    plan = tt.distributed.plan_units(_made(), UNITS)
    larger = GPT(WORDS + 1)
    refused(tt.TieError, r"emb\.weight: is .* the plan has", tt.distributed.shard, larger, plan)
    untied = _made()
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone() + 1)
    refused(tt.TieError, r"head\.weight: is not tied to emb\.weight.*Call tt\.tie", tt.distributed.shard, untied, plan)
    more = _made()
    more.layers[1].attn.weight = more.layers[0].attn.weight
    refused(tt.TieError, "but not in the plan", tt.distributed.shard, more, plan)
    wrong = tt.distributed.plan_units(_made(), UNITS, mesh=8)
    refused(tt.TieError, "the mesh has 2 ranks.*the plan is for 8", tt.distributed.shard, _made(), wrong)
    quantized = lora(tt.int8(), WORDS)
    refused(tt.TieError, "not in the", tt.distributed.shard, quantized, plan)
    # the mistake that torch reports at the first forward only, found at once by the ties that are left
    split = _made()
    for module in (split.emb, split.head):
        fully_shard(module)
    assert not tt.find_ties(split)


def test_optimizers_follow_or_are_refused():
    spawn(check_optimizers, 2)


def test_tensor_parallel_ties_are_restored():
    spawn(check_parallel, 4, timeout=120)


def test_names_may_have_changed_since_a_tie_was_recorded(tmp_path):
    spawn(check_wrapped, 2, str(tmp_path / "x"))


def test_fsdp1_gets_a_policy_that_keeps_ties():
    spawn(check_fsdp1, 2)


def test_a_plan_of_another_model_is_refused():
    spawn(check_plan_fits, 2)
