"""Folders that transformers wrote, loaded by ``tt.load`` alone, as ``from_pretrained`` does: names, ties, buffers.

Every architecture is built under ``tt.on_meta()`` and under plain ``torch.device("meta")``.
"""

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import torchtether as tt
import torchtether.distributed
from tests.distributed.nets import same_rows
from tests.distributed.spawn import spawn

transformers = pytest.importorskip("transformers")
transformers_names = pytest.importorskip("torchtether.integrations.transformers_names").transformers_names
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # what transformers warns about

SMALL = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "pad_token_id": 0}
ENCODER = {**SMALL, "intermediate_size": 48, "pad_token_id": 0}
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
GPT = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
STATES = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
TWO_SIDED = {
    "vocab_size": 128, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip
SPEECH = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 32,
    "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "pad_token_id": 0,
}  # fmt: skip
PAIR = {"text_config": {**ENCODER, "max_position_embeddings": 32}, "vision_config": VISION}
MOE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
}  # fmt: skip

IDS = torch.arange(3, 15).view(2, 6)
INPUTS = {
    "text": {"input_ids": IDS},
    "both": {"input_ids": IDS, "decoder_input_ids": IDS},
    "image": {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)},
    "image32": {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)},
    "sound": {"input_values": torch.linspace(-1, 1, 2 * 800).view(2, 800)},
    "spectrum": {"input_features": torch.linspace(-1, 1, 2 * 16 * 40).view(2, 16, 40), "decoder_input_ids": IDS},
    "patches": {"input_values": torch.linspace(-1, 1, 2 * 32 * 16).view(2, 32, 16)},
    "pair": {"input_ids": IDS, "pixel_values": torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)},
    "inside": {
        "input_ids": torch.tensor([[3, 127, 127, 127, 127, 9]]),
        "pixel_values": torch.linspace(-1, 1, 3 * 16 * 16).view(1, 3, 16, 16),
    },
    "grid": {
        "input_ids": torch.tensor([[3, 125, 127, 126, 9, 10]]), "image_grid_thw": torch.tensor([[1, 2, 2]]),
        "pixel_values": torch.linspace(-1, 1, 4 * 3 * 2 * 8 * 8).view(4, -1),
        "mm_token_type_ids": torch.tensor([[0, 0, 1, 0, 0, 0]]),
    },
}  # fmt: skip

