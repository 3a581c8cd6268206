"""Folders of checkpoints: made when needed, and cleared of the shards that a new save has replaced."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Set as AbstractSet
from pathlib import Path

from ..errors import CheckpointError
from .index import INDEX_SUFFIX, SUFFIX


def folder_for(path: Path) -> None:
    """``path`` is a folder, new if need be; raises CheckpointError if it cannot be one."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot be made a folder: {error.strerror}", name=str(path)) from None


def remove_stale(folder: Path, stem: str, *, keep: AbstractSet[str]) -> None:
    """What an earlier save of ``stem`` left in ``folder`` and the last one did not write is gone.

    Only names that a save makes are touched: the file, its index, and numbered shards. Two checkpoints under one stem
    would leave readers to guess.
    """
    ours = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?{re.escape(SUFFIX)}|{re.escape(stem + INDEX_SUFFIX)}")
    for file in folder.iterdir():
        if ours.fullmatch(file.name) and file.name not in keep:
            with contextlib.suppress(FileNotFoundError):
                file.unlink()
