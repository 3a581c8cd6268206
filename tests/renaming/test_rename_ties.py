"""Ties of the model and of the file under rename rules: the right values, or a fault."""

import pytest
import safetensors.torch
import torch
from torch import nn

import torchtether as tt
from tests.loading.models import Fused, Tied, build
from tests.renaming.test_rename_rules import QKV
from torchtether.renaming.gguf_names import _Increase

TURN = tt.Transpose(r"head\.weight")


class Turned(nn.Module):
    """An embedding, and a head that is laid out as Conv1D: a tied view of it, or apart."""

    def __init__(self, tied):
        super().__init__()
        self.emb, self.head = nn.Embedding(6, 6), nn.Module()  # square: a wrong order would not show in the shape
        turned = self.emb.weight.detach().t()
        self.head.weight = nn.Parameter(turned if tied else turned.clone())


def plain(tensor):
    return tensor.dequantize() if isinstance(tensor, tt.Weight) else tensor.detach()


@pytest.fixture(params=["float", "int8", "flat"])
def tied_file(tmp_path, request):
    """A file in which the head is the embedding itself, by our record or by a note of another writer."""
    source = nn.ModuleDict({"emb": nn.Embedding(6, 6), "head": nn.Linear(6, 6, bias=False)})
    source["head"].weight = source["emb"].weight
    if request.param == "int8":
        tt.quantize(source, {"emb.weight": "int8"})
    path = tmp_path / "x.safetensors"
    if request.param == "flat":
        safetensors.torch.save_model(source, str(path))
        with tt.open(path) as checkpoint:  # it keeps whichever name it likes
            assert len(checkpoint.flat) == 1
    else:
        tt.save(source, path)
    return path, plain(source["emb"].weight)


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("ties", ["match", "model", "file"])
def test_a_transposed_alias(tied_file, ties, meta):
    path, values = tied_file
    for tied in (True, False):
        with torch.device("meta" if meta else "cpu"):
            model = Turned(tied)
        plan = tt.plan_load(model, path, rename=TURN, ties=ties)
        if tied or ties == "model":
            plan.apply()
            assert torch.equal(plain(model.emb.weight), values)
            assert torch.equal(plain(model.head.weight), values.t())
            assert len(tt.find_ties(model)) == tied
        else:
            (fault,) = plan.faults
            assert fault.startswith("head.weight: the checkpoint ties it to a part or a transpose of emb.weight")
            assert "tt.tie" not in fault  # it would tie them in the wrong order
            assert "ties='file'" not in fault
        plan.close()


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("meta", [True, False])
def test_a_fused_weight_under_two_names(tmp_path, meta, quantize):
    pieces = {f"{n}_proj.weight": torch.randn(4, 8) for n in "qkv"}
    fused = torch.cat(list(pieces.values()))
    expected = plain(tt.Weight.encode(fused, tt.int8())) if quantize else fused
    twice = {**pieces, **{f"other.{name}": t.clone() for name, t in pieces.items()}}
    changed = {**twice, "other.k_proj.weight": torch.zeros(4, 8)}
    for name, state in (("once", pieces), ("twice", twice), ("changed", changed)):
        tt.save(state, tmp_path / name)
        with torch.device("meta" if meta else "cpu"):
            model = nn.ModuleDict({"qkv": nn.Linear(8, 12, bias=False), "other": nn.Module()})
            model["other"].qkv = nn.Linear(8, 12, bias=False)
            model["other"].qkv.weight = model["qkv"].weight
        plan = tt.plan_load(model, tmp_path / name, rename=QKV, quantize=quantize)
        if name == "changed":
            assert "other.qkv.weight: the model ties it to qkv.weight, the checkpoint has other" in plan.faults[0]
            plan.close()
            continue
        plan.apply()
        plan.close()
        assert model["other"].qkv.weight is model["qkv"].weight
        assert torch.equal(plain(model["qkv"].weight), expected)


@pytest.mark.parametrize("meta", [True, False])
def test_a_fused_memory_with_slices(tmp_path, meta):
    """The model has the fused tensor and views of it; the file has the pieces."""
    values = torch.randn(6, 4)
    tt.save({"a": values[:2].clone(), "b": values[2:].clone()}, tmp_path / "x")
    model = build(Fused, meta=meta)
    tt.load(model, tmp_path / "x", rename=tt.Concat(["^a$", "^b$"], "qkv"))
    assert torch.equal(model.qkv, values)
    assert torch.equal(model.q, values[:2])
    assert torch.equal(model.kt, values[2:4].t())
    assert len(tt.find_ties(model)) == 1


