"""transformers' own code with Weights inside: fused experts, ``from_pretrained``, ``save_pretrained``."""

import copy
import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch

import torchtether as tt

transformers = pytest.importorskip("transformers")
pytest.importorskip("torchtether.integrations.transformers")  # from_pretrained knows what we quantized from here on
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # what transformers warns about

IDS = torch.arange(12).view(2, 6)
SMALL = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "head_dim": 16}
T5 = transformers.T5Config(
    vocab_size=64, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4, feed_forward_proj="gated-gelu"
)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_trained", [False, True])
def test_fused_experts_compile_with_their_values_and_gradients(dtype, is_trained):
    """transformers calls an op of its own there, unless the dtype is bfloat16."""
    model = tt.quantize(built(EXPERTS["gpt_oss"]()), {"*experts*_proj": "int8"}).requires_grad_(is_trained)
    tt.convert(model, dtype=dtype)
    torch._dynamo.reset()
    found = []
    for run in (torch.compile(model, backend="aot_eager", fullgraph=True), model):
        x = model.get_input_embeddings().weight[IDS].detach().requires_grad_()
        made = run(inputs_embeds=x, use_cache=False).logits
        model.zero_grad()
        made.float().square().sum().backward()
        found.append([made, x.grad, *(p.grad for p in weights_of(model).values())])
    assert all((p.grad is not None) is is_trained for p in weights_of(model).values())
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    for one, other in zip(*found, strict=True):
        if one is not None:
            assert (one - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("scheme", [tt.int8(), tt.Plain()], ids=str)
def test_fused_experts_are_exported_with_their_values(scheme, dtype):
    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3, 32, 64), requires_grad=False)

        def forward(self, rows, offs):
            return torch.ops.transformers.grouped_mm_fallback(rows, self.weight.transpose(-2, -1), offs)

    model = tt.convert(tt.quantize(Experts(), {"weight": scheme}), dtype=dtype)
    given = torch.randn(9, 64, dtype=dtype), torch.tensor([2, 2, 9], dtype=torch.int32)
    made = torch.export.export(model, given).module()(*given)
    torch.testing.assert_close(made, model(*given), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "t5"])
def test_a_load_keeps_in_float32_what_from_pretrained_does(tmp_path, name, dtype):
    """Among others the biases of routers, which in bfloat16 would choose other experts, and in float16 T5's ``wo``."""
    config, kind = EXPERTS[name]() if name in EXPERTS else T5, transformers.AutoModelForCausalLM
    kind = transformers.AutoModelForSeq2SeqLM if name == "t5" else kind
    model = kind.from_config(config)
    for key, tensor in model.state_dict().items():
        if key.endswith("e_score_correction_bias"):
            tensor.normal_()  # it is 0 at first
    model.save_pretrained(tmp_path)
    reference = kind.from_pretrained(tmp_path, dtype=dtype).state_dict()
    is_kept = dtype is not torch.bfloat16 or name == "deepseek_v3"
    assert (torch.float32 in {tensor.dtype for tensor in reference.values()}) is is_kept
    for asked in (dtype, {"*": dtype}):
        with tt.on_meta():
            model = kind.from_config(config)
        tt.load(model, tmp_path, dtype=asked)
        for key, tensor in model.state_dict().items():
            wanted = reference[key] if asked is dtype else reference[key].to(dtype)
            assert tensor.dtype == wanted.dtype, key
            assert asked is not dtype or torch.equal(tensor, wanted), key


def test_a_mapping_of_dtypes_and_a_model_around_it_keep_their_meaning(tmp_path):
    config = EXPERTS["deepseek_v3"]()
    with tt.on_meta():
        model = torch.nn.ModuleDict({"inner": transformers.AutoModelForCausalLM.from_config(config)})
    tt.save({f"inner.{key}": tensor for key, tensor in built(config).state_dict().items()}, tmp_path / "m.safetensors")
    tt.load(model, tmp_path / "m.safetensors", dtype=torch.bfloat16, quantize={"*.o_proj.weight": "int8"})
    kept = {name for name, tensor in model.state_dict().items() if tensor.dtype == torch.float32}
    listed = tuple(model["inner"]._keep_in_fp32_modules_strict)  # transformers 5.23 lists the bias, 5.24 the gate too
    assert kept == {name for name in model.state_dict() if name.endswith(listed)}
    assert "inner.model.layers.1.mlp.gate.e_score_correction_bias" in kept


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


