"""Laws of every op that a Weight supports, over every scheme."""

import warnings
from typing import ClassVar

import pytest
import torch
from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

import torchtether as tt
from tests.catalog import (
    BACKWARDS,
    COLLECTIVES,
    COLUMNS,
    FEW,
    OF_LIBRARIES,
    OPS,
    ROWS,
    SCHEMES,
    each_op,
    few_schemes,
    rand,
    sample,
)
from torchtether.weights.dispatch import KINDS, REFUSED, RULES
from torchtether.weights.ops import values as values_module

# The results of these are memory or random numbers: only their geometry can be compared.
UNDETERMINED = {"empty_like", "new_empty", "new_empty_strided", "rand_like", "randn_like", "randint_like"}
NEEDS_GPU = {"_pin_memory"}


SUMS = ("linear", "_grouped_mm", "multi_head_attention_forward", "linalg_lstsq")


def _weight(scheme, dtype=torch.float32):
    return tt.Weight.encode((rand(ROWS, COLUMNS) - 0.7).to(dtype), scheme)


def _decoded(tree):
    return tree_map_only(tt.Weight, lambda w: w.dequantize(), tree)


def _name(op):
    return op._schema.name.removeprefix("aten::") if isinstance(op, torch._ops.OpOverload) else op.__name__


def _run(op, weight):
    torch.default_generator.manual_seed(5)
    args, kwargs = sample(op)(weight)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TypedStorage is deprecated|torch.quantize_per_tensor")  # once per process
        return op(*args, **kwargs), args


def _agree(got, expected, what):
    got, expected = tree_flatten(_decoded(got))[0], tree_flatten(expected)[0]
    assert len(got) == len(expected), what
    for ours, theirs in zip(got, expected, strict=True):
        if isinstance(theirs, torch.Tensor):
            assert ours.shape == theirs.shape, what
            assert ours.dtype == theirs.dtype, what
            near = 1e-5 if what.partition(".")[0] in SUMS else 0  # sums of another order
            torch.testing.assert_close(ours, theirs, rtol=near, atol=near, equal_nan=True, check_stride=False)
        elif isinstance(theirs, (torch.UntypedStorage, torch.TypedStorage)):
            sizes = [getattr(storage, "_untyped_storage", storage).nbytes() for storage in (ours, theirs)]
            assert sizes[0] == sizes[1], what
        else:
            assert ours == theirs, what


def test_an_op_that_torch_defines_late_goes_by_its_name():
    pytest.importorskip("torch.distributed._functional_collectives")
    weight = tt.Weight.encode(rand(4, 64), tt.int8())
    wrapped = torch.ops._c10d_functional._wrap_tensor_autograd(weight)
    assert isinstance(wrapped, tt.Weight)
    assert torch.equal(wrapped.dequantize(), weight.dequantize())


def test_every_kind_of_rule_is_in_the_catalog():
    assert set(OPS) | set(BACKWARDS) | set(COLLECTIVES) | set(OF_LIBRARIES) == set(RULES)
    assert set(KINDS.values()) == {"lifted", "decoded", "re-encoded", "rewritten"}
    assert not set(RULES) & set(REFUSED)


@each_op
def test_an_op_agrees_with_the_plain_op_on_decoded_values(op):
    """decoded and rewritten: the same result; re-encoded: the same written values, encoded."""
    for row in FEW:
        try:
            _check_op(op, row)
        except Exception as error:
            error.add_note(f"of {row.id}")
            raise


