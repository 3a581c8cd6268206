"""The promises of Weight beyond the laws over schemes and ops."""

import copy
import importlib
import os
import time
from functools import partial

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

import torchtether as tt
from tests.catalog import FUNCTIONS, SCHEMES, each_scheme, few_schemes, rand, sample
from torchtether.geometry.views import contiguous_stride
from torchtether.weights import graph_cache_key as _code
from torchtether.weights.graph_cache_key import digest_of_code
from torchtether.weights.inner import EmptyStorage


def weight_of(scheme=None, rows=16, columns=64, **kwargs):
    return tt.Weight.encode(rand(rows, columns) - 0.7, scheme or tt.int8(), **kwargs)


def test_it_can_be_swapped_with_a_parameter():
    """``torch.utils.swap_tensors`` refuses tensors whose slots differ, so Weight has none."""
    assert "__slots__" not in vars(tt.Weight)
    parameter, weight = torch.nn.Parameter(rand(16, 64)), torch.nn.Parameter(weight_of(), requires_grad=False)
    values = weight.dequantize()
    torch.utils.swap_tensors(parameter, weight)
    assert isinstance(parameter, tt.Weight)
    assert torch.equal(parameter.dequantize(), values)
    assert type(weight) is torch.nn.Parameter


def test_user_attributes_and_grads_are_not_parts():
    weight = torch.nn.Parameter(weight_of())
    weight.note = "mine"
    weight.grad = torch.ones(16, 64)
    assert set(weight.parts) == {"qdata", "scale"}
    with pytest.raises(TypeError):
        weight.parts["scale"] = torch.ones(1)
    assert not hasattr(weight.detach(), "note")  # as with any tensor


@few_schemes
def test_sharing_memory_shares_every_part_and_does_not_crash(row):
    module = torch.nn.Linear(64, 16)
    module.weight = torch.nn.Parameter(weight_of(row.scheme), requires_grad=False)
    expected = module(torch.ones(2, 64))
    held = module.weight
    module.share_memory()
    assert module.weight is held
    assert held.is_shared()
    assert all(part.is_shared() for part in held.parts.values())
    assert torch.equal(module(torch.ones(2, 64)), expected)


class Halves(tt.WrapperTensor):
    inner_names = ("held",)

    def __new__(cls, held):
        return super().__new__(cls, dtype=torch.float32, shape=held.shape, held=held)

    def decode(self):
        return self.held.float()


STORAGES = {"weight": weight_of, "plain": lambda: weight_of(tt.Plain()), "wrapper": lambda: Halves(torch.ones(16, 64))}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("make", STORAGES.values(), ids=STORAGES)
def test_the_storage_without_memory_refuses_what_would_end_the_process(make):
    tensor = make()
    held = tensor.untyped_storage()
    assert held is tensor.untyped_storage() is tensor.storage()._untyped_storage
    assert (held.nbytes(), held.device.type, held._cdata) == (
        16 * 64 * 4,
        "cpu",
        tensor.detach().untyped_storage()._cdata,
    )
    room = torch.UntypedStorage(held.nbytes())
    asks = {
        "share_memory_": (),
        "copy_": (room,),
        "byteswap": (torch.float32,),
        "float": (),
        "__setitem__": (0, 1),
        "_share_fd_cpu_": (),
        "_share_filename_cpu_": (),
        "_set_from_file": (None, 0, False, 4),
    }
    for name, args in asks.items():
        with pytest.raises(tt.UnsupportedOpError, match="dequantize"):
            getattr(tensor.untyped_storage(), name)(*args)
    with pytest.raises(tt.UnsupportedOpError, match="share_memory_"):
        tensor.storage().share_memory_()
    with pytest.raises(tt.UnsupportedOpError):
        torch.multiprocessing.reductions.reduce_storage(held)
    with pytest.raises(RuntimeError, match="invalid python storage"):
        held.data_ptr()
    with pytest.raises(RuntimeError):  # else it would take all of one size for one
        safetensors.torch.storage_ptr(tensor)
    assert type(room) is torch.UntypedStorage
    assert "4096 bytes" in repr(held)
    if isinstance(tensor, tt.Weight):
        assert torch.Tensor.share_memory_(tensor) is tensor
        assert torch.Tensor.is_shared(tensor) is True