@pytest.mark.parametrize("stored", ["model.embed_tokens.weight", "lm_head.weight", "both"])
def test_tied_weights_stay_tied_whichever_names_the_checkpoint_stores(tmp_path, stored):
    from safetensors.torch import save_file

    from torchtether.integrations.transformers import TetherConfig

    auto, model = transformers.AutoModelForCausalLM, built(CONFIGS["tied"]())
    model.save_pretrained(tmp_path)
    left_out = {"model.embed_tokens.weight", "lm_head.weight"} - {stored} if stored != "both" else set()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items() if name not in left_out}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read = auto.from_pretrained(tmp_path, quantization_config=TetherConfig("int8"))
    assert read.lm_head.weight is read.model.embed_tokens.weight
    assert weights_of(read).keys() == weights_of(tt.quantize(model, "int8")).keys()
    assert torch.equal(logits_of(read), logits_of(model))


def test_rules_in_place_of_the_scheme_are_refused_with_the_argument_for_them():
    from torchtether.integrations.transformers import TetherConfig

    with pytest.raises(tt.ArgumentError, match=r"^scheme: is a mapping, not a scheme\. Give rules by glob as rules="):
        TetherConfig({"*_proj.weight": "nf4"})
    assert TetherConfig(tt.nf4().to_json()).scheme == tt.nf4().to_json()


def test_a_config_that_would_quantize_nothing_is_refused():
    from torchtether.integrations.transformers import TetherConfig

    with pytest.raises(tt.ArgumentError, match=r"^quantization_config: has neither a scheme nor rules\. Give them"):
        TetherConfig()
    assert TetherConfig(rules={"lm_head.weight": "int8"}).scheme is None
    assert TetherConfig.from_dict({"quant_method": "torchtether"}).scheme is None  # by ``torchtether quantize``


def test_arguments_of_other_libraries_configs_are_refused():
    from torchtether.integrations.transformers import TetherConfig

    fix = r"^modules_to_not_convert: is no argument of TetherConfig\. Choose parameters by rules="
    with pytest.raises(tt.ArgumentError, match=fix):
        TetherConfig("int8", modules_to_not_convert=["lm_head"])


