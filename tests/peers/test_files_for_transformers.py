"""``from_pretrained`` reads our files, with embeddings and ties, to equal logits; others are refused beforehand."""

import json
import re

import pytest
import torch

import torchtether as tt
from tests.peers.test_doors_transformers import SMALL, built, logits_of, weights_of
from torchtether.cli.main import main

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),  # what transformers warns about
    pytest.mark.usefixtures("unpacked"),
]

INT8_OF_BITSANDBYTES = tt.Affine(narrow_range=True, unit=7.874015718698502e-3)
SCHEMES = {
    "compressed-tensors": {
        "int8": "int8", "int4": tt.int4(32), "int4-symmetric": tt.int4(32, True), "fp8": "fp8", "mxfp4": "mxfp4",
        "nvfp4": tt.nvfp4(global_divides=True),
    },
    "bitsandbytes": {"nf4": "nf4", "fp4": "fp4", "nested": tt.nf4(True)},
}  # fmt: skip
LOOSE = {"rtol": 0.05, "atol": 0.05}
WRITTEN = [(format, name) for format, schemes in SCHEMES.items() for name in schemes]


def llama(tied, dtype=torch.float32):
    return built(transformers.LlamaConfig(**SMALL, tie_word_embeddings=tied)).to(dtype)


def read_back(model, folder):
    path = folder / "config.json"
    said = json.loads(path.read_text()) if path.exists() else {}
    if "model_type" not in said:  # made by the command line of a folder without a config
        model.config.save_pretrained(folder / "config")
        path.write_text(json.dumps(json.loads((folder / "config" / "config.json").read_text()) | said))
    again, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert again.dtype == model.dtype
    return again, info


def check_same(model, folder):
    again, info = read_back(model, folder)
    assert not any(info.values()), info
    # compressed-tensors decodes nvfp4 in bfloat16, whatever the dtype of the model is
    is_exact = model.dtype == torch.float32 and not any(isinstance(w.scheme, tt.ScaledFloat) and w.scheme.global_scale
                                                        for w in weights_of(model).values())  # fmt: skip
    bound = {"rtol": 0, "atol": 0} if is_exact else LOOSE
    torch.testing.assert_close(logits_of(again), logits_of(model), **bound)
    is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert (again.get_input_embeddings().weight is again.get_output_embeddings().weight) == is_tied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", SCHEMES["compressed-tensors"])
def test_quantized_embeddings_of_compressed_tensors(tmp_path, name, tied, dtype):
    scheme = SCHEMES["compressed-tensors"][name]
    model = tt.quantize(llama(tied, dtype), {"*embed_tokens*": scheme, "*_proj.weight": scheme})
    tt.save(model, tmp_path, format="compressed-tensors")
    check_same(model, tmp_path)


def test_a_config_that_is_there_is_kept_and_a_new_one_is_that_of_the_model(tmp_path):
    model = tt.quantize(llama(True, torch.bfloat16), {"*_proj.weight": "int8"})
    tt.save(model, tmp_path / "new", format="compressed-tensors")
    said = json.loads((tmp_path / "new" / "config.json").read_text())
    model.save_pretrained(tmp_path / "plain", state_dict={})
    wanted = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert said.pop("quantization_config")["quant_method"] == "compressed-tensors"
    wanted.pop("quantization_config", None)
    assert said == wanted
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text('{"model_type": "mine"}')
    tt.save(model, tmp_path / "old", format="compressed-tensors")
    said = json.loads((tmp_path / "old" / "config.json").read_text())
    assert said.keys() == {"model_type", "quantization_config"}
    tt.save(model, tmp_path / "native")
    assert not (tmp_path / "native" / "config.json").exists()


def test_a_config_that_is_no_json_is_refused_only_where_it_is_needed(tmp_path):
    model = tt.quantize(llama(True), {"*_proj.weight": "int8"})
    model.config.odd = torch.device("cpu")
    tt.save(model, tmp_path / "native")
    with pytest.raises(tt.CheckpointError, match=r"^config\.json: the config of the model cannot be written as JSON"):
        tt.save(model, tmp_path / "new", format="compressed-tensors")
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text('{"model_type": "mine"}')
    tt.save(model, tmp_path / "old", format="compressed-tensors")