def test_every_refusal_of_the_storage_is_of_something_that_torch_has():
    assert {name for name in vars(EmptyStorage) if not name.startswith("__")} <= set(dir(torch.UntypedStorage))


def _clear(weight, done):
    weight.zero_()
    done.put((weight.spec, isinstance(weight, torch.nn.Parameter)))


@pytest.mark.parametrize("scheme", [tt.Plain(), tt.int8()], ids=["plain", "int8"])
def test_another_process_sees_the_same_memory_and_the_same_tie(scheme):
    context = torch.multiprocessing.get_context("fork")
    tie = tt.Tie(("emb.weight", "head.weight"))
    weight = torch.nn.Parameter(weight_of(scheme, tie=tie), requires_grad=False).share_memory_()
    done = context.SimpleQueue()
    child = context.Process(target=_clear, args=(weight, done))
    child.start()
    spec, is_parameter = done.get()
    child.join(30)
    assert (spec.tie, is_parameter) == (tie, True)
    assert not weight.dequantize().any()


def test_is_pinned_asks_every_part():
    assert not weight_of().is_pinned()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinning memory needs a GPU")
def test_pin_memory_pins_every_part():
    pinned = weight_of().pin_memory()
    assert pinned.is_pinned()
    assert all(part.is_pinned() for part in pinned.parts.values())


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (1, 1), (3, 4), (0, 4), (2, 1, 3), (1, 1, 5), (4, 0)])
def test_any_permutation_finds_its_base(shape):
    """Sizes of 1 make strides ambiguous; the spec still knows which dimension is the quantized one."""
    import itertools

    values = rand(*shape)
    for order in itertools.permutations(range(len(shape))):
        weight = tt.Weight.encode(values, tt.Plain() if 0 in shape else tt.Affine(block=(1, None))).permute(order)
        assert weight.shape == values.permute(order).shape
        if not weight.scheme.transparent:
            assert weight.spec.base == shape
            torch.testing.assert_close(weight.dequantize(), values.permute(order), atol=0.01, rtol=0)
            back = weight.permute([order.index(d) for d in range(len(shape))])
            assert torch.equal(
                back.dequantize(), weight.dequantize().permute([order.index(d) for d in range(len(shape))])
            )
            assert back.stride() == contiguous_stride(shape)


def test_a_dtype_that_cannot_compute_gives_values():
    weight = weight_of()
    assert type(weight.to(torch.int32)) is torch.Tensor
    assert type(weight.to(torch.complex64)) is torch.Tensor
    assert torch.equal(weight.to(torch.complex64).real, weight.dequantize())


def test_plain_trains_like_the_tensor_it_wraps():
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    ):
        plain = torch.nn.Linear(64, 16)
        wrapped = copy.deepcopy(plain)
        wrapped.weight = torch.nn.Parameter(tt.Weight.encode(wrapped.weight, tt.Plain()))
        optimizers = [make(m.parameters()) for m in (plain, wrapped)]
        for step in range(3):
            for module, optimizer in zip((plain, wrapped), optimizers, strict=True):
                optimizer.zero_grad()
                module(rand(5, 64, seed=step)).square().sum().backward()
                optimizer.step()
        assert torch.equal(wrapped.weight.dequantize(), plain.weight)


def test_convolutions_decode_the_weight():
    for convolution, x in ((torch.nn.Conv1d(4, 8, 3), rand(2, 4, 9)), (torch.nn.Conv2d(4, 8, 3), rand(2, 4, 9, 9))):
        twin = copy.deepcopy(convolution)
        convolution.weight = torch.nn.Parameter(tt.Weight.encode(convolution.weight, tt.int8()), requires_grad=False)
        twin.weight.data = convolution.weight.dequantize()
        x.requires_grad_()
        assert torch.equal(convolution(x), twin(x))
        convolution(x).sum().backward()


def test_recurrent_modules_run_with_quantized_weights():
    lstm = torch.nn.LSTM(8, 8)
    twin = copy.deepcopy(lstm)
    lstm.weight_hh_l0 = torch.nn.Parameter(tt.Weight.encode(lstm.weight_hh_l0, tt.int8()), requires_grad=False)
    twin.weight_hh_l0.data = lstm.weight_hh_l0.dequantize()
    x = rand(3, 2, 8)
    torch.testing.assert_close(lstm(x)[0], twin(x)[0])


