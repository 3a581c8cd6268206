"""``quantize`` and ``convert`` write what loading and saving would, one tensor at a time, or change nothing."""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

import torchtether as tt
from tests.catalog import SCHEMES, each_scheme
from tests.loading.models import MODELS, Slices, Storage, Tied, build
from tests.written import write_tensors
from torchtether import compiled
from torchtether.cli import transform
from torchtether.cli.main import main
from torchtether.files import companions
from torchtether.formats import bitsandbytes
from torchtether.progress import Meter
from torchtether.schemes import NAMED, scheme_from_text, scheme_to_text

GOLDEN = Path(__file__).parents[1] / "golden"


class Net(Tied):
    """Large enough that its matrices look like linear layers; the embedding is tied to the head, and turned."""

    def __init__(self):
        super().__init__(64, 128)
        self.pos_emb = nn.Embedding(40, 128)
        self.turned = nn.Parameter(self.emb.weight.detach().t())
        self.register_buffer("table", torch.randn(64, 64))


RULES = {"emb.weight": "int8", "head.weight": "int8", "turned": "int8", "mid.weight": "int8"}


def files_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    tt.save(build(Net), path, max_shard_size="60kB")
    (path / "config.json").write_text('{"model_type": "net"}')
    (path / "tokenizer.model").write_bytes(b"\0\1")
    (path / "notes.bin").write_bytes(b"not ours")
    return path


@pytest.mark.parametrize("scheme", sorted(NAMED))
def test_quantize_makes_what_loading_makes(source, tmp_path, scheme, capsys):
    """Byte for byte: the file that a model loaded with ``quantize=`` would save."""
    rules = dict.fromkeys(RULES, scheme)
    assert main(["quantize", str(source), str(tmp_path / "made"), "--scheme", scheme]) == 0
    assert "2 of 10 tensors quantized" in capsys.readouterr().out
    model = build(Net, meta=True, seed=2)
    tt.load(model, source, quantize=rules)
    tt.save(model, tmp_path / "wanted")
    made = files_of(tmp_path / "made")
    assert made["model.safetensors"] == files_of(tmp_path / "wanted")["model.safetensors"]
    assert sorted(made) == ["config.json", "model.safetensors", "tokenizer.model"]
    assert made["tokenizer.model"] == b"\0\1"
    again = build(Net, meta=True, seed=3)
    tt.load(again, tmp_path / "made")
    assert again.head.weight is again.emb.weight
    assert isinstance(again.emb.weight, tt.Weight)
    assert torch.equal(again.turned.dequantize(), model.emb.weight.dequantize().t())
    assert main(["verify", str(tmp_path / "made"), "--against", str(source)]) == 0


@pytest.mark.parametrize("scheme", ["int4(group_size=32)", "nf4", "int8", "sinq"])
def test_quantize_with_a_fit_makes_what_loading_makes(source, tmp_path, scheme):
    """Scales are searched for, under rules too, and the file is that of a model that was loaded so."""
    searched = tt.sinq(fit="mse") if scheme == "sinq" else replace(scheme_from_text(scheme), fit="mse")
    assert main(["quantize", str(source), str(tmp_path / "a"), "--scheme", scheme, "--fit", "mse"]) == 0
    rules = [f"--rule={glob}={scheme}" for glob in ("emb.weight", "mid.weight")]
    assert main(["quantize", str(source), str(tmp_path / "b"), *rules, "--fit", "mse"]) == 0
    assert main(["quantize", str(source), str(tmp_path / "plain"), "--scheme", scheme]) == 0
    model = build(Net, meta=True, seed=2)
    tt.load(model, source, quantize=dict.fromkeys(RULES, searched))
    tt.save(model, tmp_path / "wanted")
    wanted, a, b, plain = (files_of(tmp_path / name)["model.safetensors"] for name in ("wanted", "a", "b", "plain"))
    assert a == b == wanted
    assert a != plain


def test_a_fit_needs_schemes_that_have_one(source, tmp_path, capsys):
    assert main(["quantize", str(source), str(tmp_path / "made"), "--scheme", "fp8", "--fit", "mse"]) == 1
    assert "fp8: the scheme has no option fit, got fit 'mse'. Use int8" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


@pytest.mark.skipif(compiled.native() is None, reason="torch ops work in 100 MiB, however many tensors there are")
def test_quantize_holds_one_tensor_at_a_time_with_a_fit_too(tmp_path):
    """Of 8 tensors of 4 MiB it holds the numbers of one, its codes, and a few MiB to work in."""
    torch.manual_seed(0)
    save_file({f"{i}.weight": torch.randn(1024, 1024) for i in range(8)}, tmp_path / "x.safetensors")
    transform.quantize_checkpoint(tmp_path / "x.safetensors", tmp_path / "first", "int4", fit="mse")
    with Meter() as meter:
        transform.quantize_checkpoint(tmp_path / "x.safetensors", tmp_path / "made", "int4", fit="mse")
    assert meter.peak is None or meter.peak < 16 << 20


