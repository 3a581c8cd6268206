"""The wrapper of ``torch.compile`` is seen through: names have no prefix, and what is returned is the wrapper still."""

import copy
import sys
import types

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import torchtether as tt
from tests.distributed.spawn import spawn
from torchtether import distributed


def _tied():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 64), nn.Linear(64, 32, bias=False))
    model[2].weight = model[0].weight
    return model


@pytest.fixture
def model():
    return _tied()


@pytest.fixture
def wrapper(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("save", [tt.save, distributed.save])
def test_files_are_those_of_the_model(model, wrapper, tmp_path, save):
    save(wrapper, tmp_path / "wrapped")
    save(model, tmp_path / "plain")
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert sorted(path.name for path in (tmp_path / "wrapped").iterdir()) == names
    for name in names:
        assert (tmp_path / "wrapped" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


@pytest.mark.parametrize("load", [tt.load, distributed.load])
def test_loads_fill_the_model(model, wrapper, tmp_path, load):
    tt.save(_tied().double().float().requires_grad_(False), tmp_path)
    wanted = model(torch.arange(4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load(wrapper, tmp_path)
    assert torch.equal(wrapper(torch.arange(4)), wanted)
    assert model[2].weight is model[0].weight
    assert str(tt.plan_load(wrapper, tmp_path)) == str(tt.plan_load(model, tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: tt.convert(model, dtype=torch.bfloat16),
        lambda model: tt.quantize(model, {"1.weight": "int8", "0.weight": tt.int4()}),
        lambda model: tt.quantize_activations(tt.quantize(model, {"1.weight": "int8"}), "int8"),
        lambda model: tt.dequantize(tt.quantize(model, "int8")),
        lambda model: tt.materialize(tt.convert(model, device="meta"), init=_fill),
    ],
    ids=["convert", "quantize", "quantize_activations", "dequantize", "materialize"],
)
def test_changes_are_those_of_the_model(change):
    plain = _tied()
    wrapper = torch.compile(copy.deepcopy(plain), backend="eager")
    assert change(wrapper) is wrapper
    change(plain)
    assert tt.find_ties(wrapper) == tt.find_ties(plain) != ()
    tt.check_ties(wrapper)
    x = torch.arange(4)
    assert torch.equal(wrapper(x), plain(x))
    assert str(tt.storage_map(wrapper)) == str(tt.storage_map(plain))


def _fill(module):
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)


def test_names_in_errors_are_those_of_the_model(model, wrapper):
    with pytest.raises(tt.OptimizerError, match=r"^0\.weight"):
        tt.check_optimizer(wrapper, torch.optim.SGD(model[1].parameters(), lr=0.1))
    tt.untie(wrapper, "2.weight")
    assert tt.find_ties(wrapper) == ()
    tt.tie(wrapper, "0.weight", "2.weight")
    assert len(tt.find_ties(wrapper)) == 1


def test_units_and_state_dicts_have_the_names_of_the_model(model, wrapper, tmp_path):
    found = distributed.plan_units(wrapper, ["1"], mesh=2)
    assert str(found) == str(distributed.plan_units(model, ["1"], mesh=2))
    state, wanted = distributed.state_dict(wrapper), distributed.state_dict(model)
    assert state.keys() == wanted.keys() == {"0.weight", "1.weight", "1.bias", "torchtether"}
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    distributed.save(wrapper, tmp_path / "dcp", format="dcp")
    assert tt.load(_tied(), tmp_path / "dcp").missing_keys == ()
    distributed.resync(wrapper)


def _shards():
    """Shard the wrapper of a model whose tie was lost, and train it for a step."""
    model = _tied()
    wrapper = torch.compile(model, backend="eager")
    plan = distributed.plan_units(wrapper, "1")
    model[2].weight = nn.Parameter(model[0].weight.detach())
    distributed.restore_ties(wrapper, plan.ties)
    assert model[2].weight is model[0].weight
    assert distributed.shard(wrapper, plan) is wrapper
    assert isinstance(model[1], FSDPModule)
    assert model[2].weight is model[0].weight
    found = wrapper(torch.arange(4))
    found.sum().backward()
    distributed.resync(wrapper)
    return found.tolist(), model[0].weight.grad.full_tensor().tolist()


@pytest.mark.slow
def test_a_wrapper_is_sharded_as_the_model_is():
    model = _tied()
    wanted = model(torch.arange(4))
    wanted.sum().backward()
    for found, grad in spawn(_shards, 2):
        torch.testing.assert_close(torch.tensor(found), wanted)
        torch.testing.assert_close(torch.tensor(grad), model[0].weight.grad)


def test_a_refit_takes_the_names_of_the_model(model, wrapper):
    source = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    report = tt.refit(wrapper, source)
    assert set(report.names) == set(source) - {"2.weight"}
    assert torch.equal(model[1].bias, source["1.bias"])


def test_a_call_while_another_thread_imports_the_compiler(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._dynamo.eval_frame", types.ModuleType("eval_frame"))
    assert tt.find_ties(nn.Linear(2, 2)) == ()
