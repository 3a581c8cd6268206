"""Marks of saves that died: what they may say, wherever their folder is, and whoever has written them."""

import json
import os
import platform
import shutil
import threading
import time

import pytest
import torch
from safetensors.torch import save_file

import torchtether as tt
from tests.files.dying import (
    MORE,
    Paused,
    contents,
    dies_at_rename,
    file_names,
    held_bits,
    is_marked,
    net,
    prepared,
    torn,
    trained,
    values,
)
from torchtether.files import leftovers, locks, marks, replacing

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def stamp_of(path):
    found = os.lstat(path)
    return [found.st_size, found.st_mtime_ns]


def of_a_parent(said, folder):
    said["removes"].append(["../precious.safetensors", None])


def of_a_root(said, folder):
    said["removes"].append(["/model.safetensors", None])


def of_another_file(said, folder):
    said["removes"].append(["config.json.bak", None])


def of_a_visible_file(said, folder):
    said["renames"][0][0] = "tokenizer.json"


def of_numbers(said, folder):
    said["renames"] = [[1, 2, 3, 4]]


def of_the_words_of_older_marks(said, folder):
    said.clear()


def of_another_stem(said, folder):
    said["removes"].append(["other.safetensors", stamp_of(folder / "other.safetensors")])


def of_a_folder_without_a_mark(said, folder):
    said["removes"].append(["inner/model.safetensors", stamp_of(folder / "inner/model.safetensors")])


def of_settings_in_a_folder_without_a_mark(said, folder):
    said["removes"].append(["inner/config.json", stamp_of(folder / "inner/config.json")])


def of_a_file_in_the_making_in_another_folder(said, folder):
    hidden, target = (
        folder / "inner/.model-00001-of-00002.safetensors.1.00000000.tmp",
        "model-00001-of-00002.safetensors",
    )
    hidden.write_bytes(b"the first half")
    said["renames"] = [[f"inner/{hidden.name}", target, stamp_of(hidden), said["renames"][0][3]]]


def of_a_folder_without_that_mark(said, folder):
    said["marks"] = ["inner/model.safetensors.torn"]
    of_a_folder_without_a_mark(said, folder)


def of_a_file_that_somebody_writes_at_the_moment(said, folder):
    said["marks"] = ["inner/model.safetensors.torn"]
    hidden, target = folder / "inner/.model.safetensors.1.00000000.tmp", folder / "inner/model.safetensors"
    hidden.write_bytes(b"the first half")
    said["renames"].append([f"inner/{hidden.name}", f"inner/{target.name}", stamp_of(target), stamp_of(target)])


def of_marks_that_are_tensors(said, folder):
    said["marks"] = ["other.safetensors"]


def of_marks_that_are_settings(said, folder):
    said["marks"] = ["inner/config.json"]


def of_the_mark_of_another_save(said, folder):
    said["marks"] = ["torn/model.safetensors.torn"]


def of_a_link_as_target(said, folder):
    of_a_link_to_remove(said, folder)
    _, stamp = said["removes"].pop()
    hidden, _, after, _ = said["renames"][-1]
    said["renames"] = [[".model.safetensors.1.00000000.tmp", "model.safetensors", after, stamp]]
    (folder / hidden).rename(folder / said["renames"][0][0])


def of_a_link_to_remove(said, folder):
    (folder / "model.safetensors").symlink_to("../precious.safetensors")
    said["removes"].append(["model.safetensors", stamp_of(folder / "model.safetensors")])


def of_a_link_to_an_old_shard(said, folder):
    shard = folder / "model-00009-of-00009.safetensors"
    shard.symlink_to("../precious.safetensors")
    said["removes"].append([shard.name, stamp_of(shard)])


def of_what_is_no_name(said, folder):
    said["removes"].append(["model-\ud800-00001-of-00002.safetensors", None])


def of_the_own_mark(said, folder):
    said["removes"].append(["model.safetensors.torn", None])


