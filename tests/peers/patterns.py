"""How real models tie their parameters: a tiny model for each pattern, its inputs, and how many names each tie has."""

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_SMALL = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GQA = {**_SMALL, "num_key_value_heads": 1, "head_dim": 8}
_SEQ2SEQ = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": 2,
}  # fmt: skip
_BART = {**_SEQ2SEQ, "vocab_size": 40, "max_position_embeddings": 32}
_T5 = {
    "vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "pad_token_id": 0,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
_DETR = {
    "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_queries": 5,
}  # fmt: skip
_DEFORMABLE = {**_DETR, "d_model": 32, "num_labels": 3, "use_timm_backbone": False, "num_feature_levels": 3}
_DINO = {**_DETR, "d_model": 32, "decoder_layers": 3, "num_feature_levels": 3, "max_text_len": 16}
_SIGHT = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
_DAVIT = {
    "embed_dim": [8, 8, 8, 16], "num_heads": [1, 1, 1, 2], "num_groups": [1, 1, 1, 2], "depths": [1, 1, 1, 1],
    "window_size": 2, "projection_dim": 16,
}  # fmt: skip
_SAM = {
    "vision_config": {
        "hidden_size": 16, "output_channels": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
        "patch_size": 8, "mlp_dim": 16, "num_pos_feats": 4, "global_attn_indexes": [0], "window_size": 2,
    },
    "prompt_encoder_config": {
        "hidden_size": 8, "image_size": 32, "patch_size": 8, "mask_input_channels": 4, "num_point_embeddings": 4,
    },
    "mask_decoder_config": {"hidden_size": 8, "mlp_dim": 16, "num_attention_heads": 2, "iou_head_hidden_dim": 8},
}  # fmt: skip
_ZAMBA2 = {
    **_SMALL, "num_hidden_layers": 6, "layers_block_type": ["mamba", "hybrid"] * 3, "hybrid_layer_ids": [1, 3, 5],
    "mamba_d_state": 4, "mamba_ngroups": 1, "n_mamba_heads": 4, "mamba_headdim": 8, "num_mem_blocks": 1,
    "use_shared_attention_adapter": False, "adapter_rank": 2, "num_key_value_heads": 2,
}  # fmt: skip
_REFORMER = {
    "vocab_size": 40, "attention_head_size": 8, "hidden_size": 16, "num_attention_heads": 2, "feed_forward_size": 16,
    "attn_layers": ["local"], "axial_pos_shape": [4, 4], "axial_pos_embds_dim": [8, 8], "max_position_embeddings": 16,
    "is_decoder": True, "hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0,
    "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4,
}  # fmt: skip
_WAV2VEC2 = {
    **_SMALL, "conv_dim": [8, 8], "conv_kernel": [4, 4], "conv_stride": [2, 2], "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
_GPT2 = {
    "vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_OPT = {
    **_SMALL, "word_embed_proj_dim": 16, "ffn_dim": 32, "max_position_embeddings": 32,
}  # fmt: skip
_IDEFICS = {
    **_SMALL, "additional_vocab_size": 3, "tie_word_embeddings": True, "cross_layer_interval": 1,
    "freeze_text_layers": False, "freeze_vision_layers": False, "perceiver_config": {"use_resampler": False},
    "vision_config": {**_SIGHT, "embed_dim": 16},
}  # fmt: skip


def _resnet():
    import transformers

    return transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8] * 4, depths=[1] * 4, layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip


def _swin():
    import transformers

    return transformers.SwinConfig(
        image_size=32, embed_dim=8, depths=[1] * 4, num_heads=[1] * 4, window_size=2,
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip


# -- what they eat ----------------------------------------------------------------------------------------------------


def _tokens(count=8):
    return {"input_ids": torch.arange(3, 3 + count)[None]}


def _both():
    return {**_tokens(), "decoder_input_ids": torch.arange(4, 9)[None]}


def _image(side=64):
    return {"pixel_values": torch.linspace(-1, 1, 3 * side * side).view(1, 3, side, side)}


def _luke():
    return {
        **_tokens(),
        "entity_ids": torch.tensor([[1, 2]]),
        "entity_position_ids": torch.tensor([[[1, 2, -1], [4, -1, -1]]]),
        "entity_attention_mask": torch.ones(1, 2, dtype=torch.int64),
    }


def _whisper():
    return {
        "input_features": torch.linspace(-1, 1, 8 * 32).view(1, 8, 32),
        "decoder_input_ids": torch.arange(4, 9)[None],
    }


def _udop():
    return {**_both(), "bbox": torch.linspace(0, 1, 8 * 4).view(1, 8, 4), **_image(16)}


def _idefics():
    return {
        **_tokens(),
        "pixel_values": _image(16)["pixel_values"][:, None],
        "image_attention_mask": torch.ones(1, 8, 1, dtype=torch.int64),
    }


def _none():
    return {}


# -- transformers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pattern:
    """A model to build, the inputs of one forward, and the number of names of each of its ties, sorted.

    ``half``: whether its forward runs in bfloat16 at all.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]] = _none
    ties: list[int] = field(default_factory=list)
    half: bool = True


def _hub(name: str, config: str, fields: dict[str, Any], **more: Any) -> Callable[[], nn.Module]:
    """A model of transformers by class and config; fields that are functions are called for their value."""

    def build():
        import transformers

        made = {key: value() if callable(value) else value for key, value in {**fields, **more}.items()}
        with warnings.catch_warnings(action="ignore"):
            return getattr(transformers, name)(getattr(transformers, config)(**made)).eval()

    return build


def _encoder_decoder():
    import transformers

    bert = transformers.BertConfig(**_SMALL)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(bert, transformers.BertConfig(**_SMALL))
    return transformers.EncoderDecoderModel(config).eval()


TRANSFORMERS = {
    "gpt2": Pattern(_hub("GPT2LMHeadModel", "GPT2Config", _GPT2), _tokens, [2]),
    "llama_untied": Pattern(_hub("LlamaForCausalLM", "LlamaConfig", _SMALL, tie_word_embeddings=False), _tokens),
    "gemma2": Pattern(_hub("Gemma2ForCausalLM", "Gemma2Config", _GQA), _tokens, [2]),
    "opt": Pattern(_hub("OPTForCausalLM", "OPTConfig", _OPT), _tokens, [2]),
    "qwen2_moe": Pattern(
        _hub("Qwen2MoeForCausalLM", "Qwen2MoeConfig", _SMALL, num_key_value_heads=1, num_experts=2,
             num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=8,
             tie_word_embeddings=True),
        _tokens, [2],
    ),
    "mamba": Pattern(
        _hub("MambaForCausalLM", "MambaConfig", {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2,
             "state_size": 4}),
        _tokens, [2],
    ),
    "zamba2_shared_blocks": Pattern(_hub("Zamba2ForCausalLM", "Zamba2Config", _ZAMBA2), _tokens, [2, *[3] * 14]),
    "bert_weight_and_bias": Pattern(_hub("BertForMaskedLM", "BertConfig", _SMALL), _tokens, [2, 2]),
    "albert": Pattern(_hub("AlbertForMaskedLM", "AlbertConfig", _SMALL, embedding_size=8), _tokens, [2, 2]),
    "roberta": Pattern(
        _hub("RobertaForMaskedLM", "RobertaConfig", _SMALL, max_position_embeddings=32), _tokens, [2, 2]
    ),
    "luke_two_tables": Pattern(
        _hub("LukeForMaskedLM", "LukeConfig", _SMALL, max_position_embeddings=32, entity_vocab_size=12,
             entity_emb_size=8),
        _luke, [2, 2],
    ),
    "neomme_two_matrices": Pattern(
        _hub("NeoMMEForMaskedLM", "NeoMMEConfig", _GQA, embedding_rank=8, layer_types=["full_attention"] * 2,
             rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e4,
             "partial_rotary_factor": 0.5}}),
        _tokens, [2, 2],
    ),
    "xlnet": Pattern(
        _hub("XLNetLMHeadModel", "XLNetConfig", {"vocab_size": 40, "d_model": 16, "n_layer": 2, "n_head": 2,
             "d_inner": 32}),
        _tokens, [2],
    ),
    "t5": Pattern(_hub("T5ForConditionalGeneration", "T5Config", _T5), _both, [4]),
    "bart_and_buffer": Pattern(_hub("BartForConditionalGeneration", "BartConfig", _BART), _both, [4]),
    "fsmt_output_projection": Pattern(
        _hub("FSMTForConditionalGeneration", "FSMTConfig", {**_SEQ2SEQ, "langs": ["en", "de"], "src_vocab_size": 40,
             "tgt_vocab_size": 40, "max_position_embeddings": 32, "tie_word_embeddings": True}),
        _both, [3],
    ),
    "marian_shared": Pattern(_hub("MarianMTModel", "MarianConfig", _BART), _both, [4]),
    "marian_separate": Pattern(
        _hub("MarianMTModel", "MarianConfig", _BART, share_encoder_decoder_embeddings=False, decoder_vocab_size=40),
        _both, [2],
    ),
    "whisper": Pattern(
        _hub("WhisperForConditionalGeneration", "WhisperConfig", _SEQ2SEQ, vocab_size=40, num_mel_bins=8,
             max_source_positions=16, max_target_positions=16),
        _whisper, [2],
    ),
    "t5gemma2_leaf_of_another_name": Pattern(
        _hub("T5Gemma2ForConditionalGeneration", "T5Gemma2Config", {
            "encoder": {"text_config": _GQA, "vision_config": _SIGHT, "mm_tokens_per_image": 4}, "decoder": _GQA,
            "eoi_token_index": 30, "image_token_index": 31,
        }),
        _both, [2, 3],
    ),
    "encoder_decoder_nested": Pattern(_encoder_decoder, _both, [2, 2]),
    "florence2_nested": Pattern(
        _hub("Florence2ForConditionalGeneration", "Florence2Config", {"text_config": _BART, "vision_config": _DAVIT,
             "image_token_id": 39}),
        _both, [4],
    ),
    "idefics_additional_table": Pattern(
        _hub("IdeficsForVisionText2Text", "IdeficsConfig", _IDEFICS), _idefics, [2, 2]
    ),
    "udop_across_encoder_and_decoder": Pattern(
        _hub("UdopForConditionalGeneration", "UdopConfig", _T5, image_size=16, patch_size=8,
             max_2d_position_embeddings=32),
        _udop, [2, 2, 3, 4],
    ),
    "deformable_detr_one_head": Pattern(
        _hub("DeformableDetrForObjectDetection", "DeformableDetrConfig", _DEFORMABLE, backbone_config=_resnet),
        _image, [2] * 8,
    ),
    "deformable_detr_double_registration": Pattern(
        _hub("DeformableDetrForObjectDetection", "DeformableDetrConfig", _DEFORMABLE, backbone_config=_resnet,
             with_box_refine=True, two_stage=True, two_stage_num_proposals=5),
        _image, [2] * 24,
    ),
    "dab_detr_whole_module": Pattern(
        _hub("DabDetrForObjectDetection", "DabDetrConfig", _DETR, hidden_size=16, num_labels=3,
             use_timm_backbone=False, backbone_config=_resnet),
        _image, [2] * 6, half=False,
    ),
    "grounding_dino_six_way": Pattern(
        _hub("GroundingDinoForObjectDetection", "GroundingDinoConfig", _DINO, backbone_config=_swin,
             text_config={"model_type": "bert", **_SMALL}),
        lambda: {**_tokens(), **_image()}, [6] * 6,
    ),
    "mm_grounding_dino": Pattern(
        _hub("MMGroundingDinoForObjectDetection", "MMGroundingDinoConfig", _DINO, backbone_config=_swin,
             text_config={"model_type": "bert", **_SMALL}),
        lambda: {**_tokens(), **_image()}, [6] * 7,
    ),
    "sam_leaf_of_another_name": Pattern(
        _hub("SamModel", "SamConfig", _SAM),
        lambda: {**_image(32), "input_points": torch.tensor([[[[4.0, 8.0]]]])}, [2],
    ),
    "bark_fine_offset_lists": Pattern(
        _hub("BarkFineModel", "BarkFineConfig", {"input_vocab_size": 40, "output_vocab_size": 40, "num_layers": 1,
             "num_heads": 2, "hidden_size": 16, "block_size": 16, "n_codes_total": 4, "n_codes_given": 1}),
        lambda: {"codebook_idx": 2, "input_ids": torch.arange(32).view(1, 8, 4)}, [2, 2, 2],
    ),
    "clip_untied": Pattern(
        _hub("CLIPModel", "CLIPConfig", {"text_config": {**_SMALL, "max_position_embeddings": 16},
             "vision_config": _SIGHT, "projection_dim": 8}),
        lambda: {**_tokens(), **_image(16)},
    ),
    "splinter_untied": Pattern(
        _hub("SplinterForQuestionAnswering", "SplinterConfig", _SMALL, max_position_embeddings=16,
             question_token_id=3),
        _tokens,
    ),
    "reformer_untied": Pattern(
        lambda: _hub("ReformerModelWithLMHead", "ReformerConfig", _REFORMER)().train(), lambda: _tokens(16)
    ),  # without dropout; it has a backward in training mode only
    "wav2vec2_weight_norm": Pattern(
        _hub("Wav2Vec2ForCTC", "Wav2Vec2Config", _WAV2VEC2),
        lambda: {"input_values": torch.linspace(-1, 1, 200)[None]},
    ),
}  # fmt: skip


# -- what libraries beside transformers do ----------------------------------------------------------------------------


class AdaptiveSoftmax(nn.Module):
    """An embedding per bucket of the vocabulary, each also the bucket's output layer, as Transformer-XL had them."""

    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(n, 8) for n in (6, 4, 2))
        self.outputs = nn.ModuleList(nn.Linear(8, n) for n in (6, 4, 2))
        for table, output in zip(self.embeddings, self.outputs, strict=True):
            output.weight = table.weight

    def forward(self):
        states = torch.cat([table.weight for table in self.embeddings]).tanh()
        return torch.cat([output(states) for output in self.outputs], -1)


class TurnedAdapters(nn.Module):
    """A low-rank adapter of the head that is the transpose of the embedding's, as PEFT ties them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.lora_A = nn.Parameter(torch.randn(2, 12))
        self.lora_B = nn.Parameter(torch.randn(8, 2))
        self.head_A = nn.Parameter(self.lora_B.data.t())
        self.head_B = nn.Parameter(self.lora_A.data.t())

    def forward(self):
        states = self.embedding.weight + (self.lora_B @ self.lora_A).t()
        return states @ (self.embedding.weight + self.head_B @ self.head_A).t()


class FusedQKV(nn.Module):
    """A fused projection and its three slices, as TransformerLens has them."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(24, 8) / 4)
        self.q, self.k, self.v = (nn.Parameter(part) for part in self.qkv.data.tensor_split(3))

    def forward(self):
        states = torch.eye(8, dtype=self.qkv.dtype)
        fused = nn.functional.linear(states, self.qkv)
        apart = torch.cat([nn.functional.linear(states, part) for part in (self.q, self.k, self.v)], -1)
        return fused.tanh() + apart


class FlatParameter(nn.Module):
    """One flat Parameter, of which all the others are views, as sharded trainers keep it."""

    def __init__(self):
        super().__init__()
        self.flat = nn.Parameter(torch.randn(8 * 8 + 8 + 4 * 8) / 4)
        self.a = nn.Parameter(self.flat.data[:64].view(8, 8))
        self.bias = nn.Parameter(self.flat.data[64:72])
        self.b = nn.Parameter(self.flat.data[72:].view(4, 8))

    def forward(self):
        return nn.functional.linear(torch.eye(8, dtype=self.a.dtype), self.a, self.bias).tanh() @ self.b.t()


class TiedBuffers(nn.Module):
    """A buffer under two names, one that is a Parameter too, and a cache that no checkpoint stores."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.register_buffer("frozen", self.weight.detach())
        self.register_buffer("mean", torch.arange(6.0) / 6)
        self.register_buffer("running", self.mean)
        self.register_buffer("cache", torch.arange(6.0).cos(), persistent=False)

    def forward(self):
        return (self.weight @ self.frozen + self.mean) * self.running + self.cache


class SharedLSTM(nn.Module):
    """Recurrent layers, one of them registered twice; torch keeps weak references to their weights."""

    def __init__(self):
        super().__init__()
        self.forth = nn.LSTM(4, 8, num_layers=2, batch_first=True)
        self.back = nn.GRU(8, 4, batch_first=True)
        self.again = self.back

    def forward(self):
        states, _ = self.forth(torch.linspace(-1, 1, 20).view(1, 5, 4).to(self.back.weight_ih_l0.dtype))
        return self.again(states)[0] + self.back(states)[0]


PLAIN = {
    "adaptive_softmax": Pattern(AdaptiveSoftmax, ties=[2, 2, 2]),
    "turned_adapters": Pattern(TurnedAdapters, ties=[2, 2]),
    "fused_qkv": Pattern(FusedQKV, ties=[4]),
    "flat_parameter": Pattern(FlatParameter, ties=[4]),
    "tied_buffers": Pattern(TiedBuffers, ties=[2, 2]),
    "shared_lstm": Pattern(SharedLSTM, ties=[2, 2, 2, 2]),
}

PATTERNS = {**TRANSFORMERS, **PLAIN}


def build(name: str, *, meta: bool = False, seed: int = 0) -> nn.Module:
    """The model of pattern ``name``: with values from ``seed``, or inside ``tt.on_meta``."""
    import torchtether as tt

    torch.manual_seed(seed)
    with tt.on_meta() if meta else contextlib.nullcontext():
        return PATTERNS[name].build()


def outputs_of(model: nn.Module, name: str) -> list[torch.Tensor]:
    """Every float tensor that the forward of pattern ``name`` gives, float inputs in the model's dtype."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    inputs = {
        key: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for key, value in PATTERNS[name].inputs().items()
    }
    torch.manual_seed(5)  # a few forwards draw numbers
    leaves = torch.utils._pytree.tree_leaves(_plain(model(**inputs)))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _plain(found: Any) -> Any:
    """Outputs as dicts and lists, so that torch finds the tensors in them."""
    if isinstance(found, dict):
        return [_plain(value) for value in found.values()]
    if isinstance(found, (list, tuple)):
        return [_plain(value) for value in found]
    return found
