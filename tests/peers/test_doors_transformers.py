"""transformers' own code with Weights inside: fused experts, ``from_pretrained``, ``save_pretrained``."""

import pytest
import torch

import torchtether as tt

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # what transformers warns about

IDS = torch.arange(12).view(2, 6)
SMALL = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "head_dim": 16}
EXPERTS = {
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SMALL, **MOE, num_experts=4),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4}, moe_intermediate_size=32, num_experts_per_tok=2, n_routed_experts=4,
        n_group=2, topk_group=1, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16,
        v_head_dim=16, first_k_dense_replace=1,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(**SMALL, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
}  # fmt: skip


def built(config):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def logits_of(model):
    with torch.no_grad():
        return model(IDS).logits


def weights_of(model):
    return {name: p for name, p in model.named_parameters() if isinstance(p, tt.Weight)}


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_fused_experts_run_by_default_as_their_values_do(name, scheme):
    model, plain = built(EXPERTS[name]()), built(EXPERTS[name]())
    assert model.config._experts_implementation == "grouped_mm"
    tt.quantize(model, {"*experts*_proj": scheme})
    plain.load_state_dict({n: t.dequantize() if isinstance(t, tt.Weight) else t for n, t in model.state_dict().items()})
    assert weights_of(model)
    torch.testing.assert_close(logits_of(model), logits_of(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_gradients_pass_fused_experts(name):
    model, plain = built(EXPERTS[name]()), built(EXPERTS[name]())
    tt.quantize(model, {"*experts*_proj": "int8"})
    plain.load_state_dict({n: t.dequantize() if isinstance(t, tt.Weight) else t for n, t in model.state_dict().items()})
    grads = []
    for one in (model, plain):
        for parameter in one.parameters():
            parameter.requires_grad_(not isinstance(parameter, tt.Weight))
        one(IDS, labels=IDS).loss.backward()
        grads.append(one.get_input_embeddings().weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-5)


CONFIGS = {
    "tied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "untied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=False),
    "experts": EXPERTS["qwen3_moe"],
}
ASKED = {
    "tied": ({"scheme": "int8"}, "int8"),
    "untied": ({"rules": {"*_proj.weight": "nf4"}}, {"*_proj.weight": "nf4"}),
    "experts": (
        {"rules": {"*experts*_proj": "nf4", "*q_proj*": "int8"}},
        {"*experts*_proj": "nf4", "*q_proj*": "int8"},
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_from_pretrained_quantizes_and_reads_back_what_is_saved(tmp_path, name):
    from torchtether.integrations.transformers import TetherConfig

    auto, (options, rules) = transformers.AutoModelForCausalLM, ASKED[name]
    built(CONFIGS[name]()).save_pretrained(tmp_path / "plain")
    model, found = auto.from_pretrained(
        tmp_path / "plain", quantization_config=TetherConfig(**options), output_loading_info=True
    )
    assert not found["missing_keys"]
    reference = tt.quantize(auto.from_pretrained(tmp_path / "plain"), rules)
    assert weights_of(model).keys() == weights_of(reference).keys()
    wanted = logits_of(reference)
    assert torch.equal(logits_of(model), wanted)
    is_tied = name == "tied"
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == is_tied
    model.save_pretrained(tmp_path / "saved", max_shard_size="40KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    again, found = auto.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    assert torch.equal(logits_of(again), wanted)
    assert (again.get_input_embeddings().weight is again.get_output_embeddings().weight) == is_tied


def test_a_folder_of_ours_is_read_with_the_schemes_that_its_files_name(tmp_path):
    from torchtether.integrations.transformers import TetherConfig

    model = tt.quantize(built(CONFIGS["tied"]()), "int8")
    tt.save(model, tmp_path, max_shard_size="40KB")
    model.config.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=TetherConfig())
    assert weights_of(again).keys() == weights_of(model).keys()
    assert torch.equal(logits_of(again), logits_of(model))


def test_a_model_that_was_quantized_later_is_saved_once_the_quantizer_is_attached(tmp_path):
    from torchtether.integrations.transformers import attach

    model = tt.quantize(built(CONFIGS["tied"]()), "int8")
    attach(model)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert weights_of(again).keys() == weights_of(model).keys()
    assert torch.equal(logits_of(again), logits_of(model))
    assert logits_of(model.bfloat16()).dtype == torch.bfloat16