def _check_op(op, row):
    name = _name(op)
    if name in NEEDS_GPU and not torch.cuda.is_available():
        pytest.skip("pinning memory needs a GPU")
    plain = _weight(row.scheme).dequantize()
    try:
        expected, _ = _run(op, plain.clone())
    except NotImplementedError:
        pytest.skip("torch has no kernel for it on this device")
    weight = _weight(row.scheme)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            got, args = _run(op, weight)
        except tt.UnsupportedOpError as error:
            # views of a scheme whose blocks the sample cuts: refused, with the shape, never copied
            assert "\n" not in str(error)
            assert "share" in str(error) or "cut a block" in str(error), error
            return
        except tt.SchemeError as error:
            assert "not finite" in str(error)
            assert KINDS[op] == "re-encoded"  # sqrt_ of a negative value: refused, and nothing written
            assert torch.equal(weight.dequantize(), plain)
            return
    if KINDS[op] == "re-encoded" or name == "copy_":
        written = plain.clone()
        _run(op, written)
        fresh = _weight(row.scheme)
        again = written
        if not row.scheme.transparent:
            encode = row.scheme.encode if name == "copy_" else lambda v: row.scheme.reencode(v, fresh.parts)
            again = fresh.with_parts(encode(written)).dequantize()
        if args[0] is weight or (isinstance(args[0], list) and args[0][0] is weight):
            torch.testing.assert_close(weight.dequantize(), again, rtol=0, atol=0, equal_nan=True)
            assert weight.spec == _weight(row.scheme).spec
        return
    if name in UNDETERMINED:
        _, flat = tree_flatten(got)[0], tree_flatten(expected)[0]
        assert [t.shape for t in tree_flatten(got)[0]] == [t.shape for t in flat]
        return
    if name == "mkldnn_rnn_layer":  # its last output is scratch memory
        got, expected = got[:3], expected[:3]
    if KINDS[op] == "lifted" and isinstance(got, tt.Weight):
        assert got.spec.replace(dtype=weight.dtype, stride=weight.spec.stride) == weight.spec
        if not row.scheme.transparent:
            for part, held in zip(got.parts.values(), weight.parts.values(), strict=True):
                assert torch.equal(part.reshape(-1).view(torch.uint8), held.reshape(-1).view(torch.uint8))
    if op is torch.Tensor.data.__set__:
        _agree(args[0], plain, name)
    elif op is torch.Tensor.module_load:
        assert got.spec.scheme == row.scheme
    else:
        _agree(got, expected, name)


@each_op
def test_an_op_takes_columns_of_a_transparent_weight_as_of_a_plain_tensor(op):
    """Their strides are no permutation of contiguous ones."""
    if _name(op) in NEEDS_GPU | UNDETERMINED | {"_reshape_alias"}:
        pytest.skip("it has no values to compare, or its sample says other strides")
    wide = rand(ROWS, 2 * COLUMNS) - 0.7
    columns = wide.clone()[:, :COLUMNS]
    try:
        expected, _ = _run(op, columns)
    except Exception:
        pytest.skip("torch refuses these strides, too, or has no kernel")
    weight = tt.Weight.encode(wide, tt.Plain())[:, :COLUMNS]
    got, _ = _run(op, weight)
    if op in (torch.Tensor.untyped_storage, torch.Tensor.storage, torch.Tensor._typed_storage):
        return  # that of a view claims its own bytes only
    if _name(op) == "mkldnn_rnn_layer":  # its last output is scratch memory
        got, expected = got[:3], expected[:3]
    _agree(got, expected, _name(op))
    _agree(weight, columns, _name(op))


def test_a_product_is_written_into_a_part_of_a_plain_tensor_but_not_into_a_weight():
    """TRL's losses multiply rows of the head into tiles of one buffer."""
    for row in FEW:
        weight, x = _weight(row.scheme), rand(3, COLUMNS)
        before, tiles = weight.dequantize(), torch.full((4, ROWS + 1), 7.0)
        expected = torch.mm(x, before.t())
        for multiply in (torch.mm, torch.matmul):
            tile = tiles.fill_(7.0)[:3, :ROWS]
            assert multiply(x, weight.t(), out=tile) is tile
            torch.testing.assert_close(tile, expected)
            assert tiles[3].eq(7).all()
            assert tiles[:, ROWS].eq(7).all()
        with pytest.raises(tt.UnsupportedOpError, match=r"out= is a Weight.*copy_"):
            torch.mm(rand(ROWS, 3), rand(3, COLUMNS), out=weight)
        assert torch.equal(weight.dequantize(), before)


