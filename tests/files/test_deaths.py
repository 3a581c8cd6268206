"""A save killed between any two system calls leaves the old checkpoint or the new one to the next reader."""

import gc
import json
import os
import shutil
import sys
import threading

import pytest

import torchtether as tt
from tests import interrupts
from tests.files.dying import (
    CONFIG,
    KINDS,
    MORE,
    Paused,
    dies_at,
    dies_at_rename,
    file_names,
    held_bits,
    is_marked,
    net,
    prepared,
    trained,
    values,
)
from tests.interrupts import count_steps, interrupted
from torchtether.cli.main import main
from torchtether.files import folder as folder_module
from torchtether.files import locks, store

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Deaths of processes lose nothing that is written; an ``fsync`` is still a moment to die at."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


CHANGES = [
    ("plain", "plain shards"),
    ("plain shards", "plain shards"),
    ("plain", "compressed-tensors"),
    ("plain with settings", "plain"),
    (None, "plain shards"),
    *(
        pytest.param(old, new, marks=pytest.mark.slow)
        for old, new in (
            ("plain", "plain"),
            ("plain shards", "plain"),
            ("plain shards", "more plain shards"),
            ("compressed-tensors", "plain"),
            ("compressed-tensors shards", "plain"),
            ("plain shards", "compressed-tensors shards"),
            ("compressed-tensors shards", "bitsandbytes shards"),
            ("bitsandbytes shards", "compressed-tensors"),
            (None, "compressed-tensors"),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), CHANGES, ids=str)
def test_a_save_that_dies_leaves_the_old_or_the_new(tmp_path, old, new):
    """Before each call that opens, renames, removes or syncs. ``config.json`` is whole, and the next save works."""
    folder, whole = tmp_path / "there", tmp_path / "whole"
    prepared(whole, old)
    before = values(whole)
    config = (whole / "config.json").read_text()
    model, more = KINDS[new](2)
    tt.save(model, whole, **more)
    after, wanted = values(whole), file_names(whole)
    said = (whole / "config.json").read_text()
    seen, count = set(), 0
    while True:
        prepared(folder, old)
        is_dead = dies_at(count, lambda: tt.save(model, folder, **more))
        was_marked = is_marked(folder)
        assert (folder / "config.json").read_text() in (config, said)
        left = json.loads((folder / "config.json").read_text())
        assert {key: left.get(key) for key in CONFIG} == CONFIG
        if was_marked and count % 2:
            assert main(["verify", str(folder)]) == 0
        found = values(folder)
        if old is None and isinstance(found, str):
            assert "holds no safetensors file" in found
            found = before
        assert found in (before, after), found
        assert found == after or not was_marked
        seen.add(("marked, " * was_marked) + ("old" if found == before else "new"))
        assert (folder / "config.json").read_text() == (config if found == before else said) or not was_marked
        assert (folder / "tokenizer.json").read_text() == "{}"
        if was_marked:
            assert file_names(folder) == wanted
        if not is_dead:
            break
        tt.save(model, folder, **more)
        assert (values(folder), file_names(folder)) == (after, wanted)
        assert (folder / "config.json").read_text() == said
        count += 1
    assert found == after
    assert file_names(folder) == wanted
    assert {"old", "new"} <= seen


@pytest.mark.parametrize("then", ["plain", "plain shards", "compressed-tensors", "bitsandbytes shards"])
def test_any_save_repairs_what_another_kind_has_torn(tmp_path, then):
    model, more = KINDS["compressed-tensors shards"](2)
    count, repaired = 10, 0
    other, options = KINDS[then](3)
    prepared(tmp_path / "wanted", None)
    tt.save(other, tmp_path / "wanted", **options)
    while True:
        prepared(tmp_path / "there", "plain")
        if not dies_at(count, lambda: tt.save(model, tmp_path / "there", **more)):
            break
        repaired += is_marked(tmp_path / "there")
        tt.save(other, tmp_path / "there", **options)
        for name in file_names(tmp_path / "wanted"):
            assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes()
        assert file_names(tmp_path / "there") == file_names(tmp_path / "wanted")
        count += 3
    assert repaired > 3


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1], ids=["weights first", "optimizer first"])
@pytest.mark.parametrize("more", [{}, MORE], ids=["one file", "shards"])
def test_a_save_with_an_optimizer_that_dies_leaves_both_old_or_both_new(tmp_path, more, first):
    """Two folders are exchanged as one, whichever a reader opens first."""
    for value in (1, 2):
        model, optimizer = trained(value)
        tt.distributed.save(model, tmp_path / str(value), optimizer=optimizer, **more)
    states = [tuple(values(tmp_path / f"{value}{where}") for where in ("", "/optimizer")) for value in (1, 2)]
    assert not {*map(type, states[0] + states[1])} & {str}
    there, seen, count = tmp_path / "there", set(), 0
    while True:
        shutil.rmtree(there, ignore_errors=True)
        shutil.copytree(tmp_path / "1", there)
        is_dead = dies_at(count, lambda: tt.distributed.save(model, there, optimizer=optimizer, **more))
        was_marked = is_marked(there)
        order = [there, there / "optimizer"][:: -1 if first else 1]
        found = tuple([values(path) for path in order][:: -1 if first else 1])
        assert found in states, count
        assert not is_marked(there)
        seen.add((was_marked, states.index(found)))
        if not is_dead:
            break
        count += 1
    assert file_names(there) == file_names(tmp_path / "2")
    assert seen == {(False, 0), (True, 0), (True, 1), (False, 1)}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file that nobody had taken yet