def test_embeddings_are_left_alone_unless_a_head_is_tied_to_them(source, tmp_path):
    report = transform.quantize_checkpoint(source, tmp_path / "made", "int8")
    assert report.changed == ("emb.weight", "mid.weight")
    assert report.bytes_after < report.bytes_before
    tt.save({"emb.weight": torch.randn(64, 64), "fc.weight": torch.randn(64, 64)}, tmp_path / "apart.safetensors")
    assert transform.quantize_checkpoint(tmp_path / "apart.safetensors", tmp_path / "b", "int8").changed == (
        "fc.weight",
    )


def test_include_and_exclude_speak_for_tied_groups(source, tmp_path):
    def changed(target, **globs):
        return transform.quantize_checkpoint(source, tmp_path / target, "int8", **globs).changed

    assert changed("a", exclude=["head.*"]) == ("mid.weight",)
    assert changed("b", include=["head.*", "table"]) == ("emb.weight", "table")
    assert changed("c", include=["*.weight"], exclude=["norm.*", "turned"]) == ("mid.weight", "pos_emb.weight")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--include", "no.such"], "no.such: this glob matches no tensor"),
        (["--exclude", "no.such"], "no.such: this glob matches no tensor"),
        (["--include", "steps"], "steps: it is int64, which cannot be quantized"),
        (["--exclude", "*"], "no tensor is selected"),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_nothing(source, tmp_path, capsys, options, words):
    assert main(["quantize", str(source), str(tmp_path / "made"), "--scheme", "int8", *options]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["source"]


def test_a_scheme_that_does_not_fit_and_values_that_cannot_be_name_the_tensor(tmp_path, capsys):
    tt.save({"scale": torch.tensor(1.0)}, tmp_path / "odd.safetensors")
    arguments = ["quantize", str(tmp_path / "odd.safetensors"), str(tmp_path / "a"), "--scheme", "int8"]
    assert main([*arguments, "--include", "*"]) == 1
    assert "torchtether: scale: " in capsys.readouterr().err
    tt.save({"fc.weight": torch.full((64, 64), torch.nan)}, tmp_path / "nan.safetensors")
    assert main(["quantize", str(tmp_path / "nan.safetensors"), str(tmp_path / "a"), "--scheme", "int8"]) == 1
    assert "torchtether: fc.weight: " in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_quantizing_again_says_why_nothing_is_selected(source, tmp_path, capsys):
    assert main(["quantize", str(source), str(tmp_path / "one"), "--scheme", "int8"]) == 0
    capsys.readouterr()
    assert main(["quantize", str(tmp_path / "one"), str(tmp_path / "two"), "--scheme", "int4"]) == 1
    error = capsys.readouterr().err
    assert "no tensor is selected, and 2 of 8 are quantized already" in error
    assert error.endswith('decode these first: torchtether convert --dequantize "*".\n')


def test_what_is_quantized_stays_as_it_is(source, tmp_path, capsys):
    transform.quantize_checkpoint(source, tmp_path / "one", "int4", include=["mid.weight"])
    transform.quantize_checkpoint(tmp_path / "one", tmp_path / "two", "int8")
    with tt.open(tmp_path / "one") as one, tt.open(tmp_path / "two") as two:
        assert one.spec("mid.weight") == two.spec("mid.weight")
        assert isinstance(two["emb.weight"], tt.Weight)
    arguments = ["quantize", str(tmp_path / "one"), str(tmp_path / "x"), "--scheme", "int8", "--include", "mid.*"]
    assert main(arguments) == 1
    assert "mid.weight: it is quantized already, as int4" in capsys.readouterr().err


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("aliases", ["drop", "copy"])
def test_convert_makes_what_saving_makes(tmp_path, kind, aliases):
    """The same bytes as ``tt.save(aliases=)``, from either spelling of the source, in shards too."""
    model = build(kind)
    tt.save(model, tmp_path / "drop")
    tt.save(model, tmp_path / "copy", aliases="copy")
    tt.save(model, tmp_path / "wanted", aliases=aliases)
    for spelled in ("drop", "copy"):
        transform.convert_checkpoint(tmp_path / spelled, tmp_path / f"from-{spelled}", aliases=aliases)
        assert files_of(tmp_path / f"from-{spelled}") == files_of(tmp_path / "wanted")
    transform.convert_checkpoint(tmp_path / "drop", tmp_path / "shards", aliases=aliases, max_shard_size=1)
    with tt.open(tmp_path / "shards") as made, tt.open(tmp_path / "wanted") as wanted:
        assert len(made.store.files) == len(made.entries)
        assert sorted(made.ties, key=str) == sorted(wanted.ties, key=str)
        assert all(made.spec(name) == wanted.spec(name) for name in wanted)


@pytest.mark.parametrize("kind", [Tied, Net, Slices])
@pytest.mark.parametrize("aliases", ["drop", "copy"])
def test_convert_dtype_makes_what_loading_in_it_makes(tmp_path, kind, aliases):
    model = build(kind)
    tt.save(model, tmp_path / "source")
    tt.convert(model, dtype=torch.bfloat16)
    tt.save(model, tmp_path / "wanted", aliases=aliases)
    arguments = ["convert", str(tmp_path / "source"), str(tmp_path / "made"), "--dtype", "bfloat16"]
    assert main([*arguments, "--aliases", aliases]) == 0
    assert files_of(tmp_path / "made") == files_of(tmp_path / "wanted")


def test_convert_dtype_of_a_quantized_weight_keeps_its_codes(source, tmp_path):
    transform.quantize_checkpoint(source, tmp_path / "one", "int8")
    for aliases in ("drop", "copy"):
        transform.convert_checkpoint(tmp_path / "one", tmp_path / aliases, dtype=torch.bfloat16, aliases=aliases)
        with tt.open(tmp_path / "one") as one, tt.open(tmp_path / aliases) as two:
            assert two["turned"].dtype == torch.bfloat16
            assert all(torch.equal(part, two["turned"].parts[key]) for key, part in one["turned"].parts.items())
        assert main(["verify", str(tmp_path / aliases)]) == 0


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (lambda: {"a": torch.ones(4).to(torch.float8_e4m3fn)}, "a: it is float8_e4m3fn without a known scale"),
        (lambda: {"a": torch.full((2,), 1e6)}, "a: it holds numbers too large for float16"),
        (lambda: build(Storage), "x: its memory is shared as float32 and int32"),
    ],
)
def test_a_dtype_that_would_change_more_than_values_is_refused(tmp_path, capsys, tensors, words):
    tt.save(tensors(), tmp_path / "x.safetensors")
    arguments = ["convert", str(tmp_path / "x.safetensors"), str(tmp_path / "y.safetensors"), "--dtype", "float16"]
    assert main(arguments) == 1
    assert words in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]