@few_schemes
@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize(
    "compute",
    [
        lambda x: torch.nn.functional.hinge_embedding_loss(x, torch.tensor([1.0, -1.0]).repeat(32), reduction="none"),
        lambda x: torch.hinge_embedding_loss(x, torch.ones(64)),
        lambda x: torch.matrix_power(x, 0) + 0 * x,
        lambda x: torch.linalg.matrix_power(x, 1),
        lambda x: x.matrix_power(2),
    ],
    ids=["F.hinge_embedding_loss", "torch.hinge_embedding_loss", "identity", "first power", "square"],
)
def test_what_torch_computes_in_a_copy_of_the_weight_is_plain(row, compute, trainable):
    """Torch computes these in place in ``empty_like`` or a clone of the argument."""
    weight = tt.Weight.encode(rand(64, 64), row.scheme).requires_grad_(trainable)
    values = weight.dequantize().detach().requires_grad_(trainable)
    made, expected = compute(weight), compute(values)
    assert type(made) is torch.Tensor
    torch.testing.assert_close(made, expected)
    if trainable:
        grads = [torch.autograd.grad(result.sum(), x)[0] for result, x in ((made, weight), (expected, values))]
        torch.testing.assert_close(*grads)


@few_schemes
@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize(
    "transform",
    [torch.func.jacrev, torch.func.jacfwd, lambda call: lambda x: torch.vmap(call)(torch.stack([x, 2 * x]))],
    ids=["jacrev", "jacfwd", "vmap"],
)
def test_transforms_of_torch_func_decode_a_weight_that_they_capture(row, transform, trainable):
    weight, x = tt.Weight.encode(rand(64, 64), row.scheme).requires_grad_(trainable), rand(64)
    values = weight.detach().dequantize()
    made = transform(lambda x: torch.einsum("oi,i->o", weight, x) + weight.dequantize()[0])(x)
    torch.testing.assert_close(made, transform(lambda x: torch.einsum("oi,i->o", values, x) + values[0])(x))


@few_schemes
@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize(
    "compute",
    [
        torch.lerp,
        torch.Tensor.lerp,
        lambda x, y, w: (1 * x).lerp_(y, w),
        lambda x, y, w: torch.addcdiv(y, x, w),
        lambda x, y, w: y.addcdiv(x, w, value=0.5),
        lambda x, y, w: (1 * y).addcdiv_(x, w),
        torch.compile(lambda x, y, w: torch.lerp(x, y, w) + (1 * y).lerp_(x, w), fullgraph=True, backend="aot_eager"),
    ],
    ids=["torch.lerp", "lerp", "lerp_", "torch.addcdiv", "addcdiv", "addcdiv_", "compiled"],
)
def test_a_gradient_that_torch_computes_in_a_copy_of_the_weight_is_exact(row, compute, trainable):
    """Torch computes ``1 - weight`` and ``1 / weight`` of the formulas in place, in ``empty_like`` of it."""
    torch.compiler.reset()
    held = tt.Weight.encode(rand(64, 64) + 2, row.scheme).requires_grad_(trainable)
    found = []
    for weight in (held, held.dequantize().detach().requires_grad_(trainable)):
        inputs = [rand(64, 64).requires_grad_(), (rand(64, 64) - 3).requires_grad_(), weight]
        made = compute(*inputs)
        found.append([made, *torch.autograd.grad(made.sum(), inputs if trainable else inputs[:2])])
    for ours, plain in zip(*found, strict=True):
        assert type(ours) is torch.Tensor
        torch.testing.assert_close(ours, plain)


