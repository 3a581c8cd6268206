"""Weights of every scheme under FSDP2 and DTensor: rows that do not divide, meshes, dtypes, offload, full tensors."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import torchtether as tt
from tests.catalog import SCHEMES, each_quantized
from tests.distributed.spawn import spawn
from tests.distributed.training import mesh_of, whole
from torchtether.weights.ops.sharding import cut_block

WIDTH = 64


class Tied(nn.Module):
    """A frozen Weight under two names, and an adapter between them."""

    def __init__(self, scheme, rows):
        super().__init__()
        self.emb = nn.Embedding(rows, WIDTH)
        self.head = nn.Linear(WIDTH, rows, bias=False)
        self.head.weight = self.emb.weight
        tt.quantize(self, {"emb.weight": scheme})
        self.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(WIDTH, 2) / 8)
        self.up = nn.Parameter(torch.randn(2, WIDTH) / 8)

    def forward(self, ids):
        x = self.emb(ids)
        return self.head(x + (x @ self.down.to(x.dtype)) @ self.up.to(x.dtype))


def _made(scheme, rows, activations=None):
    torch.manual_seed(0)
    model = Tied(scheme, rows)
    return model if activations is None else tt.quantize_activations(model, activations)


def _train(model, rows, steps=2):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    told = []
    for step in range(steps):
        ids = torch.arange(step, step + 8) % rows
        loss = F.cross_entropy(model(ids).float(), ids.roll(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    return told


def check_scheme(name, scheme, rows, mesh=None, reference_dtype=None, activations=None, **kwargs):
    """All ranks see the same batch, so that losses are those of one process."""
    model, reference = _made(scheme, rows, activations), _made(scheme, rows, activations)
    values = reference.emb.weight.dequantize().clone()
    told = f"{name}, {rows} rows, {dist.get_world_size()} ranks"
    if reference_dtype is not None:
        reference.to(reference_dtype)
    expected = _train(reference, rows)
    fully_shard(model, mesh=mesh or mesh_of((dist.get_world_size(),)), **kwargs)
    assert model.head.weight is model.emb.weight, told
    got = _train(model, rows)
    # the reference trains in bf16, sharded masters in float32; where inputs are rounded, some last bits move a step
    tolerance = 0.01 if reference_dtype else 1e-3 if activations else 1e-5
    close = (abs(a - b) <= tolerance * max(abs(b), 1) for a, b in zip(got, expected, strict=True))
    assert all(close), (told, got, expected)
    model.reshard()
    held = model.emb.weight
    assert isinstance(held._local_tensor, tt.Weight), told
    assert held._local_tensor.tie == reference.emb.weight.tie, told
    assert held._local_tensor.spec.activations == activations, told
    full = held.full_tensor()
    assert isinstance(full, tt.Weight), told
    assert full.scheme == scheme, told
    assert torch.equal(full.dequantize(), values), told
    tt.check_ties(model)
    return held


def check_schemes(named, sizes):
    for name, scheme, size in ((name, scheme, size) for name, scheme in named for size in sizes):
        if cut_block(scheme.layout((size, WIDTH)), (size, WIDTH), dist.get_world_size()) is None:
            check_scheme(name, scheme, size)


def check_refusals(named):
    """Plan and torch's own call refuse a Weight that cannot be cut, and no rank waits for another."""
    for name, scheme in named:
        model = _made(scheme, 101)
        plan = tt.distributed.plan_units(model, nn.Linear)
        assert len(plan.faults) == len(model.emb.weight.tie.names), name
        assert "cannot be split over 2 ranks" in plan.faults[0]
        with pytest.raises(tt.TieError, match="the plan has 2 faults"):
            tt.distributed.shard(model, plan)
        with pytest.raises(tt.UnsupportedOpError, match="cut a block"):
            fully_shard(model)


