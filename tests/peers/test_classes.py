"""Which laws tensor subclasses of other libraries keep: a table, for these versions.

``pytest -m peers tests/peers/test_classes.py`` checks it, ``python -m tests.peers.test_classes`` prints it.
"""

import importlib.metadata
from pathlib import Path

import pytest

from tests.peers.classes import PEERS
from torchtether.testing import SUBCLASS_LAWS, check_tensor_subclass, markdown

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

AS_OF = "2026-11-22"
VERSIONS = {"torchao": "0.18.0", "optimum-quanto": "0.2.7", "bitsandbytes": "0.50.2", "torch": "2.13.0"}

BREAKS = {
    "Int8Tensor": "empty-like dtype device load-plain load-into-plain module-to-empty training-step share-memory",
    "Float8Tensor": """
        empty-like dtype device pickle load-plain load-into-plain module-to-empty training-step share-memory
    """,
    "WeightQBytesTensor": """
        clone empty-like dtype deepcopy torch-save load-same load-plain module-to module-to-empty hooks training-step
        share-memory
    """,
    "Params4bit": """
        detach clone empty-like device pickle torch-save load-same load-plain load-into-plain module-to
        module-to-empty module-load
    """,
    "TwoTensor": "torch-save load-plain share-memory",
    "the recipe's class": """
        clone empty-like dtype device deepcopy torch-save load-same load-plain module-to module-to-empty hooks
        training-step share-memory
    """,
}
GUIDE = (Path(__file__).parent.parent.parent / "tutorials" / "guides" / "laws.md").read_text()


@pytest.mark.parametrize("package", VERSIONS)
def test_the_table_is_of_these_versions(package):
    assert importlib.metadata.version(package).partition("+")[0] == VERSIONS[package]


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_class_of_others_breaks_the_laws_that_the_table_says(peer):
    report = check_tensor_subclass(peer.make, **peer.options())
    broken = [result.law for result in report.failed]
    assert broken == [law for law in SUBCLASS_LAWS if law in BREAKS[peer.name].split()], str(report)
    assert all(result.what and result.loses for result in report.failed)


def test_readme_has_this_table():
    _, _, below = GUIDE.partition("| law | torchao Int8Tensor |")
    rows = [line.strip("|").split(" | ") for line in below.partition("\n\n")[0].splitlines()[2:]]
    assert len(rows) == len(SUBCLASS_LAWS)
    for law, (_, *cells) in zip(SUBCLASS_LAWS, rows, strict=True):
        told = [cell.strip() == "no" for cell in cells]
        assert told == [law in BREAKS[peer.name].split() for peer in PEERS], law
    assert f"On {AS_OF}, with torchao {VERSIONS['torchao']}" in GUIDE


def table() -> str:
    """The table in markdown: short, so only whether a law holds; ``print(report)`` says how each is broken."""
    reports = [check_tensor_subclass(peer.make, **peer.options()) for peer in PEERS]
    named = ", ".join(f"{package} {version}" for package, version in VERSIONS.items())
    return f"As of {AS_OF}: {named}.\n\n{markdown(reports, short=True)}"


if __name__ == "__main__":
    print(table())
