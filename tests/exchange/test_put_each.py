"""``Exchange.put_each``: the fast path does what the general path does, and leaves all other cases to it."""

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.conversion.models import KINDS, OPTIMIZERS, kept, rig, snapshot
from torchtether import ConversionError
from torchtether.conversion.converting import convert
from torchtether.exchange import exchange
from torchtether.exchange.exchange import Exchange
from torchtether.ties.components import distinct_tensors, find_components, split_shared


def facts(shot):
    """A snapshot without what differs between two models."""
    return {
        name: {key: fact for key, fact in one.items() if key not in ("id", "grad", "hooks", "post", "memory")}
        | {"grad": one["grad"] and one["grad"][1], "hooks": len(one["hooks"]), "post": len(one["post"])}
        for name, one in shot.items()
        if isinstance(one, dict)
    }


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("has_grads", [True, False], ids=["grads", "no grads"])
def test_the_quick_way_is_the_long_way(kind, has_grads, monkeypatch):
    """Everything alike afterwards, and in what is trained then; a view or an RNN at any place is no matter."""
    found = []
    for is_quick in (True, False):
        monkeypatch.setattr(exchange, "reset", exchange.reset if is_quick else lambda held, new: False)
        made = rig(kind, "sgd")
        if not has_grads:
            made.optimizer.zero_grad()
        before = kept(made.model)
        convert(made.model, dtype=torch.float64, optimizer=made.optimizer)
        assert kept(made.model) == before
        shots = [facts(snapshot(made.model, made.optimizer))]
        made.seen.clear()
        loss = made.step()
        trained = {name for name, p in made.model.named_parameters() if p.requires_grad}
        assert set(made.seen) == {(how, name) for how in ("grad", "post") for name in trained}
        for handle in made.handles:
            handle.remove()
        made.seen.clear()
        shots.append((loss, facts(snapshot(made.model, made.optimizer))))
        assert not made.seen
        found.append(shots)
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parted_finds_what_find_components_finds(kind, device):
    model = kind()
    model.empty = nn.Parameter(torch.empty(0, 3))
    model.sparse = nn.Parameter(torch.eye(3).to_sparse())
    if device == "meta":
        model.a = nn.Linear(3, 3, device="meta")
        model.a.twin = nn.Parameter(model.a.weight.data.t())
    unshared, components = split_shared(model, model.modules())
    found = {tuple(sorted(id(m.tensor) for m in component.members)) for component in components}
    assert found.isdisjoint((id(tensor),) for tensor in unshared)
    wanted = find_components(model)
    assert found | {(id(tensor),) for tensor in unshared} == {
        tuple(sorted(id(m.tensor) for m in component.members)) for component in wanted
    }
    assert set(components) <= set(wanted)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_follows_what_was_done_quickly(optimizer):
    made = rig(KINDS["plain"], optimizer)
    made.optimizer.zero_grad()
    convert(made.model, dtype=torch.float64, optimizer=made.optimizer)
    for state in made.optimizer.state.values():
        assert all(value.dtype == torch.float64 for value in state.values() if torch.is_tensor(value) and value.dim())
    made.step()


def test_old_contents_are_freed_one_by_one():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    memory = [torch.multiprocessing.reductions.StorageWeakRef(p.untyped_storage()) for p in model.parameters()]
    alive = []

    def make(tensor):
        alive.append(sum(not ref.expired() for ref in memory))
        return tensor.double()

    with Exchange(model) as exchange:
        exchange.check(model.parameters())
        exchange.put_each(model.parameters(), map(make, model.parameters()))
    assert alive == [6, 5, 4, 3, 2, 1]


def test_what_was_not_checked_is():
    model = nn.Linear(2, 2)
    ref = torch._C._WeakTensorRef(model.bias)
    with pytest.raises(ConversionError, match="bias: held by a weak reference"), Exchange(model) as exchange:
        exchange.put_each([model.bias], map(torch.Tensor.double, [model.bias]))
    assert not ref.expired()
    assert model.bias.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda t: t.long(), "weight: requires grad, which torch.int64"),
        (lambda t: t[:1].double(), r"weight: has shape \(2, 2\), its new values have \(1, 2\)"),
    ],
    ids=["whole numbers", "shape"],
)
def test_contents_that_do_not_fit_are_refused(make, match):
    model = nn.Linear(2, 2)
    before = snapshot(model)
    with pytest.raises(ConversionError, match=match), Exchange(model) as exchange:  # noqa: PT012
        exchange.check([model.weight])
        exchange.put_each([model.weight], map(make, [model.weight]))
    assert snapshot(model) == before


@pytest.mark.parametrize("make", [lambda t: t.to("meta"), lambda t: t.to_sparse(), None])
def test_other_kinds_of_memory_and_weights(make):
    make = make or (lambda t: tt.Weight.encode(t.detach(), tt.Plain()))
    model = nn.Linear(2, 2)
    held = model.weight
    wanted = make(held.detach())
    with Exchange(model) as exchange:
        exchange.check([held])
        exchange.put_each([held], map(make, [held]))
    assert model.weight is held
    assert isinstance(held, nn.Parameter)
    assert (isinstance(held, tt.Weight), held.device, held.layout) == (
        isinstance(wanted, tt.Weight),
        wanted.device,
        wanted.layout,
    )


def test_a_buffer_is_independent_of_what_it_was_detached_from():
    """``x.detach()`` shares its version counter with ``x``; memory of its own brings one of its own."""
    source, model = torch.ones(4), nn.Module()
    model.register_buffer("table", source.detach())
    convert(model, dtype=torch.float64)
    version = model.table._version
    source.add_(1)
    assert model.table._version == version


