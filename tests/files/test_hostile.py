"""Folders whose names are not regular files (pipes, devices, links) are refused at once, on one line."""

import json
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchtether as tt
from torchtether.errors import CheckpointError
from torchtether.files.opening import BESIDE, open_file, read_file

resource = pytest.importorskip("resource")
pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")

STATE = {f"w{i}": torch.full((64,), float(i)) for i in range(3)}


def fifo(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def device(path):
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def refused(path, what="not a regular file"):
    with pytest.raises(CheckpointError, match=what) as error:
        tt.open(path).close()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("make", [fifo, device])
@pytest.mark.parametrize("name", ["model.safetensors", "x.pt", "x.bin", "x.ckpt", "x.gguf", "x", "x.safetensors"])
def test_a_file_that_is_none(tmp_path, make, name):
    make(tmp_path / name)
    refused(tmp_path / name)
    refused(tmp_path, "not a regular file|holds no safetensors file")


@pytest.mark.parametrize("make", [fifo, device])
@pytest.mark.parametrize(
    "name",
    ["model.safetensors.index.json", "pytorch_model.bin.index.json", "model-00002-of-00003.safetensors", *BESIDE],
)
def test_a_file_of_several_that_is_none(tmp_path, make, name):
    tt.save(STATE, tmp_path, max_shard_size=256)
    if name.startswith("pytorch_model"):
        for path in tmp_path.iterdir():
            path.unlink()
    make(tmp_path / name)
    refused(tmp_path, "not a regular file|does not exist|holds no safetensors file")
    refused(tmp_path / name if name.endswith("index.json") else tmp_path, "not a regular file|does not exist")


def test_more_shards_than_a_process_may_open_are_refused_with_advice(tmp_path):
    state = {f"w{i}": torch.ones(64) for i in range(20)}
    tt.save(state, tmp_path, max_shard_size=256)
    with open(tmp_path / "model.safetensors.index.json", "rb") as file:
        last = file.fileno()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 10, hard))
    try:
        refused(tmp_path, "Too many open files. Raise the limit of this process")
        with pytest.raises(
            tt.CheckpointError, match=r"model-000\d+-of.*: Too many open files\. Raise the limit of this process"
        ):
            tt.save(state, tmp_path, max_shard_size=256)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    tt.open(tmp_path).close()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("make", [fifo, device])
def test_files_of_dcp_that_are_none(tmp_path, make):
    dcp.save(STATE, checkpoint_id=tmp_path, no_dist=True)
    for path in tmp_path.glob("*.distcp"):
        make(path)
    refused(tmp_path)
    make(tmp_path / ".metadata")
    refused(tmp_path, "not a regular file|holds no safetensors file")
    refused(tmp_path / ".metadata")


def test_no_more_is_read_than_was_allowed_whatever_the_size_says(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    with pytest.raises(CheckpointError, match="x: it has more than 4 bytes"):
        read_file(path, 4)
    if os.path.exists("/proc/self/maps"):
        assert os.stat("/proc/self/maps").st_size == 0
        with pytest.raises(CheckpointError, match="it has more than 10 bytes"):
            read_file("/proc/self/maps", 10)
    with pytest.raises(CheckpointError, match="it is a folder, not a regular file"):
        open_file(tmp_path)


def test_half_a_character_in_a_config_is_kept_as_it_is_spelled(tmp_path):
    """JSON can spell it, UTF-8 cannot."""
    (tmp_path / "config.json").write_text(r'{"name": "\ud800", "quantization_config": {"quant_method": "gptq"}}')
    tt.save(STATE, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {"name": "\ud800"}
    weight = tt.Weight.encode(torch.randn(64, 64), tt.int8())
    tt.save({"l.weight": weight}, tmp_path, format="compressed-tensors")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("name") == "\ud800"
    assert list(config) == ["quantization_config"]
