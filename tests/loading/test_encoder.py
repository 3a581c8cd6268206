"""The encoder of a load: compiled loops if they are available, torch ops otherwise; the bits are the same."""

import importlib
import os

import pytest
import torch
from torch import nn

import torchtether as tt
from torchtether import compiled
from torchtether.compiled import room
from torchtether.schemes import same_bits

load_room = importlib.import_module("torchtether.loading.contents")


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    tt.save(torch.nn.Sequential(torch.nn.Linear(96, 70), torch.nn.Linear(70, 33)).bfloat16(), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def loaded(path, scheme):
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(96, 70), torch.nn.Linear(70, 33))
    return model, tt.load(model, path, quantize=scheme)


@pytest.fixture
def away(monkeypatch):
    """Nothing compiled is there."""
    monkeypatch.setattr(room, "_module", None)
    monkeypatch.setattr(room, "_state", "torchtether was installed without a compiler")


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8", "nf4", "mxfp4", "nvfp4"])
def test_both_encoders_give_the_same_model(checkpoint, scheme, monkeypatch):
    if compiled.native() is None:
        pytest.skip(compiled.state())
    one, report = loaded(checkpoint, scheme)
    assert report.encoder == "compiled"
    assert "quantized by compiled" in str(report)
    monkeypatch.setattr(room, "_module", None)
    monkeypatch.setattr(load_room, "_ROWS", 96)  # row by row
    two, report = loaded(checkpoint, scheme)
    assert report.encoder.startswith("torch ops")
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        if isinstance(a, tt.Weight):
            assert all(same_bits(part, b.parts[name]) for name, part in a.parts.items())
    assert sum(isinstance(p, tt.Weight) for p in one.parameters()) == 2


def test_a_load_without_the_compiled_room_says_why(checkpoint, away):
    _, report = loaded(checkpoint, "int8")
    assert report.encoder == "torch ops (torchtether was installed without a compiler)"


def test_a_load_that_encodes_nothing_says_nothing(checkpoint):
    _, report = loaded(checkpoint, None)
    assert report.encoder == ""
    assert " by " not in str(report)


AWKWARD = {
    "int8": (37, 96),
    "int8 long rows": (3, 9000),
    "int4": (21, 200),
    "int4 odd": (5, 129),
    "fp8": (19, 70),
    "nf4": (13, 130),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", AWKWARD)
def test_rows_are_encoded_straight_from_the_file(tmp_path, name, dtype, monkeypatch):
    if compiled.native() is None:
        pytest.skip(compiled.state())
    monkeypatch.setattr(load_room, "_ROWS", 700)
    monkeypatch.setattr(load_room, "_COMPILED_ROWS", 0)  # several jobs for each
    monkeypatch.setattr(load_room, "_READ", 512)  # and several reads for each job
    model = nn.Linear(AWKWARD[name][1], AWKWARD[name][0], dtype=dtype)
    nn.init.normal_(model.weight)
    tt.save(model, tmp_path / "a")
    with torch.device("meta"):
        made = nn.Linear(AWKWARD[name][1], AWKWARD[name][0], dtype=dtype)
    assert tt.load(made, tmp_path / "a", quantize=name.split()[0]).encoder == "compiled"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "_module", None)
        wanted = tt.Weight.encode(model.weight.detach(), made.weight.scheme)
    for part, one in wanted.parts.items():
        assert torch.equal(made.weight.parts[part].view(torch.uint8), one.view(torch.uint8)), part


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_in_a_file_is_an_error_with_its_name(tmp_path, value):
    model = nn.Linear(64, 40)
    with torch.no_grad():
        model.weight[39, 63] = value
    tt.save(model, tmp_path / "a")
    with torch.device("meta"):
        made = nn.Linear(64, 40)
    with pytest.raises(tt.SchemeError, match=r"^weight: 1 of 2560 values are not finite"):
        tt.load(made, tmp_path / "a", quantize="int8")
    assert made.weight.is_meta


def test_a_file_that_shrinks_while_it_is_encoded_is_an_error_with_its_name(tmp_path):
    tt.save(nn.Linear(64, 4000, bias=False), tmp_path / "a.safetensors")
    with torch.device("meta"):
        made = nn.Linear(64, 4000, bias=False)
    plan = tt.plan_load(made, tmp_path / "a.safetensors", quantize="int8")
    os.truncate(tmp_path / "a.safetensors", 100_000)
    with pytest.raises(tt.CheckpointError, match="weight: the file is cut short: nothing follows byte 100000"):
        plan.apply()
    plan.close()
    assert made.weight.is_meta


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(48, 64), nn.Linear(64, 48, bias=False)
        self.head.weight = self.emb.weight


@pytest.mark.parametrize("is_quantized", [False, True], ids=["plain", "quantized before"])
def test_a_tied_weight_that_is_encoded_as_it_is_read_knows_its_tie(tmp_path, is_quantized):
    tt.save(Tied(), tmp_path / "a")
    with torch.device("meta"):
        made = Tied()
    if is_quantized:
        tt.quantize(made, "int8")
    held = made.emb.weight
    tt.load(made, tmp_path / "a", quantize="int8")
    assert made.emb.weight is made.head.weight is held
    assert made.emb.weight.tie.names == ("emb.weight", "head.weight")
    assert made.emb.weight.requires_grad
    assert all(part.is_leaf and part._base is None for part in made.emb.weight.parts.values())
