"""Inside ``swapping()`` stock ``.to()`` and similar calls keep models of every kind attached."""

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.catalog import FEW
from tests.conversion.models import KINDS, OPTIMIZERS, kept, rig, snapshot, tensors_of
from tests.testing.classes import Sixteenths
from torchtether import ConversionError, OptimizerError, TieError, Weight, int8, quantize
from torchtether.exchange.scope import swapping
from torchtether.ties.records import find_ties

kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
ENCODE = {row.id: lambda values, row=row: Weight.encode(values, row.scheme) for row in FEW}
ENCODE["a wrapper"] = lambda values: Sixteenths(codes=(16 * values).to(torch.int8), step=1 / 16, dtype=values.dtype)
given = pytest.mark.parametrize("given", [True, False], ids=["given", "found"])


def _values(tensor):
    return tensor.detach().dequantize() if hasattr(tensor, "__tensor_flatten__") else tensor.detach()


def geometry(model):
    return [(t.names, [v and (v.size, v.stride, v.offset) for v in t.views], t.objects) for t in find_ties(model)]


@kinds
@given
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 1])
def test_everything_survives_a_stock_conversion(kind, given, optimizer, steps):
    made = rig(kind, optimizer, steps=steps)
    before, ties = kept(made.model), geometry(made.model)
    with swapping(made.model if given else None, optimizer=made.optimizer):
        assert made.model.double() is made.model
    assert kept(made.model) == before
    assert geometry(made.model) == ties
    for tensor in tensors_of(made.model).values():
        assert tensor.dtype == (torch.float64 if tensor.is_floating_point() else torch.int64)
    for state in made.optimizer.state.values():
        assert all(value.dtype == torch.float64 for value in state.values() if torch.is_tensor(value) and value.dim())

    made.seen.clear()
    made.step()
    trained = {name for name, p in made.model.named_parameters() if p.requires_grad}
    assert set(made.seen) == {(how, name) for how in ("grad", "post") for name in trained}


@kinds
@pytest.mark.parametrize(
    "convert",
    [
        nn.Module.bfloat16,
        nn.Module.float,
        nn.Module.cpu,
        lambda m: m.to("cpu", torch.float16),
        lambda m: m.type(torch.float64),
    ],
    ids=["bfloat16", "no-op", "cpu", "to", "type"],
)
def test_values_are_those_of_torch(kind, convert):
    ours, stock = rig(kind), rig(kind)
    if not all(all(tie.objects) for tie in find_ties(ours.model)) or kind is KINDS["buffer_is_parameter"]:
        pytest.skip("torch splits these")
    before = kept(ours.model)
    with swapping(ours.model, optimizer=ours.optimizer):
        convert(ours.model)
    convert(stock.model)
    theirs = tensors_of(stock.model)
    for name, tensor in tensors_of(ours.model).items():
        assert (tensor.dtype, tensor.device) == (theirs[name].dtype, theirs[name].device)
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0)
    assert kept(ours.model) == before


@kinds
@given
def test_to_empty_and_back_keeps_objects_and_ties(kind, given):
    made = rig(kind)
    before, ties = kept(made.model), geometry(made.model)
    with swapping(made.model if given else None, optimizer=made.optimizer):
        made.model.to_empty(device="meta")
        made.model.to_empty(device="cpu")
    after = kept(made.model)
    assert {name: facts[:3] + facts[4:] for name, facts in after.items()} == {
        name: facts[:3] + facts[4:] for name, facts in before.items()
    }
    assert geometry(made.model) == ties
    assert not any(tensor.is_meta for tensor in tensors_of(made.model).values())
    assert not any(v.is_meta for s in made.optimizer.state.values() for v in s.values() if torch.is_tensor(v))


@kinds
def test_training_inside_the_scope(kind):
    """Everything is attached again as soon as the stock call is over, not only at the end of the scope."""
    made = rig(kind)
    ids = {name: id(tensor) for name, tensor in tensors_of(made.model).items()}
    with swapping(made.model, optimizer=made.optimizer):
        for convert in (nn.Module.double, nn.Module.float, nn.Module.double):
            convert(made.model)
            made.seen.clear()
            made.step()
            trained = {name for name, p in made.model.named_parameters() if p.requires_grad}
            assert set(made.seen) == {(how, name) for how in ("grad", "post") for name in trained}
            assert {name: id(tensor) for name, tensor in tensors_of(made.model).items()} == ids


