"""Checkpoints of the Hugging Face Hub by name: huggingface_hub fetches them to its cache, from which they are read.

No fetched code is run: weights are fetched and read only as safetensors and GGUF files, and no link out of the cache
of the repository is followed.
"""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .companions import why_left_out
from .gguf_parts import first_parts, names_of_parts
from .index import GGUF_SUFFIX, PICKLED, parse_index, with_shards
from .names import INDEX_SUFFIX, SUFFIX
from .opening import BESIDE

_REPOSITORY = r"(?P<name>[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96})"
_NAME = re.compile(rf"{_REPOSITORY}(@(?P<revision>[^@\s]{{1,200}}))?", re.ASCII)
_REFERENCE = r"refs/pr/\d{1,9}|refs/convert/\w{1,99}|[^@\s/]{1,200}"  # other revisions with a slash: revision=
_URI = re.compile(rf"hf://{_REPOSITORY}(@(?P<revision>{_REFERENCE}))?(/(?P<inside>.{{0,1000}}))?", re.ASCII)
_FILES = (SUFFIX, GGUF_SUFFIX, ".json", *PICKLED)
_IN_REPOSITORIES = (SUFFIX, GGUF_SUFFIX, INDEX_SUFFIX)


def _may_be_at(path: Path | str) -> bool:
    """Return whether something is at ``path``, also a link to nothing, or the system refuses to say."""
    try:
        os.lstat(path)
    except OSError as error:
        return not isinstance(error, FileNotFoundError | NotADirectoryError)
    return True


def _parse(path: str) -> dict[str, str | None] | None:
    """Return name, revision and path inside of the repository that ``path`` means; ``None`` if it is a local path.

    Raises CheckpointError for text that begins with ``hf://`` and is no URI of a repository.
    """
    if path.startswith("hf://"):
        found = _URI.fullmatch(path)
        inside = (found["inside"] or "").split("/") if found else [".."]
        if found is None or {".", ".."} & {*inside} or "" in inside[:-1]:
            fix = "Give hf://org/name, hf://org/name/file or hf://org/name@revision/file."
            raise CheckpointError("it is no name of a repository or of a file in one", name=path, fix=fix)
        return found.groupdict()
    found = _NAME.fullmatch(path)
    if found is None or found["name"].endswith(_FILES) or _may_be_at(path):
        return None
    return {**found.groupdict(), "inside": None}


def local_path(path: Path | str, revision: str | None = None, *, is_whole: bool = False) -> Path:
    """Return ``path``, or, if nothing is there and it is text like ``org/name``, a folder with that repository's files.

    These are the files of the checkpoint; with ``is_whole`` also those that ``carry_over`` copies. ``revision`` is a
    branch, a tag or a commit, and may be part of the text: ``org/name@revision``. ``hf://org/name@revision/x.gguf`` is
    a file or a folder inside a repository. Files in the cache of huggingface_hub are not fetched again; offline
    (``HF_HUB_OFFLINE=1``) nothing is. Raises CheckpointError if there are none.
    """
    found = _parse(path) if isinstance(path, str) else None
    if found is None:
        if revision is not None:
            fix = "Leave it out, or give the name of a repository, such as 'org/name', as text."
            raise CheckpointError(f"{path} is a local path, and has no revision {revision!r}", name="revision", fix=fix)
        return Path(path)
    if revision is not None and found["revision"] not in (None, revision):
        raise CheckpointError(f"is {revision!r}, but the path has {found['revision']!r}", name="revision")
    revision, name = revision or found["revision"], str(found["name"])
    try:
        import huggingface_hub as hub
        import huggingface_hub.constants
    except ImportError:
        what = "there is no such file or folder, and huggingface_hub, which could fetch it, is not installed"
        fix = "Correct the path, or run pip install huggingface_hub."
        raise CheckpointError(what, name=str(path), fix=fix) from None
    options: dict[str, Any] = {} if sys.stderr and sys.stderr.isatty() else {"tqdm_class": _silent_bar()}

    def fetch(revision: str | None, patterns: Sequence[str], ignored: str | None = None) -> Path:
        try:
            made = hub.snapshot_download(
                name, revision=revision, allow_patterns=list(patterns), ignore_patterns=ignored, **options
            )
        except Exception as error:  # of huggingface_hub, or of the HTTP library that its version uses
            raise _explained(hub, error, str(path)) from None
        return Path(made)

    return _fetched(hub, name, revision, (found["inside"] or "").rstrip("/"), fetch, is_whole)