@pytest.mark.parametrize("changed", [{"num_labels": 5}, {"vocab_size": 300}])
def test_a_tensor_of_another_shape_is_an_error_or_initialized_anew(tmp_path, changed):
    from torchtether.integrations.transformers import TetherConfig

    auto = transformers.AutoModelForSequenceClassification
    auto.from_config(transformers.LlamaConfig(**SMALL, pad_token_id=0, num_labels=3)).save_pretrained(tmp_path)
    config = TetherConfig(rules={"score.weight": "int8", "*embed_tokens.weight": "int8", "*q_proj*": "int8"})
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        auto.from_pretrained(tmp_path, **changed, quantization_config=config)
    model = auto.from_pretrained(tmp_path, **changed, quantization_config=config, ignore_mismatched_sizes=True)
    shapes = {"score.weight": (model.config.num_labels, 64), "model.embed_tokens.weight": (model.config.vocab_size, 64)}
    assert all(model.get_parameter(name).shape == shape for name, shape in shapes.items())
    renewed = "score.weight" if "num_labels" in changed else "model.embed_tokens.weight"
    assert shapes.keys() - weights_of(model).keys() == {renewed}
    assert model.get_parameter(renewed).isfinite().all()
    assert "model.layers.1.self_attn.q_proj.weight" in weights_of(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8", "nf4", "mxfp4", "nvfp4"])
def test_parts_keep_their_dtypes_and_a_weight_computes_in_the_dtype_asked_for(tmp_path, scheme, dtype):
    from torchtether.integrations.transformers import TetherConfig

    auto, config = transformers.AutoModelForCausalLM, CONFIGS["tied"]()
    built(config).save_pretrained(tmp_path / "plain")
    options = {"scheme": scheme if scheme != "int4" else tt.int4(group_size=32), "rules": {"*q_proj*": "fp8"}}
    model = auto.from_pretrained(tmp_path / "plain", quantization_config=TetherConfig(**options), dtype=dtype)
    model.save_pretrained(tmp_path / "saved")
    again = auto.from_pretrained(tmp_path / "saved", device_map="cpu", dtype=dtype)
    for name, weight in weights_of(model).items():
        read = again.get_parameter(name)
        assert read.spec.replace(tie=None) == weight.spec.replace(tie=None)
        assert all(torch.equal(one, read.parts[part]) for part, one in weight.parts.items())
    assert logits_of(again).dtype == dtype
    assert torch.equal(logits_of(again), logits_of(model))
    for half in (auto.from_pretrained(tmp_path / "saved", dtype=torch.float16), again.half()):
        for name, weight in weights_of(model).items():
            read = half.get_parameter(name)
            assert read.dtype == torch.float16
            assert torch.equal(read.dequantize(), weight.to(torch.float16).dequantize())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_modules_that_stay_in_float32_do_so_when_they_are_quantized(tmp_path, dtype):
    from torchtether.integrations.transformers import TetherConfig

    kind = transformers.T5ForConditionalGeneration
    kind(transformers.T5Config(vocab_size=64, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4)).save_pretrained(
        tmp_path / "plain"
    )
    plain = kind.from_pretrained(tmp_path / "plain", dtype=dtype)
    model = kind.from_pretrained(tmp_path / "plain", dtype=dtype, quantization_config=TetherConfig("int8"))
    model.save_pretrained(tmp_path / "saved")
    again = kind.from_pretrained(tmp_path / "saved", dtype=dtype)
    dtypes = {name: parameter.dtype for name, parameter in plain.named_parameters()}
    assert len(set(dtypes.values())) == (2 if dtype == torch.float16 else 1)  # of T5, transformers says so for float16
    for other in (model, again):
        assert {name: parameter.dtype for name, parameter in other.named_parameters()} == dtypes
    assert weights_of(again).keys() == weights_of(model).keys()


def test_a_base_model_reads_what_its_head_wrote_and_the_reverse(tmp_path):
    tt.quantize(built(CONFIGS["untied"]()), {"*_proj.weight": "int8"}).save_pretrained(tmp_path / "whole")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    whole.model.save_pretrained(tmp_path / "base")
    base = transformers.AutoModel.from_pretrained(tmp_path / "whole")
    around = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        wanted = whole.model(IDS).last_hidden_state
        assert torch.equal(base(IDS).last_hidden_state, wanted)
        assert torch.equal(around.model(IDS).last_hidden_state, wanted)
    assert len(weights_of(base)) == len(weights_of(around)) == len(weights_of(whole))


def _experts_in_a_vision_model():
    text = {**SMALL, **MOE, "num_experts": 4}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 8}
    vision |= {"out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


def _pi0():
    text = {**SMALL, "model_type": "gemma", "head_dim": 16}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 4, "image_size": 32, "patch_size": 8, "projection_dim": 64}
    whole = {"model_type": "paligemma", "text_config": text, "vision_config": vision, "projection_dim": 64}
    return transformers.PI0ForConditionalGeneration(transformers.PI0Config(vlm_config=whole, dit_config=text))


@pytest.mark.parametrize("make", [_experts_in_a_vision_model, _pi0])
def test_names_that_are_the_models_are_not_converted_again(tmp_path, make):
    from torchtether.integrations.transformers import TetherConfig

    kind = type(make())
    make().save_pretrained(tmp_path / "plain")
    model = kind.from_pretrained(tmp_path / "plain", quantization_config=TetherConfig("int8"))
    model.save_pretrained(tmp_path / "saved")
    again, found = kind.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(found.values())
    assert weights_of(again).keys() == weights_of(model).keys()
    tt.dequantize(again)
    tt.dequantize(model)
    again.save_pretrained(tmp_path / "dequantized")
    third = kind.from_pretrained(tmp_path / "dequantized")
    for other in (again, third):
        assert all(torch.equal(other.get_parameter(name), one) for name, one in model.named_parameters())


