"""What the core costs beside stock torch: conversions, memory of a load, dispatch. Run by hand:

    python -m tests.benchmarks.bench_core [--scale 1.0] [--rounds 5] [--groups NAME ...] [--json FILE]

Ours and the baseline alternate on one thread; times are medians, ratios are of medians. Memory is the anonymous memory
above what there was before, each figure in a process of its own, its ratio to the largest tensor. Machines are noisy:
compare ratios, and only within a run.
"""

import argparse
import gc
import json
import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch import nn

import torchtether as tt
from torchtether.report import Meter

MIB = 2**20


def timed(function, *arguments):
    gc.collect()
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def medians(contenders, rounds):
    """The median seconds of each contender, which take turns; each is (make the input, run)."""
    seconds = {name: [] for name in contenders}
    for _ in range(rounds + 1):  # the first round warms up
        for name, (make, run) in contenders.items():
            seconds[name].append(timed(run, make()))
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def linears(count, width):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def swapped(model):
    """Stock conversion in torch's own swap mode."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def scoped(model):
    with tt.swapping(model):
        model.to(torch.bfloat16)


CONVERSIONS = {
    "stock .to": lambda model: model.to(torch.bfloat16),
    "stock .to, swap mode": swapped,
    "tt.convert": lambda model: tt.convert(model, dtype=torch.bfloat16),
    "tt.convert full": lambda model: tt.convert(model, dtype=torch.bfloat16, atomic="full"),
    "stock .to in swapping": scoped,
}


def conversions(scale, rounds):
    """float32 to bfloat16, on many small layers and on fewer larger ones."""
    rows = []
    for count, width in ((int(1000 * scale) or 1, 8), (int(500 * scale) or 1, 256)):
        rows += _converted(count, width, rounds, CONVERSIONS)
    return rows


def large(scale, rounds):
    """float32 to bfloat16, 1.2 billion parameters."""
    names = ("stock .to", "stock .to, swap mode", "tt.convert", "stock .to in swapping")
    return _converted(int(72 * scale) or 1, 4096, min(rounds, 3), {name: CONVERSIONS[name] for name in names})


def _converted(count, width, rounds, contenders):
    make = lambda: linears(count, width)  # noqa: E731
    found = medians({name: (make, run) for name, run in contenders.items()}, rounds)
    bars = {"tt.convert": 1.3, "stock .to in swapping": 1.2}
    rows = []
    for name, value in found.items():
        base = found["stock .to, swap mode" if name == "stock .to in swapping" else "stock .to"]
        rows.append((f"{2 * count} parameters of width {width}", name, value * 1e3, "ms", value / base, bars.get(name)))
    return rows


def ties(scale, rounds):
    """Questions about 10,000 parameters; the bar is 100 ms."""
    model = linears(int(5000 * scale) or 1, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    contenders = {
        "named_parameters": lambda _: list(model.named_parameters()),
        "tt.find_ties": lambda _: tt.find_ties(model),
        "tt.check_ties": lambda _: tt.check_ties(model),
        "tt.check_optimizer": lambda _: tt.check_optimizer(model, optimizer),
    }
    found = medians({name: (lambda: None, run) for name, run in contenders.items()}, rounds)
    what, base = f"{len(list(model.parameters()))} parameters", found["named_parameters"]
    return [
        (what, name, value * 1e3, "ms", value / base, 0.1 / base if name.startswith("tt.") else None)
        for name, value in found.items()
    ]


CHANGES = {
    "stock .to": lambda m: m.to(torch.bfloat16),
    "tt.convert": lambda m: tt.convert(m, dtype=torch.bfloat16),
    "tt.convert full": lambda m: tt.convert(m, dtype=torch.bfloat16, atomic="full"),
    "tt.quantize int8": lambda m: tt.quantize(m, "int8"),
    "tt.quantize nf4": lambda m: tt.quantize(m, "nf4"),
}


def peak_of_change(name, width):
    """Bytes above the model, in a process of its own."""
    CHANGES[name](linears(1, 8))  # imports
    model = linears(9, width)
    with Meter() as meter:
        CHANGES[name](model)
    return meter.peak or 0


def peak_of_load(scheme, width, folder):
    """Bytes above the final model, in a process of its own."""
    tt.quantize(linears(1, 8), scheme)  # imports
    with torch.device("meta"):
        model = linears(9, width)
    report = tt.load(model, folder, quantize=scheme)
    return (report.peak or 0) - sum(parameter.nbytes for parameter in model.parameters())


def memory(scale, rounds):
    """Anonymous memory at most: of a conversion above the model, and of a quantizing load above the final model."""
    rows, width = [], max(int(2048 * scale), 8)
    largest = width * width * 4
    size = f"9 layers of {largest / MIB:.0f} MiB"
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool,
    ):
        tt.save(linears(9, width), folder, max_shard_size=max(largest * 3, 1))
        for name in CHANGES:
            peak = pool.submit(peak_of_change, name, width).result()
            rows.append((size, name, peak / MIB, "MiB", peak / largest, None))
        for scheme in (None, "int8", "int4", "nf4"):
            peak = pool.submit(peak_of_load, scheme, width, folder).result()
            rows.append(
                (f"load as {scheme or 'float32'}", "above the final model", peak / MIB, "MiB", peak / largest, None)
            )
    return rows


def dispatch(scale, rounds):
    """F.linear on a tiny weight: what a Weight adds to the plain call and its decoding."""
    x, values = torch.randn(1, 16), torch.randn(16, 16)
    repeats = max(int(3000 * scale), 10)
    weights = {"int8": tt.Weight.encode(values, tt.int8()), "plain wrapper": tt.Weight.encode(values, tt.Plain())}

    def loop(weight):
        with torch.no_grad():
            for _ in range(repeats):
                nn.functional.linear(x, weight)

    contenders = {"plain tensor": (lambda: values, loop)}
    contenders |= {name: (lambda weight=weight: weight, loop) for name, weight in weights.items()}
    found = medians(contenders, rounds)
    return [
        ("F.linear 16x16", name, value / repeats * 1e6, "us", value / found["plain tensor"], None)
        for name, value in found.items()
    ]


GROUPS = {"conversions": conversions, "large": large, "ties": ties, "memory": memory, "dispatch": dispatch}


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = [row for group in options.groups for row in GROUPS[group](options.scale, options.rounds)]
    held = []
    for what, name, value, unit, ratio, limit in rows:
        state = "" if limit is None else "held" if ratio <= limit else "missed"
        bar = f"  {state}, at most {limit:.2f}" if state else ""
        print(f"{what:32} {name:24} {value:10.2f} {unit:4} {ratio:8.2f} x{bar}")
        if state:
            held.append({"case": what, "bar": name, "figure": ratio, "limit": limit, "state": state})
    if options.json:
        keys = ("what", "name", "value", "unit", "ratio")
        found = [dict(zip(keys, row[:5], strict=True)) for row in rows]
        options.json.write_text(json.dumps({"rows": found, "bars": held}, indent=1))


if __name__ == "__main__":
    main()