def test_recurrent_modules_on_a_gpu_leave_weights_where_they_lie():
    """There modules call this whenever their weights change, to put plain ones into one memory."""
    lstm = torch.nn.LSTM(8, 8)
    tt.quantize(lstm, {"weight_hh_l0": "int8"})
    before = [weight.data_ptr() for weight in lstm.parameters()]
    torch._cudnn_rnn_flatten_weight(list(lstm.parameters()), 4, 8, 2, 8, 0, 1, False, False)
    assert [weight.data_ptr() for weight in lstm.parameters()] == before


@pytest.mark.parametrize(
    "kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN, partial(torch.nn.RNN, nonlinearity="relu")]
)
def test_recurrent_modules_take_batches_first(kind):
    """Torch repeats the weights of some for each matrix of such a batch."""
    module = kind(64, 64, batch_first=True, dtype=torch.float64).requires_grad_(False)
    tt.quantize(module, {"*weight*": "int8"})
    x = rand(2, 5, 64).double().requires_grad_()
    made, expected = (one(x)[0] for one in (module, tt.dequantize(copy.deepcopy(module))))
    torch.testing.assert_close(made, expected)
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), x)[0] for out in (made, expected)))
    assert torch.equal(tt.quantize_activations(module, "int8")(x)[0], made)  # for F.linear only


ATTENTION = {
    "one": (dict(), ["in_proj_weight"]),
    "three": (dict(kdim=32, vdim=16), ["q_proj_weight", "k_proj_weight", "v_proj_weight"]),
}


@pytest.mark.parametrize(("more", "names"), ATTENTION.values(), ids=ATTENTION)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_attention_runs_with_quantized_weights(more, names, batch_first, grad):
    module = torch.nn.MultiheadAttention(64, 4, batch_first=batch_first, **more).eval().requires_grad_(False)
    tt.quantize(module, {**dict.fromkeys(names, "int8"), "out_proj.weight": "int8"})
    twin = tt.dequantize(copy.deepcopy(module))
    given = [rand(2, 5, size) for size in (64, more.get("kdim", 64), more.get("vdim", 64))]
    given[0].requires_grad_(grad)
    made, expected = (one(*given)[0] for one in (module, twin))
    torch.testing.assert_close(made, expected)
    if grad:
        one, two = (torch.autograd.grad(out.square().sum(), given[0])[0] for out in (made, expected))
        torch.testing.assert_close(one, two)


def test_attention_rounds_inputs_where_that_is_set():
    module = torch.nn.MultiheadAttention(64, 4).eval().requires_grad_(False)
    tt.quantize(module, {"in_proj_weight": "int8"})
    x = rand(5, 2, 64)
    exact = module(x, x, x)[0]
    tt.quantize_activations(module, "mxfp4", only="in_proj_weight")
    assert not torch.equal(module(x, x, x)[0], exact)


def test_compiled_code_never_mistakes_rows():
    """Torch rebuilds views that are outputs from their offset. A Weight has none, but its tensor has if it is Plain."""
    plain = weight_of(tt.Plain())
    for take in (lambda w: w[4:6], lambda w: w.chunk(4)[1], lambda w: w[5], lambda w: w[2:].t()):
        torch._dynamo.reset()
        compiled = torch.compile(take, backend="aot_eager")
        assert torch.equal(compiled(plain).dequantize(), take(plain).dequantize())
        for given in (weight_of(), plain[3:]):
            torch._dynamo.reset()  # of sizes that change torch itself makes no such views
            with pytest.raises(tt.UnsupportedOpError, match="as_strided"):
                compiled(given)
    rows = plain[3:]
    for offset in (None, rows.storage_offset()):
        assert torch.equal(rows.as_strided((13, 64), (64, 1), offset).dequantize(), rows.dequantize())
    assert torch.equal(rows.as_strided((2, 64), (64, 1)).dequantize(), plain[3:5].dequantize())


