"""Checkpoints by their names on the Hub: offline from huggingface_hub's cache, and downloaded from a local server."""

import functools
import hashlib
import http.server
import json
import os
import struct
import subprocess
import sys
import threading
from urllib.parse import unquote

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.formats.ggufs import gguf
from torchtether.cli.main import main

hub = pytest.importorskip("huggingface_hub")
pytest.importorskip("huggingface_hub.constants")
pytestmark = pytest.mark.peers

COMMIT, OLDER = "a" * 40, "b" * 40


def built(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def put(cache, commit, files, ref=None):
    """Write a snapshot as huggingface_hub does: blobs, links to them, and the commit of the branch."""
    home = cache / "models--org--name"
    (home / "blobs").mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        blob = home / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        link = home / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    if ref:
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / ref).write_text(commit)
    return home / "snapshots" / commit


def files_of(model, folder, **options):
    tt.save(model, folder, **options)
    others = {"config.json": b'{"a": 1}', "tokenizer.json": b"{}", "pytorch_model.bin": b"code"}
    others["1_Pooling/x.json"] = b"1"
    return {file.name: file.read_bytes() for file in folder.iterdir()} | others


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "cache", COMMIT, files_of(built(), tmp_path / "one", max_shard_size="17kB"), "main")
    put(tmp_path / "cache", OLDER, files_of(built(1), tmp_path / "two"), "v1")
    return tmp_path / "cache"


@pytest.mark.parametrize(("revision", "seed"), [(None, 0), ("main", 0), (COMMIT, 0), ("v1", 1), (OLDER, 1)])
def test_the_cache_is_read_offline(cache, revision, seed):
    model, wanted = built(2), built(seed).state_dict()
    tt.load(model, "org/name", revision=revision)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    assert not tt.plan_load(model, "org/name", revision=revision).faults
    spelled = "org/name" if revision is None else f"org/name@{revision}"
    with tt.open(spelled) as checkpoint:
        assert torch.equal(checkpoint["0.bias"], wanted["0.bias"])
    assert sorted(tt.storage_map(spelled).names) == sorted(wanted)


def test_the_command_line_takes_names(cache, tmp_path, capsys):
    assert main(["inspect", "org/name"]) == 0
    assert main(["quantize", "org/name", "made", "--scheme", "int8"]) == 0
    assert main(["verify", "made", "--against", "org/name@main"]) == 0
    assert main(["convert", "org/name@v1", "older.safetensors"]) == 0
    folder = tmp_path / "made"
    assert {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()} == {
        "config.json", "tokenizer.json", "model.safetensors", "1_Pooling/x.json",
    }  # fmt: skip
    assert "other weights in the same folder: pytorch_model.bin" in capsys.readouterr().out


def test_what_the_cache_has_not_is_one_line(cache, capsys):
    for name, words in {
        "org/other": f"HF_HUB_OFFLINE is set, and the cache in {cache} lacks files of it",
        "org/name@v2": f"HF_HUB_OFFLINE is set, and the cache in {cache} lacks files of it",
        "org/..": "no such repository on the Hub",
    }.items():
        assert main(["inspect", name]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"torchtether: {name}: there is no such file or folder, ")
        assert words in error
        assert error.count("\n") == 1
    next((cache / "models--org--name" / "snapshots" / COMMIT).glob("*-00002-of*")).unlink()
    with pytest.raises(tt.CheckpointError, match=r"model-00002-of-0000\d.safetensors, which does not exist"):
        tt.open("org/name")
    with pytest.raises(tt.CheckpointError, match="is 'v1', but the path has 'main'"):
        tt.open("org/name@main", revision="v1")


def test_no_pickle_and_no_link_out_of_the_cache_is_read(cache, tmp_path):
    put(cache, "c" * 40, {"pytorch_model.bin": b"code", "config.json": b"{}"}, "pickled")
    with pytest.raises(
        tt.CheckpointError, match="org/name@pickled: the repository has no safetensors or GGUF file at its top level"
    ):
        tt.open("org/name", revision="pickled")
    put(cache, "d" * 40, {"a.gguf": b"", "b.gguf": b""}, "several")
    with pytest.raises(
        tt.CheckpointError, match=r"several GGUF files: a.gguf, b.gguf. Give one: hf://org/name@several/a.gguf."
    ):
        tt.open("org/name", revision="several")
    folder = put(cache, "e" * 40, {"config.json": b"{}"}, "linked")
    (folder / "model.safetensors").symlink_to(tmp_path / "two" / "model.safetensors")
    with pytest.raises(tt.CheckpointError, match=r"model.safetensors links to a file outside of the cache"):
        tt.open("org/name", revision="linked")