def test_a_submodule_can_be_converted_alone():
    made = rig(KINDS["view_transposed"])
    before = kept(made.model)
    with swapping(made.model, optimizer=made.optimizer):
        made.model.a.float()
    assert kept(made.model) == before


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_next_step_is_that_of_a_stock_model(optimizer):
    ours, stock = rig(KINDS["tied_3"], optimizer), rig(KINDS["tied_3"], optimizer)
    with swapping(ours.model, optimizer=ours.optimizer):
        ours.model.bfloat16()
    stock.model.bfloat16()
    stock.optimizer.load_state_dict(stock.optimizer.state_dict())
    for _ in range(2):
        assert ours.step() == stock.step()
    for one, two in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        assert torch.equal(one, two)


HOLDERS = {
    "weak reference": (lambda m: torch._C._WeakTensorRef(m.b.weight), "b.weight: held by a weak reference"),
    "view": (lambda m: m.b.weight.view(-1), "b.weight: held by a view"),
    "live graph": (lambda m: m(torch.ones(3, 4)).square().sum(), "a live graph, between forward and backward"),
}


@given
@pytest.mark.parametrize("hold", [hold for hold, _ in HOLDERS.values()], ids=HOLDERS)
def test_what_only_garbage_holds_is_no_refusal(hold, given):
    made = rig(KINDS["plain"])
    gc.disable()  # else Python collects it at a time that nobody knows
    try:
        cycle = [hold(made.model)]
        cycle.append(cycle)
        del cycle
        with swapping(made.model if given else None, optimizer=made.optimizer):
            made.model.double()
    finally:
        gc.enable()
    assert {p.dtype for p in made.model.parameters()} == {torch.float64}


@given
@pytest.mark.parametrize(("hold", "match"), HOLDERS.values(), ids=HOLDERS)
def test_refusals_come_before_the_first_change(hold, match, given):
    """Torch itself finds them one by one, with the tensors before converted."""
    made = rig(KINDS["plain"])
    holder = hold(made.model)
    before = snapshot(made.model, made.optimizer)
    with pytest.raises(ConversionError, match=match), swapping(made.model if given else None, optimizer=made.optimizer):
        made.model.double()
    assert snapshot(made.model, made.optimizer) == before
    del holder


@given
@pytest.mark.parametrize("scheme", [None, "int8"])
def test_weak_references_find_the_object_with_its_new_contents(given, scheme):
    made = rig(KINDS["plain"])
    quantize(made.model, scheme)
    refs = [(weakref.ref(p), p) for p in made.model.parameters()]
    with swapping(made.model if given else None, optimizer=made.optimizer):
        made.model.bfloat16()
    assert all(ref() is p for ref, p in refs)
    assert {p.dtype for p in made.model.parameters()} == {torch.bfloat16}
    assert {type(p) for p in made.model.parameters() if p.dim() > 1} == {Weight if scheme else nn.Parameter}


def test_refusals_of_the_place():
    model = KINDS["plain"]()
    with torch.inference_mode(), pytest.raises(ConversionError, match="inference_mode"), swapping(model):
        pass
    other = torch.optim.SGD(KINDS["plain"]().parameters())
    with pytest.raises(OptimizerError), swapping(model, optimizer=other):
        pass
    with pytest.raises(ConversionError, match="lazy"), swapping():
        nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)).double()
    scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(ConversionError, match=r"^model: is a RecursiveScriptModule, .*TorchScript"), swapping(scripted):
        pass
    assert not torch.__future__.get_swap_module_params_on_conversion()


@pytest.mark.parametrize("before", [True, False])
def test_the_flag_is_put_back_after_errors(before):
    torch.__future__.set_swap_module_params_on_conversion(before)
    try:
        with pytest.raises(ZeroDivisionError), swapping():  # noqa: PT012
            assert torch.__future__.get_swap_module_params_on_conversion()
            with swapping():
                pass
            assert torch.__future__.get_swap_module_params_on_conversion()
            raise ZeroDivisionError
        assert torch.__future__.get_swap_module_params_on_conversion() == before
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_a_function_that_fails_in_the_middle_leaves_objects_hooks_and_ties_whole():
    made = rig(KINDS["view_transposed"])
    before, ties = kept(made.model), geometry(made.model)
    calls = []

    def fragile(tensor):
        calls.append(tensor)
        if len(calls) == 5:
            raise MemoryError("injected")
        return tensor.clone()

    with pytest.raises(MemoryError), swapping(made.model, optimizer=made.optimizer):
        made.model._apply(fragile)
    assert kept(made.model) == before
    assert geometry(made.model) == ties