@pytest.mark.parametrize("meta", [True, False])
def test_a_tied_piece(tmp_path, meta):
    """The file ties q to something that the model has apart: two copies if one asks for them, else a fault."""
    tt.save(build(Tied), tmp_path / "x")
    with tt.open(tmp_path / "x") as checkpoint:
        emb, mid = checkpoint["emb.weight"], checkpoint["mid.weight"]
    with torch.device("meta" if meta else "cpu"):
        model = nn.ModuleDict({"emb": nn.Embedding(12, 8), "both": nn.Linear(8, 20, bias=False)})
    rule = tt.Concat([r"head\.weight", r"mid\.weight"], "both.weight")
    plan = tt.plan_load(model, tmp_path / "x", rename=rule, strict=False)
    (fault,) = plan.faults
    assert fault.startswith("both.weight: the checkpoint ties it to a part or a transpose of emb.weight")
    plan.close()
    tt.load(model, tmp_path / "x", rename=rule, strict=False, ties="model")
    assert torch.equal(model["emb"].weight, emb)
    assert torch.equal(model["both"].weight, torch.cat([emb, mid]))


def test_pieces_of_one_tensor_are_no_tie(tmp_path):
    """They lie in one stored tensor that the file ties to another, and share no element with each other."""
    source = build(Tied)
    tt.save({"emb": source.emb.weight, "head": source.head.weight}, tmp_path / "x")
    rename = [lambda name: None if name == "emb" else name, tt.Split("head", ["a", "b", "c"])]
    model = nn.ParameterDict({name: torch.zeros(4, 8) for name in "abc"})
    tt.load(model, tmp_path / "x", rename=rename)
    assert torch.equal(torch.cat(list(model.values())), source.emb.weight)


@pytest.mark.parametrize("meta", [True, False])
def test_pieces_of_an_alias_are_the_slices_that_the_model_has(tmp_path, meta):
    source = build(Tied)
    tt.save({"emb": source.emb.weight, "head": source.head.weight}, tmp_path / "x")
    for order, fits in (("ab", True), ("ba", False)):
        with torch.device("meta" if meta else "cpu"):
            model = nn.ParameterDict({"emb": torch.zeros(12, 8)})
            for name, rows in zip(order, model["emb"].detach().split(6), strict=True):
                model[name] = nn.Parameter(rows)
        plan = tt.plan_load(model, tmp_path / "x", rename=tt.Split("head", ["a", "b"]))
        assert (plan.faults == ()) == fits
        if fits:
            plan.apply()
            assert torch.equal(model["b"], source.emb.weight[6:])
        plan.close()


def test_rows_of_a_weight_that_the_file_ties(tmp_path):
    whole, more = (tt.Weight.encode(torch.randn(rows, 4), tt.int8()) for rows in (8, 2))
    tt.save({"whole": whole, "rows": whole.detach()[2:6], "more": more}, tmp_path / "x")
    with tt.open(tmp_path / "x") as checkpoint:
        assert checkpoint.ties[0].aliases == ("rows",)
    model = nn.ParameterDict({"both": torch.zeros(6, 4)})
    rename = [lambda name: None if name == "whole" else name, tt.Concat(["rows", "more"], "both")]
    tt.load(model, tmp_path / "x", rename=rename)
    assert torch.equal(plain(model["both"]), torch.cat([whole.dequantize()[2:6], more.dequantize()]))


def test_a_tied_name_with_other_values_than_its_owner_is_no_alias(tmp_path):
    """As a norm of Gemma, if a file with llama.cpp's names ties it to another tensor."""
    values, rule = nn.Parameter(torch.rand(4)), _Increase("^a$", -1.0)
    tt.save({"a": values, "b": values}, tmp_path / "x.safetensors")
    apart = nn.ParameterDict({"a": torch.zeros(4), "b": torch.zeros(4)})
    tt.load(apart, tmp_path / "x.safetensors", rename=rule)
    assert torch.equal(apart["a"], values - 1)
    assert torch.equal(apart["b"], values)
    tied = nn.ParameterDict({"a": torch.zeros(4)})
    tied["b"] = tied["a"]
    with pytest.raises(tt.LoadError, match="the model ties it to a, the checkpoint has other values for it"):
        tt.load(tied, tmp_path / "x.safetensors", rename=rule)