@pytest.fixture
def many(cache, tmp_path):
    """A repository with several checkpoints at its top level and in folders."""
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "pytorch_model.bin": b"code"}
    for number, name in enumerate(["q4.gguf", "deep/er/q8.gguf"]):
        files[name] = gguf([("w", (2, 32), "F32", struct.pack("<64f", *[number] * 64))])
    for number in range(2):
        data = [(f"w{number}", (2,), "F32", struct.pack("<2f", number, 2))]
        files[f"big-{number + 1:05d}-of-00002.gguf"] = gguf(data, {"split.no": number, "split.count": 2})
    for place, value in {"unet": 1.0, "vae [x]": 2.0}.items():
        tt.save({"weight": torch.full((2, 32), value)}, tmp_path / place)
        files[f"{place}/model.safetensors"] = (tmp_path / place / "model.safetensors").read_bytes()
        files[f"{place}/config.json"] = json.dumps({"from": place}).encode()
    tt.save({"w": torch.full((2, 50), 3.0), "v": torch.zeros(2, 50)}, tmp_path / "shards", max_shard_size=500)
    files |= {f"shards/{file.name}": file.read_bytes() for file in (tmp_path / "shards").iterdir()}
    put(cache, "f" * 40, files, "many")
    return cache


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("hf://org/name@many/q4.gguf", "w", 0),
        ("hf://org/name@many/deep/er/q8.gguf", "w", 1),
        ("hf://org/name@many/big-00001-of-00002.gguf", "w1", 1),
        ("hf://org/name@many/big-00002-of-00002.gguf", "w0", 0),
        ("hf://org/name@many/unet", "weight", 1),
        ("hf://org/name@many/unet/", "weight", 1),
        ("hf://org/name@many/vae [x]", "weight", 2),
        ("hf://org/name@many/unet/model.safetensors", "weight", 1),
        ("hf://org/name@many/shards", "w", 3),
        ("hf://org/name@many/shards/model.safetensors.index.json", "w", 3),
        ("hf://org/name@main", "0.bias", None),
        ("hf://org/name", "0.bias", None),
    ],
)
def test_a_uri_names_a_file_or_a_folder_of_a_repository(many, path, name, value):
    with tt.open(path) as checkpoint:
        found = checkpoint[name].flatten()[0]
        assert found == (built().state_dict()[name][0] if value is None else value)
    assert main(["inspect", path]) == 0


@pytest.mark.parametrize("place", ["unet", "vae [x]", "unet/model.safetensors"])
def test_the_config_is_that_of_the_folder_of_the_file(many, place):
    with tt.open(f"hf://org/name@many/{place}") as checkpoint:
        assert checkpoint.store.beside()["config.json"] == {"from": place.partition("/")[0]}


def test_the_command_line_takes_uris(many, capsys):
    assert main(["convert", "hf://org/name@many/q4.gguf", "made.safetensors"]) == 0
    assert main(["quantize", "hf://org/name@many/unet", "made", "--rule", "*=int8"]) == 0
    assert sorted(os.listdir("made")) == ["config.json", "model.safetensors"]
    with tt.open("made.safetensors") as checkpoint:
        assert checkpoint["w"].shape == (2, 32)
    capsys.readouterr()
    for path, words in {
        "hf://org/name@many": "several GGUF files: big-00001-of-00002.gguf, q4.gguf. Give one: hf://org/name@many/big-0",
        "hf://org/name@many/absent.gguf": "hf://org/name@many/absent.gguf: the cache has no such file. Correct",
        "hf://org/name@many/absent": "org/name@many/absent: the repository has no safetensors or GGUF file there",
        "hf://org/name@many/pytorch_model.bin": "the repository has no safetensors or GGUF file there",
    }.items():
        assert main(["inspect", path]) == 1
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("path", ["org/name@parts", "hf://org/name@parts", "hf://org/name@parts/x-00001-of-99999.gguf"])
def test_files_are_not_compared_with_the_names_of_parts_that_are_not_there(cache, path, monkeypatch):
    put(cache, "9" * 40, {"x-00001-of-99999.gguf": b"GGUF", "config.json": b"{}"}, "parts")
    asked, download = [], hub.snapshot_download

    def counted(*arguments, **options):
        asked.append(len(options["allow_patterns"]))
        return download(*arguments, **options)

    monkeypatch.setattr(hub, "snapshot_download", counted)
    with pytest.raises(tt.CheckpointError, match=r"the cache lacks the part x-00002-of-99999.gguf. Fetch every part."):
        tt.open(path)
    assert max(asked) < 100