def test_a_model_of_transformers_without_float_parameters_is_saved(tmp_path):
    class Counting(transformers.PreTrainedModel):
        config_class = transformers.LlamaConfig

        def __init__(self):
            super().__init__(transformers.LlamaConfig())
            self.register_buffer("count", torch.ones(2, dtype=torch.int64))

    tt.save(Counting(), tmp_path / "x.safetensors")
    tt.save(Counting(), tmp_path / "x", format="compressed-tensors")


def test_configs_within_a_new_config_say_nothing_of_an_older_quantization(tmp_path):
    from torchtether.integrations.transformers import TetherConfig

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text, vision = {**small, "vocab_size": 64}, {**small, "image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    transformers.CLIPModel(config).save_pretrained(tmp_path / "float")
    quantization = TetherConfig("int8")
    model = transformers.CLIPModel.from_pretrained(tmp_path / "float", quantization_config=quantization)
    tt.save(model, tmp_path / "new", format="compressed-tensors")
    said = (tmp_path / "new" / "config.json").read_text()
    assert "torchtether" not in said
    assert said.count('"quantization_config"') == 1


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("format", "name"), WRITTEN)
def test_linear_layers_alone(tmp_path, format, name, tied):
    model = tt.quantize(llama(tied), {"*_proj.weight": SCHEMES[format][name]})
    tt.save(model, tmp_path, format=format)
    check_same(model, tmp_path)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("format", "rules", "words"),
    [
        (
            "bitsandbytes",
            {"*embed_tokens*": "nf4", "*_proj.weight": "nf4"},
            "transformers reads no other quantized weights of bitsandbytes",
        ),
        (
            "compressed-tensors",
            {"*embed_tokens*": "int8", "*_proj.weight": "fp8"},
            "only if all weights are quantized in the same way",
        ),
    ],
)
def test_what_nobody_could_read_is_refused_with_the_call_that_helps(tmp_path, format, rules, words, tied):
    model = tt.quantize(llama(tied), rules)
    for aliases in ("drop", "copy"):
        with pytest.raises(tt.SchemeError) as caught:
            tt.save(model, tmp_path / "made", format=format, aliases=aliases)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "made").exists()
    wanted = logits_of(model)
    call = str(caught.value).partition("Decode it with ")[2].partition("), or")[0] + ")"
    eval(call, {"tt": tt, "model": model})
    assert torch.equal(logits_of(model), wanted)
    tt.save(model, tmp_path / "made", format=format)
    check_same(model, tmp_path / "made")


@pytest.mark.parametrize(
    ("format", "scheme", "call"),
    [
        ("compressed-tensors", tt.nvfp4(), "tt.nvfp4(global_divides=True)"),
        ("bitsandbytes", tt.int8(), "tt.Affine(narrow_range=True, unit=7.874015718698502e-3)"),
    ],
)
def test_defaults_that_a_format_cannot_hold_are_refused_with_the_call_to_make(tmp_path, format, scheme, call):
    model = tt.quantize(llama(False), {"*_proj.weight": scheme})
    with pytest.raises(tt.SchemeError) as caught:
        tt.save(model, tmp_path / "made", format=format)
    assert re.search(f"Quantize( matrices)? with {re.escape(call)}", str(caught.value))
    assert not (tmp_path / "made").exists()
    tt.save(tt.quantize(llama(False), {"*_proj.weight": eval(call)}), tmp_path / "made", format=format)
    assert weights_of(tt.quantize(llama(False), {"*_proj.weight": eval(call)})).keys() <= set(
        tt.open(tmp_path / "made")
    )


