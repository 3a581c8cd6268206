"""The memory of rules: a piece reads its own rows, and at most one stored tensor is held beside the model."""

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchtether as tt
from tests.checkpoint.test_slices import count  # noqa: F401 - a fixture
from tests.renaming.test_rename_rules import EXPERTS, holder
from torchtether.renaming import renamed_checkpoint as arranged
from torchtether.renaming.renamed_checkpoint import _bounded

MIB = 2**20
ROWS, COLUMNS, EXPERTS_IN_ALL = 1024, 2048, 16  # 8 MiB each, 256 MiB in all
FUSED = [tt.Concat(["w1", "w3"], "w"), EXPERTS]
SPLIT = [rule.inverse for rule in reversed(FUSED)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=4), st.integers(1, 40))
def test_bounded_boxes_make_up_the_box_in_order(ranges, limit):
    box = tuple((start, start + size) for start, size in ranges)
    whole = torch.arange(9 ** len(box)).view([9] * len(box))
    boxes = list(_bounded(box, limit))
    parts = [whole[tuple(slice(*one) for one in part)].flatten() for part in boxes]
    assert all(0 < part.numel() <= limit for part in parts)
    flat = torch.cat(parts) if parts else whole.new_empty(0)
    assert torch.equal(flat, whole[tuple(slice(*one) for one in box)].flatten())


@pytest.mark.parametrize("piece", [1 << 22, 64])
@pytest.mark.parametrize("scheme", [None, "int8"])
def test_each_piece_reads_its_own_rows_alone(tmp_path, count, monkeypatch, scheme, piece):  # noqa: F811
    monkeypatch.setattr(arranged, "_PIECE", piece)
    values = torch.randn(6, 40, 32)
    tt.save({"e.w": tt.Weight.encode(values, tt.int8()) if scheme else values}, tmp_path / "x")
    model = holder({f"e.{i}.{w}": torch.empty(20, 32) for i in range(6) for w in ("w1", "w3")})
    plan = tt.plan_load(model, tmp_path / "x", rename=SPLIT)
    assert plan.faults == ()
    before = count[0]
    plan.apply(only="e.2.w3")
    nbytes = model.e.get_submodule("2").w3.nbytes
    assert count[0] - before == nbytes
    plan.apply()
    assert count[0] - before == 12 * nbytes
    plan.close()


def experts(scheme, fused, turned):
    """What is stored, and a model on meta of what it becomes."""
    values = torch.randn(ROWS, COLUMNS)
    one = tt.Weight.encode(values, tt.int8()) if scheme else values
    pieces = {f"e.{i}.{w}": one.clone() for i in range(EXPERTS_IN_ALL) for w in ("w1", "w3")}
    shape = (EXPERTS_IN_ALL, COLUMNS, 2 * ROWS) if turned else (EXPERTS_IN_ALL, 2 * ROWS, COLUMNS)
    whole = torch.empty(shape, device="meta")
    if fused:
        return pieces, holder({"e.w": whole})
    joined = torch.stack([torch.cat([one, one])] * EXPERTS_IN_ALL)
    return {"e.w": joined}, holder({name: torch.empty(ROWS, COLUMNS, device="meta") for name in pieces})


def scratch_of_load(path, model, rules):
    """Bytes above the final model, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:  # imports
        tt.save({"a": tt.Weight.encode(torch.ones(4, 4), tt.int8())}, folder)
        tt.load(holder({"b.0": torch.empty(4, 1)}), folder, rename=[], strict=False)
    report = tt.load(model, path, rename=rules)
    return report.peak - sum(tensor.nbytes for tensor in model.state_dict().values())


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("scheme", "turned"), [(None, False), (None, True), ("int8", False)])
def test_scratch_is_one_stored_tensor(tmp_path, scheme, turned, fused):
    if turned and not fused:
        pytest.skip("one direction is enough")
    stored, model = experts(scheme, fused, turned)
    tt.save(stored, tmp_path / "x")
    bar = 64 * MIB + (8 * MIB if fused else 0)  # split pieces do not even need the tensor that is stored
    rules = [*FUSED, tt.Transpose("e.w", dims=(1, 2))] if turned else FUSED if fused else SPLIT
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        scratch = pool.submit(scratch_of_load, tmp_path / "x", model, rules).result()
    print(f"{scratch / MIB:.1f} MiB")
    assert scratch <= bar
