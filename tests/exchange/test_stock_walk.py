"""Inside ``swapping()`` stock conversions take a fast path, which does the same as the mode over every function."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import torchtether as tt
from tests.conversion.models import KINDS, kept, rig, snapshot, tensors_of
from tests.exchange.test_put_each import facts
from torchtether import ConversionError
from torchtether.exchange.exchange import LOCK
from torchtether.exchange.scope import swapping
from torchtether.exchange.stock_call import StockCall
from torchtether.ties.records import find_ties

TORCHS = nn.Module._apply

LOADS = nn.Module.load_state_dict


def columns(tensor):
    if tensor.dim() != 2 or isinstance(tensor, tt.Weight):
        return tensor.clone()
    return torch.empty_strided(tensor.shape, (1, tensor.shape[0]), dtype=tensor.dtype).copy_(tensor)


def there_and_back(model):
    """What nobody has written is the same each time: a Weight keeps scales that give its values exactly, any scales."""
    torch.use_deterministic_algorithms(True)
    try:
        model.to_empty(device="meta").to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    return model._apply(lambda t: t.detach().fill_(1))


CONVERSIONS = {
    "double": nn.Module.double,
    "clone": lambda m: m._apply(lambda t: t.clone()),
    "share": nn.Module.share_memory,
    "there and back": there_and_back,
    "columns": lambda m: m._apply(columns),
}


@pytest.fixture(autouse=True)
def _everything_is_put_back():
    yield
    assert nn.Module._apply is TORCHS
    assert nn.Module.load_state_dict is LOADS


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("has_grads", [True, False], ids=["grads", "no grads"])
@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_the_quick_way_is_the_way_of_the_mode(kind, has_grads, convert, monkeypatch):
    found = []
    for is_quick in (True, False):
        monkeypatch.setattr(StockCall, "convert", StockCall.convert if is_quick else lambda *given: False)
        made = rig(kind, "sgd")
        if not has_grads:
            made.optimizer.zero_grad()
        if convert is nn.Module.share_memory and any(isinstance(t, tt.Weight) for t in made.model.parameters()):
            return  # of a Weight it makes another; see test_weight
        before = kept(made.model)
        with swapping(made.model, optimizer=made.optimizer):
            convert(made.model)
            assert not is_quick or kept(made.model) == before  # at once, not when something else happens next
        assert kept(made.model) == before
        shots = [facts(snapshot(made.model, made.optimizer))]
        shots.append({name: t.is_shared() for name, t in tensors_of(made.model).items() if type(t) is nn.Parameter})
        shots.append({n: p.grad.is_shared() for n, p in made.model.named_parameters() if p.grad is not None})
        made.seen.clear()
        shots.append(made.step())
        trained = {name for name, p in made.model.named_parameters() if p.requires_grad}
        assert set(made.seen) == {(how, name) for how in ("grad", "post") for name in trained}
        shots.append(find_ties(made.model))
        found.append(shots)
    assert found[0] == found[1]


def test_a_grad_is_what_the_function_makes_of_it():
    """Its dtype and device do not tell all: a grad takes the memory format of its parameter, as torch has it."""
    model = nn.Conv2d(3, 4, 3)
    model(torch.randn(1, 3, 5, 5)).sum().backward()
    grad, values = model.weight.grad, model.weight.grad.clone()
    with swapping(model):
        model.to(memory_format=torch.channels_last)
    assert model.weight.grad is grad
    assert torch.equal(grad, values)
    assert grad.is_contiguous(memory_format=torch.channels_last)
    model.weight.grad = values.clone()  # the parameter stays as it is, the grad does not
    with swapping(model):
        model.to(memory_format=torch.channels_last)
    assert torch.equal(model.weight.grad, values)
    assert model.weight.grad.is_contiguous(memory_format=torch.channels_last)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_function_runs_once_for_each_parameter():
    made = rig(KINDS["tied_3"])
    value = made.model.l0.weight.detach().clone()
    with swapping():
        made.model._apply(lambda t: t * 2)
    assert torch.equal(made.model.l0.weight, value * 2)
    assert made.model.l2.weight is made.model.l0.weight


def test_what_the_function_keeps_is_left_as_it_is():
    model = nn.BatchNorm1d(3)
    kept_by_user = {id(t): t.detach().double().requires_grad_() for t in (*model.parameters(), *model.buffers())}
    before = {key: (t, t.clone(), t.requires_grad) for key, t in kept_by_user.items()}
    model.weight.grad = torch.ones(3)
    kept_by_user[id(model.weight.grad)] = torch.zeros(3, dtype=torch.float64)
    with swapping():
        model._apply(lambda t: kept_by_user[id(t)].detach() if t is model.weight else kept_by_user[id(t)])
    for tensor, values, requires_grad in before.values():
        assert type(tensor) is torch.Tensor
        assert torch.equal(tensor, values)
        assert tensor.requires_grad == requires_grad


def test_another_thread_gets_torchs_own_conversion():
    """It may convert what this scope would refuse, and is not seen by it."""
    inner, results = rig(KINDS["plain"]), []
    view = inner.model.a.weight.view(-1)

    def other():
        torch.__future__.set_swap_module_params_on_conversion(False)
        results.append(inner.model.double())

    with swapping():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        torch.__future__.set_swap_module_params_on_conversion(True)
        assert results
        with pytest.raises(ConversionError, match="held by a view"):
            inner.model.double()
    assert inner.model.a.weight.dtype == torch.float64
    assert view.dtype == torch.float32


def test_state_of_every_optimizer_around_follows():
    one, two = rig(KINDS["plain"]), rig(KINDS["plain"])
    both = nn.ModuleList([one.model, two.model])
    with swapping(one.model, optimizer=one.optimizer), swapping(two.model, optimizer=two.optimizer):
        both.double()
    for made in (one, two):
        assert {v.dtype for s in made.optimizer.state.values() for v in s.values() if v.dim()} == {torch.float64}
        made.step()


class Counts(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_one_scope_may_be_entered_twice():
    model = nn.Linear(2, 2)
    weight, scope, stock = model.weight, tt.swapping(model), nn.Module._apply
    with scope:
        with scope:
            model.bfloat16()
        model.double()
    assert model.weight is weight
    assert weight.dtype == torch.float64
    assert nn.Module._apply is stock
    assert not torch.__future__.get_swap_module_params_on_conversion()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(LOCK.acquire, timeout=1).result(), "the lock of all converters is held for ever"
        pool.submit(LOCK.release).result()


@pytest.mark.parametrize("fails", [True, False])
def test_modes_of_others_see_the_conversion_and_are_left_in_place(fails):
    made, outside, inside = rig(KINDS["plain"]), Counts(), Counts()

    def function(tensor):
        if fails and tensor is made.model.b.bias:
            raise ZeroDivisionError
        return tensor.double()

    with outside, swapping(made.model), inside:
        modes = torch.overrides._get_current_function_mode_stack()
        try:
            made.model._apply(function)
        except ZeroDivisionError:
            assert fails
        assert torch.overrides._get_current_function_mode_stack() == modes
    assert torch.Tensor.double in inside.functions
    assert torch.Tensor.double in outside.functions


class OwnWalk(nn.ModuleDict):
    """Converts its children by itself, and something beside them."""

    def _apply(self, fn, recurse=True):
        for child in self.children():
            child._apply(fn)
        self.extra = fn(self.extra)
        return self


def test_a_module_that_walks_itself_keeps_ties_between_its_children():
    model = OwnWalk({"a": nn.Linear(4, 6), "b": nn.Linear(6, 4)})
    model.extra = torch.ones(2)
    model.b.weight = nn.Parameter(model.a.weight.data.t())
    ties, ids = find_ties(model), [id(p) for p in model.parameters()]
    with swapping(model):
        model.double()
    assert [tie.names for tie in find_ties(model)] == [tie.names for tie in ties]
    assert [id(p) for p in model.parameters()] == ids
    assert model.extra.dtype == torch.float64


class Hides(nn.Module):
    """Converts a module that it has not registered."""

    def __init__(self):
        super().__init__()
        self.shown = nn.Linear(2, 2)
        self.__dict__["hidden"] = nn.Linear(2, 2)

    def _apply(self, fn, recurse=True):
        self.hidden._apply(fn)
        return super()._apply(fn, recurse)


def test_a_module_that_is_not_registered_is_converted_too():
    model = Hides()
    held = model.hidden.weight
    with swapping(model):
        model.double()
    assert model.hidden.weight is held
    assert {held.dtype, model.shown.weight.dtype} == {torch.float64}


def test_who_has_replaced_apply_is_asked(monkeypatch):
    seen = []

    def theirs(self, fn, recurse=True):
        seen.append(self)
        return TORCHS(self, fn, recurse)

    made = rig(KINDS["view_transposed"])
    before = kept(made.model)
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "_apply", theirs)
        with swapping(made.model, optimizer=made.optimizer):
            made.model.double()
        assert nn.Module._apply is theirs
    assert made.model in seen
    assert kept(made.model) == before
    with swapping():
        ours = nn.Module._apply
        nn.Module._apply = theirs
    assert nn.Module._apply is theirs
    nn.Module._apply = TORCHS
    model = nn.Linear(2, 2)
    assert ours(model, torch.Tensor.double) is model  # who kept it meanwhile converts as torch does
    assert model.weight.dtype == torch.float64


def test_an_error_is_not_hidden_by_ties_that_it_leaves_broken():
    made = rig(KINDS["view_transposed"])
    made.optimizer.zero_grad()

    def fragile(tensor):
        if tensor is made.model.b.bias:
            raise MemoryError("injected")
        return tensor.double() if tensor is made.model.a.weight else tensor.clone()

    with pytest.raises(MemoryError, match="injected") as caught, swapping(made.model):
        made.model._apply(fragile)
    assert any(
        "shares memory in the model, but the call gave its tensors different" in note for note in caught.value.__notes__
    )


@pytest.mark.parametrize("what", ["another class", "a new parameter"])
def test_torch_converts_what_the_quick_way_does_not_know(what):
    """Such a module is left to torch as a whole, with nothing done."""
    model = KINDS["subclass"]() if what == "another class" else nn.ModuleDict({"a": nn.Linear(4, 4)})
    call = StockCall(model, (), loads=False, metadata=None)
    call.begin()
    if what == "a new parameter":
        model.a.weight = nn.Parameter(torch.ones(4, 4))
    before = snapshot(model)
    assert not call.convert(model.a, torch.Tensor.double)
    assert snapshot(model) == before
    call.end()


class Counting(nn.Module):
    """Has a walk of its own, and calls itself something else than most."""

    def __init__(this):
        super().__init__()
        this.inner, this.count = nn.Linear(2, 2), 0

    def _apply(this, fn, recurse=True):
        this.count += 1
        return super()._apply(fn, recurse)


@pytest.mark.parametrize("is_quick", [True, False])
def test_walks_of_modules_may_call_the_module_what_they_like(monkeypatch, is_quick):
    monkeypatch.setattr(StockCall, "convert", StockCall.convert if is_quick else lambda *given: False)

    def _apply(model):
        return model._apply(lambda t: t.double())

    model = nn.Sequential(Counting(), nn.Linear(2, 2))
    model[1].weight = model[0].inner.weight
    with swapping(model):
        _apply(model)
        model[0].half()
    assert model[0].count == 2
    assert model[1].weight is model[0].inner.weight
    assert model[1].weight.dtype == torch.float16


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.15's compiler's own
@pytest.mark.parametrize("middle", [nn.Identity, lambda: nn.LSTM(3, 3)], ids=["whole", "in pieces"])
def test_a_model_compiles_inside_the_scope(middle):
    """Before and after a conversion; as a whole, or around modules that the compiler leaves to Python, as RNNs."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.middle, self.head = nn.Embedding(7, 3), middle(), nn.Linear(3, 7, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, x):
            h = self.middle(self.emb(x))
            return self.head(h[0] if isinstance(h, tuple) else h)

    model, x = Model(), torch.arange(4)
    torch._dynamo.reset()
    run = torch.compile(model, backend="eager", fullgraph=middle is nn.Identity)
    with swapping(rig(KINDS["plain"]).model), swapping(model):
        assert torch.equal(run(x), model(x))
        model.double()
        assert run(x).dtype == torch.float64
        assert torch.equal(run(x), model(x))
    assert model.head.weight is model.emb.weight


