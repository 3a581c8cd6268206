"""Names of the Hub: a local path takes precedence, and without huggingface_hub one line says what to do."""

import re
import sys
from pathlib import Path, PurePosixPath

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchtether as tt
from torchtether.cli.main import main
from torchtether.files import hub, local_path


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)


def test_a_local_path_of_the_name_wins():
    tt.save({"w": torch.ones(2)}, "org/name")
    assert local_path("org/name") == Path("org/name")
    with tt.open("org/name") as checkpoint:
        assert checkpoint["w"].tolist() == [1, 1]
    with pytest.raises(tt.CheckpointError, match="org/name is a local path, and has no revision 'main'"):
        tt.open("org/name", revision="main")


@pytest.mark.parametrize("path", [Path("org/name"), "org", "./org/name", "a/b/c", "org/name.safetensors", "org/x.json"])
def test_what_can_only_be_a_path_is_one(path):
    assert local_path(path) == Path(path)
    with pytest.raises(tt.CheckpointError, match="there is no such file or folder$"):
        tt.open(path)


def test_without_the_library_one_line_says_so(capsys):
    words = "org/name: there is no such file or folder, and huggingface_hub, which could fetch it, is not installed. "
    words += "Correct the path, or run pip install huggingface_hub."
    for call in (tt.open, tt.storage_map, lambda path: tt.load(torch.nn.Linear(2, 2), path)):
        with pytest.raises(tt.CheckpointError) as caught:
            call("org/name")
        assert str(caught.value) == words
    for command in (["inspect"], ["ties"], ["map"], ["verify"]):
        assert main([*command, "org/name"]) == 1
        assert capsys.readouterr().err == f"torchtether: {words}\n"
    for command in (["quantize", "--scheme", "int8"], ["convert"]):
        assert main([*command, "org/name", "made"]) == 1
        assert capsys.readouterr().err == f"torchtether: {words}\n"
    assert not Path("made").exists()


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["model.safetensors", "consolidated.safetensors", "x.gguf", "pytorch_model.bin"], ["model.safetensors"]),
        (["b.safetensors", "a.safetensors", "x.gguf", "a.pt"], ["a.safetensors", "b.safetensors"]),
        (["x.gguf", "pytorch_model.bin"], ["x.gguf"]),
    ],
)
def test_of_several_copies_of_the_weights_one_is_wanted(names, wanted, tmp_path):
    """The one that is read in such a folder."""
    assert hub.wanted_weights("org/name", tmp_path, names) == wanted


@pytest.mark.parametrize("path", [
    "hf://", "hf://org", "hf:///name", "hf://org/name/../x.gguf", "hf://org/name//x.gguf", "hf://org/name/a/./x.gguf",
    "hf://o rg/name", "hf://org/name@/x.gguf",
])  # fmt: skip
def test_what_is_no_uri_of_a_repository_is_refused(path):
    with pytest.raises(tt.CheckpointError, match="no name of a repository or of a file in one"):
        tt.open(path)


def test_a_uri_is_never_a_local_path():
    Path("hf:/org/name").mkdir(parents=True)
    with pytest.raises(tt.CheckpointError, match="huggingface_hub, which could fetch it, is not installed"):
        local_path("hf://org/name")


@pytest.mark.parametrize("path", ["hf://org/name", "hf://org/name/x.safetensors", "hf://org/name/x.gguf"])
def test_nothing_is_written_to_a_local_path_of_a_uri(path, capsys):
    with pytest.raises(
        tt.CheckpointError, match="^hf://org/name.*: it is a name of the Hub, to which nothing is written"
    ):
        tt.save({"w": torch.ones(2)}, path, format="gguf" if path.endswith("gguf") else "native")
    tt.save({"w": torch.ones(2)}, "made")
    assert main(["convert", "made", path]) == 1
    assert "it is a name of the Hub, to which nothing is written. Give a local path" in capsys.readouterr().err
    assert not Path("hf:").exists()


@given(st.text(alphabet="ab/.@:%\\ \n\u0661", max_size=30))
def test_text_after_the_scheme_never_leaves_its_repository(text):
    """It is refused, or means a repository of two names and a path below it."""
    try:
        found = hub._parse(f"hf://{text}")
    except tt.CheckpointError as error:
        assert "it is no name of a repository" in str(error)
        return
    assert re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", found["name"], re.ASCII)
    inside = PurePosixPath(found["inside"] or "")
    assert not inside.is_absolute()
    assert ".." not in inside.parts
    assert "/" not in (found["revision"] or "") or found["revision"].startswith("refs/")


@pytest.mark.parametrize(
    ("uri", "revision", "inside"),
    [
        ("hf://org/name@refs/pr/12/a/x.gguf", "refs/pr/12", "a/x.gguf"),
        ("hf://org/name@refs/convert/parquet", "refs/convert/parquet", None),
        ("hf://org/name@v1/refs/pr/1", "v1", "refs/pr/1"),
        ("hf://org/name@refs/heads/x", "refs", "heads/x"),
        ("hf://org/name/x@2.gguf", None, "x@2.gguf"),
    ],
)
def test_a_revision_ends_where_the_path_begins(uri, revision, inside):
    assert hub._parse(uri) == {"name": "org/name", "revision": revision, "inside": inside}