@pytest.mark.parametrize(
    ("format", "scheme", "stored"),
    [
        ("compressed-tensors", "int4(group_size=32)", tt.int4(32)),
        ("compressed-tensors", "nvfp4", tt.nvfp4(global_divides=True)),
        ("compressed-tensors", "int8", tt.int8()),
        ("bitsandbytes", "nf4", tt.nf4()),
        ("bitsandbytes", "int8", INT8_OF_BITSANDBYTES),
    ],
)
@pytest.mark.parametrize("ties", ["ours", "transformers'"])
def test_the_command_line_writes_what_transformers_reads(tmp_path, format, scheme, stored, ties):
    """By default, of a tied model: embeddings stay plain where the format has none, or nothing tells of a head."""
    source = llama(True)
    tt.save(source, tmp_path / "source") if ties == "ours" else source.save_pretrained(tmp_path / "source")
    assert (
        main(["quantize", str(tmp_path / "source"), str(tmp_path / "made"), "--scheme", scheme, "--format", format])
        == 0
    )
    with tt.open(tmp_path / "made") as made:
        schemes = {name: made.spec(name).scheme for name in made.entries}
    assert schemes["model.embed_tokens.weight"] == (
        tt.Plain() if format == "bitsandbytes" or ties != "ours" else stored
    )
    assert schemes["model.layers.0.self_attn.q_proj.weight"] == stored
    ours = llama(True)
    with tt.open(tmp_path / "made"):
        tt.load(ours, tmp_path / "made")
    again, info = read_back(ours, tmp_path / "made")
    assert not any(info.values()), info
    # the int8 of bitsandbytes rounds inputs, too, and nvfp4 is decoded in bfloat16
    bound = {} if scheme in ("int4(group_size=32)", "int8", "nf4") and stored != INT8_OF_BITSANDBYTES else LOOSE
    torch.testing.assert_close(logits_of(again), logits_of(ours), **bound)


