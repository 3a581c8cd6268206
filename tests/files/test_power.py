"""A save that a power failure ends at any moment leaves the old checkpoint or the new one.

A disk may then lack what nobody has synced: the contents of a file, and names that were given, changed or taken since
the last sync of their folder, each for itself.
"""

import itertools
import os
import random
import shutil
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import torchtether as tt
from tests.files.dying import KINDS, MORE, is_marked, net, prepared, trained, values
from torchtether.cli.main import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="descriptors are found in /proc")


@dataclass
class Disk:
    """What is certainly on a disk: the names in each folder, and the contents of each file by its number.

    ``pending`` has, by folder, what may be there too: (name that goes, name that comes, file).
    """

    names: dict[str, dict[str, int]] = field(default_factory=dict)
    files: dict[int, tuple[bytes, os.stat_result]] = field(default_factory=dict)
    pending: dict[str, list[tuple[str | None, str | None, int]]] = field(default_factory=dict)

    def states(self, choose):
        """Yield the names in all folders after a failure now, with none, one, all or some of the pending changes."""
        changes = [(folder, change) for folder, some in self.pending.items() for change in some]
        count = len(changes)
        chosen = {frozenset(range(at)) for at in range(count + 1)} | {frozenset([at]) for at in range(count)}
        chosen |= {frozenset(range(count)) - {at} for at in range(count)}
        chosen |= {frozenset(at for at in range(count) if choose.random() < 0.5) for _ in range(8)}
        for some in chosen:
            made = {folder: dict(names) for folder, names in self.names.items()}
            for at, (folder, (gone, come, file)) in enumerate(changes):
                if at in some:
                    made[folder].pop(gone, None)
                    if come is not None:
                        made[folder][come] = file
            yield made

    def write(self, names, root, target):
        """Write the files of a state below ``target``; one that nobody has synced is empty."""
        for folder, held in names.items():
            place = target / Path(folder).relative_to(root)
            place.mkdir(parents=True, exist_ok=True)
            for name, number in held.items():
                content, found = self.files.get(number, (b"", None))
                (place / name).write_bytes(content)
                if found is not None:
                    os.utime(place / name, ns=(found.st_atime_ns, found.st_mtime_ns))


def recorded(monkeypatch, root, act):
    """Return the disk below ``root`` after each call of ``act`` that changes it."""
    disk, seen = Disk(), []
    for folder in [root, *(path for path in root.rglob("*") if path.is_dir())]:
        disk.names[str(folder)] = {}
        for path in folder.iterdir():
            if path.is_file():
                disk.names[str(folder)][path.name] = path.stat().st_ino
                disk.files[path.stat().st_ino] = path.read_bytes(), path.stat()

    def note():
        seen.append(
            Disk(
                {folder: dict(names) for folder, names in disk.names.items()},
                dict(disk.files),
                {folder: list(some) for folder, some in disk.pending.items()},
            )
        )

    def change(gone, come, number):
        path = Path(os.path.realpath(Path(gone or come).parent)) / Path(gone or come).name
        disk.pending.setdefault(str(path.parent), []).append(
            (gone and Path(gone).name, come and Path(come).name, number)
        )
        note()

    stock = {name: getattr(os, name) for name in ("open", "replace", "unlink", "fsync")}

    def opened(path, flags, *arguments, **options):
        made = stock["open"](path, flags, *arguments, **options)
        if flags & os.O_CREAT:
            change(None, path, os.fstat(made).st_ino)
        return made

    def replaced(source, target):
        number = os.stat(source).st_ino
        stock["replace"](source, target)
        change(source, target, number)

    def unlinked(path, *arguments, **options):
        number = os.lstat(path).st_ino
        stock["unlink"](path, *arguments, **options)
        change(path, None, number)

    def synced(descriptor):
        found, path = os.fstat(descriptor), os.readlink(f"/proc/self/fd/{descriptor}")
        if stat.S_ISDIR(found.st_mode):
            for gone, come, number in disk.pending.pop(path, []):
                disk.names[path].pop(gone, None)
                if come is not None:
                    disk.names[path][come] = number
        else:
            disk.files[found.st_ino] = Path(path).read_bytes(), found
        note()

    with monkeypatch.context() as patch:
        for name, function in {"open": opened, "replace": replaced, "unlink": unlinked, "fsync": synced}.items():
            patch.setattr(os, name, function)
        act()
    return seen


CHANGES = [
    ("plain", "plain"),
    ("plain", "plain shards"),
    ("plain shards", "plain"),
    ("plain shards", "plain shards"),
    ("plain shards", "more plain shards"),
    ("plain with settings", "compressed-tensors"),
    ("compressed-tensors shards", "bitsandbytes shards"),
]