@pytest.mark.parametrize("shard", ["40KB", "1GB"])
def test_a_variant_beside_another_checkpoint_is_read(tmp_path, shard):
    auto, model = transformers.AutoModelForCausalLM, built(CONFIGS["untied"]())
    model.save_pretrained(tmp_path)
    plain = logits_of(model)
    tt.quantize(model, "int8").save_pretrained(tmp_path, variant="int8", max_shard_size=shard)
    again, found = auto.from_pretrained(tmp_path, variant="int8", output_loading_info=True)
    assert not any(found.values())
    assert weights_of(again).keys() == weights_of(model).keys()
    assert torch.equal(logits_of(again), logits_of(model))
    assert torch.equal(logits_of(auto.from_pretrained(tmp_path)), plain)


@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_weights_of_a_given_state_dict_are_quantized_once(scheme):
    """What has the wanted scheme keeps its codes, and what has another one is encoded again, as by ``tt.quantize``."""
    from torchtether.integrations.transformers import TetherConfig

    made = tt.quantize(built(CONFIGS["tied"]()), "int8")
    state, config = made.state_dict(), TetherConfig(scheme)
    model = type(made).from_pretrained(None, config=CONFIGS["tied"](), state_dict=state, quantization_config=config)
    wanted = weights_of(tt.quantize(made, scheme))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert wanted.keys() == weights_of(model).keys()
    for name, weight in weights_of(model).items():
        assert weight.scheme == wanted[name].scheme
        assert all(torch.equal(part, wanted[name].parts[key]) for key, part in weight.parts.items())


def _cut(tensors, key):
    tensors[key] = tensors[key][:5].clone()


def _retype(tensors, key):
    tensors[key] = tensors[key].to(torch.int32)


@pytest.mark.parametrize("spoil", [dict.pop, _cut, _retype])
def test_a_part_that_is_absent_or_wrong_is_an_error(tmp_path, spoil):
    from safetensors.torch import load_file, save_file

    tt.quantize(built(CONFIGS["tied"]()), "int8").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    spoil(tensors, "model.layers.0.self_attn.q_proj.weight.scale")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for read in (transformers.AutoModelForCausalLM.from_pretrained, tt.open):
        with pytest.raises(tt.CheckpointError, match=r"layers.0.self_attn.q_proj.weight: its part '(.*\.)?scale' is"):
            read(tmp_path)


def test_a_given_state_dict_is_what_is_saved(tmp_path):
    """Averages of the weights, or what FSDP gathered: transformers passes it to no quantizer."""
    config = CONFIGS["tied"]()
    model = tt.quantize(built(config), "int8")
    average = tt.quantize(built(config), "int8")
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.mul_(0.5)
    plain = tt.dequantize(copy.deepcopy(average))
    for number, one in enumerate((average, plain, model)):
        model.save_pretrained(tmp_path / str(number), state_dict=one.state_dict())
        model.save_pretrained(tmp_path / f"{number} in place", True, one.state_dict())
        for folder in (str(number), f"{number} in place"):
            read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
            assert weights_of(read).keys() == weights_of(one).keys()
            assert torch.equal(logits_of(read), logits_of(one))
            assert read.lm_head.weight is read.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "own")
    assert torch.equal(logits_of(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "own")), logits_of(model))


@pytest.mark.parametrize("embedding", ["cpu", "disk"])
def test_an_offloaded_model_is_saved(tmp_path, embedding):
    accelerate = pytest.importorskip("accelerate")
    model = tt.quantize(built(CONFIGS["tied"]()), "int8")
    wanted, kept = logits_of(model), weights_of(model).keys()
    tt.save(model, tmp_path / "source")
    places = dict.fromkeys(["model.embed_tokens", "lm_head"], embedding)
    places |= {"model.layers": "disk", "model.norm": "disk", "model.rotary_emb": "cpu"}
    with tt.open(tmp_path / "source") as checkpoint:
        accelerate.dispatch_model(model, places, state_dict=checkpoint, offload_index={})
        assert model.model.layers[1].mlp.up_proj.weight.is_meta
        model.save_pretrained(tmp_path / "saved")
        assert torch.equal(logits_of(model), wanted)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert weights_of(read).keys() == kept
    assert torch.equal(logits_of(read), wanted)


