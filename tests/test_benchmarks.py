"""The benchmarks run, at a size at which their figures mean nothing, so that they cannot rot."""

import json

import pytest
import torch

from tests.benchmarks import bench_core


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        (("conversions", "dispatch"), {"stock .to", "tt.convert", "int8"}),
        pytest.param(("memory",), {"tt.convert", "above the final model"}, marks=pytest.mark.slow),
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
    rows = json.loads((tmp_path / "figures.json").read_text())
    assert {row["name"] for row in rows} >= names
    assert "tt.convert" in capsys.readouterr().out
