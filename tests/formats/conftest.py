"""Every checkpoint that a test of this folder opens also tests that no format is passed over that would have it."""

import pytest

from torchtether.checkpoint import reader
from torchtether.formats import FORMATS
from torchtether.formats.entry import may_recognise


def overlooked(contents):
    """The names of the formats that are not asked, and recognise or refuse ``contents`` all the same."""
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
