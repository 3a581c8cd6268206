"""Reading by several threads: the same bytes, errors as on one thread, and no thread left."""

import importlib
import os
import threading
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchtether as tt
from tests.interrupts import count_steps, interrupted
from tests.written import write_tensors
from torchtether.files import Store, TensorFile, crew, system
from torchtether.files import batch as batch_module
from torchtether.files.batch import Batch
from torchtether.files.crew import Crew, together


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """Three threads for anything, in small slices; afterwards none is left."""
    monkeypatch.setattr(crew, "THREADS", 3)
    monkeypatch.setattr(batch_module, "_WORTHWHILE", 0)
    monkeypatch.setattr(batch_module, "SLICE", 64)
    monkeypatch.setattr(batch_module, "_NEIGHBOURS", 3)
    monkeypatch.setattr(batch_module, "_FEW", 2)
    monkeypatch.setattr(crew, "_TOLD", 0)
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "torchtether"]


def write(path, tensors):
    with open(path, "wb", buffering=0) as file:
        write_tensors(file, tensors, {}, name=str(path))


def test_every_job_is_done_once_and_told_on_the_calling_thread():
    done, told = [], []

    def job(i):
        return lambda room: done.append(i) or i

    together([job(i) for i in range(100)], lambda n: told.append((n, threading.current_thread())))
    assert sorted(done) == list(range(100)) == sorted(n for n, _ in told)
    assert {thread for _, thread in told} == {threading.main_thread()}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("where", ["job", "tick"])
def test_an_error_ends_the_work_and_is_raised(error, where):
    done, enough = [], threading.Event()

    def fail(*_):
        raise error("stop")

    def job(room):
        enough.wait(0.01)
        done.append(1)
        return 1

    jobs = [job, fail if where == "job" else job, *[job] * 500]
    with pytest.raises(error, match="stop"):
        together(jobs, fail if where == "tick" else lambda n: None)
    assert len(done) < 250


def test_a_crew_does_one_lot_after_another_and_goes_on_after_an_error():
    crew, seen = Crew(), set()

    def lot(count, fails_at=None):
        def job(i, room):
            seen.add(threading.get_ident())
            assert i != fails_at
            return i

        told = []
        crew.do([partial(job, i) for i in range(count)], told.append)
        return sum(told)

    try:
        for count in (50, 0, 1, 2, 90):
            assert lot(count) == sum(range(count))
        assert len(seen - {threading.get_ident()}) <= 3
        with pytest.raises(AssertionError):
            lot(50, fails_at=7)
        assert lot(50) == sum(range(50))
    finally:
        crew.close()
    crew.close()  # again, of none


def test_an_interrupt_at_any_moment_leaves_no_thread():
    def work():
        together([lambda room: 1] * 3, lambda n: None)

    left = []
    for at in range(0, count_steps(work, ("batch.py",)), 7):
        interrupted(work, at, ("batch.py",))
        for thread in threading.enumerate():
            if thread.name == "torchtether":
                thread.join(timeout=5)
                left += [at] if thread.is_alive() else []
        assert not left


def test_work_beside_the_reads_is_done_with_them(tmp_path):
    tensors = {f"t{i}": torch.randn(40) for i in range(9)}
    write(tmp_path / "x.safetensors", tensors)
    crew, done, told = Crew(), [], []
    try:
        with Store(tmp_path / "x.safetensors") as store:
            for _ in range(2):
                batch, made = Batch(crew=crew), {key: torch.empty(40) for key in tensors}
                for i, (key, tensor) in enumerate(made.items()):
                    store.read_later(key, tensor, batch)
                    batch.do(lambda room, i=i: done.append(i) or 1000, 1000)
                batch.run(told.append)
                assert all(torch.equal(made[key], tensor) for key, tensor in tensors.items())
    finally:
        crew.close()
    assert sorted(done) == sorted([*range(9), *range(9)])
    assert sum(told) == 2 * 9 * (1000 + 160)


def test_ops_of_the_threads_use_one_core_and_those_of_others_do_not():
    before, found = torch.get_num_threads(), []
    together([lambda room: found.append(torch.get_num_threads()) or 0] * 9, lambda n: None)
    assert torch.get_num_threads() == before
    assert set(found) == {1}


