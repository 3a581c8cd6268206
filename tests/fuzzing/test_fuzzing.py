"""Earlier findings of fuzzing stay fixed, and a few seconds of it find nothing new: ``python -m tests.fuzzing``."""

import faulthandler
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzzing.limits import little_memory
from tests.fuzzing.targets import TARGETS, check

FOUND = sorted(path for path in (Path(__file__).parent / "corpus").rglob("*") if path.is_file())
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no files in memory, no limits of memory")


@pytest.mark.parametrize("path", FOUND, ids=lambda path: f"{path.parent.name} {path.name}")
def test_what_was_found_is_read_or_refused_in_no_time(path):
    """Without it most of these end only with the process: nothing interrupts one hash of 2**60 tuples."""
    faulthandler.dump_traceback_later(120, exit=True)
    try:
        with little_memory():
            check(TARGETS[path.parent.name], path.read_bytes())
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_to_begin_with_are_believed(name):
    """Otherwise what is fuzzed is the first refusal."""
    seeds = TARGETS[name].seeds()
    believed = sum(check(TARGETS[name], seed) for seed in seeds)
    assert believed == len(seeds) if name != "beside" else believed > len(seeds) / 2


@pytest.mark.slow
def test_a_quarter_of_a_minute_of_fuzzing_finds_nothing(tmp_path):
    pytest.importorskip("atheris")
    command = [sys.executable, "-m", "tests.fuzzing", "--together", "--minutes", "0.25", "--finds", tmp_path / "finds"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path[1:]])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.splitlines()[-1].split()[0]) > 1000
