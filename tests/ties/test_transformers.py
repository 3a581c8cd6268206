"""Ties of real models: tiny models of transformers, built on the CPU and on ``meta``."""

import warnings

import pytest
import torch

from torchtether.ties.edit import untie
from torchtether.ties.names import named_tensors
from torchtether.ties.records import check_ties, find_ties

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.peers

_SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
_BART = {
    "vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32,
}  # fmt: skip
_T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
_GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
_OPT = {
    "vocab_size": 40, "hidden_size": 16, "word_embed_proj_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "ffn_dim": 32, "max_position_embeddings": 32,
}  # fmt: skip

MODELS = {
    "GPT2LMHeadModel": ("GPT2Config", _GPT2, [2]),
    "LlamaForCausalLM": ("LlamaConfig", {**_SMALL, "tie_word_embeddings": False}, []),
    "Gemma2ForCausalLM": ("Gemma2Config", {**_SMALL, "head_dim": 8, "num_key_value_heads": 1}, [2]),
    "BertForMaskedLM": ("BertConfig", _SMALL, [2, 2]),
    "AlbertForMaskedLM": ("AlbertConfig", {**_SMALL, "embedding_size": 8}, [2, 2]),
    "T5ForConditionalGeneration": ("T5Config", _T5, [4]),
    "BartForConditionalGeneration": ("BartConfig", _BART, [4]),
    "OPTForCausalLM": ("OPTConfig", _OPT, [2]),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", MODELS)
def test_the_ties_that_the_model_declares(name, device):
    config, fields, sizes = MODELS[name]
    with warnings.catch_warnings(action="ignore"), torch.device(device):
        model = getattr(transformers, name)(getattr(transformers, config)(**fields))
    ties = find_ties(model)
    assert sorted(len(tie.names) for tie in ties) == sorted(sizes)
    assert all(all(tie.objects) for tie in ties)
    tensors = named_tensors(model)
    assert all(tensors[alias] is tensors[tie.owner] for tie in ties for alias in tie.aliases)
    check_ties(model, ties)
    for tie in ties if device == "cpu" else ():
        for alias in tie.aliases:
            untie(model, alias)
    assert find_ties(model) == () or device == "meta"
