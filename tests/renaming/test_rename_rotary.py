"""The rule ``Rotary``, which reorders pairs of rows into halves, on tensors and Weights, alone and with other rules."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchtether as tt
from tests.strategies import examples

SCHEMES = [None, tt.int8(), tt.int4(32), tt.mxfp4(), tt.ScaledFloat(block=(1, None))]


def pairs(w, heads):
    """As llama.cpp's converter puts rows that are in halves."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def holder(**shapes):
    model = torch.nn.Module()
    for name, shape in shapes.items():
        model.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
    return model


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@examples(20)
@given(heads=st.integers(1, 5), size=st.integers(1, 4), seed=st.integers(0, 99), to_pairs=st.booleans())
def test_the_rows_of_each_head_change_order(scheme, heads, size, seed, to_pairs, tmp_path_factory):
    w = torch.randn(heads * size * 2, 64, generator=torch.Generator().manual_seed(seed))
    turned = pairs(w, heads)
    stored, wanted = (w, turned) if to_pairs else (turned, w)
    if scheme is not None:
        stored, wanted = tt.Weight.encode(stored, scheme), tt.Weight.encode(wanted, scheme)
    path = tmp_path_factory.mktemp("rotary") / "x.safetensors"
    tt.save({"q.weight": stored, "q.bias": (w if to_pairs else turned)[:, 0].clone()}, path)
    model = holder(w=w.shape, b=w.shape[:1])
    rules = [tt.Rotary(r"q\.(weight|bias)", heads, to_pairs=to_pairs), {"q.weight": "w", "q.bias": "b"}]
    tt.load(model, path, rename=rules)
    if scheme is None:
        assert torch.equal(model.w, wanted)
    else:
        assert isinstance(model.w, tt.Weight)
        assert torch.equal(model.w.dequantize(), wanted.dequantize())
        assert all(
            torch.equal(p.view(torch.uint8), wanted.parts[n].view(torch.uint8)) for n, p in model.w.parts.items()
        )
    assert torch.equal(model.b, wanted.dequantize()[:, 0] if scheme is None else (turned if to_pairs else w)[:, 0])


def test_pieces_are_joined_afterwards(tmp_path):
    q, k = torch.randn(8, 32), torch.randn(4, 32)
    path = tmp_path / "x.safetensors"
    for scheme in (None, tt.int8()):
        kept = {"q": pairs(q, 2), "k": pairs(k, 1)}
        tt.save(kept if scheme is None else {n: tt.Weight.encode(t, scheme) for n, t in kept.items()}, path)
        model = holder(qk=(12, 32))
        tt.load(model, path, rename=[tt.Rotary("q", 2), tt.Rotary("k", 1), tt.Concat(["q", "k"], "qk")])
        wanted = torch.cat((q, k))
        values = model.qk.dequantize() if scheme else model.qk
        assert torch.equal(values, tt.Weight.encode(wanted, scheme).dequantize() if scheme else wanted)
        cut = holder(a=(6, 32), b=(2, 32), k=(4, 32))
        tt.load(cut, path, rename=[tt.Rotary("q", 2), tt.Rotary("k", 1), tt.Split("q", ["a", "b"], sizes=[6, 2])])
        pieces = [one.dequantize() if scheme else one for one in (cut.a, cut.b)]
        assert torch.equal(torch.cat(pieces), values[:8])


def test_tied_tensors_stay_apart_when_one_is_reordered(tmp_path):
    """The same memory in two orders is not the same values."""
    w = torch.randn(4, 8)
    tt.save({"a": w, "b": w}, tmp_path / "x.safetensors")
    model = holder(a=(4, 8))
    model.b = model.a
    plan = tt.plan_load(model, tmp_path / "x.safetensors", rename=tt.Rotary("a", 1))
    assert any("other values" in fault for fault in plan.faults)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([tt.Rotary("w", 3)], "cannot be divided into pairs for 3 heads"),
        ([tt.Split("w", ["w", "v"]), tt.Rotary("w", 1)], "an earlier rule has changed it"),
        ([tt.Rotary("w", 1), tt.Rotary("w", 1)], "an earlier rule has changed it"),
        ([tt.Rotary("x", 1)], "matches no name"),
    ],
)
def test_what_does_not_fit_is_a_fault(rules, said, tmp_path):
    tt.save({"w": torch.ones(8, 8)}, tmp_path / "x.safetensors")
    plan = tt.plan_load(holder(w=(8, 8)), tmp_path / "x.safetensors", rename=rules, strict=False)
    assert any(said in fault for fault in plan.faults), plan.faults


def test_blocks_of_several_rows_are_not_reordered(tmp_path):
    tt.save({"w": tt.Weight.encode(torch.ones(8, 32), tt.Affine(block=(4, 16)))}, tmp_path / "x.safetensors")
    plan = tt.plan_load(holder(w=(8, 32)), tmp_path / "x.safetensors", rename=tt.Rotary("w", 1))
    assert any("cannot be reordered" in fault for fault in plan.faults), plan.faults


def test_the_inverse_and_bad_arguments():
    rule = tt.Rotary(r"(\w+)\.wq", 4, r"\1.q_proj")
    assert rule.inverse.inverse == rule
    assert rule.inverse == tt.Rotary(r"(\w+)\.q_proj", 4, r"\1.wq", to_pairs=True)
    with pytest.raises(tt.RuleError, match="heads must be a positive int, got 0"):
        tt.Rotary("w", 0)
