"""``torch.OutOfMemoryError`` at any copy: with ``atomic="full"`` everything is as it was."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchtether as tt
from tests.conversion.models import KINDS, rig, snapshot

aten = torch.ops.aten
kinds = pytest.mark.parametrize(
    "kind", ["plain", "tied_3", "view_slice", "view_transposed", "tied_buffers", "quantized", "batch_norm"]
)


class Full(TorchDispatchMode):
    """Memory that ends with the ``at``-th copy."""

    OPS = (aten._to_copy.default, aten.clone.default, aten.copy_.default)

    def __init__(self, at):
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op in self.OPS:
            self.count += 1
            if self.count - 1 == self.at:
                raise torch.OutOfMemoryError("injected")
        return op(*args, **kwargs or {})


def each_failure(run, model, optimizer=None, most=500):
    """``run`` fails at each of its copies in turn, and changes nothing; at last it succeeds. Returns their number."""
    before, ties = snapshot(model, optimizer), tt.find_ties(model)
    for at in range(most):
        mode = Full(at)
        try:
            with mode:
                run()
        except torch.OutOfMemoryError:
            assert snapshot(model, optimizer) == before, f"copy {at}"
            assert tt.find_ties(model) == ties
        else:
            assert mode.count == at
            return at
    raise AssertionError(f"more than {most} copies")


@kinds
def test_convert(kind):
    made = rig(KINDS[kind])
    run = partial(tt.convert, made.model, dtype=torch.float64, optimizer=made.optimizer, atomic="full")
    assert each_failure(run, made.model, made.optimizer) > 1
    made.step()


@kinds
def test_quantize_and_dequantize(kind):
    made = rig(KINDS[kind])
    matrices = {name: "int8" for name, p in made.model.named_parameters() if p.dim() == 2}
    if not matrices or kind in ("quantized", "view_slice"):
        pytest.skip("it has no plain matrix, or a slice of one")
    run = partial(tt.quantize, made.model, matrices, optimizer=made.optimizer, atomic="full")
    assert each_failure(run, made.model, made.optimizer) > 0
    run = partial(tt.dequantize, made.model, optimizer=made.optimizer, atomic="full")
    assert each_failure(run, made.model, made.optimizer) > 0


def test_refit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    tt.quantize(model, {"1.weight": "int8"})
    given = {"0.weight": torch.randn(16, 8), "0.bias": torch.randn(16), "1.weight": torch.randn(8, 16)}
    given["1.bias"] = torch.randn(8)
    assert each_failure(partial(tt.refit, model, given, atomic="full"), model) > 4


class Ended(Full):
    """Memory that ends with the ``at``-th op."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += 1
        if self.count - 1 == self.at:
            args = None  # a view in a frame of the error would hold its base
            raise torch.OutOfMemoryError("injected")
        return op(*args, **kwargs or {})


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(6, 4), nn.LSTM(4, 4), nn.Linear(4, 6)
        self.head.weight = self.emb.weight
        self.register_buffer("scale", torch.arange(4.0))


def names_on_meta(model):
    return [name for name, tensor in model.state_dict().items() if tensor.is_meta]


def reset(module):
    return None if isinstance(module, Tied) else module.reset_parameters()


@pytest.mark.parametrize(("place", "init"), [("meta", None), ("meta", reset), ("on_meta", None)])
def test_materialize(place, init):
    """Everything is on meta again after an error, also one of an initialisation; the next call gives all values."""

    def build():
        with tt.on_meta() if place == "on_meta" else torch.device("meta"):
            model = Tied()
        if place != "on_meta":
            model.scale = torch.arange(4.0)
        return model

    def run(model):
        torch.manual_seed(0)
        return tt.materialize(model, init=init)

    at, wanted, seen = 0, run(build()).state_dict(), set()
    while True:
        model, mode = build(), Ended(at)
        ids, on_meta = [id(p) for p in model.parameters()], tuple(names_on_meta(model))
        try:
            with mode:
                run(model)
        except (torch.OutOfMemoryError, tt.ConversionError):
            seen.add(tuple(names_on_meta(model)))
        else:
            break
        run(model)
        assert [id(p) for p in model.parameters()] == ids
        assert model.head.weight is model.emb.weight
        assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items()), at
        at += 1
    assert mode.count == at > 20
    assert on_meta in seen
    assert seen <= {on_meta, ()}  # the last is after an error in the final look at the values, which are complete


def test_materialize_after_an_init_that_fails():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def init(module):
        if module is model[1]:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        tt.materialize(model, init=init)
    assert all(parameter.is_meta for parameter in model.parameters())
    tt.materialize(model)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_load_names_no_option_that_it_lacks(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    tt.save(model, tmp_path / "x.safetensors")
    told = set()
    for at in range(500):
        try:
            with Ended(at):
                tt.load(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), tmp_path / "x.safetensors", quantize="int8")
        except tt.ConversionError as error:
            told.add(str(error).partition("injected. ")[2])
        except torch.OutOfMemoryError:
            pass
        except tt.LoadError as error:
            assert "atomic" not in str(error)
        else:
            break
    assert told == {"The finished tensors stay changed. Load again."}