def test_views_that_end_in_two_dtypes_are_an_error():
    made = rig(KINDS["view_transposed"])
    with pytest.raises(TieError, match=r"a\.weight: shares memory in the model, but .* \(a\.weight torch\.float64"):  # noqa: SIM117
        with swapping(made.model):
            made.model._apply(lambda t: t.double() if t.shape == (6, 4) else t.clone())


def test_a_buffer_that_is_replaced_on_purpose_stays_replaced():
    model = nn.BatchNorm1d(4)
    wider = torch.ones(8)
    with swapping(model):
        model.double()
        model.running_mean = wider
    assert model.running_mean is wider


@pytest.mark.parametrize("scheme", [None, int8()])
def test_a_parameter_that_is_only_a_buffer_is_converted(scheme):
    """``tt.untie`` makes one of a buffer that ``tt.tie`` had made the parameter itself."""
    model, values = nn.Linear(64, 4), torch.randn(4, 64)
    table = nn.Parameter(values if scheme is None else Weight.encode(values, scheme))
    model.register_buffer("table", table)
    before = kept(model)
    with swapping(model):
        model.double()
        assert model.table.dtype == torch.float64
        model.table.sum().backward()
        model.bfloat16()
    assert {tensor.dtype for tensor in (model.weight, table, table.grad)} == {torch.bfloat16}
    table.grad = None
    assert kept(model) == before


def test_nested_scopes_and_our_own_verbs_inside():
    from torchtether.conversion.converting import convert

    made = rig(KINDS["view_transposed"])
    before, ties = kept(made.model), geometry(made.model)
    with swapping(made.model, optimizer=made.optimizer), swapping(made.model, optimizer=made.optimizer):
        made.model.double()
        convert(made.model, dtype=torch.float32, optimizer=made.optimizer)
        made.model.double()
    assert kept(made.model) == before
    assert geometry(made.model) == ties
    assert made.optimizer.state[made.model.a.weight]["exp_avg"].dtype == torch.float64
    made.step()


@pytest.mark.parametrize("tied", [lambda w: w.data, lambda w: w.data.t()], ids=["storage", "transposed"])
@pytest.mark.parametrize("move", [lambda m: m.to("meta"), lambda m: m.to_empty(device="meta")], ids=["to", "to_empty"])
def test_quantized_tensors_over_one_memory_share_it_on_meta(tied, move):
    """Where there are no addresses, only the memory object tells that they do not share it any more."""
    model = nn.Module()
    model.one = nn.Parameter(torch.randn(16, 32), requires_grad=False)
    model.two = nn.Parameter(tied(model.one), requires_grad=False)
    quantize(model, {"*": "int8"})
    ties = geometry(model)
    assert ties
    with swapping(model):
        move(model)
    assert geometry(model) == ties


@pytest.mark.parametrize("tied", [lambda w: w[4:8], lambda w: w.view(2, 8, 32)], ids=["rows", "reshaped"])
@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.double(),
        lambda m: m.to_empty(device="cpu"),
        lambda m: m.load_state_dict({key: value.clone() for key, value in m.state_dict().items()}),
        lambda m: m.load_state_dict({key: value.clone() for key, value in m.state_dict().items()}, assign=True),
    ],
    ids=["double", "to_empty", "load", "assign"],
)
def test_a_quantized_part_of_a_quantized_tensor_is_refused(tied, change):
    """It would get the parts of the whole tensor, which are not those of its shape."""
    model = nn.Module()
    model.one = nn.Parameter(Weight.encode(torch.randn(16, 32), int8()), requires_grad=False)
    model.two = nn.Parameter(tied(model.one.detach()), requires_grad=False)
    before = [_values(tensor) for tensor in model.parameters()]
    with (
        swapping(model),
        pytest.raises(TieError, match=r"^two: shares only a part of its memory with one.*tt\.untie"),
    ):
        change(model)
    assert all(torch.equal(_values(tensor), old) for tensor, old in zip(model.parameters(), before, strict=True))


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # torch calls all but COO a beta
@pytest.mark.parametrize(
    "sparse",
    [
        torch.Tensor.to_sparse,
        torch.Tensor.to_sparse_csr,
        torch.Tensor.to_sparse_csc,
        lambda t: t.to_sparse_bsr((2, 2)),
        lambda t: t.to_sparse_bsc((2, 2)),
    ],
    ids=["coo", "csr", "csc", "bsr", "bsc"],
)
def test_sparse_parameters_are_not_torn(sparse):
    """``.data = `` of a compressed layout takes the new dtype and keeps the old values."""
    model = nn.Module()
    model.weight = weight = nn.Parameter(sparse(torch.eye(4)))
    with swapping(model):
        model.to(torch.float64)
    assert model.weight is weight
    held = weight.detach()
    values = held.coalesce().values() if held.layout == torch.sparse_coo else held.values()
    assert weight.dtype == values.dtype == torch.float64
    assert torch.equal(held.to_dense(), torch.eye(4, dtype=torch.float64))


