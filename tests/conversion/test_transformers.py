"""Real models built on meta: every buffer comes back exactly, ties hold, and a checkpoint without them is enough."""

import warnings

import pytest
import torch

import torchtether as tt
from tests.ties.test_transformers import MODELS
from torchtether.ties.names import named_tensors

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.peers


@pytest.mark.parametrize("name", MODELS)
def test_materialized_is_eager(name):
    config, fields, _ = MODELS[name]
    made = getattr(transformers, config)(**fields)

    def build():
        with warnings.catch_warnings(action="ignore"):
            return getattr(transformers, name)(made).eval()

    eager = build()
    with tt.on_meta():
        model = build()
    assert all(tensor.is_meta for tensor in named_tensors(model).values())
    ties, ids = tt.find_ties(model), {n: id(t) for n, t in named_tensors(model).items()}
    tt.materialize(model, init=model._init_weights)  # transformers skips its own initialisation on meta
    assert tt.find_ties(model) == ties == tt.find_ties(eager)
    assert {n: id(t) for n, t in named_tensors(model).items()} == ids
    for key, buffer in eager.named_buffers():
        assert torch.equal(model.get_buffer(key), buffer), key
    for key, parameter in eager.named_parameters():
        spread = model.get_parameter(key).std(correction=0) / parameter.std(correction=0).clamp_min(1e-9)
        assert parameter.numel() < 100 or 0.5 < spread < 2 or not parameter.any(), key
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(eager.get_parameter(key))
        tokens = {"input_ids": torch.arange(1, 9)[None]}
        if model.config.is_encoder_decoder:
            tokens["decoder_input_ids"] = tokens["input_ids"]
        assert torch.equal(model(**tokens).logits, eager(**tokens).logits)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration"])
def test_quantized_without_untying(name):
    config, fields, _ = MODELS[name]
    with warnings.catch_warnings(action="ignore"):
        model = getattr(transformers, name)(getattr(transformers, config)(**fields)).eval()
    ties = [tie.names for tie in tt.find_ties(model)]
    tt.quantize(model, "int8")
    assert [tie.names for tie in tt.find_ties(model)] == ties
    tt.check_ties(model)
    tokens = {"input_ids": torch.arange(1, 9)[None]}
    if model.config.is_encoder_decoder:
        tokens["decoder_input_ids"] = tokens["input_ids"]
    with torch.no_grad():
        quantized = model(**tokens).logits
        assert torch.allclose(quantized, tt.dequantize(model)(**tokens).logits, atol=1e-4)