def test_infinities_of_the_source_stay(tmp_path):
    tt.save({"mask": torch.tensor([0.0, -torch.inf])}, tmp_path / "x.safetensors")
    transform.convert_checkpoint(tmp_path / "x.safetensors", tmp_path / "y.safetensors", dtype=torch.float16)
    assert load_file(tmp_path / "y.safetensors")["mask"].tolist() == [0, -torch.inf]


def test_names_that_safetensors_only_notes_become_ties(tmp_path):
    save_model(build(Tied), str(tmp_path / "model.safetensors"))
    transform.convert_checkpoint(tmp_path / "model.safetensors", tmp_path / "made.safetensors")
    with tt.open(tmp_path / "made.safetensors") as made:
        assert [set(tie.names) for tie in made.ties] == [{"emb.weight", "head.weight"}]
    model = build(Tied, meta=True)
    assert tt.load(model, tmp_path / "made.safetensors").missing_keys == ()


def test_the_format_of_a_file_is_no_tie(tmp_path):
    save_file({"pt": torch.ones(2)}, tmp_path / "x.safetensors", metadata={"format": "pt", "twin": "pt"})
    transform.convert_checkpoint(tmp_path / "x.safetensors", tmp_path / "y.safetensors")
    with tt.open(tmp_path / "y.safetensors") as made:
        assert list(made) == ["pt", "twin"]


def test_a_weight_whose_shape_only_the_model_knows_is_refused(tmp_path, capsys):
    """Quanto's files of 4 bits hold groups: the bias of ``q_proj`` tells its rows, and ``k_proj`` has none."""
    made = tmp_path / "made"
    assert main(["convert", str(GOLDEN / "quanto_qint4_bf16"), str(made)]) == 1
    assert "self_attn.k_proj.weight: quanto does not store its shape" in capsys.readouterr().err
    assert not made.exists()
    with tt.open(GOLDEN / "quanto_qint4_bf16") as checkpoint:
        tensors = {key: tensor for key, tensor in checkpoint.items() if "q_proj" in key}
    assert tensors["self_attn.q_proj.weight"].shape[:1] == tensors["self_attn.q_proj.bias"].shape


def test_a_copy_that_differs_stops_it(tmp_path, capsys):
    tt.save(build(Tied), tmp_path / "x.safetensors", aliases="copy")
    with tt.open(tmp_path / "x.safetensors") as checkpoint:
        metadata = checkpoint.store.record.with_checksums({}).metadata()  # which would be the first to say it
    tensors = load_file(tmp_path / "x.safetensors")
    tensors["head.weight"] = tensors["head.weight"] + 1
    with open(tmp_path / "y.safetensors", "wb", buffering=0) as file:
        write_tensors(file, tensors, metadata, name="y")
    assert main(["convert", str(tmp_path / "y.safetensors"), str(tmp_path / "z.safetensors")]) == 1
    assert "stored copy differs" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "y.safetensors")]) == 1
    assert "stored copy differs" in capsys.readouterr().err
    assert not (tmp_path / "z.safetensors").exists()


# -- schemes and rules on the command line -----------------------------------------------------------------------------

