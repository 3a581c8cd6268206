"""Writers that are killed, interrupted or fail on a full disk leave the old file whole; no torn file looks whole."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys

import pytest
import torch

import torchtether as tt
from torchtether.cli.main import main
from torchtether.files import TensorFile, new_folder, replacing
from torchtether.files.locks import hold
from torchtether.files.names import name_beside

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and limits are POSIX's")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Large enough that writing takes a while."""
    path = tmp_path_factory.mktemp("source") / "model"
    torch.manual_seed(0)
    tt.save({f"layer{i}.weight": torch.randn(256, 1024) for i in range(8)}, path, max_shard_size="3MB")
    (path / "config.json").write_text("{}")
    return path


# Imports once and forks for every command: what is killed is a process of its own, without the seconds of importing.
_FORKS = """
import json, os, signal, sys, time
import torchtether.cli.transform, torchtether.cli.verify
from torchtether.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it
for line in sys.stdin:
    words, number, after, errors = json.loads(line)
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            os.dup2(2, 1)
            code = main(words)
            sys.stderr.flush()
        finally:
            os._exit(code)
    if number:
        time.sleep(after)
        os.kill(child, number)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([code, time.monotonic() - start]), flush=True)
"""


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Runs a command, and sends it ``after`` (a signal, seconds from its start): code, stderr, seconds."""
    errors = tmp_path_factory.mktemp("errors") / "errors"
    with subprocess.Popen(
        [sys.executable, "-c", _FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:

        def run(words, after=(0, 0.0)):
            print(json.dumps([[str(word) for word in words], *after, str(errors)]), file=server.stdin, flush=True)
            code, seconds = json.loads(server.stdout.readline())
            return code, errors.read_text(), seconds

        yield run
        server.stdin.close()


def is_right(target, source):
    return main(["verify", str(target), "--against", str(source)]) == 0


@posix
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_killing_quantize_at_any_moment_leaves_nothing_that_lies(tmp_path, source, launch, kind):
    """Twenty kills over the time that a run takes. What is there is absent and refused, or whole and right.

    The same command, run again over what is left, succeeds, and takes what the killed one left hidden with it; where
    the killed one had finished, it says that the target is there.
    """
    target = tmp_path / ("made" if kind == "folder" else "made.safetensors")
    shards = ["--max-shard-size", "500kB"] if kind == "folder" else []
    words = ["quantize", source, target, "--scheme", "int4", *shards]
    code, error, _ = launch(words)
    assert code == 0, error
    expected = read(target)
    assert is_right(target, source)
    remove(target)
    whole = launch(words)[2]  # the first one has imported something still
    moments = random.Random(0)
    killed = hidden = 0
    for i in range(20):
        remove(target)
        code, _, _ = launch(words, after=(signal.SIGKILL, whole * (i + moments.random()) / 20))
        assert code in (0, -signal.SIGKILL)
        killed += code != 0
        left = {path.name for path in tmp_path.iterdir()} - {target.name}
        assert all(name.startswith(f".{target.name}.") and name.endswith(".tmp") for name in left)
        assert len(left) <= 1
        hidden += len(left)
        was_there = target.exists()
        assert was_there or main(["verify", str(target)]) == 1
        code, error, _ = launch(words)
        assert (code, "it is there already" in error) == ((1, True) if was_there else (0, False)), error
        assert read(target) == expected
        assert was_there or os.listdir(tmp_path) == [target.name]
        for path in tmp_path.iterdir():  # of one that was killed after its last rename
            if path != target:
                remove(path)
    assert killed >= 4, "the moments are not spread over the run"
    assert hidden >= 1, "no kill met a file that was being written"


def read(target):
    if target.is_file():
        return target.read_bytes()
    return {file.name: file.read_bytes() for file in sorted(target.iterdir())}


def remove(target):
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)


@posix
@pytest.mark.slow
@pytest.mark.parametrize("verb", [["quantize", "--scheme", "nf4"], ["convert", "--dtype", "bfloat16"]])
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_ctrl_c_leaves_nothing_or_the_whole(tmp_path, source, launch, verb, kind):
    """A signal that comes after the last rename finds the work done: what is there then is what a whole run writes."""
    target = tmp_path / ("made" if kind == "folder" else "made.safetensors")
    words = [verb[0], source, target, *verb[1:]]
    code, error, _ = launch(words)
    assert code == 0, error
    expected = read(target)
    remove(target)
    whole = launch(words)[2]  # the first one has imported something still
    interrupted = 0
    for i in range(6):
        remove(target)
        code, error, _ = launch(words, after=(signal.SIGINT, whole * (i + 0.5) / 6))
        if code == 0:
            assert read(target) == expected
            continue
        if os.listdir(tmp_path) == [target.name]:
            assert read(target) == expected
        else:
            assert os.listdir(tmp_path) == []
        if (code, error) == (1, ""):
            continue  # the signal came before the command itself had begun
        interrupted += 1
        assert (code, error) == (130, "torchtether: interrupted\n")
    assert interrupted >= 1, "no signal met the command"


# -- over an older checkpoint -----------------------------------------------------------------------------------------


def state(value):
    return {f"w{i}": torch.full((64,), float(value)) for i in range(4)}


@pytest.mark.parametrize("at", range(7))
def test_a_save_over_shards_that_fails_in_between_is_ended_by_the_next_reader(tmp_path, monkeypatch, at):
    """Several files cannot be renamed at once. No load mixes them, and none is lost."""
    tt.save(state(1), tmp_path, max_shard_size=256)
    stock, left = os.replace, at

    def replace(*arguments):
        nonlocal left
        if left == 0:
            raise OSError(5, "Input/output error")
        left -= 1
        stock(*arguments)

    monkeypatch.setattr(os, "replace", replace)
    try:
        tt.save(state(2), tmp_path, max_shard_size=256)
    except tt.CheckpointError as error:
        assert "Input/output error" in str(error)
    monkeypatch.undo()
    with tt.open(tmp_path) as checkpoint:
        values = {float(checkpoint[name][0]) for name in checkpoint}
    assert values == ({1.0} if at == 0 else {2.0})
    assert not [path for path in tmp_path.iterdir() if path.name.endswith((".tmp", ".torn"))]
    tt.save(state(3), tmp_path, max_shard_size=256)
    with tt.open(tmp_path) as checkpoint:
        assert {float(checkpoint[name][0]) for name in checkpoint} == {3.0}


@posix
@pytest.mark.parametrize("at", range(6))
def test_an_interrupt_waits_while_files_are_renamed(tmp_path, monkeypatch, at):
    tt.save(state(1), tmp_path, max_shard_size=256)
    stock, calls = os.replace, []

    def replace(one, other):
        stock(one, other)
        calls.append(other)
        if len(calls) == at + 1:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            tt.save(state(2), tmp_path, max_shard_size=256)
    with tt.open(tmp_path) as checkpoint:
        assert {float(checkpoint[name][0]) for name in checkpoint} == {2.0}
    assert not [name for name in os.listdir(tmp_path) if not name.startswith("model")]


def test_other_numbers_of_shards_leave_the_old_ones_whole_until_the_index(tmp_path, monkeypatch):
    tt.save(state(1), tmp_path, max_shard_size=512)
    stock = os.replace

    def replace(one, other):
        if str(other).endswith(".json"):
            raise KeyboardInterrupt
        stock(one, other)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        tt.save(state(2), tmp_path, max_shard_size=256)
    with tt.open(tmp_path) as checkpoint:
        assert {float(checkpoint[name][0]) for name in checkpoint} == {1.0}


# -- what killed ones left --------------------------------------------------------------------------------------------


@posix
def test_leftovers_of_dead_processes_go_and_others_stay(tmp_path):
    """One is told by its name, by the number of its process, and by that nobody holds it."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    dead = process.pid
    shard = "model-00001-of-00002.safetensors"
    gone = [f".model.safetensors.{dead}.0123abcd.tmp", f".{shard}.{dead}.0123abcd.tmp"]
    held = f".model.safetensors.{dead}.00000000.tmp"  # by another machine, say
    kept = [
        held,
        f".model.safetensors.{os.getpid()}.0123abcd.tmp",
        f".other.safetensors.{dead}.0123abcd.tmp",
        f".model.safetensors.{dead}.tmp",
        f"model.safetensors.{dead}.0123abcd.tmp",
    ]
    for name in (*gone, *kept):
        (tmp_path / name).write_bytes(b"x")
    with open(tmp_path / held) as file:
        hold(file.fileno())
        tt.save(state(1), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", *kept}
    tt.save(state(2), tmp_path)
    assert not (tmp_path / held).exists()


@posix
def test_a_file_that_is_being_written_is_held(tmp_path, monkeypatch):
    """Another process that thinks its owner dead, because it runs on another machine, leaves it alone."""

    def lost(process, number):
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", lost)
    with replacing(tmp_path / "x") as (file,):
        with replacing(tmp_path / "x") as (other,):
            other.write(b"other")
        file.write(b"mine")
    assert (tmp_path / "x").read_bytes() == b"mine"
    with new_folder(tmp_path / "y") as folder:
        with replacing(tmp_path / "y.safetensors"), new_folder(tmp_path / "y"):
            pass
        assert folder.is_dir()
    assert sorted(os.listdir(tmp_path)) == ["x", "y", "y.safetensors"]


@posix
@pytest.mark.parametrize("mode", [0o700, 0o2750])
def test_an_empty_folder_that_is_replaced_keeps_its_mode(tmp_path, mode):
    """It may be closed to others, and is so while it is filled, too."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x").chmod(mode)
    with new_folder(tmp_path / "x") as folder:
        assert folder.stat().st_mode & 0o7777 == mode
        (folder / "file").touch()
    assert (tmp_path / "x").stat().st_mode & 0o7777 == mode
    assert os.listdir(tmp_path / "x") == ["file"]


def test_a_folder_that_cannot_be_replaced_is_refused_before_the_work(tmp_path, monkeypatch, capsys):
    """The folder of a shell would stay empty: the rename gives its name to another one."""
    tt.save(state(1), tmp_path / "x.safetensors")
    (tmp_path / "y").mkdir()
    monkeypatch.chdir(tmp_path / "y")
    for name in (".", str(tmp_path / "y")):
        assert main(["convert", str(tmp_path / "x.safetensors"), name]) == 1
        assert f"{name}: the current folder cannot be replaced. Give" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os.path, "ismount", lambda path: os.fspath(path) == str(tmp_path / "y"))
    assert main(["convert", "x.safetensors", "y"]) == 1
    assert "y: a mount point cannot be replaced. Give a new folder in it." in capsys.readouterr().err
    assert sorted(os.listdir()) == ["x.safetensors", "y"]
    assert not os.listdir("y")
    assert main(["convert", "x.safetensors", "y/new"]) == 0


# -- disks that refuse ------------------------------------------------------------------------------------------------

_LIMITED = """
import resource, signal, sys, torch, torchtether as tt
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    tt.save({"v": torch.zeros(200_000)}, sys.argv[1])
except tt.CheckpointError as error:
    print(error)
"""


@pytest.mark.slow
@posix
def test_a_limit_on_the_size_of_files_leaves_the_old_one(tmp_path):
    path = tmp_path / "x.safetensors"
    tt.save({"v": torch.ones(3)}, path)
    before = path.read_bytes()
    done = subprocess.run([sys.executable, "-c", _LIMITED, str(path)], capture_output=True, text=True)
    assert "cannot be written: File too large" in done.stdout
    assert done.stdout.count("\n") == 1
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {path.name: before}


@posix
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_device_that_is_always_full_is_one_error(tmp_path):
    with (
        pytest.raises(tt.CheckpointError, match="cannot be written: No space left on device"),
        replacing(tmp_path / "x"),
        open("/dev/full", "wb", buffering=0) as full,
    ):
        full.write(b"x")
    assert list(tmp_path.iterdir()) == []


@posix
@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_leaves_the_old_file(tmp_path):
    tt.save({"v": torch.ones(3)}, tmp_path / "x.safetensors")
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(tt.CheckpointError, match="cannot be written: Permission denied"):
            tt.save({"v": torch.zeros(3)}, tmp_path / "x.safetensors")
    finally:
        tmp_path.chmod(0o700)
    with tt.open(tmp_path / "x.safetensors") as checkpoint:
        assert checkpoint["v"].tolist() == [1, 1, 1]


@posix
def test_a_full_disk_leaves_no_new_folder_and_keeps_old_ones(tmp_path, monkeypatch):
    (tmp_path / "old").mkdir()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for path in ("new", "new/er/still", "new/x.safetensors", "old", "old/new"):
            with pytest.raises(tt.CheckpointError, match="No space left on device"):
                tt.save(state(1), tmp_path / path)
        with pytest.raises(tt.CheckpointError, match="No space left on device"):
            tt.save(state(1), tmp_path / "new" / "x.gguf", format="gguf")
        assert [path.name for path in tmp_path.rglob("*")] == ["old"]
    tt.save(state(1), tmp_path / "new" / "er")
    assert os.listdir(tmp_path / "new" / "er") == ["model.safetensors"]


@pytest.mark.parametrize("name", ["x.safetensors/y", "x.safetensors/y.safetensors", "x.safetensors/y/z"])
def test_a_file_in_the_place_of_a_folder_is_named_with_the_reason(tmp_path, name):
    tt.save(state(1), tmp_path / "x.safetensors")
    with pytest.raises(tt.CheckpointError, match=r"the folder cannot be created: (Not a directory|File exists)"):
        tt.save(state(2), tmp_path / name)
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_an_error_names_the_target_and_not_the_hidden_folder(tmp_path, monkeypatch, capsys):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    tt.save(state(1), tmp_path / "x.safetensors")
    monkeypatch.setattr(os, "fsync", full)
    assert main(["convert", str(tmp_path / "x.safetensors"), str(tmp_path / "y")]) == 1
    found = capsys.readouterr().err
    assert found == f"torchtether: {tmp_path / 'y' / 'model.safetensors'}: cannot be written: No space left on device\n"
    assert os.listdir(tmp_path) == ["x.safetensors"]


@posix
@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write to all files")
def test_a_file_that_may_not_be_written_to_is_not_replaced(tmp_path):
    path = tmp_path / "x.safetensors"
    tt.save(state(1), path)
    before = path.read_bytes()
    path.chmod(0o444)
    with pytest.raises(tt.CheckpointError, match="x.safetensors: cannot be written: Permission denied"):
        tt.save(state(2), path)
    assert os.listdir(tmp_path) == [path.name]
    assert path.read_bytes() == before


@posix
@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM, errno.ETXTBSY])
def test_a_file_that_the_system_protects_is_named_with_the_reason(tmp_path, monkeypatch, number):
    path = tmp_path / "x.safetensors"
    tt.save(state(1), path)
    before, stock = path.read_bytes(), (os.open, os.access)

    def refuses(name, flags, *more, **named):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(number, os.strerror(number), str(name))
        return stock[0](name, flags, *more, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuses)
        patch.setattr(os, "access", lambda name, mode: mode != os.W_OK and stock[1](name, mode))
        with pytest.raises(tt.CheckpointError, match=f"x.safetensors: cannot be written: {os.strerror(number)}. Give"):
            tt.save(state(2), path)
    assert os.listdir(tmp_path) == [path.name]
    assert path.read_bytes() == before


@posix
@pytest.mark.parametrize("letter", ["a", "ä", "字"])
def test_names_as_long_as_the_file_system_allows_can_be_saved(tmp_path, letter):
    """What is hidden beside them has a shorter name, which tells them apart."""
    long = letter * (215 // len(letter.encode()))
    path = tmp_path / f"{letter * (243 // len(letter.encode()))}.safetensors"
    names = [tmp_path / f"{long}{end}" for end in ("1", "2")]
    for i, name in enumerate([path, *(name.with_name(f"{name.name}.safetensors") for name in names)]):
        tt.save(state(i), name)
        with tt.open(name) as checkpoint:
            assert float(checkpoint["w0"][0]) == i
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    for target in (path, names[0].with_name(f"{names[0].name}.safetensors")):
        hidden = name_beside(target)
        hidden.with_name(hidden.name.replace(f".{os.getpid()}.", f".{process.pid}.")).write_bytes(b"left by a dead one")
    tt.save(state(5), path)
    assert len(os.listdir(tmp_path)) == 4
    tt.save(state(6), names[0].with_name(f"{names[0].name}.safetensors"))
    assert len(os.listdir(tmp_path)) == 3
    tt.save(state(7), tmp_path / long[: len(long) - 3], max_shard_size=256)
    tt.save(state(8), tmp_path / f"{names[0].name}.safetensors", max_shard_size=256)
    with tt.open(tmp_path / f"{names[0].name}.safetensors.index.json") as checkpoint:
        assert float(checkpoint["w3"][0]) == 8


def test_an_interrupt_while_a_file_is_closed_does_not_close_another(tmp_path, monkeypatch):
    """The number of a closed file is soon that of another one."""
    tt.save(state(1), tmp_path / "x.safetensors")
    file = TensorFile(tmp_path / "x.safetensors")
    closed, stock = [], os.close

    def close(descriptor):
        closed.append(descriptor)
        stock(descriptor)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        with pytest.raises(KeyboardInterrupt):
            file.close()
        file.close()
    assert len(closed) == 1