def test_a_model_dequantized_since_is_saved_as_if_it_had_never_been_quantized(tmp_path):
    from safetensors import safe_open

    from torchtether.integrations.transformers import TetherConfig

    auto = transformers.AutoModelForImageClassification
    config = transformers.ViTConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
    )
    auto.from_config(config).save_pretrained(tmp_path / "plain")
    model = auto.from_pretrained(tmp_path / "plain", quantization_config=TetherConfig("int8"))
    model.save_pretrained(tmp_path / "quantized")
    model = copy.deepcopy(model)
    tt.dequantize(model)
    model.save_pretrained(tmp_path / "again")
    keys = []
    for folder in ("plain", "again"):
        with safe_open(tmp_path / folder / "model.safetensors", "pt") as file:
            keys.append(set(file.keys()))
    assert keys[0] == keys[1]
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())


@pytest.mark.parametrize("is_config_first", [True, False])
def test_a_folder_of_ours_is_read_with_the_schemes_that_its_files_name(tmp_path, is_config_first):
    model = built(CONFIGS["tied"]())
    if is_config_first:
        model.config.save_pretrained(tmp_path)
    tt.save(tt.quantize(model, "int8"), tmp_path, max_shard_size="40KB")
    if not is_config_first:
        model.config.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert weights_of(again).keys() == weights_of(model).keys()
    assert torch.equal(logits_of(again), logits_of(model))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("how", ["quantize", "load"])
def test_what_we_quantized_is_saved_by_save_pretrained_and_read_by_either(tmp_path, name, how):
    model = built(CONFIGS[name]())
    rules = ASKED[name][1]
    if how == "quantize":
        tt.quantize(model, rules)
    else:
        tt.save(model, tmp_path / "plain")
        tt.load(model, tmp_path / "plain", quantize=rules)
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    with tt.on_meta():
        other = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    tt.load(other, tmp_path / "saved")
    for one in (again, other):
        assert weights_of(one).keys() == weights_of(model).keys()
        assert torch.equal(logits_of(one), logits_of(model))
    assert logits_of(model.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("path", ["model", "model.layers", "model.layers.1.mlp.up_proj"])
def test_a_model_of_which_a_part_was_quantized_alone_is_saved(tmp_path, path):
    model = built(CONFIGS["untied"]())
    tt.quantize(model.get_submodule(path), "int8")
    assert weights_of(model)
    model.save_pretrained(tmp_path)
    again, found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values())
    assert weights_of(again).keys() == weights_of(model).keys()
    assert torch.equal(logits_of(again), logits_of(model))


def test_a_plain_model_with_the_config_of_a_quantized_one_is_saved_as_plain(tmp_path):
    config = CONFIGS["untied"]()
    model, plain = built(config), transformers.LlamaForCausalLM(config).eval()
    assert plain.config is model.config
    tt.quantize(model, "int8")
    for one, name in ((plain, "plain"), (model, "quantized"), (plain, "again")):
        one.save_pretrained(tmp_path / name)
        described = json.loads((tmp_path / name / "config.json").read_text())
        assert ("quantization_config" in described) == (one is model)
        read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert weights_of(read).keys() == weights_of(one).keys()
        assert torch.equal(logits_of(read), logits_of(one))


def test_a_plain_model_with_the_config_of_a_quantized_folder_is_saved_as_plain(tmp_path):
    """A config that is read by itself describes the quantization by a mapping."""
    from torchtether.integrations.transformers import TetherConfig

    auto = transformers.AutoModelForCausalLM
    built(CONFIGS["untied"]()).save_pretrained(tmp_path / "plain")
    auto.from_pretrained(tmp_path / "plain", quantization_config=TetherConfig("int8")).save_pretrained(tmp_path)
    fresh = built(transformers.AutoConfig.from_pretrained(tmp_path))
    fresh.save_pretrained(tmp_path / "fresh")
    read = auto.from_pretrained(tmp_path / "fresh")
    assert not weights_of(read)
    assert torch.equal(logits_of(read), logits_of(fresh))


@pytest.mark.parametrize("how", ["quantize", "from_pretrained"])
def test_the_config_of_a_live_quantized_model_is_taken(tmp_path, how):
    from torchtether.integrations.transformers import TetherConfig

    auto, plain = transformers.AutoModelForCausalLM, built(CONFIGS["tied"]())
    plain.save_pretrained(tmp_path / "plain")
    if how == "quantize":
        model = tt.quantize(built(CONFIGS["tied"]()), "int8")
    else:
        model = auto.from_pretrained(tmp_path / "plain", quantization_config=TetherConfig("int8"))
        assert model.config.quantization_config is model.hf_quantizer.quantization_config  # it names the scheme
    for is_saved in (False, True):
        read = auto.from_pretrained(tmp_path / "plain", config=model.config)
        expected = plain if how == "quantize" else model
        assert weights_of(read).keys() == weights_of(expected).keys(), is_saved
        assert torch.equal(logits_of(read), logits_of(expected)), is_saved
        model.save_pretrained(tmp_path / "quantized")
    read = auto.from_pretrained(tmp_path / "quantized", config=model.config)
    assert weights_of(read).keys() == weights_of(model).keys()
    assert torch.equal(logits_of(read), logits_of(model))