@pytest.mark.parametrize("make", [weight_of, lambda: weight_of(tt.Plain()), lambda: Halves(torch.ones(16, 64))])
def test_compiled_code_reads_attributes(make):
    torch._dynamo.reset()
    weight = make()
    for read in (lambda w: w.T, lambda w: w.grad, lambda w: w.is_leaf, lambda w: w._version, lambda w: w.itemsize):
        made = torch.compile(read, backend="eager")(weight)
        assert torch.equal(made, read(weight)) if isinstance(made, torch.Tensor) else made == read(weight)


def test_autocast_computes_in_the_asked_dtype():
    weight = torch.nn.Parameter(weight_of(), requires_grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        for grad in (False, True):
            x = rand(3, 64).requires_grad_(grad)
            out = F.linear(x, weight)
            assert out.dtype == torch.bfloat16
            # the kernel does not round weights to bfloat16 first, as F.linear does with plain ones; torch ops round
            # the scales instead; and both round the result
            values = weight.dequantize()
            slack = 2.0**-7 * F.linear(x.abs(), values.abs()).float()
            assert ((out.float() - F.linear(x, values).float()).abs() <= slack).all()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast_is_a_cast_of_all_arguments(given, held, grad):
    weight, x, bias = weight_of().to(held), rand(2, 3, 64).to(given).requires_grad_(grad), rand(16).to(held)
    cast = x.detach().bfloat16().requires_grad_(grad)
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
        out = F.linear(x, weight, bias)
        assert torch.is_autocast_enabled("cpu")
    with torch.set_grad_enabled(grad):
        wanted = F.linear(cast, weight.to(torch.bfloat16), bias.bfloat16())
    assert torch.equal(out, wanted)
    if grad:
        out.sum().backward()
        wanted.sum().backward()
        assert torch.equal(x.grad, cast.grad.to(given))


@pytest.mark.parametrize("rows", [16, 70_000])
def test_products_on_meta_have_a_shape_under_autocast_too(rows):
    spec = tt.WeightSpec.of((rows, 256), torch.bfloat16, tt.int8())
    parts = {n: torch.empty(p.shape, dtype=p.dtype, device="meta") for n, p in spec.scheme.layout(spec.shape).items()}
    weight, x = tt.Weight(parts, spec), torch.empty(3, 256, dtype=torch.bfloat16, device="meta")
    for enabled in (False, True):
        with torch.autocast("cpu", enabled=enabled):
            assert F.linear(x, weight).shape == (3, rows)
            assert F.linear(x.clone().requires_grad_(), weight).shape == (3, rows)


def test_autocast_leaves_float64_alone():
    weight = weight_of().to(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(rand(3, 64).double(), weight).dtype == torch.float64
        with pytest.raises(RuntimeError, match="dtype"):
            F.linear(rand(3, 64).double(), weight.to(torch.float32))
        assert torch.is_autocast_enabled("cpu")


def test_an_embedding_never_decodes_its_table(monkeypatch):
    shapes, decode = [], tt.Affine.decode
    monkeypatch.setattr(tt.Affine, "decode", lambda s, p, shape, d: shapes.append(shape) or decode(s, p, shape, d))
    table = torch.nn.Embedding(16, 64)
    weight = weight_of()
    table.weight = torch.nn.Parameter(weight, requires_grad=False)
    assert table(torch.tensor([[1, 2, 3]])).shape == (1, 3, 64)
    assert all(shape[0] <= 3 for shape in shapes)


def test_embedding_checks_its_indices():
    with pytest.raises(IndexError):
        F.embedding(torch.tensor([16]), weight_of())


def test_repr_is_one_line_with_scheme_tie_and_bytes():
    text = repr(weight_of(tie=tt.Tie(("emb.weight", "head.weight"))))
    assert "\n" not in text
    for word in ("Weight(int8, ", "shape=(16, 64)", "1088 bytes", "tie: emb.weight = head.weight"):
        assert word in text


def test_zeros_like_is_plain_because_optimizers_keep_state_in_it():
    weight = weight_of()
    assert type(torch.zeros_like(weight)) is torch.Tensor
    assert torch.zeros_like(weight.t()).stride() == weight.t().stride()
    assert isinstance(torch.empty_like(weight), tt.Weight)


@pytest.mark.parametrize("row", [r for r in SCHEMES if r.id in {"int8", "int8-tensor", "nvfp4"}], ids=lambda r: r.id)
def test_writing_rows_never_changes_the_scale_of_others(row):
    """Rows that share a scale with the rest either keep it or refuse; they never corrupt the other rows."""
    weight = weight_of(row.scheme)
    before = weight.dequantize()
    try:
        weight[:4].copy_(torch.full((4, 64), 100.0))
    except tt.UnsupportedOpError as error:
        assert "share their part" in str(error)
        assert torch.equal(weight.dequantize(), before)
    assert torch.equal(weight.dequantize()[4:], before[4:])


@each_scheme
def test_a_row_by_its_index_is_written_if_its_scale_is_its_own_or_holds_the_values(row):
    """``weight[i] = ...``: the scale of one row seems to be shared by all of it, and is that row's alone."""
    weight = weight_of(row.scheme)
    before = weight.dequantize()
    try:
        weight[3] = 0.0
    except tt.UnsupportedOpError as error:
        assert "cut a block" in str(error)
        return
    before[3] = 0.0
    assert torch.equal(weight.dequantize(), before)
    layout = row.scheme.layout((16, 64))
    if all(0 < part.span <= 64 for part in layout.values()):
        weight[5] = 100 * rand(64)
        assert torch.equal(weight.dequantize()[[0, 4, 6]], before[[0, 4, 6]])
        alone = tt.Weight.encode(100 * rand(1, 64), row.scheme)
        assert torch.equal(weight.dequantize()[5:6], alone.dequantize())


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8", "nf4", "mxfp4", "nvfp4"])
def test_an_embedding_clears_its_padding_row(scheme):
    with torch.device("meta"):
        embedding = torch.nn.Embedding(8, 64, padding_idx=3)
    tt.materialize(tt.quantize(embedding, {"weight": scheme}))
    values = embedding.weight.detach().dequantize()
    assert not values[3].any()
    assert (values[[0, 1, 2, 4, 5, 6, 7]].std(1) > 0.5).all()


def test_a_size_of_one_behind_the_rows_is_selected_away():
    weight = tt.Weight.encode(rand(6, 1), tt.int8())
    assert torch.equal(weight[:, 0].dequantize(), weight.dequantize()[:, 0])
    deep = tt.Weight.encode(rand(5, 1, 5), tt.int8())
    assert torch.equal(deep[:, 0].dequantize(), deep.dequantize()[:, 0])
    assert torch.equal(deep.select(-2, 0).dequantize(), deep.dequantize()[:, 0])


def test_values_go_to_lists_and_arrays_and_never_through_memory_that_is_not_there():
    import numpy

    weight = torch.nn.Parameter(weight_of())
    values = weight.detach().dequantize()
    assert weight.tolist() == values.tolist()
    for array in (numpy.asarray(weight), numpy.array(weight, dtype="float64"), weight.numpy(force=True)):
        assert torch.equal(torch.from_numpy(array).float(), values)
    for read in (weight.numpy, lambda: numpy.from_dlpack(weight), lambda: torch.from_dlpack(weight)):
        with pytest.raises(tt.UnsupportedOpError, match="cannot share the memory"):
            read()
    with pytest.raises(tt.UnsupportedOpError, match="dequantize"):
        weight.apply_(abs)


@few_schemes
def test_a_trace_computes_what_the_module_does_or_says_why_not(row):
    """The compiled kernels run unseen by ``torch.jit.trace``: their results would be constants of the trace."""
    model = torch.nn.Sequential(torch.nn.Embedding(32, 64), torch.nn.Linear(64, 32, bias=True))
    model[0].weight = model[1].weight
    tt.quantize(model, {"*weight": row.scheme})
    index, other = torch.arange(6).view(2, 3), torch.arange(20, 28).view(2, 4)
    if row.id != "plain":
        with pytest.raises(tt.UnsupportedOpError, match="requires grad"):
            torch.jit.trace(model, index)
    model.requires_grad_(False)
    traced = torch.jit.trace(model, index)
    torch.testing.assert_close(traced(other), model(other))


@pytest.mark.filterwarnings("ignore")  # sizes become constants; linear_cross_entropy is a prototype
@pytest.mark.parametrize(
    "function", [f for f in FUNCTIONS if f.__name__ in dir(torch) + dir(F)], ids=lambda f: f.__name__
)
def test_a_trace_follows_the_inputs_of_a_function(function):
    args, kwargs = sample(function)(weight_of())
    place = next((i for i, a in enumerate(args) if type(a) is torch.Tensor and a.is_floating_point()), None)
    if place is None:
        return

    def call(x):
        made = function(*args[:place], x, *args[place + 1 :], **kwargs)
        return made[0] if isinstance(made, tuple) else made

    with torch.no_grad():
        traced = torch.jit.trace(call, args[place], check_trace=False)
        torch.testing.assert_close(traced(args[place] + 1), call(args[place] + 1))


def test_a_weight_is_expanded_by_leading_ones_only():
    weight = weight_of()
    values = weight.dequantize()
    for size in ((1, 16, 64), (1, 1, -1, 64), (-1, -1)):
        made = weight.expand(size)
        assert torch.equal(made.dequantize(), values.expand(size))
        assert made.stride() == values.contiguous().view(made.shape).stride()
    for size in ((2, 16, 64), (64,)):
        with pytest.raises(tt.UnsupportedOpError, match="cannot share"):
            weight.expand(size)


def test_a_tensor_of_no_dimension_is_wrapped_and_turned():
    weight = tt.Weight.encode(torch.tensor(2.0), tt.Plain())
    for made in (weight.t(), weight.permute(()), weight.transpose(0, -1), weight.view(()), weight.view_as(weight)):
        assert made.dequantize() == 2.0
        assert made.shape == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_the_input_of_a_product_with_another(dtype):
    one, two = weight_of().to(dtype), tt.Weight.encode(rand(16, 64, seed=1), tt.int8()).to(dtype)
    torch.testing.assert_close(F.linear(one, two), F.linear(one.dequantize(), two), atol=0.02, rtol=0.02)
    bias = tt.Weight.encode(rand(16).to(dtype), tt.int8())
    expected = F.linear(one.dequantize(), two, bias.dequantize())
    torch.testing.assert_close(F.linear(one.dequantize(), two, bias), expected, atol=0.02, rtol=0.02)


def test_not_finite_gradient_steps_name_the_problem_and_leave_the_weight():
    weight = torch.nn.Parameter(weight_of())
    before = weight.detach().dequantize()
    weight.grad = torch.full((16, 64), float("inf"))
    with pytest.raises(tt.SchemeError, match="not finite"):
        torch.optim.SGD([weight], lr=1.0).step()
    assert torch.equal(weight.detach().dequantize(), before)


def test_encode_refuses_what_has_no_values_to_quantize():
    with pytest.raises(tt.SchemeError, match=r"torch\.int64"):
        tt.Weight.encode(torch.arange(4), tt.int8())
    with pytest.raises(tt.SchemeError):
        tt.Weight.encode(torch.tensor(1.0), tt.int8())
    with pytest.raises(tt.ArgumentError, match=r"^tie: is a str, not a tie\. "):
        tt.Weight.encode(torch.zeros(2, 2), tt.int8(), tie="emb.weight")


@pytest.mark.parametrize("row", SCHEMES, ids=lambda row: row.id)
@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 0)])
def test_empty_weights_do_what_empty_tensors_do(row, shape):
    weight = tt.Weight.encode(torch.zeros(shape), row.scheme)
    values = torch.zeros(shape)
    assert weight.dequantize().shape == shape
    assert weight.t().dequantize().shape == values.t().shape
    assert [w.shape for w in weight.chunk(2)] == [v.shape for v in values.chunk(2)]
    assert torch.cat([weight, weight]).shape == torch.cat([values, values]).shape
    assert F.linear(torch.zeros(3, shape[1]), weight).shape == (3, shape[0])
    weight.mul_(2).zero_()
    assert copy.deepcopy(weight).spec == weight.spec


