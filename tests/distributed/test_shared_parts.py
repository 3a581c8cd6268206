"""Sharded Weights with one scale for all rows: no rank changes its copy of the scale alone."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import torchtether as tt
from tests.distributed.spawn import spawn
from tests.distributed.training import mesh_of, whole

REFUSED = r"these rows share their part '(global_)?scale' with other rows of the Weight, and it would change"


def _made(scheme, rows, master=None):
    torch.manual_seed(0)
    return tt.quantize(nn.Linear(16, rows, bias=False), scheme, master=master)


def _refused(write):
    with torch.no_grad(), pytest.raises((tt.UnsupportedOpError, RuntimeError), match=REFUSED):
        write()


def _new(rows):
    """Return values of which every row would change the scale, wherever the rows lie."""
    return torch.full((rows, 16), 9.0) + torch.arange(rows)[:, None]


def check_writes(scheme, rows):
    """Every way to write floats into a shard is refused, and leaves the values that one process has."""
    expected, new = _made(scheme, rows).weight.dequantize(), _new(rows)
    model = fully_shard(_made(scheme, rows).requires_grad_(False))
    held, mesh = model.weight, model.weight.device_mesh
    for write in (
        lambda: held.mul_(3),
        lambda: held.copy_(distribute_tensor(new, mesh, [Shard(0)])),
        lambda: model.load_state_dict({"weight": distribute_tensor(new, mesh, [Shard(0)])}),
        lambda: held.clone().mul_(3),
        lambda: held.to(torch.bfloat16).mul_(3),
    ):
        _refused(write)
        assert torch.equal(whole(held), expected)
    model.load_state_dict(fully_shard(_doubled(scheme, rows)).state_dict())  # shards of another Weight
    assert torch.equal(whole(held), _doubled(scheme, rows).weight.dequantize())
    _refused(lambda: held.mul_(3))
    tt.refit(model, {"weight": new})
    one = _made(scheme, rows)
    tt.refit(one, {"weight": new})
    assert torch.equal(whole(held), one.weight.dequantize())
    assert torch.equal(model(torch.eye(16)), one(torch.eye(16)))
    held.zero_()  # no scale has to change
    assert not whole(held).any()


def _doubled(scheme, rows):
    model = _made(scheme, rows).requires_grad_(False)
    with torch.no_grad():
        model.weight.copy_(model.weight.dequantize() * 2)
    return model


def check_loaded(scheme, rows, folder):
    """Shards that ``tt.distributed.load`` made refuse writes, too."""
    if dist.get_rank() == 0:
        tt.save(_made(scheme, rows), folder)
    dist.barrier()
    with torch.device("meta"):
        model = fully_shard(nn.Linear(16, rows, bias=False))
    tt.distributed.load(model, folder)
    assert torch.equal(whole(model.weight), _made(scheme, rows).weight.dequantize())
    _refused(lambda: model.weight.mul_(3))
    model(torch.eye(16))
    model.reshard()
    _refused(lambda: model.weight.mul_(3))


def check_dtensors(scheme, rows):
    """A scattered shard refuses writes; one that each rank cut by itself is not gathered with different scales."""
    weight, mesh = _made(scheme, rows).weight.detach(), mesh_of((dist.get_world_size(),))
    scattered = distribute_tensor(weight, mesh, [Shard(0)])
    _refused(lambda: scattered.mul_(3))
    assert torch.equal(whole(scattered), weight.dequantize())
    cut = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
    assert torch.equal(whole(cut), weight.dequantize())
    cut.to_local().copy_(_new(len(cut.to_local())) * (1 + dist.get_rank()))
    with pytest.raises(tt.UnsupportedOpError, match=r"the ranks have different values of the part '(global_)?scale'"):
        cut.full_tensor()


def check_training(scheme, master):
    """An optimizer is refused, and the plan says so before; a scale per row trains as on one process."""
    model = _made(scheme, 8, master)
    (fault,) = tt.distributed.plan_units(model, "", mesh=2).faults
    assert fault.startswith("weight: ")
    assert "cannot train" in fault
    assert not tt.distributed.plan_units(model, "", mesh=1).faults
    assert not tt.distributed.plan_units(_made("int8", 8), "", mesh=2).faults
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=9.0)
    model(torch.eye(16)).square().sum().backward()
    _refused(optimizer.step)


def check_one_rank(scheme):
    """A single rank has all rows, and writes what it likes."""
    model, reference = (_made(scheme, 6).requires_grad_(False) for _ in range(2))
    fully_shard(model)
    scattered = distribute_tensor(reference.weight.detach().clone(), mesh_of((1,)), [Shard(0)])
    with torch.no_grad():
        for held in (model.weight, reference.weight, scattered):
            held.mul_(3)
    assert torch.equal(whole(model.weight), reference.weight.dequantize())
    assert torch.equal(whole(scattered), reference.weight.dequantize())


SHARED = [tt.fp8("tensor"), tt.nvfp4()]


def check_all(folder):
    for i, scheme in enumerate(SHARED):
        for rows in (6, 7):
            check_writes(scheme, rows)
            check_loaded(scheme, rows, f"{folder}/{i}-{rows}")
            check_dtensors(scheme, rows)
        for master in (None, torch.float32):
            check_training(scheme, master)


def test_a_scale_for_all_rows_never_differs_between_ranks(tmp_path):
    spawn(check_all, 2, str(tmp_path))


@pytest.mark.parametrize("scheme", SHARED, ids=str)
def test_one_rank_writes_all_rows(scheme):
    spawn(check_one_rank, 1, scheme)