def test_quantize_that_fails_leaves_no_quantizer(monkeypatch):
    from torchtether.exchange.exchange import Exchange

    model = built(CONFIGS["tied"]())

    def interrupted(self):
        if weights_of(model):
            raise KeyboardInterrupt

    monkeypatch.setattr(Exchange, "safe_point", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tt.quantize(model, "int8", atomic="full")
    assert not weights_of(model)
    assert getattr(model, "hf_quantizer", None) is None
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("name", [*EXPERTS, "gpt2"])
def test_a_bare_scheme_chooses_experts_and_conv1d_and_the_report_says_what_stays_float(tmp_path, name):
    config = transformers.GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4) if name == "gpt2" else (
        EXPERTS[name]()
    )  # fmt: skip
    tt.save(built(config), tmp_path)
    with tt.on_meta():
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    plan = tt.plan_load(model, tmp_path, quantize="int8")
    report = plan.apply()
    experts = [n for n, p in model.named_parameters() if p.dim() == 3 or (".c_" in n and p.dim() == 2)]
    assert experts
    assert set(experts) <= weights_of(model).keys()
    floats = {n: p.numel() * 4 for n, p in model.named_parameters() if p.dim() > 1 and not isinstance(p, tt.Weight)}
    assert report.floats == floats
    assert list(report.floats.values()) == sorted(report.floats.values(), reverse=True)
    for text in (str(plan), str(report)):
        assert f"of matrices stay float: {next(iter(report.floats))}" in text
    assert torch.equal(logits_of(model), logits_of(tt.quantize(built(config), "int8")))


@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.parametrize("scheme", [None, "int8", tt.Mastered(tt.int8())], ids=str)
def test_trainer_without_adapters_makes_checkpoints_and_resumes(tmp_path, name, scheme):
    """``scheme`` is that of the Weights that are trained; without one, they are frozen."""
    from torchtether.integrations.transformers import TetherConfig

    built(CONFIGS[name]()).save_pretrained(tmp_path / "plain")
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 256, (8, 6))]

    def loaded():
        config = TetherConfig(scheme or "int8")
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
        return model.requires_grad_(True) if scheme else model

    def trained(steps, resume=None):
        model = loaded()
        arguments = transformers.TrainingArguments(
            str(tmp_path / "runs"), max_steps=steps, save_steps=2, learning_rate=1e-2, use_cpu=True, report_to=[],
            per_device_train_batch_size=2, logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        torch.manual_seed(0)  # of stochastic rounding
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        return model

    first = trained(4)
    again = trained(4, str(tmp_path / "runs" / "checkpoint-2"))
    resumed = trained(4, str(tmp_path / "runs" / "checkpoint-4"))
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "checkpoint-4")
    for other in (again, resumed, read):
        assert weights_of(other).keys() == weights_of(first).keys()
        assert torch.equal(logits_of(other), logits_of(first))
    start = loaded()
    assert not torch.equal(first.model.norm.weight, start.model.norm.weight)
    weights = weights_of(start).items()
    assert all(torch.equal(w.dequantize(), first.get_parameter(n).dequantize()) != bool(scheme) for n, w in weights)


@pytest.mark.parametrize("size", ["5GB", "60KB"])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_accelerates_load_checkpoint_in_model_reads_the_files_of_save_pretrained(tmp_path, name, size):
    """torch's ``set_model_state_dict``, which it calls, adds the model's own tensors to the state dict."""
    accelerate = pytest.importorskip("accelerate")
    model = tt.quantize(built(CONFIGS[name]()), "int8")
    model.save_pretrained(tmp_path, max_shard_size=size)
    held, wanted = dict(model.named_parameters(remove_duplicate=False)), logits_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    assert not torch.equal(logits_of(model), wanted)
    accelerate.load_checkpoint_in_model(model, tmp_path)
    assert torch.equal(logits_of(model), wanted)
    assert all(model.get_parameter(name) is one for name, one in held.items())


