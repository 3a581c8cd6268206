"""Untrusted files, opened for reading: regular files only, and at most an expected number of bytes.

Also the JSON files beside the tensors, in which published formats keep their settings.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from ..errors import CheckpointError

_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFDIR: "a folder"}


class Closing:
    """Close an object of a subclass, which defines ``close``, at the end of a ``with`` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


def open_file(path: Path | str) -> int:
    """Open ``path`` and return its descriptor; raises OSError, or CheckpointError unless it is a regular file.

    The check is on the open descriptor, not the name, so that the file cannot be exchanged between check and open.
    Opening a FIFO does not wait for a writer.
    """
    descriptor = os.open(path, _FLAGS)
    try:
        check_regular(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def found_at(path: Path) -> os.stat_result | None:
    """Return what the system says about ``path``, ``None`` if nothing is there.

    Raises OSError if the system refuses to say, as of a folder that may not be entered, or of a name that is too long.
    ``Path.exists``, ``is_file`` and ``is_dir`` hide that from Python 3.14 on.
    """
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def check_regular(path: Path | str, found: os.stat_result) -> None:
    """Raise CheckpointError unless ``found``, what the system says about ``path``, is a regular file's."""
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        raise CheckpointError(f"it is {_KINDS.get(kind, 'a special file')}, not a regular file", name=str(path))


def read_file(path: Path | str, limit: int) -> bytes:
    """Return the bytes of ``path``; raises as ``open_file``, and CheckpointError for more than ``limit`` bytes."""
    made = bytearray()
    descriptor = open_file(path)
    try:
        while piece := os.read(descriptor, min(2**20, limit + 1 - len(made))):
            made += piece
            if len(made) > limit:  # the size by ``stat`` may be wrong
                raise CheckpointError(f"it has more than {limit} bytes", name=str(path))
    finally:
        os.close(descriptor)
    return bytes(made)


SINQ_SETTINGS = "model.safetensors.index.json.meta.json"

SETTINGS = (
    *("quantize_config.json", "quant_config.json", "hf_quant_config.json", "quanto_qmap.json"),
    SINQ_SETTINGS,
)
"""The names of JSON files that announce a format, and hold nothing else."""

BESIDE = ("config.json", *SETTINGS)
"""The names of JSON files that may announce a format."""

_LIMIT = 64 * 2**20  # bytes


def read_beside(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Return the JSON objects of the files ``BESIDE`` that exist in ``folder``, by file name.

    Raises CheckpointError for a file that cannot be read or is not JSON.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for name in BESIDE:
        path = folder / name
        try:
            content = json.loads(read_file(path, _LIMIT))
        except (FileNotFoundError, NotADirectoryError):  # a save may make the folder later
            continue
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror or error}", name=str(path)) from None
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"cannot be read: {error}", name=str(path)) from None
        if isinstance(content, dict):
            found[name] = content
    return found