def _silent_bar() -> type:
    """Return the class of a progress bar that is not drawn, for output that is not a terminal."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Silent(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{key: options[key] for key in options if key != "name"} | {"disable": True})

    return Silent


def _fetched(
    hub: Any, name: str, revision: str | None, inside: str, fetch: Callable[..., Path], is_whole: bool
) -> Path:
    """Fetch the wanted files, and return the path of ``inside`` in the snapshot; of "" that is its folder."""
    before, _, file = inside.rpartition("/") if inside.endswith(_IN_REPOSITORIES) else (inside, "", "")
    place = f"{before}/" if before else ""
    within = glob.escape(place)
    folder = fetch(revision, [within + one for one in (f"*{INDEX_SUFFIX}", *BESIDE)], f"{within}*/*")
    commit = folder.name  # all further calls use the commit, because the branch may move meanwhile
    where, fix = "repository", "Correct the path."
    try:
        names = list(hub.HfApi().list_repo_files(name, revision=commit))
    except Exception:  # offline: list the files in the cache
        where, fix = "cache", "Correct the path, or fetch it once while online."
        names = [one.relative_to(folder).as_posix() for one in folder.rglob("*") if not one.is_dir()]
    names = [one.removeprefix(place) for one in names if one.startswith(place)]
    if revision is not None:  # advice without it would lead to the files of another one
        name += f"@{commit if '/' in revision else revision}"
    there, uri = {*names}, f"hf://{name}/{inside}".rstrip("/")
    if file and file not in there:
        raise CheckpointError(f"the {where} has no such file", name=uri, fix=fix)
    if file:
        wanted = _files_with(folder / before, file)
        is_whole &= file.endswith(INDEX_SUFFIX)
    else:
        here = [one for one in names if "/" not in one]
        wanted = wanted_weights(f"{name}/{before}".rstrip("/"), folder / before, here)
    absent = next((one for one in wanted if one.endswith(GGUF_SUFFIX) and one not in there), None)
    if absent is not None:  # huggingface_hub would compare each file with the names of all parts
        raise CheckpointError(f"the {where} lacks the part {absent}", name=uri, fix="Fetch every part.")
    wanted += [one for one in names if one in BESIDE or (is_whole and not why_left_out(one))]
    folder = fetch(commit, [within + glob.escape(one) for one in dict.fromkeys(wanted)])
    home = Path(os.path.realpath(folder.parents[1]))
    for one in wanted:
        if not Path(os.path.realpath(folder / before / one)).is_relative_to(home):
            raise CheckpointError(f"{one} links to a file outside of the cache", name=str(folder), fix="Remove it.")
    return folder / inside


def _files_with(folder: Path, file: str) -> list[str]:
    """Return ``file`` and those that belong to it: the shards of an index, the parts of a GGUF file."""
    if file.endswith(INDEX_SUFFIX):
        return [file, *(shard.name for shard in parse_index(folder / file).files)]
    return names_of_parts(file)


def wanted_weights(name: str, folder: Path, names: Iterable[str]) -> list[str]:
    """Return the files of the checkpoint among ``names``, chosen as ``Store`` chooses in a folder."""
    files = sorted(one for one in names if one.endswith((SUFFIX, GGUF_SUFFIX, INDEX_SUFFIX)))
    indexes = [one for one in files if one.endswith(INDEX_SUFFIX)]
    tensors = [one for one in files if one.endswith(SUFFIX)]
    is_single = f"model{SUFFIX}" in tensors
    if len(indexes) > 1 or (indexes and is_single):
        indexes = [path.name for path in with_shards(map(folder.joinpath, indexes), lambda file: file.name in tensors)]
    if len(indexes) > 1 or (indexes and is_single):
        copies = ", ".join([*indexes, *([f"model{SUFFIX}"] if is_single else [])])
        fix = f"Give one: hf://{name}/{copies.partition(',')[0]}."
        raise CheckpointError(f"the repository holds several checkpoints: {copies}", name=name, fix=fix)
    if indexes:
        return [*indexes, *(file.name for file in parse_index(folder / indexes[0]).files)]
    if is_single:
        return [f"model{SUFFIX}"]
    if tensors:
        return tensors
    wholes = first_parts(files)
    if len(wholes) > 1:
        what = f"the repository holds several GGUF files: {', '.join(wholes)}"
        raise CheckpointError(what, name=name, fix=f"Give one: hf://{name}/{wholes[0]}.")
    if not wholes:
        fix = "Other files may hold code, and are not fetched. Download them, and give their path."
        where = "at its top level" if name.count("/") == 1 else "there"
        raise CheckpointError(f"the repository has no safetensors or GGUF file {where}", name=name, fix=fix)
    return names_of_parts(wholes[0])


def _explained(hub: Any, error: Exception, path: str) -> CheckpointError:
    """Return ``error`` as a CheckpointError of one line."""
    kinds = {one.__name__ for one in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return CheckpointError("the repository is gated", name=path, fix="Ask for access on its page, and log in.")
    if "RevisionNotFoundError" in kinds:
        return CheckpointError("the repository has no such revision", name=path, fix="Correct revision=.")
    if kinds & {"RepositoryNotFoundError", "HFValidationError"}:
        what = "there is no such file or folder, and no such repository on the Hub that you may read"
        return CheckpointError(what, name=path, fix="Correct the path, or log in: hf auth login.")
    if "LocalEntryNotFoundError" in kinds:
        why = "HF_HUB_OFFLINE is set" if hub.constants.HF_HUB_OFFLINE else "the Hub cannot be reached"
        what = (
            f"there is no such file or folder, {why}, and the cache in {hub.constants.HF_HUB_CACHE} lacks files of it"
        )
        return CheckpointError(what, name=path, fix="Correct the path, or fetch it once while online.")
    text = " ".join(str(error).split()) or type(error).__name__
    return CheckpointError(f"it cannot be fetched: {text[:300]}", name=path, fix="Try again, or give a local path.")