SPELLED = {
    "int4": tt.int4(),
    "int4(group_size=64, symmetric=True)": tt.int4(64, True),
    " int4( 64 , True ) ": tt.int4(64, True),
    "int8(group_size=None)": tt.int8(),
    "int8(scale_dtype=bfloat16)": tt.int8(scale_dtype=torch.bfloat16),
    "int8(scale_dtype='float16')": tt.int8(scale_dtype=torch.float16),
    "int8(scale_dtype=torch.float16)": tt.int8(scale_dtype=torch.float16),
    "fp8(block)": tt.fp8("block"),
    "fp8(granularity='tensor')": tt.fp8("tensor"),
    "nf4(double_quant=True, block_size=128)": tt.nf4(True, block_size=128),
    "nvfp4()": tt.nvfp4(),
    "SuperBlocks(4, minimum=True)": tt.SuperBlocks(4, minimum=True),
    "Affine(bits=5, block=(1, 32), scale_dtype=torch.float16)": tt.Affine(5, block=(1, 32), scale_dtype=torch.float16),
    "Affine(5, unit=2.0)": tt.Affine(5, unit=2.0),
    "Biased(fit=hqq)": tt.Biased(fit="hqq"),
    "Biased": tt.Biased(),
    "Codebook((-1.0, 0.0, 1.0))": tt.Codebook((-1.0, 0.0, 1.0)),
    "ColumnScaled(int4(group_size=32))": tt.sinq(4, 32),
    "ColumnScaled(SuperBlocks(3, minimum=True))": tt.ColumnScaled(tt.SuperBlocks(3, minimum=True)),
}


@pytest.mark.parametrize("text", SPELLED)
def test_a_scheme_is_spelled_as_in_python(text):
    assert scheme_from_text(text) == SPELLED[text]


def test_a_scheme_may_be_called_as_errors_and_guides_write_it():
    assert scheme_from_text("tt.int8(32, scale_dtype=torch.float16)") == tt.int8(32, scale_dtype=torch.float16)
    assert scheme_from_text("tt.ColumnScaled(tt.int4(group_size=32))") == tt.sinq(4, 32)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int5", "unknown scheme 'int5', known are"),
        ("", "unknown scheme ''"),
        ("int4(", "is not understood. Write int4, or int4(group_size=..., symmetric=..., scale_dtype=..., fit=...)."),
        ("int4(64)(64)", "is not understood"),
        ("int4(64) or int8", "is not understood"),
        ("int4" + "(" * 400, "is not understood"),
        ("int4(group_size=" + "[" * 300, "is not understood"),
        ("int4(group_size=" + "-" * 470 + "1)", "is not understood"),
        ("int4(1, True, None, None)", "is not understood"),
        ("int8(32, True)", "is not understood"),
        ("int4(*[64])", "is no int or None"),
        ("int4(**{})", "there is no option None"),
        ("int4(group=64)", "int4: there is no option 'group'. It has group_size, symmetric, scale_dtype, fit."),
        ("int4(64, group_size=64)", "the option 'group_size' is given twice"),
        ("int4(group_size=True)", "int4(group_size=): True is no int or None"),
        ("int4(group_size=6.5)", "6.5 is no int or None"),
        ("int4(symmetric=1)", "1 is no bool"),
        ("int4(symmetric=true)", "true is no bool"),
        ("int4(group_size=0)", "block must be"),
        ("int8(scale_dtype=half)", "scale_dtype must be|half"),
        ("int8(scale_dtype=nn)", "int8(scale_dtype=): unknown dtype 'nn'"),
        ("SuperBlocks(4, table=<16 values>)", "is not understood"),
        ("Affine(bits=9)", "Affine: bits must be an int from 1 to 8, got 9"),
        ("Affine(4, block=(1,))", "Affine: block must be (rows, columns)"),
        ("Affine(4, block=[1, 32])", "Affine(block=): [1, 32] is no tuple"),
        ("Codebook(block_size=64)", "Codebook: 'Codebook(block_size=64)' lacks an option. It has table, block_size"),
        ("ColumnScaled(5)", "unknown scheme '5'"),
        ("Plain()", "unknown scheme 'Plain'"),
        ("Mastered(int8)", "unknown scheme 'Mastered'"),
        ("fp8(granularity=column)", "granularity must be one of row, tensor, block, got 'column'"),
        ("int4(group_size=__import__('os').getpid())", "is no int or None"),
    ],
)
def test_what_is_no_scheme_is_one_line_and_exits_2(text, words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["quantize", "a", "b", "--scheme", text])
    assert caught.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("torchtether quantize: error: argument --scheme: ")
    assert any(word in last for word in words.split("|"))


def test_a_tensor_that_is_called_like_an_option_is_no_option(tmp_path, capsys):
    source, target = tmp_path / "x.safetensors", tmp_path / "y"
    tt.save({"format": torch.full((64, 64), float("nan"))}, source)
    assert main(["quantize", str(source), str(target), "--scheme", "int8", "--include", "format"]) == 1
    assert capsys.readouterr().err.startswith("torchtether: format: ")


def test_every_named_scheme_can_be_spelled_with_each_of_its_defaults():
    for name, make in NAMED.items():
        for option, parameter in inspect.signature(make).parameters.items():
            default = parameter.default
            said = str(default) if isinstance(default, torch.dtype) else repr(default)
            assert scheme_from_text(f"{name}({option}={said})") == make()


@each_scheme
def test_what_is_printed_can_be_given_again(row):
    """``--target-size`` prints what it has chosen; a long table is printed by its length only."""
    for text in (str(row.scheme), scheme_to_text(row.scheme)):
        if "values>" not in text and not isinstance(row.scheme, (tt.Plain, tt.Mastered)):
            assert scheme_from_text(text) == row.scheme


def schemes_in(path):
    with tt.open(path) as checkpoint:
        specs = {name: checkpoint.spec(name) for name in checkpoint.entries}
    return {name: spec.scheme for name, spec in specs.items() if spec.scheme != tt.Plain()}