ARCHITECTURES = {
    # decoders
    "llama": ("LlamaForCausalLM", {**DECODER, "tie_word_embeddings": True}, "text"),
    "llama3": (
        "LlamaForCausalLM",
        {
            **DECODER, "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            },
        },
        "text",
    ),
    "mistral": ("MistralForCausalLM", DECODER, "text"),
    "qwen2": ("Qwen2ForCausalLM", DECODER, "text"),
    "qwen3": ("Qwen3ForCausalLM", {**DECODER, "head_dim": 8}, "text"),
    "gemma2": ("Gemma2ForCausalLM", {**DECODER, "head_dim": 8}, "text"),
    "gemma3": ("Gemma3ForCausalLM", {**DECODER, "head_dim": 8}, "text"),
    "phi3": ("Phi3ForCausalLM", DECODER, "text"),
    "gpt2": ("GPT2LMHeadModel", GPT, "text"),
    "gptj": ("GPTJForCausalLM", {**GPT, "rotary_dim": 8}, "text"),
    "gpt_neox": ("GPTNeoXForCausalLM", ENCODER, "text"),
    "opt": (
        "OPTForCausalLM",
        {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 32, "pad_token_id": 0},
        "text",
    ),
    "bloom": ("BloomForCausalLM", {"vocab_size": 128, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "text"),
    "falcon": ("FalconForCausalLM", SMALL, "text"),
    "mpt": ("MptForCausalLM", {"vocab_size": 128, "d_model": 32, "n_layers": 2, "n_heads": 4}, "text"),
    "olmo2": ("Olmo2ForCausalLM", DECODER, "text"),
    "cohere2": ("Cohere2ForCausalLM", DECODER, "text"),
    "starcoder2": ("Starcoder2ForCausalLM", DECODER, "text"),
    "glm4": ("Glm4ForCausalLM", {**DECODER, "head_dim": 8}, "text"),
    # experts
    "mixtral": ("MixtralForCausalLM", {**DECODER, "num_local_experts": 4}, "text"),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM", {**DECODER, **MOE, "num_experts": 4, "shared_expert_intermediate_size": 16}, "text",
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**DECODER, **MOE, "num_experts": 4, "head_dim": 8}, "text"),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {**DECODER, **MOE, **MLA}, "text"),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**DECODER, **MOE, **MLA}, "text"),
    "gpt_oss": (
        "GptOssForCausalLM", {**DECODER, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, "text",
    ),
    "olmoe": ("OlmoeForCausalLM", {**DECODER, "num_experts": 4, "num_experts_per_tok": 2}, "text"),
    "phimoe": ("PhimoeForCausalLM", {**DECODER, "num_local_experts": 4}, "text"),
    "granitemoe": ("GraniteMoeForCausalLM", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}, "text"),
    # state spaces
    "mamba": ("MambaForCausalLM", STATES, "text"),
    "mamba2": ("Mamba2ForCausalLM", {**STATES, "num_heads": 8, "head_dim": 8}, "text"),
    "jamba": (
        "JambaForCausalLM",
        {
            **DECODER, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
            "expert_layer_offset": 0, "mamba_d_state": 8, "use_mamba_kernels": False,
        },
        "text",
    ),
    # encoders
    "bert": ("BertForMaskedLM", ENCODER, "text"),
    "roberta": ("RobertaForMaskedLM", {**ENCODER, "max_position_embeddings": 32}, "text"),
    "distilbert": (
        "DistilBertForMaskedLM", {"vocab_size": 128, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}, "text",
    ),
    "albert": ("AlbertForMaskedLM", {**ENCODER, "embedding_size": 16}, "text"),
    "electra": ("ElectraForMaskedLM", {**ENCODER, "embedding_size": 16}, "text"),
    "deberta_v2": (
        "DebertaV2ForMaskedLM",
        {**ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_position_embeddings": 32},
        "text",
    ),
    "modernbert": ("ModernBertForMaskedLM", ENCODER, "text"),
    # both sides
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}, "both",
    ),
    "bart": ("BartForConditionalGeneration", TWO_SIDED, "both"),
    "pegasus": ("PegasusForConditionalGeneration", TWO_SIDED, "both"),
    "marian": ("MarianMTModel", TWO_SIDED, "both"),
    # sound
    "whisper": (
        "WhisperForConditionalGeneration",
        {**TWO_SIDED, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32}, "spectrum",
    ),
    "wav2vec2": ("Wav2Vec2ForCTC", SPEECH, "sound"),
    "hubert": ("HubertForCTC", SPEECH, "sound"),
    "ast": (
        "ASTForAudioClassification",
        {**VISION, "num_mel_bins": 16, "max_length": 32, "frequency_stride": 8, "time_stride": 8}, "patches",
    ),
    # images
    "vit": ("ViTForImageClassification", VISION, "image"),
    "deit": ("DeiTForImageClassification", VISION, "image"),
    "beit": ("BeitForImageClassification", {**VISION, "use_relative_position_bias": True}, "image"),
    "swin": (
        "SwinForImageClassification",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        "image32",
    ),
    "convnext": (
        "ConvNextForImageClassification", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}, "image",
    ),
    "resnet": (
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}, "image",
    ),
    "dinov2": ("Dinov2ForImageClassification", VISION, "image"),
    "segformer": (
        "SegformerForSemanticSegmentation",
        {
            "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
            "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
        },
        "image",
    ),
    # several kinds
    "clip": ("CLIPModel", {**PAIR, "projection_dim": 16}, "pair"),
    "siglip": ("SiglipModel", PAIR, "pair"),
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "text_config": {**DECODER, "model_type": "llama"}, "image_token_index": 127,
            "vision_config": {**VISION, "model_type": "clip_vision_model", "projection_dim": 16},
            "vision_feature_layer": -2,
        },
        "inside",
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {
                **DECODER, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
            },
            "vision_config": {
                "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 8,
                "out_hidden_size": 32, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 32,
                "fullatt_block_indexes": [1],
            },
            "image_token_id": 127, "video_token_id": 124, "vision_start_token_id": 125, "vision_end_token_id": 126,
        },
        "grid",
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        {
            "text_config": {
                **DECODER, **MOE, "num_experts": 4, "head_dim": 8,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
            },
            "vision_config": {
                "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 8,
                "out_hidden_size": 32, "spatial_merge_size": 2, "temporal_patch_size": 2,
                "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
            },
            "image_token_id": 127, "video_token_id": 124, "vision_start_token_id": 125, "vision_end_token_id": 126,
        },
        "grid",
    ),
}  # fmt: skip
BUILT = {"on_meta": tt.on_meta, "device": lambda: torch.device("meta")}