def test_a_weight_in_two_shards_is_refused_with_the_call_that_reads_it(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = tt.quantize(built(CONFIGS["tied"]()), "nf4")
    model.save_pretrained(tmp_path, max_shard_size="1KB")
    wanted = logits_of(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(tt.CheckpointError, match=r"is not stored\. If it .* tt\.load\(model, folder\)\.$"):
        accelerate.load_checkpoint_in_model(model, tmp_path)
    tt.load(model, tmp_path)
    assert torch.equal(logits_of(model), wanted)


@pytest.mark.parametrize("how", ["quantize", "from_pretrained"])
def test_load_state_dict_reads_the_files_of_save_pretrained(tmp_path, how):
    from safetensors.torch import load_file

    from torchtether.integrations.transformers import TetherConfig

    auto, config = transformers.AutoModelForCausalLM, CONFIGS["untied"]()
    built(config).save_pretrained(tmp_path / "plain")
    if how == "quantize":
        model = tt.quantize(built(config), "int8")
    else:
        model = auto.from_pretrained(tmp_path / "plain", quantization_config=TetherConfig("int8"))
    model.save_pretrained(tmp_path)
    held, wanted, state = dict(model.named_parameters()), logits_of(model), load_file(tmp_path / "model.safetensors")
    for assign in (False, True):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        assert not torch.equal(logits_of(model), wanted)
        assert not any(model.load_state_dict(state, assign=assign))
        assert torch.equal(logits_of(model), wanted)
        assert all(model.get_parameter(name) is weight for name, weight in weights_of(model).items())
    for spoil in (dict.pop, _cut, _retype):
        spoiled = {key: tensor * 2 for key, tensor in state.items()}
        spoil(spoiled, "model.layers.1.self_attn.q_proj.weight.scale")
        with pytest.raises(tt.CheckpointError, match=r"layers.1.self_attn.q_proj.weight: its part '(.*\.)?scale' is"):
            model.load_state_dict(spoiled, strict=False)
        assert torch.equal(logits_of(model), wanted)
    model.load_state_dict(built(config).state_dict(), assign=True)
    assert weights_of(model).keys() == {name for name, one in held.items() if isinstance(one, tt.Weight)}


def test_parameters_on_disk_are_refused_and_not_read_as_floats(tmp_path):
    from torchtether.integrations.transformers import TetherConfig

    auto, places = transformers.AutoModelForCausalLM, {"": "cpu", "model.layers.1": "disk"}
    built(CONFIGS["tied"]()).save_pretrained(tmp_path / "plain")
    config = TetherConfig("int8")
    auto.from_pretrained(tmp_path / "plain", quantization_config=config).save_pretrained(tmp_path / "saved")
    for folder, options in (("plain", {"quantization_config": config}), ("saved", {})):
        with pytest.raises(tt.CheckpointError, match=r"device_map: a Weight cannot be placed.* state_dict=tt.open"):
            auto.from_pretrained(tmp_path / folder, device_map=places, offload_folder=tmp_path / "off", **options)


@pytest.mark.parametrize("device_map", ["auto", "sequential"])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_device_map_is_planned_with_the_bytes_of_weights(tmp_path, device_map, scheme):
    """With those of the floats, a part of the model would go to "disk"."""
    from torchtether.integrations.transformers import TetherConfig

    auto, plain = transformers.AutoModelForCausalLM, built(CONFIGS["tied"]())
    plain.save_pretrained(tmp_path / "plain")
    model = tt.quantize(copy.deepcopy(plain), scheme)
    model.save_pretrained(tmp_path / "quantized")
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    for folder, room, options in (
        ("plain", 1.25, {"quantization_config": TetherConfig(scheme)}),
        ("quantized", 1.1, {}),
    ):
        places = {"device_map": device_map, "max_memory": {"cpu": int(size * room)}}
        read = auto.from_pretrained(tmp_path / folder, **places, **options)
        assert torch.equal(logits_of(read), logits_of(model))
        assert read.lm_head.weight is read.model.embed_tokens.weight
        with pytest.raises(tt.CheckpointError, match="cannot be placed on 'disk'"):
            auto.from_pretrained(tmp_path / folder, **{**places, "max_memory": {"cpu": int(size * 0.9)}}, **options)


def quantized_by_command(folder, config, auto):
    from torchtether.cli.main import main

    torch.manual_seed(0)
    auto.from_config(config).save_pretrained(folder / "plain")
    assert main(["quantize", str(folder / "plain"), str(folder / "made"), "--scheme", "int8"]) == 0
    return folder / "made"


def test_what_the_command_line_quantized_is_read_under_published_names(tmp_path):
    auto = transformers.AutoModelForImageClassification
    config = transformers.ViTConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
    )
    folder = quantized_by_command(tmp_path, config, auto)
    model, found = auto.from_pretrained(folder, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    reference = auto.from_pretrained(tmp_path / "plain")
    names = weights_of(model)
    assert names
    tt.quantize(reference, {name: "int8" for name in names})
    assert all(torch.equal(names[n].dequantize(), w.dequantize()) for n, w in weights_of(reference).items())


def test_experts_quantized_one_by_one_are_refused_and_never_random(tmp_path):
    folder = quantized_by_command(tmp_path, EXPERTS["mixtral"](), transformers.AutoModelForCausalLM)
    with pytest.raises(tt.CheckpointError, match=r"experts.0.w1.weight: is quantized by itself.* tt.load"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(EXPERTS["mixtral"]()).eval()
    tt.load(model, folder)
    reference = tt.quantize(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), {
        name: "int8" for name in weights_of(model)
    })  # fmt: skip
    assert any(weight.dim() == 3 for weight in weights_of(model).values())
    assert torch.equal(logits_of(model), logits_of(reference))


def test_the_config_of_a_quantized_model_serves_for_others(tmp_path):
    """Quantizing puts our settings into it, and transformers reads settings in a config as those of the files."""
    config = transformers.LlamaConfig(**SMALL)
    plain = built(config)
    plain.save_pretrained(tmp_path / "plain")
    model = tt.quantize(transformers.AutoModelForCausalLM.from_config(config), "int8")
    model.save_pretrained(tmp_path / "quantized")
    for folder, count in {"plain": 0, "quantized": len(weights_of(model))}.items():
        other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, config=model.config)
        assert len(weights_of(other)) == count
        held = model if count else plain
        assert torch.equal(logits_of(other.eval()), logits_of(held.eval()))


def test_the_guide_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "tutorials" / "guides" / "integrations.md").read_text()
    code, _ = re.findall(r"```py\n(.*?)```", text, re.DOTALL)  # the second is in test_diffusers_folders.py
    exec(compile(code, "integrations.md", "exec"), {})


