"""Which encoder runs during a load: compiled loops if they are at hand, torch ops otherwise; the bits are the same."""

import importlib
import os

import pytest
import torch
from torch import nn

import torchtether as tt
from torchtether import compiled
from torchtether.compiled.build import Build
from torchtether.schemes import same_bits

load_room = importlib.import_module("torchtether.loading.encoding")


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
def away(monkeypatch, tmp_path):
    """The loops are not at hand, and nobody has asked for them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build = Build()
    monkeypatch.setattr("torchtether.compiled.loops.BUILD", build)
    monkeypatch.setattr(compiled, "BUILD", build)
    return build


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8", "nf4", "mxfp4", "nvfp4"])
def test_both_encoders_give_the_same_model(checkpoint, scheme, monkeypatch):
    if not compiled.BUILD.wait():
        pytest.skip(compiled.BUILD.state)
    one, report = loaded(checkpoint, scheme)
    assert report.encoder == "compiled"
    assert "quantized by compiled" in str(report)
    monkeypatch.setattr(compiled.BUILD, "_library", None)
    monkeypatch.setattr(load_room, "_ROWS", 96)  # row by row
    two, report = loaded(checkpoint, scheme)
    assert report.encoder.startswith("torch ops")
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        if isinstance(a, tt.Weight):
            assert all(same_bits(part, b.parts[name]) for name, part in a.parts.items())
    assert sum(isinstance(p, tt.Weight) for p in one.parameters()) == 2


def test_little_work_is_not_worth_a_compiler(checkpoint, away):
    _, report = loaded(checkpoint, "int8")
    assert report.encoder == "torch ops (too little to compile for)"
    assert away.state == ""


def test_much_work_asks_for_the_loops_and_does_not_wait(checkpoint, away, monkeypatch):
    monkeypatch.setattr("torchtether.compiled.loops._WORTHWHILE", 1)
    asked = []
    monkeypatch.setattr(away, "warm", lambda: asked.append(True))
    away.state = "being compiled"
    _, report = loaded(checkpoint, "int8")
    assert asked
    assert report.encoder == "torch ops (being compiled)"


def test_switched_off(checkpoint, away, monkeypatch):
    monkeypatch.setenv("TORCHTETHER_COMPILE", "0")
    _, report = loaded(checkpoint, "int8")
    assert report.encoder == "torch ops (off by TORCHTETHER_COMPILE)"


def test_a_load_that_encodes_nothing_says_nothing(checkpoint):
    _, report = loaded(checkpoint, None)
    assert report.encoder == ""
    assert " by " not in str(report)


def test_quantizing_a_model_asks_too(away, monkeypatch):
    asked = []
    monkeypatch.setattr(away, "warm", lambda: asked.append(True))
    model = torch.nn.Linear(64, 64)
    tt.quantize(model, "int8")
    assert not asked
    monkeypatch.setattr("torchtether.compiled.loops._WORTHWHILE", 64 * 64)
    tt.quantize(tt.dequantize(model), "int4")
    assert asked == [True]


@pytest.mark.parametrize(("more_cores", "long", "at_once"), [(0, False, False), (1, False, True), (0, True, True)])
def test_a_compiler_has_a_core_of_its_own_or_waits_for_the_end(
    checkpoint, away, monkeypatch, more_cores, long, at_once
):
    """On the cores of a load that it shares it would make it longer than torch ops alone."""
    monkeypatch.setattr("torchtether.compiled.loops._WORTHWHILE", 1)
    monkeypatch.setattr("torchtether.compiled.loops._LONG", 1 if long else 2**32)
    monkeypatch.setattr("torchtether.compiled.loops._cores", lambda: load_room.THREADS + more_cores)
    happened, run = [], load_room.Batch.run
    monkeypatch.setattr(away, "warm", lambda: happened.append("compiler"))
    monkeypatch.setattr(load_room.Batch, "run", lambda *given: happened.append("encoded") or run(*given))
    loaded(checkpoint, "int8")
    assert happened[0] == ("compiler" if at_once else "encoded")
    assert happened[-1] == "compiler"


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
    if not compiled.BUILD.wait():
        pytest.skip(compiled.BUILD.state)
    monkeypatch.setattr(load_room, "_ROWS", 700)  # several jobs for each
    monkeypatch.setattr(load_room, "_READ", 512)  # and several reads for each job
    model = nn.Linear(AWKWARD[name][1], AWKWARD[name][0], dtype=dtype)
    nn.init.normal_(model.weight)
    tt.save(model, tmp_path / "a")
    calls, stock = [], compiled.encode_file
    monkeypatch.setattr(compiled, "encode_file", lambda *args: calls.append(stock(*args)) or calls[-1])
    with torch.device("meta"):
        made = nn.Linear(AWKWARD[name][1], AWKWARD[name][0], dtype=dtype)
    tt.load(made, tmp_path / "a", quantize=name.split()[0])
    assert calls
    assert all(calls)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled.BUILD, "_library", None)
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
    with pytest.raises(tt.CheckpointError, match="weight: the file ended at byte 100000"):
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