@pytest.mark.parametrize(("format", "scheme"), [("compressed-tensors", "fp8"), ("bitsandbytes", "nf4")])
@pytest.mark.parametrize("family", ["Bert", "Roberta", "DistilBert"])
def test_a_tied_head_that_the_source_does_not_mention_stays_plain(tmp_path, family, format, scheme):
    sizes = {"dim": 64, "hidden_dim": 128, "n_layers": 1, "n_heads": 4} if family == "DistilBert" else {
        "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128}  # fmt: skip
    config = getattr(transformers, f"{family}Config")(vocab_size=96, **sizes)
    torch.manual_seed(0)
    cls = getattr(transformers, f"{family}ForMaskedLM")
    cls(config).save_pretrained(tmp_path / "source")
    arguments = ["quantize", str(tmp_path / "source"), str(tmp_path / "made"), "--scheme", scheme, "--format", format]
    assert main(arguments) == 0
    again, info = cls.from_pretrained(tmp_path / "made", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    ours = cls(config).eval()
    tt.load(ours, tmp_path / "made")
    torch.testing.assert_close(logits_of(again), logits_of(ours), rtol=0.01, atol=0.01)


def gpt2():
    """Its layers are Conv1D: linear, but transposed, and no nn.Linear."""
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 64, "vocab_size": 96}
    return built(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


@pytest.mark.parametrize("by", ["save", "command line"])
@pytest.mark.parametrize("name", SCHEMES["compressed-tensors"])
def test_conv1d_is_decoded_by_compressed_tensors(tmp_path, name, by):
    scheme = SCHEMES["compressed-tensors"][name]
    model = tt.quantize(gpt2(), {"*.c_*.weight": scheme})
    if by == "save":
        tt.save(model, tmp_path / "made", format="compressed-tensors")
    else:
        tt.save(model, tmp_path / "native")
        arguments = ["convert", str(tmp_path / "native"), str(tmp_path / "made"), "--format", "compressed-tensors"]
        assert main(arguments) == 0
    check_same(model, tmp_path / "made")


@pytest.mark.parametrize("by", ["save", "command line"])
@pytest.mark.parametrize("scheme", ["nf4", INT8_OF_BITSANDBYTES])
def test_conv1d_is_refused_by_bitsandbytes(tmp_path, capsys, scheme, by):
    model = tt.quantize(gpt2(), {"*.c_*.weight": scheme})
    words = "c_attn.weight: its module is not nn.Linear (but an embedding or Conv1D, for example)"
    if by == "save":
        with pytest.raises(tt.SchemeError, match=re.escape(words)):
            tt.save(model, tmp_path / "made", format="bitsandbytes")
    else:
        tt.save(model, tmp_path / "native")
        assert main(["convert", str(tmp_path / "native"), str(tmp_path / "made"), "--format", "bitsandbytes"]) == 1
        assert words in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("format", "options"), [("compressed-tensors", []), ("bitsandbytes", ["--exclude", "*experts*"])]
)
def test_routers_of_many_experts_are_read(tmp_path, format, options):
    sizes = {"head_dim": 32, "num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    source = built(transformers.Qwen3MoeConfig(**(SMALL | sizes)))
    source.save_pretrained(tmp_path / "source")
    scheme = "fp8" if format == "compressed-tensors" else "nf4"
    arguments = ["quantize", str(tmp_path / "source"), str(tmp_path / "made"), "--scheme", scheme, "--format", format]
    assert main([*arguments, *options]) == 0
    ours = built(source.config)
    tt.load(ours, tmp_path / "made")
    again, info = read_back(ours, tmp_path / "made")
    assert not any(info.values()), info
    torch.testing.assert_close(logits_of(again), logits_of(ours))


@pytest.mark.parametrize("scheme", ["int8", "fp8", "nf4"])
def test_what_stays_plain_is_read_where_transformers_changes_names(tmp_path, scheme):
    """Files of LLaVA say ``vision_tower`` and ``language_model.lm_head``: ``model.vision_tower`` and ``lm_head``."""
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SMALL, tie_word_embeddings=False),
        vision_config=transformers.CLIPVisionConfig(**vision, image_size=28, patch_size=14),
        tie_word_embeddings=False,
    )
    format = "bitsandbytes" if scheme == "nf4" else "compressed-tensors"
    torch.manual_seed(0)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(tmp_path / "source")
    arguments = ["quantize", str(tmp_path / "source"), str(tmp_path / "made"), "--scheme", scheme, "--format", format]
    assert main([*arguments, "--exclude", "*vision*", "--exclude", "*lm_head*"]) == 0
    again, info = transformers.LlavaForConditionalGeneration.from_pretrained(
        tmp_path / "made", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    ours = transformers.LlavaForConditionalGeneration(config).eval()
    tt.load(ours, tmp_path / "made")
    torch.testing.assert_close(logits_of(again), logits_of(ours))
    plain = {name: p for name, p in ours.named_parameters() if "vision" in name or "lm_head" in name}
    assert len(plain) > 8
    for name, parameter in plain.items():
        assert torch.equal(again.get_parameter(name), parameter)


def test_convert_refuses_what_nobody_could_read_and_reads_what_it_writes(tmp_path, capsys):
    model = tt.quantize(llama(True), {"*embed_tokens*": "nf4", "*_proj.weight": "nf4"})
    tt.save(model, tmp_path / "native")
    arguments = ["convert", str(tmp_path / "native"), str(tmp_path / "made"), "--format", "bitsandbytes"]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "transformers reads no other quantized weights of bitsandbytes" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "made").exists()
    assert main([*arguments, "--dequantize", "*embed*"]) == 0
    assert "  1 nf4 -> float32, decoded\n" in capsys.readouterr().out
    check_same(model, tmp_path / "made")
    model = tt.quantize(llama(True), {"*embed_tokens*": tt.int4(32), "*_proj.weight": tt.int4(32)})
    tt.save(model, tmp_path / "int4")
    assert main(["convert", str(tmp_path / "int4"), str(tmp_path / "ct"), "--format", "compressed-tensors"]) == 0
    check_same(model, tmp_path / "ct")
