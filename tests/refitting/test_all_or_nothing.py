"""``atomic="full"``: after any failure a model is all old or all new."""

import itertools
import os
import signal
import zlib

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.interrupts import count_steps, interrupted, nothing_held
from tests.refitting.nets import build, copied, is_same, is_unchanged, places
from tests.refitting.test_refit import FAULTS, SOURCES, each_source
from torchtether.files import Batch
from torchtether.refitting import report, writing

# an interrupt may come while a generator is closed, where Python reports it and goes on
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
FINELY = ("refit.py", "writing.py", "arrivals.py", "_interruptions.py")
SAMPLES, MANY = 40, 150


@each_source
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_leaves_everything_as_it_was(fault, kind, tmp_path):
    rollout = build(1, "int8")
    before, where = copied(rollout), places(rollout)
    with pytest.raises(tt.LoadError) as caught:
        tt.refit(rollout, SOURCES[kind](FAULTS[fault][0](build(2).state_dict()), tmp_path), atomic="full")
    assert len(caught.value.faults) == 1
    assert "written" not in str(caught.value)
    assert is_unchanged(rollout, before)
    assert places(rollout) == where


@each_source
def test_an_error_in_the_middle_is_undone_or_told(kind, tmp_path, monkeypatch):
    count = itertools.count()
    encode = writing._write

    def failing(*args):
        if next(count) == 4:
            raise MemoryError("no more")
        return encode(*args)

    monkeypatch.setattr(writing, "_write", failing)
    rollout = build(1, "int8")
    before = copied(rollout)
    with pytest.raises(MemoryError):
        tt.refit(rollout, SOURCES[kind](build(2).state_dict(), tmp_path), atomic="full")
    assert is_unchanged(rollout, before)
    count = itertools.count()
    told = "4 tensors have been written .* 1 may have" if kind in ("pairs", "generator") else "5 may have"  # a group
    with pytest.raises(tt.LoadError, match=rf"the refit stopped: MemoryError: no more. {told} old and new values"):
        tt.refit(rollout, SOURCES[kind](build(2).state_dict(), tmp_path))


@each_source
def test_an_error_after_any_batch_is_told_where_something_changed(kind, tmp_path, monkeypatch):
    run, count, outcomes = Batch.run, itertools.count(), []

    def failing(batch, tick):
        run(batch, tick)
        if next(count) == len(outcomes):
            raise OSError("the disk is gone")

    monkeypatch.setattr(Batch, "run", failing)
    while True:
        folder = tmp_path / str(len(outcomes))
        folder.mkdir()
        rollout, source = build(1, "int8"), SOURCES[kind](build(2).state_dict(), folder)
        before, count = copied(rollout), itertools.count()
        try:
            tt.refit(rollout, source)
        except (OSError, tt.LoadError) as error:
            outcomes.append("written" in str(error) or "old and new values" in str(error))
            assert outcomes[-1] or is_unchanged(rollout, before), error
        else:
            break
    assert any(outcomes)


def test_a_source_that_raises_leaves_everything_as_it_was():
    def failing():
        yield from list(build(2).state_dict().items())[:5]
        raise ConnectionError("gone")

    rollout = build(1, "int8")
    before = copied(rollout)
    with pytest.raises(ConnectionError):
        tt.refit(rollout, failing(), atomic="full")
    assert is_unchanged(rollout, before)


def test_ctrl_c_in_the_source_leaves_everything_as_it_was():
    def interrupting():
        for i, pair in enumerate(build(2).state_dict().items()):
            if i == 5:
                os.kill(os.getpid(), signal.SIGINT)
            yield pair

    rollout = build(1, "int8")
    before = copied(rollout)
    with nothing_held(), pytest.raises(KeyboardInterrupt):
        tt.refit(rollout, interrupting(), atomic="full")
    assert is_unchanged(rollout, before)
    with pytest.raises(KeyboardInterrupt) as raised:  # without "full" it says how far it came
        tt.refit(rollout, interrupting())
    (note,) = raised.value.__notes__
    assert note.startswith("the refit stopped: 5 tensors have been written ("), note
    assert note.endswith("Refit again from a whole source.")


@pytest.mark.parametrize("kind", ["path", "state dict", "generator"])
@pytest.mark.parametrize("samples", [SAMPLES, pytest.param(MANY, marks=pytest.mark.slow)])
def test_ctrl_c_at_any_moment_leaves_all_old_or_all_new(kind, samples, tmp_path):
    state, new = build(2).state_dict(), build(2, "int8")
    path = SOURCES["path"](state, tmp_path)
    made = {"path": lambda: path, "state dict": lambda: state, "generator": lambda: iter(state.items())}[kind]
    steps = count_steps(lambda: tt.refit(build(1, "int8"), made(), atomic="full"), FINELY)
    outcomes = set()
    for at in range(0, steps, max(1, steps // samples)):
        rollout = build(1, "int8")
        before = copied(rollout)
        with nothing_held():
            came = interrupted(lambda model=rollout: tt.refit(model, made(), atomic="full"), at, FINELY)
        is_old, is_new = is_unchanged(rollout, before), is_same(rollout, new)
        assert is_old or is_new, at
        assert came or is_new, at
        outcomes.add((came, is_new))
    assert (True, False) in outcomes


@each_source
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_in_the_last_checksums_leaves_everything_as_it_was(error, kind, tmp_path, monkeypatch):
    def failing(data, start=0):
        if len(data) < 2**20:
            return zlib.crc32(data, start)
        if error is KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGINT)
            return zlib.crc32(data, start)
        raise error("no more")

    monkeypatch.setattr(report, "crc32", failing)
    first, second = (nn.Sequential(nn.Linear(4, 4), nn.Linear(1024, 1024, bias=False)) for _ in range(2))
    before = copied(first)
    with nothing_held(), pytest.raises(error):
        tt.refit(first, SOURCES[kind](second.state_dict(), tmp_path), atomic="full")
    assert is_unchanged(first, before)


def test_full_or_checked_and_nothing_else():
    with pytest.raises(tt.ArgumentError, match="atomic: is 'half', neither"):
        tt.refit(torch.nn.Linear(2, 2), {}, atomic="half")