@pytest.mark.parametrize(
    "change",
    [
        of_a_parent, of_a_root, of_another_file, of_a_visible_file, of_numbers, of_the_words_of_older_marks,
        of_another_stem, of_a_folder_without_a_mark, of_a_folder_without_that_mark,
        of_settings_in_a_folder_without_a_mark, of_a_file_in_the_making_in_another_folder,
        of_a_file_that_somebody_writes_at_the_moment, of_marks_that_are_tensors,
        of_marks_that_are_settings, of_the_mark_of_another_save, of_a_link_as_target,
        of_a_link_to_remove, of_a_link_to_an_old_shard, of_what_is_no_name, of_the_own_mark,
    ],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_a_mark_has_no_say_over_the_files_of_others(tmp_path, change):
    """Whoever reads a folder may do more than whoever has made it."""
    folder = tmp_path / "there"
    torn(folder)
    (tmp_path / "precious.safetensors").write_bytes(b"")
    (folder / "other.safetensors").write_bytes(b"")
    prepared(folder / "inner", "plain")
    torn(folder / "torn")
    mark = folder / "model.safetensors.torn"
    said = json.loads(mark.read_text())
    change(said, folder)
    mark.write_text(json.dumps(said))
    is_refused_and_left(folder)


def is_refused_and_left(folder):
    before, found = contents(folder.parent), values(folder)
    assert "a save to this checkpoint has not ended: " in found
    assert found.endswith("Save again.")
    assert contents(folder.parent) == before
    if not (folder / "model.safetensors").is_symlink():
        tt.save(net(3), folder, **MORE)
        assert held_bits(tt.open(folder)["l0.bias"]) == held_bits(net(3)["l0"].bias)
        assert not (folder / "model.safetensors.torn").exists()
        assert not [name for name in file_names(folder) if name.startswith(".model")]


def by_safetensors(folder):
    save_file({"w": torch.ones(2)}, next(folder.glob("model-*.safetensors")))


def without_its_file(folder):
    next(folder.glob(".model-*.tmp")).unlink()


@pytest.mark.parametrize("change", [by_safetensors, without_its_file], ids=lambda change: change.__name__)
def test_a_folder_that_somebody_has_written_to_since_is_refused_and_left(tmp_path, change):
    torn(tmp_path / "there")
    change(tmp_path / "there")
    is_refused_and_left(tmp_path / "there")


def of_lists(mark):
    mark.write_text("[" * 10**6 + "]" * 10**6)


def of_a_string(mark):
    mark.write_text('"part of"')


def of_a_pipe(mark):
    mark.unlink()
    os.mkfifo(mark)


def of_a_loop(mark):
    mark.unlink()
    mark.symlink_to(mark.name)


def of_a_number_without_end(mark):
    mark.write_text(mark.read_text().replace('"marks": []', f'"marks": [{"9" * 10**4}]'))


def of_a_stranger(mark):
    mark.write_text('{"part of": "model.safetensors.torn", "before": [["../precious", null], 3]}')


def of_a_folder_elsewhere(mark):
    torn(mark.parent.parent / "elsewhere")
    mark.write_text(json.dumps({"part of": "elsewhere/model.safetensors.torn", "before": []}))


@pytest.mark.parametrize(
    "change",
    [of_lists, of_a_string, of_a_pipe, of_a_loop, of_a_number_without_end, of_a_stranger, of_a_folder_elsewhere],
    ids=lambda change: change.__name__,
)
def test_a_mark_that_makes_no_sense_is_refused_in_words(tmp_path, change):
    torn(tmp_path / "there")
    change(tmp_path / "there" / "model.safetensors.torn")
    assert "a save to this checkpoint has not ended: " in values(tmp_path / "there")
    assert is_marked(tmp_path / "there")
    assert is_marked(tmp_path / "elsewhere") == (change is of_a_folder_elsewhere)


def test_a_torn_checkpoint_does_not_disturb_one_of_another_name_beside_it(tmp_path):
    torn(tmp_path / "there")
    without_its_file(tmp_path / "there")
    other = tmp_path / "there" / "other.safetensors"
    for value in (3, 4):
        tt.save(net(value), other)
        assert values(other) == {name: held_bits(held) for name, held in net(value).state_dict().items()}
    assert "has not ended" in values(tmp_path / "there")


@pytest.mark.parametrize("at", range(1, 9))
def test_a_save_of_the_weights_alone_ends_that_of_the_optimizer_too(tmp_path, at):
    """The folder of the optimizer would never be read again: the mark around it, with the list, is gone afterwards."""
    _, new = torn_with_an_optimizer(tmp_path / "there", at)
    tt.save(net(3), tmp_path / "there", **MORE)
    assert values(tmp_path / "there") == {name: held_bits(held) for name, held in net(3).state_dict().items()}
    assert values(tmp_path / "there" / "optimizer") == new or at == 1
    assert not is_marked(tmp_path / "there")


@pytest.mark.parametrize("at", range(1, 6))
@pytest.mark.parametrize("way", ["there", "link", "there/../there"])
def test_an_index_survives_whichever_way_the_folder_is_given(tmp_path, monkeypatch, way, at):
    monkeypatch.chdir(tmp_path)
    prepared(tmp_path / "there", "plain shards")
    wanted = file_names(tmp_path / "there")
    os.symlink("there", "link")
    dies_at_rename(at, lambda: tt.save(net(2), way, **MORE))
    assert is_marked(tmp_path / "there")
    assert values(way) == {name: held_bits(held) for name, held in net(2).state_dict().items()}
    assert file_names(tmp_path / "there") == wanted


def torn_with_an_optimizer(folder, at):
    """Make a folder with an optimizer, whose save died before its rename number ``at``; return both whole states."""
    for value in (1, 2):
        model, optimizer = trained(value)
        tt.distributed.save(model, folder.with_name(str(value)), optimizer=optimizer, **MORE)
    shutil.copytree(folder.with_name("1"), folder)
    assert dies_at_rename(at, lambda: tt.distributed.save(model, folder, optimizer=optimizer, **MORE))
    assert is_marked(folder / "optimizer")
    return [values(folder.with_name(f"{value}") / "optimizer") for value in (1, 2)]


@pytest.mark.parametrize("way", [".", "../../link", "..", "../optimizer"])
def test_the_outer_folder_is_found_from_anywhere(tmp_path, monkeypatch, way):
    _, new = torn_with_an_optimizer(tmp_path / "there", 3)
    (tmp_path / "link").symlink_to(tmp_path / "there" / "optimizer")
    (tmp_path / "there" / "optimizer" / "deeper").mkdir()
    monkeypatch.chdir(tmp_path / "there" / "optimizer" / ("deeper" if way == ".." else ""))
    assert values(way) == new
    assert not is_marked(tmp_path / "there")


@pytest.mark.parametrize("at", [1, 3, 9])
@pytest.mark.parametrize("beside", [None, 3], ids=["alone", "into another torn one"])
def test_an_inner_folder_that_was_moved_away_is_no_mixture(tmp_path, at, beside):
    old, _ = torn_with_an_optimizer(tmp_path / "there", at)
    if beside is None:
        (tmp_path / "new").mkdir()
    else:
        torn(tmp_path / "new", beside)
    shutil.move(tmp_path / "there" / "optimizer", tmp_path / "new" / "optimizer")
    found = values(tmp_path / "new" / "optimizer")
    assert "a save to this checkpoint has not ended: " in found or (found == old and beside is None and at < 9)
    if beside is not None:
        assert values(tmp_path / "new") == {name: held_bits(held) for name, held in net(2).state_dict().items()}


def test_a_mark_of_a_later_save_that_died_is_not_taken_for_that_of_an_earlier_one(tmp_path, monkeypatch):
    """The reader waits for the lock of the outer folder meanwhile."""
    torn_with_an_optimizer(tmp_path / "there", 1)
    inner, state = tmp_path / "there" / "optimizer", {"w": torch.ones(2, 50), "v": torch.zeros(2, 50)}
    stock, waited = marks.locked, []

    def locked(folder):
        if not waited:
            waited.append(folder)
            tt.open(tmp_path / "there").close()
            tt.save(state, inner, max_shard_size=600)
            assert dies_at_rename(2, lambda: tt.save({k: v + 1 for k, v in state.items()}, inner, max_shard_size=600))
        return stock(folder)

    monkeypatch.setattr(marks, "locked", locked)
    assert values(inner) == {name: held_bits(held + 1) for name, held in state.items()}
    assert waited


def test_what_a_mark_lists_is_no_leftover_if_the_mark_comes_while_leftovers_are_removed(tmp_path, monkeypatch):
    """Another save was between its files and its mark at the first look at the folder; then its process died."""
    torn(tmp_path / "there")
    mark = tmp_path / "there" / "model.safetensors.torn"
    said, stock = mark.read_text(), leftovers.try_to_own
    mark.unlink()

    def late(descriptor):
        mark.write_text(said)
        return stock(descriptor)

    monkeypatch.setattr(leftovers, "try_to_own", late)
    leftovers.remove_leftovers(tmp_path / "there", lambda name: True)
    assert mark.exists()
    assert values(tmp_path / "there") == {name: held_bits(held) for name, held in net(2).state_dict().items()}


@pytest.mark.parametrize("at", [1, 3])
def test_a_reader_leaves_a_save_alone_that_runs_on_another_machine(tmp_path, monkeypatch, at):
    """There are file systems, such as BeeGFS, whose locks hold on one machine only."""
    prepared(tmp_path / "there", "plain shards")
    wanted = file_names(tmp_path / "there")
    first, stock = Paused(monkeypatch, tmp_path / "there", 2, at, **MORE), time.sleep
    monkeypatch.setattr(locks, "try_to_own", lambda descriptor: None)
    monkeypatch.setattr(platform, "node", lambda: "elsewhere")
    monkeypatch.setattr(time, "sleep", lambda seconds: first.go() if seconds == marks._STILL else stock(seconds))
    assert values(tmp_path / "there") == {name: held_bits(held) for name, held in net(2).state_dict().items()}
    first.go()
    assert first.error is None
    assert file_names(tmp_path / "there") == wanted


def test_a_save_that_died_on_another_machine_is_ended(tmp_path, monkeypatch):
    torn(tmp_path / "there")
    monkeypatch.setattr(platform, "node", lambda: "elsewhere")
    monkeypatch.setattr(marks, "_STILL", 0.01)
    assert values(tmp_path / "there") == {name: held_bits(held) for name, held in net(2).state_dict().items()}
    assert not is_marked(tmp_path / "there")


def test_a_save_whose_mark_another_one_has_removed_is_done(tmp_path, monkeypatch):
    """That happens where locks do not hold."""
    prepared(tmp_path / "there", "plain shards")
    first = Paused(monkeypatch, tmp_path / "there", 2, 4, **MORE)
    (tmp_path / "there" / "model.safetensors.torn").unlink()
    first.go()
    assert first.error is None
    assert values(tmp_path / "there") == {name: held_bits(held) for name, held in net(2).state_dict().items()}


def test_a_mark_with_names_of_no_end_does_not_disturb_the_end_of_another_save(tmp_path):
    torn(tmp_path)
    mark = tmp_path / "model.safetensors.torn"
    said = json.loads(mark.read_text())
    said["marks"] = [f"{'x' * 5000}/model.safetensors.torn"]
    mark.write_text(json.dumps(said))
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "other.safetensors"):
        raise ZeroDivisionError
    assert "lists what is no file of a checkpoint" in values(tmp_path)


