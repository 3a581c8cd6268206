"""Models with every kind of tie train on 2, 3 and 4 ranks as in one process: losses, gradients, weights, each step."""

from functools import partial

import pytest
import torch

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
