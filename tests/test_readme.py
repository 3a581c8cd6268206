"""The code of README and of the guides runs, their commands are those of CI, and names and links exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchtether as tt

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
GUIDES = {path: path.read_text() for path in sorted((ROOT / "tutorials" / "guides").glob("*.md"))}
PAGES = {ROOT / "README.md": README, **GUIDES}
BLOCKS = [
    pytest.param(code, id=f"{path.stem}-{i}", marks=[] if path.stem == "README" else pytest.mark.slow)
    for path, text in PAGES.items()
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", text, re.S))
]
each_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)


@pytest.mark.parametrize("code", BLOCKS)
def test_a_block_runs(code, tmp_path):
    """In a process of its own, as a reader would: no other test has set anything up."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    warnings = ["-W", "error", "-W", "ignore:Guards may run slower:RuntimeWarning"]  # torch, of Python 3.13.0
    subprocess.run([sys.executable, *warnings, "-c", code], check=True, cwd=tmp_path, env=environment)


@each_page
def test_every_name_that_it_calls_exists(path):
    for dotted in set(re.findall(r"\btt\.([A-Za-z_][\w.]*\w)", PAGES[path])):
        found = tt
        for part in dotted.split("."):
            assert hasattr(found, part), dotted
            found = getattr(found, part)


def _anchor(heading):
    """The fragment of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@each_page
def test_its_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[path]):
        if target.startswith("http"):
            continue
        file, _, fragment = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        if fragment:
            assert fragment in map(_anchor, re.findall(r"^#+ (.*)$", there.read_text(), re.M)), target


@each_page
def test_the_files_that_it_names_exist(path):
    """What stands in backquotes with a folder and an ending: of the repository or of the package."""
    for named in re.findall(r"`((?:[\w.]+/)+[\w.]+\.(?:py|md|cpp|c|h|json|toml))`", PAGES[path]):
        assert (ROOT / named).exists() or (ROOT / "src" / "torchtether" / named).exists(), named


def test_readme_is_short_and_names_every_guide():
    assert len(README.splitlines()) <= 150
    for guide in GUIDES:
        assert f"(tutorials/guides/{guide.name})" in README, guide.name


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
