"""Rename rules of ``tt.gguf_names``, compared with transformers' own reader of GGUF files."""

import copy

import numpy as np
import pytest
import torch

import torchtether as tt
from tests.formats.ggufs import gguf as raw

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers", minversion="5.0")
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # what transformers warns about

SMALL = dict(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
CONFIGS = {
    "llama": transformers.LlamaConfig(**SMALL),
    "qwen2": transformers.Qwen2Config(**SMALL),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=16),
    "qwen2moe": transformers.Qwen2MoeConfig(**SMALL, **MOE, shared_expert_intermediate_size=32),
    "qwen3moe": transformers.Qwen3MoeConfig(**SMALL, **MOE, head_dim=16),
    "gemma2": transformers.Gemma2Config(**SMALL, head_dim=16),
    "gemma3": transformers.Gemma3TextConfig(**SMALL, head_dim=16),
    "phi3": transformers.Phi3Config(**SMALL),
    "starcoder2": transformers.Starcoder2Config(**SMALL),
}
MIXTRAL = transformers.MixtralConfig(**SMALL, num_local_experts=4)


def built(config, seed=0):
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.copy_(torch.rand_like(tensor))
    return model


def stored(model, family):
    """The tensors of ``model`` by llama.cpp's names and in its order, as its converter writes them."""
    config = model.config
    arch = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float()
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if family.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if name.endswith("gate_up_proj") and values.dim() == 3:
            block = name.split(".")[2]
            for kind, half in zip(("gate", "up"), values.chunk(2, 1), strict=True):
                yield f"blk.{block}.ffn_{kind}_exps.weight", half
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        yield (found if found.endswith((".weight", ".bias")) else f"{found}.weight"), values.squeeze()


