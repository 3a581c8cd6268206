"""The laws of ``tt.testing`` for every scheme on tensors that Hypothesis draws, and further laws.

``tests/testing`` runs them on their own shapes.
"""

import copy
import io
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

import torchtether as tt
from tests.catalog import EACH_KIND, SCHEMES, each_quantized, each_scheme, slow_but
from tests.strategies import FLOATS, examples, filled, shapes
from torchtether.schemes import SCHEMES as KINDS
from torchtether.testing import check_scheme, check_tensor_subclass
from torchtether.weights.spec import WeightSpec

seeds = st.integers(0, 2**31 - 1)


def _same_bits(a, b):
    bits = [t.reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*bits)


def _same(a, b):
    return a.spec == b.spec and all(_same_bits(p, q) for p, q in zip(a.parts.values(), b.parts.values(), strict=True))


def _weight(row, seed=0, shape=(12, 64), dtype=torch.float32):
    return tt.Weight.encode(filled(shape, dtype, "normal", seed), row.scheme)


def test_every_scheme_has_a_row():
    ours = {kind for kind, one in KINDS.items() if one.__module__.startswith("torchtether.")}
    assert {row.scheme.kind for row in SCHEMES} == ours
    named = [tt.int8(), tt.int4(), tt.fp8(), tt.nf4(), tt.mxfp4(), tt.nvfp4(), tt.Plain()]
    assert set(named) <= {row.scheme for row in SCHEMES}


DRAWN = ("layout", "bound", "strides", "writes-back", "writes", "gather", "rows", "views")


@pytest.mark.parametrize("row", slow_but(SCHEMES, EACH_KIND))
@examples(2)
@given(data=st.data())
def test_the_laws_of_schemes_hold_for_drawn_shapes_and_numbers(row, data):
    """The laws of ``tt.testing`` on more than its own shapes; each example tries half of the patterns."""
    shape = data.draw(shapes([rank for rank in (1, 2, 3) if rank in row.ranks]))
    check_scheme(row.scheme, shapes=[shape], seed=data.draw(seeds), laws=DRAWN).check()


TURNED = ("detach", "clone", "empty-like", "dtype", "device", "flatten", "deepcopy", "pickle", "torch-save")


@each_scheme
def test_a_transposed_weight_keeps_the_laws_of_copies(row):
    check_tensor_subclass(lambda: tt.Weight.encode(torch.randn(12, 64), row.scheme).t(), laws=TURNED).check()


@each_scheme
def test_scales_follow_values_that_an_op_moves_far(row):
    """Kept scales must suit: after a large change the error is that of encoding afresh."""
    for factor in (0.013, 0.3, 7.0):
        weight = _weight(row)
        values = weight.parts.get("master", weight.dequantize()).float() * factor
        weight.mul_(factor)
        fresh = tt.Weight.encode(values, row.scheme)
        bound = row.scheme.bound(fresh.parts, (12, 64)).max().item()
        assert (weight.dequantize() - values).abs().max().item() <= bound * 1.01, factor


@each_scheme
def test_a_spec_survives_json(row):
    spec = WeightSpec.of((4, 64), torch.bfloat16, row.scheme, tt.Tie(("a", "b"))).permute((1, 0))
    assert WeightSpec.from_json(spec.to_json()) == spec


def _through_pickle(value):
    return pickle.loads(pickle.dumps(value))