@few_schemes
@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize(
    "compute",
    [
        torch.nn.functional.dropout,
        torch.nn.Dropout(0.3),
        lambda x: torch.dropout(x, 0.3, True),
        lambda x: torch.nn.functional.alpha_dropout(x, training=True),
        lambda x: torch.alpha_dropout(x, p=0.3, train=True),
        torch.nn.functional.gumbel_softmax,
        lambda x: torch.nn.functional.gumbel_softmax(x, hard=True),
    ],
)
def test_noise_on_a_weight_is_not_rounded_to_its_codes(row, compute, trainable):
    weight = tt.Weight.encode(rand(64, 64), row.scheme).requires_grad_(trainable)
    found = []
    for x in (weight, weight.dequantize().detach().requires_grad_(trainable)):
        torch.default_generator.manual_seed(5)
        found.append(compute(x))
        assert type(found[-1]) is torch.Tensor
    torch.testing.assert_close(*found)
    assert torch.nn.functional.dropout(weight, training=False) is weight


@few_schemes
@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("shape", [(COLUMNS,), (COLUMNS, 5), (2, COLUMNS, 5), (2, 3, COLUMNS, 5)], ids=str)
def test_a_product_has_the_strides_of_torch_s_own(row, shape, trainable):
    torch.compiler.reset()
    weight, x = _weight(row.scheme).requires_grad_(trainable), rand(*shape)
    expected = weight.detach().dequantize() @ x
    for made in (weight @ x, torch.compile(torch.matmul, fullgraph=True, backend="aot_eager")(weight, x)):
        assert made.stride() == expected.stride()
        torch.testing.assert_close(made.view(-1), expected.view(-1), rtol=1e-4, atol=1e-4)


@few_schemes
def test_out_of_an_op_that_looks_for_subclasses_is_written(row):
    weight = tt.Weight.encode(rand(64, 64), row.scheme)
    out = torch.full((), 7)
    assert torch.linalg.matrix_rank(weight, out=out) is out
    assert out == torch.linalg.matrix_rank(weight.dequantize())
    before = weight.dequantize()
    with pytest.raises(tt.UnsupportedOpError, match=r"matrix_power: out= is a Weight.*copy_"):
        torch.linalg.matrix_power(rand(64, 64), 2, out=weight)
    assert torch.equal(weight.dequantize(), before)


def test_an_op_without_a_rule_raises_and_names_the_way_out():
    weight = _weight(tt.int8())
    with pytest.raises(tt.UnsupportedOpError, match=r"aten\.i0\.default has no rule.*\.dequantize\(\)"):
        torch.i0(weight)
    with pytest.raises(tt.UnsupportedOpError, match=r"detach a Weight from its parts"):
        weight.set_(torch.zeros(3))


class _Diagonal(torch.nn.Module):
    """A parametrization whose inverse has an op that is refused for every scheme."""

    def forward(self, x):
        return 2 * x

    def right_inverse(self, x):
        return (x - x.diagonal()[0]) / 2


@few_schemes
def test_a_parametrization_whose_inverse_is_refused_is_not_registered(row):
    """Torch skips a ``right_inverse`` that raises NotImplementedError, and the weight would have other values."""
    held = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    weight = held.weight = torch.nn.Parameter(_weight(row.scheme), requires_grad=False)
    with pytest.raises(tt.UnsupportedOpError, match="diagonal"):
        torch.nn.utils.parametrize.register_parametrization(held, "weight", _Diagonal())
    assert held.weight is weight
    assert torch.equal(weight.dequantize(), _weight(row.scheme).dequantize())


def test_a_large_read_warns_once_per_op(monkeypatch):
    monkeypatch.setattr(values_module, "LARGE", 16)
    monkeypatch.setattr(values_module, "_warned", set())
    weight = _weight(tt.int8())
    with pytest.warns(UserWarning, match=r"aten\.sum\.default decodes a Weight"):
        weight.sum()
    weight.sum()
    with pytest.warns(UserWarning, match=r"aten\.amax\.default"):
        weight.amax()
    torch.mm(rand(2, ROWS), weight)  # what a weight is for never warns


