"""The cost of the core compared with stock torch: conversions, memory of a load, dispatch. Run by hand:

    python -m tests.benchmarks.bench_core [--scale 1.0] [--rounds 5] [--groups NAME ...] [--json FILE]

Ours and the baseline alternate on one thread; times are medians with the lowest and highest, ratios are medians of the
ratios within a round. Memory is what there is above the model at its highest, each figure in a process of its own, its
ratio to the largest tensor. The group ``large`` converts 1.2 billion parameters, 4.8 GB, and each of its runs is a
process of its own. Machines are noisy: compare ratios, and only within a run.
"""

import argparse
import gc
import json
import multiprocessing
import re
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import torchtether as tt
from torchtether.progress import Meter

MIB = 2**20


class Bar(NamedTuple):
    """What has to be at most ``limit``."""

    what: str
    figure: float
    limit: float


class Row(NamedTuple):
    """One line: a value with its spread, and its ratio to something."""

    what: str
    name: str
    value: float
    low: float
    high: float
    unit: str
    ratio: float
    bar: Bar | None = None


def timed(function, *arguments):
    gc.collect()
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def rounds_of(contenders, rounds):
    """The seconds of each contender, round by round; they take turns, and each is (make the input, run)."""
    seconds = {name: [] for name in contenders}
    for _ in range(rounds + 1):  # the first round warms up
        for name, (make, run) in contenders.items():
            seconds[name].append(timed(run, make()))
    return {name: values[1:] for name, values in seconds.items()}


def ratio(found, name, base):
    """The median of the ratios within a round."""
    return statistics.median(one / other for one, other in zip(found[name], found[base], strict=True))


def rows_of(what, found, bases, bars, *, unit="ms", scale=1e3):
    """A row for each contender; ``bases`` names what its ratio is to, by default the first contender."""
    rows, first = [], next(iter(found))
    for name, values in found.items():
        base = bases.get(name, first)
        relative = ratio(found, name, base)
        bar = Bar(f"{name} / {base}", relative, bars[name]) if name in bars else None
        rows.append(Row(what, name, *(value * scale for value in spread(values)), unit, relative, bar))
    return rows


def spread(values):
    return statistics.median(values), min(values), max(values)


def peaks_of(what, peaks, largest):
    """A row for each contender: bytes above the model, their ratio to the largest tensor, and how far above stock."""
    rows, stock = [], statistics.median(peaks["stock .to"])
    for name, values in peaks.items():
        above = (statistics.median(values) - stock) / largest
        bar = Bar(f"peak of {name} above stock .to, in tensors", above, 1.0) if name == "tt.convert" else None
        peak, low, high = (value / MIB for value in spread(values))
        rows.append(Row(what, name, peak, low, high, "MiB", peak * MIB / largest, bar))
    return rows


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


BASES = {"stock .to in swapping": "stock .to, swap mode"}
BARS = {"tt.convert": 1.3, "stock .to in swapping": 1.2}


def conversions(scale, rounds):
    """float32 to bfloat16, on many small layers and on fewer larger ones."""
    rows = []
    for count, width in ((int(1000 * scale) or 1, 8), (int(500 * scale) or 1, 256)):
        make = lambda count=count, width=width: linears(count, width)  # noqa: E731
        found = rounds_of({name: (make, run) for name, run in CONVERSIONS.items()}, rounds)
        rows += rows_of(f"{2 * count} parameters of width {width}", found, BASES, BARS)
    return rows


LARGE = ("stock .to", "stock .to, swap mode", "tt.convert", "stock .to in swapping")


def large(scale, rounds):
    """float32 to bfloat16, 1.2 billion parameters: time, and memory above the model at its highest."""
    count, width = int(72 * scale) or 1, 4096
    found, peaks = {name: [] for name in LARGE}, {name: [] for name in LARGE}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        for _ in range(min(rounds, 3)):
            for name in LARGE:
                seconds, peak = pool.submit(large_run, name, count, width).result()
                found[name].append(seconds)
                peaks[name].append(peak)
    what, largest = f"{count * (width + 1) * width / 1e9:.2f} B parameters", width * width * 4
    rows = rows_of(what, found, BASES, BARS)
    is_told = all(peak is not None for values in peaks.values() for peak in values)
    return rows + (peaks_of(f"{what}, peak", peaks, largest) if is_told else [])


def large_run(name, count, width):
    """The seconds of one conversion, and how far memory was above the model; call it in a process of its own."""
    torch.set_num_threads(1)
    CONVERSIONS[name](linears(1, 8))  # imports
    with torch.device("meta"):
        model = linears(count, width)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)  # quicker than to draw billions, and all pages are there
    before = resident("VmRSS")
    seconds = timed(CONVERSIONS[name], model)
    highest = resident("VmHWM")
    return seconds, None if before is None or highest is None else highest - before


def resident(field):
    """``VmRSS``, the bytes of this process that are in memory, or ``VmHWM``, the most there ever were; Linux knows."""
    status = Path("/proc/self/status")
    found = re.search(rf"^{field}:\s*(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
    return None if found is None else int(found[1]) * 1024


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
    found = rounds_of({name: (lambda: None, run) for name, run in contenders.items()}, rounds)
    rows = rows_of(f"{len(list(model.parameters()))} parameters", found, {}, {})
    return [
        row._replace(bar=Bar(f"{row.name}, ms", row.value, 100.0)) if row.name.startswith("tt.") else row
        for row in rows
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


LOADS = (None, "int8", "int4", "nf4")


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
        rows += peaks_of(size, {name: [pool.submit(peak_of_change, name, width).result()] for name in CHANGES}, largest)
        for scheme in LOADS:
            peak = pool.submit(peak_of_load, scheme, width, folder).result()
            what = f"load as {scheme or 'float32'}"
            rows.append(Row(what, "above the final model", *[peak / MIB] * 3, "MiB", peak / largest))
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
    return rows_of("F.linear 16x16", rounds_of(contenders, rounds), {}, {}, unit="us", scale=1e6 / repeats)


GROUPS = {"conversions": conversions, "large": large, "ties": ties, "memory": memory, "dispatch": dispatch}


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows, held = [], []
    for group in options.groups:
        for row in GROUPS[group](options.scale, options.rounds):
            said = f"{row.value:10.2f} {row.unit:4} [{row.low:.2f} .. {row.high:.2f}]"
            print(f"{row.what:32} {row.name:24} {said:42} {row.ratio:8.2f} x", flush=True)
            rows.append({"group": group} | {key: value for key, value in row._asdict().items() if key != "bar"})
            if row.bar is not None:
                what, figure, limit = row.bar
                state = "held" if figure <= limit else "missed"
                print(f"{row.what:32} {state:7} {what}: {figure:.2f}, at most {limit:.2f}", flush=True)
                bar = {"case": row.what, "bar": what, "figure": figure, "limit": limit, "state": state}
                held.append({"group": group} | bar)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "bars": held}, indent=1))


if __name__ == "__main__":
    main()
