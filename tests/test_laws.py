"""Laws of every scheme: what holds for any tensor that it can encode."""

import copy
import io
import math
import pickle
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

import torchtether as tt
from tests.catalog import SCHEMES, each_quantized, each_scheme
from tests.strategies import FLOATS, filled, tensors
from torchtether.schemes import SCHEMES as KINDS
from torchtether.schemes import scheme_from_json
from torchtether.spec import WeightSpec

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


@each_scheme
@settings(max_examples=40)
@given(data=st.data())
def test_decode_of_encode_is_within_the_stated_bound(row, data):
    values = data.draw(tensors(ranks=row.ranks))
    try:
        parts = row.scheme.encode(values)
    except tt.SchemeError as error:
        assert "double" in str(error) or "nested" in str(error), error  # absmax too uneven for 8-bit scales
        return
    layout = row.scheme.layout(tuple(values.shape))
    assert {n: (tuple(p.shape), p.dtype) for n, p in parts.items()} == {
        n: (p.shape, p.dtype or values.dtype) for n, p in layout.items()
    }
    decoded = row.scheme.decode(parts, tuple(values.shape), torch.float32)
    bound = row.scheme.bound(parts, tuple(values.shape))
    slack = 1e-6 * values.float().abs() + 1e-30
    assert ((decoded - values.float()).abs() <= bound + slack).all()


@each_scheme
@settings(max_examples=25)
@given(data=st.data())
def test_writing_back_what_was_read_changes_nothing(row, data):
    """Encoding decoded values keeps the values, however often: an optimizer step of zero must not wear them down."""
    weight = tt.Weight.encode(data.draw(tensors(ranks=row.ranks)).float(), row.scheme)
    values = weight.dequantize()
    for _ in range(5):
        weight.mul_(1.0)
    assert _same_bits(weight.dequantize(), values)


@each_scheme
@settings(max_examples=25)
@given(data=st.data())
def test_what_an_op_writes_is_within_the_stated_bound(row, data):
    """Kept scales do not make the error larger than the bound."""
    held = data.draw(tensors(ranks=row.ranks)).float()
    weight = tt.Weight.encode(held, row.scheme)
    factor = data.draw(st.sampled_from([0.0, -1.0, 0.999, 1.001, 1.004, 0.5, 3.0]))
    expected = weight.dequantize() * factor
    weight.mul_(factor)
    bound = row.scheme.bound(weight.parts, tuple(held.shape))
    assert ((weight.dequantize() - expected).abs() <= bound * (1 + 2.0**-8) + 1e-6 * expected.abs() + 1e-30).all()


@each_scheme
@pytest.mark.parametrize("factor", [0.013, 0.3, 7.0])
def test_scales_follow_values_that_an_op_moves_far(row, factor):
    """Kept scales must suit: after a large change the error is that of encoding afresh."""
    weight = _weight(row)
    values = weight.dequantize() * factor
    weight.mul_(factor)
    fresh = tt.Weight.encode(values, row.scheme)
    bound = row.scheme.bound(fresh.parts, (12, 64)).max().item()
    assert (weight.dequantize() - values).abs().max().item() <= bound * 1.01


@each_scheme
@settings(max_examples=15)
@given(data=st.data())
def test_gather_is_decode_then_index(row, data):
    values = data.draw(tensors(ranks=[r for r in row.ranks if r > 1], dtypes=(torch.float32,), patterns=("normal",)))
    weight = tt.Weight.encode(values, row.scheme)
    index = torch.tensor(data.draw(st.lists(st.integers(0, values.shape[0] - 1), max_size=6)), dtype=torch.int64)
    got = row.scheme.gather(weight.parts, tuple(values.shape), index, torch.bfloat16)
    assert _same_bits(got, row.scheme.decode(weight.parts, tuple(values.shape), torch.bfloat16)[index])


@each_scheme
@settings(max_examples=25)
@given(data=st.data())
def test_rows_are_cut_and_joined_without_changing_a_value(row, data):
    """Cutting either shares storage and keeps values, or raises; joining the cuts gives the whole back."""
    rows, columns = data.draw(st.integers(2, 12)), data.draw(st.sampled_from((8, 24, 64, 70)))
    weight = tt.Weight.encode(filled((rows, columns), torch.float32, "normal", data.draw(seeds)), row.scheme)
    at = data.draw(st.integers(0, rows))
    try:
        top, bottom = weight[:at], weight[at:]
    except tt.UnsupportedOpError as error:
        assert "cut a block" in str(error)
        return
    values = weight.dequantize()
    assert torch.equal(top.dequantize(), values[:at])
    assert torch.equal(bottom.dequantize(), values[at:])
    whole = torch.cat([top, bottom])
    assert torch.equal(whole if type(whole) is torch.Tensor else whole.dequantize(), values)
    if isinstance(whole, tt.Weight):
        assert _same(whole, weight)


