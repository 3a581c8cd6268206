"""Measuring in benchmarks of products: contenders take turns, medians of ratios within a round, and the processor."""

import contextlib
import multiprocessing
import os
import platform
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

SLICE = 0.02
"""Seconds for which one contender runs in a round, at least once."""

UNITS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8")


def processor():
    """Return the processor's model, what it has for products, and what torch makes use of."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    units = [unit for unit in UNITS if unit in facts.get("flags", "").split()]
    return {
        "processor": facts.get("model name") or platform.machine(),
        "units": ",".join(units) or "-",
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def bar_here(avx2, avx512):
    """Return the bar that is for the vectors that torch uses (``ATEN_CPU_CAPABILITY`` may have taken some away)."""
    return avx512 if "AVX512" in torch.backends.cpu.get_cpu_capability() else avx2


def in_fresh_process(function, *args):
    """Return ``function(*args)`` of a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def peak_memory():
    """Return the most bytes that this process had resident; 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


@contextlib.contextmanager
def cores_of_others():
    """Give a function that says, afterwards, how many cores others than this process and its children kept busy."""
    start, others, own = time.perf_counter(), _busy(), sum(os.times()[:4])
    taken = []
    yield lambda: taken[0]
    others, own = _busy() - others, sum(os.times()[:4]) - own
    taken.append(max(0.0, others - own) / (time.perf_counter() - start))


def _busy():
    """Seconds for which the cores of this machine have worked; 0 where the system does not say."""
    file = Path("/proc/stat")
    ticks = [int(word) for word in file.read_text().split("\n", 1)[0].split()[1:9]] if file.exists() else [0] * 8
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def measure(contenders, rounds):
    """Seconds per call of every round, by contender; all take turns."""
    repeats = {}
    for name, run in contenders.items():
        run()
        start = time.perf_counter()
        run()
        repeats[name] = max(1, min(2000, int(SLICE / max(time.perf_counter() - start, 1e-7))))
    found = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                run()
            found[name].append((time.perf_counter() - start) / repeats[name])
    return found


def ratio(found, ours, others):
    """The median over the rounds of our time over that of the fastest of the others."""
    return statistics.median(value / min(found[other][i] for other in others) for i, value in enumerate(found[ours]))


def above(found, ours, other):
    """The median over the rounds of the difference, in microseconds."""
    return statistics.median(1e6 * (a - b) for a, b in zip(found[ours], found[other], strict=True))


def waited(found, ours, other):
    """The median over the rounds of the difference, in milliseconds."""
    return above(found, ours, other) / 1e3