def test_the_first_rule_that_matches_wins_and_scheme_takes_the_rest(source, tmp_path):
    def made(target, *options):
        assert main(["quantize", str(source), str(tmp_path / target), *options]) == 0
        return schemes_in(tmp_path / target)

    rules = ["--rule", "mid.w*=int4(group_size=32)", "--rule", "mid.weight=int8"]
    assert made("a", *rules) == {"mid.weight": tt.int4(32)}
    assert made("b", "--scheme", "nf4", *rules) == {"mid.weight": tt.int4(32), "emb.weight": tt.nf4()}
    assert made("c", "--scheme", "nf4", "--rule", "mid.*=none") == {"emb.weight": tt.nf4()}
    assert made("d", "--rule", "head.*=fp8", "--rule", "emb.*=int8") == {"emb.weight": tt.fp8()}  # one tied group
    assert made("e", "--scheme", "int8", *rules, "--exclude", "mid.*") == {"emb.weight": tt.int8()}
    assert made("f", "--scheme", "int8", "--include", "table", "--rule", "pos_emb.*=nf4") == {
        "table": tt.int8(),
        "pos_emb.weight": tt.nf4(),
    }
    assert made("h", "--scheme", "int8", "--include", "mid.weight", "--rule", "mid.w*=nf4") == {"mid.weight": tt.nf4()}
    assert made("g", "--rule", "mid.w*=int4", "--rule", "mid.w*=int8") == {"mid.weight": tt.int4()}


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--rule", "no.such=int8"], 1, "no.such: this glob matches no tensor"),
        (["--rule", "steps=int8"], 1, "steps: it is int64, which cannot be quantized"),
        (["--rule", "mid.*=none"], 1, "no tensor is selected"),
        (["--rule", "mid.*"], 2, "'mid.*' is not GLOB=SCHEME, such as 'lm_head.*=none'"),
        (["--rule", "=int8"], 2, "'=int8' is not GLOB=SCHEME"),
        (["--rule", "mid.*=int5"], 2, "argument --rule: unknown scheme 'int5'"),
        (["--include", "mid.*"], 2, "quantize needs --scheme or --target-size"),
        (["--include", "mid.*", "--rule", "mid.*=int8"], 2, "quantize needs --scheme"),
        ([], 2, "quantize needs --scheme"),
    ],
)
def test_rules_that_cannot_be_leave_nothing(source, tmp_path, capsys, options, code, words):
    try:
        found = main(["quantize", str(source), str(tmp_path / "made"), *options])
    except SystemExit as error:
        found = error.code
    assert found == code
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["source"]


# -- the target -------------------------------------------------------------------------------------------------------


def test_a_target_that_is_taken_is_left_alone(source, tmp_path, capsys):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine").write_text("mine")
    (tmp_path / "x.safetensors").write_text("mine")
    for target in (taken, tmp_path / "x.safetensors"):
        assert main(["convert", str(source), str(target)]) == 1
        assert "it is there already" in capsys.readouterr().err
    assert files_of(taken) == {"mine": b"mine"}
    assert (tmp_path / "x.safetensors").read_text() == "mine"
    assert main(["convert", str(source), str(tmp_path / "y.safetensors"), "--max-shard-size", "1MB"]) == 1
    assert "a single file has no shards" in capsys.readouterr().err


def test_an_empty_target_is_refused(source, tmp_path, monkeypatch, capsys):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["convert", str(source), ""]) == 1
    assert capsys.readouterr().err == "torchtether: path: is empty. Give '.' for the current folder.\n"
    assert list((tmp_path / "here").iterdir()) == []


def test_a_name_that_only_a_pickle_can_hold_is_named(tmp_path, capsys):
    torch.save({"a\ud800": torch.ones(2)}, tmp_path / "x.pt")
    assert main(["convert", str(tmp_path / "x.pt"), str(tmp_path / "y")]) == 1
    assert capsys.readouterr().err.startswith(r"torchtether: a\ud800: the name is not Unicode text")
    assert not (tmp_path / "y").exists()


def test_an_empty_folder_is_filled_and_parents_are_made(source, tmp_path):
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "empty", tmp_path / "new" / "folder"):
        assert main(["convert", str(source), str(target), "--max-shard-size", "50kB"]) == 0
        assert json.loads((target / "config.json").read_text()) == {"model_type": "net"}
        assert main(["verify", str(target), "--against", str(source)]) == 0


@pytest.mark.parametrize("target", ["made", "made.safetensors"])
def test_an_interrupt_at_any_tensor_leaves_nothing(source, tmp_path, monkeypatch, capsys, target):
    """Ctrl-C is raised at each tensor in turn, until a run gets through."""
    stock, left = transform._read, 0

    def interrupted(*arguments):
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        return stock(*arguments)

    monkeypatch.setattr(transform, "_read", interrupted)
    arguments = ["quantize", str(source), str(tmp_path / target), "--scheme", "int8"]
    codes = []
    for count in range(20):
        left = count
        codes.append(main(arguments))
        if codes[-1] == 0:
            break
        assert os.listdir(tmp_path) == ["source"]
        assert capsys.readouterr().err == "torchtether: interrupted\n"
    assert codes[-1] == 0
    assert len(codes) > 5
    assert set(codes[:-1]) == {130}


