"""``convert`` keeps what it converts attached: kinds of models x optimizers x before and after the first step."""

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.conversion.models import KINDS, OPTIMIZERS, kept, rig, snapshot, tensors_of
from torchtether.conversion.converting import convert
from torchtether.exchange.exchange import Exchange
from torchtether.ties.components import find_components
from torchtether.ties.records import find_ties

kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
optimizers = pytest.mark.parametrize("optimizer", OPTIMIZERS)
steps = pytest.mark.parametrize("steps", [0, 1])


@kinds
@optimizers
@steps
def test_objects_ties_grads_hooks_and_state_survive(kind, optimizer, steps):
    made = rig(kind, optimizer, steps=steps)
    before, ties = kept(made.model), [tie.names for tie in find_ties(made.model)]
    assert convert(made.model, dtype=torch.float64, optimizer=made.optimizer) is made.model
    assert kept(made.model) == before
    assert [tie.names for tie in find_ties(made.model)] == ties
    for tensor in tensors_of(made.model).values():
        assert tensor.dtype == (torch.float64 if tensor.is_floating_point() else torch.int64)
        assert tensor.grad_fn is None
        assert tensor.grad is None or tensor.grad.dtype == torch.float64
    for state in made.optimizer.state.values():
        assert all(value.dtype == torch.float64 for value in state.values() if torch.is_tensor(value) and value.dim())

    made.seen.clear()
    made.step()
    trained = {name for name, p in made.model.named_parameters() if p.requires_grad}
    assert {name for how, name in made.seen if how == "grad"} == trained
    assert {name for how, name in made.seen if how == "post"} == trained


@kinds
@optimizers
@steps
def test_training_goes_on_as_in_a_stock_conversion(kind, optimizer, steps):
    """From the same state, the next step is bit for bit that of ``.to(bfloat16)`` with the state cast by hand."""
    ours, stock = rig(kind, optimizer, steps=steps), rig(kind, optimizer, steps=steps)
    if any(view for tie in find_ties(ours.model) for view in tie.views):
        pytest.skip("torch splits views, so there is no stock conversion to agree with")
    convert(ours.model, dtype=torch.bfloat16, optimizer=ours.optimizer)
    if "first" in stock.model._buffers:
        stock.model._buffers["first"] = None  # torch splits a buffer from its parameter
    stock.model.to(torch.bfloat16)
    stock.optimizer.load_state_dict(stock.optimizer.state_dict())
    for _ in range(2):
        assert ours.step() == stock.step()
    theirs = dict(stock.model.named_parameters())
    for name, parameter in ours.model.named_parameters():
        assert torch.equal(parameter, theirs[name]), name


@kinds
def test_views_share_memory_afterwards(kind):
    made = rig(kind)
    ties = [tie for tie in find_ties(made.model) if not all(tie.objects)]
    convert(made.model, dtype=torch.float64, optimizer=made.optimizer)
    for before, after in zip(ties, [tie for tie in find_ties(made.model) if not all(tie.objects)], strict=True):
        geometry = [view and (view.size, view.stride, view.offset) for view in before.views]
        assert geometry == [view and (view.size, view.stride, view.offset) for view in after.views]


@kinds
def test_handles_still_remove_and_later_hooks_fire(kind):
    made = rig(kind)
    convert(made.model, dtype=torch.float64, optimizer=made.optimizer)
    for handle in made.handles:
        handle.remove()
    for name, parameter in made.model.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda grad, name=name: made.seen.append(("late", name)))
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: made.seen.append(("later", name)))
    made.seen.clear()
    made.step()
    trained = {name for name, p in made.model.named_parameters() if p.requires_grad}
    assert set(made.seen) == {(how, name) for how in ("late", "later") for name in trained}


@kinds
@pytest.mark.parametrize("atomic", ["checked", "full"])
def test_a_conversion_that_changes_nothing_touches_nothing(kind, atomic, monkeypatch):
    made = rig(kind)
    before = snapshot(made.model, made.optimizer)
    monkeypatch.setattr(Exchange, "put", None)
    convert(made.model, dtype=torch.float32, device="cpu", optimizer=made.optimizer, atomic=atomic)
    convert(made.model, optimizer=made.optimizer, atomic=atomic)
    assert snapshot(made.model, made.optimizer) == before


@kinds
def test_values_are_converted_once_per_piece_of_memory(kind):
    """Afterwards there are the pieces of memory that there were, and not one for each name or object."""
    made = rig(kind)
    before = [component.names for component in find_components(made.model)]
    convert(made.model, dtype=torch.float64)
    assert [component.names for component in find_components(made.model)] == before


@kinds
def test_there_and_back_is_the_same_model(kind):
    made = rig(kind)
    before = snapshot(made.model, made.optimizer)
    for dtype in (torch.float64, torch.float32):
        convert(made.model, dtype=dtype, optimizer=made.optimizer)
    after = snapshot(made.model, made.optimizer)
    for name, shot in before.items():
        if isinstance(shot, dict):
            assert {k: v for k, v in after[name].items() if k != "memory"} == {
                k: v for k, v in shot.items() if k != "memory"
            }


@kinds
def test_moving_to_meta_keeps_everything_but_values(kind):
    """Also a device that ``.data =`` cannot reach, and dtypes that differ inside one memory."""
    made = rig(kind)
    before, ties = kept(made.model), [tie.names for tie in find_ties(made.model)]
    convert(made.model, device="meta", optimizer=made.optimizer)
    assert kept(made.model) == before
    assert [tie.names for tie in find_ties(made.model)] == ties
    assert all(tensor.is_meta for tensor in tensors_of(made.model).values())
    for state in made.optimizer.state.values():
        assert all(value.is_meta for value in state.values() if torch.is_tensor(value) and value.dim())


