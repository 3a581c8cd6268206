"""From ``meta`` to resumed training, on models with many features at once, against one process and other worlds."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import torchtether as tt
from tests.distributed.models import Block, D, LoRA, Stack, data, loss_of
from tests.distributed.spawn import spawn
from tests.distributed.training import check_cases, compare, train, whole

WORDS = 25


class EncoderDecoder(nn.Module):
    """Four names of one embedding, a head that is biased, a buffer over the embedding, adapters over a frozen base."""

    def __init__(self, vocabulary=WORDS, scheme=None):
        super().__init__()
        self.shared = nn.Embedding(vocabulary, D)
        self.encoder, self.decoder = (Stack(nn.Embedding(vocabulary, D), layers=2) for _ in range(2))
        self.lm_head = nn.Linear(D, vocabulary)
        for module in (self.encoder.emb, self.decoder.emb, self.lm_head):
            module.weight = self.shared.weight
        if scheme is not None:
            tt.quantize(self, {"shared.weight": scheme, "*.layers.*.attn.weight": scheme, "*.mlp.*.weight": scheme})
        self.requires_grad_(False)
        for layer in (*self.encoder.layers, *self.decoder.layers):
            layer.attn, layer.mlp[0] = LoRA(layer.attn), LoRA(layer.mlp[0])
        self.lm_head.bias.requires_grad_(True)

    def forward(self, ids):
        return self.lm_head(self.decoder(ids, self.encoder(ids).mean(1, keepdim=True)))


class Experts(nn.Module):
    """Stacked experts (E, out, in), a router that is rows of them, and a buffer that is the router."""

    def __init__(self, vocabulary=WORDS, experts=5, scheme=None):
        super().__init__()
        self.emb = nn.Embedding(vocabulary, D)
        self.layers = nn.ModuleList(_ExpertLayer(experts, scheme) for _ in range(2))
        self.head = nn.Linear(D, vocabulary, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class _ExpertLayer(nn.Module):
    def __init__(self, experts, scheme):
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, 2 * D, D) / 8)
        self.down = nn.Parameter(torch.randn(experts, D, 2 * D) / 8)
        self.router = nn.Linear(D, experts)
        self.register_buffer("known", self.router.weight)
        if scheme is not None:
            tt.quantize(self, {"up": scheme, "down": scheme})
            self.up.requires_grad_(False)
            self.down.requires_grad_(False)

    def forward(self, x):
        share = self.router(x).softmax(-1) + F.linear(x, self.known).detach() * 0.01
        up, down = (w.dequantize() if isinstance(w, tt.Weight) else w for w in (self.up, self.down))
        hidden = torch.einsum("...i,eoi->...eo", x, up).tanh()
        return x + torch.einsum("...eo,eio,...e->...i", hidden, down, share)


_F32 = {"dtype": torch.float32, "tolerance": 2e-5, "vocabulary": WORDS}


def check_models():
    schemes = {"float": None, "int8": tt.int8(), "fp8": tt.fp8()}
    cases = [
        (f"encoder and decoder, {name}", lambda s=scheme: EncoderDecoder(WORDS, s), units, _F32)
        for (name, scheme), units in itertools.product(schemes.items(), [(Stack, Block), (Block,)])
    ]
    split = [(_ExpertLayer, "emb", "head"), (_ExpertLayer,)]
    cases += [
        (f"experts, {name}, {units}", lambda s=scheme: Experts(WORDS, 5, s), units, _F32)
        for (name, scheme), units in itertools.product(schemes.items(), split)
    ]
    return check_cases(cases)


@pytest.mark.slow
@pytest.mark.parametrize("world", [3])
def test_models_with_many_things_at_once(world):
    spawn(check_models, world, timeout=400)


# -- from files of other names, and back ------------------------------------------------------------------------------


class Published(nn.Module):
    """The published form: one module for each expert, and other names."""

    def __init__(self, experts=5):
        super().__init__()
        self.wte = nn.Embedding(WORDS, D)
        self.blocks = nn.ModuleList()
        for _ in range(2):
            block = nn.Module()
            block.experts = nn.ModuleList(
                nn.ModuleDict({"up": nn.Linear(D, 2 * D, bias=False), "down": nn.Linear(2 * D, D, bias=False)})
                for _ in range(experts)
            )
            block.gate = nn.Linear(D, experts)
            self.blocks.append(block)


RENAME = [
    (r"^wte\.", "emb."),
    (r"^blocks\.", "layers."),
    (r"\.gate\.", ".router."),
    tt.Stack(r"experts\.(\d+)\.(up|down)\.weight", r"\2"),
]
UNITS = (_ExpertLayer, "emb", "head")


def _adapted(scheme):
    """Return a model built on meta, planned, sharded and loaded from other names; only router biases are trainable."""
    with tt.on_meta():
        model = Experts(WORDS)
    plan = tt.distributed.plan_units(model, UNITS, inputs=(data(0, WORDS),))
    assert not plan.faults
    return tt.distributed.shard(model, plan), {"*.up": scheme, "*.down": scheme, "emb.weight": scheme}


def _freeze(model):
    for parameter in model.parameters():
        local = getattr(parameter, "_local_tensor", parameter)
        parameter.requires_grad_(not isinstance(local, tt.Weight))


def _alone(path, **options):
    with tt.on_meta():
        model = Experts(WORDS)
    tt.load(model, path, **options)
    _freeze(model)
    return model


def _optimizer(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)


def begins(folder, scheme):
    model, rules = _adapted(scheme)
    tt.distributed.load(model, folder / "published", rename=RENAME, quantize=rules)
    _freeze(model)
    reference = _alone(folder / "published", rename=RENAME, quantize=rules)
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), whole(dict(reference.named_parameters())[name])), name
    assert model.head.weight is model.emb.weight
    optimizer = _optimizer(model)
    share = slice(dist.get_rank(), None, dist.get_world_size())
    got = train(model, 2, vocabulary=WORDS, share=share, mean=True, optimizer=optimizer)
    compare(got, train(reference, 2, vocabulary=WORDS, optimizer=_optimizer(reference)), 1e-4)
    for format in ("safetensors", "dcp"):
        tt.distributed.save(model, folder / format, format=format, optimizer=optimizer)
    return _goes_on(model, optimizer)


def _goes_on(model, optimizer):
    losses = []
    for step in (2, 3):
        loss = loss_of(model, data(step, WORDS))  # the whole batch on every rank
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def resumes(folder):
    found = []
    for format, options in (("safetensors", {}), ("dcp", {"offload_policy": CPUOffloadPolicy(pin_memory=False)})):
        with tt.on_meta():
            model = Experts(WORDS)
        tt.distributed.shard(model, tt.distributed.plan_units(model, UNITS), **options)
        tt.distributed.load(model, folder / format)
        _freeze(model)
        optimizer = _optimizer(model)
        tt.distributed.load(model, folder / format, optimizer=optimizer)
        found.append(_goes_on(model, optimizer))
        # and again, after forwards: what is gathered then is what was loaded, scales that all rows share included
        tt.distributed.load(model, folder / format, optimizer=optimizer)
        found.append(_goes_on(model, optimizer))
    return found


@pytest.mark.parametrize("scheme", [tt.int8(), pytest.param(tt.fp8("tensor"), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("world", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_from_published_names_to_another_number_of_ranks(tmp_path, scheme, world):
    torch.manual_seed(0)
    tt.save(Published(), tmp_path / "published")
    wanted = spawn(begins, 2, tmp_path, scheme, timeout=200)[0]
    for found in spawn(resumes, world, tmp_path, timeout=200):
        torch.testing.assert_close(found, [wanted] * len(found), rtol=1e-5, atol=1e-6)


# -- what is asked for at the wrong moment ----------------------------------------------------------------------------


def check_nested():
    model = EncoderDecoder()
    plan = tt.distributed.plan_units(model.encoder, Block)
    tt.distributed.shard(model.encoder, plan)
    outer = tt.distributed.plan_units(model, Block)
    with pytest.raises(tt.TetherError, match=r"encoder.*(applied already|DTensor|sharded)"):
        tt.distributed.shard(model, outer)
    other = EncoderDecoder()
    fully_shard(other.encoder.layers[0])
    with pytest.raises(tt.ConversionError, match=r"encoder\.layers\.0: fully_shard has been applied already"):
        tt.distributed.shard(other, tt.distributed.plan_units(other, Block))


def test_a_part_that_is_sharded_already_is_refused():
    spawn(check_nested, 2)
