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

_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96})(@(?P<revision>[^@\s]{1,200}))?", re.ASCII)
_FETCH_ONE = "Fetch one with huggingface_hub.hf_hub_download, and give its path."
_FILES = (SUFFIX, GGUF_SUFFIX, ".json", *PICKLED)


def _may_be_at(path: Path | str) -> bool:
    """Return whether something is at ``path``, also a link to nothing, or the system refuses to say."""
    try:
        os.lstat(path)
    except OSError as error:
        return not isinstance(error, FileNotFoundError | NotADirectoryError)
    return True


def local_path(path: Path | str, revision: str | None = None, *, is_whole: bool = False) -> Path:
    """Return ``path``, or, if nothing is there and it is text like ``org/name``, a folder with that repository's files.

    These are the files of the checkpoint; with ``is_whole`` also those that ``carry_over`` copies. ``revision`` is a
    branch, a tag or a commit, and may be part of the text: ``org/name@revision``. Files in the cache of huggingface_hub
    are not fetched again; offline (``HF_HUB_OFFLINE=1``) nothing is. Raises CheckpointError if there are none.
    """
    found = _NAME.fullmatch(path) if isinstance(path, str) else None
    if found is None or found["name"].endswith(_FILES) or _may_be_at(path):
        if revision is not None:
            fix = "Leave it out, or give the name of a repository, such as 'org/name', as text."
            raise CheckpointError(f"{path} is a local path, and has no revision {revision!r}", name="revision", fix=fix)
        return Path(path)
    if revision is not None and found["revision"] not in (None, revision):
        raise CheckpointError(f"is {revision!r}, but the path has {found['revision']!r}", name="revision")
    revision = revision or found["revision"]
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
                found["name"], revision=revision, allow_patterns=list(patterns), ignore_patterns=ignored, **options
            )
        except Exception as error:  # of huggingface_hub, or of the HTTP library that its version uses
            raise _explained(hub, error, str(path)) from None
        return Path(made)

    return _fetched(hub, found["name"], revision, fetch, is_whole)


def _silent_bar() -> type:
    """Return the class of a progress bar that is not drawn, for output that is not a terminal."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Silent(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{key: options[key] for key in options if key != "name"} | {"disable": True})

    return Silent


def _fetched(hub: Any, name: str, revision: str | None, fetch: Callable[..., Path], is_whole: bool) -> Path:
    """Fetch the wanted files, and return the folder of the snapshot."""
    folder = fetch(revision, [f"*{INDEX_SUFFIX}", *BESIDE], "*/*")
    commit = folder.name  # all further calls use the commit, because the branch may move meanwhile
    try:
        names = list(hub.HfApi().list_repo_files(name, revision=commit))
    except Exception:  # offline: list the files in the cache
        names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if not file.is_dir()]
    wanted = wanted_weights(name, folder, [one for one in names if "/" not in one])
    wanted += [one for one in names if one in BESIDE or (is_whole and not why_left_out(one))]
    folder = fetch(commit, [glob.escape(one) for one in dict.fromkeys(wanted)])
    home = Path(os.path.realpath(folder.parents[1]))
    for one in wanted:
        if not Path(os.path.realpath(folder / one)).is_relative_to(home):
            raise CheckpointError(f"{one} links to a file outside of the cache", name=str(folder), fix="Remove it.")
    return folder


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
        raise CheckpointError(f"the repository holds several checkpoints: {copies}", name=name, fix=_FETCH_ONE)
    if indexes:
        return [*indexes, *(file.name for file in parse_index(folder / indexes[0]).files)]
    if is_single:
        return [f"model{SUFFIX}"]
    if tensors:
        return tensors
    wholes = first_parts(files)
    if len(wholes) > 1:
        what = f"the repository holds several GGUF files: {', '.join(wholes)}"
        raise CheckpointError(what, name=name, fix=_FETCH_ONE)
    if not wholes:
        fix = "Other files may hold code, and are not fetched. Download them, and give their path."
        raise CheckpointError("the repository has no safetensors or GGUF file at its top level", name=name, fix=fix)
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
