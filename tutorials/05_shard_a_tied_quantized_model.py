"""Shard a tied, quantized model over processes: each reads its own rows, and ties are kept.

You will be able to plan the sharding of a tied model, to load a checkpoint into it without any process ever holding the
whole, to train adapters over a quantized base, and to save and resume on another number of processes.
Needs: torch. Takes: half a minute. Runs on two processes, which it starts itself.
"""

# %% A language model with three blocks, whose head is tied to its embedding.
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import torchtether as tt


class Model(nn.Module):
    def __init__(self, vocab=1003, width=64):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(3))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        hidden = self.emb(tokens)
        for block in self.blocks:
            hidden = hidden + torch.relu(block(hidden))
        return self.head(hidden)


TOKENS = torch.arange(32) * 31 % 1003
# Float32 sums depend on the processor and the number of threads. In five steps AdamW turns one rounding (6e-8) into up
# to 3e-5 of the loss; a lost tie changes it by far more than 1e-3.
CLOSE = {"rtol": 1e-3, "atol": 0}


def losses(model, optimizer, steps):
    """Train for ``steps`` steps and return the losses."""
    found = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(TOKENS), TOKENS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def run(rank, world, store, job, *args):
    """Run ``job`` as one of ``world`` processes; torchrun would do as well."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world)
    job(*args)
    dist.barrier()
    dist.destroy_process_group()


def on_processes(world, job, *args):
    """Run ``job`` on ``world`` processes; an assertion that fails in one fails here.

    A process of "forkserver" exits at once. One of "spawn" shuts Python down first. Caches of DTensor keep the process
    group alive after it was destroyed, and a thread of gloo that then frees a tensor would abort the process.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        if world == 1:
            run(0, 1, store, job, *args)
        else:
            torch.multiprocessing.start_processes(
                run, (world, store, job, *args), nprocs=world, start_method="forkserver"
            )


# %% What goes wrong without us, silently: an embedding in a unit of its own is no longer tied to the head.
def untied():
    model = Model()
    fully_shard(model.emb)
    fully_shard(model)
    assert model.head.weight is not model.emb.weight  # no error, no warning: one more parameter to train


# %% The same happens to a checkpoint loaded after sharding: with `assign=True` the optimizer keeps the old parameters.
def left_behind(path):
    with torch.device("meta"):
        model = Model()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mesh = model.emb.weight.device_mesh
    with tt.open(path) as checkpoint:
        state = {name: distribute_tensor(checkpoint[name], mesh, [Shard(0)]) for name in checkpoint}
    model.load_state_dict(state, assign=True)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert not held & {id(parameter) for parameter in model.parameters()}  # it would train nothing


# %% With us: plan, shard, load. The plan puts each tied group into one unit, and says what each rank will hold.
def sharded(path, **options):
    with tt.on_meta():
        model = Model()
    plan = tt.distributed.plan_units(model, [nn.Sequential])
    tt.distributed.shard(model, plan)
    before = list(model.parameters())
    report = tt.distributed.load(model, path, **options)
    assert model.head.weight is model.emb.weight
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    if dist.get_rank() == 0:
        print(plan, report, sep="\n")
    return model, report


def trained(path, folder, wanted):
    model, report = sharded(path)
    whole = (path / "model.safetensors").stat().st_size
    assert report.bytes < 0.55 * whole  # half of the rows, and nothing else
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.testing.assert_close(losses(model, optimizer, 3), wanted[:3], **CLOSE)
    tt.distributed.save(model, folder, optimizer=optimizer)


# %% Resume on another number of processes, with the optimizer's state: training continues without a difference.
def resumed(folder, wanted):
    model, _ = sharded(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)  # the checkpoint overrides the rate
    tt.distributed.load(model, folder, optimizer=optimizer)
    torch.testing.assert_close(losses(model, optimizer, 2), wanted[3:], **CLOSE)


# %% Quantize at load, each process its own rows: int8 embedding and head stay one Weight, the other parameters train.
def adapted(path, folder, wanted):
    model, _ = sharded(path, quantize={"emb.weight": "int8", "blocks.*.0.weight": tt.int4(group_size=32)})
    assert isinstance(model.emb.weight.to_local(), tt.Weight)
    for parameter in model.parameters():
        parameter.requires_grad_(not isinstance(parameter.to_local(), tt.Weight))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    torch.testing.assert_close(losses(model, optimizer, 3), wanted, **CLOSE)
    tt.distributed.save(model, folder)  # the same bytes as from one process


def all_of_it(here, wanted, wanted_of_adapters):
    untied()
    left_behind(here / "start")
    trained(here / "start", here / "trained", wanted)
    adapted(here / "start", here / "adapted", wanted_of_adapters)


# %% The same on one process, for comparison; then everything on two, and on one.
def alone(path, quantize=None):
    with tt.on_meta():
        model = Model()
    tt.load(model, path, quantize=quantize)
    for parameter in model.parameters():
        parameter.requires_grad_(not isinstance(parameter, tt.Weight))
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        torch.manual_seed(0)
        tt.save(Model(), here / "start")
        wanted = losses(*alone(here / "start"), 5)
        rules = {"emb.weight": "int8", "blocks.*.0.weight": tt.int4(group_size=32)}
        quantized, optimizer = alone(here / "start", rules)
        on_processes(2, all_of_it, here, wanted, losses(quantized, optimizer, 3))
        on_processes(1, resumed, here / "trained", wanted)
        with tt.open(here / "adapted") as checkpoint:
            print(checkpoint)
            assert checkpoint.ties[0].names == ("emb.weight", "head.weight")
            assert torch.equal(checkpoint["emb.weight"].dequantize(), quantized.emb.weight.dequantize())

# %% Now break it: in `sharded`, call fully_shard(model.emb) and fully_shard(model) in place of the plan.
