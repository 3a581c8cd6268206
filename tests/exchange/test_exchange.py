"""``Exchange`` changes the contents of an object and keeps the object, also between plain tensors and Weights."""

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.conversion.models import KINDS, Tagged, rig, snapshot
from torchtether import ConversionError
from torchtether.conversion.converting import convert
from torchtether.exchange.exchange import LISTENERS, Exchange
from torchtether.torch_private import versions


def int8(tensor):
    return tt.Weight.encode(tensor.detach(), tt.int8())


def plain(tensor):
    return tensor.detach().dequantize() if isinstance(tensor, tt.Weight) else tensor.detach().clone()


TURNS = {
    "plain to plain": (plain, lambda t: t.detach() * 2),
    "plain to Weight": (plain, int8),
    "Weight to plain": (int8, plain),
    "Weight to Weight": (int8, lambda t: tt.Weight.encode(plain(t), tt.nf4())),
    "plain to transparent": (plain, lambda t: tt.Weight.encode(plain(t), tt.Plain())),
    "plain to meta": (plain, lambda t: t.detach().to("meta")),
    "Weight to meta": (int8, lambda t: t.detach().to("meta")),
}
turns = pytest.mark.parametrize(("start", "turn"), TURNS.values(), ids=TURNS)


def layer(start, *, trainable=True):
    made = nn.Linear(64, 4)
    made.weight = nn.Parameter(start(made.weight.data), requires_grad=trainable)
    made.weight.note = "kept"
    return made


@turns
@pytest.mark.parametrize("trainable", [True, False])
def test_put_keeps_the_object_and_what_users_put_on_it(start, turn, trainable):
    made = layer(start, trainable=trainable)
    weight, seen = made.weight, []
    grad = weight.grad = torch.ones(4, 64) if trainable else None
    handles = []
    if trainable:
        handles = [weight.register_hook(lambda g: seen.append("hook"))]
        handles.append(weight.register_post_accumulate_grad_hook(lambda p: seen.append("post")))
    new = turn(weight)
    with Exchange(made) as exchange:
        exchange.check([weight])
        exchange.put(weight, new)
    assert made.weight is weight
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, tt.Weight) == isinstance(new, tt.Weight)
    assert (weight.dtype, weight.device, weight.layout) == (new.dtype, new.device, new.layout)
    assert (weight.requires_grad, weight.note) == (trainable, "kept")
    assert weight.grad is grad
    assert grad is None or grad.device == weight.device
    if not new.is_meta:
        torch.testing.assert_close(plain(weight).to_dense(), plain(new).to_dense(), rtol=0, atol=0)
    if trainable and new.layout == torch.strided and not new.is_meta:
        made(torch.ones(2, 64)).sum().backward()
        assert seen == ["hook", "post"]
        for handle in handles:
            handle.remove()
        made(torch.ones(2, 64)).sum().backward()
        assert seen == ["hook", "post"]