_KILLED = """
import os, signal, sys
from torchtether.cli import transform
from torchtether.cli.main import main
stock, left = transform._read, int(sys.argv.pop(1))
def killed(*arguments):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return stock(*arguments)
transform._read = killed
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_at_the_target(source, tmp_path):
    arguments = ["3", "quantize", str(source), str(tmp_path / "made"), "--scheme", "int8", "--max-shard-size", "20kB"]
    assert subprocess.run([sys.executable, "-c", _KILLED, *arguments]).returncode == -signal.SIGKILL
    assert not (tmp_path / "made").exists()
    assert main(["verify", str(tmp_path / "made")]) == 1
    assert main(arguments[1:]) == 0


# -- what comes along -------------------------------------------------------------------------------------------------


@pytest.fixture
def modules(source):
    """A folder as people have them: modules of their own, other copies of the weights, hidden things, links."""
    for path in (
        "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "2_Dense/deep/er/vocab.txt",
        "modeling_net.py", "README.md", "LICENSE", "model.onnx", "onnx/model.onnx", "onnx/config.json",
        "pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "2_Dense/model.onnx", "optimizer.pt",
        "pytorch_model.bin.index.fp16.json", "checkpoint-500/config.json", ".git/config", ".hidden",
        "quantize_config.json",
    ):  # fmt: skip
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text("{}" if path == "quantize_config.json" else f"in {path}")
    os.mkfifo(source / "pipe")
    outside = source.parent / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    links = {"in.txt": "README.md", "out.txt": "../outside/secret", "folder": "../outside", "git.txt": ".git/config"}
    for name, to in (links | {"broken.txt": "nowhere", "inside": "1_Pooling", "self": "self"}).items():
        (source / name).symlink_to(to)
    return source


def test_a_target_inside_of_the_source_is_no_file_that_is_left_out(source, capsys):
    assert main(["convert", str(source), str(source / "new")]) == 0
    assert ".tmp" not in capsys.readouterr().out
    assert (source / "new" / "model.safetensors").exists()


CARRIED = {
    "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "2_Dense/deep/er/vocab.txt",
    "modeling_net.py", "README.md", "LICENSE", "in.txt", "config.json", "tokenizer.model",
}  # fmt: skip
LEFT_OUT = """
  left out, hidden: .git/, .hidden
  left out, links to folders, or to files outside of the source: folder, git.txt, inside, out.txt
  left out, not regular files: broken.txt, pipe, self
  left out, other weights in the same folder: notes.bin, optimizer.pt, pytorch_model.bin, \
pytorch_model.bin.index.fp16.json, pytorch_model.bin.index.json
  left out, the same weights in other formats: checkpoint-500/, model.onnx, onnx/, tf_model.h5, 2_Dense/model.onnx
