"""Inside ``swapping()`` stock ``load_state_dict`` keeps models attached, with and without ``assign=True``."""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.conversion.models import KINDS, bits, kept, rig, snapshot, tensors_of
from torchtether import ConversionError, TieError
from torchtether.exchange.scope import swapping
from torchtether.ties.records import find_ties

kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
assigns = pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
given = pytest.mark.parametrize("given", [True, False], ids=["given", "found"])


def geometry(model):
    return [(t.names, [v and (v.size, v.stride, v.offset) for v in t.views], t.objects) for t in find_ties(model)]


def checkpoint(kind):
    """A state dict of the same model after more training, whose tensors share nothing with each other."""
    made = rig(kind, steps=3)
    state = made.model.state_dict()
    for name in state:
        state[name] = state[name].detach().clone()
    return made, state


@kinds
@assigns
@given
def test_everything_survives_a_stock_load(kind, assign, given):
    made = rig(kind)
    before, ties = kept(made.model), geometry(made.model)
    source, state = checkpoint(kind)
    with swapping(made.model if given else None, optimizer=made.optimizer):
        result = made.model.load_state_dict(state, assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert kept(made.model) == before
    assert geometry(made.model) == ties
    theirs = tensors_of(source.model)
    for name, tensor in tensors_of(made.model).items():
        if name in state:
            assert bits(tensor) == bits(theirs[name]), name
    made.seen.clear()
    made.step()
    trained = {name for name, p in made.model.named_parameters() if p.requires_grad}
    assert set(made.seen) == {(how, name) for how in ("grad", "post") for name in trained}


@kinds
def test_assign_brings_the_dtype_and_state_follows(kind):
    made = rig(kind)
    before, ties = kept(made.model), geometry(made.model)
    source, _ = checkpoint(kind)
    source.model.double()
    with swapping(made.model, optimizer=made.optimizer):
        made.model.load_state_dict(source.model.state_dict(), assign=True)
    assert kept(made.model) == before
    assert geometry(made.model) == ties
    persistent = made.model.state_dict()
    assert all(t.dtype == torch.float64 for t in persistent.values() if t.is_floating_point())
    for state in made.optimizer.state.values():
        assert all(value.dtype == torch.float64 for value in state.values() if torch.is_tensor(value) and value.dim())


@kinds
@assigns
def test_dropped_aliases_are_filled_in(kind, assign):
    """safetensors files hold each tied tensor once; torch calls the rest missing, after having loaded them."""
    made = rig(kind)
    before, ties = kept(made.model), geometry(made.model)
    _, state = checkpoint(kind)
    for tie in find_ties(made.model):
        for alias in tie.aliases:
            state.pop(alias, None)
    with swapping(made.model, optimizer=made.optimizer):
        made.model.load_state_dict(state, assign=assign)
    assert kept(made.model) == before
    assert geometry(made.model) == ties
    for name, tensor in state.items():
        assert bits(tensors_of(made.model)[name]) == bits(tensor)


@assigns
def test_a_dropped_slice_of_a_plain_weight_is_filled_in(assign):
    model = torch.nn.Module()
    model.whole = torch.nn.Linear(8, 6, bias=False)
    model.part = torch.nn.Linear(8, 3, bias=False)
    model.part.weight = torch.nn.Parameter(model.whole.weight.detach()[1:4])
    tt.quantize(model, {"*": tt.Plain()})
    given = torch.randn(6, 8)
    with swapping(model):
        model.load_state_dict({"whole.weight": tt.Weight.encode(given, tt.Plain())}, assign=assign)
    assert torch.equal(model.part.weight.dequantize(), given[1:4])
    assert len(find_ties(model)) == 1


@assigns
def test_a_key_that_is_no_alias_is_still_missing(assign):
    made = rig(KINDS["tied_3"])
    _, state = checkpoint(KINDS["tied_3"])
    del state["l0.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*l0\.bias"), swapping(made.model):
        made.model.load_state_dict(state, assign=assign)


@assigns
@given
@pytest.mark.parametrize("which", ["first", "last"])
@pytest.mark.parametrize("kind", ["tied_2", "shared_module", "tied_buffers", "view_transposed", "view_slice"])
def test_tied_names_with_different_values_are_refused_before_anything_changes(kind, which, assign, given):
    made = rig(KINDS[kind])
    _, state = checkpoint(KINDS[kind])
    tie = find_ties(made.model)[0]
    alias = tie.aliases[0] if which == "first" else tie.owner
    state[alias] = state[alias] + 1
    before = snapshot(made.model, made.optimizer)
    with pytest.raises(TieError, match="different values") as caught, swapping(made.model if given else None):
        made.model.load_state_dict(state, assign=assign)
    assert "\n" not in str(caught.value)
    assert snapshot(made.model, made.optimizer) == before
    made.step()


@assigns
def test_nan_agrees_with_nan(assign):
    made = rig(KINDS["tied_2"])
    _, state = checkpoint(KINDS["tied_2"])
    state["l0.weight"][0, 0] = state["l1.weight"][0, 0] = float("nan")
    with swapping(made.model):
        made.model.load_state_dict(state, assign=assign)
    assert made.model.l0.weight[0, 0].isnan()


@given
def test_metadata_of_the_state_dict_stays_clean(given):
    """Torch writes "assign" into it, and the next load from the same dictionary assigns, unasked."""
    made = rig(KINDS["tied_2"])
    state = rig(KINDS["tied_2"]).model.state_dict()
    before = copy.deepcopy(state._metadata)
    with swapping(made.model if given else None):
        made.model.load_state_dict(state, assign=True)
        assert state._metadata == before
        made.model.load_state_dict(state)
    assert made.model.l0.weight.data_ptr() == state["l0.weight"].data_ptr()


def test_a_model_on_meta_is_loaded_under_its_optimizer():
    with torch.device("meta"):
        model = KINDS["view_transposed"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ids = [id(p) for p in model.parameters()]
    source, state = checkpoint(KINDS["view_transposed"])
    with swapping(model, optimizer=optimizer):
        model.load_state_dict(state, assign=True)
    assert [id(p) for p in model.parameters()] == ids
    assert geometry(model) == geometry(source.model)
    held = model.b.weight.detach().clone()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.b.weight, held)


@assigns
def test_a_quantized_model_stays_quantized(assign):
    made = rig(KINDS["quantized"])
    source = KINDS["quantized"]()
    state = source.state_dict()
    state["a.weight"] = torch.randn(32, 32)
    held = made.model.a.weight
    with swapping(made.model, optimizer=made.optimizer):
        made.model.load_state_dict(state, assign=assign)
    assert made.model.a.weight is held
    assert isinstance(held, tt.Weight)
    assert held.note == "a.weight"
    torch.testing.assert_close(held.dequantize(), state["a.weight"], atol=0.02, rtol=0)


@assigns
@given
def test_refusals_come_before_the_first_change(assign, given):
    made = rig(KINDS["lstm"])
    _, state = checkpoint(KINDS["lstm"])
    ref = weakref.ref(made.model.b.bias)
    before = snapshot(made.model, made.optimizer)
    with pytest.raises(ConversionError, match=r"b\.bias: held by a weak reference"):  # noqa: SIM117
        with swapping(made.model if given else None, optimizer=made.optimizer):
            made.model.load_state_dict(state, assign=assign)
    assert snapshot(made.model, made.optimizer) == before
    del ref
    with swapping():
        made.model.load_state_dict(state, assign=assign)
    made.step()


def test_a_grad_that_the_user_clears_stays_cleared():
    made = rig(KINDS["plain"])
    _, state = checkpoint(KINDS["plain"])
    with swapping(made.model, optimizer=made.optimizer):
        made.model.load_state_dict(state, assign=True)
        made.optimizer.zero_grad()
    assert all(p.grad is None for p in made.model.parameters())


def test_a_shape_mismatch_is_torchs_to_report():
    made = rig(KINDS["plain"])
    _, state = checkpoint(KINDS["plain"])
    state["a.weight"] = torch.zeros(5, 5)
    with pytest.raises(RuntimeError, match=r"size mismatch for a\.weight"), swapping(made.model):
        made.model.load_state_dict(state, assign=True)
    made.step()


@assigns
@given
@pytest.mark.parametrize("agree", [True, False])
def test_lazy_modules_are_loaded(assign, given, agree):
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(4), nn.LazyBatchNorm1d())
    model[2].bias = model[1].bias
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = list(model.parameters())
    state = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)).state_dict()
    with swapping(*([model] if given else []), optimizer=optimizer):
        if not agree:
            with pytest.raises(TieError, match=r"^1\.bias \(= 2\.bias\): the state dict has different values"):
                model.load_state_dict(state, assign=assign)
        state["2.bias"] = state["1.bias"]
        model.load_state_dict(state, assign=assign)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model[2].bias is model[1].bias
    assert all(p is one for p, one in zip(model.parameters(), held, strict=True))
    tt.check_optimizer(model, optimizer)