@pytest.mark.parametrize("read", [lambda w: w.norm(), lambda w: torch.functional.norm(w, p=1), lambda w: w.std()])
def test_a_warning_names_the_line_that_reads(monkeypatch, read):
    monkeypatch.setattr(values_module, "LARGE", 16)
    monkeypatch.setattr(values_module, "_warned", set())
    with pytest.warns(UserWarning, match="decodes a Weight") as told:
        read(_weight(tt.int8()))
    assert {(one.filename, one.lineno) for one in told} == {(__file__, read.__code__.co_firstlineno)}


VIEWS = {
    "t": lambda w: w.t(),
    "unsqueeze": lambda w: w.unsqueeze(0),
    "slice": lambda w: w[4:8],
    "select": lambda w: w[3],
    "view": lambda w: w.view(4, 4, COLUMNS),
    "chunk": lambda w: w.chunk(2)[1],
    "detach": lambda w: w.detach(),
    "narrow-t": lambda w: w.narrow(0, 8, 8).t(),
    "t-unsqueeze": lambda w: w.t().unsqueeze(0),
    "t-unsqueeze-last": lambda w: w.t().unsqueeze(-1),
    "t-unsqueeze-middle": lambda w: w.t().unsqueeze(1),
    "t-squeeze": lambda w: w.unsqueeze(0).transpose(1, 2).squeeze(0),
    "image": lambda w: w.view(4, 4, COLUMNS).permute(2, 0, 1).unsqueeze(0),  # position embeddings that are resized
}


@pytest.mark.parametrize("row", SCHEMES, ids=[row.id for row in SCHEMES])
def test_a_view_shares_its_storage_or_raises(row):
    """Writing through a view changes the Weight that it views, and only the viewed rows."""
    for name, view in VIEWS.items():
        try:
            _check_view(row, view)
        except Exception as error:
            error.add_note(f"of {name}")
            raise


def _check_view(row, view):
    weight = _weight(row.scheme)
    before = weight.dequantize()
    try:
        seen = view(weight)
    except tt.UnsupportedOpError:
        with pytest.raises(tt.UnsupportedOpError, match="share|cut a block"):
            view(weight)
        return
    assert all(
        part.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
        for part, held in zip(seen.parts.values(), weight.parts.values(), strict=True)
    )
    expected = view(before)
    assert seen.stride() == expected.stride()
    assert seen.shape == expected.shape
    torch.testing.assert_close(seen.dequantize(), expected, rtol=0, atol=0)
    assert seen.dequantize().stride() == expected.stride()
    try:
        seen.zero_()
    except tt.UnsupportedOpError as error:
        assert "share their part" in str(error)  # a scale that other rows use, too
        torch.testing.assert_close(weight.dequantize(), before, rtol=0, atol=0)
        return
    expected.zero_()  # a view of ``before``
    torch.testing.assert_close(weight.dequantize(), before, rtol=0, atol=0)


@pytest.mark.parametrize("scheme", [tt.int8(), tt.Plain()], ids=str)
def test_t_refuses_more_than_two_dimensions(scheme):
    """As torch does for plain tensors, instead of reversing all dimensions."""
    weight = tt.Weight.encode(rand(2, 3, 8), scheme)
    with pytest.raises(tt.UnsupportedOpError, match=r"at most 2 dimensions, .* shape \(2, 3, 8\) has more"):
        weight.t()
    assert tt.Weight.encode(rand(8), scheme).t().shape == (8,)
    assert weight.mT.shape == (2, 8, 3)


@pytest.mark.parametrize("row", SCHEMES, ids=[row.id for row in SCHEMES])
def test_linear_and_embedding_agree_with_decoded_values(row):
    weight = _weight(row.scheme)
    values = weight.dequantize()
    x, index = rand(5, COLUMNS), torch.tensor([[0, ROWS - 1], [3, 3]])
    with torch.no_grad():
        _sums_agree(torch.nn.functional.linear(x, weight), torch.nn.functional.linear(x, values))
    assert torch.equal(torch.nn.functional.embedding(index, weight), values[index])
    with torch.inference_mode():
        _sums_agree(torch.nn.functional.linear(x, weight), torch.nn.functional.linear(x, values))
        _sums_agree(torch.matmul(x, weight.t()), torch.matmul(x, values.t()))


