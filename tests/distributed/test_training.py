"""Models with every kind of tie train on 2, 3 and 4 ranks as in one process: losses, gradients, weights, each step."""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchtether as tt
from tests.distributed import models
from tests.distributed.models import Biased, Block, Stack
from tests.distributed.spawn import spawn
from tests.distributed.training import check_cases

TIED = [
    ("gpt", models.GPT, Block, {}),
    ("gpt, units of both ends", models.GPT, (Block, "emb", "head"), {}),
    ("gpt, units of both ends, root", models.GPT, (Block, "emb", "head"), {"policy": "root"}),
    ("gpt, 25 words", partial(models.GPT, 25), (Block, "emb", "head"), {"vocabulary": 25}),
    ("gpt, 2 words", partial(models.GPT, 2), (Block, "emb"), {"vocabulary": 2}),
    ("gpt, optimizer built before", models.GPT, (Block, "emb"), {"early_optimizer": True}),
    ("t5, one module", models.T5, (Stack, Block), {}),
    ("t5, four slots", partial(models.T5, shares_module=False), (Stack, Block), {}),
    ("t5, four slots, root", partial(models.T5, shares_module=False), (Stack, Block), {"policy": "root"}),
    ("albert", models.ALBERT, Block, {}),
    ("cross layer", models.CrossLayer, Block, {}),
    ("cross layer, root", models.CrossLayer, Block, {"policy": "root"}),
    ("owned by blocks", models.Owned, Biased, {}),
    ("owned by blocks, root", models.Owned, Biased, {"policy": "root"}),
    ("three way, buffer is object", models.ThreeWay, (Block, "emb", "head"), {}),
    ("three way, buffer over memory", partial(models.ThreeWay, is_object=False), (Block, "head"), {}),
    ("functional", models.Functional, (Block, "emb"), {}),
]
QUICK = [case for case in TIED if case[0] in {
    "gpt, 25 words", "t5, four slots", "cross layer", "owned by blocks", "three way, buffer over memory", "functional"
}]  # fmt: skip

INT8 = tt.int8()
_FLOAT32 = {"dtype": torch.float32, "tolerance": 2e-5}
LORA = [
    (f"{name}, {words} words, {width} wide", partial(models.lora, scheme, words, width), (Block, "emb", "head"),
     {"vocabulary": words, **_FLOAT32})
    for name, scheme, words, width in [
        ("int8", INT8, 25, 16),
        ("int8", INT8, 3, 16),
        ("int4", tt.int4(16), 25, 16),
        ("fp8", tt.fp8(), 25, 16),
        ("nf4", tt.nf4(), 25, 64),
        ("nvfp4", tt.nvfp4(), 25, 16),
    ]
]  # fmt: skip


def test_tied_and_quantized_models_train_as_in_one_process():
    labels = spawn(check_cases, 3, [*QUICK, LORA[0], LORA[4]], timeout=200)[0]
    assert "[layers.0.attn, layers.1.attn, layers.2.attn, layers.3.attn]" in labels["cross layer"]
    assert "[emb, head]" in labels["gpt, 25 words"]
    assert labels["functional"][-1] == "root"
    assert "emb" not in labels["functional"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_all_kinds_of_ties(world):
    spawn(check_cases, world, TIED, timeout=400)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_adapters_over_frozen_quantized_weights(world):
    spawn(check_cases, world, LORA, timeout=400)


def _train_weights(scheme, master):
    """Return the first and last loss of a trainable quantized net under FSDP2, and whether its replicas agree."""
    torch.manual_seed(0)
    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    fully_shard(tt.quantize(net, scheme, master=master), mesh=mesh)
    optimizer, x, losses = torch.optim.AdamW(net.parameters(), lr=1e-4), torch.randn(64, 64), []
    for _ in range(60):
        loss = net(x).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    codes = net[0].weight.to_local().parts["qdata"].to(torch.int32)
    every = [torch.empty_like(codes) for _ in range(2)]
    torch.distributed.all_gather(every, codes, group=mesh.get_group("replicate"))
    return losses[0], losses[-1], torch.equal(*every)


@pytest.mark.parametrize(("scheme", "master"), [("int8", None), ("nf4", None), ("nf4", torch.float32)])
def test_trainable_weights_learn_in_shards_and_replicas_stay_alike(scheme, master):
    for before, after, agree in spawn(_train_weights, 2, scheme, master):
        assert after < 0.7 * before
        assert agree


@pytest.mark.slow
def test_trainable_weights_learn_on_two_replicas_of_two_shards():
    for before, after, agree in spawn(_train_weights, 4, "int8", None):
        assert after < 0.7 * before
        assert agree