def config_of(name):
    kind, settings, _ = ARCHITECTURES[name]
    kind = getattr(transformers, kind)
    return kind, kind.config_class(**settings)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Folders as ``save_pretrained`` writes them, each made once, of models whose values are all of their own."""
    made = {}

    def folder(name):
        if name not in made:
            torch.manual_seed(0)
            kind, config = config_of(name)
            model = kind(config)
            with torch.no_grad():
                for one in model.parameters():
                    one.add_(torch.randn_like(one), alpha=0.02)  # also where an initial value is 0 or 1
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name])
        return made[name]

    return folder


def tensors_of(model):
    kinds = (model.named_parameters, model.named_buffers)
    return {name: tensor for kind in kinds for name, tensor in kind(remove_duplicate=False)}


def ties_of(model):
    tensors = tensors_of(model)
    return {name: [other for other, one in tensors.items() if one is tensor] for name, tensor in tensors.items()}


def outputs_of(model, name):
    """Every tensor that the model returns for the inputs of this architecture."""

    def tensors(value):
        if isinstance(value, torch.Tensor):
            return [value]
        return [one for part in value for one in tensors(part)] if isinstance(value, tuple) else []

    model = copy.deepcopy(model)  # what is mapped from a file lies at other addresses, where products round otherwise
    with torch.no_grad():
        return tensors(model(**INPUTS[ARCHITECTURES[name][2]]).to_tuple())


def check_same(model, peer):
    """Every parameter and buffer is bit for bit that of ``peer``, and they are tied alike."""
    found, wanted = tensors_of(model), tensors_of(peer)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    assert ties_of(model) == ties_of(peer)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_save_pretrained_wrote_is_loaded_as_from_pretrained_loads_it(name, folder_of):
    kind, config = config_of(name)
    peer = kind.from_pretrained(folder_of(name)).eval()
    wanted = outputs_of(peer, name)
    assert wanted
    for build in BUILT.values():
        with build():
            model = kind(config).eval()
        before, state = dict(model.named_parameters()), torch.get_rng_state()
        report = tt.load(model, folder_of(name))
        assert torch.equal(torch.get_rng_state(), state)
        assert report.missing_keys == report.unexpected_keys == report.on_meta == ()
        assert all(one is before[name] for name, one in model.named_parameters())
        check_same(model, peer)
        assert all(torch.equal(*pair) for pair in zip(outputs_of(model, name), wanted, strict=True))


FEW = ["llama", "mixtral", "deepseek_v3", "vit", "marian", "qwen3_vl_moe"]


def loaded(name, folder, build="device", **options):
    kind, config = config_of(name)
    with BUILT[build]():
        model = kind(config).eval()
    tt.load(model, folder, **options)
    return model


def from_peer(name, folder):
    return config_of(name)[0].from_pretrained(folder).eval()


# -- with the other arguments of a load -------------------------------------------------------------------------------


@pytest.mark.parametrize("build", BUILT)
@pytest.mark.parametrize("name", FEW)
def test_quantizing_on_the_way_gives_what_quantizing_afterwards_does(name, build, folder_of):
    peer, model = (
        tt.quantize(from_peer(name, folder_of(name)), "int8"),
        loaded(name, folder_of(name), build, quantize="int8"),
    )
    found, wanted = tensors_of(model), tensors_of(peer)
    assert any(isinstance(one, tt.Weight) for one in wanted.values())
    for key, tensor in wanted.items():
        assert isinstance(found[key], tt.Weight) == isinstance(tensor, tt.Weight), key
        assert torch.equal(
            *(one.dequantize() if isinstance(one, tt.Weight) else one for one in (found[key], tensor))
        ), key
    assert ties_of(model) == ties_of(peer)


@pytest.mark.parametrize("name", FEW)
def test_what_tt_save_wrote_is_loaded_by_its_own_names(name, folder_of, tmp_path):
    model = loaded(name, folder_of(name))
    tt.save(model, tmp_path / "own")
    tt.save(tt.quantize(loaded(name, folder_of(name)), "int8"), tmp_path / "int8")
    check_same(loaded(name, tmp_path / "own"), model)
    assert any(isinstance(one, tt.Weight) for one in tensors_of(loaded(name, tmp_path / "int8")).values())


def test_shards_mapped_memory_and_dtypes(folder_of, tmp_path):
    peer = from_peer("mixtral", folder_of("mixtral"))
    peer.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check_same(loaded("mixtral", tmp_path, mmap=True), peer)
    model = loaded("mixtral", tmp_path, dtype=torch.bfloat16)
    assert all(torch.equal(one, two.bfloat16()) for one, two in zip(model.parameters(), peer.parameters(), strict=True))


def test_a_real_model_is_filled_in_the_memory_that_it_has(folder_of):
    kind, config = config_of("mixtral")
    model = kind(config)
    places = {name: one.data_ptr() for name, one in model.named_parameters()}
    tt.load(model, folder_of("mixtral"))
    assert {name: one.data_ptr() for name, one in model.named_parameters()} == places
    check_same(model, from_peer("mixtral", folder_of("mixtral")))


def test_part_of_a_model_with_only(folder_of):
    kind, config = config_of("mixtral")
    with torch.device("meta"):
        model = kind(config)
    plan = tt.plan_load(model, folder_of("mixtral"))
    plan.apply(only="model.layers.0.*")
    assert model.model.rotary_emb.inv_freq.is_meta
    assert not model.model.layers[0].mlp.experts.gate_up_proj.is_meta
    plan.apply()
    check_same(model, from_peer("mixtral", folder_of("mixtral")))


def test_experts_that_are_stored_quantized_are_joined_without_decoding(folder_of, tmp_path):
    stored = load_file(folder_of("mixtral") / "model.safetensors")
    codes = {name: tt.Weight.encode(one, tt.int8()) if "expert" in name else one for name, one in stored.items()}
    tt.save(codes, tmp_path)
    model = loaded("mixtral", tmp_path)
    experts = model.model.layers[1].mlp.experts
    halves = [codes[f"model.layers.1.block_sparse_moe.experts.2.{w}.weight"].dequantize() for w in ("w1", "w3")]
    assert isinstance(experts.gate_up_proj, tt.Weight)
    assert torch.equal(experts.gate_up_proj.dequantize()[2], torch.cat(halves))


# -- the base model, and names of old ---------------------------------------------------------------------------------


@pytest.mark.parametrize("build", BUILT)
def test_the_prefix_of_the_base_model_is_added_and_removed(build, folder_of, tmp_path):
    whole = from_peer("llama", folder_of("llama"))
    whole.model.save_pretrained(tmp_path)
    check_same(loaded("llama", tmp_path, build), whole)
    with BUILT[build]():
        base = transformers.LlamaModel(whole.config)
    tt.load(base, folder_of("llama"))
    check_same(base, whole.model)


def test_a_head_that_one_side_has_alone_is_a_fault(folder_of, tmp_path):
    kind, config = config_of("llama3")
    with torch.device("meta"):
        model, base = kind(config), transformers.LlamaModel(config)
    assert [fault.partition(":")[0] for fault in tt.plan_load(base, folder_of("llama3")).faults] == ["lm_head.weight"]
    assert tt.load(base, folder_of("llama3"), strict=False).unexpected_keys == ("lm_head.weight",)
    base.save_pretrained(tmp_path)
    assert [fault.partition(":")[0] for fault in tt.plan_load(model, tmp_path).faults] == ["lm_head.weight"]


def test_names_of_old_and_names_to_ignore(folder_of, tmp_path):
    stored = load_file(folder_of("bert") / "model.safetensors")
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for n, t in stored.items()
    }
    assert old.keys() != stored.keys()
    ignored = dict.fromkeys(["bert.embeddings.position_ids", "bert.once.position_ids"], torch.arange(5))
    save_file({**old, **{key: one.clone() for key, one in ignored.items()}}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder_of("bert") / "config.json").read_text())
    check_same(loaded("bert", tmp_path), from_peer("bert", folder_of("bert")))


# -- faults -----------------------------------------------------------------------------------------------------------


def plan_without(name, folder, left_out, target):
    stored = load_file(folder / "model.safetensors")
    assert left_out(stored.keys())
    save_file(
        {key: one for key, one in stored.items() if key not in left_out(stored.keys())}, target / "model.safetensors"
    )
    kind, config = config_of(name)
    with torch.device("meta"):
        return tt.plan_load(kind(config), target / "model.safetensors")


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (r"layers.1.block_sparse_moe.experts.2.", ["without number 2", "without number 2"]),
        (
            r"layers.1.block_sparse_moe.experts.3.w2",
            ["the checkpoint has shape (3, 32, 48), the model has (4, 32, 48)"],
        ),
        (r"layers.0.self_attn.q_proj", ["the checkpoint does not have it"]),
    ],
)
def test_what_a_folder_lacks_is_named(lost, said, folder_of, tmp_path):
    plan = plan_without("mixtral", folder_of("mixtral"), lambda keys: {key for key in keys if lost in key}, tmp_path)
    assert len(plan.faults) == len(said)
    assert all(text in fault for text, fault in zip(said, plan.faults, strict=True)), plan.faults


def test_a_projection_without_its_other_half_is_named(folder_of, tmp_path):
    plan = plan_without("mixtral", folder_of("mixtral"), lambda keys: {key for key in keys if ".w3." in key}, tmp_path)
    assert len(plan.faults) == 2
    assert all("nothing for" in fault and "w3" in fault for fault in plan.faults)


# -- each operation of transformers -----------------------------------------------------------------------------------

PIECES = ["q.weight", "k.weight", "v.weight"]
THIRDS = dict.fromkeys(PIECES, (16, 4))
EXPERTS = {f"experts.{i}.{w}.weight": (6, 4) for i in range(4) for w in ("w1", "w3")}
LIST, BOTH = "experts.*.w1.weight", ["experts.*.w1.weight", "experts.*.w3.weight"]


def operations():
    """Source and target patterns, the operations between them, the shapes that are stored, those of the model."""
    from transformers import core_model_loading as ops

    chunk, stack, turned = ops.Chunk(dim=0), ops.MergeModulelist(dim=0), ops.Transpose(0, 1, check_dims=True)
    rotary = ops.PermuteForRope(permute_layer_names=["q.", "k."])
    text_and_vision = ops.ErnieFuseAndSplitTextVisionExperts(stack_dim=0, concat_dim=1)
    unequal = {"q.weight": (8, 4), "k.weight": (4, 4), "v.weight": (4, 4)}
    lone = {key: shape for key, shape in EXPERTS.items() if "w1" in key}
    fused, halves = {"text.w": (2, 12, 4), "vision.w": (2, 12, 4)}, {"b.weight": (3, 4, 4), "c.weight": (3, 4, 4)}

    def one(operation, before, after, name="b"):
        return "a.weight", f"{name}.weight", [operation], {"a.weight": before}, {f"{name}.weight": after}

    return {
        "chunk": ("qkv.weight", PIECES, [chunk], {"qkv.weight": (48, 4)}, THIRDS),
        "split": ("qkv.weight", PIECES, [ops.Split(dim=0)], {"qkv.weight": (16, 4)}, unequal),
        "rotary": one(ops.PermuteForRope(), (16, 4), (16, 4)),
        "rotary_back": one(ops.PermuteForRope(inverse=True), (16,), (16,)),
        "rotary_of_chunks": ("qkv.weight", PIECES, [chunk, rotary], {"qkv.weight": (48, 4)}, THIRDS),
        "concatenate": (PIECES, "c.weight", [ops.Concatenate(dim=0)], unequal, {"c.weight": (16, 4)}),
        "stack": (LIST, "experts.w1", [stack], lone, {"experts.w1": (4, 6, 4)}),
        "stack_of_halves": (BOTH, "experts.w", [stack, ops.Concatenate(dim=1)], EXPERTS, {"experts.w": (4, 12, 4)}),
        "transpose": one(ops.Transpose(0, 1), (4, 6), (6, 4)),
        "transpose_in_place": one(turned, (4, 6), (6, 4), "a"),
        "transpose_nothing": ("a.weight", "a.weight", [turned], {"parts.a.weight": (6, 4)}, {"a.weight": (6, 4)}),
        "interleave": one(ops.Interleave(dim=1), (3, 8, 4), (3, 8, 4)),
        "interleave_back": one(ops.Interleave(dim=0, inverse=True), (8, 4), (8, 4)),
        "interleave_chunks": (
            "a.weight", ["b.weight", "c.weight"], [ops.Interleave(dim=1), ops.Chunk(dim=1)], {"a.weight": (3, 8, 4)},
            halves,
        ),
        "text_and_vision": (BOTH, ["text.w", "vision.w"], [text_and_vision], EXPERTS, fused),
    }  # fmt: skip


class Parts(transformers.PreTrainedModel):
    """A model with parameters of given names and shapes."""

    config_class = transformers.PreTrainedConfig
    base_model_prefix = "parts"

    def __init__(self, config):
        super().__init__(config)
        for name, shape in config.shapes.items():
            path, _, leaf = name.rpartition(".")
            if path not in dict(self.named_modules()):
                self.add_module(path, nn.Module())
            self.get_submodule(path).register_parameter(leaf, nn.Parameter(torch.zeros(shape)))
        self.post_init()


@pytest.fixture
def mapped():
    """Register a conversion mapping for ``Parts``, for one test."""
    from transformers import conversion_mapping

    def register(*transforms):
        conversion_mapping.register_checkpoint_conversion_mapping("Parts", list(transforms), overwrite=True)

    yield register
    conversion_mapping._checkpoint_conversion_mapping_cache.pop("Parts", None)
    conversion_mapping.USER_REGISTERED_MAPPINGS.discard("Parts")


def published(folder, shapes, held):
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    config = transformers.PreTrainedConfig(shapes=held, num_attention_heads=2)
    config.save_pretrained(folder)
    return config


@pytest.mark.parametrize("name", operations())
def test_each_operation_does_what_it_does_in_transformers(name, mapped, tmp_path):
    from transformers.core_model_loading import WeightConverter

    sources, targets, steps, shapes, held = operations()[name]
    mapped(WeightConverter(sources, targets, operations=steps))
    config = published(tmp_path, shapes, held)
    peer, model = Parts.from_pretrained(tmp_path), Parts(config)
    assert all(bool(one.any()) for one in peer.parameters())
    tt.load(model, tmp_path)
    check_same(model, peer)


@pytest.mark.parametrize("name", operations())
def test_each_operation_keeps_codes_or_says_that_it_cannot(name, mapped, tmp_path):
    from transformers.core_model_loading import WeightConverter

    sources, targets, steps, shapes, held = operations()[name]
    mapped(WeightConverter(sources, targets, operations=steps))
    config = published(tmp_path, shapes, held)
    stored = load_file(tmp_path / "model.safetensors")
    codes = {key: tt.Weight.encode(one, tt.int8()) for key, one in stored.items() if one.ndim > 1}
    tt.save(codes, tmp_path / "codes")
    save_file({key: one.dequantize().contiguous() for key, one in codes.items()}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        plan = tt.plan_load(Parts(config), tmp_path / "codes")
    if name in {"interleave", "interleave_chunks", "rotary_back"}:  # of dim 1, and of nothing that has rows
        assert plan.faults
        return
    plan.apply()
    for key, one in Parts.from_pretrained(tmp_path).named_parameters():
        assert isinstance(plan.model.get_parameter(key), tt.Weight)
        assert torch.equal(plan.model.get_parameter(key).dequantize(), one), key


def test_a_name_of_the_model_stays_although_the_mapping_has_another(mapped, tmp_path):
    from transformers.core_model_loading import WeightRenaming

    mapped(WeightRenaming("a.weight", "z.weight"), WeightRenaming("c.weight", "b.weight"))
    config = published(tmp_path, {"a.weight": (2, 2), "c.weight": (2, 2)}, {"a.weight": (2, 2), "b.weight": (2, 2)})
    model = Parts(config)
    tt.load(model, tmp_path)
    check_same(model, Parts.from_pretrained(tmp_path))


def test_an_operation_that_is_not_known_is_a_fault_that_names_it(mapped, tmp_path):
    from transformers.core_model_loading import ConversionOps, WeightConverter

    class Doubled(ConversionOps):
        def convert(self, input_dict, **others):
            return {"b.weight": 2 * input_dict["a.weight"][0]}

    mapped(WeightConverter("a.weight", "b.weight", operations=[Doubled()]))
    config = published(tmp_path, {"a.weight": (2, 2)}, {"b.weight": (2, 2)})
    (fault,) = tt.plan_load(Parts(config), tmp_path).faults
    assert fault.startswith("b.weight: ")
    assert "Doubled" in fault


def test_a_transformers_whose_operations_are_others_is_a_fault_that_says_so(mapped, monkeypatch, tmp_path):
    from transformers.core_model_loading import Transpose, WeightConverter

    mapped(WeightConverter("a.weight", "b.weight", operations=[Transpose(0, 1)]))
    config = published(tmp_path, {"a.weight": (4, 6)}, {"b.weight": (6, 4)})
    assert not tt.plan_load(Parts(config), tmp_path).faults
    monkeypatch.setattr("torchtether.integrations.transformers_names.is_before", lambda version: True)
    (fault,) = tt.plan_load(Parts(config), tmp_path).faults
    assert fault.startswith("b.weight: transformers converts it by Transpose")
    assert fault.endswith(f"from 5.9 on, this is {transformers.__version__}. Update transformers.")


@pytest.mark.parametrize("name", operations())
def test_what_has_another_rank_is_a_fault(name, mapped, tmp_path):
    from transformers.core_model_loading import WeightConverter

    sources, targets, steps, shapes, held = operations()[name]
    mapped(WeightConverter(sources, targets, operations=steps))
    for shape in [(), (0,)]:
        plan = tt.plan_load(Parts(published(tmp_path, dict.fromkeys(shapes, shape), held)), tmp_path)
        assert plan.faults
        assert all("\n" not in fault for fault in plan.faults)


def test_rules_are_those_of_a_model_of_transformers():
    with pytest.raises(tt.ArgumentError, match=r"^model: is .*Linear"):
        transformers_names(nn.Linear(2, 2))


def test_rules_of_ones_own_stand_before_and_after(mapped, tmp_path):
    from transformers.core_model_loading import Chunk, WeightConverter

    mapped(WeightConverter("qkv.weight", PIECES, operations=[Chunk(dim=0)]))
    config = published(tmp_path, {"fused.weight": (24, 4)}, dict.fromkeys(["q.weight", "k.weight", "w.weight"], (8, 4)))
    model = Parts(config)
    with pytest.raises(tt.LoadError):
        tt.load(model, tmp_path)
    tt.load(model, tmp_path, rename=[("^fused", "qkv"), *transformers_names(model), ("^v", "w")])
    stored = load_file(tmp_path / "model.safetensors")["fused.weight"]
    assert torch.equal(torch.cat([model.q.weight, model.k.weight, model.w.weight]), stored)


# -- what no file has -------------------------------------------------------------------------------------------------


class Computed(Parts):
    """A model whose ``_init_weights`` computes some of its buffers, and draws others."""

    def __init__(self, config):
        super().__init__(config)
        self.inner = nn.Module()
        for module, names in ((self, ["drawn", "partly", "forgotten", "flags"]), (self.inner, ["by_parent"])):
            for name in names:
                dtype = torch.bool if name == "flags" else torch.float32
                module.register_buffer(name, torch.zeros(4, dtype=dtype), persistent=False)
        self.register_buffer("steps", torch.arange(4), persistent=False)

    def _init_weights(self, module):
        if isinstance(module, Computed):
            for one in module.parameters():
                assert one.is_meta
                one.data.fill_(torch.rand(()).item())
            module.steps.copy_(torch.arange(module.steps.numel()))
            module.flags.copy_(module.steps > 1)
            module.drawn.normal_()
            module.partly[:2].fill_(3.0)
            module.inner.by_parent.fill_(7.0)


def test_buffers_that_init_weights_computes_come_back_and_others_are_faults(tmp_path):
    config = published(tmp_path, {"a.weight": (2, 2)}, {"a.weight": (2, 2)})
    with torch.device("meta"):
        model = Computed(config)
    state = torch.get_rng_state()
    plan = tt.plan_load(model, tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(tensor.is_meta for tensor in tensors_of(model).values())
    assert sorted(fault.partition(":")[0] for fault in plan.faults) == ["drawn", "forgotten", "partly"]
    assert all("tt.on_meta()" in fault for fault in plan.faults)
    with torch.device("meta"):  # also around the load
        report = tt.load(model, tmp_path, strict=False)
    assert sorted(report.on_meta) == ["drawn", "forgotten", "partly"]
    assert model.steps.tolist() == [0, 1, 2, 3]
    assert model.flags.tolist() == [False, False, True, True]
    assert model.inner.by_parent.tolist() == [7.0] * 4
    assert torch.equal(model.a.weight, load_file(tmp_path / "model.safetensors")["a.weight"])


def test_buffers_come_back_in_a_model_inside_another(folder_of, tmp_path):
    peer, config = from_peer("llama", folder_of("llama")), config_of("llama")[1]
    tt.save(nn.ModuleDict({"inner": peer}), tmp_path)
    with torch.device("meta"):
        model = nn.ModuleDict({"inner": transformers.LlamaForCausalLM(config)})
    tt.load(model, tmp_path)
    check_same(model["inner"], peer)


def test_real_tensors_that_a_folder_may_lack_stay_as_they_are(folder_of):
    kind, config = config_of("marian")
    model = kind(config)
    places = [f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")]
    with torch.no_grad():
        for place in places:
            model.get_parameter(place).fill_(5.0)
    assert sorted(tt.load(model, folder_of("marian")).missing_keys) == sorted(places)
    assert all(bool((model.get_parameter(place) == 5.0).all()) for place in places)


@pytest.mark.parametrize("build", BUILT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, {"*": torch.bfloat16}, None, {"*norm*": torch.bfloat16}])
def test_parameters_that_no_file_stores_have_the_dtype_of_the_others(folder_of, tmp_path, build, dtype):
    folder = folder_of("marian")
    peer = config_of("marian")[0].from_pretrained(folder, dtype=torch.bfloat16).eval()
    if dtype is None or "*norm*" in str(dtype):
        folder = tmp_path
        peer.save_pretrained(folder)
    model = loaded("marian", folder, build, dtype=dtype)
    check_same(model, peer)
    assert all(map(torch.equal, outputs_of(model, "marian"), outputs_of(peer, "marian")))


def test_nothing_of_transformers_is_imported_for_other_models(tmp_path):
    code = (
        "import sys, torch, torchtether as tt; model = torch.nn.Linear(2, 2); tt.save(model, sys.argv[1]);"
        "tt.load(model, sys.argv[1]); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "folder")], check=True)


def test_the_guide_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    guide = Path(__file__).parents[2] / "tutorials" / "guides" / "renaming.md"
    (code,) = re.findall(r"```py\n(.*?)```", guide.read_text(), re.S)
    made = {}
    exec(code, made)
    assert isinstance(made["model"].model.layers[0].mlp.experts.gate_up_proj, tt.Weight)
    assert not made["model"].model.rotary_emb.inv_freq.is_meta


# -- on several ranks -------------------------------------------------------------------------------------------------


def load_sharded(folders):
    """Every rank holds its rows of what from_pretrained loads, in a model sharded before; returns how many it has."""
    count = 0
    for name, folder in folders.items():
        kind, config = config_of(name)
        with torch.device("meta"):
            model = kind(config)
        for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
            for layer in layers:
                fully_shard(layer)
        fully_shard(model)
        tt.distributed.load(model, folder)
        found, wanted = tensors_of(model), tensors_of(from_peer(name, folder))
        assert found.keys() == wanted.keys()
        for key, tensor in found.items():
            assert same_rows(tensor, wanted[key]), f"{name}: {key}"
            count += 1
    return count


@pytest.mark.slow
def test_each_rank_reads_its_rows_and_computes_its_buffers(folder_of):
    folders = {name: folder_of(name) for name in ("llama", "mixtral", "deepseek_v3", "vit", "marian")}
    assert min(spawn(load_sharded, 2, folders)) > 100