def test_rows_of_different_scales_are_not_joined_but_read():
    """One scale for all rows cannot serve two tensors: their values are joined instead."""
    scheme = tt.Affine(block=(None, None))
    one, two = tt.Weight.encode(rand(4, 8), scheme), tt.Weight.encode(rand(4, 8, seed=1) * 100, scheme)
    joined = torch.cat([one, two])
    assert type(joined) is torch.Tensor
    assert torch.equal(joined, torch.cat([one.dequantize(), two.dequantize()]))
    same = torch.cat([one, one])
    assert isinstance(same, tt.Weight)
    assert torch.equal(same.dequantize(), torch.cat([one.dequantize()] * 2))


def test_room_made_like_a_weight_holds_no_wild_index():
    """What rows share may index columns; left as the allocator gave it, reading the room would crash."""
    weight = tt.Weight.encode(rand(4, 64), tt.Affine(block=(1, 16), act_order=True))
    torch.use_deterministic_algorithms(True)  # fills fresh memory with the largest integers
    try:
        room = torch.empty_like(weight)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not room.parts["g_idx"].any()
    room.dequantize()


def test_several_weights_are_all_encoded_before_one_is_written():
    weights = [weight_of(), weight_of()]
    before = [w.dequantize() for w in weights]
    with pytest.raises(tt.SchemeError, match="not finite"):
        torch._foreach_add_(weights, [torch.ones(16, 64), torch.full((16, 64), float("nan"))])
    assert all(torch.equal(w.dequantize(), values) for w, values in zip(weights, before, strict=True))