@each_scheme
def test_a_scheme_survives_json_hash_and_equality(row):
    again = scheme_from_json(row.scheme.to_json())
    assert again == row.scheme
    assert hash(again) == hash(row.scheme)
    spec = WeightSpec.of((4, 64), torch.bfloat16, row.scheme, tt.Tie(("a", "b"))).permute((1, 0))
    assert WeightSpec.from_json(spec.to_json()) == spec


@each_scheme
def test_flatten_and_unflatten_are_inverse(row):
    weight = _weight(row).t()
    names, context = weight.__tensor_flatten__()
    inner = {name: getattr(weight, name) for name in names}
    again = tt.Weight.__tensor_unflatten__(inner, context, weight.shape, weight.stride())
    assert _same(again, weight)
    assert again.stride() == weight.stride()


def _through_pickle(value):
    return pickle.loads(pickle.dumps(value))


def _through_torch_save(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


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
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_outer_dtype_is_the_compute_dtype(row, dtype):
    weight = _weight(row)
    there = weight.to(dtype)
    assert there.dtype == dtype
    assert there.dequantize().dtype == dtype
    assert all(_same_bits(p, q) for p, q in zip(there.parts.values(), weight.parts.values(), strict=True))
    assert _same_bits(there.to(torch.float32).dequantize(), weight.dequantize())
    assert torch.equal(there.dequantize(), row.scheme.decode(weight.parts, (12, 64), dtype))


@each_scheme
@pytest.mark.parametrize("swap", [False, True])
def test_module_conversions_mean_what_they_say(row, swap):
    for convert, dtype in (
        (lambda m: m.bfloat16(), torch.bfloat16),
        (lambda m: m.half(), torch.float16),
        (lambda m: m.double(), torch.float64),
        (lambda m: m.to(torch.bfloat16), torch.bfloat16),
    ):
        module = torch.nn.Linear(64, 12)
        module.weight = torch.nn.Parameter(_weight(row))
        held = module.weight
        torch.__future__.set_swap_module_params_on_conversion(swap)
        try:
            convert(module)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert module.weight is held
        assert isinstance(held, tt.Weight)
        assert held.dtype == module.bias.dtype == dtype
        assert module(torch.ones(2, 64, dtype=dtype)).dtype == dtype


@each_scheme
def test_meta_knows_everything_but_the_numbers(row):
    real = _weight(row)
    ghost = tt.Weight.encode(torch.empty(12, 64, device="meta"), row.scheme)
    assert ghost.spec == real.spec
    assert ghost.device.type == "meta"
    assert {n: (p.shape, p.dtype) for n, p in ghost.parts.items()} == {
        n: (p.shape, p.dtype) for n, p in real.parts.items()
    }
    assert ghost.dequantize().device.type == "meta"
    assert real.to("meta").spec == real.spec
    room = torch.empty_like(ghost, device="cpu")
    assert room.spec == real.spec
    room.copy_(real)
    assert _same(room, real)


@each_scheme
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused_and_nothing_is_written(row, bad):
    values = torch.ones(12, 64)
    values[5, 7] = bad
    if row.scheme.transparent:
        assert torch.equal(tt.Weight.encode(values, row.scheme).dequantize().isfinite(), values.isfinite())
        return
    with pytest.raises(tt.SchemeError) as caught:
        tt.Weight.encode(values, row.scheme)
    assert "\n" not in str(caught.value)
    weight = _weight(row)
    before = weight.dequantize()
    with pytest.raises(tt.SchemeError):
        weight.copy_(values)
    with pytest.raises(tt.SchemeError):
        weight.mul_(bad)
    assert torch.equal(weight.dequantize(), before)


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


COMPILED = """
    plain int8 int4 int3-group8 int8-block fp8 fp8-block mxfp4 nvfp4 nf4 nf4-double nf4-rows
""".split()


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


@pytest.mark.parametrize("row", [row for row in SCHEMES if row.id in COMPILED], ids=lambda row: row.id)
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


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("row", [row for row in SCHEMES if row.id in COMPILED], ids=lambda row: row.id)
def test_a_tied_module_runs_in_inductor(row):
    """The compiler that users get, which makes code of its own; needs a C++ compiler."""
    module = _Tied(_weight(row))
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True)
    torch.testing.assert_close(compiled(_tokens(5)), module(_tokens(5)), rtol=1e-5, atol=1e-5)
