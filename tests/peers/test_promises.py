"""The guide's table of what survives in which library equals the results of a run, for the versions that it names."""

from pathlib import Path

import pytest

from tests.peers import promises

pytestmark = pytest.mark.peers

LAWS = (Path(__file__).parent.parent.parent / "tutorials" / "guides" / "laws.md").read_text()


@pytest.mark.parametrize("row", promises.ROWS)
def test_each_cell_is_what_a_run_gives(row):
    line = next(line for line in LAWS.splitlines() if line.startswith(f"| {promises.ROWS[row]} |"))
    said = [cell.strip() for cell in line.split("|")[2:-1]]
    assert said == [promises.cell(row, party) for party in promises.PARTIES]


def test_the_versions_are_those_of_the_run():
    assert promises.versions() in LAWS
