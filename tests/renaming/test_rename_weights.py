"""Rename rules on quantized checkpoints cut and join parts without decoding, or the plan has a fault."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchtether as tt
from tests.checkpoint.test_round_trip import bits
from tests.renaming.test_rename_rules import EXPERTS, QKV, holder
from tests.strategies import examples
from torchtether.schemes import SCHEMES as KINDS
from torchtether.schemes import Part
from torchtether.schemes.tables import NF4
from torchtether.ties.names import named_tensors

SCHEMES = {
    "int8": tt.int8(),
    "int8 tensor": tt.Affine(block=(None, None)),
    "int4": tt.int4(group_size=4),
    "int4 rows": tt.int4(group_size=6, symmetric=True),
    "fp8": tt.fp8(),
    "fp8 tensor": tt.fp8("tensor"),
    "fp8 block": tt.ScaledFloat(block=(4, 4)),
    "mxfp4": tt.mxfp4(),
    "nvfp4": tt.nvfp4(),
    "nf4": tt.nf4(block_size=8),
    "nf4 nested": tt.Codebook(NF4, block_size=4, nested=True, nested_block_size=2),
    "nf4 rows": tt.Codebook(NF4, flat=False, block_size=8),
}


def weights(scheme, shapes, seed=0):
    torch.default_generator.manual_seed(seed)
    return [tt.Weight.encode(torch.randn(shape).to(torch.bfloat16), scheme) for shape in shapes]


def load(path, stored, expected, rename):
    """What a model of ``expected`` (tensors of values) gets, or the faults."""
    tt.save(stored, path)
    model = holder({name: torch.empty(t.shape, dtype=t.dtype) for name, t in expected.items()})
    plan = tt.plan_load(model, path, rename=rename)
    if plan.faults:
        plan.close()
        return plan.faults
    told = []
    report = plan.apply(progress=lambda *counts: told.append(counts))
    plan.close()
    assert told[-1] == (report.bytes, report.bytes)
    return named_tensors(model)


def check(path, stored, expected, rename, scheme, is_certain=None):
    """The values are those of ``expected`` to the bit and still quantized; or a fault names the target and why.

    ``is_certain`` says which of the two it must be.
    """
    got = load(path, stored, expected, rename)
    if isinstance(got, tuple):
        assert is_certain is not True, got
        assert all(fault.partition(":")[0] in expected and "dequantize it first" in fault for fault in got), got
        return False
    assert is_certain is not False
    for name, values in expected.items():
        assert isinstance(got[name], tt.Weight)
        assert got[name].scheme == scheme
        assert torch.equal(bits(got[name].dequantize().contiguous()), bits(values.contiguous())), name
    return True


@pytest.mark.parametrize("name", SCHEMES)
@examples(12)
@given(data=st.data())
def test_concat_and_split(tmp_path_factory, name, data):
    scheme, columns = SCHEMES[name], data.draw(st.sampled_from([8, 12, 32]))
    rows = data.draw(st.lists(st.integers(1, 12), min_size=2, max_size=3))
    given = weights(scheme, [(n, columns) for n in rows], data.draw(st.integers(0, 9)))
    stored = dict(zip("abc", given, strict=False))
    rule = tt.Concat(list(stored), "whole", sizes=rows)
    whole = torch.cat([w.dequantize() for w in given])
    by_ops = torch.cat(given)
    joins = isinstance(by_ops, tt.Weight)  # where the op can, so can the rule
    check(tmp_path_factory.mktemp("x") / "x", stored, {"whole": whole}, rule, scheme, joins or None)
    whole = tt.Weight.encode(whole, scheme)
    pieces = dict(zip(stored, whole.dequantize().split(rows), strict=True))
    try:
        whole.split(rows)
        cuts = True
    except tt.UnsupportedOpError:
        cuts = None
    check(tmp_path_factory.mktemp("x") / "x", {"whole": whole}, pieces, rule.inverse, scheme, cuts)


@pytest.mark.parametrize("name", SCHEMES)
@examples(6)
@given(data=st.data())
def test_stack_and_unbind_also_of_concatenated_and_transposed_ones(tmp_path_factory, name, data):
    scheme, columns = SCHEMES[name], data.draw(st.sampled_from([8, 32]))
    rows, count = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 3))
    given = weights(scheme, [(rows, columns)] * (2 * count))
    stored = {f"e.{i // 2}.w{i % 2}": w for i, w in enumerate(given)}
    rules = [tt.Concat([r"w0", r"w1"], "w"), EXPERTS]
    values = torch.stack(
        [torch.cat([a.dequantize(), b.dequantize()]) for a, b in zip(given[::2], given[1::2], strict=True)]
    )
    shared = scheme.layout((1, columns)).values()
    local = all(part.span == columns for part in shared)  # every row has parts of its own
    path = tmp_path_factory.mktemp("x")
    check(path / "a", stored, {"e.w": values}, rules, scheme, local or None)
    turned = [*rules, tt.Transpose("e.w", dims=(1, 2))]
    check(path / "b", stored, {"e.w": values.transpose(1, 2)}, turned, scheme, local or None)
    early = [tt.Transpose(r"w\d"), tt.Concat([r"w0", r"w1"], "w", dim=1), tt.Stack(EXPERTS.source, "e.w", dim=-1)]
    check(path / "c", stored, {"e.w": values.permute(2, 1, 0)}, early, scheme, local or None)
    whole = tt.Weight.encode(values, scheme)
    pieces = {key: whole.dequantize()[i // 2].chunk(2)[i % 2] for i, key in enumerate(stored)}
    back = [rule.inverse for rule in reversed(rules)]
    check(path / "d", {"e.w": whole}, pieces, back, scheme, local or None)
    halves = {"gate": whole.dequantize()[:, :rows], "up": whole.dequantize()[:, rows:]}
    check(path / "e", {"e.w": whole}, halves, tt.Split("e.w", ["gate", "up"], dim=1), scheme, local or None)


def test_a_row_scale_survives_everything_and_a_shared_one_is_a_fault(tmp_path):
    """Not only the law: which schemes must work, said once by name."""
    for name in ("int8", "int4", "fp8", "nf4", "mxfp4"):
        given = weights(SCHEMES[name], [(4, 32), (8, 32)])
        values = torch.cat([w.dequantize() for w in given])
        stored = dict(zip("ab", given, strict=True))
        assert check(tmp_path / name, stored, {"c": values}, tt.Concat(["a", "b"], "c"), SCHEMES[name])
    given = weights(SCHEMES["fp8 tensor"], [(4, 32), (8, 32)])
    (fault,) = load(tmp_path / "x", dict(zip("ab", given, strict=True)), {"c": values}, tt.Concat(["a", "b"], "c"))
    assert fault.startswith("c: a and b differ in 'scale', and one weight in fp8(granularity=tensor)")


def test_a_transposed_weight_is_a_view_of_its_parts(tmp_path):
    (weight,) = weights(tt.int8(), [(6, 4)])
    got = load(tmp_path / "x", {"w": weight}, {"w": weight.dequantize().t()}, tt.Transpose("w"))
    assert got["w"].stride() == (1, 4)
    assert got["w"].parts["qdata"].shape == (6, 4)
    (fault,) = load(
        tmp_path / "y",
        {"w": weight},
        {"q": torch.empty(6, 2), "k": torch.empty(6, 2)},
        tt.Split("w", ["q", "k"], dim=1),
    )[:1]
    assert fault.startswith("q: ")
    assert "would be cut along its last dimension" in fault


def test_pieces_in_different_schemes_are_a_fault(tmp_path):
    stored = {"q_proj.weight": weights(tt.int8(), [(4, 4)])[0], "k_proj.weight": torch.ones(2, 4, dtype=torch.bfloat16)}
    stored["v_proj.weight"] = stored["k_proj.weight"].clone()
    (fault,) = load(tmp_path / "x", stored, {"qkv.weight": torch.empty(8, 4)}, QKV)
    assert fault.startswith("qkv.weight: Concat cannot join q_proj.weight (torch.bfloat16 as int8)")
    assert "and k_proj.weight (torch.bfloat16), which differ" in fault


@pytest.mark.parametrize("meta", [True, False])
def test_float_pieces_are_encoded_once_as_a_whole(tmp_path, meta):
    torch.default_generator.manual_seed(0)
    stored = {f"{n}_proj.weight": torch.randn(8, 8) for n in "qkv"}
    tt.save(stored, tmp_path / "x")
    model = torch.nn.Module()
    model.qkv = torch.nn.Linear(8, 24, bias=False, device="meta" if meta else "cpu")
    weight = model.qkv.weight
    tt.load(model, tmp_path / "x", rename=QKV, quantize="int8")
    assert model.qkv.weight is weight
    expected = tt.Weight.encode(torch.cat(list(stored.values())), tt.int8())
    for name, part in expected.parts.items():
        assert torch.equal(model.qkv.weight.parts[name], part)


def test_blocks_that_a_piece_would_cut_are_a_fault(tmp_path):
    whole = tt.Weight.encode(torch.randn(256, 128), tt.fp8("block"))
    values = whole.dequantize()
    rule = tt.Split("whole", ["a", "b"])
    for sizes, fits in (((128, 128), True), ((100, 156), False)):
        pieces = dict(zip("ab", values.split(sizes), strict=True))
        rule = tt.Split("whole", ["a", "b"], sizes=sizes)
        assert check(tmp_path / str(fits), {"whole": whole}, pieces, rule, tt.fp8("block")) == fits


def test_half_rows_are_a_fault_also_where_shapes_are_as_before(tmp_path):
    (weight,) = weights(tt.int8(), [(4, 8)])
    swap = [tt.Split("w", ["a", "b"], dim=1), tt.Concat(["b", "a"], "w", dim=1)]
    (fault,) = load(tmp_path / "x", {"w": weight}, {"w": weight}, swap)
    assert fault.startswith("w: elements 4:8 of w are not whole rows of 8")


def test_pieces_that_end_inside_a_block_are_a_fault(tmp_path):
    """Experts of 5 rows under blocks of 4 rows: gate and up would share a block."""
    scheme = SCHEMES["fp8 block"]
    stored = dict(zip(("0.gate", "0.up", "1.gate", "1.up"), weights(scheme, [(5, 8)] * 4), strict=True))
    rules = [tt.Concat([r"\.gate", r"\.up"], ".both"), tt.Stack(r"(\d)\.both", "both")]
    (fault,) = load(tmp_path / "x", stored, {"both": torch.empty(2, 10, 8)}, rules)
    assert fault.startswith("both: 0.gate of shape (5, 8) would be joined inside a block of ScaledFloat(")


def test_blocks_that_depend_on_the_whole_are_a_fault(tmp_path, monkeypatch):
    monkeypatch.setitem(KINDS, "half scaled", None)  # and out again: the catalog has a row for every kind

    @dataclass(frozen=True)
    class HalfScaled(tt.Scheme):
        """One scale for each half of a tensor, so that what an entry covers depends on how many rows there are."""

        kind: ClassVar[str] = "half scaled"

        def layout(self, shape):
            return {
                "qdata": Part(shape, torch.int8, shape[1]),
                "scale": Part((2, 1), torch.float32, shape[0] * shape[1] // 2),
            }

        def encode(self, values):
            scale = values.abs().float().view(2, -1).amax(1, keepdim=True) / 127
            codes = (values.float().view(2, -1) / scale).round().to(torch.int8)
            return {"qdata": codes.view(values.shape), "scale": scale}

        def decode(self, parts, shape, dtype):
            return (parts["qdata"].view(2, -1) * parts["scale"]).view(shape).to(dtype)

    given = weights(HalfScaled(), [(4, 8), (4, 8)])
    values = torch.cat([w.dequantize() for w in given])
    (fault,) = load(tmp_path / "x", dict(zip("ab", given, strict=True)), {"c": values}, tt.Concat(["a", "b"], "c"))
    assert fault.startswith("c: 'scale' of a has other blocks than 'scale' of the joined weight")


def test_a_weight_that_the_model_holds_is_filled_from_rows(tmp_path):
    """In place, whatever scheme it has: the storage stays."""
    given = weights(tt.int8(), [(4, 8), (4, 8)])
    tt.save(dict(zip("ab", given, strict=True)), tmp_path / "x")
    model = torch.nn.Module()
    model.c = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16))
    tt.quantize(model, {"c": "int8"})
    held = model.c.parts["qdata"]
    tt.load(model, tmp_path / "x", rename=tt.Concat(["a", "b"], "c"))
    assert model.c.parts["qdata"] is held
    assert torch.equal(model.c.dequantize(), torch.cat([w.dequantize() for w in given]))
