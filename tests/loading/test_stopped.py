"""A load that fails in the middle: checks before the first change, the text of the error, and resuming."""

import os
import signal

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.interrupts import count_steps, interrupted, nothing_held

# an interrupt may come while a generator is closed, where Python reports it and goes on
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

NAMES = [f"t{i}" for i in range(8)]


def build(value):
    model = nn.Module()
    for name in NAMES:
        setattr(model, name, nn.Parameter(torch.full((64,), float(value))))
    return model


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "x.safetensors"
    tt.save(build(7), path)
    return path


def values(model):
    return [parameter.unique().tolist() for parameter in model.parameters()]


def test_a_file_that_was_cut_since_is_found_before_the_first_change(saved):
    model = build(1)
    plan = tt.plan_load(model, saved)
    size = saved.stat().st_size
    os.truncate(saved, size - 5 * 256)
    with pytest.raises(tt.errors.CheckpointError, match=rf"had {size} bytes .* has {size - 5 * 256} now") as caught:
        plan.apply()
    assert "\n" not in str(caught.value)
    assert values(model) == [[1.0]] * 8


def test_a_file_that_is_cut_meanwhile_says_what_was_filled(saved):
    model = build(1)
    size = saved.stat().st_size

    def cut(done, total):
        if done >= 3 * 256:
            os.truncate(saved, size - 5 * 256)

    what = r"stopped after 3 of 8 tensors \(t0, t1, t2 done, t3, t4, t5, t6 and 1 more not\): CheckpointError: "
    with pytest.raises(tt.errors.CheckpointError, match=what) as caught:
        tt.load(model, saved, progress=cut)
    assert "\n" not in str(caught.value)
    assert values(model)[:3] == [[7.0]] * 3
    assert values(model)[4:] == [[1.0]] * 4


def test_an_error_before_the_first_is_done_is_itself(saved, monkeypatch):
    model = build(1)
    plan = tt.plan_load(model, saved)
    monkeypatch.setattr(plan.checkpoint.store, "check_sizes", lambda: None)
    os.truncate(saved, saved.stat().st_size - 8 * 256)
    with pytest.raises(tt.errors.CheckpointError, match="the file is cut short: nothing follows byte"):
        plan.apply()


def test_a_timeout_after_the_last_is_itself(saved):
    model = build(1)

    def timeout(*_):
        raise TimeoutError("too slow")

    def tick(done, total):
        if done == total:
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, timeout)
    try:
        with pytest.raises(TimeoutError, match="^too slow$"):
            tt.load(model, saved, progress=tick)
    finally:
        signal.signal(signal.SIGINT, before)
    assert values(model) == [[7.0]] * 8


def test_an_interrupt_comes_between_two_tensors_and_the_plan_goes_on(saved):
    model = build(1)
    plan, calls = tt.plan_load(model, saved), []

    def tick(done, total):
        calls.append(done)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)

    with nothing_held(), pytest.raises(KeyboardInterrupt):
        plan.apply(progress=tick)
    assert values(model) == [[7.0]] * 3 + [[1.0]] * 5
    assert plan.left == tuple(NAMES[3:])
    plan.apply()
    assert values(model) == [[7.0]] * 8


@pytest.mark.parametrize("quantize", [None, {"*": tt.Plain()}], ids=["plain", "Weights"])
def test_a_load_on_meta_is_interrupted_at_any_moment(saved, quantize):
    """What is on meta is all old or all new; what came so far is known, and the plan does the rest."""

    def planned():
        with torch.device("meta"):
            model = build(1)
        return model, tt.plan_load(model, saved, quantize=quantize)

    _, plan = planned()
    steps = count_steps(plan.apply, ("contents.py", "exchange.py"))
    for at in range(0, steps, steps // 40):
        model, plan = planned()
        with nothing_held():
            interrupted(plan.apply, at, ("contents.py", "exchange.py"))
        assert {parameter.is_meta for parameter in model.parameters()} in ({True}, {False})
        assert bool(plan.left) == model.t0.is_meta
        is_held = [bool(model._load_state_dict_pre_hooks), isinstance(model.t0, tt.Weight)]
        assert is_held == [quantize is not None and not model.t0.is_meta] * 2
        plan.apply()
        assert values(model) == [[7.0]] * 8