# -- a server ---------------------------------------------------------------------------------------------------------


class Hub(http.server.BaseHTTPRequestHandler):
    """So much of the Hub as huggingface_hub asks for one repository of a few files."""

    def __init__(self, files, asked, *arguments):
        self.files, self.asked = files, asked
        super().__init__(*arguments)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(self.path).partition("?")[0]
        if path.startswith("/api/models/org/name/tree/"):
            listed = [{"type": "file", "path": n, "size": len(c), "oid": _digest(c)} for n, c in self.files.items()]
            return self._answer(json.dumps(listed).encode())
        if path in ("/api/models/org/name", "/api/models/org/name/revision/main"):
            siblings = [{"rfilename": name} for name in self.files]
            return self._answer(json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode())
        name = path.removeprefix(f"/org/name/resolve/{COMMIT}/")
        if name not in self.files:
            self.send_error(404)
            return None
        self.asked.add(name)
        return self._answer(self.files[name], {"ETag": f'"{_digest(self.files[name])}"', "X-Repo-Commit": COMMIT})

    def _answer(self, content, headers=()):
        self.send_response(200)
        for key, value in {**dict(headers), "Content-Length": len(content), "Content-Type": "application/json"}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


def _digest(content):
    return hashlib.sha1(content).hexdigest()


def test_only_the_files_that_are_needed_are_fetched(tmp_path):
    files = files_of(built(), tmp_path / "one", max_shard_size="17kB")
    files |= {"consolidated.safetensors": b"twice", "onnx/model.onnx": b"again", ".gitattributes": b"x"}
    parts = {
        f"deep/q4-{i + 1:05d}-of-00002.gguf": gguf([(f"w{i}", (1,), "F32", b"1234")], {"split.no": i, "split.count": 2})
        for i in range(2)
    }
    files |= {**parts, "deep/q8.gguf": b"another", "deep/config.json": b"{}", "deep/tokenizer.json": b"{}"}
    weights = {name for name in files if name.startswith("model")}
    asked = set()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Hub, files, asked))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        **os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    environment.pop("HF_HUB_CACHE", None)

    def run(*arguments, **changes):
        code = "import sys; from torchtether_cli import main; sys.exit(main())"
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment | changes, cwd=tmp_path
        )

    try:
        done = run("inspect", "org/name")
        assert (done.returncode, done.stderr) == (0, "")
        assert asked == {*weights, "config.json"}
        asked.clear()
        done = run("inspect", "hf://org/name/deep/q4-00002-of-00002.gguf")
        assert (done.returncode, done.stderr) == (0, "")
        assert asked == {*parts, "deep/config.json"}
        asked.clear()
        done = run("convert", "org/name", "made")
        assert (done.returncode, done.stderr) == (0, "")
        assert asked >= {"tokenizer.json", "1_Pooling/x.json"}
        assert not asked & {"pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx", ".gitattributes"}
        done = run("inspect", "hf://org/name/absent.gguf")
        assert done.stderr == (
            "torchtether: hf://org/name/absent.gguf: the repository has no such file. Correct the path.\n"
        )
        done = run("inspect", "org/none")
        assert done.returncode == 1
        assert done.stderr.startswith("torchtether: org/none: there is no such file or folder, ")
        assert done.stderr.count("\n") == 1
    finally:
        server.shutdown()
        server.server_close()
    done = run("verify", "made", "--against", "org/name", HF_HUB_OFFLINE="1")
    assert (done.returncode, done.stderr) == (0, "")
    done = run("inspect", "org/none")
    assert done.stderr.count("\n") == 1
    assert "the Hub cannot be reached" in done.stderr