class Own(nn.Parameter):
    """Torch converts these itself, and Weights; so the scope sees each tensor function of that module."""


@pytest.mark.parametrize(
    "make", [lambda t: nn.Parameter(tt.Weight.encode(t.detach(), tt.int8())), Own], ids=["weight", "own"]
)
def test_modules_that_torch_converts_itself_are_part_of_the_same_call(make):
    """Memory that others share before and behind them stays shared; buffers and tied parameters, too."""
    model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(5))
    model[2].weight = nn.Parameter(model[0].weight.detach().t())
    model[4].register_buffer("row", model[0].weight.detach()[0])
    model[1].weight = model[3].weight = make(model[1].weight.detach()).requires_grad_(False)
    ties, before = [tie.names for tie in find_ties(model)], {n: id(t) for n, t in tensors_of(model).items()}
    assert len(ties) == 2
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones(8, 8) if parameter.requires_grad else None
    optimizer.step()
    with swapping(model, optimizer=optimizer):
        model.to(torch.float64)
    assert [tie.names for tie in find_ties(model)] == ties
    assert {n: id(t) for n, t in tensors_of(model).items()} == before
    assert {tensor.dtype for tensor in tensors_of(model).values()} == {torch.float64}
    assert {s["exp_avg"].dtype for s in optimizer.state.values()} == {torch.float64}


def test_what_refuses_a_conversion_is_named():
    model = nn.ModuleDict({"one": nn.Conv2d(4, 4, 3), "two": nn.Conv2d(4, 4, 3)})
    tt.quantize(model, {"two.weight": "int8"})
    with swapping(model), pytest.raises(tt.UnsupportedOpError, match=r"^two\.weight: .*\(4, 4, 3, 3\).*channels_last"):
        model.to(memory_format=torch.channels_last)