def test_the_child_of_a_larger_model():
    inner = rig(KINDS["tied_2"])
    outer = nn.ModuleDict({"inner": inner.model, "other": nn.Linear(2, 2)})
    before = kept(outer)
    state = {name: tensor.clone() for name, tensor in outer.state_dict().items() if name != "inner.l1.weight"}
    with swapping(inner.model, optimizer=inner.optimizer):
        outer.load_state_dict(state, assign=True)
    assert kept(outer) == before


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("scheme", [tt.int8(), tt.Plain()], ids=str)
def test_a_state_dict_may_lack_a_turned_alias_of_a_weight(assign, scheme):
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(16, 64), requires_grad=False)
    model.alias = nn.Parameter(model.weight.data.t(), requires_grad=False)
    tt.quantize(model, {"weight": scheme})
    given = {"weight": tt.Weight.encode(torch.randn(16, 64), scheme)}
    held, expected = (model.weight, model.alias), given["weight"].dequantize()
    with tt.swapping(model):
        model.load_state_dict(given, assign=assign)
    assert model.weight is held[0]
    assert model.alias is held[1]
    assert torch.equal(model.weight.dequantize(), expected)
    assert torch.equal(model.alias.dequantize(), expected.t())
    assert [tie.names for tie in tt.find_ties(model)] == [("weight", "alias")]


