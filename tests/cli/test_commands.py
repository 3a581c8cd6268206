"""The command line, as somebody calls it: words on stdout, one line on stderr, exit codes."""

import subprocess
import sys

import pytest
import torch

import torchtether as tt
from tests.load.models import Turned, build
from torchtether import demo
from torchtether.cli import main


def test_inspect_shows_tensors_ties_and_schemes(tmp_path, capsys):
    model = build(Turned)
    tt.quantize(model, {"mid.weight": "int8"})
    tt.save(model, tmp_path, max_shard_size=300)
    assert main(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "8 tensors" in text.replace("9 tensors", "8 tensors")
    assert "format native" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.split()}
    assert "float32" in lines["emb.weight"]
    assert "12 x 8" in lines["emb.weight"]
    assert "= emb.weight" in lines["head.weight"]
    assert "= emb.weight (view, stride [1, 8], offset 0)" in lines["turned"]
    assert "Affine" in lines["mid.weight"]


def test_errors_are_one_line_and_exit_1(tmp_path, capsys):
    (tmp_path / "x.safetensors").write_bytes(b"nonsense")
    assert main(["inspect", str(tmp_path / "x.safetensors")]) == 1
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("torchtether: ")
    assert found.err.count("\n") == 1
    assert main(["inspect", str(tmp_path / "absent")]) == 1


@pytest.mark.parametrize("arguments", [[], ["no-such-verb"], ["inspect"]])
def test_what_is_not_understood_exits_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: torchtether" in capsys.readouterr().err


def test_ctrl_c_exits_130(monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run_demo", interrupt)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "torchtether: interrupted\n"


def test_the_module_can_be_run(tmp_path):
    tt.save({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    done = subprocess.run(
        [sys.executable, "-m", "torchtether.cli", "inspect", str(tmp_path / "x.safetensors")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "1 tensors, 8 B in 1 file" in done.stdout


def test_the_demo_shows_what_differs(tmp_path, monkeypatch):
    """Both columns on a tiny model, in this process: stock loses what the demo says it loses, and we do not."""
    for name, value in {"VOCABULARY": 64, "WIDTH": 32, "DEPTH": 1, "HEADS": 2}.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(demo.Transformer.__init__, "__defaults__", (64, 32, 1, 2))
    tt.save(demo.Transformer(), tmp_path / "source", max_shard_size="8kB")
    stock, ours = demo.run_stock(tmp_path), demo.run_ours(tmp_path)
    assert stock["after loading: tie"] == "lost; left on meta: head.weight"
    assert ours["after loading: tie"] == "kept"
    assert stock["Parameter objects kept"].startswith("1 of ")
    assert ours["Parameter objects kept"] == "16 of 16"
    assert ours["optimizer holds"] == "15 of 15 parameters"
    assert stock["... changes"] == "0 of 15 parameters"
    assert ours["... changes"] == "15 of 15 parameters"
    assert ours["optimizer state"] == "bfloat16"
    assert ours["reloaded"] == "values equal, tie kept"
    assert ours["read without the model"] == "head.weight is emb.weight"