@few_schemes
def test_a_transposed_weight_may_have_a_batch_dimension_of_size_one(row):
    weight, x = _weight(row.scheme), rand(1, 5, COLUMNS)
    batched = weight.t()[None]
    expected = x @ weight.dequantize().t()[None]
    _sums_agree(x @ batched, expected)
    _sums_agree(torch.bmm(x, batched), expected)


def _sums_agree(got, expected):
    """Products in float32 are sums of another order than torch's; test_sums.py has their bounds."""
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@few_schemes
def test_chunked_linear_is_the_whole_linear(row, monkeypatch):
    monkeypatch.setattr("torchtether.weights.ops.product.SCRATCH", 64)
    weight = tt.Weight.encode(rand(300, COLUMNS), row.scheme)
    x, bias = rand(5, COLUMNS), rand(300)
    expected = torch.nn.functional.linear(x, weight.dequantize(), bias)
    torch.testing.assert_close(torch.nn.functional.linear(x, weight, bias), expected)


@few_schemes
@pytest.mark.parametrize("trainable", [False, True])
def test_gradients_reach_the_input_and_a_trainable_weight(row, trainable):
    weight = torch.nn.Parameter(_weight(row.scheme), requires_grad=trainable)
    values = weight.detach().dequantize().requires_grad_(trainable)
    x = rand(5, COLUMNS).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    torch.nn.functional.linear(x, weight).square().sum().backward()
    torch.nn.functional.linear(twin, values).square().sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)
    if trainable:
        assert type(weight.grad) is torch.Tensor
        torch.testing.assert_close(weight.grad, values.grad)
    else:
        assert weight.grad is None


@few_schemes
@pytest.mark.parametrize("options", [None, LinearCrossEntropyOptions(batch_chunk_size=2)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("trainable", [False, True])
def test_a_fused_loss_has_the_gradients_of_decoded_values(row, options, reduction, trainable):
    weight = torch.nn.Parameter(_weight(row.scheme), requires_grad=trainable)
    values = weight.detach().dequantize().requires_grad_(trainable)
    targets, found = torch.arange(6) % ROWS, []
    for given in (weight, values):
        x = rand(6, COLUMNS).requires_grad_()
        loss = torch.nn.functional.linear_cross_entropy(x, given, targets, reduction=reduction, options=options)
        loss.sum().backward()
        found.append([loss, x.grad] + [given.grad] * trainable)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@few_schemes
@pytest.mark.parametrize("shape", [(2,), (2, 1), (1, 0)], ids=str)
def test_a_frozen_weight_has_all_derivatives(row, shape):
    weight, bias = _weight(row.scheme).to(torch.float64), rand(ROWS).double().requires_grad_()
    x = rand(*shape, COLUMNS).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda *given: torch.nn.functional.linear(given[0], weight, given[1]), (x, bias))
    up = rand(*shape, ROWS).double().requires_grad_()
    (first,) = torch.autograd.grad(torch.nn.functional.linear(x, weight, bias), x, up, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), up)
    torch.testing.assert_close(second, 2 * first.detach() @ weight.dequantize().t())


@few_schemes
@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 0)], ids=str)
def test_products_with_a_frozen_weight_are_changed_in_place(row, shape):
    weight, x = _weight(row.scheme), rand(*shape, COLUMNS).requires_grad_()
    out = torch.nn.functional.linear(x, weight)
    twice = torch.nn.functional.linear(x, weight).add_(1).mul_(2)
    torch.testing.assert_close(twice, 2 * out + 2)
    one, two = (torch.autograd.grad(made.sum(), x)[0] for made in (out, twice))
    torch.testing.assert_close(two, 2 * one)


