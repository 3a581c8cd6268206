"""Saving and converting in formats of others writes their tensors and config.json, and loses nothing silently."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import torchtether as tt
from tests.formats.files import random, write
from torchtether.cli.main import main
from torchtether.files import KEY
from torchtether.files.opening import SETTINGS, SINQ_SETTINGS
from torchtether.formats import WRITABLE, bitsandbytes, native, writable
from torchtether.schemes import scheme_from_text

FOREIGN = [format.name for format in WRITABLE if format is not native]
MID = {"bitsandbytes": "nf4", "sinq": "sinq(8)", "comfy": "int8", "gguf": "int8(32, scale_dtype=float16)"}
"""A scheme that the format has words for; int8 in groups of 32 with float16 scales for all others."""


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(40, 64)
        self.mid = nn.Linear(64, 32)
        self.head = nn.Linear(64, 40, bias=False)
        self.head.weight = self.emb.weight


def _model():
    torch.manual_seed(0)
    return Tied()


def _config(folder):
    return json.loads((folder / "config.json").read_text())


def _decoded(folder):
    with tt.open(folder) as checkpoint:
        read = {name: checkpoint[name] for name in checkpoint}
    return {n: t.dequantize() if isinstance(t, tt.Weight) else t for n, t in read.items()}


def test_bitsandbytes_by_save(tmp_path):
    model = _model()
    tt.quantize(model, {"head.weight": tt.nf4(), "mid.weight": tt.nf4()})
    write(tmp_path, {}, {"quant_method": "gptq", "bits": 4}, config={"model_type": "mine"})
    tt.save(model.state_dict(keep_vars=True), tmp_path, format="bitsandbytes")  # in which nothing is an embedding
    config = _config(tmp_path)
    assert config["model_type"] == "mine"
    assert config["quantization_config"]["quant_method"] == "bitsandbytes"
    with tt.open(tmp_path) as checkpoint:
        assert checkpoint.format == "bitsandbytes"
        assert checkpoint.ties[0].names == ("emb.weight", "head.weight")
    with tt.on_meta():
        back = Tied()
    tt.load(back, tmp_path)
    assert back.head.weight is back.emb.weight
    for name, parameter in model.named_parameters():
        again = back.get_parameter(name)
        if isinstance(parameter, tt.Weight):
            parameter, again = parameter.dequantize(), again.dequantize()
        assert torch.equal(parameter, again)


@pytest.mark.parametrize(("format", "scheme"), [("native", "int8"), ("compressed-tensors", "int8"), ("sinq", "sinq")])
def test_settings_of_an_older_checkpoint_do_not_survive_a_save(tmp_path, format, scheme):
    old = {"quant_method": "compressed-tensors", "config_groups": {}}
    write(tmp_path, {}, old, config={"model_type": "mine", "compression_config": old})
    for name in SETTINGS:
        (tmp_path / name).write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    tt.save(nn.Sequential(nn.Linear(64, 64)), tmp_path / "model.safetensors")
    assert {*SETTINGS} <= {path.name for path in tmp_path.iterdir()}  # a save of one file leaves the others
    tt.save(tt.quantize(nn.Sequential(nn.Linear(64, 64)), scheme), tmp_path, format=format)
    assert {*SETTINGS} & {path.name for path in tmp_path.iterdir()} == ({SINQ_SETTINGS} if format == "sinq" else set())
    assert "compression_config" not in _config(tmp_path)
    with tt.open(tmp_path) as checkpoint:
        assert checkpoint.format == format
        assert not checkpoint.faults


@pytest.mark.parametrize("aliases", ["drop", "copy"])
@pytest.mark.parametrize("shards", [None, 2000])
@pytest.mark.parametrize(
    ("format", "scheme"),
    [
        ("compressed-tensors", tt.int8()),
        ("compressed-tensors", tt.int4(32)),
        ("compressed-tensors", tt.fp8()),
        ("compressed-tensors", tt.mxfp4()),
        ("bitsandbytes", tt.nf4()),
        ("comfy", tt.int8()),
        ("comfy", tt.fp8("tensor")),
        ("sinq", tt.sinq(4, 32)),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_tied_head_stays_tied_whatever_its_keys_are_called(tmp_path, format, scheme, shards, aliases):
    model = _model()
    tt.quantize(model, {"head.weight": scheme})
    tt.save(model.state_dict(keep_vars=True), tmp_path, format=format, max_shard_size=shards, aliases=aliases)
    with tt.open(tmp_path) as checkpoint:
        assert [tie.names for tie in checkpoint.ties] == [("emb.weight", "head.weight")]
        assert checkpoint["head.weight"].parts["qdata"].data_ptr() == checkpoint["emb.weight"].parts["qdata"].data_ptr()
    with tt.on_meta():
        back = Tied()
    tt.load(back, tmp_path)
    assert back.head.weight is back.emb.weight
    assert torch.equal(back.head.weight.dequantize(), model.head.weight.dequantize())


@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.parametrize(
    ("format", "scheme", "lost"),
    [
        ("compressed-tensors", "int8", "weight_scale"),
        ("compressed-tensors", "fp8", "weight_scale"),
        ("bitsandbytes", "nf4", "weight.absmax"),
        ("comfy", "int8", "weight_scale"),
    ],
)
def test_a_fault_of_an_owner_is_one_of_its_aliases(tmp_path, capsys, format, scheme, lost, noted):
    """Also where another writer noted the tie as ``alias: owner`` alone."""
    model = _model()
    tt.quantize(model, {"head.weight": scheme})
    tt.save(model.state_dict(keep_vars=True), tmp_path, format=format)
    path = tmp_path / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    left = load_file(path)
    del left[f"emb.{lost}"]
    record = {**json.loads(metadata[KEY]), "crc32": {}}
    save_file(left, path, {"head.weight": "emb.weight"} if noted else {**metadata, KEY: json.dumps(record)})
    with tt.on_meta():
        back = Tied()
    plan = tt.plan_load(back, tmp_path)
    assert any(fault.startswith("emb.weight: it") for fault in plan.faults)
    with tt.open(tmp_path) as checkpoint:
        assert set(checkpoint) == {"mid.bias", "mid.weight"}
        with pytest.raises((tt.CheckpointError, KeyError)):
            checkpoint["head.weight"]
    for verb in ("inspect", "ties", "map"):
        assert main([verb, str(tmp_path)]) == 0
    for command in (["verify"], ["convert", str(tmp_path / "two")]):
        assert main([command[0], str(tmp_path), *command[1:]]) == 1
    assert "emb.weight" in capsys.readouterr().err


def test_an_owner_that_no_format_makes_of_its_keys_is_not_stored(tmp_path):
    tie = json.dumps({"v": 1, "ties": [tt.Tie(("a.weight", "b.weight")).to_json()]})
    path = tmp_path / "x.safetensors"
    save_file({"a.weight_x": torch.ones(2)}, path, metadata={KEY: tie})
    with pytest.raises(
        tt.CheckpointError,
        match=r"a\.weight: the record lists it as the owner of a tie, the checkpoint does not store it",
    ):
        tt.open(path)


def test_a_native_save_takes_back_what_another_format_said(tmp_path):
    write(tmp_path, {}, {"quant_method": "gptq", "bits": 4}, config={"model_type": "mine", "text_config": {"a": 1}})
    tt.save(_model(), tmp_path)
    assert _config(tmp_path) == {"model_type": "mine", "text_config": {"a": 1}}


def test_a_native_save_leaves_a_config_alone(tmp_path):
    (tmp_path / "config.json").write_text('{"b": 1,   "a": 2}')
    tt.save(_model(), tmp_path)
    assert (tmp_path / "config.json").read_text() == '{"b": 1,   "a": 2}'


@pytest.mark.parametrize("format", [name for name in FOREIGN if name not in ("gguf", "comfy")])
def test_needs_a_folder(tmp_path, format):
    model = _model()
    tt.quantize(model, {"mid.weight": scheme_from_text(MID.get(format, "int8"))})
    with pytest.raises(tt.CheckpointError, match="Give a folder"):
        tt.save(model, tmp_path / "model.safetensors", format=format)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", FOREIGN)
def test_views_have_no_words(tmp_path, format):
    model = _model()
    model.turned = nn.Parameter(model.mid.weight.detach().t())
    target = tmp_path / ("x.gguf" if format == "gguf" else "")
    with pytest.raises(tt.TieError, match="cannot store views"):
        tt.save(model, target, format=format)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", FOREIGN)
def test_schemes_without_words(tmp_path, format):
    model = _model()
    tt.quantize(model, {"mid.weight": tt.Codebook((-1.0, 0.0, 1.0))})
    target = tmp_path / ("x.gguf" if format == "gguf" else "")
    with pytest.raises(tt.SchemeError, match=r"mid\.weight: "):
        tt.save(model, target, format=format)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", ["compressed-tensors", "bitsandbytes"])
def test_a_format_that_does_not_store_that_inputs_are_rounded_says_so(tmp_path, format):
    scheme = bitsandbytes.INT8 if format == "bitsandbytes" else tt.int8()
    model = tt.quantize(_model(), {"mid.weight": scheme})
    tt.quantize_activations(model, "int8")
    tt.save(model, tmp_path / "native")
    with pytest.warns(UserWarning, match=f"^mid.weight: {format} does not store that inputs .* are rounded") as told:
        tt.save(model, tmp_path / "other", format=format)
    assert [one.filename for one in told] == [__file__]


def test_unknown_formats(tmp_path):
    with pytest.raises(tt.CheckpointError, match="unknown format 'x'. Choose one of 'native'"):
        tt.save(_model(), tmp_path, format="x")
    with pytest.raises(tt.CheckpointError, match="'fp8' can be read but not written"):
        tt.save(_model(), tmp_path, format="fp8")


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
def test_no_folder_is_made_of_the_name_of_a_pickle(tmp_path, capsys, suffix):
    target = tmp_path / f"x{suffix}"
    with pytest.raises(tt.CheckpointError, match="only torch.save writes"):
        tt.save(_model(), target)
    tt.save(_model(), tmp_path / "one.safetensors")
    assert main(["convert", str(tmp_path / "one.safetensors"), str(target)]) == 1
    assert not target.exists()
    target.mkdir()
    tt.save(_model(), target)  # whoever made it so wants it so
    assert len(tt.open(target)) == 4


def test_convert_between_formats(tmp_path, capsys):
    """From bitsandbytes to our own and back: the same codes; what is beside is carried over and restated."""
    model = _model()
    tt.quantize(model, {"mid.weight": tt.nf4(double_quant=True)})
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    tt.save(model, one, format="bitsandbytes")
    (one / "config.json").write_text(json.dumps({**_config(one), "model_type": "mine"}))
    (one / "quantize_config.json").write_text("{}")
    assert main(["convert", str(one), str(two)]) == 0
    assert _config(two) == {"model_type": "mine", "quantization_config": {"quant_method": "torchtether"}}
    assert not (two / "quantize_config.json").exists()
    with tt.open(two) as checkpoint:
        assert checkpoint.format == "native"
    assert main(["convert", str(two), str(three), "--format", "bitsandbytes"]) == 0
    assert _config(three) == _config(one)
    first, third = _decoded(one), _decoded(three)
    assert first.keys() == third.keys()
    assert all(torch.equal(first[name], third[name]) for name in first)
    assert main(["verify", str(three), "--against", str(one)]) == 0


def test_requantize_is_explicit(tmp_path, capsys):
    model = _model()
    tt.quantize(model, {"mid.weight": tt.int8()})
    tt.save(model, tmp_path / "one")
    command = ["convert", str(tmp_path / "one"), str(tmp_path / "two"), "--format", "bitsandbytes"]
    assert main(command) == 1
    assert "--requantize" in capsys.readouterr().err
    assert not (tmp_path / "two").exists()
    assert main([*command, "--requantize", "nf4", "--dtype", "bfloat16"]) == 0
    assert "1 of" not in capsys.readouterr().err
    with tt.open(tmp_path / "two") as checkpoint:
        again = checkpoint["mid.weight"]
    wanted = tt.Weight.encode(model.mid.weight.dequantize(), tt.nf4()).to(torch.bfloat16)
    assert again.dtype == torch.bfloat16
    assert torch.equal(again.dequantize(), wanted.dequantize())


@pytest.mark.parametrize("format", [name for name in FOREIGN if name != "bitsandbytes"])
def test_a_unit_beside_the_scale_is_not_left_out(tmp_path, capsys, format):
    """bitsandbytes keeps row maxima, and 1/127 apart: taken for plain scales, values are 127 times too large."""
    model = _model()
    tt.quantize(model, {"mid.weight": bitsandbytes.INT8})
    tt.save(model, tmp_path / "one", format="bitsandbytes")
    target = tmp_path / ("two.gguf" if format == "gguf" else "two")
    command = ["convert", str(tmp_path / "one"), str(target), "--format", format]
    assert main(command) == 1
    assert "mid.weight: " in capsys.readouterr().err
    assert main([*command, "--requantize", MID.get(format, MID["gguf"])]) == 0
    again = _decoded(target)["mid.weight"].float()
    assert torch.allclose(again, model.mid.weight.dequantize(), atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("format", "scheme"), [("compressed-tensors", "int8"), ("compressed-tensors", "mxfp4")])
def test_a_model_whose_config_names_no_dtype_runs_as_it_was_saved(tmp_path, format, scheme, dtype):
    model = _model().to(dtype)
    tt.quantize(model, {"mid.weight": scheme})
    tt.save(model, tmp_path, format=format)
    with tt.on_meta():
        back = Tied()
    tt.load(back, tmp_path)
    values = torch.randn(3, 64).to(dtype)
    assert torch.equal(back.mid(values), model.mid(values))


@pytest.mark.parametrize("named", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("format", "scheme"),
    [
        ("compressed-tensors", "int8"),
        ("compressed-tensors", "int4(32, symmetric=True, scale_dtype=float16)"),
        ("comfy", "fp8(granularity=tensor)"),
        ("bitsandbytes", "nf4"),
        ("bitsandbytes", bitsandbytes.INT8),
        ("sinq", "sinq"),
        ("gguf", MID["gguf"]),
    ],
)
def test_a_weight_computes_in_its_dtype_whatever_a_config_names(tmp_path, format, scheme, dtype, named):
    """Also where no plain weight is beside it, from which a reader could take the dtype."""
    if named is not None:
        (tmp_path / "config.json").write_text(json.dumps({"dtype": named}))
    path = tmp_path / "x.gguf" if format == "gguf" else tmp_path
    model = nn.Sequential(nn.Linear(64, 32, bias=False)).to(dtype)
    tt.quantize(model, scheme_from_text(scheme) if isinstance(scheme, str) else scheme)
    tt.save(model, path, format=format)
    with tt.on_meta():
        back = nn.Sequential(nn.Linear(64, 32, bias=False))
    tt.load(back, path)
    assert back[0].weight.dtype == dtype
    assert torch.equal(back[0].weight.dequantize(), model[0].weight.dequantize())


@pytest.mark.parametrize("format", ["compressed-tensors", "gguf"])
def test_convert_writes_the_dtype_that_it_prints(tmp_path, capsys, format):
    tt.save(tt.quantize(_model(), {"mid.weight": scheme_from_text(MID["gguf"])}), tmp_path / "one")
    (tmp_path / "one" / "config.json").write_text('{"dtype": "float32"}')
    target = tmp_path / ("two.gguf" if format == "gguf" else "two")
    assert main(["convert", str(tmp_path / "one"), str(target), "--format", format, "--dtype", "bfloat16"]) == 0
    assert "to compute in bfloat16 instead of float32" in capsys.readouterr().out
    with tt.open(target) as checkpoint:
        assert checkpoint.spec("mid.weight").dtype == torch.bfloat16


def test_a_dtype_of_the_record_is_only_that_of_a_weight(tmp_path):
    """Another tool may have decoded it, or renamed it, and left the metadata as it was."""
    tt.save(tt.quantize(_model(), {"mid.weight": "int8"}), tmp_path, format="compressed-tensors")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    with safe_open(file, "pt") as opened:
        record = json.loads(opened.metadata()[KEY])
    del record["crc32"]
    record["dtypes"] = {"mid.weight": "float16", "mid.bias": "float16", "gone": "float16"}
    save_file(tensors, file, metadata={KEY: json.dumps(record), "format": "pt"})
    with tt.open(tmp_path) as checkpoint:
        assert checkpoint.spec("mid.weight").dtype == torch.float16
        assert checkpoint.spec("mid.bias").dtype == torch.float32
        assert "gone" not in checkpoint


def test_quantize_into_a_format(tmp_path):
    tt.save({"m.weight": random(64, 64), "m.bias": random(64)}, tmp_path / "one")
    command = ["quantize", str(tmp_path / "one"), str(tmp_path / "two"), "--scheme", "nf4", "--format", "bitsandbytes"]
    assert main(command) == 0
    with tt.open(tmp_path / "two") as checkpoint:
        assert checkpoint.format == "bitsandbytes"
        assert torch.equal(checkpoint["m.weight"].dequantize(), tt.Weight.encode(random(64, 64), tt.nf4()).dequantize())


def test_faults_of_a_source(tmp_path, capsys):
    folder = write(tmp_path / "one", {"m.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn)}, {"quant_method": "fp8"})
    assert main(["convert", str(folder), str(tmp_path / "two")]) == 1
    assert "m.weight: it is torch.float8_e4m3fn and has no scale" in capsys.readouterr().err
    assert not (tmp_path / "two").exists()
    assert main(["verify", str(folder)]) == 1
    assert main(["inspect", str(folder)]) == 0
    assert "fault: m.weight" in capsys.readouterr().out


# -- what readers build modules for -----------------------------------------------------------------------------------


def tied_model():
    torch.manual_seed(0)
    made = torch.nn.ModuleDict({"emb": torch.nn.Embedding(64, 64), "fc": torch.nn.Linear(64, 64, bias=False)})
    made["head"] = torch.nn.Linear(64, 64, bias=False)
    made["head"].weight = made["emb"].weight
    return made


def config_of(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize(
    ("scheme", "dtype", "is_decoded"),
    [
        (tt.int8(), torch.float32, False),
        (tt.int4(32, True), torch.float32, False),
        (tt.int4(32), torch.float32, True),
        (tt.int4(32), torch.bfloat16, True),
        (tt.mxfp4(), torch.float32, True),
        (tt.mxfp4(), torch.bfloat16, False),
    ],
)
def test_transformers_is_told_to_decode_what_it_cannot_keep(tmp_path, scheme, dtype, is_decoded):
    model = tt.quantize(tied_model().to(dtype), {"fc.weight": scheme})
    tt.save(model, tmp_path / "linear", format="compressed-tensors")
    assert config_of(tmp_path / "linear").get("dequantize", False) == is_decoded
    tt.quantize(model, {"emb.weight": scheme})
    tt.save(model, tmp_path / "both", format="compressed-tensors")
    assert config_of(tmp_path / "both")["dequantize"] is True
    again = tied_model()
    tt.load(again, tmp_path / "both", dtype=dtype)
    assert again["head"].weight is again["emb"].weight
    assert torch.equal(again["emb"].weight.detach().dequantize(), model["emb"].weight.detach().dequantize())


@pytest.mark.parametrize(
    ("format", "rules"),
    [
        ("bitsandbytes", {"*": "nf4"}),
        ("bitsandbytes", {"emb.weight": "nf4"}),
        ("comfy", {"*": "int8"}),
        ("sinq", {"emb.weight": "sinq"}),
        ("compressed-tensors", {"emb.weight": "int8", "fc.weight": "fp8"}),
    ],
)
@pytest.mark.parametrize("aliases", ["drop", "copy"])
def test_an_embedding_that_nobody_could_read_is_refused_before_a_file(tmp_path, format, rules, aliases):
    model = tt.quantize(tied_model(), rules)
    with pytest.raises(tt.SchemeError, match=r"^emb\.weight: .* Decode it with tt\.quantize\(model, {'emb\.weight': "):
        tt.save(model, tmp_path / "made", format=format, aliases=aliases)
    assert not (tmp_path / "made").exists()
    tt.save(model, tmp_path / "native", aliases=aliases)
    tt.quantize(model, {"emb.weight": tt.Plain()})
    tt.save(model, tmp_path / "made", format=format, aliases=aliases)
    with tt.open(tmp_path / "made") as checkpoint:
        assert checkpoint["head.weight"].data_ptr() == checkpoint["emb.weight"].data_ptr()


def test_a_head_that_is_stored_nowhere_is_left_alone_by_its_readers(tmp_path):
    tt.save({"fc.weight": tt.Weight.encode(torch.randn(64, 64), tt.nf4())}, tmp_path, format="bitsandbytes")
    assert {"lm_head", "cls.predictions.decoder", "proj_out"} <= {*config_of(tmp_path)["llm_int8_skip_modules"]}


def test_a_head_that_is_stored_quantized_is_not_left_alone(tmp_path):  # nor what has the name of a head in its name
    names = ("a.proj_out.weight", "lm_head.dense.weight")
    weights = {name: tt.Weight.encode(torch.randn(64, 64), tt.nf4()) for name in names}
    tt.save(weights, tmp_path, format="bitsandbytes")
    skipped = config_of(tmp_path)["llm_int8_skip_modules"]
    assert "lm_head.decoder" in skipped
    assert not {"lm_head", "proj_out"} & {*skipped}


@pytest.mark.parametrize(
    ("format", "scheme", "held"),
    [
        ("bitsandbytes", tt.int8(), bitsandbytes.INT8),
        ("bitsandbytes", tt.nf4(), tt.nf4()),
        ("bitsandbytes", tt.int8(32), tt.int8(32)),
        ("comfy", tt.fp8(), tt.fp8("tensor")),
        ("comfy", tt.int8(), tt.int8()),
        ("compressed-tensors", tt.nvfp4(), tt.nvfp4(global_divides=True)),
        ("compressed-tensors", tt.int8(), tt.int8()),
        ("compressed-tensors", tt.mxfp4(), tt.mxfp4()),
    ],
)
def test_a_format_has_its_own_variant_of_some_schemes(format, scheme, held):
    assert writable(format).variant_of(scheme) == held