def check_options(schemes):
    world = dist.get_world_size()
    for name, scheme in schemes:
        check_scheme(f"{name}, HSDP", scheme, 101, mesh=mesh_of((2, world // 2)))
        check_scheme(f"{name}, kept", scheme, 101, reshard_after_forward=False)
        check_scheme(f"{name}, offload", scheme, 101, offload_policy=CPUOffloadPolicy(pin_memory=False))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        held = check_scheme(f"{name}, bf16", scheme, 101, reference_dtype=torch.bfloat16, mp_policy=policy)
        assert held.dtype == torch.float32
        _check_distribute(name, scheme)
        _check_state_dict(name, scheme)
        if not scheme.transparent:
            sharded = check_scheme(f"{name}, rounding", scheme, 101, activations="int8")
            assert sharded.full_tensor().spec.activations == "int8"
    _check_activations()
    _check_int()
    _check_trainable()


def _check_activations():
    """Rounded activations change results, which ``check_scheme`` does not cover; they are set before sharding."""
    exact, rounds = _made(tt.int8(), 101), _made(tt.int8(), 101, "int8")
    assert _train(exact, 101) != _train(rounds, 101)
    fully_shard(exact)
    with pytest.raises(tt.ConversionError, match=r"emb\.weight: is sharded.* before fully_shard"):
        tt.quantize_activations(exact)


def _check_distribute(name, scheme):
    values = torch.randn(101, WIDTH, generator=torch.Generator().manual_seed(3))
    weight = tt.Weight.encode(values, scheme)
    mesh = mesh_of((dist.get_world_size(),))
    mine = weight if dist.get_rank() == 0 else tt.Weight.encode(values * 0, scheme)
    made = distribute_tensor(mine, mesh, [Shard(0)])  # rank 0's values go to all
    assert torch.equal(made.full_tensor().dequantize(), weight.dequantize()), name
    alone = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
    assert torch.equal(alone.full_tensor().dequantize(), weight.dequantize()), name


def _check_state_dict(name, scheme):
    """Stock state dicts of the shards come back, in place and by assignment, before and after a forward."""
    source, target = _made(scheme, 101), _made(scheme, 101)
    with torch.no_grad():
        target.emb.weight.copy_(torch.zeros(101, WIDTH))
    for model in (source, target):
        fully_shard(model)
    state = copy.copy(source.state_dict())
    assert set(state) == {"emb.weight", "head.weight", "down", "up"}
    target.load_state_dict(state)
    assert torch.equal(whole(target.emb.weight), whole(source.emb.weight)), name
    ids = torch.arange(8)
    assert torch.equal(target(ids), source(ids)), name


def _check_int():
    model = _made(tt.int8(), 100)
    plan = tt.distributed.plan_units(model, nn.Linear)
    with pytest.raises(tt.ConversionError, match="reshard_after_forward=2"):
        tt.distributed.shard(model, plan, reshard_after_forward=2)


def _check_trainable():
    """A trainable Plain Weight trains like the parameter that it wraps; each shard has its tie record."""
    results = []
    for wraps in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(101, 16), nn.Linear(16, 101, bias=False))
        model[1].weight = model[0].weight
        if wraps:
            tt.quantize(model, {"0.weight": tt.Plain()})
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(3):
            ids = torch.arange(step, step + 8)
            F.cross_entropy(model(ids), ids.roll(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.reshard()
        if wraps:
            assert model[0].weight._local_tensor.tie.names == ("0.weight", "1.weight")
        results.append(whole(model[0].weight))
    assert torch.equal(*results)


def check_shards_of_shards(named, sizes):
    """FSDP2 pads the rows that tensor parallelism has left to a rank, and DTensor pads them by another rule."""
    mesh = mesh_of((2, dist.get_world_size() // 2))
    dp, tp = (mesh[name] for name in mesh.mesh_dim_names)
    for name, scheme in named:
        for size in sizes:
            model = nn.Linear(WIDTH, size, bias=False)
            with torch.no_grad():
                model.weight.copy_(torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(3)))
            tt.quantize(model, scheme)
            values = model.weight.dequantize()
            placed = distribute_tensor(model.weight.detach(), tp, [Shard(0)])
            model.weight = nn.Parameter(placed, requires_grad=False)
            fully_shard(model, mesh=dp)
            full = model.weight.full_tensor()
            assert isinstance(full, tt.Weight), (name, size)
            assert torch.equal(full.dequantize(), values), (name, size)


NAMED = [(row.id, row.scheme) for row in SCHEMES]
FEW = [(row.id, row.scheme) for row in SCHEMES if row.id in ("plain", "int8", "int8-tensor", "nf4", "nvfp4")]


def test_a_scheme_of_each_family_trains_on_rows_that_do_not_divide():
    spawn(check_schemes, 2, FEW, [101, 3], timeout=200)


def test_shards_of_shards_are_joined():
    spawn(check_shards_of_shards, 4, FEW, [8, 5, 101, 3])


def test_one_rank_has_all_rows():
    """FSDP2 gathers the first input alone where there is one rank."""
    spawn(check_schemes, 1, FEW, [101])


def test_what_cuts_a_block_is_refused_in_the_plan():
    named = [(row.id, row.scheme) for row in SCHEMES if row.id in ("int8-block", "fp8-block", "nf4-double")]
    spawn(check_refusals, 2, named)


def test_meshes_policies_offload_and_state_dicts():
    spawn(check_options, 4, [FEW[1], FEW[3]], timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("world", [3])
def test_every_scheme_trains(world):
    spawn(check_schemes, world, NAMED, [101, 96, 3, 2], timeout=550)


@pytest.mark.slow
def test_options_of_more_schemes():
    spawn(check_options, 4, FEW, timeout=400)


@each_quantized
def test_room_is_padding(row):
    """``new_zeros`` of more rows holds zeros, takes rows in front, and gives them back."""
    weight = tt.Weight.encode(torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(1)), row.scheme)
    room = weight.new_zeros((16, WIDTH))
    assert room.dequantize().abs().max() <= (1e-6 if row.id != "codebook-uneven" else 1)
    front = room.narrow(0, 0, 10)
    front.copy_(weight)
    assert torch.equal(front.dequantize(), weight.dequantize())
    assert torch.equal(room.dequantize()[:10], weight.dequantize())
    padded = F.pad(weight, (0, 0, 0, 6))
    assert torch.equal(padded.dequantize()[:10], weight.dequantize())
    assert torch.equal(F.pad(weight, (1, 1)), F.pad(weight.dequantize(), (1, 1)))


@each_quantized
def test_a_flat_view_is_one(row):
    weight = tt.Weight.encode(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)), row.scheme)
    flat = weight.view(-1)
    assert torch.equal(flat.dequantize(), weight.dequantize().view(-1))
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(flat.parts.values(), weight.parts.values(), strict=True))
    assert torch.equal(flat.view(8, WIDTH).dequantize(), weight.dequantize())
    weight.zero_()
    assert torch.equal(flat.dequantize(), weight.dequantize().view(-1))