class Grid(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("freqs", torch.arange(4.0))
        self.register_buffer("grid", self.freqs.expand(3, 4), persistent=False)


@pytest.mark.parametrize(
    "change", [nn.Module.double, lambda model: model.load_state_dict(model.state_dict(), assign=True)]
)
def test_a_tie_by_an_expanded_buffer_survives(change):
    model = Grid()
    with swapping(model):
        change(model)
    (tie,) = find_ties(model)
    assert tie.names == ("freqs", "grid")
    assert model.grid.stride(0) == 0
    assert torch.equal(model.grid, torch.arange(4.0, dtype=model.freqs.dtype).expand(3, 4))


CONVERSIONS = {
    "nowhere": lambda model: model.to("cpu"),
    "dtype": lambda model: model.bfloat16(),
    "twice": lambda model: model.double().float(),
}


@pytest.mark.parametrize("how", CONVERSIONS.values(), ids=CONVERSIONS)
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("encode", ENCODE.values(), ids=ENCODE)
def test_hooks_of_wrappers_survive_a_conversion_outside_of_scopes(encode, is_compiled, how):
    """Torch exchanges parameters that are wrappers, and forgets to connect the hooks that the object still has."""
    model = nn.ModuleDict({"linear": nn.Linear(64, 32), "embedding": nn.Embedding(8, 64)})
    for module in model.values():
        module.weight = nn.Parameter(encode(module.weight.detach()))
    parameters, seen = dict(model.named_parameters()), []
    for name, parameter in parameters.items():
        parameter.register_hook(lambda grad, name=name: seen.append(("grad", name)))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(("post", name)))
    how(model)
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    late = parameters["linear.weight"].register_hook(lambda grad: seen.append(("grad", "late")))
    step = lambda index: model["linear"](model["embedding"](index)).sum()  # noqa: E731
    step = torch.compile(step, backend="aot_eager") if is_compiled else step
    wanted = [(kind, name) for kind in ("grad", "post") for name in parameters]
    for turn in range(3):
        step(torch.tensor([1, 2])).backward()
        assert sorted(seen) == sorted([*wanted, *([("grad", "late")] if turn < 2 else [])])
        seen.clear()
        if turn == 1:
            late.remove()
            how(model)


@pytest.mark.parametrize("encode", ENCODE.values(), ids=ENCODE)
def test_two_wrappers_that_change_places_keep_their_own_hooks(encode):
    both = [nn.Parameter(encode(torch.randn(32, 64))) for _ in range(2)]
    seen = []
    for i, one in enumerate(both):
        one.register_hook(lambda _, i=i: seen.append(("grad", i)))
        one.register_post_accumulate_grad_hook(lambda held: seen.append(("post", held is both[0])))
        nn.functional.linear(torch.ones(1, 64), one)  # its hooks were looked at
    torch.utils.swap_tensors(*both)
    nn.functional.linear(torch.ones(1, 64), both[0]).sum().backward()
    assert seen == [("grad", 0), ("post", True)]


@pytest.mark.parametrize("encode", ENCODE.values(), ids=ENCODE)
def test_steps_in_hooks_train_after_a_conversion_outside_of_scopes(encode):
    """Optimizers by layer step in hooks, which accelerate's ``.to()`` follows."""
    model = nn.Linear(64, 32)
    model.weight = nn.Parameter(encode(model.weight.detach()))
    optimizers = {parameter: torch.optim.SGD([parameter], lr=1.0) for parameter in model.parameters()}

    def steps(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(steps)
    for _ in range(3):
        model.to("cpu")
        before = [parameter.detach().clone() for parameter in model.parameters()]
        model(torch.ones(2, 64)).sum().backward()
        for parameter, earlier in zip(model.parameters(), before, strict=True):
            assert parameter.grad is None
            assert not torch.equal(_values(parameter), _values(earlier))