class Turned(nn.Module):
    """A linear layer, and a buffer that no state dict has, over the memory of its weight."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 4)
        self.register_buffer("turned", self.lin.weight.detach().t(), persistent=False)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_alias_that_no_state_dict_has_follows_its_owner(device, dtype):
    source = Turned().to(dtype)
    with torch.device(device):
        model = Turned()
    ties = geometry(model)
    with swapping(model):
        model.load_state_dict(source.state_dict(), assign=True)
    assert geometry(model) == ties != []
    assert torch.equal(model.turned, source.lin.weight.t())
    assert model.turned.dtype == model.lin.weight.dtype == dtype


class Repeated(nn.Module):
    """A buffer with as many elements as the parameter whose first half it repeats."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(8.0))
        self.register_buffer("twice", self.weight.detach()[:4].expand(2, 4))


def test_a_repeated_half_is_not_the_whole():
    model = Repeated()
    with swapping(model):
        model.load_state_dict({"twice": torch.full((2, 4), 9.0)}, assign=True, strict=False)
    assert model.weight.tolist() == [9, 9, 9, 9, 4, 5, 6, 7]
    assert find_ties(model)


def windows(*starts):
    """A model of windows of 8 rows over one table, of which no parameter is the whole."""
    table, model = torch.arange(64.0).view(16, 4), nn.Module()
    for start in starts:
        model.register_parameter(f"from{start}", nn.Parameter(table[start : start + 8]))
    return model


@assigns
@pytest.mark.parametrize("rows", [8, 16])
def test_rows_that_no_state_dict_has_are_missing(assign, rows):
    """They are not read from what lies behind the owner's tensor."""
    model = windows(0, 4)
    given = {"from0": torch.full((rows, 4), 9.0)[:8]}
    with swapping(model), pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "from4"'):
        model.load_state_dict(given, assign=assign)


@pytest.mark.parametrize("assign", [False, True])
def test_an_error_that_was_caught_does_not_keep_the_model(assign):
    gc.collect()
    gc.disable()
    try:
        model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
        model[1].weight = model[0].weight
        held = weakref.ref(model)
        given = {name: torch.full((2, 2), float(i)) for i, name in enumerate(model.state_dict())}
        with swapping(model), contextlib.suppress(TieError):
            model.load_state_dict(given, assign=assign)
        del model
        assert held() is None
    finally:
        gc.enable()
