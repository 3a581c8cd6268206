"""The public laws of ``tt.testing``, with every drawn tensor on the device."""

import pytest
import torch

import torchtether as tt
from tests.catalog import FEW, SCHEMES
from torchtether.testing import draws


@pytest.fixture
def there(device, monkeypatch):
    """What the laws draw is on the device, and so is what they make without a device."""
    drawn = draws.filled

    def filled(*args):
        with torch.device("cpu"):  # where the generator is
            values = drawn(*args)
        return values.to(device)

    monkeypatch.setattr(draws, "filled", filled)
    with torch.device(device):
        yield


SOME = [
    row for row in SCHEMES if row in FEW or row.id in {"q4_k", "biased4", "sinq", "codebook-uneven", "int8-mastered"}
]
"""One of each family: ``test_codes`` compares the codes of every row, in less time."""


@pytest.mark.parametrize("row", SOME, ids=[row.id for row in SOME])
def test_schemes(row, there):
    tt.testing.check_scheme(row.scheme).check()


LAWS = ("detach", "clone", "dtype", "device", "flatten", "deepcopy", "swap")
"""Those that ask nothing of the CPU's memory: the others share, map or pickle it."""


@pytest.mark.parametrize("row", FEW, ids=[row.id for row in FEW])
def test_weights(row, device):
    def make():
        return tt.Weight.encode(torch.randn(8, 64), row.scheme).to(device)

    tt.testing.check_tensor_subclass(make, laws=LAWS).check()
