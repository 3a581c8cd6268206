"""All or nothing: a failure at any point leaves everything bit for bit as it was."""

import importlib
import itertools

import pytest
import torch

from tests.conversion.models import KINDS, rig, snapshot, watch
from torchtether import ConversionError
from torchtether.conversion.converting import convert
from torchtether.exchange import exchange, replacement
from torchtether.ties.records import find_ties

optimizers = importlib.import_module("torchtether.exchange.optimizer_state")

kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def step_of(name):
    """Return the step of an exchange that is called ``name``, whichever module defines it."""
    return getattr(replacement, name, None) or getattr(exchange, name)


def set_step(monkeypatch, name, function):
    for module in (exchange, replacement):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, function)


def failing(function, at):
    """``function``, which runs out of memory the ``at``-th time (from 0)."""
    count = itertools.count()

    def call(*args, **kwargs):
        if next(count) == at:
            raise MemoryError("injected")
        return function(*args, **kwargs)

    return call


def attempt(made, to, patch):
    """Converts with a fault at each possible point in turn; everything is as before after each; at last it succeeds."""
    before, ties = snapshot(made.model, made.optimizer), find_ties(made.model)
    for at in itertools.count():
        with pytest.MonkeyPatch.context() as monkeypatch:
            patch(monkeypatch, at)
            try:
                convert(made.model, dtype=to, optimizer=made.optimizer, atomic="full")
            except MemoryError:
                assert snapshot(made.model, made.optimizer) == before
                assert find_ties(made.model) == ties
            else:
                return at


@kinds
def test_a_failing_conversion_function_changes_nothing(kind):
    made = rig(kind)
    points = attempt(made, torch.float64, lambda mp, at: watch(mp, lambda call: failing(call, at)))
    assert points >= 2
    made.step()


@kinds
@pytest.mark.parametrize("step", ["swap_impl", "seat_hooks", "grad_shell", "_shell", "Replacement"])
def test_a_failure_between_the_steps_of_an_exchange_changes_nothing(kind, step):
    """Also where an object is half exchanged: its implementation is the new one, its class and hooks the old ones."""
    made = rig(kind)
    original = step_of(step)

    def patch(monkeypatch, at):
        broken = failing(original, at)
        # the way back may use the same steps
        undo = replacement.Replacement.undo

        def mended(self):
            set_step(monkeypatch, step, original)
            undo(self)

        monkeypatch.setattr(replacement.Replacement, "undo", mended)
        set_step(monkeypatch, step, broken)

    assert attempt(made, torch.float64, patch) >= 2
    made.step()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adagrad"])
def test_a_failure_while_state_follows_changes_nothing(optimizer):
    made = rig(KINDS["tied_3"], optimizer)
    points = attempt(
        made, torch.float64, lambda mp, at: mp.setattr(optimizers, "_followed", failing(optimizers._followed, at))
    )
    assert points >= 4


def test_a_rolled_back_model_trains_as_if_nothing_had_happened():
    made, other = rig(KINDS["view_transposed"]), rig(KINDS["view_transposed"])
    with pytest.MonkeyPatch.context() as monkeypatch:
        watch(monkeypatch, lambda call: failing(call, 2))
        with pytest.raises(MemoryError):
            convert(made.model, dtype=torch.bfloat16, optimizer=made.optimizer, atomic="full")
    made.seen.clear()
    assert made.step() == other.step()
    assert made.seen  # hooks fire


def test_without_full_the_error_says_what_was_done(monkeypatch):
    made = rig(KINDS["plain"])
    watch(monkeypatch, lambda call: failing(call, 2))
    text = r"convert stopped after 2 of 4 tensors, the last a\.bias: MemoryError: injected\. .*atomic='full'"
    with pytest.raises(ConversionError, match=text) as caught:
        convert(made.model, dtype=torch.float64, optimizer=made.optimizer)
    assert isinstance(caught.value.__cause__, MemoryError)
    for parameter in made.model.parameters():  # what was done is consistent with its state
        assert made.optimizer.state[parameter]["exp_avg"].dtype == parameter.dtype == parameter.grad.dtype


def test_without_full_a_failure_before_the_first_change_stays_itself(monkeypatch):
    made = rig(KINDS["plain"])
    before = snapshot(made.model, made.optimizer)
    watch(monkeypatch, lambda call: failing(call, 0))
    with pytest.raises(MemoryError):
        convert(made.model, dtype=torch.float64, optimizer=made.optimizer)
    assert snapshot(made.model, made.optimizer) == before


@pytest.mark.parametrize("step", ["swap_impl", "seat_hooks"])
def test_without_full_no_object_is_left_half_exchanged(step, monkeypatch):
    made = rig(KINDS["subclass"])
    before = snapshot(made.model, made.optimizer)
    original = step_of(step)
    broken = failing(original, 0)
    undo = replacement.Replacement.undo
    monkeypatch.setattr(
        replacement.Replacement, "undo", lambda self: (set_step(monkeypatch, step, original), undo(self))
    )
    set_step(monkeypatch, step, broken)
    with pytest.raises(MemoryError):
        convert(made.model, dtype=torch.float64, optimizer=made.optimizer)
    assert snapshot(made.model, made.optimizer) == before
    made.step()


def test_an_interrupt_is_not_hidden(monkeypatch):
    made = rig(KINDS["plain"])
    calls = itertools.count()

    def interrupted(*arguments):
        if next(calls) == 1:
            raise KeyboardInterrupt
        return arguments[0](*arguments[1:])

    watch(monkeypatch, lambda call: interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(made.model, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["plain", "tied_3", "view_slice"])
@pytest.mark.parametrize("has_grads", [True, False], ids=["grads", "no grads"])
def test_state_follows_up_to_an_interrupt_right_after_a_change(kind, has_grads, monkeypatch):
    made = rig(KINDS[kind])
    if not has_grads:
        made.optimizer.zero_grad()
    done = []
    for step in ("reset", "swap_impl"):
        original = step_of(step)

        def interrupted(*arguments, original=original):
            if original(*arguments) is False:
                return False
            done.append(arguments)
            if len(done) == 2:
                raise KeyboardInterrupt
            return True

        set_step(monkeypatch, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(made.model, dtype=torch.float64, optimizer=made.optimizer)
    dtypes = [(p.dtype, made.optimizer.state[p]["exp_avg"].dtype) for p in made.model.parameters() if p.requires_grad]
    assert all(one == other for one, other in dtypes)


def test_atomic_has_two_values():
    with pytest.raises(ConversionError, match="neither 'checked' nor 'full'"):
        convert(torch.nn.Linear(2, 2), dtype=torch.float64, atomic="maybe")


def test_state_follows_up_to_an_interrupt_where_there_are_neither_hooks_nor_grads(monkeypatch):
    model = torch.nn.Module()
    model.whole = torch.nn.Parameter(torch.randn(4, 3))
    model.part = torch.nn.Parameter(model.whole.data[:2])
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    original, done = step_of("swap_impl"), []

    def interrupted(*arguments):
        original(*arguments)
        done.append(arguments)
        if len(done) == 1:
            raise KeyboardInterrupt

    set_step(monkeypatch, "swap_impl", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(model, dtype=torch.float64, optimizer=optimizer)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}  # they share memory
    for parameter in model.parameters():
        assert optimizer.state[parameter]["momentum_buffer"].dtype == parameter.dtype