def _through_torch_save(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.fixture
def defaults():
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


@each_scheme
@pytest.mark.parametrize("device", [None, "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_codes_do_not_depend_on_default_device_and_dtype(row, device, dtype, defaults):
    values = filled((64, 256), torch.float32, "normal", 0)  # enough for every loop
    expected, x = tt.Weight.encode(values, row.scheme), filled((2, 256), torch.float32, "normal", 1)
    product, shown = torch.nn.functional.linear(x, expected), expected.dequantize()
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    made = tt.Weight.encode(values, row.scheme)
    assert _same(made, expected)
    assert _same_bits(made.dequantize(), shown)
    assert _same_bits(torch.nn.functional.linear(x, made), product)


@each_scheme
def test_values_under_the_negative_bit_are_encoded(row):
    values = filled((64, 256), torch.float32, "normal", 0)
    made, expected = (tt.Weight.encode(given, row.scheme).dequantize() for given in (torch._neg_view(values), -values))
    assert torch.equal(made, expected)


@each_scheme
@pytest.mark.parametrize("send", [copy.deepcopy, _through_pickle, _through_torch_save], ids=lambda f: f.__name__)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_copies_keep_type_parameterness_requires_grad_and_spec(row, send, requires_grad):
    weight = _weight(row)
    tied = tt.Weight(weight.parts, weight.spec.replace(tie=tt.Tie(("emb.weight", "head.weight"))))
    parameter = torch.nn.Parameter(tied, requires_grad=requires_grad)
    parameter.note = "kept"
    again = send(parameter)
    assert type(again) is tt.Weight
    assert isinstance(again, torch.nn.Parameter)
    assert again.requires_grad is requires_grad
    assert again.note == "kept"
    assert _same(again, parameter)
    assert not isinstance(send(tied), torch.nn.Parameter)
    if send is not _through_pickle:  # which shares no storage between plain tensors either
        first, second = send([tied, tied.detach()])
        storages = [next(iter(w.parts.values())).untyped_storage().data_ptr() for w in (first, second)]
        assert storages[0] == storages[1]


@each_quantized
def test_the_outer_dtype_is_the_compute_dtype(row):
    weight = _weight(row)
    for dtype in FLOATS:
        there = weight.to(dtype)
        assert there.dtype == dtype
        assert there.dequantize().dtype == dtype
        assert all(_same_bits(p, q) for p, q in zip(there.parts.values(), weight.parts.values(), strict=True))
        assert _same_bits(there.to(torch.float32).dequantize(), weight.dequantize())
        assert torch.equal(there.dequantize(), row.scheme.decode(weight.parts, (12, 64), dtype))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_plain_holds_what_is_not_finite(bad):
    """All other schemes refuse it: law ``finite``."""
    values = torch.tensor([[1.0, bad]])
    assert _same_bits(tt.Weight.encode(values, tt.Plain()).dequantize(), values)


@each_scheme
def test_copy_in_every_direction(row):
    weight, other = _weight(row), _weight(row, seed=1)
    plain = torch.zeros(12, 64, dtype=torch.bfloat16)
    plain.copy_(weight)
    assert torch.equal(plain, weight.dequantize().to(torch.bfloat16))
    storages = [p.data_ptr() for p in weight.parts.values()]
    weight.copy_(other)
    assert all(_same_bits(p, q) for p, q in zip(weight.parts.values(), other.parts.values(), strict=True))
    weight.copy_(_weight(SCHEMES[1], seed=2))  # another scheme: re-encoded in the held one
    assert weight.scheme == row.scheme
    values = filled((12, 64), torch.float64, "normal", 3)
    weight.copy_(values)
    assert torch.equal(weight.dequantize(), tt.Weight.encode(values.to(weight.dtype), row.scheme).dequantize())
    assert storages == [p.data_ptr() for p in weight.parts.values()]
    assert weight.dtype == torch.float32
    turned = _weight(row).t()
    turned.copy_(values.t())
    assert torch.equal(turned.t().dequantize(), weight.dequantize())


@each_scheme
def test_values_that_are_held_change_nothing(row):
    """DDP writes the values of every parameter back when it wraps a model."""
    weight = torch.nn.Parameter(_weight(row), requires_grad=False)
    before = {name: part.clone() for name, part in weight.parts.items()}
    weight.copy_(weight.dequantize())
    weight.t().copy_(weight.dequantize().t())
    weight.data = weight.dequantize()
    assert all(_same_bits(part, before[name]) for name, part in weight.parts.items())


COMPILED = """
    plain int8 int4 int3-group8 int8-block fp8 fp8-block mxfp4 nvfp4 nf4 nf4-double nf4-rows codebook-uneven
    super-blocks-table
""".split()
IN_INDUCTOR = "plain int8 int4 fp8-block nf4-double super-blocks-table".split()
"""One of each family: each takes a compiler some seconds."""


class _Tied(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.emb, self.head = torch.nn.Embedding(12, 64), torch.nn.Linear(64, 12, bias=False)
        self.emb.weight = self.head.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.gain = torch.nn.Parameter(torch.ones(64))

    def forward(self, tokens):
        return torch.relu(self.head(self.emb(tokens) * self.gain))


def _tokens(batch):
    return torch.arange(batch * 3).view(batch, 3) % 12


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, of its tree specs
@pytest.mark.parametrize("row", slow_but([row for row in SCHEMES if row.id in COMPILED], {"plain", "int8", "nf4"}))
def test_a_tied_module_compiles_and_exports_whole(row):
    module = _Tied(_weight(row))
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=graphs)
    for batch in (3, 5, 7, 9):
        torch.testing.assert_close(compiled(_tokens(batch)), module(_tokens(batch)))
    assert graphs.frame_count <= 2  # torch's own: one for the first shape, one for all others
    compiled(_tokens(3)).sum().backward()
    grad, module.gain.grad = module.gain.grad, None
    module(_tokens(3)).sum().backward()
    torch.testing.assert_close(grad, module.gain.grad)
    exported = torch.export.export(module, (_tokens(3),))
    torch.testing.assert_close(exported.module()(_tokens(3)), module(_tokens(3)))
    decomposed = exported.run_decompositions().module()
    torch.testing.assert_close(decomposed(_tokens(3)), module(_tokens(3)), rtol=1e-5, atol=1e-5)  # other sums


@pytest.mark.slow
@pytest.mark.usefixtures("cxx")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("row", [row for row in SCHEMES if row.id in IN_INDUCTOR], ids=lambda row: row.id)
def test_a_tied_module_runs_in_inductor(row):
    """The compiler that users get, which makes code of its own; needs a C++ compiler."""
    module = _Tied(_weight(row))
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True)
    torch.testing.assert_close(compiled(_tokens(5)), module(_tokens(5)), rtol=1e-5, atol=1e-5)