def written(path, model, family, kind):
    config = model.config
    writer = gguf.GGUFWriter(str(path), family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_layer_norm_rms_eps(1e-6)
    if experts := getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
    if family == "phi3":
        writer.add_tensor("rope_factors_long.weight", np.ones(8, np.float32))
        writer.add_tensor("rope_factors_short.weight", np.ones(8, np.float32))
    for name, values in stored(model, family):
        source = values.numpy()
        plain = source.ndim == 1 or "ffn_gate_inp" in name
        number = gguf.GGMLQuantizationType["F32" if plain else kind]
        writer.add_tensor(name, source if plain else gguf.quantize(source, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def loaded(config, path, *, kind=transformers.AutoModelForCausalLM, **options):
    with tt.on_meta():
        model = kind.from_config(copy.deepcopy(config))
    report = tt.load(model, path, **options)
    assert not report.missing_keys
    assert not report.unexpected_keys
    return model.eval()


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("family", CONFIGS)
def test_values_are_those_that_transformers_reads(tmp_path, family, kind):
    config = CONFIGS[family]
    path = written(tmp_path / "x.gguf", built(config), family, kind)
    model = loaded(config, path, rename=tt.gguf_names(path))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf", config=config).eval()
    state, wanted = model.state_dict(), theirs.state_dict()
    assert state.keys() == wanted.keys()
    for name, tensor in state.items():
        values = tensor.dequantize() if isinstance(tensor, tt.Weight) else tensor
        assert torch.equal(values, wanted[name]), name
    if kind != "F32":
        assert isinstance(model.model.layers[0].self_attn.o_proj.weight, tt.Weight)
        experts = getattr(model.model.layers[0].mlp, "experts", None)
        assert experts is None or isinstance(experts.gate_up_proj, tt.Weight)
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, theirs(ids).logits, atol=1e-5)


@pytest.mark.parametrize("family", [*CONFIGS, "mixtral"])
def test_the_values_that_were_stored_come_back(tmp_path, family):
    """The converter adds one to the norms of Gemma in float32, which rounds."""
    config = CONFIGS.get(family, MIXTRAL)
    model = built(config)
    path = written(tmp_path / "x.gguf", model, "llama" if family == "mixtral" else family, "F32")
    wanted = model.state_dict()
    for name, tensor in loaded(config, path).state_dict().items():
        atol = 2e-7 if family.startswith("gemma") and "norm" in name else 0
        assert torch.allclose(tensor, wanted[name], rtol=0, atol=atol), name


@pytest.mark.parametrize("family", ["qwen3moe", "mixtral"])
def test_experts_in_blocks_are_joined_without_decoding(tmp_path, family):
    config = CONFIGS.get(family, MIXTRAL)
    path = written(tmp_path / "x.gguf", built(config), "llama" if family == "mixtral" else family, "Q4_0")
    model = loaded(config, path)
    with tt.open(path) as checkpoint:
        halves = [checkpoint[f"blk.1.ffn_{kind}_exps.weight"].dequantize() for kind in ("gate", "up")]
    experts = model.model.layers[1].mlp.experts
    assert isinstance(experts.gate_up_proj, tt.Weight)
    assert torch.equal(experts.gate_up_proj.dequantize(), torch.cat(halves, 1))


def test_a_quantized_norm_of_gemma_is_refused(tmp_path):
    path = written(tmp_path / "x.gguf", built(CONFIGS["gemma2"]), "gemma2", "F32")
    writer = gguf.GGUFWriter(str(tmp_path / "y.gguf"), "gemma2")
    for tensor in gguf.GGUFReader(str(path)).tensors:
        values, number = np.array(tensor.data), tensor.tensor_type
        if tensor.name == "output_norm.weight":
            number = gguf.GGMLQuantizationType.Q8_0
            values = gguf.quantize(values, number)
        writer.add_tensor(tensor.name, values, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with tt.on_meta():
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS["gemma2"])
    with pytest.raises(tt.LoadError, match="output_norm.weight: it is quantized, and -1.0 cannot be added to it"):
        tt.load(model, tmp_path / "y.gguf", rename=tt.gguf_names(tmp_path / "y.gguf"))


def test_norms_that_have_their_names_already_keep_their_values(tmp_path):
    """One name of transformers among those of llama.cpp."""
    model = built(CONFIGS["gemma2"])
    writer = gguf.GGUFWriter(str(tmp_path / "y.gguf"), "gemma2")
    for tensor in gguf.GGUFReader(str(written(tmp_path / "x.gguf", model, "gemma2", "F32"))).tensors:
        if tensor.name == "output_norm.weight":
            writer.add_tensor("model.norm.weight", model.model.norm.weight.detach().numpy())
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = loaded(CONFIGS["gemma2"], tmp_path / "y.gguf")
    assert torch.equal(read.model.norm.weight, model.model.norm.weight)


def test_queries_and_keys_without_rows_are_faults(tmp_path):
    tensors = [("token_embd.weight", (64, 64), "F32", bytes(2**14))]
    tensors += [(f"blk.0.attn_{one}.weight", (), "F32", bytes(4)) for one in "qk"]
    pairs = {"general.architecture": "llama", "llama.attention.head_count": 4}
    (tmp_path / "x.gguf").write_bytes(raw(tensors, pairs))
    with pytest.raises(tt.LoadError, match=r"blk.0.attn_q.weight: it has shape \(\), whose rows cannot be divided"):
        tt.load(built(CONFIGS["llama"]), tmp_path / "x.gguf")


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_a_model_without_a_head_is_loaded_too(tmp_path, family):
    """Its names have no ``model.``; the file of a tied model has no head."""
    model = built(CONFIGS[family])
    path = written(tmp_path / "x.gguf", model, family, "Q8_0")
    base = loaded(CONFIGS[family], path, kind=transformers.AutoModel)
    wanted = loaded(CONFIGS[family], path).model.state_dict()
    for name, tensor in base.state_dict().items():
        assert type(tensor) is type(wanted[name])
        assert torch.equal(tensor, wanted[name]), name


def test_the_text_model_within_another_is_loaded(tmp_path):
    text = CONFIGS["gemma3"]
    path = written(tmp_path / "x.gguf", built(text), "gemma3", "Q8_0")
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, image_size=28)
    config = transformers.Gemma3Config(text_config=text.to_dict(), vision_config=sizes, mm_tokens_per_image=4)
    model = transformers.Gemma3ForConditionalGeneration(config)
    report = tt.load(model, path, strict=False)
    assert not report.unexpected_keys
    assert all("vision" in name or "multi_modal" in name for name in report.missing_keys)
    wanted = loaded(text, path).model.layers[1].mlp.up_proj.weight.dequantize()
    assert torch.equal(model.model.language_model.layers[1].mlp.up_proj.weight, wanted)


def test_an_architecture_without_rules_is_named(tmp_path):
    path = written(tmp_path / "x.gguf", built(CONFIGS["qwen3"]), "qwen3", "F32")
    data = path.read_bytes().replace(b"qwen3", b"qwen9", 1)
    path.write_bytes(data)
    model = built(CONFIGS["qwen3"])
    with pytest.raises(tt.RuleError, match="no rename rules for the architecture 'qwen9', only for llama"):
        tt.load(model, path)
    rules = [rule for rule in tt.gguf_names(written(tmp_path / "y.gguf", model, "qwen3", "F32"))]
    assert not tt.load(model, path, rename=rules).missing_keys
