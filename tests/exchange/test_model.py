"""The state machine of the exchange keeps every promise on every path, and the code takes the same paths."""

import importlib
import signal

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.conversion.models import snapshot
from tests.exchange.model import HALF, NEW, OLD, Model, Tensor
from tests.interrupts import nothing_held
from torchtether.exchange import optimizer_state, replacement

stream = importlib.import_module("torchtether.loading.stream")
converting = importlib.import_module("torchtether.conversion.converting")
exchange = importlib.import_module("torchtether.exchange.exchange")

TRAINED, FROZEN = Tensor("trained", "trained", True), Tensor("frozen", "frozen", False)
PAIR = (Tensor("weight", "pair", True), Tensor("turned", "pair", True))
MODELS = {
    "trained": (TRAINED,),
    "frozen": (FROZEN,),
    "pair": PAIR,
    "trained frozen": (TRAINED, FROZEN),
    "trained pair": (TRAINED, *PAIR),
    "frozen pair": (FROZEN, *PAIR),
    "trained frozen pair": (TRAINED, FROZEN, *PAIR),
}
both = pytest.mark.parametrize("atomic", ["checked", "full"])


# -- the model keeps the promises -------------------------------------------------------------------------------------


@pytest.mark.parametrize("atomic", ["checked", "full", "load"])
@pytest.mark.parametrize("tensors", MODELS.values(), ids=MODELS)
def test_every_end_is_a_promised_one(tensors, atomic):
    """However many signals and failures there are, and whenever."""
    ends = Model(tensors, atomic).ends()
    assert len(ends) > 3
    for end, failed in ends:
        assert not end.is_locked
        assert not end.waiting
        assert HALF not in end.held
        groups = {tensor.group: set() for tensor in tensors}
        for tensor, held, state in zip(tensors, end.held, end.state, strict=True):
            groups[tensor.group].add(held)
            assert state == held or not tensor.has_state or (failed and atomic != "full")
        assert all(len(found) == 1 for found in groups.values())
        if atomic == "full":
            assert len({*end.held}) == 1
        if not end.error:
            assert {*end.held} == {NEW}


# -- the code goes the same ways --------------------------------------------------------------------------------------


class Made(nn.Module):
    """A module with such tensors, an optimizer that has stepped, and grads."""

    def __init__(self, tensors):
        super().__init__()
        for tensor in tensors:
            values = self.weight.data.t() if tensor.name == "turned" else torch.ones(2, 3)
            self.register_parameter(tensor.name, nn.Parameter(values, requires_grad=tensor.has_grad))
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        for parameter in self.parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        self.optimizer.step()

    def found(self):
        """What the model of it is to be."""
        held = []
        for parameter in self.parameters():
            dtypes = {parameter.dtype, *([] if parameter.grad is None else [parameter.grad.dtype])}
            held.append(HALF if len(dtypes) == 2 else NEW if dtypes == {torch.float64} else OLD)
        state = [self.optimizer.state.get(parameter, {}).get("momentum_buffer") for parameter in self.parameters()]
        return tuple(held), tuple(OLD if one is None or one.dtype == torch.float32 else NEW for one in state)


