"""The public names: documented, fully annotated, and every reference in a docstring leads somewhere."""

import ast
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import torchtether as tt
from torchtether import formats

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "torchtether"
ROOMS = {name: getattr(tt, name) for name in ("distributed", "testing")}
PUBLIC = {name: getattr(tt, name) for name in tt.__all__ if name not in ROOMS}
PUBLIC |= {f"{room}.{name}": getattr(one, name) for room, one in ROOMS.items() for name in one.__all__}
PUBLIC = {name: one for name, one in PUBLIC.items() if inspect.isclass(one) or inspect.isfunction(one)}
FUNCTIONS = {name: one for name, one in PUBLIC.items() if not inspect.isclass(one)}
CLASSES = {name: one for name, one in PUBLIC.items() if inspect.isclass(one)}
NEEDS_A_FILE = {"gguf_names"}  # its example would need a GGUF file with a vocabulary of llama


def _members(kind):
    """What a public class defines itself, besides what begins with an underscore."""
    for name, member in vars(kind).items():
        if not name.startswith("_"):
            inner = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if inspect.isfunction(inner):
                yield name, inner


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_documented(name):
    text = inspect.getdoc(PUBLIC[name])
    first = text.split("\n\n")[0]
    assert first.rstrip().endswith((".", ":")), "the first sentence says what is true afterwards"
    if not (inspect.isclass(PUBLIC[name]) and issubclass(PUBLIC[name], tt.TetherError)):
        assert ">>>" in text or name in NEEDS_A_FILE or "." in name, "an example that the suite runs"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_says_what_it_raises_and_takes(name):
    text, parameters = inspect.getdoc(FUNCTIONS[name]), inspect.signature(FUNCTIONS[name]).parameters
    if parameters and "." not in name:  # those take several processes, or only report
        assert "Raises" in text
    if "for the arguments" in text:  # of another function, which takes the same
        text = inspect.getdoc(tt.load)
    for same in re.findall(r"arguments are those of ``tt\.(\w+)``", text):
        text += inspect.getdoc(getattr(tt, same))
    for parameter in list(parameters)[1:]:
        assert re.search(rf"\b{parameter}\b", text), f"{name}({parameter}) is not explained"


@pytest.mark.parametrize("name", CLASSES)
def test_every_method_of_a_public_class_is_documented(name):
    for method, _ in _members(CLASSES[name]):
        assert inspect.getdoc(getattr(CLASSES[name], method)), f"{name}.{method}"


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_fully_annotated(name):
    one = PUBLIC[name]
    found = [(name, one)] if name in FUNCTIONS else [(f"{name}.{member}", inner) for member, inner in _members(one)]
    if name in CLASSES and "__init__" in vars(one):
        found.append((f"{name}.__init__", vars(one)["__init__"]))
    for where, function in found:
        signature = inspect.signature(inspect.unwrap(function))
        for parameter in signature.parameters.values():
            if parameter.name not in ("self", "cls"):
                assert parameter.annotation is not parameter.empty, f"{where}({parameter.name})"
        assert signature.return_annotation is not signature.empty, where


# -- the first word ---------------------------------------------------------------------------------------------------

VERBS = set(
    """
    Add Answer Apply Ask Attach Build Call Cast Change Check Choose Clear Close Collect Compare Compute Concatenate
    Convert Copy Count Cut Decide Decode Define Describe Drop Dequantize Derive Draw Encode Exchange Fill Find Forget
    Gather Give Group Guard Have Hold Import Interleave Iterate Join Keep Lay Let List Load
    Locate Look Make Map Mark Match
    Materialize Measure Move Name Offer Open Order Pack Parametrize Parse Permute Plan Predict Print Quantize Raise Read
    Rebuild Recognise Recompute Record Reencode Refuse Register Release Remember Remove Rename Reorder Replace Replay
    Report Represent Require Reset Restore Return Reverse Round Run Save Say Search Select Send Set Shard Share Shorten
    Show Signal Slice Sort Specify Split Stack Stand Step Store Stream Swap Take Tell Tie Transpose Turn Undo Unpack
    Untie Update Use Validate View Wait Walk Warn Wrap Write Yield
    """.split()
)
"""The verbs, in the imperative, with which a public docstring may begin."""


def _described():
    """Yield every public function, class and method of ours with its name, once."""
    seen = set()
    rooms = {"": tt, "distributed.": tt.distributed, "testing.": tt.testing, "formats.": formats}
    for prefix, room in rooms.items():
        for name in room.__all__:
            one = getattr(room, name)
            if (inspect.isclass(one) or inspect.isfunction(one)) and one not in seen:
                seen.add(one)
                yield f"{prefix}{name}", one
                if inspect.isclass(one):
                    for kind in (kind for kind in one.__mro__ if kind.__module__.startswith("torchtether.")):
                        yield from ((f"{prefix}{name}.{member}", inner) for member, inner in _members(kind))


def test_a_public_docstring_begins_with_a_verb():
    offenders = []
    for name, one in _described():
        text = inspect.getdoc(one)
        first = re.match(r"\w*", text or "").group()
        if text and first not in VERBS:
            offenders.append(f"{one.__module__}: {name}: {text.splitlines()[0]}")
    assert not offenders, "\n".join(sorted(set(offenders)))


def _docstrings():
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text:
                    yield path, text


def _resolves(dotted):
    one = tt
    for part in dotted.split("."):
        if not hasattr(one, part):
            return False
        one = getattr(one, part)
    return True


