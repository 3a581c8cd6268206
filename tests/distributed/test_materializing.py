"""Models that are built on ``meta``, sharded, and then materialized have the values of their constructors."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import torchtether as tt
from tests.distributed.nets import Tied, tokens
from tests.distributed.spawn import spawn
from torchtether.geometry.shards import box_of, local_of


class Initialised(Tied):
    """Values that no ``reset_parameters`` would give."""

    def __init__(self):
        super().__init__()
        nn.init.trunc_normal_(self.emb.weight, std=0.02)
        nn.init.zeros_(self.body[0][0].weight)
        nn.init.orthogonal_(self.body[1][0].weight)
        self.scale = nn.Parameter(torch.full((3,), 0.5))
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.noise = nn.Parameter(torch.randn(7, 2))

    def forward(self, x):
        return super().forward(x) * self.scale.sum() + self.noise.sum()


def sharded(mesh_shape, tensor_parallel):
    with tt.on_meta():
        model = Initialised()
    mesh = None
    if mesh_shape is not None:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("outer", "inner"))
    if tensor_parallel:
        parallelize_module(model.body[1], mesh["inner"], {"0": ColwiseParallel(use_local_output=False)})
        mesh = mesh["outer"]
    for block in model.body:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def check(mesh_shape, tensor_parallel=False):
    torch.manual_seed(2)
    with tt.on_meta():
        whole = Initialised()
    expected = dict(tt.materialize(whole).named_parameters())
    model = sharded(mesh_shape, tensor_parallel)
    held = list(model.parameters())
    optimizer = torch.optim.SGD(held, lr=0.1)
    torch.manual_seed(2)
    assert tt.materialize(model) is model
    assert all(one is other for one, other in zip(model.parameters(), held, strict=True))
    assert model.head.weight is model.emb.weight
    assert 0 < expected["emb.weight"].std() < 0.03
    for name, tensor in model.named_parameters():
        part = expected[name][tuple(slice(start, stop) for start, stop in box_of(tensor))]
        assert torch.equal(local_of(tensor), part), name
    if not tensor_parallel:
        model(tokens()).sum().backward()
        optimizer.step()
        assert all(torch.isfinite(local_of(tensor)).all() for tensor in model.parameters())
    return True


@pytest.mark.parametrize("world", [1, 3])
def test_shards_are_those_of_the_constructors_values(world):
    assert all(spawn(check, world, None))


@pytest.mark.parametrize("tensor_parallel", [False, True], ids=["hybrid", "tensor parallel"])
def test_replicas_and_shards_of_shards_too(tensor_parallel):
    assert all(spawn(check, 4, (2, 2), tensor_parallel))


def other_seeds():
    """Return the parts of a hybrid-sharded model whose ranks have other seeds."""
    model = sharded((2, 2), tensor_parallel=False)
    torch.manual_seed(dist.get_rank())
    tt.materialize(model)
    return {name: local_of(tensor) for name, tensor in model.named_parameters()}


def test_replicas_are_the_same_whatever_their_seeds():
    first, second, third, fourth = spawn(other_seeds, 4)
    for one, other in ((first, third), (second, fourth)):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(first["emb.weight"][:9], second["emb.weight"][:9])