"""


@pytest.mark.parametrize("command", [["quantize", "--scheme", "int8"], ["convert"]])
@pytest.mark.parametrize("is_index", [False, True])
def test_every_other_file_comes_along_and_the_rest_is_named(modules, tmp_path, capsys, command, is_index):
    given = modules / "model.safetensors.index.json" if is_index else modules
    assert main([command[0], str(given), str(tmp_path / "made"), *command[1:]]) == 0
    made = {path.relative_to(tmp_path / "made").as_posix() for path in (tmp_path / "made").rglob("*") if path.is_file()}
    assert made == {*CARRIED, "model.safetensors"}
    before, after = ({name: (root / name).read_bytes() for name in CARRIED} for root in (modules, tmp_path / "made"))
    if command[0] == "quantize":
        wanted = {**json.loads(before.pop("config.json")), "quantization_config": {"quant_method": "torchtether"}}
        assert json.loads(after.pop("config.json")) == wanted
    assert after == before
    said = capsys.readouterr().out
    assert "\n  copied: 10 other files\n" in said
    assert "\n  copied weights, unchanged: 2_Dense/model.safetensors\n" in said
    assert said.partition("2_Dense/model.safetensors")[2] == LEFT_OUT


@pytest.mark.parametrize(
    ("names", "made"),
    [
        (["diffusion_pytorch_model.safetensors"], "diffusion_pytorch_model.safetensors"),
        (["diffusion_pytorch_model.fp16.safetensors"], "diffusion_pytorch_model.safetensors"),
        (["adapter_model.safetensors"], "adapter_model.safetensors"),
        ([f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)], "diffusion_pytorch_model.safeten"),
        (["adapter_model.safetensors", "diffusion_pytorch_model.safetensors"], "model.safetensors"),
        (["consolidated.safetensors"], "model.safetensors"),
    ],
)
def test_diffusers_and_peft_find_the_weights_under_the_names_they_look_for(tmp_path, names, made):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for name in names:
        save_file({f"{name}.weight": torch.randn(64, 64)}, source / name)
    assert main(["convert", str(source), str(target), "--dtype", "bfloat16"]) == 0
    assert [path.name.startswith(made) for path in target.iterdir()] == [True]
    assert sorted(tt.open(target)) == sorted(f"{name}.weight" for name in names)
    sharded = tmp_path / "sharded"
    assert main(["quantize", str(source), str(sharded), "--scheme", "int8", "--max-shard-size", "3kB"]) == 0
    stem = made.split(".")[0]
    assert (sharded / f"{stem}.safetensors.index.json").exists() == (len(names) > 1)
    assert {path.name.startswith(stem) for path in sharded.iterdir()} == {True}


def test_of_a_single_file_nothing_comes_along(modules, tmp_path, capsys):
    tt.save({"w": torch.ones(2)}, modules / "alone.safetensors")
    torch.save({"w": torch.ones(2)}, modules / "alone.pt")
    for name in ("alone.safetensors", "alone.pt"):
        assert main(["convert", str(modules / name), str(tmp_path / name.partition(".")[2])]) == 0
        assert sorted(files_of(tmp_path / name.partition(".")[2])) == ["model.safetensors"]
    assert "along" not in capsys.readouterr().out


def test_blobs_of_the_cache_of_a_snapshot_come_along(tmp_path):
    repository = tmp_path / "models--o--n"
    snapshot = repository / "snapshots" / "a1"
    tt.save({"w": torch.ones(2)}, snapshot)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "blobs" / "b1").write_text("{}")
    (repository / "refs" / "main").write_text("a1")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/b1")
    (snapshot / "odd.json").symlink_to("../../refs/main")
    report = transform.convert_checkpoint(snapshot, tmp_path / "made")
    assert report.carried.files == ["tokenizer.json"]
    assert list(report.carried.left_out) == ["odd.json"]
    assert not (tmp_path / "made" / "tokenizer.json").is_symlink()


def test_a_file_that_cannot_be_read_is_named_and_nothing_is_left(modules, tmp_path, monkeypatch, capsys):
    stock = companions.open_file

    def refused(path):
        if str(path).endswith("vocab.txt"):
            raise PermissionError(13, "Permission denied")
        return stock(path)

    monkeypatch.setattr(companions, "open_file", refused)
    assert main(["convert", str(modules), str(tmp_path / "made")]) == 1
    error = capsys.readouterr().err
    assert "2_Dense/deep/er/vocab.txt: the file cannot be copied: Permission denied" in error
    assert error.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["outside", "source"]


@pytest.mark.parametrize("count", range(len(CARRIED) + 1))
def test_an_interrupt_between_any_two_files_leaves_nothing(modules, tmp_path, monkeypatch, capsys, count):
    stock, opened = companions.open_file, []

    def interrupted(path):
        if len(opened) == count:
            raise KeyboardInterrupt
        opened.append(path)
        return stock(path)

    monkeypatch.setattr(companions, "open_file", interrupted)
    is_done = count == len(CARRIED)
    assert main(["convert", str(modules), str(tmp_path / "made")]) == (0 if is_done else 130)
    assert sorted(os.listdir(tmp_path)) == [*["made"] * is_done, "outside", "source"]


# -- what it says -----------------------------------------------------------------------------------------------------


def test_convert_says_what_became_of_what(source, tmp_path, capsys):
    tt.save({"a.weight": tt.Weight.encode(torch.randn(64, 64), tt.int4(32, True)), "b": torch.ones(3)}, tmp_path / "q")
    arguments = ["convert", str(tmp_path / "q"), str(tmp_path / "ct"), "--format", "compressed-tensors"]
    assert main([*arguments, "--dtype", "bfloat16"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r".*/ct: 2 tensors, 2.57 kB -> [\d.]+ kB, format compressed-tensors", first)
    assert lines == [
        "  1 float32 -> bfloat16",
        "  1 int4(group_size=32, symmetric=True), the same codes, native -> compressed-tensors, "
        "to compute in bfloat16 instead of float32",
    ]
    assert main(["convert", str(tmp_path / "q"), str(tmp_path / "again")]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  1 float32, unchanged",
        "  1 int4(group_size=32, symmetric=True), the same codes",
    ]
    arguments = ["convert", str(tmp_path / "q"), str(tmp_path / "bnb"), "--format", "bitsandbytes"]
    assert main([*arguments, "--requantize", "nf4"]) == 0
    assert "  1 int4(group_size=32, symmetric=True) -> nf4, decoded and encoded again\n" in capsys.readouterr().out
    assert main(["quantize", str(source), str(tmp_path / "made"), "--scheme", "fp8(block)"]) == 0
    assert "  2 float32 -> fp8(granularity=block)\n" in capsys.readouterr().out


@pytest.mark.parametrize("text", SPELLED)
def test_a_scheme_is_called_as_it_is_spelled(text):
    scheme = scheme_from_text(text)
    assert scheme_from_text(scheme_to_text(scheme)) == scheme
    if text.strip()[0].islower():  # a class is called by a name where it has one
        assert scheme_to_text(scheme).partition("(")[0] == text.strip().partition("(")[0]
    assert scheme_to_text(tt.int4(fit="mse")) == scheme_to_text(tt.int4()) == "int4"
    assert scheme_to_text(tt.Affine(bits=3)) == "Affine(bits=3)"
    assert scheme_to_text(tt.mxfp4()) == "mxfp4"  # also mxfp8(element=e2m1, scale_rounding=even)


def test_every_scheme_of_the_catalog_is_called_by_a_text_of_its_own():
    texts = {row.scheme: scheme_to_text(row.scheme) for row in SCHEMES}
    assert all(scheme_from_text(text) == one for one, text in texts.items() if text.partition("(")[0] in NAMED)
    named = [text for text in texts.values() if text.partition("(")[0] in NAMED]
    assert len(named) == len(set(named)) >= len(NAMED)


# -- formats whose readers have no quantized embedding ----------------------------------------------------------------


def tied(path, scheme=None):
    emb = torch.randn(64, 64)
    emb = emb if scheme is None else tt.Weight.encode(emb, scheme)
    tt.save({"emb.weight": emb, "head.weight": emb, "fc.weight": torch.randn(64, 64)}, path)


@pytest.mark.parametrize(
    ("format", "scheme", "stored"),
    [
        ("native", "nf4", {"emb.weight": tt.nf4(), "fc.weight": tt.nf4()}),
        ("compressed-tensors", "int8", {"emb.weight": tt.int8(), "fc.weight": tt.int8()}),
        ("bitsandbytes", "nf4", {"fc.weight": tt.nf4()}),
        ("bitsandbytes", "int8", {"fc.weight": bitsandbytes.INT8}),
        ("compressed-tensors", "nvfp4", dict.fromkeys(["emb.weight", "fc.weight"], tt.nvfp4(global_divides=True))),
    ],
)
def test_quantize_chooses_what_the_format_holds(tmp_path, format, scheme, stored):
    tied(tmp_path / "source")
    options = ["--scheme", scheme, "--format", format]
    assert main(["quantize", str(tmp_path / "source"), str(tmp_path / "made"), *options]) == 0
    assert schemes_in(tmp_path / "made") == stored


def test_an_embedding_that_the_format_does_not_hold_is_refused_or_decoded(tmp_path, capsys):
    tied(tmp_path / "float")
    tied(tmp_path / "q", tt.nf4())
    options = ["--format", "bitsandbytes"]
    quantize = ["quantize", str(tmp_path / "float"), str(tmp_path / "made"), "--scheme", "nf4", *options]
    convert = ["convert", str(tmp_path / "q"), str(tmp_path / "made"), *options]
    for command in ([*quantize, "--include", "*"], convert):
        assert main(command) == 1
        error = capsys.readouterr().err
        assert "emb.weight: its module is not nn.Linear (but an embedding" in error
        assert error.count("\n") == 1
        assert not (tmp_path / "made").exists()
    assert main([*convert, "--dequantize", "head.*"]) == 0
    assert "  1 nf4 -> float32, decoded\n" in capsys.readouterr().out
    with tt.open(tmp_path / "q") as source, tt.open(tmp_path / "made") as made:
        assert torch.equal(made["head.weight"], source["emb.weight"].dequantize())
        assert made["head.weight"].data_ptr() == made["emb.weight"].data_ptr()
    assert main([*convert, "--dequantize", "fc.*"]) == 1
    assert "fc.*: this glob matches no quantized tensor" in capsys.readouterr().err


def test_routers_of_experts_stay_plain_by_default(tmp_path):
    names = ["mlp.gate.weight", "ffn.router.layer.weight", "mlp.gate_proj.weight", "mlp.experts.0.up_proj.weight"]
    tt.save({name: torch.randn(64, 64) for name in names}, tmp_path / "source")
    assert main(["quantize", str(tmp_path / "source"), str(tmp_path / "made"), "--scheme", "int8"]) == 0
    assert schemes_in(tmp_path / "made") == dict.fromkeys(names[2:], tt.int8())


def test_the_bias_of_conv1d_tells_that_it_is_no_linear_layer(tmp_path, capsys):
    tensors = {"c_attn.weight": torch.randn(64, 192), "c_attn.bias": torch.randn(192), "fc.weight": torch.randn(64, 64)}
    tt.save(tensors, tmp_path / "source")
    quantize = ["quantize", str(tmp_path / "source")]
    assert main([*quantize, str(tmp_path / "int8"), "--scheme", "int8", "--format", "compressed-tensors"]) == 0
    assert json.loads((tmp_path / "int8/config.json").read_text())["quantization_config"]["dequantize"] is True
    assert main([*quantize, str(tmp_path / "nf4"), "--scheme", "nf4", "--format", "bitsandbytes"]) == 1
    assert "c_attn.weight: its module is not nn.Linear" in capsys.readouterr().err


def test_requantizing_encodes_in_the_variant_of_the_format(tmp_path):
    state = {"fc.weight": torch.randn(64, 64)}
    tt.save(state, tmp_path / "plain")
    transform.quantize_checkpoint(tmp_path / "plain", tmp_path / "ours", "int8")
    convert = partial(transform.convert_checkpoint, tmp_path / "ours", format="bitsandbytes")
    with pytest.raises(tt.SchemeError, match=r"fc\.weight: bitsandbytes cannot store int8 .* Or use --requantize"):
        convert(tmp_path / "refused")
    convert(tmp_path / "theirs", requantize="int8")
    with tt.open(tmp_path / "theirs") as checkpoint:
        assert checkpoint["fc.weight"].scheme.narrow_range