def test_a_product_that_a_kernel_returned_as_a_view_is_changed_in_place(monkeypatch):
    """Some kernels of GPUs return one; torch refuses to change the view that an autograd function returns."""
    weight, x = _weight(tt.int8()), rand(5, COLUMNS).requires_grad_()
    viewed = lambda held, x, bias: (x @ held.dequantize().t()).view(5, ROWS)  # noqa: E731
    monkeypatch.setattr("torchtether.weights.ops.linear.by_parts", viewed)
    torch.nn.functional.linear(x, weight).mul_(2).sum().backward()
    torch.testing.assert_close(x.grad, 2 * weight.dequantize().sum(0).expand(5, -1))


def test_a_frozen_weight_that_changes_before_backward_is_an_error():
    weight, x = _weight(tt.int8()), rand(5, COLUMNS).requires_grad_()
    out = torch.nn.functional.linear(x, weight)
    weight.copy_(weight.dequantize())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_backward_saves_the_weight_and_not_its_values():
    weight = torch.nn.Parameter(_weight(tt.int8()), requires_grad=False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        torch.nn.functional.linear(rand(5, COLUMNS).requires_grad_(), weight)
    assert saved
    assert all(isinstance(t, tt.Weight) or t.numel() != weight.numel() for t in saved)


@few_schemes
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.5),
        lambda p: torch.optim.AdamW(p, lr=0.5, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.5, fused=True),
        lambda p: torch.optim.Adagrad(p, lr=0.5),
        lambda p: torch.optim.SGD(p, lr=0.5, foreach=True, momentum=0.9),
    ],
    ids=["sgd", "adamw", "adamw-foreach", "adamw-fused", "adagrad", "sgd-foreach"],
)
def test_an_optimizer_step_changes_a_trainable_weight(row, make):
    """The step on the Weight is the step on its values, encoded; the state stays plain."""
    weight = torch.nn.Parameter(_weight(row.scheme))
    twin = torch.nn.Parameter(weight.detach().dequantize())
    optimizer, reference = make([weight]), make([twin])
    weight.grad, twin.grad = rand(ROWS, COLUMNS, seed=3), rand(ROWS, COLUMNS, seed=3)
    before = weight.detach().dequantize()
    optimizer.step()
    reference.step()
    assert isinstance(weight, tt.Weight)
    assert not torch.equal(before, weight.detach().dequantize())
    expected = tt.Weight.encode(twin.detach(), row.scheme).dequantize()
    # foreach AdamW writes the parameter three times a step, and each write may go to the farther neighbour
    slack = 6 * row.scheme.bound(dict(weight.parts), (ROWS, COLUMNS)).max().item()
    torch.testing.assert_close(weight.detach().dequantize(), expected, rtol=1e-5, atol=1e-6 + slack)
    assert all(
        type(t) is torch.Tensor for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)
    )


def _loss(result, count=None):
    """The sum of the first ``count`` tensors that have a gradient, of all by default."""
    parts = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor) and t.requires_grad][:count]
    return sum(t.float().sum() for t in parts) if parts else None


DIFFERENTIABLE = [op for op in OPS if KINDS[op] in ("decoded", "rewritten") and not _name(op).startswith("prod")]


class _Seen(TorchDispatchMode):
    ops: ClassVar[set] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.add(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda op: getattr(op, "__name__", str(op)))
def test_gradients_of_every_op_are_those_of_the_plain_op(op):
    """Autograd calls other ops on the Weight that it saved; all of them must have rules, too.

    Which ops it calls may depend on the outputs that have a gradient: the first alone, as in most losses, or all.
    """
    for count in (None, 1):
        _check_gradients(op, count)


def _check_gradients(op, count):
    scheme = tt.Affine(block=(1, 16))
    twin = _weight(scheme).dequantize().requires_grad_()
    try:
        loss = _loss(_run(op, twin)[0], count)
        if loss is None:
            return
        loss.backward()
    except (RuntimeError, NotImplementedError):
        return  # torch itself has no gradient for it
    weight = torch.nn.Parameter(_weight(scheme))
    loss = _loss(_run(op, weight)[0], count)
    if loss is None:
        assert twin.grad is None or not twin.grad.any()
        return
    with _Seen():
        loss.backward()
    torch.testing.assert_close(weight.grad, twin.grad, equal_nan=True)