def test_memory_of_two_dtypes_moves_but_does_not_convert():
    layer = torch.nn.Linear(4, 4)
    layer.register_buffer("codes", layer.weight.data.view(torch.int32))
    with pytest.raises(
        RuntimeError, match=r"weight: shares memory with a tensor of another dtype .*codes is torch.int32"
    ):
        convert(layer, dtype=torch.bfloat16)
    convert(layer, device="meta")
    (tie,) = find_ties(layer)
    assert tie.names == ("weight", "codes")


@pytest.mark.parametrize("atomic", ["checked", "full"])
@pytest.mark.parametrize("has_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, None], ids=str)
def test_grads_stay_in_the_dtype_that_the_user_chose(dtype, has_grad, atomic):
    """Of a bfloat16 model float32 grads, as for their accumulation."""
    model = nn.Linear(64, 64, dtype=torch.bfloat16)
    model.weight.grad_dtype = dtype
    if has_grad:
        model.weight.grad = grad = torch.full((64, 64), 1 / 3)
    verbs = (
        lambda: tt.quantize(model, "int8", atomic=atomic),
        lambda: convert(model, dtype=torch.float64, atomic=atomic),
        lambda: tt.dequantize(model, atomic=atomic),
        lambda: convert(model, dtype=torch.bfloat16, atomic=atomic),
        lambda: _in_scope(model, nn.Module.double),
        lambda: tt.quantize(model, "int8"),
        lambda: _in_scope(model, nn.Module.float),
    )
    for verb in verbs:
        verb()
        assert model.weight.grad_dtype == dtype
        if has_grad:
            assert model.weight.grad is grad
            assert torch.equal(grad, torch.full((64, 64), 1 / 3))


def _in_scope(model, stock):
    with tt.swapping(model):
        stock(model)


def test_an_average_model_and_its_average_convert():
    model = torch.nn.Linear(4, 4)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn())
    average.update_parameters(model)
    convert(model, dtype=torch.float64)
    convert(average, dtype=torch.float64)
    average.update_parameters(model)
    assert torch.equal(average.module.weight, model.weight)
    assert average.n_averaged.dtype == torch.int64


def test_a_grad_is_converted_with_its_parameter():
    layer = torch.nn.Linear(2, 2)
    layer.weight.grad = grad = torch.full((2, 2), 0.3)
    convert(layer, dtype=torch.bfloat16)
    assert layer.weight.grad is grad
    assert torch.equal(grad, torch.full((2, 2), 0.3).bfloat16())
    layer.bias.grad = torch.zeros(2, dtype=torch.bfloat16)  # torch accepts it only if the parameter says bfloat16


def test_a_sparse_grad_survives():
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    convert(table, dtype=torch.float64)
    assert table.weight.grad.is_sparse
    assert table.weight.grad.dtype == torch.float64


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # torch calls CSR a beta
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_parameters_convert_whole(layout):
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.eye(3).to_sparse(layout=layout))
    weight = layer.weight
    convert(layer, dtype=torch.float64)
    assert layer.weight is weight
    values = weight.detach().coalesce() if layout == torch.sparse_coo else weight
    assert weight.dtype == values.values().dtype == torch.float64
    assert torch.equal(weight.to_dense(), torch.eye(3, dtype=torch.float64))


def test_complex_parameters_become_wider_complex():
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    convert(layer, device="cpu")
    assert layer.weight.dtype == torch.complex64


class KeepsPositions(nn.Linear):
    """A layer with a buffer that stays float32, as position embeddings of timm keep theirs."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("positions", torch.rand(4))

    def _apply(self, fn, recurse=True):
        positions = self.positions
        super()._apply(fn, recurse)
        self.positions = positions
        return self


class KeepsCache(nn.Linear):
    """A model that moves a plain tensor in ``to``, which torch calls for the root alone."""

    def __init__(self):
        super().__init__(4, 4)
        self.cache = torch.rand(4)

    def to(self, *args, **kwargs):
        self.cache = self.cache.to(*args, **kwargs)
        return super().to(*args, **kwargs)


def test_a_root_that_converts_more_in_its_own_to_is_named():
    model = KeepsCache()
    with tt.swapping(model):  # the way that the warning names
        model.to(torch.bfloat16)
    assert (model.cache.dtype, model.weight.dtype) == (torch.bfloat16, torch.bfloat16)
    with pytest.warns(UserWarning, match=r"^KeepsCache \(KeepsCache\.to\): \.to\(\) calls this, tt\.convert does not"):
        tt.convert(model, dtype=torch.float32)
    tt.convert(nn.Sequential(KeepsCache()), dtype=torch.bfloat16)  # nor does .to() call it there


def test_code_that_only_stock_conversions_call_is_named():
    model = nn.Sequential(nn.Linear(4, 4), KeepsPositions(), nn.GRU(4, 4))
    with tt.swapping(model):  # the way that the warning names
        model.to(torch.bfloat16)
    assert (model[1].positions.dtype, model[1].weight.dtype) == (torch.float32, torch.bfloat16)
    words = r"^1 \(KeepsPositions\._apply\): \.to\(\) calls this, tt\.convert does not"
    with pytest.warns(UserWarning, match=words) as found:
        tt.convert(model, dtype=torch.float32)
    assert len(found) == 1
    tt.convert(model, dtype=torch.float32)  # nothing to do, nothing to say
