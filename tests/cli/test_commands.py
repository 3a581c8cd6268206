"""The command line as a user calls it: results on stdout, errors of one line on stderr, exit codes."""

import contextlib
import io
import json
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model
from torch import nn

import torchtether as tt
import torchtether_cli
from tests.loading.models import MODELS, Tied, Turned, build
from torchtether import compiled
from torchtether.cli import demonstration
from torchtether.cli.main import main
from torchtether.cli.tables import print_table
from torchtether.progress import ticking
from torchtether.schemes import NAMED


def test_inspect_shows_tensors_ties_and_schemes(tmp_path, capsys):
    model = build(Turned)
    tt.quantize(model, {"mid.weight": "int8"})
    tt.save(model, tmp_path, max_shard_size=300)
    assert main(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == "8 tensors, 584 B in 2 files, format native, 1 tie"
    table, tree = text.split("\n\n")
    lines = {line.split()[0]: line for line in table.splitlines()}
    assert "float32" in lines["emb.weight"]
    assert "12 x 8" in lines["emb.weight"]
    assert "= emb.weight" in lines["head.weight"]
    assert "= emb.weight (view, stride [1, 8], offset 0)" in lines["turned"]
    assert lines["mid.weight"].endswith("int8")
    assert tree.splitlines()[:-1] == [
        "emb.weight",
        "├── head.weight",
        "└── turned (view [8, 12], stride [1, 8], offset 0)",
        "float32: 4 tensors, 480 B",
        "int8: 1 tensor, 96 B",
        "int64: 1 tensor, 8 B",
    ]


@pytest.mark.parametrize("words", [["inspect"], ["ties"], ["map"], ["verify", "--against"]])
def test_names_turn_no_lines_and_move_no_cursors(tmp_path, capsys, words):
    model = torch.nn.ParameterDict({"a\x1b[2J\nb": torch.ones(2), "[red]": torch.ones(1)})
    model["c\rd"] = model["a\x1b[2J\nb"]
    tt.save(model, tmp_path / "x.safetensors")
    against = [str(tmp_path / "x.safetensors")] if "--against" in words else []
    assert main([words[0], str(tmp_path / "x.safetensors"), *words[1:], *against]) == 0
    found = capsys.readouterr().out
    assert r"a\x1b[2J\nb" in found
    assert all(line.isprintable() for line in found.split("\n"))


@pytest.mark.parametrize("words", [["convert"], ["quantize", "--scheme=int8"]])
def test_the_name_of_a_target_turns_no_lines_and_moves_no_cursors(tmp_path, capsys, words):
    tt.save({"a.weight": torch.ones(32, 32)}, tmp_path / "x.safetensors")
    assert main([*words, str(tmp_path / "x.safetensors"), str(tmp_path / "y\n\x1b[2J")]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(rf"{tmp_path / 'y'}\n\x1b[2J: 1 ")
    name = "n\n" * 200
    assert main([words[0], str(tmp_path / "x.safetensors"), str(tmp_path / name), *words[1:]]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_inspect_gives_json_with_stable_keys(tmp_path, capsys):
    model = build(Turned)
    tt.quantize(model, {"mid.weight": "int8"})
    tt.save(model, tmp_path)
    assert main(["inspect", "--json", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"path", "format", "files", "bytes", "tensors", "ties", "faults", "schemes"}
    assert found["tensors"]["mid.weight"] == {
        "dtype": "float32",
        "shape": [8, 8],
        "stride": [8, 1],
        "bytes": 96,
        "scheme": {"kind": "affine"},
        "owner": "mid.weight",
        "view": None,
    }
    assert found["tensors"]["turned"]["owner"] == "emb.weight"
    assert found["tensors"]["turned"]["view"]["stride"] == [1, 8]
    assert found["ties"][0]["names"] == ["emb.weight", "head.weight", "turned"]
    assert found["bytes"] == sum(one["bytes"] for one in found["tensors"].values())
    assert found["bytes"] == sum(one["bytes"] for one in found["schemes"].values())


def test_ties_shows_trees_also_of_names_that_others_note(tmp_path, capsys):
    tt.save(build(Turned), tmp_path / "ours")
    save_model(build(Tied), str(tmp_path / "theirs.safetensors"))
    assert main(["ties", str(tmp_path / "ours")]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["emb.weight", "├── head.weight"]
    assert main(["ties", str(tmp_path / "theirs.safetensors")]) == 0
    assert capsys.readouterr().out.splitlines() == ["emb.weight", "└── head.weight", "1 tie"]
    tt.save({"a": torch.ones(2)}, tmp_path / "none.safetensors")
    assert main(["ties", str(tmp_path / "none.safetensors")]) == 0
    assert capsys.readouterr().out == "0 ties\n"


def test_verify_reads_every_byte(tmp_path, capsys):
    """A damaged scale, a file that is cut, a header that lies: exit code 1 and one line that says where."""
    tt.save(nn.Linear(64, 64), tmp_path / "x.safetensors")
    assert main(["quantize", str(tmp_path / "x.safetensors"), str(tmp_path / "q.safetensors"), "--scheme", "int8"]) == 0
    good = (tmp_path / "q.safetensors").read_bytes()
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "q.safetensors")]) == 0
    assert "2 tensors, 4.61 kB: nothing wrong" in capsys.readouterr().out
    with tt.open(tmp_path / "q.safetensors") as checkpoint:
        at = checkpoint.store.stored("weight.scale").start
    for name, damaged in {
        "weight": good[:at] + b"\xff" * 4 + good[at + 4 :],
        "cut short": good[:-1],
        "header": b"\0" + good[1:],
    }.items():
        (tmp_path / "bad.safetensors").write_bytes(damaged)
        assert main(["verify", str(tmp_path / "bad.safetensors")]) == 1
        error = capsys.readouterr().err
        assert name in error
        assert error.count("\n") == 1


def test_verify_against_shows_the_worst_first(tmp_path, capsys):
    source = {"a.weight": torch.randn(64, 64), "b.weight": torch.randn(64, 64), "c": torch.arange(3)}
    tt.save(source, tmp_path / "x.safetensors")
    made = {**source, "a.weight": tt.Weight.encode(source["a.weight"], tt.int4(32))}
    made["b.weight"] = tt.Weight.encode(source["b.weight"], tt.int8())
    tt.save(made, tmp_path / "q.safetensors")
    arguments = ["verify", str(tmp_path / "q.safetensors"), "--against", str(tmp_path / "x.safetensors")]
    assert main(arguments) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in table] == ["name", "a.weight", "b.weight", "c", "3"]
    assert 15 < float(table[1][2]) < 30 < float(table[2][2]) < 50
    assert table[3][1:] == ["0", "inf"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a": torch.ones(2)}, "a: its values differ by up to 1, but should be equal"),
        ({"a": torch.zeros(3)}, "a: it has shape (3,), but (2,) in "),
        ({"extra": torch.zeros(3)}, "extra: "),
        ({"a": None}, "a: it is in "),
        ({"w": tt.Weight.encode(torch.full((4, 4), 2.0), tt.int8())}, "more than int8 allows"),
        ({"a": torch.ones(2), "w": torch.zeros(4, 4)}, "| and 1 more"),
        ({"w": torch.full((4, 4), torch.nan)}, "w: its values differ by up to inf, but should be equal"),
    ],
)
def test_verify_against_another_source_exits_1(tmp_path, capsys, change, words):
    source = {"a": torch.zeros(2), "w": torch.ones(4, 4), "f8": torch.ones(3).to(torch.float8_e4m3fn)}
    tt.save(source, tmp_path / "x.safetensors")
    made = {name: tensor for name, tensor in {**source, **change}.items() if tensor is not None}
    tt.save(made, tmp_path / "y.safetensors")
    assert main(["verify", str(tmp_path / "y.safetensors"), "--against", str(tmp_path / "x.safetensors")]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("kind", MODELS)
def test_verify_against_itself_finds_nothing(tmp_path, kind, capsys):
    tt.save(build(kind), tmp_path, aliases="copy")
    assert main(["verify", str(tmp_path), "--against", str(tmp_path)]) == 0


def test_errors_are_one_line_and_exit_1(tmp_path, capsys):
    (tmp_path / "x.safetensors").write_bytes(b"nonsense")
    assert main(["inspect", str(tmp_path / "x.safetensors")]) == 1
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("torchtether: ")
    assert found.err.count("\n") == 1
    assert main(["inspect", str(tmp_path / "absent")]) == 1


@pytest.mark.parametrize("suffix", ["", ".safetensors"])
def test_a_name_that_the_system_refuses_is_one_line_and_exit_1(tmp_path, capsys, suffix):
    tt.save({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    name = "n" * 300 + suffix
    for command in (
        ["inspect", str(tmp_path / name)],
        ["convert", str(tmp_path / "x.safetensors"), str(tmp_path / name)],
    ):
        assert main(command) == 1
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "too long" in said
        assert name in said


@pytest.mark.parametrize(
    "arguments",
    [[], ["no-such-verb"], ["inspect"], ["quantize", "a", "b"], ["convert", "a", "b", "--dtype", "int8"]],
)
def test_what_is_not_understood_exits_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: torchtether" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["inspect"], ["ties"], ["verify"], ["quantize"], ["convert"], ["demo"]])
def test_help_tells_the_exit_codes(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "Exit codes: 0 success; 1 an error, described by one line on stderr; 2 invalid arguments; 130 interrupted."
        in text
    )


def test_help_of_quantize_shows_every_scheme_with_its_options(capsys):
    with pytest.raises(SystemExit):
        main(["quantize", "--help"])
    text = capsys.readouterr().out
    assert "  int4(group_size=64, symmetric=False, scale_dtype=float32, fit=range)\n" in text
    assert all(f"  {name}(" in text for name in NAMED)


def test_the_bar_shows_bytes_per_second_and_the_time_left(tmp_path, capsys):
    """On stderr, from the first piece on; a pipe gets none."""
    with ticking(True, 4_000_000, "verify") as tick:
        for _ in range(4):
            time.sleep(0.11)  # the bar is drawn ten times a second
            tick(1_000_000)
    shown = capsys.readouterr().err
    assert re.search(r"verify:  75%.*3.00M/4.00M \[00:00<00:00, \d+\.\d+MB/s\]", shown)
    tt.save({"a": torch.ones(3)}, tmp_path / "x.safetensors")
    assert main(["verify", str(tmp_path / "x.safetensors")]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_inspect_of_many_tensors_takes_time_in_proportion(tmp_path, capsys):
    """Four times the tensors and ties take four times as long, not sixteen."""
    seconds = []
    for count in (10_000, 40_000):
        one = torch.ones(1)
        named = {f"layers.{i}.weight": one.clone() for i in range(count)}
        named |= {f"tied.{i}.weight": named[f"layers.{i}.weight"] for i in range(count // 10)}
        tt.save(named, tmp_path / f"{count}.safetensors")
        for arguments in (["inspect"], ["inspect", "--json"]):
            start = time.process_time()
            assert main([*arguments, str(tmp_path / f"{count}.safetensors")]) == 0
            seconds.append(time.process_time() - start)
            assert f"layers.{count - 1}.weight" in capsys.readouterr().out
    assert seconds[2] < 12 * seconds[0]  # processor time; measured 4 to 9 on busy machines
    assert seconds[3] < 12 * seconds[1]


def test_ctrl_c_exits_130(monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(demonstration, "run_demo", interrupt)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "torchtether: interrupted\n"


_INTERRUPTED = """
import importlib.abc, os, signal, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
from torchtether_cli import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["torchtether", "torch", "torch.nn", "torchtether.weights", "torchtether.cli.main"])
def test_ctrl_c_while_it_is_imported_is_one_line_too(module):
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED, module], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "torchtether: interrupted\n")


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    said = f"torchtether {tt.__version__}, torch {torch.__version__}, {compiled.state()}"
    assert capsys.readouterr().out.split() == said.split()  # argparse breaks lines


def test_the_command_begins_outside_of_the_package(tmp_path, monkeypatch, capsys):
    project = tomllib.loads((Path(torchtether_cli.__file__).parents[1] / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"torchtether": "torchtether_cli:main"}
    tt.save({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    monkeypatch.setattr(sys, "argv", ["torchtether", "ties", str(tmp_path / "x.safetensors")])
    assert torchtether_cli.main() == 0
    assert capsys.readouterr().out == "0 ties\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("module", ["torchtether", "torchtether.cli.main", "torchtether_cli"])
def test_the_module_can_be_run(tmp_path, module):
    tt.save({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    done = subprocess.run(
        [sys.executable, "-m", module, "inspect", str(tmp_path / "x.safetensors")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "1 tensor, 8 B in 1 file" in done.stdout


def _printed(monkeypatch, encoding, *command):
    """Run ``command``; return what it prints to a stream of ``encoding``."""
    with monkeypatch.context() as patch:
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        patch.setattr(sys, "stdout", stream)
        assert main([*map(str, command)]) == 0
        stream.flush()
    return stream.buffer.getvalue().decode(encoding)


def test_without_stderr_a_bar_is_not_drawn(tmp_path):
    tt.save({"weight": torch.ones(3, 3), "bias": torch.ones(3)}, tmp_path / "x.safetensors")
    with contextlib.redirect_stderr(None):
        tt.load(nn.Linear(3, 3), tmp_path / "x.safetensors", progress=True)


def test_names_are_escaped_where_the_output_cannot_spell_them(tmp_path, monkeypatch):
    one, path = torch.ones(64, 64), tmp_path / "x.safetensors"
    tt.save({"na\u00efve.weight": one, "\u20ac.weight": one}, path)
    for command in ("ties", "map", "inspect"):
        text = _printed(monkeypatch, "latin1", command, path)
        assert "na\u00efve.weight" in text
        assert "\\u20ac.weight" in text
    assert "y\\udcff: 2 tensors" in _printed(monkeypatch, "utf-8", "convert", path, tmp_path / "y\udcff")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="closes a stream by its number")
@pytest.mark.parametrize("closed", ["1", "2", "1,2"])
def test_a_closed_stream_does_no_harm(tmp_path, closed):
    tt.save({"a.weight": torch.ones(64, 64)}, tmp_path / "x.safetensors")
    close = "import os, sys; [os.close(int(n)) for n in sys.argv[1].split(',')]; os.execv(sys.executable, sys.argv[2:])"
    for command in (
        ["quantize", tmp_path / "x.safetensors", tmp_path / "y", "--scheme", "int8"],
        ["verify", tmp_path / "y"],
    ):
        words = [sys.executable, "-m", "torchtether_cli", *map(str, command)]
        done = subprocess.run(
            [sys.executable, "-c", close, closed, *words], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
    assert ("1" not in closed) == ("1 tensor, 4.35 kB: nothing wrong" in done.stdout)


def test_the_demo_shows_what_differs(tmp_path, monkeypatch):
    """Both columns on a tiny model, in this process: stock loses what the demo says it loses, and we do not."""
    for name, value in {"VOCABULARY": 64, "WIDTH": 32, "DEPTH": 1, "HEADS": 2}.items():
        monkeypatch.setattr(demonstration, name, value)
    monkeypatch.setattr(demonstration.Transformer.__init__, "__defaults__", (64, 32, 1, 2))
    tt.save(demonstration.Transformer(), tmp_path / "source", max_shard_size="8kB")
    stock, ours = demonstration.run_stock(tmp_path), demonstration.run_ours(tmp_path)
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
    assert ours["computed by"] == compiled.state()


def test_a_table_keeps_names_whole_on_a_terminal_and_everything_in_a_pipe(monkeypatch, capsys):
    names = [f"model.layers.{i}.post_attention_layernorm.weight" for i in range(2)]
    rows = [("name", "bytes", "kind"), *((name, "1 kB", "int8 " * 30) for name in names), ("b", "2 kB", "")]
    print_table(rows)
    assert rows[1][2].rstrip() in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    print_table(rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert [line for line in lines if "weight" in line] == names
    assert sum(line.count("int8") for line in lines) == 60
    assert lines[-1].split() == ["b", "2", "kB"]


def test_the_demo_prints_a_table_of_80_columns_and_no_bars_into_a_pipe(monkeypatch, capsys):
    column = {"training step": "runs", "file": "54.6 MB (save_model: ties known to the model's code only)"}
    monkeypatch.setattr(demonstration, "_in_own_process", lambda side, folder: column)
    monkeypatch.setattr(demonstration.Transformer.__init__, "__defaults__", (64, 32, 1, 2))
    assert main(["demo"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert max(map(len, shown.out.splitlines())) <= 80
    words = " ".join(shown.out.split())
    assert all(word in words for word in ("stock torch", "training step runs runs", "save_model:", "code only)"))


@pytest.mark.parametrize("columns", [60, 80])
def test_the_command_line_stays_within_80_columns(tmp_path, monkeypatch, capsys, columns):
    """And no two of its rows look alike, because names are whole."""
    monkeypatch.setenv("COLUMNS", str(columns))
    parts = ["self_attn.q_proj", "self_attn.k_proj", "post_attention_layernorm_of_the_block", "post_attention_norm"]
    names = [f"model.layers.{i}.{part}.weight" for i in range(2) for part in parts]
    source = {name: torch.randn(64, 64) for name in names}
    tt.save(source, tmp_path / "x.safetensors")
    made = {name: tt.Weight.encode(tensor, tt.int4(32, True)) for name, tensor in source.items()}
    tt.save(made, tmp_path / "q.safetensors")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for words in (["map"], ["inspect"], ["verify", "--against", str(tmp_path / "x.safetensors")]):
        assert main([words[0], str(tmp_path / "q.safetensors"), *words[1:]]) == 0
        shown = capsys.readouterr()
        assert shown.err == ""
        assert max(map(len, shown.out.splitlines()[1:-1])) <= columns
        wanted = names if words[0] != "map" else [f"model.layers.*.{part}.weight" for part in parts]
        for name in wanted:
            assert "".join(shown.out.split()).count(name) == 1  # in the map a very long one may take two lines
        assert "int4(group_size=32, symmetric=True)" in " ".join(shown.out.split())


def test_errors_name_options_as_on_the_command_line(tmp_path, capsys):
    source = str(tmp_path / "source")
    tt.save(nn.Linear(64, 64), source)
    for given, words in (
        (
            (str(tmp_path / "a"), "--scheme", "int8", "--format", "awq"),
            "torchtether: --format: 'awq' can be read but",
        ),
        ((str(tmp_path / "a"), "--target-size", "1"), "torchtether: --target-size: the smallest possible plan takes"),
        (
            (str(tmp_path / "a.gguf"), "--scheme", "nf4", "--format", "gguf", "--max-shard-size", "1KB"),
            "torchtether: --max-shard-size: gguf has no shards. Leave it out.",
        ),
    ):
        assert main(["quantize", source, *given]) == 1
        assert capsys.readouterr().err.startswith(words)


def test_one_other_file_is_no_plural(tmp_path, capsys):
    tt.save(nn.Linear(64, 64), tmp_path / "source")
    (tmp_path / "source" / "config.json").write_text("{}")
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "target")]) == 0
    assert "  copied: 1 other file\n" in capsys.readouterr().out
