"""Every error is one line, also a builtin, and survives pickling."""

import copy
import pickle

import pytest

from torchtether import errors

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.TetherError)]
BUILTIN = {
    "ArgumentError": TypeError,
    "UnsupportedOpError": RuntimeError,
    "ConversionError": RuntimeError,
    "LoadError": RuntimeError,
    "TetherError": Exception,
    "LawError": AssertionError,
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_is_one_line_a_builtin_and_picklable(kind):
    error = kind("got\n (3, 4),   expected (4, 3)", name="layers.0.weight", fix="Transpose it.")
    assert str(error) == "layers.0.weight: got (3, 4), expected (4, 3). Transpose it."
    assert issubclass(kind, BUILTIN.get(kind.__name__, ValueError))
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert str(again) == str(error)
        assert (again.what, again.name, again.fix) == (error.what, error.name, error.fix)


def test_an_error_takes_a_name_once():
    error = errors.SchemeError("bad", fix="Fix it.").named("a.weight")
    assert str(error) == "a.weight: bad. Fix it."
    assert str(error.named("b.weight")) == str(error)
