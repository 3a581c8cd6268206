"""diffusers' ``from_pretrained`` and ``save_pretrained`` with Weights, of models and of pipelines."""

import importlib
import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import torchtether as tt

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
doors = importlib.import_module("torchtether.integrations.diffusers")
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # what diffusers warns about

UNet = diffusers.UNet2DConditionModel
SIZES = {
    "block_out_channels": (32, 64), "layers_per_block": 1, "sample_size": 8, "cross_attention_dim": 32,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}  # fmt: skip
Wan = diffusers.WanTransformer3DModel
WAN = dict(
    patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
    freq_dim=16, ffn_dim=32, num_layers=1, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
)  # fmt: skip
INPUTS = torch.randn(1, 4, 8, 8, generator=torch.manual_seed(0)), torch.tensor(1), torch.ones(1, 3, 32)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The folder of a plain UNet."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("plain")
    UNet(**SIZES).save_pretrained(folder)
    return folder


@torch.no_grad()
def output(model):
    return model(*(one.to(model.dtype) if one.is_floating_point() else one for one in INPUTS)).sample


def weights_of(model):
    return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, tt.Weight)}


def facts(model):
    """Each tensor of a model, and how it is stored: Weights by the bytes of their parts."""
    return {
        name: [t.spec, *map(bytes_of, t.parts.values())] if isinstance(t, tt.Weight) else [t.dtype, bytes_of(t)]
        for name, t in model.state_dict().items()
    }


