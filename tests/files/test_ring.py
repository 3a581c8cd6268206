"""Bytes reach a device whole and in order, through a few buffers, however late the device works."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

import torchtether as tt
from tests.simulated import SimulatedEvent, SimulatedLane, SimulatedRing
from torchtether import compiled
from torchtether.files import Batch, TensorFile, batch, crew, readers, ring
from torchtether.files.ring import Passage, Ring

SLOT, STAGED = 512, 2048


@pytest.fixture(autouse=True)
def sizes_are_small(monkeypatch):
    for module, name, value in (
        (ring, "SLOT", SLOT),
        (batch, "SLOT", SLOT),
        (batch, "SLICE", SLOT),
        (ring, "STAGED", STAGED),
        (batch, "STAGED", STAGED),
        (batch, "_WORTHWHILE", 0),
        (readers, "PIECE", 100),
        (readers, "_PIECE_OF_PYTHON", 100),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.fixture(params=["compiled", "python"])
def way(request, monkeypatch):
    """Who reads."""
    if request.param == "python":
        monkeypatch.setattr(readers, "compiled", SimpleNamespace(native=lambda: None))
    elif compiled.native() is None:
        pytest.skip("there is no compiled module")


def rand(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


TENSORS = {
    "large": rand(40, 33),
    "half": rand(50, 64, dtype=torch.bfloat16, seed=1),
    **{f"small{i}": rand(5, seed=i) for i in range(20)},
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 3),
    "mask": torch.arange(700) % 3 == 0,
    "complex": rand(90).to(torch.complex64) * 1j,
    "f8": rand(900).to(torch.float8_e4m3fn),
    "codes": torch.arange(2000, dtype=torch.int16),
}


@pytest.fixture
def file(tmp_path):
    tt.save(TENSORS, tmp_path / "x.safetensors")
    with TensorFile(tmp_path / "x.safetensors") as opened:
        yield opened


def wanted():
    """What is asked of the file: as stored, in another dtype, in other strides, rows."""
    for key, tensor in TENSORS.items():
        yield key, torch.zeros_like(tensor), tensor, None
    yield "large", torch.zeros(40, 33, dtype=torch.bfloat16), TENSORS["large"].bfloat16(), None
    yield "half", torch.zeros(50, 64), TENSORS["half"].float(), None
    yield "half", torch.zeros(64, 50, dtype=torch.bfloat16).t(), TENSORS["half"], None
    yield "large", torch.zeros(7, 33), TENSORS["large"][11:18], 11


def read(file, given):
    """Everything that is wanted, through ``given``: what came, as the next work of the device sees it, and should."""
    todo, pairs, kept = Batch(given), [], []
    for key, out, expected, first in wanted():
        pairs.append((out, expected))
        file.read_later(key, out, todo, first)
    for start in range(0, 40, 9):
        rows = torch.zeros(min(9, 40 - start), 33, dtype=torch.float64)
        todo.rows(file, "large", start, start + len(rows), rows.copy_, device=torch.device("cpu"))
        pairs.append((rows, TENSORS["large"][start : start + 9].double()))
    for lane in given.lanes:  # what the memory was used for before is still being computed
        for out, _ in pairs:
            lane.work.add(lambda out=out: out.fill_(1))
    todo.run(lambda nbytes: None)
    for lane in given.lanes:
        lane.work.add(lambda: kept.extend(out.clone() for out, _ in pairs)).synchronize()
    return kept, [expected for _, expected in pairs]


@pytest.mark.parametrize("slots", [1, 2, 16])
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("apart", [True, False], ids=["apart", "here"])
@pytest.mark.usefixtures("way")
def test_every_byte_arrives(file, slots, threads, apart, monkeypatch):
    monkeypatch.setattr(readers, "READERS", threads)
    monkeypatch.setattr(readers, "_READERS_OF_PYTHON", threads)
    monkeypatch.setattr(batch, "_WORTHWHILE", 0 if apart else 2**30)
    take, scratch = Passage.take, []

    def taken(self, nbytes):
        made = take(self, nbytes)
        scratch.append(sum(one.nbytes for one in self._every.values()))
        return made

    monkeypatch.setattr(Passage, "take", taken)
    given = SimulatedRing(slots)
    came, expected = read(file, given)
    assert all(
        torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))
        for one, other in zip((c.contiguous() for c in came), expected, strict=True)
        if one.dim()
    )
    assert all(
        torch.equal(one.double(), other.double())
        for one, other in zip(came, expected, strict=True)
        if not one.dtype.is_complex
    )
    assert 0 < len(given.buffers) <= slots
    assert set(given.buffers) == {SLOT}
    assert max(scratch) <= 4 * STAGED
    given.close()


class NoBegin(SimulatedLane):
    def begin(self):
        pass


class NoEvent(SimulatedLane):
    def copied(self, used=None):
        super().copied()
        return SimulatedEvent(self.copies, 0)


class NoWait(SimulatedLane):
    def wait(self, event):
        pass


class NoEnd(SimulatedLane):
    def end(self):
        pass


class NoAfter(SimulatedLane):
    def compute(self, use, after):
        return super().compute(use, SimulatedEvent(self.copies, 0))


@pytest.mark.parametrize(("lane", "slots"), [(NoBegin, 2), (NoEvent, 2), (NoWait, 2), (NoEnd, 2), (NoAfter, 99)])
def test_the_simulated_device_notices_what_is_not_waited_for(file, lane, slots, monkeypatch):
    monkeypatch.setattr(SimulatedRing, "lanes_are", lane)
    came, expected = read(file, SimulatedRing(slots))
    assert any(not torch.equal(one, other) for one, other in zip(came, expected, strict=True))


def test_devices_share_the_buffers(file):
    given = SimulatedRing(3)
    todo = Batch(given)
    outs = []
    for name in ("cuda:0", "cuda:1"):
        passage = todo._passages[torch.device(name)] = Passage(given, torch.device(name), given.lane(name))
        out = torch.zeros(TENSORS["large"].nbytes, dtype=torch.uint8)
        todo.fill([(file, "large", file.stored("large").start, out)], passage)
        outs.append(out)
    todo.run(lambda nbytes: None)
    given.drain()
    assert all(torch.equal(out.view(torch.float32).view(40, 33), TENSORS["large"]) for out in outs)
    assert len(given.buffers) <= 3


@pytest.mark.usefixtures("way")
def test_after_an_error_nothing_is_under_way(file):
    """Also in a read that fails, every buffer comes back, and the device has nothing more to do."""
    given = SimulatedRing(2)
    todo = Batch(given)
    for key in TENSORS:
        file.read_later(key, torch.zeros_like(TENSORS[key]), todo)
    with open(file.path, "r+b") as opened:
        opened.truncate(file.stored("large").start + 100)
    with pytest.raises(tt.CheckpointError, match="nothing follows byte"):
        todo.run(lambda nbytes: None)
    for lane in given.lanes:
        for order in (lane.copies, lane.work):
            assert order.is_done(order._added)
    assert len(given._idle) + given._left == 2


def test_after_an_interrupt_at_the_end_nothing_is_under_way(file, monkeypatch):
    """Else what is queued would be written after the old values have been restored."""

    class Interrupted(SimulatedLane):
        def end(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(SimulatedRing, "lanes_are", Interrupted)
    given = SimulatedRing(2)
    todo = Batch(given)
    for key in TENSORS:
        file.read_later(key, torch.zeros_like(TENSORS[key]), todo)
    with pytest.raises(KeyboardInterrupt):
        todo.run(lambda nbytes: None)
    for lane in given.lanes:
        for order in (lane.copies, lane.work):
            assert order.is_done(order._added)


def test_an_interrupt_ends_every_thread(file, monkeypatch):
    monkeypatch.setattr(crew, "_TOLD", 0)
    given = SimulatedRing(2)
    todo = Batch(given)
    for key in TENSORS:
        file.read_later(key, torch.zeros_like(TENSORS[key]), todo)

    def tick(nbytes):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        todo.run(tick)
    assert len(given._idle) + given._left == 2


def test_a_buffer_that_cannot_be_made_stops_nobody(file, monkeypatch):
    class Poor(SimulatedRing):
        def pinned(self, nbytes):
            raise MemoryError("injected")

    todo = Batch(Poor(1))
    for key in TENSORS:
        file.read_later(key, torch.zeros_like(TENSORS[key]), todo)
    with pytest.raises(MemoryError, match="injected"):
        todo.run(lambda nbytes: None)


def test_without_a_device_no_buffer_is_made():
    given = Ring()
    assert given.lane(torch.device("cpu")) is None
    assert given.lane(torch.device("meta")) is None
    if not torch.cuda.is_available():
        assert given.lane(torch.device("cuda:0")) is None
    assert given.pinned(10).nbytes == 10


def test_buffers_are_no_larger_than_what_is_read(tmp_path):
    """A small file pins little; larger buffers take the place of those that a larger tensor does not fit."""
    tensors = {"a": rand(30), "b": rand(3, 20, seed=1), "c": rand(100, 64, seed=2)}
    tt.save(tensors, tmp_path / "x.safetensors")
    given, outs = SimulatedRing(2), {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    with TensorFile(tmp_path / "x.safetensors") as file:
        for key, most in (("a", 128), ("b", 256), ("a", 256), ("c", SLOT)):
            file.read_into(key, outs[key], ring=given)
            given.drain()
            assert max(given.buffers) == most
    assert all(torch.equal(outs[key], tensors[key]) for key in tensors)
    assert given.pinned_most <= 2 * SLOT


def test_the_lane_is_entered_once(file, monkeypatch):
    """And ``tick``, which is the caller's, runs outside, also where all is done on the caller's thread."""
    entered, here = [], threading.local()

    class Entered(SimulatedLane):
        @contextlib.contextmanager
        def entered(self):
            entered.append(threading.get_ident())
            here.is_in = True
            yield
            here.is_in = False

        def copy(self, out, given):
            assert here.is_in
            super().copy(out, given)

    monkeypatch.setattr(SimulatedRing, "lanes_are", Entered)
    for least in (2**30, 0):
        entered.clear()
        monkeypatch.setattr(batch, "_WORTHWHILE", least)
        todo = Batch(SimulatedRing(2))
        for key in TENSORS:
            file.read_later(key, torch.zeros_like(TENSORS[key]), todo)
        ticks = []
        todo.run(lambda nbytes, ticks=ticks: ticks.append(getattr(here, "is_in", False)))
        assert set(ticks) == {False}
    assert len(entered) == 1


def test_scratch_is_filled_again_where_the_device_is_slow():
    """Of a quick one it is free at once; of a slow one there are no more than some."""
    given = SimulatedRing()
    passage = Passage(given, torch.device("cpu"), given.lane("cpu"))
    passage.begin(SLOT)
    first = passage.take(STAGED)
    passage.compute(first, lambda: None)
    others = [passage.take(STAGED)]
    assert others[0] is not first
    given.lanes[-1].synchronize()
    assert passage.take(STAGED) is first
    others += [passage.take(STAGED) for _ in range(ring._AHEAD - 2)]
    for one in others:
        passage.compute(one, lambda: None)
    assert passage.take(STAGED) is others[0]  # whose computation copies wait for
    passage.end()


def test_scratch_for_a_large_tensor_is_not_kept():
    """It may be as large as the rest of the model: what a run holds afterwards is as little as without it."""
    given = SimulatedRing()
    passage = Passage(given, torch.device("cpu"), given.lane("cpu"))
    passage.begin(SLOT)
    for _ in range(3):
        large, found = passage.take(9 * STAGED), []
        passage.compute(large, lambda large=large, found=found: found.append(large.sum()))
        del large
        assert sum(scratch.nbytes for scratch in passage._every.values()) <= ring._AHEAD * STAGED
        given.lanes[-1].synchronize()
        assert found
    passage.end()


@pytest.mark.usefixtures("way")
def test_a_file_that_shrinks_is_named(file):
    """By the key that misses bytes, whoever reads."""
    last = max(("large", "half"), key=lambda key: file.stored(key).start)
    todo = Batch(SimulatedRing(2))
    file.read_later(last, torch.zeros_like(TENSORS[last]), todo)
    with open(file.path, "r+b") as opened:
        opened.truncate(file.stored(last).start + 10)
    with pytest.raises(tt.CheckpointError, match=f"x.safetensors: {last}: .* nothing follows byte"):
        todo.run(lambda nbytes: None)


@pytest.mark.parametrize("slots", [1, 3, 99])
def test_a_run_does_not_overwrite_what_the_one_before_copies(file, slots):
    """Nothing waits for the device between two runs, as between two groups of a refit."""
    given, keys = SimulatedRing(slots), ("large", "half", "codes", "f8")
    outs = [torch.zeros_like(TENSORS[key]) for key in keys]
    for key, out in zip(keys, outs, strict=True):
        todo = Batch(given)
        file.read_later(key, out, todo)
        todo.run(lambda nbytes: None)
    for lane in given.lanes:
        lane.synchronize()
    for key, out in zip(keys, outs, strict=True):
        assert torch.equal(out.view(torch.uint8), TENSORS[key].view(torch.uint8))


def test_a_device_that_fails_costs_no_buffer(file, monkeypatch):
    class Failing(SimulatedLane):
        def copied(self, used=None):
            if threading.current_thread() is not threading.main_thread():
                raise RuntimeError("injected")
            return super().copied(used)

    monkeypatch.setattr(SimulatedRing, "lanes_are", Failing)
    given = SimulatedRing(1)
    todo = Batch(given)
    for key in TENSORS:
        file.read_later(key, torch.zeros_like(TENSORS[key]), todo)
    with pytest.raises(RuntimeError, match="injected"):
        todo.run(lambda nbytes: None)
    assert given._left + len(given._idle) == 1
