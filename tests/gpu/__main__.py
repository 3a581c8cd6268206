"""Every test that needs a GPU, then the benchmarks; a table, and a JSON file:

    python -m tests.gpu [--json FILE] [--only laws products …] [--rounds 5] [-k EXPRESSION] [--fake]

Ends with 0 only if every law holds and no group of benchmarks breaks; bars that are missed are shown. At most nine
minutes on one GPU. ``--fake`` runs all that a machine without one can: the tests on the CPU, and small benchmarks whose
figures mean nothing. ``--only tiles``, which takes minutes and is left out otherwise, tries other tiles for the
products of our own kernels.
"""

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).parents[2]
PARTS = ("laws", "products", "tiles", "experts", "encoders", "loads", "loaders")
NO_GPU = (
    "there is no GPU here: nothing ran. `pytest` runs what needs none (loads to a simulated device, shapes on fake "
    "CUDA tensors, Triton kernels by interpretation), "
    "--fake runs these tests on the CPU"
)


def machine(device):
    name = platform.processor() if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    return {"device": name or device.type, "torch": torch.__version__, "python": sys.version.split()[0]}


def laws(expression):
    """What became of the tests, which run in processes of their own: their memory is gone when the benchmarks begin.

    Compiling the kernels takes most of the time, so several processes do it.
    """
    chosen = ["-k", expression] if expression else []
    workers, environment = min(12, (os.cpu_count() or 1) - 2), dict(os.environ)
    if workers > 1 and importlib.util.find_spec("xdist"):
        chosen += ["-n", str(workers)]
        environment.setdefault("OMP_NUM_THREADS", "1")  # they share the cores
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "results.xml")
        words = ["-q", "--tb=short", "-m", "not peers", f"--junit-xml={file}", *chosen, str(Path(__file__).parent)]
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:benchmark", *words]
        code = subprocess.run(command, cwd=ROOT, env=environment).returncode
        cases = list(ElementTree.parse(file).iter("testcase")) if file.exists() else []
    kinds = [{child.tag for child in case} for case in cases]
    failed = [
        f"{c.get('classname')}::{c.get('name')}" for c, k in zip(cases, kinds, strict=True) if k & {"failure", "error"}
    ]
    skipped = sum("skipped" in kind for kind in kinds)
    return {"exit": code, "passed": len(cases) - len(failed) - skipped, "failed": failed, "skipped": skipped}


def rows_of(name, group, *arguments):
    """The rows of a group of benchmarks; if it breaks, those before, and one that says why: the others still run."""
    from tests.gpu import benchmarks

    try:
        yield from group(*arguments)
    except Exception as error:
        traceback.print_exc()
        yield {"group": name, "case": "broken", "contender": "", "failed": benchmarks.reason(error)}


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[part for part in PARTS if part != "tiles"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-k", default="")
    parser.add_argument("--fake", action="store_true")
    options = parser.parse_args(arguments)
    wanted = "cpu" if options.fake else os.environ.get("TORCHTETHER_TEST_DEVICE", "cuda")
    if wanted == "cuda" and not torch.cuda.is_available():
        print(NO_GPU)
        return 2
    os.environ["TORCHTETHER_TEST_DEVICE"] = wanted
    os.chdir(ROOT)
    from tests.gpu import benchmarks

    device, start = torch.empty(0, device=wanted).device, time.perf_counter()
    found = {"machine": machine(device), "rows": []}
    print(" ".join(f"{key} {value}" for key, value in found["machine"].items()), flush=True)
    if "laws" in options.only:
        found["laws"] = laws(options.k)
    for name, group in benchmarks.GROUPS.items():
        if name in options.only:
            for row in rows_of(name, group, device, "small" if wanted == "cpu" else "full", options.rounds):
                found["rows"].append(row)
                print(benchmarks.line(row), flush=True)
        found["seconds"] = time.perf_counter() - start
        if options.json:  # after each group: a library of others may end the process
            options.json.write_text(json.dumps(found, indent=1))
    held = found.get("laws", {"exit": 0, "failed": []})
    bars = [row["held"] for row in found["rows"] if "held" in row]
    tests = (
        f"{held['passed']} tests hold, {len(held['failed'])} fail, {held['skipped']} were skipped; "
        if "passed" in held
        else ""
    )
    print(f"{tests}{sum(bars)} of {len(bars)} bars held; {found['seconds']:.0f} s")
    is_broken = any(row["case"] == "broken" for row in found["rows"])
    return 0 if held["exit"] == 0 and not held["failed"] and not is_broken else 1


if __name__ == "__main__":
    sys.exit(main())
