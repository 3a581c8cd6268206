"""tt.refit of models of transformers: published names, fused experts in int8 and nf4, generate with new values."""

import copy
import random

import pytest
import torch

import torchtether as tt

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # what transformers warns about

from tests.peers.test_doors_transformers import EXPERTS, IDS, SMALL, logits_of  # noqa: E402 - needs transformers

KINDS = {
    "llama, tied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    **{name: EXPERTS[name] for name in ("mixtral", "qwen3_moe")},
}
RULES = {"*experts*_proj": "nf4", "*_proj.weight": "int8", "model.embed_tokens.weight": "int8"}


def built(config, seed):
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def quantized(model):
    names = [name for name, _ in model.named_parameters()]
    return tt.quantize(model, {g: s for g, s in RULES.items() if g[0] != "*" or any(g.strip("*") in n for n in names)})


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kind", ["path", "published", "shuffled", "own names"])
def test_a_rollout_takes_what_a_trainer_publishes(name, kind, tmp_path):
    trainer, rollout = built(KINDS[name](), 1), quantized(built(KINDS[name](), 2))
    trainer.save_pretrained(tmp_path)
    with tt.open(tmp_path) as checkpoint:
        published = [(key, checkpoint[key].clone()) for key in checkpoint]
    source = {"path": tmp_path, "published": dict(published), "own names": trainer.state_dict().items()}.get(kind)
    if kind == "shuffled":
        random.Random(0).shuffle(published)
        source = iter(published)
    before = {n: [part.data_ptr() for part in p.parts.values()] for n, p in rollout.named_parameters()
              if isinstance(p, tt.Weight)}  # fmt: skip
    report = tt.refit(rollout, source)
    wanted = quantized(copy.deepcopy(trainer))
    assert torch.equal(logits_of(rollout), logits_of(wanted))
    assert torch.equal(rollout.generate(IDS, max_new_tokens=4), wanted.generate(IDS, max_new_tokens=4))
    assert before == {n: [part.data_ptr() for part in p.parts.values()] for n, p in rollout.named_parameters()
                      if isinstance(p, tt.Weight)}  # fmt: skip
    assert report.left == ("model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq")


def test_an_expert_that_never_came_is_a_fault(tmp_path):
    trainer, rollout = built(KINDS["qwen3_moe"](), 1), quantized(built(KINDS["qwen3_moe"](), 2))
    trainer.save_pretrained(tmp_path)
    with tt.open(tmp_path) as checkpoint:
        published = {key: checkpoint[key].clone() for key in checkpoint}
    lost = next(key for key in published if "experts.2.up_proj" in key)
    del published[lost]
    for source in (published, iter(published.items())):
        with pytest.raises(tt.LoadError, match=r"without number 2|nothing for"):
            tt.refit(rollout, source)


@pytest.mark.parametrize("kind", ["path", "state dict", "pairs"])
def test_optional_tensors_that_never_came_are_named(kind, tmp_path):
    config = transformers.BartConfig(
        vocab_size=32, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=16,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config)
    state = {name: value for name, value in model.state_dict().items() if name != "final_logits_bias"}
    tt.save(state, tmp_path / "model.safetensors")
    source = {"path": tmp_path / "model.safetensors", "state dict": state, "pairs": iter(state.items())}[kind]
    assert tt.refit(model, source).left == ("final_logits_bias",)
    assert tt.refit(model, model.state_dict()).left == ()
