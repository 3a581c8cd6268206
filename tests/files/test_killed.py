"""Writers that are killed, interrupted, or refused by a real disk: the old file is whole, and nothing lies."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

import torchtether as tt
from torchtether.cli import main
from torchtether.files import replacing

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and limits are POSIX's")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Large enough that writing takes a while."""
    path = tmp_path_factory.mktemp("source") / "model"
    torch.manual_seed(0)
    tt.save({f"layer{i}.weight": torch.randn(256, 1024) for i in range(16)}, path, max_shard_size="5MB")
    (path / "config.json").write_text("{}")
    return path


def launch(words, after=None):
    """Starts a command that says when it has been imported, and sends it ``after`` (a signal, seconds from there)."""
    code = "import sys; from torchtether.cli import main; print('ready', flush=True); sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    start = time.monotonic()
    if after is not None:
        time.sleep(after[1])
        process.send_signal(after[0])
    _, error = process.communicate()
    return process.returncode, error, time.monotonic() - start


def is_right(target, source):
    return main(["verify", str(target), "--against", str(source)]) == 0


@posix
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_killing_quantize_at_any_moment_leaves_nothing_that_lies(tmp_path, source, kind):
    """Twenty kills over the time that a run takes: what is there afterwards is right, or refused, or nothing."""
    target = tmp_path / ("made" if kind == "folder" else "made.safetensors")
    words = [
        "quantize",
        source,
        target,
        "--scheme",
        "int4",
        *(["--max-shard-size", "500kB"] if kind == "folder" else []),
    ]
    code, error, whole = launch(words)
    assert code == 0, error
    expected = read(target)
    moments = random.Random(0)
    finished = 0
    for i in range(20):
        remove(target)
        code, _, _ = launch(words, after=(signal.SIGKILL, whole * (i + moments.random()) / 20))
        assert code in (0, -signal.SIGKILL)
        finished += code == 0
        if target.exists():
            assert read(target) == expected  # which is right, see below
        else:
            assert main(["verify", str(target)]) == 1
    assert finished < 15, "the moments are not spread over the run"
    remove(target)
    assert launch(words)[0] == 0  # what the killed ones left is in nobody's way
    assert is_right(target, source)
    left = {path.name for path in tmp_path.iterdir()} - {target.name}
    assert all(name.startswith(f".{target.name}.") and name.endswith(".tmp") for name in left)


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
def test_ctrl_c_leaves_nothing(tmp_path, source, verb, kind):
    target = tmp_path / ("made" if kind == "folder" else "made.safetensors")
    words = [verb[0], source, target, *verb[1:]]
    code, error, whole = launch(words)
    assert code == 0, error
    expected = read(target)
    interrupted = 0
    for i in range(6):
        remove(target)
        code, error, _ = launch(words, after=(signal.SIGINT, whole * (i + 0.5) / 6))
        if code == 0:
            assert read(target) == expected
            continue
        interrupted += 1
        assert (code, error) == (130, "torchtether: interrupted\n")
        assert os.listdir(tmp_path) == []
    assert interrupted >= 3


# -- over an older checkpoint -----------------------------------------------------------------------------------------


def state(value):
    return {f"w{i}": torch.full((64,), float(value)) for i in range(4)}


@pytest.mark.parametrize("at", range(7))
def test_a_save_over_shards_that_is_torn_is_refused(tmp_path, monkeypatch, at):
    """Several files cannot be renamed at once. Between the first and the last the index says so, and no load mixes."""
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
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]
    try:
        with tt.open(tmp_path) as checkpoint:
            values = {float(checkpoint[name][0]) for name in checkpoint}
        assert values == ({1.0} if at == 0 else {2.0})
    except tt.CheckpointError as error:
        assert 0 < at < 6
        assert "the save that began here did not end" in str(error)
    tt.save(state(3), tmp_path, max_shard_size=256)
    with tt.open(tmp_path) as checkpoint:
        assert {float(checkpoint[name][0]) for name in checkpoint} == {3.0}


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
