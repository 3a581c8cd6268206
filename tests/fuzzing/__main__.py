"""Fuzz the readers under atheris (libFuzzer), guided by their coverage: python -m tests.fuzzing --minutes 1

Findings are written with their input to ``--finds``: an exception that is not one of ours, more than 1 GiB of memory
for an input of some kilobytes, more than ten seconds, or the end of the process. Exits with 1 if there are any.
"""

import argparse
import hashlib
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

LONGEST = 6_000
"""Bytes of an input."""

SOURCES = Path(__file__).parents[2] / "src" / "torchtether"

GUIDING = {"files", "formats", "geometry", "schemes", "ties"}
"""The packages whose coverage guides."""

SECONDS = 10


def main():
    """Fuzz each target, one process after the other."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="in all")
    parser.add_argument("--target", action="append", help="one of those in targets.py; repeat it for several")
    parser.add_argument("--together", action="store_true", help="all targets in one process, which starts sooner")
    parser.add_argument("--finds", type=Path, default=Path(tempfile.gettempdir()) / "torchtether-finds")
    parser.add_argument("--corpus", type=Path, help="keeps inputs that reached new code, for the next run")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.finds.mkdir(parents=True, exist_ok=True)
    if given.inside:
        return fuzz(given.inside.split(","), given.minutes * 60, given.finds, given.corpus)
    from tests.fuzzing.targets import TARGETS

    names = given.target or list(TARGETS)
    groups = [names] if given.together else [[name] for name in names]
    before, total = set(given.finds.iterdir()), 0
    for group in groups:
        total += run_group(group, given.minutes * 60 / len(groups), given)
    found = sorted(set(given.finds.iterdir()) - before)
    print(f"{total} inputs, {len(found)} finds{': ' if found else ''}{' '.join(map(str, found))}")
    return 1 if found else 0


def run_group(names, seconds, given):
    """Return how many inputs ran; a process that ended early has left its last input, and another goes on."""
    total, until = 0, time.monotonic() + seconds
    while (left := until - time.monotonic()) > 1:
        options = ["--inside", ",".join(names), "--minutes", str(left / 60), "--finds", str(given.finds)]
        options += ["--corpus", str(given.corpus)] if given.corpus else []
        command = [sys.executable, "-m", "tests.fuzzing", *options]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        counts = re.findall(r"^(?:#|stat::number_of_executed_units: )(\d+)", done.stderr, re.M)
        total += int(counts[-1]) if counts else 0
        print(f"{', '.join(names)}: {counts[-1] if counts else 0} inputs", flush=True)
        if "stat::" not in done.stderr:
            print(done.stderr[-3000:], file=sys.stderr, flush=True)
            (given.finds / f"ended-{'+'.join(names)}-{int(time.time())}.txt").write_text(done.stderr[-3000:])
    return total


def fuzz(names, seconds, finds, kept):
    """Fuzz in this process, which libFuzzer ends; inputs are ``name:`` and what the target of that name gets."""
    import atheris

    others = [
        ".".join(path.relative_to(SOURCES.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in SOURCES.rglob("*.py")
        if path.relative_to(SOURCES).parts[0] not in GUIDING
    ]
    with atheris.instrument_imports(include=["torchtether"], exclude=others):
        from tests.fuzzing.targets import TARGETS, check
    from tests.fuzzing.limits import little_memory
    from tests.fuzzing.mutators import CHANGES

    warnings.simplefilter("error")
    seen = set()

    def run(data):
        name, _, payload = data.partition(b":")
        target = TARGETS.get(name.decode("latin-1"))
        if target is None:
            return
        try:
            check(target, payload)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            where = f"{type(error).__name__} {[(frame.filename, frame.lineno) for frame in frames]}"
            if where not in seen:
                seen.add(where)
                path = finds / f"{name.decode()}-{hashlib.sha256(where.encode()).hexdigest()[:10]}"
                path.write_bytes(payload)
                path.with_suffix(".txt").write_text(traceback.format_exc(), errors="backslashreplace")

    def mutate(data, longest, seed, other=None):
        name, _, payload = data.partition(b":")
        kind = TARGETS[name.decode()].kind if name.decode("latin-1") in names else None
        if kind is None:
            return seeds[seed % len(seeds)]
        made, draw = None, random.Random(seed)
        if kind in CHANGES and draw.random() < 0.85:
            same = other if other and other.startswith(name + b":") else draw.choice(seeds_of[name.decode()])
            made = CHANGES[kind](payload, draw, same.partition(b":")[2])
        elif other is not None:
            payload = payload[: draw.randrange(len(payload) + 1)] + other[draw.randrange(len(other)) :]
        if made is None or len(made) > LONGEST:
            made = bytes(atheris.Mutate(payload, max(longest - len(name) - 1, 1)))
        return (name + b":" + made)[:longest]

    def cross(data, other, longest, seed):
        return mutate(data, longest, seed, other)

    seeds_of = {name: [f"{name}:".encode() + seed for seed in TARGETS[name].seeds()] for name in names}
    seeds = [seed for each in seeds_of.values() for seed in each]
    corpus = kept / "+".join(names) if kept else Path(tempfile.mkdtemp())
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        (corpus / hashlib.sha256(seed).hexdigest()[:20]).write_bytes(seed)
    options = [f"-max_total_time={seconds:.0f}", f"-timeout={SECONDS}", "-rss_limit_mb=0", f"-max_len={LONGEST}"]
    options += ["-len_control=0", "-print_final_stats=1", "-reload=0", f"-artifact_prefix={finds}/"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], run, custom_mutator=mutate, custom_crossover=cross)
    with little_memory():
        atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
