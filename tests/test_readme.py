"""README's code runs, its commands are the ones that CI runs, and the names it promises exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchtether as tt

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_runs(code, tmp_path):
    """In a process of its own, as a reader would: no other test has set anything up."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=tmp_path, env=environment)


def test_every_name_that_it_calls_exists():
    for name in set(re.findall(r"\btt\.([A-Za-z_]\w*)", README)):
        assert hasattr(tt, name), name


def test_ci_runs_its_test_command():
    command = re.search(r"^pip install .*&& *pytest -n 2$", README, re.M)
    assert command is not None
    assert "torch==2.13.0" in command.group()
    assert "pip install .*&& *pytest" in (ROOT / ".ci" / "run").read_text()


def test_its_first_screen_is_one_sentence_one_block_and_two_commands():
    screen = README[: README.index("## ")]
    assert screen.count("```python") == 1
    assert screen.count("```sh") == 2
    assert "torchtether demo" in screen