def pretend(monkeypatch, version):
    """Let ours see another version. transformers replaces its own module at the first import of its processors."""
    ours = importlib.import_module("torchtether.integrations.transformers_version")
    monkeypatch.setattr(ours.transformers, "__version__", version)


@pytest.mark.parametrize("version", ["5.0.0", "5.20.2", "5.22.2"])
def test_an_old_transformers_is_refused_and_never_gives_random_values(tmp_path, monkeypatch, version):
    from torchtether.integrations.transformers import TetherConfig

    auto = transformers.AutoModelForCausalLM
    model = built(CONFIGS["tied"]())
    model.save_pretrained(tmp_path / "plain")
    tt.quantize(model, "int8").save_pretrained(tmp_path / "quantized")
    pretend(monkeypatch, version)
    for folder, options in {"plain": {"quantization_config": TetherConfig("int8")}, "quantized": {}}.items():
        with pytest.raises(ImportError, match="^transformers: .*5.23 or newer. Update") as caught:
            auto.from_pretrained(tmp_path / folder, **options)
        assert version in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_transformers_without_the_modules_that_ours_imports_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)  # as in transformers 4
    monkeypatch.delitem(sys.modules, "torchtether.integrations.transformers", raising=False)
    with pytest.raises(ImportError, match="core_model_loading"):
        importlib.import_module("torchtether.integrations.transformers")
    pretend(monkeypatch, "4.57.6")
    with pytest.raises(ImportError, match="this is 4.57.6, .* 5.23 or newer"):
        importlib.import_module("torchtether.integrations.transformers")
