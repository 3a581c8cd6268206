"""Training on ranks compared with training in one process, step by step; runs inside spawned processes."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import torchtether as tt
from tests.distributed.models import data, loss_of

STEPS = 3


def whole(tensor):
    """Return the values of a parameter, gathered if it is sharded."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.dequantize() if isinstance(tensor, tt.Weight) else tensor.clone()


def mesh_of(shape):
    names = ("replica", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def train(model, steps=STEPS, *, vocabulary=24, share=slice(None), mean=False, context=nullcontext, optimizer=None):
    """Train ``steps`` steps on ``share`` of each batch; return losses, and gradients and weights after each step."""
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    told = []
    for step in range(steps):
        with context():
            loss = loss_of(model, data(step, vocabulary)[share])
        loss.backward()
        grads = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        value = loss.detach().clone()
        if mean:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        told.append((value, grads, {n: whole(p) for n, p in model.named_parameters()}))
    return told


def compare(got, expected, tolerance):
    """Assert that all losses, gradients and weights are equal, under the same names."""
    for step, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        torch.testing.assert_close(
            ours[0].to(theirs[0].dtype), theirs[0], rtol=tolerance, atol=tolerance, msg=f"loss {step}"
        )
        for what, mine, other in (("grad", ours[1], theirs[1]), ("weight", ours[2], theirs[2])):
            assert mine.keys() == other.keys(), (what, mine.keys() ^ other.keys())
            for name, value in mine.items():
                told = f"{what} of {name} after step {step}"
                torch.testing.assert_close(
                    value, other[name], rtol=tolerance, atol=tolerance, msg=lambda m, t=told: f"{t}: {m}"
                )


def check_training(
    make, unit_types, *, policy="group", shape=None, vocabulary=24, dtype=torch.float64, tolerance=1e-9, traced=True,
    early_optimizer=False, **kwargs,
):  # fmt: skip
    """Assert that ``make()`` trains on the ranks of this group, each with a share of every batch, as in one process."""
    model, reference = _made(make, dtype), _made(make, dtype)  # deepcopy would untie memory
    expected = train(reference, vocabulary=vocabulary)
    mesh = mesh_of(shape or (dist.get_world_size(),))
    inputs = (data(0, vocabulary),) if traced else None
    plan = tt.distributed.plan_units(model, unit_types, mesh=mesh, policy=policy, inputs=inputs)
    assert not plan.faults, plan.faults
    optimizer = None
    if early_optimizer:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    before = tt.find_ties(model)
    tt.distributed.shard(model, plan, optimizer=optimizer, **kwargs)
    for tie in before:
        assert len({id(t) for n, t in model.named_parameters(remove_duplicate=False) if n in tie.names}) == 1
    if optimizer is not None:
        tt.check_optimizer(model, optimizer)
    rank, world = dist.get_rank(), dist.get_world_size()
    got = train(model, vocabulary=vocabulary, share=slice(rank, None, world), mean=True, optimizer=optimizer)
    compare(got, expected, tolerance)
    return [unit.label for unit in plan.units]


def _made(make, dtype):
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)  # .to() would untie buffers
    try:
        return make()
    finally:
        torch.set_default_dtype(before)


def check_cases(cases):
    """Run each (id, make, unit types, options) in turn; an error has the id."""
    labels = {}
    for name, make, unit_types, options in cases:
        try:
            labels[name] = check_training(make, unit_types, **options)
        except Exception as error:
            raise AssertionError(f"{name} on {dist.get_world_size()} ranks: {type(error).__name__}: {error}") from error
    return labels
