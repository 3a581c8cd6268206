"""Checks, for every checkpoint that a test of this folder opens, that no format that would recognise it is skipped."""

import pytest

from torchtether.checkpoint import reader
from torchtether.formats import FORMATS
from torchtether.formats.entry import may_recognise


def overlooked(contents):
    """Return the names of formats that ``may_recognise`` skips, although they recognise or refuse ``contents``."""
    found = []
    for format in FORMATS:
        if not may_recognise(format, contents):
            try:
                answer = format.recognise(contents)
            except Exception as error:
                answer = error
            if answer is not None:
                found.append(format.name)
    return found


@pytest.fixture(autouse=True)
def nothing_is_overlooked(monkeypatch):
    recognise = reader.recognise

    def checked(contents):
        assert overlooked(contents) == []
        return recognise(contents)

    monkeypatch.setattr(reader, "recognise", checked)
