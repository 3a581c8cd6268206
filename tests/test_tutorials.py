"""Every tutorial runs, in a process of its own, and asserts what it claims."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TUTORIALS = sorted((ROOT / "tutorials").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs(path, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", str(path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    if done.returncode and done.stderr.startswith("This tutorial needs"):
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_has_the_shape_of_one(path):
    text = path.read_text()
    assert re.match(r"\d\d_[a-z]+_", path.name), "NN_verb_object.py"
    assert "without us, silently" in text
    assert text.rstrip().splitlines()[-1].startswith("# %% Now break it")
    assert f"tutorials/{path.name}" in (ROOT / "README.md").read_text(), "README's index does not name it"