def test_module_load_keeps_the_tie_of_the_module_and_checks_shapes():
    tie = tt.Tie(("emb.weight", "head.weight"))
    other = weight_of(tt.int4(32), tie=tt.Tie(("x", "y")))
    for held in (weight_of(tie=tie), weight_of(), rand(16, 64)):
        made = held.module_load(other, assign=True)
        assert made.tie == (held.tie if isinstance(held, tt.Weight) else None)
        assert made.scheme == other.scheme
        for assign in (False, True):
            with pytest.raises(tt.SchemeError, match=r"shape \(8, 64\), the module holds \(16, 64\)"):
                held.module_load(weight_of(rows=8), assign=assign)


# -- what caches of compiled graphs know it by ------------------------------------------------------------------------

MINE = """
import torchtether as tt
class Base(tt.Plain):
    pass
"""


def key_of(weight):
    return weight._stable_hash_for_caching()


def test_the_key_of_cached_graphs_says_all_but_the_values():
    one = weight_of()
    others = [
        weight_of(tt.int4(32)),
        weight_of(rows=8),
        weight_of(tie=tt.Tie(("a", "b"))),
        one.to(torch.bfloat16),
        one.t(),
        one.detach().requires_grad_(),
        tt.Weight.encode(rand(16, 64), tt.int8(), tie=None).map(lambda part: part.to("meta")),
    ]
    one.set_activations(None)
    assert key_of(one) == key_of(tt.Weight.encode(rand(16, 64), tt.int8()))
    assert len({key_of(weight) for weight in [one, *others]}) == 8


