"""Every ``raise`` of the package: its class, the grammar of its text, and whether a test expects the class."""

import ast
import re
from pathlib import Path

import pytest

import torchtether
from torchtether import errors

SOURCE = Path(torchtether.__file__).parent
TESTS = Path(__file__).parent
OURS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.TetherError)}
PROTOCOL = {
    "KeyError": "mappings: Checkpoint, Component.member",
    "IndexError": "indexing past the end, as torch says it",
    "TypeError": "len() of rank 0; an op's argument, as torch says it",
    "RuntimeError": "torch's own words where torch's own behaviour is kept",
    "NotImplementedError": "what a subclass of an interface has to write",
    "ValueError": "caught by the caller, who names the tensor",
    "ArgumentTypeError": "argparse prints it",
    "Fault": "caught by the format, which names the tensor",
    "ImportError": "a library of another version, as importing it says it, and transformers' own quantizers",
    "AttributeError": "what Python asks of a module's __getattr__",
    "UnpicklingError": "caught by the reader, who names the file",
    "NotApplicable": "caught by the runner of the laws, which reports a law as skipped",
    "Broken": "caught by the runner of the laws, which reports a law as failed",
}
"""Other classes, and why they are no TetherError."""


NAMED_BY_CALLERS = {"files", "formats", "geometry/views.py", "weights/spec.py", "schemes"}
"""What reads and unpacks does not know of which tensor; whoever calls it adds the name."""


def _raises():
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                called = node.exc.func
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                room = next((place for place in NAMED_BY_CALLERS if path.relative_to(SOURCE).is_relative_to(place)), "")
                yield name, node.exc, room, f"{path.relative_to(SOURCE)}:{node.lineno}"


@pytest.fixture(scope="module")
def raises():
    """Every ``raise``: the name of its class, the call, the room whose callers add a name or "", and its place."""
    return list(_raises())


@pytest.fixture(scope="module")
def deliberate(raises):
    return [one for one in raises if one[0] in OURS]


def _is_said(node):
    """Whether a text has a value in it that only the caller knows."""
    return any(isinstance(part, ast.FormattedValue) for part in ast.walk(node))


def test_there_are_hundreds_of_them(deliberate):
    assert len(deliberate) > 300


def test_what_is_raised_is_ours_or_a_protocol(raises):
    known = {*OURS, *PROTOCOL}
    others = [f"{place}: {name}" for name, _, _, place in raises if name[:1].isupper() and name not in known]
    assert not others, "make it a TetherError, or say why not"


def test_an_error_says_what_is_wrong_of_what_or_what_to_do(deliberate):
    for name, call, room, place in deliberate:
        try:
            _check_text(name, call, room)
        except AssertionError as error:
            raise AssertionError(f"{place}: {error}") from error


def _check_text(name, call, room):
    assert name != "TetherError" or call.args, "a class of its own says more"
    assert call.args, "an error says what is wrong"
    text = call.args[0]
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    assert keywords.keys() <= {"name", "fix"}
    pieces = text.values if isinstance(text, ast.JoinedStr) else [text]
    literals = [part.value for part in pieces if isinstance(part, ast.Constant)]
    assert not any("\n" in literal for literal in literals)
    if isinstance(pieces[-1], ast.Constant):
        assert not literals[-1].endswith("."), "the full stop comes with the fix"
    if room not in NAMED_BY_CALLERS and isinstance(text, (ast.Constant, ast.JoinedStr)):
        assert _is_said(text) or keywords, "of what, or what to do"
    fix = keywords.get("fix")
    if isinstance(fix, ast.Constant) and fix.value:
        assert fix.value.endswith((".", "?")), "a sentence"
        assert fix.value[0].isupper() or fix.value[0] in "'`(", "a sentence"


@pytest.mark.parametrize("name", sorted(OURS - {"TetherError"}))
def test_every_class_is_raised_and_a_test_expects_it(name, deliberate):
    assert any(one[0] == name for one in deliberate) or re.search(
        rf"return {name}\(", "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    )
    expected = re.compile(rf"(raises|refused|fails)\([^)]*\b{name}\b|\b{name}\b.*match=")
    assert any(expected.search(path.read_text()) for path in TESTS.rglob("test_*.py")), f"no test expects {name}"