def test_a_parameter_that_was_cut_from_another_tensor_is_no_view_any_more():
    source, model = torch.ones(4), nn.Module()
    model.part = source[:2].as_subclass(nn.Parameter)
    assert model.part._base is source
    convert(model, dtype=torch.float64)
    assert model.part._base is None
    assert source.dtype == torch.float32


def test_weights_over_a_part_of_common_memory_are_refused_before_anything_changes():
    """Whatever comes first in the model; here it is plain, and would be converted first."""
    model = nn.ModuleDict({"plain": nn.Linear(4, 4), "a": nn.Linear(64, 4), "b": nn.Linear(64, 4)})
    one = tt.Weight.encode(torch.randn(4, 64), tt.int8())
    parts = {**one.parts, "scale": one.parts["scale"].clone()}
    model.a.weight = nn.Parameter(one, requires_grad=False)
    model.b.weight = nn.Parameter(tt.Weight(parts, one.spec), requires_grad=False)
    before = snapshot(model)
    with pytest.raises(tt.errors.TieError, match="shares only a part of its memory"):
        convert(model, dtype=torch.bfloat16)
    assert snapshot(model) == before


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("has_grads", [True, False], ids=["grads", "no grads"])
@pytest.mark.parametrize("atomic", ["checked", "full"])
def test_contents_of_its_own_are_put_as_any_others(kind, has_grads, atomic):
    """``put_each`` with ``is_own``: every tensor in new memory, views among them cut from something larger."""
    found = []
    for is_quick in (True, False):
        made = rig(kind, "sgd")
        if not has_grads:
            made.optimizer.zero_grad()
        before = kept(made.model)
        with Exchange(made.model, optimizer=made.optimizer, atomic=atomic) as exchange:
            held = distinct_tensors(exchange.modules)
            exchange.check(held)
            put_contents(exchange, held, is_quick)
        assert kept(made.model) == before
        assert all(tensor._base is None for tensor in held)
        shots = [facts(snapshot(made.model, made.optimizer))]
        made.seen.clear()
        loss = made.step()
        trained = {name for name, p in made.model.named_parameters() if p.requires_grad}
        assert set(made.seen) == {(how, name) for how in ("grad", "post") for name in trained}
        found.append((shots, loss, facts(snapshot(made.model, made.optimizer))))
    assert found[0] == found[1]


def put_contents(exchange, held, is_quick):
    """Every tensor has new contents, by ``put_each`` with ``is_own`` or one by one."""
    new = [contents(tensor, i) for i, tensor in enumerate(held)]
    if is_quick:
        exchange.put_each(held, new, is_own=True)
        return
    for tensor, one in zip(held, new, strict=True):
        exchange.put(tensor, one)


def contents(tensor, number):
    """What is in ``tensor``, in double precision, every other time as a view."""
    new = tensor.detach().clone()
    new = new.double() if new.is_floating_point() else new
    return new.view(new.shape) if number % 2 and type(new) is torch.Tensor else new


def test_own_contents_are_checked_too():
    model = nn.Linear(2, 2, device="meta")
    ref = torch._C._WeakTensorRef(model.bias)
    with pytest.raises(ConversionError, match="bias: held by a weak reference"), Exchange(model) as exchange:
        exchange.put_each([model.bias], [torch.zeros(2)], is_own=True)
    assert not ref.expired()
    assert model.bias.is_meta
    with pytest.raises(ConversionError, match=r"weight: has shape \(2, 2\)"), Exchange(model) as exchange:  # noqa: PT012
        exchange.check([model.weight])
        exchange.put_each([model.weight], [torch.zeros(2)], is_own=True)
    assert model.weight.is_meta


def test_own_contents_are_taken_back():
    model = nn.Linear(2, 2, device="meta")
    before = snapshot(model)
    with pytest.raises(MemoryError), Exchange(model, atomic="full") as exchange:  # noqa: PT012
        exchange.check([model.weight])
        exchange.put_each([model.weight], [torch.zeros(2, 2)], is_own=True)
        assert not model.weight.is_meta
        raise MemoryError
    assert snapshot(model) == before


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_contents_of_its_own_are_put_as_any_others_without_hooks(kind):
    found = []
    for is_quick in (True, False):
        torch.default_generator.manual_seed(0)
        model = kind()
        before = kept(model)
        with Exchange(model) as exchange:
            held = distinct_tensors(exchange.modules)
            exchange.check(held)
            put_contents(exchange, held, is_quick)
        assert kept(model) == before
        assert all(tensor._base is None and tensor.is_leaf for tensor in held)
        found.append(facts(snapshot(model)))
    assert found[0] == found[1]


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("is_held", [False, True], ids=["plain before", "Weight before"])
def test_a_weight_of_its_own_is_put_as_any_other(is_view, is_held):
    found = []
    for is_quick in (True, False):
        torch.default_generator.manual_seed(0)
        model = nn.Linear(4, 4)
        tie = tt.Tie(("weight", "elsewhere"))
        if is_held:
            tt.quantize(model, "int8")
            model.weight._spec = model.weight.spec.replace(tie=tie)
        held = model.weight
        new = tt.Weight.encode(torch.arange(16.0).view(4, 4), tt.int8())
        new = new.t().t() if is_view else new
        with Exchange(model) as exchange:
            exchange.check([held])
            if is_quick:
                exchange.put_each([held], [new], is_own=True)
            else:
                exchange.put(held, new)
        assert model.weight is held
        assert held.requires_grad
        assert held._base is None
        assert held.is_leaf
        assert held.tie == (tie if is_held else None)
        found.append((facts(snapshot(model)), held.dequantize().tolist()))
    assert found[0] == found[1]