def test_the_key_of_cached_graphs_follows_the_code_of_a_scheme(tmp_path, monkeypatch):
    """A graph holds the decoding of its scheme as it was traced, also where a class that it derives from says how."""
    monkeypatch.syspath_prepend(tmp_path)

    def digest(content, age=60):
        name = f"scheme_{len(list(tmp_path.glob('*.py')))}"
        (tmp_path / f"{name}.py").write_text(content)
        written = time.time() - age
        os.utime(tmp_path / f"{name}.py", (written, written))
        base = importlib.import_module(name).Base
        return digest_of_code(type("Mine", (base,), {"__module__": "torchtether.schemes.plain"}))

    monkeypatch.setattr(_code, "_STARTED", time.time() - 30)
    assert digest(MINE) == digest(MINE) != digest(MINE + "# changed")
    assert digest(MINE, age=0) != digest(MINE, age=0)  # what was imported may be older
    nowhere = [type("Mine", (tt.Plain,), {"__module__": "nowhere"}) for _ in range(2)]
    assert digest_of_code(nowhere[0]) != digest_of_code(nowhere[1])  # they may differ, and nobody can tell
    assert digest_of_code(nowhere[0]) == digest_of_code(nowhere[0])
    assert digest_of_code(tt.Weight) == digest_of_code(tt.Plain) != digest(MINE)


def test_a_spec_is_its_own_deep_copy():
    """Guards of compiled graphs keep one, and compare it at every call."""
    spec = weight_of(tie=tt.Tie(("a", "b"))).spec
    assert copy.deepcopy([spec])[0] is spec
