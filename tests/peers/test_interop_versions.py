"""safetensors 0.3.0 to 0.8.0 read our files: each version in a process of its own, installed beside the current one.

The processes are forks of one that has imported torch, because the import takes longer than all the rest.
"""

import json
import subprocess
import sys

import pytest
import torch

import torchtether as tt
from tests.loading.models import Tied, build

pytestmark = [pytest.mark.peers, pytest.mark.slow]

VERSIONS = ["0.3.0", "0.3.1", "0.4.0", "0.4.5", "0.5.3", "0.6.2", "0.7.0", "0.8.0"]

READ = """
import json, os, sys, torch

def read(folder, paths):
    sys.path.insert(0, folder)
    import safetensors
    found = {"version": safetensors.__version__, "values": {}, "metadata": {}}
    for path in paths:
        with safetensors.safe_open(path, "pt") as file:
            found["metadata"][path], values = file.metadata(), {}
            for name in file.keys():
                tensor = file.get_tensor(name)
                whole = tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
                values[name] = [str(tensor.dtype), list(tensor.shape), whole]
            found["values"][path] = values
    return json.dumps(found)

assert "safetensors" not in sys.modules
folders, paths = json.loads(sys.argv[1])
for folder in folders:
    if not (child := os.fork()):
        print(read(folder, paths), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, folder
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder per version with safetensors and nothing else, or why it cannot be installed."""
    found = {}
    for version in VERSIONS:
        folder = tmp_path_factory.mktemp("safetensors")
        options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--target", folder]
        command = [sys.executable, "-m", "pip", "install", *options, f"safetensors=={version}"]
        done = subprocess.run(command, capture_output=True, text=True)
        found[version] = str(folder) if not done.returncode else done.stderr.strip().splitlines()[-1:]
    return found


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Our files, and what is in them: a tied model, in one file, in shards and with copies, and the oldest dtypes."""
    folder = tmp_path_factory.mktemp("ours")
    model = build(Tied)
    tt.save(model, folder / "model.safetensors")
    tt.save(model, folder / "copy.safetensors", aliases="copy")
    tt.save(model, folder / "shards", max_shard_size=300)
    dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]
    odd = {str(dtype): torch.arange(3).to(dtype) for dtype in dtypes} | {"empty": torch.empty(0, 2)}
    odd["turned"] = torch.arange(6.0).view(2, 3).t()
    tt.save(odd, folder / "odd.safetensors")
    return folder, model.state_dict(), odd


def said(tensor):
    return [str(tensor.dtype), list(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist()]


@pytest.fixture(scope="module")
def readings(installed, ours):
    """What each version found in our files."""
    paths = sorted(str(path) for path in ours[0].rglob("*.safetensors"))
    folders = [folder for folder in installed.values() if isinstance(folder, str)]
    command = [sys.executable, "-W", "ignore", "-c", READ, json.dumps([folders, paths])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return {found["version"]: found for found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("version", VERSIONS)
def test_old_and_new_safetensors_read_ours(installed, readings, ours, version):
    if not isinstance(installed[version], str):
        pytest.skip(f"safetensors {version} cannot be installed: {installed[version]}")
    folder, state, odd = ours
    found = readings[version]
    everything = {name: said(tensor) for name, tensor in state.items()}
    owners = {name: value for name, value in everything.items() if name != "head.weight"}
    values = found["values"]
    assert values[str(folder / "copy.safetensors")] == everything
    assert values[str(folder / "model.safetensors")] == owners
    assert values[str(folder / "odd.safetensors")] == {name: said(tensor) for name, tensor in odd.items()}
    shards = [values[path] for path in values if "shards" in path]
    assert len(shards) > 1
    assert {name: value for shard in shards for name, value in shard.items()} == owners
    assert all(metadata["format"] == "pt" for metadata in found["metadata"].values())
    assert found["metadata"][str(folder / "model.safetensors")]["head.weight"] == "emb.weight"