@pytest.mark.slow
@pytest.mark.parametrize("finely", [(), ("replacing.py",)], ids=["lines", "bytecodes"])
@pytest.mark.parametrize("more", [{}, MORE], ids=["one file", "shards"])
def test_an_interrupt_at_any_step_of_replacing_leaves_nothing_hidden(tmp_path, monkeypatch, more, finely):
    """Ctrl-C raises in this process, which goes on: no next save may ever come to take what is left."""
    rooms = (sys.modules["torchtether.files.replacing"], folder_module)
    monkeypatch.setattr(interrupts, "OURS", tuple(room.__file__ for room in rooms))
    for value in (1, 2):
        tt.save(net(value), tmp_path / str(value), **more)
    old, new = values(tmp_path / "1"), values(tmp_path / "2")
    target = tmp_path / "there" if more else tmp_path / "there" / "model.safetensors"
    save = lambda: tt.save(net(2), target, **more)  # noqa: E731
    count = count_steps(save, finely)
    assert count > 50
    for at in range(0, count, 7 if finely else 1):
        shutil.rmtree(tmp_path / "there")
        shutil.copytree(tmp_path / "1", tmp_path / "there")
        interrupted(save, at, finely)
        gc.collect(1)  # a generator that its error has held ends now
        assert not [name for name in file_names(tmp_path / "there") if name.startswith(".")], at
        assert values(tmp_path / "there") in (old, new), at


# -- two writers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(5))
def test_a_second_save_is_refused_while_the_first_renames_or_waits_for_it(tmp_path, monkeypatch, at):
    prepared(tmp_path / "there", "plain shards")
    first = Paused(monkeypatch, tmp_path / "there", 2, at, **MORE)
    assert not os.path.exists(tmp_path / "there" / "lock")
    monkeypatch.setattr(locks, "PATIENCE", 0.05)
    with pytest.raises(tt.CheckpointError, match="another save has not ended") as refused:
        tt.save(net(3), tmp_path / "there", **MORE)
    assert "\n" not in str(refused.value)
    monkeypatch.setattr(locks, "PATIENCE", 60.0)
    second = threading.Thread(target=tt.save, args=(net(3), tmp_path / "there"), kwargs=MORE)
    second.start()
    first.go()
    second.join(30)
    assert first.error is None
    prepared(tmp_path / "wanted", None)
    tt.save(net(3), tmp_path / "wanted", **MORE)
    assert values(tmp_path / "there") == values(tmp_path / "wanted")
    assert file_names(tmp_path / "there") == file_names(tmp_path / "wanted")


def test_a_lock_goes_with_its_process(tmp_path):
    prepared(tmp_path / "there", "plain shards")
    child = os.fork()
    if child == 0:
        with locks.locked(tmp_path / "there"):
            os._exit(9)
    os.waitpid(child, 0)
    tt.save(net(2), tmp_path / "there", **MORE)
    assert values(tmp_path / "there") == {name: held_bits(held) for name, held in net(2).state_dict().items()}