class Driven:
    """Lets the labelled steps of an exchange be seen, and what a trace says come before each."""

    def __init__(self, made, trace, patch):
        self.names = {id(parameter): name for name, parameter in made.named_parameters()}
        self.trace, self.at, self.seen, self.applying = trace, 0, [], None
        for room, name, kind, about in (
            (exchange, "check_place", "enter", lambda *_: ""),
            (exchange, "check_held", "check", lambda *_: ""),
            (converting, "converted", "make", lambda tensor, *_: self.names.get(id(tensor), "pair")),
            (stream, "new_contents", "make", lambda step, *_: self.about(step)),
            (exchange, "reset", "reset", lambda held, *_: self.names[id(held)]),
            (exchange, "replace", "replace", lambda held, *_: self.names[id(held)]),
            (replacement.Replacement, "undo", "undo", lambda one: self.names[id(one.held)]),
            (optimizer_state, "_follow_one", "follow", lambda _, change, *__: self.names[id(change.held)]),
            (exchange.Exchange, "_renew", "renew", lambda *_: ""),
        ):
            patch.setattr(room, name, self.watched(getattr(room, name), kind, about))
        apply, swap = replacement.Replacement.apply, replacement.swap_impl

        def applied(one):
            self.applying = one
            apply(one)
            self.applying = None

        def swapped(held, shell):
            one = self.applying
            if one is not None:
                self.before("contents" if held is one.held else "grad", self.names[id(one.held)])
            swap(held, shell)

        patch.setattr(replacement.Replacement, "apply", applied)
        patch.setattr(replacement, "swap_impl", swapped)

    def about(self, step):
        """What a step of a load is about."""
        return "pair" if len(step.component.members) > 1 else self.names[id(step.held)]

    def watched(self, function, kind, about):
        def run(*args, **kwargs):
            self.before(kind, about(*args))
            return function(*args, **kwargs)

        return run

    def before(self, kind, about):
        label, event = self.trace[self.at] if self.at < len(self.trace) else (None, "")
        self.at += 1
        self.seen.append((kind, about))
        if label == (kind, about) and event == "signal":
            signal.getsignal(signal.SIGINT)(signal.SIGINT, None)
        if label == (kind, about) and event == "fails":
            self.applying = None
            raise MemoryError("no memory here")


def replay(tensors, atomic, trace, patch, path=None):
    """Convert, or load what is at ``path``, as the trace says.

    Return the labels that were seen, the error, and what the model is afterwards.
    """
    made = Made(tensors)
    ids, ties, before = [*map(id, made.parameters())], tt.find_ties(made), snapshot(made, made.optimizer)
    with patch.context() as patched, nothing_held():
        driven, error = Driven(made, trace, patched), ""
        try:
            if atomic == "load":
                tt.load(made, path, dtype=torch.float64, optimizer=made.optimizer)
            else:
                tt.convert(made, dtype=torch.float64, device="cpu", optimizer=made.optimizer, atomic=atomic)
        except KeyboardInterrupt:
            error = "interrupt"
        except (MemoryError, tt.ConversionError, tt.LoadError):
            error = "error"
    assert [*map(id, made.parameters())] == ids
    assert [tie.names for tie in tt.find_ties(made)] == [tie.names for tie in ties]
    if {*made.found()[0]} == {OLD}:
        assert snapshot(made, made.optimizer) == before
    return driven.seen, error, made.found()


def check_traces(tensors, atomic, events, patch, path=None):
    count = 0
    for trace, end in Model(tensors, atomic).traces(events):
        seen, error, found = replay(tensors, atomic, trace, patch, path)
        assert seen == [label for label, _ in trace], trace
        assert (error, found) == (end.error, (end.held, end.state)), trace
        count += 1
    assert count > 10


@both
@pytest.mark.parametrize("tensors", MODELS.values(), ids=MODELS)
def test_the_code_goes_every_way_with_one_event(tensors, atomic, monkeypatch):
    check_traces(tensors, atomic, 1, monkeypatch)


@pytest.mark.slow
@both
@pytest.mark.parametrize("kind", ["trained frozen", "pair", "trained pair"])
def test_the_code_goes_every_way_with_two_events(kind, atomic, monkeypatch):
    check_traces(MODELS[kind], atomic, 2, monkeypatch)


@pytest.mark.parametrize(
    ("kind", "events"),
    [
        *((kind, 1) for kind in MODELS),
        *(pytest.param(kind, 2, marks=pytest.mark.slow) for kind in ("pair", "trained pair")),
    ],
)
def test_a_load_goes_every_way(kind, events, monkeypatch, tmp_path):
    """Into tensors that get another dtype: others are filled where they are."""
    tt.save(Made(MODELS[kind]), tmp_path / "x.safetensors")
    check_traces(MODELS[kind], "load", events, monkeypatch, tmp_path / "x.safetensors")