@turns
def test_full_takes_everything_back(start, turn):
    made = layer(start)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    made(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    before = snapshot(made, optimizer)
    with pytest.raises(ZeroDivisionError), Exchange(made, optimizer=optimizer, atomic="full") as exchange:  # noqa: PT012
        exchange.put(made.weight, turn(made.weight))
        exchange.put(made.bias, made.bias.detach().double())
        raise ZeroDivisionError
    assert snapshot(made, optimizer) == before
    made(torch.ones(2, 64)).sum().backward()
    optimizer.step()


def test_full_takes_back_what_makes_stock_loads_and_libraries_know_of_weights(monkeypatch):
    prepared = []

    def prepare(model, path):
        prepared.append(path)
        return lambda: prepared.remove(path)

    monkeypatch.setitem(LISTENERS, "torch", prepare)
    model = nn.Sequential(nn.Linear(64, 4), nn.Linear(4, 64))
    with Exchange(model) as exchange:
        exchange.put(model[1].weight, int8(model[1].weight))
        exchange.know_weights(("1.weight",))
    with pytest.raises(ZeroDivisionError), Exchange(model, atomic="full") as exchange:  # noqa: PT012
        exchange.put(model[0].weight, int8(model[0].weight))
        exchange.know_weights(("0.weight",))
        assert prepared == ["1", "0"]
        raise ZeroDivisionError
    assert prepared == ["1"]
    given = {name: torch.randn(value.shape) for name, value in model.state_dict().items()}
    given["0.weight"], before = int8(given["0.weight"]), dict(model.named_parameters())
    model.load_state_dict(given, assign=True)  # stock torch replaces the Parameter, and a module with the hook keeps it
    assert model[0].weight is not before["0.weight"]
    assert model[1].weight is before["1.weight"]
    assert isinstance(model[1].weight, tt.Weight)


def test_full_takes_back_a_tensor_that_was_put_twice():
    made = layer(plain)
    before = snapshot(made)
    with pytest.raises(ZeroDivisionError), Exchange(made, atomic="full") as exchange:  # noqa: PT012
        for turn in (int8, plain, torch.Tensor.double, int8):
            exchange.put(made.weight, turn(made.weight).detach())
        raise ZeroDivisionError
    assert snapshot(made) == before


def test_the_new_tensor_is_left_to_the_caller_and_shares_its_memory():
    made = layer(plain)
    new = torch.zeros(4, 64)
    with Exchange(made) as exchange:
        exchange.put(made.weight, new)
    assert type(new) is torch.Tensor
    assert new.data_ptr() == made.weight.data_ptr()
    assert not made.weight._is_view()


def test_old_contents_are_freed_at_once_unless_full():
    for atomic, freed in (("checked", True), ("full", False)):
        made = layer(plain)
        storage = torch.multiprocessing.reductions.StorageWeakRef(made.weight.untyped_storage())
        with Exchange(made, atomic=atomic) as exchange:
            exchange.put(made.weight, int8(made.weight))
            assert storage.expired() == freed
        assert storage.expired()


def test_a_weight_keeps_its_tie_record():
    tie = tt.Tie(("weight", "other"))
    made = layer(lambda t: tt.Weight.encode(t, tt.int8(), tie=tie))
    with Exchange(made) as exchange:
        exchange.put(made.weight, int8(plain(made.weight)))
        assert made.weight.tie == tie
        newer = tt.Tie(("weight", "third"))
        exchange.put(made.weight, tt.Weight.encode(plain(made.weight), tt.int8(), tie=newer))
    assert made.weight.tie == newer


def test_a_parameter_subclass_comes_back_from_being_a_weight():
    made = layer(plain)
    made.weight = Tagged(made.weight.data, tag=7)
    with Exchange(made) as exchange:
        exchange.put(made.weight, int8(made.weight))
        exchange.put(made.weight, int8(plain(made.weight)))
    assert isinstance(made.weight, tt.Weight)
    with Exchange(made) as exchange:
        exchange.put(made.weight, plain(made.weight))
    assert type(made.weight) is Tagged
    assert made.weight.__dict__ == {"tag": 7}


def test_buffers_become_weights_and_plain_again():
    made = nn.Module()
    made.register_buffer("table", torch.randn(4, 64))
    table = made.table
    with Exchange(made) as exchange:
        exchange.put(table, int8(table))
    assert isinstance(made.table, tt.Weight)
    assert not isinstance(made.table, nn.Parameter)
    with Exchange(made) as exchange:
        exchange.put(table, plain(table))
    assert made.table is table
    assert type(table) is torch.Tensor


def test_a_layout_that_the_grad_cannot_follow():
    made = layer(plain)
    made.weight.grad = torch.ones(4, 64)
    before = snapshot(made)
    sparse = made.weight.detach().to_sparse()
    with pytest.raises(ConversionError, match=r"weight: has a grad of layout torch\.strided, .*Set its grad to None"):  # noqa: SIM117
        with Exchange(made) as exchange:
            exchange.put(made.weight, sparse)
    assert snapshot(made) == before
    made.weight.grad = None
    with Exchange(made) as exchange:
        exchange.put(made.weight, sparse)
    assert made.weight.is_sparse


def test_put_checks_what_was_not_checked():
    made = layer(plain)
    view = made.weight.view(-1)
    with pytest.raises(ConversionError, match=r"weight: held by a view"), Exchange(made) as exchange:
        exchange.put(made.weight, int8(made.weight))
    del view


@pytest.mark.parametrize(
    ("new", "match"),
    [
        (torch.zeros(64, 4), r"weight: has shape \(4, 64\), its new values have \(64, 4\)"),
        (torch.zeros(4, 64, dtype=torch.int32), r"weight: requires grad, which torch\.int32"),
    ],
)
def test_contents_that_do_not_fit(new, match):
    made = layer(plain)
    before = snapshot(made)
    with pytest.raises(ConversionError, match=match), Exchange(made) as exchange:
        exchange.put(made.weight, new)
    assert snapshot(made) == before


def test_an_autocast_cache_neither_stops_an_exchange_nor_serves_old_values():
    made = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made(x).sum().backward()
        made(x).sum().backward()
        with Exchange(made) as exchange:
            exchange.put(made.weight, torch.zeros(4, 4))
            exchange.put(made.bias, torch.zeros(4))
        assert made(x).abs().sum() == 0


def test_computed_weights_are_renewed():
    """The attribute that old weight_norm and prune leave on a module agrees with the parameters afterwards."""
    for kind in ("old_weight_norm", "pruned", "old_spectral_norm"):
        made = rig(KINDS[kind])
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                made.model(torch.ones(3, 4, dtype=made.model.b.weight.dtype))
            dtype = torch.float64 if made.model.b.weight.dtype == torch.float32 else torch.float32
            graph = made.model.a.weight.grad_fn is not None
            convert(made.model, dtype=dtype, optimizer=made.optimizer)
            assert made.model.a.weight.dtype == dtype
            assert (made.model.a.weight.grad_fn is not None) == graph
        made.step()


def test_rnns_know_their_weights_afterwards():
    made = rig(KINDS["lstm"])
    lstm = made.model.a
    with Exchange(made.model) as exchange:
        for parameter in lstm.parameters():
            exchange.put(parameter, parameter.detach().double())
    assert [ref() for ref in lstm._flat_weight_refs] == lstm._flat_weights
    assert all(one is two for one, two in zip(lstm._flat_weights, lstm.parameters(), strict=True))


def test_a_torch_without_the_private_calls_is_refused(monkeypatch):
    made = layer(plain)
    monkeypatch.delattr(torch._C, "_swap_tensor_impl")
    monkeypatch.setattr(versions, "MISSING", versions.find_missing())
    with pytest.raises(ConversionError, match=r"has no torch\._C\._swap_tensor_impl, without which"), Exchange(made):
        pass