def test_a_checkpoint_that_another_library_has_put_beside_a_torn_one_gets_no_rival(tmp_path):
    """As transformers does, which removes the shards of an older one."""
    torn(tmp_path, 1)
    for path in [*tmp_path.glob("model-*"), *tmp_path.glob("*.index.json")]:
        path.unlink()
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    before = contents(tmp_path)
    assert "model.safetensors has been added since" in values(tmp_path)
    assert contents(tmp_path) == before


def test_a_reader_waits_for_a_save_that_runs(tmp_path, monkeypatch):
    prepared(tmp_path / "there", "plain shards")
    first = Paused(monkeypatch, tmp_path / "there", 2, 2, **MORE)
    found = []
    reader = threading.Thread(target=lambda: found.append(values(tmp_path / "there")))
    reader.start()
    reader.join(0.1)
    assert not found
    first.go()
    reader.join(30)
    assert found == [{name: held_bits(held) for name, held in net(2).state_dict().items()}]


def test_a_reader_that_may_not_write_says_so(tmp_path, monkeypatch):
    torn(tmp_path / "there")

    def refuse(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    assert "has not ended: Permission denied. Save again." in values(tmp_path / "there")
    monkeypatch.undo()
    assert values(tmp_path / "there") == {name: held_bits(held) for name, held in net(2).state_dict().items()}


@pytest.mark.parametrize("at", range(6))
def test_a_folder_of_an_optimizer_that_is_elsewhere_is_never_half_exchanged(tmp_path, at):
    """The mark of the outer folder cannot say what is left in a folder behind a symbolic link, so both are refused."""
    for value in (1, 2):
        model, optimizer = trained(value)
        tt.distributed.save(model, tmp_path / str(value), optimizer=optimizer)
    states = [tuple(values(tmp_path / f"{value}{where}") for where in ("", "/optimizer")) for value in (1, 2)]
    there = tmp_path / "1"
    (there / "optimizer").rename(tmp_path / "elsewhere")
    (there / "optimizer").symlink_to(tmp_path / "elsewhere")
    dies_at_rename(at, lambda: tt.distributed.save(model, there, optimizer=optimizer))
    found = values(there), values(tmp_path / "elsewhere")
    assert found in states or any("has not ended" in one for one in found if isinstance(one, str))
    tt.distributed.save(model, there, optimizer=optimizer)
    assert tuple(values(there / where) for where in ("", "optimizer")) == states[1]