def bytes_of(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


RULES = {"scheme": "int8", "rules": {"*conv*.weight": "fp8", "time_embedding.*": None}}
ASKED = {"int8": {"scheme": "int8"}, "nf4": {"scheme": tt.nf4()}, "rules": RULES}


@pytest.mark.parametrize("name", ASKED)
def test_from_pretrained_quantizes_as_quantize_does_and_freezes(plain, name):
    options = ASKED[name]
    model = UNet.from_pretrained(plain, quantization_config=doors.TetherConfig(**options))
    twin = UNet.from_pretrained(plain)
    if name == "rules":
        linear = weights_of(tt.quantize(UNet.from_pretrained(plain), "int8"))
        rest = {one: "int8" for one in linear if "conv" not in one and not one.startswith("time_embedding.")}
        tt.quantize(twin, {"*conv*.weight": "fp8", **rest})
        assert {str(weight.scheme) for weight in weights_of(twin).values()} == {"int8", "fp8"}
    else:
        tt.quantize(twin, options["scheme"])
    assert weights_of(model)
    assert facts(model) == facts(twin)
    assert not any(p.requires_grad for p in model.parameters() if isinstance(p, tt.Weight))
    assert torch.equal(output(model), output(twin))


WAYS = {
    "one file": ({}, {}),
    "parts of a Weight in two shards": ({"max_shard_size": "3KB"}, {}),
    "variant": ({"variant": "q"}, {"variant": "q"}),
    "shards of a variant": ({"variant": "q", "max_shard_size": "100KB"}, {"variant": "q"}),
    "pickle": ({"safe_serialization": False}, {"use_safetensors": False}),
    "pickled shards": ({"safe_serialization": False, "max_shard_size": "100KB"}, {"use_safetensors": False}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("made_by", ["from_pretrained", "quantize", "load"])
def test_a_saved_model_is_read_back_to_the_bit(plain, tmp_path, made_by, way):
    saving, reading = WAYS[way]
    if made_by == "from_pretrained":
        model = UNet.from_pretrained(plain, quantization_config=doors.TetherConfig("int8"))
    elif made_by == "quantize":
        model = tt.quantize(UNet.from_pretrained(plain), "int8")
    else:
        with tt.on_meta():
            model = UNet(**SIZES)
        tt.load(model, plain, quantize="int8")
    before = facts(model), dict(model.config), vars(model).get("hf_quantizer", "none")
    model.save_pretrained(tmp_path, **saving)
    assert (facts(model), dict(model.config), vars(model).get("hf_quantizer", "none")) == before
    assert weights_of(model).keys() == config_of(tmp_path)["quantization_config"]["weights"].keys()

    other, said = UNet.from_pretrained(tmp_path, output_loading_info=True, **reading)
    assert not any(said.values()), said
    assert facts(other) == facts(model)
    if "pickle" not in way:  # diffusers maps such a file, and cuts it off at the save: plain models die of it, too
        other.save_pretrained(tmp_path, **saving)
        assert facts(UNet.from_pretrained(tmp_path, **reading)) == facts(model)


@pytest.mark.parametrize("made_by", ["save_pretrained", "command line"])
def test_folders_are_read_by_both_loaders(plain, tmp_path, made_by):
    if made_by == "command line":
        command = [sys.executable, "-m", "torchtether", "quantize", plain, tmp_path / "made", "--scheme", "int8"]
        subprocess.run(command, check=True, capture_output=True)
    else:
        tt.quantize(UNet.from_pretrained(plain), "int8").save_pretrained(tmp_path / "made")
    with tt.on_meta():
        model = UNet.from_config(UNet.load_config(tmp_path / "made"))
    tt.load(model, tmp_path / "made")
    read = UNet.from_pretrained(tmp_path / "made")
    assert weights_of(read)
    assert facts(read) == facts(model)
    assert torch.equal(output(read), output(model))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("is_stored", [False, True])
def test_dtypes_are_those_of_a_plain_model(tmp_path, dtype, is_stored):
    torch.manual_seed(0)
    Wan(**WAN).save_pretrained(tmp_path / "plain")
    expected = Wan.from_pretrained(tmp_path / "plain", torch_dtype=dtype).state_dict()
    if is_stored:
        tt.quantize(Wan.from_pretrained(tmp_path / "plain"), "int8").save_pretrained(tmp_path / "quantized")
        model = Wan.from_pretrained(tmp_path / "quantized", torch_dtype=dtype)
    else:
        config = doors.TetherConfig("int8")
        model = Wan.from_pretrained(tmp_path / "plain", torch_dtype=dtype, quantization_config=config)
    assert weights_of(model)
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == {
        name: tensor.dtype for name, tensor in expected.items()
    }
    model.to(torch.float64)
    assert {tensor.dtype for tensor in model.state_dict().values() if tensor.is_floating_point()} == {torch.float64}


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("is_stored", [False, True])
def test_a_device_map_is_planned_with_the_size_of_the_weights(tmp_path, is_stored, scheme):
    """Half of the dense size would be too little for the plan, and the rest would go to the disk."""
    sizes = WAN | {"ffn_dim": 1024, "num_attention_heads": 4, "attention_head_dim": 16}
    Wan(**sizes).save_pretrained(tmp_path)
    options = {"quantization_config": doors.TetherConfig(scheme)}
    dense = sum(tensor.nbytes for tensor in Wan.from_pretrained(tmp_path).state_dict().values())
    if is_stored:
        options = {}
        tt.quantize(Wan.from_pretrained(tmp_path), scheme).save_pretrained(tmp_path)
    model = Wan.from_pretrained(tmp_path, device_map="auto", max_memory={"cpu": dense // 2}, **options)
    assert weights_of(model)
    assert model.hf_device_map == {"": "cpu"}
    with pytest.raises(tt.CheckpointError, match="'disk'"):
        Wan.from_pretrained(tmp_path, device_map="auto", max_memory={"cpu": dense // 20}, **options)


def test_from_single_file_quantizes(tmp_path):
    Wan(**WAN).save_pretrained(tmp_path / "plain")
    file = tmp_path / "plain" / "diffusion_pytorch_model.safetensors"
    config = doors.TetherConfig("int8")
    model = Wan.from_single_file(str(file), config=str(tmp_path / "plain"), quantization_config=config)
    twin = tt.quantize(Wan.from_pretrained(tmp_path / "plain"), "int8")
    assert weights_of(model)
    assert facts(model) == facts(twin)
    model.save_pretrained(tmp_path / "quantized")
    assert facts(Wan.from_pretrained(tmp_path / "quantized")) == facts(twin)


def test_from_single_file_refuses_parts(tmp_path):
    """It reads no config.json: of some models it would leave the parameters on ``meta``."""
    tt.quantize(Wan(**WAN), "int8").save_pretrained(tmp_path)
    file, config = tmp_path / "diffusion_pytorch_model.safetensors", doors.TetherConfig("int8")
    with pytest.raises(tt.CheckpointError, match=r"qdata: is a part of a Weight.*from_pretrained"):
        Wan.from_single_file(str(file), config=str(tmp_path), quantization_config=config)


def test_two_threads_save_one_model(plain, tmp_path, monkeypatch):
    """The save of the first ends while that of the second runs."""
    model = tt.quantize(UNet.from_pretrained(plain), "int8")
    second_runs, first_has_ended = threading.Event(), threading.Event()
    save_config = UNet.save_config

    def slow(self, folder, **options):
        if Path(folder).name == "first":
            assert second_runs.wait(60)
        else:
            second_runs.set()
            assert first_has_ended.wait(60)
        save_config(self, folder, **options)

    monkeypatch.setattr(UNet, "save_config", slow)
    before = dict(model.config)
    first, second = (threading.Thread(target=model.save_pretrained, args=(tmp_path / n,)) for n in ("first", "second"))
    first.start(), second.start(), first.join(60), first_has_ended.set(), second.join(60)
    assert "hf_quantizer" not in vars(model)
    assert dict(model.config) == before
    assert all(facts(UNet.from_pretrained(tmp_path / one)) == facts(model) for one in ("first", "second"))


def test_a_model_of_another_quantizer_is_adopted_before_it_is_saved(plain, tmp_path):
    pytest.importorskip("optimum.quanto")
    model = UNet.from_pretrained(plain, quantization_config=diffusers.QuantoConfig(weights_dtype="int8"))
    tt.quantize(model, {"conv_in.weight": "fp8"})
    with pytest.raises(tt.CheckpointError, match=r"conv_in.weight: is a Weight in a model of Quanto.*tt\.adopt"):
        model.save_pretrained(tmp_path / "mixed")
    assert not (tmp_path / "mixed").exists()
    tt.adopt(model).half().save_pretrained(tmp_path / "adopted")
    read = UNet.from_pretrained(tmp_path / "adopted", torch_dtype=torch.float16)
    assert facts(read) == facts(model)
    tt.dequantize(model).save_pretrained(tmp_path / "plain")
    assert torch.equal(output(UNet.from_pretrained(tmp_path / "plain", torch_dtype=torch.float16)), output(model))


@pytest.mark.parametrize("by", ["dequantize", "tt.dequantize"])
def test_a_dequantized_model_is_saved_as_a_plain_one(plain, tmp_path, by):
    tt.quantize(UNet.from_pretrained(plain), "int8").save_pretrained(tmp_path / "quantized")
    model = UNet.from_pretrained(tmp_path / "quantized")
    values = {name: tensor.dequantize() for name, tensor in weights_of(model).items()}
    model.dequantize() if by == "dequantize" else tt.dequantize(model)
    model.save_pretrained(tmp_path / "plain")
    assert config_of(tmp_path / "plain").get("quantization_config") is None
    read = UNet.from_pretrained(tmp_path / "plain").state_dict()
    assert not any(isinstance(tensor, tt.Weight) for tensor in read.values())
    assert all(torch.equal(read[name], tensor) for name, tensor in values.items())


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory, plain):
    """The folder of a pipeline of a UNet, a text encoder of transformers, and a VAE."""
    torch.manual_seed(0)
    text = transformers.CLIPTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=8, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("pipeline")
    diffusers.StableDiffusionPipeline(
        vae=diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=4),
        text_encoder=transformers.CLIPTextModel(text), tokenizer=None, unet=UNet.from_pretrained(plain),
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False), safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def read_pipeline(folder, **options):
    return diffusers.StableDiffusionPipeline.from_pretrained(folder, tokenizer=None, **options)


PARTS = "unet", "text_encoder"


@pytest.mark.parametrize("how", ["by backend", "by component", "afterwards"])
def test_pipelines_quantize_components_of_both_libraries_and_keep_them(pipeline, tmp_path, how):
    if how == "by backend":
        options = {"quant_backend": "torchtether", "quant_kwargs": {"scheme": "int8"}}
        config = diffusers.PipelineQuantizationConfig(**options, components_to_quantize=[*PARTS])
        pipe = read_pipeline(pipeline, quantization_config=config)
    elif how == "by component":
        theirs = importlib.import_module("torchtether.integrations.transformers")
        mapping = {"unet": doors.TetherConfig("int8"), "text_encoder": theirs.TetherConfig("int8")}
        config = diffusers.PipelineQuantizationConfig(quant_mapping=mapping)
        pipe = read_pipeline(pipeline, quantization_config=config)
    else:
        pipe = read_pipeline(pipeline)
        for part in PARTS:
            tt.quantize(getattr(pipe, part), "int8")
    pipe.save_pretrained(tmp_path)
    again = read_pipeline(tmp_path)
    for part in PARTS:
        assert weights_of(getattr(pipe, part))
        assert facts(getattr(again, part)) == facts(getattr(pipe, part))
    assert not weights_of(again.vae)
    assert torch.equal(output(again.unet), output(pipe.unet))


def test_a_new_process_needs_one_import_for_both_libraries(pipeline, tmp_path):
    pipe = read_pipeline(pipeline)
    for part in PARTS:
        tt.quantize(getattr(pipe, part), "int8")
    pipe.save_pretrained(tmp_path)
    code = f"""
import torchtether as tt, torchtether.integrations.diffusers
from diffusers import StableDiffusionPipeline
pipe = StableDiffusionPipeline.from_pretrained({str(tmp_path)!r}, tokenizer=None)
for part in {PARTS!r}:
    print(sum(isinstance(p, tt.Weight) for p in getattr(pipe, part).parameters()))
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert [int(one) for one in found] == [len(weights_of(getattr(pipe, part))) for part in PARTS]


def test_adapters_of_peft_work_on_a_quantized_model(plain, tmp_path):
    peft = pytest.importorskip("peft")
    tt.quantize(UNet.from_pretrained(plain), "int8").save_pretrained(tmp_path)
    model = UNet.from_pretrained(tmp_path)
    expected = output(model)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    assert not torch.equal(output(model), expected)
    model.disable_adapters()
    assert torch.equal(output(model), expected)


def spoil(folder, change):
    """Change the tensors in the one file of ``folder``."""
    file = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


FAULTS = {
    "a part is missing": (lambda t: t.pop("time_embedding.linear_1.weight.scale"), "linear_1.weight.*scale"),
    "a part has another dtype": (
        lambda t: t.update({"time_embedding.linear_1.weight.scale": torch.ones(3, dtype=torch.int32)}),
        "linear_1.weight",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_do_not_fit_are_refused_in_one_line(plain, tmp_path, fault):
    change, words = FAULTS[fault]
    tt.quantize(UNet.from_pretrained(plain), "int8").save_pretrained(tmp_path)
    spoil(tmp_path, change)
    with pytest.raises(tt.CheckpointError, match=words) as caught:
        UNet.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_model_of_another_size_is_refused(plain, tmp_path):
    tt.quantize(UNet.from_pretrained(plain), "int8").save_pretrained(tmp_path)
    found = config_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(found | {"cross_attention_dim": 16}))
    with pytest.raises(tt.CheckpointError, match=r"\(\d+, 32\) in the files, and \(\d+, 16\) in the model"):
        UNet.from_pretrained(tmp_path)


def test_a_save_beside_the_files_that_diffusers_reads_is_noticed(plain, tmp_path):
    """``tt.save`` writes ``model.safetensors``, and diffusers would read the old values under the name of its own."""
    shutil.copytree(plain, tmp_path / "made")
    tt.save(tt.quantize(UNet.from_pretrained(plain), "int8"), tmp_path / "made")
    with pytest.raises(tt.CheckpointError, match="these files hold no Weights"):
        UNet.from_pretrained(tmp_path / "made")


class Tied(diffusers.ModelMixin, diffusers.ConfigMixin):
    """A model with a tie; those of diffusers have none."""

    config_name = "config.json"

    @diffusers.configuration_utils.register_to_config
    def __init__(self, size=32):
        super().__init__()
        self.first, self.second = torch.nn.Linear(size, size), torch.nn.Linear(size, size)
        self.second.weight = self.first.weight


def test_what_cannot_be_saved_is_refused_and_nothing_is_changed(plain, tmp_path):
    model = tt.quantize(Tied(), "int8")
    with pytest.raises(tt.CheckpointError, match=r"second.weight: is tied.*tt\.save"):
        model.save_pretrained(tmp_path / "tied")
    other = tt.quantize(UNet.from_pretrained(plain), "int8")
    config = dict(other.config)
    other.to("meta")
    with pytest.raises(tt.CheckpointError, match="no values"):
        other.save_pretrained(tmp_path / "meta")
    assert dict(other.config) == config
    assert not any(path.exists() for path in (tmp_path / "tied", tmp_path / "meta"))
    with pytest.raises(tt.CheckpointError, match="device_map.*'disk'"):
        UNet.from_pretrained(plain, quantization_config=doors.TetherConfig("int8"), device_map={"": "disk"})
    with pytest.raises(tt.ArgumentError, match="rules="):
        doors.TetherConfig({"*": "int8"})
    convolutions = {"block_out_channels": (32,), "norm_num_groups": 4, "mid_block_add_attention": False}
    diffusers.AutoencoderKL(**convolutions).save_pretrained(tmp_path)
    with pytest.raises(tt.RuleError, match=r"^AutoencoderKL: the model has no nn\.Linear"):  # others of a pipeline do
        diffusers.AutoencoderKL.from_pretrained(tmp_path, quantization_config=doors.TetherConfig("int8"))


def test_a_plain_model_is_saved_as_ever(plain, tmp_path):
    model = UNet.from_pretrained(plain)
    model.save_pretrained(tmp_path)
    for path in plain.iterdir():
        found, held = (tmp_path / path.name).read_bytes(), path.read_bytes()
        assert found == held or path.name == "config.json"
    assert "quantization_config" not in config_of(tmp_path)


def test_the_guide_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "tutorials" / "guides" / "integrations.md").read_text()
    _, code = re.findall(r"```py\n(.*?)```", text, re.DOTALL)
    exec(compile(code, "integrations.md", "exec"), {})
