"""The benchmarks run, at a size at which their figures mean nothing, so that they cannot rot."""

import json

import pytest
import torch

from tests.benchmarks import bench_compute, bench_core, bench_distributed, bench_encode, bench_load


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
def test_the_core_benchmark_runs(tmp_path, capsys, groups, names):
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
def test_the_load_benchmark_runs(tmp_path, capsys):
    groups = ("shards", "small", "plan", "save")
    files = ["--folder", str(tmp_path), "--json", str(tmp_path / "figures.json")]
    bench_load.main(["--size", "small", "--rounds", "1", "--groups", *groups, *files])
    found = json.loads((tmp_path / "figures.json").read_text())
    assert {row["name"] for row in found["rows"]} >= {bench_load.READ, "torchtether", "torchtether save"}
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
    [("prefill", "embedding", "backward"), pytest.param(("decode", "dispatch"), marks=pytest.mark.slow)],
    ids=["torch-alone", "peers"],
)
@pytest.mark.filterwarnings("ignore")  # of the peers
def test_the_compute_benchmark_runs(tmp_path, capsys, groups):
    file = tmp_path / "figures.json"
    bench_compute.main(["--size", "small", "--rounds", "1", "--groups", *groups, "--json", str(file)])
    found = json.loads(file.read_text())
    assert {row["group"] for row in found["rows"]} == {bar["group"] for bar in found["bars"]} == set(groups)
    assert {bar["state"] for bar in found["bars"]} <= {"held", "missed"}
    assert "ours int8" in capsys.readouterr().out


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
