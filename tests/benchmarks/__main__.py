"""Every benchmark, one table a group, each bar held or missed:

    python -m tests.benchmarks [--size small|quick|full | --quick] [--rounds 5] [--only core load ...] [--folder DIR]
                               [--llama-python PYTHON] [--json FILE]

``full`` takes about 80 minutes on two idle cores, 10 GB of memory and 8 GB of disk in DIR (else where TMPDIR says).
``--quick`` takes fewer shapes of ``compute`` and a 16 times smaller model for ``generate``, and the rest as ``small``,
which shows that everything runs; its figures mean nothing. The modules say what is measured and how.
"""

import argparse
import json
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from tests.benchmarks import (
    bench_compute,
    bench_core,
    bench_distributed,
    bench_encode,
    bench_generate,
    bench_load,
    bench_quality,
    bench_train,
)
from tests.benchmarks.measuring import processor

PACKAGES = ("torch", "safetensors", "transformers", "accelerate", "torchao", "optimum-quanto", "bitsandbytes", "peft")
QUICK = ("compute", "generate", "train")
"""What has a size between small and full."""

BENCHMARKS = {
    "load": bench_load,
    "encode": bench_encode,
    "compute": bench_compute,
    "generate": bench_generate,
    "train": bench_train,
    "quality": bench_quality,
    "core": bench_core,
    "distributed": bench_distributed,
}


def machine():
    """What the figures were taken on."""
    found = processor() | {"cores": torch.get_num_threads(), "python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def arguments_for(name, options, file):
    """The arguments of one benchmark, each of which has a few of its own."""
    size = options.size if name in QUICK or options.size != "quick" else "small"
    size = ["--scale", "1.0" if size == "full" else "0.01"] if name == "core" else ["--size", size]
    folder = ["--folder", options.folder] if options.folder and name in ("load", "distributed", "generate") else []
    rounds = ["--rounds", str(options.rounds)]
    llama = ["--llama-python", options.llama_python] if options.llama_python and name == "generate" else []
    return [*size, *rounds, *folder, *llama, "--json", str(file)]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("full", "quick", "small"), default="full")
    parser.add_argument("--quick", dest="size", action="store_const", const="quick")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--folder")
    parser.add_argument("--llama-python")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    found, threads = {"machine": machine()}, torch.get_num_threads()
    print(" ".join(f"{key} {value}" for key, value in found["machine"].items()))
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            print(f"\n== {name}", flush=True)
            file = Path(folder, f"{name}.json")
            BENCHMARKS[name].main(arguments_for(name, options, file))
            torch.set_num_threads(threads)
            found[name] = json.loads(file.read_text())
    bars = [(name, bar) for name in options.only for bar in bars_of(found[name])]
    print("\n== bars")
    for name, bar in bars:
        print(
            f"{bar['state']:7} {name:12} {bar['case']}: {bar['bar']}: {bar['figure']:.2f}, at most {bar['limit']:.2f}"
        )
    held = sum(bar["state"] == "held" for _, bar in bars)
    print(f"{held} of {len(bars)} bars held")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def bars_of(figures):
    return figures["bars"] if isinstance(figures, dict) else []


if __name__ == "__main__":
    main()
