"""Copies of the other files of a checkpoint, such as configs and tokenizers, to another folder, without weights."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CheckpointError
from .dcp import METADATA
from .names import SUFFIX, parse_hidden, stem_of
from .opening import SETTINGS, open_file
from .system import sync

_SHARDS = (".distcp",)
_WEIGHTS = (SUFFIX, ".index.json", ".bin", ".pt", ".pth", ".ckpt", *_SHARDS)
_VARIANT_INDEX = re.compile(r".+\.(safetensors|bin)\.index\.[^.]+\.json")  # as transformers and diffusers write it
_EXPORTS = (".onnx", ".onnx_data", ".h5", ".msgpack", ".tflite", ".ot", ".gguf", ".mlmodel")
_FOLDERS = re.compile(r"onnx|openvino|coreml|original|checkpoint-\d+", re.IGNORECASE)
"""Folders with the same weights in other formats, or from earlier in training."""

_STEMS = {"diffusion_pytorch_model", "adapter_model"}
"""The names of weights that diffusers and PEFT look for in a folder, where others look for ``model``."""

_HIDDEN = "hidden"


def stem_like(files: Iterable[str]) -> str:
    """Return the stem for the weights of a copy of the checkpoint in ``files``: their readers look for one name.

    >>> stem_like(["diffusion_pytorch_model.fp16.safetensors"]), stem_like(["pytorch_model.bin"])
    ('diffusion_pytorch_model', 'model')
    """
    stems = {(stem_of(file) or "").split(".")[0] for file in files}
    return stems.pop() if len(stems) == 1 and stems <= _STEMS else "model"


@dataclass
class CarriedOver:
    """Hold the files copied, and the reason for each one left out, by path below the source; folders end in ``/``."""

    files: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    """The ``files`` that hold weights: those of modules in subfolders, copied unchanged."""
    left_out: dict[str, str] = field(default_factory=dict)


def carry_over(source: Path, target: Path, read: frozenset[str] = frozenset()) -> CarriedOver:
    """Copy the files and folders in ``source`` other than its tensors to ``target``; return a report of the files.

    Some are left out because the tensors of ``target`` replace them: the files ``read``, the files that only describe
    their quantization, other weights beside them, and the same model for other programs or from earlier in training.
    Others are left out because they may not belong to the checkpoint: hidden files, files that are not regular, and
    links, unless to a file in ``source`` or to a blob of the Hub cache of which ``source`` is a snapshot, or in one.
    Subfolders of modules are copied with their weights.

    Raises CheckpointError for a file that cannot be read; OSError where ``target`` cannot be written.
    """
    root, done = Path(os.path.realpath(source)), CarriedOver()
    for path, place in _walk(root, done, read):
        copied = target / path
        copied.parent.mkdir(parents=True, exist_ok=True)
        try:
            given = os.fdopen(open_file(place), "rb")
        except OSError as error:
            raise CheckpointError(f"the file cannot be copied: {error.strerror}", name=str(root / path)) from None
        with given, open(copied, "xb") as made:
            shutil.copyfileobj(given, made)
            made.flush()
            sync(made.fileno())
        done.files.append(path)
        if _is_of_weights(path.lower()):
            done.weights.append(path)
    return done


def _walk(root: Path, done: CarriedOver, read: frozenset[str]) -> Iterator[tuple[str, Path]]:
    """Yield the path of each file to copy, relative to ``root``, and its resolved path; note the rest in ``done``."""
    folders = [""]
    while folders:
        folder = folders.pop()
        for entry in sorted(os.scandir(root / folder), key=lambda one: one.name):
            path, is_folder = folder + entry.name, entry.is_dir(follow_symlinks=False)
            if parse_hidden(entry.name):  # of a save under way, perhaps of this one, if its target is in the source
                continue
            if not folder and (entry.name in {*SETTINGS, METADATA, *read} or entry.name.endswith(_SHARDS)):
                continue
            place = Path(os.path.realpath(entry.path))
            if why := _reason(root, folder, entry, place):
                done.left_out[f"{path}/" if is_folder else path] = why
            elif is_folder:
                folders.append(f"{path}/")
            else:
                yield path, place


def _reason(root: Path, folder: str, entry: os.DirEntry[str], place: Path) -> str:
    """Return the reason to leave out ``entry`` of ``folder``; empty if there is none."""
    is_folder = entry.is_dir(follow_symlinks=False)
    why = why_left_out(f"{folder}{entry.name}{'/x' if is_folder else ''}")
    if entry.is_symlink() and why != _HIDDEN:
        snapshots = (one.parent for one in (root, *root.parents) if one.parent.name == "snapshots")
        is_blob = any(place.is_relative_to(one.parent / "blobs") for one in snapshots)
        is_inside = place.is_relative_to(root) and "/." not in f"/{place.relative_to(root).as_posix()}"
        if not (is_blob or is_inside) or place.is_dir():
            return "links to folders, or to files outside of the source"
    return why if why or is_folder or place.is_file() else "not regular files"


def why_left_out(path: str) -> str:
    """Return the reason in its name to leave out the file at ``path`` below a checkpoint; empty if there is none."""
    *folders, name = path.lower().split("/")
    if any(one.startswith(".") for one in (*folders, name)):
        return _HIDDEN
    if name.endswith(_EXPORTS) or any(_FOLDERS.fullmatch(one) for one in folders):
        return "the same weights in other formats"
    return "other weights in the same folder" if not folders and _is_of_weights(name) else ""


def _is_of_weights(name: str) -> bool:
    return name.endswith(_WEIGHTS) or _VARIANT_INDEX.fullmatch(name) is not None
