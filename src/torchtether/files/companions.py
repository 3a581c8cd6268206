"""What stands beside the tensors of a checkpoint, carried over to another folder: all of it, but for other weights."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CheckpointError
from .dcp import METADATA
from .names import SUFFIX
from .opening import BESIDE, open_file

_SHARDS = (".distcp",)
_WEIGHTS = (SUFFIX, ".index.json", ".bin", ".pt", ".pth", ".ckpt", *_SHARDS)
_EXPORTS = (".onnx", ".onnx_data", ".h5", ".msgpack", ".tflite", ".ot", ".gguf", ".mlmodel")
_FOLDERS = re.compile(r"onnx|openvino|coreml|original|checkpoint-\d+", re.IGNORECASE)
"""Folders in which the weights of the source are there again, for other programs or from earlier in training."""

_HIDDEN = "hidden"


@dataclass
class CarriedOver:
    """Hold what was copied, and what was left out and why, by path below the source; folders end in ``/``."""

    files: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    """Those of ``files`` that hold weights: of modules in folders of their own, copied as they are."""
    left_out: dict[str, str] = field(default_factory=dict)


def carry_over(source: Path, target: Path, read: frozenset[str] = frozenset()) -> CarriedOver:
    """Copy what stands in ``source`` beside its tensors to ``target``, byte for byte, folders in it too; return what.

    Left out, because the tensors of ``target`` replace them: the files ``read``, what only says how these are
    quantized, other weights beside them, and the same model for other programs or from earlier in training. Left out,
    because they may be anybody's: what is hidden, what is no regular file, and links, unless to a file in ``source``
    or to a blob of the cache of which ``source`` is a snapshot. Files in folders of modules are copied with weights.

    Raises CheckpointError for a file that cannot be read; OSError where ``target`` cannot be written.
    """
    root, done = Path(os.path.realpath(source)), CarriedOver()
    for path, place in _walk(root, done, read):
        copied = target / path
        copied.parent.mkdir(parents=True, exist_ok=True)
        try:
            given = os.fdopen(open_file(place), "rb")
        except OSError as error:
            raise CheckpointError(f"cannot be copied: {error.strerror}", name=str(root / path)) from None
        with given, open(copied, "xb") as made:
            shutil.copyfileobj(given, made)
        done.files.append(path)
        if path.lower().endswith(_WEIGHTS):
            done.weights.append(path)
    return done


def _walk(root: Path, done: CarriedOver, read: frozenset[str]) -> Iterator[tuple[str, Path]]:
    """Yield each file to copy, by its path below ``root``, with the place of its bytes; note the rest in ``done``."""
    folders = [""]
    while folders:
        folder = folders.pop()
        for entry in sorted(os.scandir(root / folder), key=lambda one: one.name):
            path, is_folder = folder + entry.name, entry.is_dir(follow_symlinks=False)
            if not folder and (entry.name in {*BESIDE[1:], METADATA, *read} or entry.name.endswith(_SHARDS)):
                continue
            place = Path(os.path.realpath(entry.path))
            if why := _reason(root, folder, entry, place):
                done.left_out[f"{path}/" if is_folder else path] = why
            elif is_folder:
                folders.append(f"{path}/")
            else:
                yield path, place


def _reason(root: Path, folder: str, entry: os.DirEntry[str], place: Path) -> str:
    """Return why ``entry`` of ``folder`` is left out; empty if it is not."""
    is_folder = entry.is_dir(follow_symlinks=False)
    why = why_left_out(f"{folder}{entry.name}{'/x' if is_folder else ''}")
    if entry.is_symlink() and why != _HIDDEN:
        is_blob = root.parent.name == "snapshots" and place.is_relative_to(root.parents[1] / "blobs")
        is_inside = place.is_relative_to(root) and "/." not in f"/{place.relative_to(root).as_posix()}"
        if not (is_blob or is_inside) or place.is_dir():
            return "links to folders, or out of the source"
    return why if why or is_folder or place.is_file() else "no regular files"


def why_left_out(path: str) -> str:
    """Return why the file at ``path`` below a checkpoint is not carried over, as far as its name tells; or nothing."""
    *folders, name = path.lower().split("/")
    if any(one.startswith(".") for one in (*folders, name)):
        return _HIDDEN
    if name.endswith(_EXPORTS) or any(_FOLDERS.fullmatch(one) for one in folders):
        return "the same weights in other forms"
    return "other weights beside the tensors" if not folders and name.endswith(_WEIGHTS) else ""
