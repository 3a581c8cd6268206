"""Files that safetensors 0.3.0 to 0.8.0 wrote, read by us: every dtype, metadata, ties of ``save_model``."""

from pathlib import Path

import pytest
import torch

import torchtether as tt
from tests.golden.safetensors_versions.make import Tied
from torchtether.files import TensorFile

FOLDER = Path(__file__).parent.parent / "golden" / "safetensors_versions"
VERSIONS = {"0.3.0": 12, "0.3.1": 12, "0.4.0": 12, "0.4.5": 14, "0.5.3": 14, "0.6.2": 17, "0.7.0": 18, "0.8.0": 20}
"""Each version, and the number of tensors in its file."""


@pytest.mark.parametrize("version", VERSIONS)
def test_every_dtype(version):
    path = FOLDER / f"{version}-tensors.safetensors"
    with TensorFile(path) as file:
        assert dict(file.header.metadata) == {"format": "pt", "version": version}
    with tt.open(path) as checkpoint:
        found = dict(checkpoint)
    assert len(found) == VERSIONS[version] - (version == "0.3.0")
    assert found.pop("scalar").item() == 1.5
    assert version == "0.3.0" or found.pop("empty").shape == (0, 3)
    for name, tensor in found.items():
        assert str(tensor.dtype) == name
        if tensor.dtype.is_complex:
            assert tensor.tolist() == [0, 1 - 1j, 2 - 2j, 3 - 3j]
        else:
            expected = [0, 1, 1, 1] if name == "torch.bool" else [0, 1, 2, 3]
            assert tensor.to(torch.float64).tolist() == expected


@pytest.mark.parametrize("version", [version for version in VERSIONS if version != "0.3.0"])
@pytest.mark.parametrize("meta", [True, False])
def test_a_tied_model(version, meta):
    model = Tied()
    if meta:
        tt.convert(model, device="meta")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.AdamW(model.parameters())
    report = tt.load(model, FOLDER / f"{version}-model.safetensors")
    assert (report.missing_keys, report.unexpected_keys) == ((), ())
    assert model.head.weight is model.emb.weight
    assert model.head.bias is model.bias
    assert torch.equal(model.emb.weight, Tied().emb.weight)
    assert model.bias.tolist() == [0, 1, 2, 3]
    tt.check_optimizer(model, optimizer)
    with tt.open(FOLDER / f"{version}-model.safetensors") as checkpoint:
        assert len(list(checkpoint)) == 2
        for name, tensor in Tied().state_dict().items():
            assert torch.equal(checkpoint[name], tensor)
