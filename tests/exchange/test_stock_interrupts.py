"""Ctrl-C at any moment of a stock call inside ``swapping()``: the model stays attached, and no lock stays held."""

import signal
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchtether as tt
from tests.conversion.models import KINDS, kept, rig
from tests.interrupts import count_steps, interrupted, nothing_held
from torchtether.ties.records import find_ties

# an interrupt may come while a generator is closed, where Python reports it and goes on
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

FINELY = ("scope.py", "stock_call.py", "_interruptions.py")
SAMPLES, MANY = 15, 50


def to_double(made):
    with tt.swapping(made.model, optimizer=made.optimizer):
        made.model.double()


def load(made, **options):
    state = {name: (tensor.detach() + 1).double() for name, tensor in made.model.state_dict().items()}
    for tie in find_ties(made.model):
        for name in tie.aliases:
            state.pop(name, None)
    with tt.swapping(made.model, optimizer=made.optimizer):
        made.model.load_state_dict(state, **options)


CALLS = {"to": to_double, "load": load, "assign": partial(load, assign=True)}
few = pytest.mark.parametrize("kind", ["plain", "view_transposed", "subclass"])
kinds = pytest.mark.parametrize("kind", ["plain", "tied_3", "view_transposed", "view_slice", "lstm", "subclass"])
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def names_of(ties):
    return [(tie.names, tie.objects) for tie in ties]


def sweep(kind, call, samples, finely=FINELY):
    call(rig(KINDS[kind]))
    steps = count_steps(partial(call, rig(KINDS[kind])), finely)
    done = set()
    for at in range(0, steps, max(steps // samples, 1)):
        made = rig(KINDS[kind])
        same, ties = kept(made.model), names_of(find_ties(made.model))
        with nothing_held():
            assert interrupted(partial(call, made), at, finely)
        assert kept(made.model) == same
        assert names_of(find_ties(made.model)) == ties
        for parameter in made.model.parameters():
            assert made.optimizer.state[parameter]["exp_avg"].dtype == parameter.grad.dtype == parameter.dtype
        dtypes = {parameter.dtype for parameter in made.model.parameters()}
        done.add(len(dtypes))
        if len(dtypes) == 1:
            made.seen.clear()
            made.step()
            assert made.seen
    return done


@few
@calls
def test_what_was_done_is_attached(kind, call):
    assert 1 in sweep(kind, call, SAMPLES, ())


@pytest.mark.slow
@kinds
@calls
def test_many_moments(kind, call):
    sweep(kind, call, MANY)


def test_the_body_of_the_scope_is_interrupted_at_once():
    after = []
    with nothing_held(), pytest.raises(KeyboardInterrupt), tt.swapping(nn.Linear(2, 2)):  # noqa: PT012
        for _ in range(2):  # one that is caught inside does not stop the next
            try:
                signal.raise_signal(signal.SIGINT)
                after.append("late")
            except KeyboardInterrupt:
                if after:
                    raise
                after.append("caught")
    assert after == ["caught"]


@pytest.mark.parametrize("kind", ["view_transposed", "view_slice", "buffer_is_parameter"])
def test_a_conversion_that_fails_does_not_split_what_shares_memory(kind):
    """The function fails once, after the first tensor of each kind in turn."""
    for at in range(4):
        made, calls = rig(KINDS[kind]), []

        def fails(tensor, calls=calls, at=at):
            calls.append(tensor)
            if len(calls) == at + 1:
                raise MemoryError
            return tensor.double()

        ties = names_of(find_ties(made.model))
        same = kept(made.model)
        with pytest.raises(MemoryError), tt.swapping(made.model, optimizer=made.optimizer):
            made.model._apply(fails)
        assert names_of(find_ties(made.model)) == ties
        assert kept(made.model) == same
        for parameter in made.model.parameters():
            assert made.optimizer.state[parameter]["exp_avg"].dtype == parameter.grad.dtype == parameter.dtype


class Failing(TorchDispatchMode):
    """Raise ``error`` at the op number ``at``."""

    def __init__(self, at, error):
        super().__init__()
        self.left, self.error = at, error

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise self.error
        return func(*args, **(kwargs or {}))


def doubled(made):
    """What a conversion to float64 makes of the values of the model and of the optimizer's state."""
    found = {name: tensor.detach().clone().double() for name, tensor in made.model.state_dict().items()}
    for name, parameter in made.model.named_parameters():
        for key, value in made.optimizer.state[parameter].items():
            found[f"{name} {key}"] = value.double() if value.dim() else value.clone()
    return found


def fail_at_every_op(kind, error):
    """Let a conversion fail at each of its ops in turn, and call it again; return in how many ops it ends."""
    for at in range(1, 1000):
        made = rig(KINDS[kind])
        same, ties, wanted = kept(made.model), names_of(find_ties(made.model)), doubled(made)
        failing = Failing(at, error)
        try:
            with failing:
                to_double(made)
        except type(error):
            pass
        if failing.left > 0:
            return at
        for parameter in made.model.parameters():
            state = made.optimizer.state[parameter]
            assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == parameter.grad.dtype == parameter.dtype, at
        to_double(made)
        assert kept(made.model) == same, at
        assert names_of(find_ties(made.model)) == ties, at
        found = doubled(made)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(value, wanted[name]) for name, value in found.items()), at
        assert {parameter.dtype for parameter in made.model.parameters()} == {torch.float64}
        made.seen.clear()
        made.step()
        assert made.seen
    raise AssertionError("the conversion does not end")


@pytest.mark.parametrize("kind", ["plain", "tied_3", "view_transposed", "view_slice", "lstm", "subclass"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("none left"), KeyboardInterrupt()], ids=["memory", "stop"])
def test_an_op_that_fails_leaves_state_with_its_parameter(kind, error):
    assert fail_at_every_op(kind, error) > 10


@pytest.mark.parametrize("kind", ["plain", "tied_3", "view_transposed", "view_slice"])
@pytest.mark.parametrize("assign", [False, True])
def test_a_load_that_fails_leaves_state_with_its_parameter(kind, assign):
    for at in range(1, 1000):
        made, failing = rig(KINDS[kind]), Failing(at, KeyboardInterrupt())
        state = {name: tensor.detach().double() for name, tensor in made.model.state_dict().items()}
        try:
            with tt.swapping(made.model, optimizer=made.optimizer), failing:
                made.model.load_state_dict(state, assign=assign)
        except (KeyboardInterrupt, tt.TieError):  # half of a memory was assigned, in another dtype
            pass
        if failing.left > 0:
            break
        for parameter in made.model.parameters():
            state = made.optimizer.state[parameter]
            assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == parameter.grad.dtype == parameter.dtype, at
    assert at > 1
