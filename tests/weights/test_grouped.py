"""``F.grouped_mm`` on stacked Weights, which mixtures of experts call: forward, backward and compiled."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import torchtether as tt
from tests.catalog import SCHEMES
from tests.fake_cuda import fake_cuda
from torchtether.weights.dispatch import RULES

GROUPS, OUT, IN = 5, 48, 64
FITTING = [row for row in SCHEMES if 3 in row.ranks]
EPS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def experts(scheme, dtype=torch.float32):
    torch.manual_seed(1)
    return tt.Weight.encode(torch.randn(GROUPS, OUT, IN), scheme).to(dtype)


def judge(rows, values, offs):
    """The product in float64, group by group."""
    made, start = torch.zeros(rows.shape[0], values.shape[2], dtype=torch.float64), 0
    for group, stop in enumerate(offs.tolist()):
        made[start:stop] = rows[start:stop].double() @ values[group].double()
        start = stop
    return made


def is_near(got, wanted, dtype):
    return (got.double() - wanted).norm() <= EPS[dtype] * wanted.norm() + 1e-12


@pytest.mark.parametrize("row", FITTING, ids=lambda row: row.id)
@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("is_transposed", [True, False], ids=["transposed", "as stored"])
def test_each_group_is_multiplied_with_its_matrix(row, dtype, is_transposed):
    weight = experts(row.scheme, dtype)
    used = weight.transpose(-2, -1) if is_transposed else weight
    rows = torch.randn(9, used.shape[1]).to(dtype).requires_grad_()
    offs = torch.tensor([2, 2, 5, 9, 9], dtype=torch.int32)
    made = F.grouped_mm(rows, used, offs=offs)
    values = weight.dequantize().transpose(-2, -1) if is_transposed else weight.dequantize()
    assert made.shape == (9, used.shape[2])
    assert made.dtype == dtype
    assert is_near(made, judge(rows.detach(), values, offs), dtype)
    grad = torch.randn_like(made)
    made.backward(grad)
    assert is_near(rows.grad, judge(grad, values.transpose(-2, -1), offs), dtype)


@given(counts=st.lists(st.integers(0, 4), min_size=GROUPS, max_size=GROUPS), behind=st.integers(0, 3))
def test_any_sizes_of_groups(counts, behind):
    weight, total = experts(tt.int8()), sum(counts)
    rows, offs = torch.randn(total + behind, IN), torch.tensor(counts).cumsum(0).int()
    made = F.grouped_mm(rows, weight.transpose(-2, -1), offs=offs)
    assert is_near(made[:total], judge(rows, weight.dequantize().transpose(-2, -1), offs)[:total], torch.float32)
    assert not made[total:].any()


def test_a_trainable_weight_has_the_gradient_of_its_values():
    weight = torch.nn.Parameter(experts(tt.int8()))
    rows, offs = torch.randn(9, IN), torch.tensor([2, 2, 5, 9, 9], dtype=torch.int32)
    plain = weight.detach().dequantize().requires_grad_()
    for used in (weight, plain):
        F.grouped_mm(rows, used.transpose(-2, -1), offs=offs).square().sum().backward()
    torch.testing.assert_close(weight.grad, plain.grad, rtol=1e-4, atol=1e-4)  # sums of another order, squared


def test_gradients_of_frozen_matrices_that_an_op_returns_take_no_memory():
    weight, rows, grad = experts(tt.int8()), torch.randn(9, IN), torch.randn(9, OUT)
    offs = torch.tensor([2, 2, 5, 9, 9], dtype=torch.int32)
    backward = RULES["transformers::grouped_mm_fallback_backward"]
    of_rows, of_weight = backward(None, rows, weight.transpose(-2, -1), offs, grad)
    assert is_near(of_rows, judge(grad, weight.dequantize(), offs), torch.float32)
    assert of_weight.shape == (GROUPS, IN, OUT)
    assert (of_weight.untyped_storage().nbytes(), of_weight.any()) == (4, False)


def test_an_op_of_another_library_refuses_to_round_inputs_of_matrices_as_they_lie():
    """Its gradient would round those of the products, as that of ``F.grouped_mm`` would."""
    weight, offs = experts(tt.int8()), torch.tensor([2, 2, 5, 9, 9], dtype=torch.int32)
    weight.set_activations("int8")
    with pytest.raises(tt.UnsupportedOpError, match="multiplied without a transpose, cannot round their inputs"):
        RULES["transformers::grouped_mm_fallback"](None, torch.randn(9, OUT), weight, offs)


def test_decoded_values_meet_the_op_that_was_called():
    """``F.grouped_mm`` has fewer dtypes in graphs than an op that another library defines to replace it."""
    weight, rows, grad = experts(tt.Plain()), torch.randn(9, IN), torch.randn(9, OUT)
    offs, turned = torch.tensor([2, 2, 5, 9, 9], dtype=torch.int32), weight.transpose(-2, -1)

    def op(*given):
        assert not any(isinstance(one, tt.Weight) for one in given)
        assert given[1].shape == turned.shape
        return (judge(given[3], given[1].transpose(-2, -1), offs), None) if len(given) > 3 else judge(*given)

    made = RULES["transformers::grouped_mm_fallback"](op, rows, turned, offs)
    assert torch.equal(made, judge(rows, turned.dequantize(), offs))
    of_rows, _ = RULES["transformers::grouped_mm_fallback_backward"](op, rows, turned, offs, grad)
    assert torch.equal(of_rows, judge(grad, weight.dequantize(), offs))


@pytest.mark.usefixtures("cxx")
@pytest.mark.parametrize("scheme", [tt.int8(), tt.int4(group_size=32), tt.nf4(), tt.mxfp4()], ids=str)
def test_compiled_without_a_break_forward_and_backward(scheme):
    weight = experts(scheme)

    def block(rows, offs):
        return F.grouped_mm(rows.relu(), weight.transpose(-2, -1), offs=offs) * 2

    compiled = torch.compile(block, fullgraph=True)
    for counts in ([2, 0, 3, 4, 0], [0, 1, 1, 0, 7]):
        offs = torch.tensor(counts).cumsum(0).int()
        rows = torch.randn(9, IN, requires_grad=True)
        again = rows.detach().clone().requires_grad_()
        made, wanted = compiled(rows, offs), block(again, offs)
        torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)
        made.square().sum().backward()
        wanted.square().sum().backward()
        torch.testing.assert_close(rows.grad, again.grad, rtol=1e-4, atol=1e-4)


def test_matrices_that_share_a_block_are_multiplied_all_the_same():
    torch.manual_seed(1)
    weight = tt.Weight.encode(torch.randn(3, 5, 8), tt.nf4())  # 40 values each, blocks of 64
    rows, offs = torch.randn(4, 8), torch.tensor([1, 1, 4], dtype=torch.int32)
    made = F.grouped_mm(rows, weight.transpose(-2, -1), offs=offs)
    assert is_near(made, judge(rows, weight.dequantize().transpose(-2, -1), offs), torch.float32)


def test_only_the_matrices_of_groups_with_rows_are_decoded(monkeypatch):
    weight, decoded = experts(tt.fp8()), []
    original = type(weight.scheme).decode
    monkeypatch.setattr(
        type(weight.scheme),
        "decode",
        lambda self, parts, shape, dtype: decoded.append(shape) or original(self, parts, shape, dtype),
    )
    F.grouped_mm(torch.randn(3, IN), weight.transpose(-2, -1), offs=torch.tensor([0, 1, 1, 3, 3]).int())
    assert sum(torch.Size(shape).numel() for shape in decoded) <= 2 * OUT * IN


def test_fake_tensors_have_the_shape():
    with fake_cuda():
        parts = tt.int8().empty((GROUPS, OUT, IN), torch.bfloat16, "cuda")
        weight = tt.Weight(parts, tt.WeightSpec.of((GROUPS, OUT, IN), torch.bfloat16, tt.int8()))
        rows = torch.empty(7, IN, dtype=torch.bfloat16, device="cuda")
        offs = torch.empty(GROUPS, dtype=torch.int32, device="cuda")
        made = F.grouped_mm(rows, weight.transpose(-2, -1), offs=offs)
    assert (made.shape, made.device.type) == ((7, OUT), "cuda")