def test_every_rule_for_autograd_alone_is_reached():
    for op in DIFFERENTIABLE:
        test_gradients_of_every_op_are_those_of_the_plain_op(op)
    assert set(BACKWARDS) <= _Seen.ops, set(BACKWARDS) - _Seen.ops


@few_schemes
@pytest.mark.parametrize("trainable", [False, True])
def test_the_factors_of_a_bag_have_their_gradient(row, trainable):
    factors, grads = rand(3), []
    held = _weight(row.scheme)
    for weight in (held, held.dequantize()):
        given = factors.clone().requires_grad_()
        table = torch.nn.Parameter(weight, requires_grad=trainable)
        offsets = torch.tensor([0, 2])
        torch.nn.functional.embedding_bag(
            torch.tensor([3, 0, 3]), table, offsets, mode="sum", per_sample_weights=given
        ).square().sum().backward()
        grads.append(given.grad)
    torch.testing.assert_close(*grads)


def test_the_gradient_of_a_product_of_all_values_is_refused():
    weight = torch.nn.Parameter(_weight(tt.int8()))
    with pytest.raises(tt.UnsupportedOpError, match="share its storage"):
        weight.prod().backward()


def _batch_of_gradients(m, x):
    made = m(x)
    return torch.vmap(lambda v: torch.autograd.grad(made, x, v, retain_graph=True)[0])(
        torch.ones(3, 1, 1).expand(3, 4, 16)
    )


def _batched_gradients(m, x, batch):
    return torch.autograd.grad(m(x), x, batch, is_grads_batched=True)[0]


_BATCHES = {
    "dim 1": lambda m, w, x: torch.vmap(m, in_dims=1)(x.transpose(0, 1)),
    "transposed": lambda m, w, x: torch.vmap(m)(x.transpose(0, 1)),
    "repeated": lambda m, w, x: torch.vmap(m)(x[:1].expand_as(x)),
    "nested": lambda m, w, x: torch.vmap(torch.vmap(m), in_dims=1)(x),
    "gradient of a sum": lambda m, w, x: torch.vmap(torch.func.grad(lambda y: m(y).sum()))(x),
    "graph from outside": lambda m, w, x: _batch_of_gradients(m, x[0].clone().requires_grad_()),
    "gradients repeated": lambda m, w, x: _batched_gradients(
        m, x[0].requires_grad_(), torch.eye(16)[:, None].expand(16, 4, 16)
    ),
    "gradients with gaps": lambda m, w, x: _batched_gradients(m, x[0].requires_grad_(), torch.ones(6, 4, 16)[::2]),
    "gradients, last dimension": lambda m, w, x: _batched_gradients(
        m, x[0].requires_grad_(), torch.ones(4, 16, 3).permute(2, 0, 1)
    ),
    "jvp": lambda m, w, x: torch.vmap(lambda y: torch.func.jvp(m, (y,), (y,))[1], in_dims=1)(x),
    "hessian": lambda m, w, x: torch.func.hessian(lambda y: m(y).tanh().sum())(x[0]),
    "weight second": lambda m, w, x: torch.vmap(lambda y: y @ w.t(), in_dims=1)(x),
    "weight first": lambda m, w, x: torch.vmap(lambda y: w @ y)(x.transpose(1, 2).contiguous()),
}


@few_schemes
@pytest.mark.parametrize("call", _BATCHES.values(), ids=list(_BATCHES))
def test_batches_of_any_order_meet_a_frozen_weight(row, call):
    torch.manual_seed(0)
    plain = torch.nn.Linear(64, 16)
    weight = tt.Weight.encode(plain.weight, row.scheme)
    plain.weight.data = weight.dequantize()
    held = torch.nn.Linear(64, 16)
    held.weight, held.bias = torch.nn.Parameter(weight, requires_grad=False), plain.bias
    x = torch.randn(3, 4, 64)
    torch.testing.assert_close(call(held, held.weight, x), call(plain, plain.weight, x), rtol=1e-4, atol=1e-4)