@given(st.lists(st.integers(0, 90), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_a_batch_reads_what_single_reads_do(tmp_path_factory, sizes, random):
    path = tmp_path_factory.getbasetemp() / "batch.safetensors"
    tensors = {
        f"t{i}": torch.randn(size).to(random.choice([torch.float32, torch.int8])) for i, size in enumerate(sizes)
    }
    write(path, tensors)
    with TensorFile(path) as file:
        order = random.sample(list(tensors), len(tensors))
        made = {key: torch.empty_like(tensors[key]) for key in order}
        wide = {key: torch.empty(tensors[key].shape, dtype=torch.float64) for key in order}
        batch, told = Batch(), []
        for key in order:
            file.read_later(key, made[key], batch)
            file.read_later(key, wide[key], batch)
        batch.run(told.append)
    for key, tensor in tensors.items():
        assert torch.equal(made[key], tensor)
        assert torch.equal(wide[key], tensor.double())
    assert sum(told) == 2 * sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("how", ["at once", "refused", "a part of it"])
@pytest.mark.parametrize("piece", [batch_module.SLICE, 40])
def test_small_tensors_come_in_whichever_way_the_system_reads(tmp_path, monkeypatch, how, piece):
    """Also where it reads nothing at once, or ends early and leaves anything behind."""
    tensors = {f"t{i:02}": torch.randn(i % 7) for i in range(60)}
    write(tmp_path / "x.safetensors", tensors)
    honest, asked = batch_module.read_at_once, []

    def read(descriptor, spans, at, nbytes):
        asked.append(nbytes)
        if how == "a part of it":
            assert not honest(descriptor, [*spans[:-1], 1], at, nbytes)
        return how == "at once" and honest(descriptor, spans, at, nbytes)

    monkeypatch.setattr(batch_module, "read_at_once", read)
    monkeypatch.setattr(batch_module, "SLICE", piece)
    with Store(tmp_path / "x.safetensors") as store:
        batch, told = Batch(), []
        order = [*sorted(tensors, key=hash), "t05", "t06"]  # some twice, as for a tie that is taken apart
        made = store.make_later([(key, (1,)) for key in order], batch)
        batch.run(told.append)
    assert all(torch.equal(new, tensors[key]) for key, new in zip(order, made, strict=True))
    assert sum(told) == sum(tensor.nbytes for tensor in made)
    assert asked
    assert max(told) <= piece


@pytest.mark.parametrize("later", ["read", "make"])
def test_much_is_read_as_little_is(tmp_path, monkeypatch, later):
    """On either side of the bytes from which on there are threads, what is read is what is stored."""
    tensors = {f"t{i}": torch.randn(100) for i in range(4)}
    write(tmp_path / "x.safetensors", tensors)
    monkeypatch.setattr(batch_module, "_WORTHWHILE", 1000)
    for count in (2, 4):
        with Store(tmp_path / "x.safetensors") as store:
            batch, keys, told = Batch(), list(tensors)[:count], []
            made = store.make_later([(key, (1,)) for key in keys if later == "make"], batch)
            for key in keys if later == "read" else ():
                made.append(torch.empty(100))
                store.read_later(key, made[-1], batch)
            batch.run(told.append)
        assert all(torch.equal(one, tensors[key]) for key, one in zip(keys, made, strict=True))
        assert sum(told) == 400 * count


def test_what_the_system_reads_at_once_is_what_is_there(tmp_path):
    (tmp_path / "x").write_bytes(bytes(range(100)))
    memory = torch.zeros(3, 50, dtype=torch.uint8)
    with (tmp_path / "x").open("rb") as file:
        spans = [number for row in memory[:2] for number in (row.data_ptr(), 30)]
        if not system.read_at_once(file.fileno(), spans, 7, 60):
            assert system._preadv is None
            return
        assert memory.tolist() == [[*range(7, 37), *[0] * 20], [*range(37, 67), *[0] * 20], [0] * 50]
        assert not system.read_at_once(file.fileno(), spans, 41, 60)  # the file ends too early
        assert not system.read_at_once(-1, spans, 7, 60)


def test_a_file_that_shrinks_is_named_and_the_model_stays_on_meta(tmp_path):
    path = tmp_path / "x.safetensors"
    tt.save(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), path)
    for quantize in (None, "int8"):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        plan, data = tt.plan_load(model, path, quantize=quantize), path.read_bytes()
        os.truncate(path, len(data) - 100)
        with pytest.raises(
            tt.CheckpointError, match=r"x.safetensors: 1.weight: the file is cut short: nothing follows byte"
        ):
            plan.apply()
        assert all(parameter.is_meta for parameter in model.parameters())
        path.write_bytes(data)
        plan.apply()
        plan.close()
        assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8", "nf4", "mxfp4", "nvfp4"])
def test_encoding_rows_as_they_are_read_is_encoding_the_whole(tmp_path, monkeypatch, scheme):
    monkeypatch.setattr(importlib.import_module("torchtether.loading.contents"), "_ROWS", 600)
    source = nn.Linear(192, 17).bfloat16()
    tt.save(source, tmp_path / "x.safetensors")
    with torch.device("meta"):
        model = nn.Linear(192, 17)
    tt.load(model, tmp_path / "x.safetensors", quantize=scheme, dtype=torch.float16)
    expected = tt.Weight.encode(source.weight, model.weight.scheme)
    assert model.weight.dtype == torch.float16
    for name, part in expected.parts.items():
        given = model.weight.parts[name]
        assert (given.shape, given.dtype) == (part.shape, part.dtype)
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (given, part))), name


def test_values_that_cannot_be_encoded_are_named_and_nothing_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.import_module("torchtether.loading.contents"), "_ROWS", 64)
    source = nn.Linear(64, 8)
    source.weight.data[5, 3] = float("nan")
    tt.save(source, tmp_path / "x.safetensors")
    with torch.device("meta"):
        model = nn.Linear(64, 8)
    with pytest.raises(tt.SchemeError, match="weight: 1 of 512 values are not finite"):
        tt.load(model, tmp_path / "x.safetensors", quantize="int8")
    assert model.weight.is_meta
    assert model.bias.is_meta
