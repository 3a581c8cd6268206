"""The tested versions of torch are the same in README, in the package and in CI."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from torchtether.torch_private import versions

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("version", "warns"),
    [
        *((version, False) for version in (*versions.TESTED, "2.14.1", "2.15.3", "2.15.0+cu132", "2.15.0a0+git1234")),
        *((version, True) for version in ("2.16.0", "2.16.0a0+git1234", "3.0.0", "2.115.0")),
    ],
)
def test_a_newer_torch_gives_one_line_of_warning(monkeypatch, version, warns):
    monkeypatch.setattr(torch, "__version__", version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        versions.warn_if_untested()
    assert len(caught) == warns
    for one in caught:
        assert version in str(one.message)
        assert "\n" not in str(one.message)


IMPORT = """
import sys, torch
torch.__version__ = sys.argv[1]
if sys.argv[2:]:
    sys.modules[sys.argv[2]] = None
else:
    del torch._C._is_tracing
import torchtether
"""


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (["2.16.0"], "ImportError: torch 2.16.0 lacks what torchtether uses: module 'torch._C' has no attribute .*"),
        (["2.12.1"], "ImportError: torch 2.12.1 lacks .*_is_tracing.* Use torch 2.13.0 to 2.15.0, or a newer .*"),
        (["2.15.1"], "AttributeError: module 'torch._C' has no attribute '_is_tracing'.*"),
        (["2.16.0", "numpy"], "ModuleNotFoundError: import of numpy halted; None in sys.modules"),
    ],
    ids="newer older tested module".split(),
)
def test_the_import_says_in_one_line_that_a_torch_lacks_a_name(given, what):
    found = subprocess.run([sys.executable, "-c", IMPORT, *given], capture_output=True, text=True)
    assert found.returncode == 1
    assert re.fullmatch(what, found.stderr.splitlines()[-1])


def test_readme_lists_the_versions_and_ci_tries_them():
    oldest, newest = versions.TESTED
    assert f"torch {oldest} to {newest}" in " ".join((ROOT / "README.md").read_text().split())
    assert f'"torch>={oldest.removesuffix(".0")}"' in (ROOT / "pyproject.toml").read_text()
    script = (ROOT / ".ci" / "run").read_text()
    assert f"torch=={oldest}" in script
    assert re.search(r"/bin/pip\" install torch( |$)", script, re.M), "the newest torch is what pip finds by itself"