UNMARKED = {("plain", "plain"), ("plain shards", "more plain shards")}
"""Changes that one rename decides: that of the only file, or of the index, if no shard replaces another one."""


def every_state(seen, root, folder):
    """Yield each state that a failure can leave, written to ``folder``, once."""
    choose, known = random.Random(0), set()
    for disk in seen:
        for names in disk.states(choose):
            found = frozenset(
                (place, name, disk.files.get(number, (b"",))[0], number) for place, held in names.items()
                for name, number in held.items()
            )  # fmt: skip
            if found not in known:
                known.add(found)
                shutil.rmtree(folder, ignore_errors=True)
                disk.write(names, root, folder)
                yield


@pytest.mark.parametrize(("old", "new"), CHANGES, ids=str)
def test_a_save_leaves_the_old_or_the_new(tmp_path, monkeypatch, old, new):
    root = tmp_path / "there"
    prepared(root, old)
    before = values(root)
    model, more = KINDS[new](2)
    seen = recorded(monkeypatch, root, lambda: tt.save(model, root, **more))
    after, found, marked = values(root), [], 0
    for _ in every_state(seen, root, tmp_path / "state"):
        marked += is_marked(tmp_path / "state")
        found.append(values(tmp_path / "state"))
        assert found[-1] in (before, after), found[-1]
    assert {id(before), id(after)} == {id(before if one == before else after) for one in found}
    assert seen[-1].pending.get(str(root), []) == [], "the last change is on the disk"
    assert (marked > 0) == ((old, new) not in UNMARKED)


@pytest.mark.parametrize("first", ["", "optimizer"], ids=["weights first", "optimizer first"])
def test_a_save_with_an_optimizer_leaves_both_old_or_both_new(tmp_path, monkeypatch, first):
    for value in (1, 2):
        model, optimizer = trained(value)
        tt.distributed.save(model, tmp_path / str(value), optimizer=optimizer, **MORE)
    states = [[values(tmp_path / f"{value}" / where) for where in ("", "optimizer")] for value in (1, 2)]
    root = tmp_path / "there"
    shutil.copytree(tmp_path / "1", root)
    seen = recorded(monkeypatch, root, lambda: tt.distributed.save(model, root, optimizer=optimizer, **MORE))
    found = []
    for _ in every_state(seen, root, tmp_path / "state"):
        values(tmp_path / "state" / first)
        found.append([values(tmp_path / "state" / where) for where in ("", "optimizer")])
        assert found[-1] in states
    assert all(state in found for state in states)


@pytest.mark.parametrize("call", ["file", "folder"])
def test_the_simulation_finds_a_sync_that_is_left_out(tmp_path, monkeypatch, call):
    """A test of the tests above: without the syncs of files, or of folders, some states are neither."""
    root = tmp_path / "there"
    prepared(root, "plain shards")
    before, stock = values(root), os.fsync

    def forgetful(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == (call == "file"):
            stock(descriptor)

    def act():
        with monkeypatch.context() as patch:
            nonlocal stock
            stock = os.fsync
            patch.setattr(os, "fsync", forgetful)
            tt.save(net(2), root, **MORE)

    seen = recorded(monkeypatch, root, act)
    after = values(root)
    states = itertools.islice(every_state(seen, root, tmp_path / "state"), 400)
    assert any(values(tmp_path / "state") not in (before, after) for _ in states)


def test_a_new_folder_has_everything_on_the_disk_when_it_gets_its_name(tmp_path, monkeypatch):
    """The command line makes folders of several files, with copies of others, and puts them in place by one rename."""
    source = tmp_path / "source"
    prepared(source, "plain shards")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text("{}")
    synced, renamed, stock, replace = set(), [], os.fsync, os.replace

    def sync(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        stock(descriptor)

    def rename(old, new):
        if Path(old).is_dir():
            renamed.append({path.stat().st_ino for path in [Path(old), *Path(old).rglob("*")]} - synced)
        replace(old, new)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    assert main(["convert", str(source), str(tmp_path / "deep" / "made")]) == 0
    assert renamed == [set()]
    assert (tmp_path / "deep" / "made" / "1_Pooling" / "config.json").exists()
    assert {path.stat().st_ino for path in (tmp_path, tmp_path / "deep")} <= synced


@pytest.mark.parametrize("name", ["new", "deep/new", "new.safetensors", "deep/new.safetensors", "new.gguf"])
def test_new_folders_of_a_save_are_on_the_disk_when_it_returns(tmp_path, monkeypatch, name):
    synced, stock = set(), os.fsync

    def sync(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        stock(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    tt.save(net(1), tmp_path / name, format="gguf" if name.endswith(".gguf") else "native")
    assert {path.stat().st_ino for path in [tmp_path, *tmp_path.rglob("*")]} <= synced