def test_what_texts_call_tt_something_is_there():
    """Docstrings, error messages, README and tutorials name no function that has gone or was never there."""
    texts = [(path, text) for path, text in _docstrings()]
    texts += [
        (path, path.read_text()) for path in (*sorted(SOURCE.rglob("*.py")), *sorted((ROOT / "tutorials").glob("*.py")))
    ]
    texts += [(path, path.read_text()) for path in (ROOT / "README.md", *(ROOT / "tutorials" / "guides").glob("*.md"))]
    for path, text in texts:
        for dotted in re.findall(r"\btt\.([A-Za-z_][A-Za-z0-9_]*)", text):
            assert _resolves(dotted) or dotted in _later(), f"{path.name} names tt.{dotted}"


def _later():
    """What other rooms may bring: submodules that are imported by name."""
    return {"distributed", "testing"}


def test_the_package_ships_its_types():
    assert (SOURCE / "py.typed").exists()
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["torchtether"]


# -- the reference, as pdoc builds it ---------------------------------------------------------------------------------


class _Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.ids, self.links = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        names = dict(attributes)
        if "id" in names:
            self.ids.add(names["id"])
        if tag == "a" and "href" in names:
            self.links.add(names["href"])


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    pytest.importorskip("pdoc")
    folder = tmp_path_factory.mktemp("reference")
    command = [sys.executable, "-W", "error", "-m", "pdoc", "-o", str(folder), "torchtether"]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "Warn" not in ran.stderr, ran.stderr[-2000:]  # pdoc shows those of its own
    return {path: _Page(path.read_text()) for path in folder.rglob("*.html")}


@pytest.mark.peers
def test_the_reference_builds_without_a_warning(reference):
    assert reference


@pytest.mark.peers
def test_the_reference_has_every_public_name(reference):
    (page,) = (page for path, page in reference.items() if path.name == "torchtether.html")
    assert set(tt.__all__) - ROOMS.keys() <= page.ids


@pytest.mark.peers
def test_links_of_the_reference_lead_somewhere(reference):
    for path, page in reference.items():
        for link in page.links:
            if link.startswith("http"):
                continue
            file, _, fragment = link.partition("#")
            target = (path.parent / file).resolve() if file else path
            assert target in reference, f"{path.name}: {link}"
            # pdoc also links attributes that it does not list, such as what a subclass is to declare
            ids = reference[target].ids
            known = fragment in ids or ("." in fragment and fragment.rpartition(".")[0] in ids)
            assert not fragment or known, f"{path.name}: {link}"


# -- types, as a checker that we did not write sees them --------------------------------------------------------------


def _checker():
    found = shutil.which("basedpyright", path=str(Path(sys.executable).parent)) or shutil.which("basedpyright")
    if found is None:
        pytest.skip("basedpyright is not installed")
    return found


MINE = """
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import torchtether as tt


@dataclass(frozen=True)
class Mine(tt.BlockScheme):
    kind: ClassVar[str] = "typed"
    bits: int = 3

    def fit(self, x: Tensor) -> dict[str, Tensor]:
        return {"scale": x.abs().amax(-1) / 3}

    def to_codes(self, x: Tensor, scale: Tensor) -> Tensor:
        return x / scale + 3

    def to_values(self, codes: Tensor, scale: Tensor) -> Tensor:
        return (codes - 3) * scale

    def error(self, codes: Tensor, scale: Tensor) -> Tensor:
        return scale / 2


@dataclass(frozen=True)
class Other(tt.Scheme):
    kind: ClassVar[str] = "typed-other"

    def layout(self, shape: tuple[int, ...]) -> dict[str, tt.Part]:
        return {"codes": tt.Part(shape, torch.int8, 1)}


def train(model: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> torch.nn.Linear:
    tt.load(model, "path", device=0, optimizer=[optimizer])
    tt.plan_load(model, "path", device={"*": 0}, optimizer=optimizer)
    return tt.dequantize(tt.quantize(model, Mine(), optimizer=optimizer))
"""


@pytest.mark.peers
def test_a_type_checker_accepts_what_the_guides_write(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    source = str(Path(tt.__file__).parents[1])
    config = {"include": ["mine.py"], "extraPaths": [source], "typeCheckingMode": "strict"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    command = [_checker(), "--pythonpath", sys.executable, "--outputjson", "-p", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert json.loads(ran.stdout)["generalDiagnostics"] == []


@pytest.mark.peers
def test_a_type_checker_knows_the_type_of_every_public_name(tmp_path):
    command = [
        _checker(),
        "--pythonpath",
        sys.executable,
        "--verifytypes",
        "torchtether",
        "--ignoreexternal",
        "--outputjson",
    ]
    first = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # it takes the python found there
    env = {**os.environ, "PATH": first}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    symbols = json.loads(ran.stdout)["typeCompleteness"]["symbols"]
    assert len(symbols) > 500
    public = {f"{one.__module__}.{one.__qualname__}" for one in PUBLIC.values()}
    assert all(importlib.import_module(one.__module__) for one in PUBLIC.values())
    faults = [
        f"{symbol['name']}: {diagnostic['message']}"
        for symbol in symbols
        if any(symbol["name"] == name or symbol["name"].startswith(f"{name}.") for name in public)
        if not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"]
        for diagnostic in symbol["diagnostics"]
        if diagnostic["severity"] == "error"
    ]
    assert not faults, "\n".join(faults)
