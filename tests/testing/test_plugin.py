"""The pytest plugin: one test per law, with clear ids."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

MINE = """
import pytest, torch, torchtether as tt
from torchtether.formats import native

def make_int8():
    return tt.Weight.encode(torch.randn(4, 8), tt.int8())

@pytest.mark.torchtether_laws(subclass=make_int8, laws=["clone", "swap"])
@pytest.mark.torchtether_laws(subclass=lambda: torch.randn(4, 8), laws=["flatten"], name="plain")
def test_tensors(torchtether_law):
    torchtether_law()

@pytest.mark.torchtether_laws(scheme=tt.int8(), shapes=[(4, 8)])
def test_scheme(torchtether_law):
    torchtether_law()

@pytest.mark.torchtether_laws(format=native, schemes=[tt.int8()], laws="pure")
def test_format(torchtether_law):
    torchtether_law()

class Wrong(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        made = super().__torch_function__(func, types, args, kwargs)
        return made.as_subclass(torch.Tensor) if func is torch.Tensor.clone else made

@pytest.mark.torchtether_laws(subclass=lambda: torch.randn(4, 8).as_subclass(Wrong), laws=["clone"], name="Wrong")
def test_wrong(torchtether_law):
    torchtether_law()
"""


def _pytest(folder, text, *options):
    (folder / "test_mine.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-p", "torchtether_pytest", "-p", "no:cacheprovider", "--strict-markers"]
    done = subprocess.run(
        [*command, "-rA", *options], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


@pytest.mark.slow
def test_laws_are_tests_with_clear_ids(tmp_path):
    code, out = _pytest(tmp_path, MINE)
    assert code == 1, out
    for line in (
        "PASSED test_mine.py::test_tensors[make_int8-clone]",
        "PASSED test_mine.py::test_tensors[make_int8-swap]",
        "PASSED test_mine.py::test_scheme[int8-bound]",
        "PASSED test_mine.py::test_format[native-pure]",
        "FAILED test_mine.py::test_wrong[Wrong-clone]",
        "it holds its values itself",
        "changes its class: Tensor, was Wrong",
        "lost: copies of a model",
    ):
        assert line in out, out


@pytest.mark.slow
def test_a_mark_that_is_wrong_is_said(tmp_path):
    bad = "import pytest\ndef test_mine(torchtether_law):\n    pass\n"
    code, out = _pytest(tmp_path, bad)
    assert code != 0
    assert "needs @pytest.mark.torchtether_laws" in out
    bad = "import pytest\n@pytest.mark.torchtether_laws(shapes=3)\ndef test_mine(torchtether_law):\n    pass\n"
    assert "takes one of subclass, scheme, format, got none" in _pytest(tmp_path, bad)[1]


def test_the_plugin_does_not_import_torch():
    code = "import sys, torchtether_pytest; assert not {'torch', 'torchtether'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