@pytest.mark.parametrize("other", [MORE, {}], ids=["shards", "one file"])
@pytest.mark.parametrize("at", range(5))
def test_where_there_are_no_locks_a_mixture_is_refused(tmp_path, monkeypatch, at, other):
    """The second save is done whole between two renames of the first."""

    def none(descriptor):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(locks, "try_to_own", none)
    prepared(tmp_path / "there", "plain shards")
    first = Paused(monkeypatch, tmp_path / "there", 2, at, **MORE)
    tt.save(net(3), tmp_path / "there", **other)
    first.go()
    whole = [{name: held_bits(held) for name, held in net(value).state_dict().items()} for value in (2, 3)]
    found = values(tmp_path / "there")
    assert isinstance(found, str) or found in whole
    assert (main(["verify", str(tmp_path / "there")]) == 1) == isinstance(found, str)
    tt.save(net(4), tmp_path / "there", **MORE)
    assert values(tmp_path / "there") == {name: held_bits(held) for name, held in net(4).state_dict().items()}


def test_a_shard_of_another_save_is_refused_also_by_verify(tmp_path, capsys):
    """It has the same names, shapes and records; its own checksums are right."""
    for value in (1, 2):
        tt.save(net(value), tmp_path / str(value), **MORE)
    shard = sorted(file_names(tmp_path / "1"))[0]
    shutil.copyfile(tmp_path / "2" / shard, tmp_path / "1" / shard)
    assert f"{shard}: its header has digest" in values(tmp_path / "1")
    assert main(["verify", str(tmp_path / "1")]) == 1
    assert "but model.safetensors.index.json lists" in capsys.readouterr().err
    tt.save(net(1), tmp_path / "1", **MORE)
    shutil.copytree(tmp_path / "1", tmp_path / "again")
    tt.save(net(1), tmp_path / "again", **MORE)
    for name in file_names(tmp_path / "1"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_an_index_without_digests_is_read_as_ever(tmp_path):
    tt.save(net(1), tmp_path, **MORE)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    assert set(index["metadata"].pop("torchtether.headers")) == set(index["weight_map"].values())
    path.write_text(json.dumps(index))
    assert values(tmp_path) == {name: held_bits(held) for name, held in net(1).state_dict().items()}
    assert main(["verify", str(tmp_path)]) == 0
    for wrong in ({}, [], "x", None):
        index["metadata"]["torchtether.headers"] = wrong
        path.write_text(json.dumps(index))
        assert isinstance(values(tmp_path), str) == (wrong is not None)


def test_two_saves_under_two_names_do_not_disturb_each_other(tmp_path, monkeypatch):
    """One is between its renames, and both are whole."""
    first = Paused(monkeypatch, tmp_path / "a.safetensors", 1, 0)
    second = threading.Thread(target=tt.save, args=(net(2), tmp_path / "b.safetensors"))
    second.start()
    first.go()
    second.join(30)
    for name, value in (("a", 1), ("b", 2)):
        wanted = {key: held_bits(held) for key, held in net(value).state_dict().items()}
        assert values(tmp_path / f"{name}.safetensors") == wanted


@pytest.mark.parametrize("at", [None, 0, 1, 2], ids=str)
@pytest.mark.parametrize(
    ("old", "new"), [("compressed-tensors", "plain"), ("plain shards", "compressed-tensors shards")]
)
def test_a_checkpoint_that_is_replaced_while_it_is_opened_is_no_mixture(tmp_path, monkeypatch, old, new, at):
    """Between the files of tensors and ``config.json`` a save is done, or has done some of its renames."""
    prepared(tmp_path, old)
    stock, (model, more) = store.read_beside, KINDS[new](2)

    def read_late(folder):
        with monkeypatch.context() as patch:
            patch.setattr(store, "read_beside", stock)
            if at is None:
                tt.save(model, folder, **more)
            else:
                assert dies_at_rename(at, lambda: tt.save(model, folder, **more))
        return stock(folder)

    monkeypatch.setattr(store, "read_beside", read_late)
    found = values(tmp_path)
    if at == 0:  # nothing is in place yet
        assert not isinstance(found, str)
    else:
        assert "the file was replaced while it was open" in found or "a save to this checkpoint has not ended" in found
