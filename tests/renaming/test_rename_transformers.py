"""Published names of fused models: the rules give the values of transformers' own conversion."""

import warnings

import pytest
import torch

import torchtether as tt

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.peers

SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
MIXTRAL = [
    ("block_sparse_moe", "mlp"),
    tt.Concat([r"w1\.weight", r"w3\.weight"], "gate_up"),
    tt.Stack(r"experts\.(\d+)\.gate_up", "experts.gate_up_proj"),
    tt.Stack(r"experts\.(\d+)\.w2\.weight", "experts.down_proj"),
]


def build(name, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        config = getattr(transformers, f"{name.removesuffix('ForCausalLM').removesuffix('LMHeadModel')}Config")(
            **options
        )
        model = getattr(transformers, name)(config)
        return model.eval(), config


def load(model, path, rename, **options):
    """A second model, on meta, filled from the file."""
    with warnings.catch_warnings(), tt.on_meta():
        warnings.simplefilter("ignore")
        other = type(model)(model.config)
    tt.load(other, path, rename=rename, **options)
    return other.eval()


def test_mixtral_as_it_is_published(tmp_path):
    options = {"intermediate_size": 24, "num_key_value_heads": 2, "num_local_experts": 3}
    model, _ = build("MixtralForCausalLM", **SMALL, **options)
    model.save_pretrained(tmp_path / "x")
    with tt.open(tmp_path / "x") as checkpoint:
        assert "model.layers.0.block_sparse_moe.experts.2.w3.weight" in checkpoint
    other = load(model, tmp_path / "x", MIXTRAL)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    tokens = torch.arange(8)[None]
    assert torch.equal(other(tokens).logits, model(tokens).logits)


def test_gpt2_heads_from_llama_like_names(tmp_path):
    """Conv1D: fused along the last dimension and transposed; weights and biases; the head stays tied."""
    model, _ = build("GPT2LMHeadModel", vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    state = {}
    for name, tensor in model.state_dict().items():
        if "c_attn" in name:
            for piece, part in zip("qkv", tensor.t().chunk(3) if tensor.dim() == 2 else tensor.chunk(3), strict=True):
                state[name.replace("c_attn", f"{piece}_proj")] = part.contiguous()
        elif any(word in name for word in ("c_proj.weight", "c_fc.weight")):
            state[name] = tensor.t().contiguous()
        else:
            state[name] = tensor.clone()
    tt.save(state, tmp_path / "x")
    rules = [
        tt.Concat(["q_proj", "k_proj", "v_proj"], "c_attn"),
        tt.Transpose(r"(c_attn|c_proj|c_fc)\.weight"),
    ]
    other = load(model, tmp_path / "x", rules)
    tokens = torch.arange(8)[None]
    assert torch.equal(other(tokens).logits, model(tokens).logits)
    assert other.lm_head.weight is other.transformer.wte.weight
    tt.save(model, tmp_path / "y")  # and back: the same rules turned around
    with tt.open(tmp_path / "x") as expected:
        separate = torch.nn.Module()
        for key, tensor in expected.items():
            separate.register_buffer(key.replace(".", "/"), torch.empty_like(tensor, device="meta"))
        back = [*(rule.inverse for rule in reversed(rules)), (r"\.", "/")]
        tt.load(separate, tmp_path / "y", rename=back, ties="model")
        for key, tensor in expected.items():
            assert torch.equal(separate.get_buffer(key.replace(".", "/")), tensor), key


def test_gpt_neox_interleaves_heads(tmp_path):
    model, config = build("GPTNeoXForCausalLM", intermediate_size=32, **SMALL)
    state = {}
    for name, tensor in model.state_dict().items():
        if "query_key_value" in name:
            heads = tensor.view(config.num_attention_heads, 3, -1, *tensor.shape[1:])
            for i, piece in enumerate("qkv"):
                state[name.replace("query_key_value", piece)] = heads[:, i].reshape(-1, *tensor.shape[1:])
        else:
            state[name] = tensor.clone()
    tt.save(state, tmp_path / "x")
    pieces = [rf"\.{piece}\." for piece in "qkv"]
    rule = tt.Concat(pieces, ".query_key_value.", groups=config.num_attention_heads)
    other = load(model, tmp_path / "x", rule)
    tokens = torch.arange(8)[None]
    assert torch.equal(other(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("quantized", [False, True])
def test_phi3_fuses_what_llama_keeps_apart(tmp_path, quantized):
    """Grouped queries: sizes differ. Quantized rows are joined and cut as they are."""
    options = {**SMALL, "intermediate_size": 24, "num_key_value_heads": 2}
    options.update(pad_token_id=0, eos_token_id=1, bos_token_id=1, rms_norm_eps=1e-5)
    model, config = build("Phi3ForCausalLM", **options)
    if quantized:
        tt.quantize(model, {"*proj.weight": "int8"})
    tt.save(model, tmp_path / "fused")
    rules = [
        tt.Split("qkv_proj", ["q_proj", "k_proj", "v_proj"], sizes=[16, 8, 8]),
        tt.Split("gate_up_proj", ["gate_proj", "up_proj"]),
    ]
    llama, _ = build("LlamaForCausalLM", **options, tie_word_embeddings=config.tie_word_embeddings)
    apart = load(llama, tmp_path / "fused", rules)
    tt.save(apart, tmp_path / "apart")
    again = load(model, tmp_path / "apart", [rule.inverse for rule in rules])
    for name, tensor in model.state_dict().items():
        given = again.state_dict()[name]
        if isinstance(tensor, tt.Weight):
            assert all(torch.equal(given.parts[part], held) for part, held in tensor.parts.items())
        else:
            assert torch.equal(given, tensor), name
    tokens = torch.arange(8)[None]
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert torch.allclose(apart(tokens).logits, model(tokens).logits, atol=1e-5)
