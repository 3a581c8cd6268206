"""Files that come from strangers, opened to be read: regular ones only, and no more bytes than are expected.

So are read whole the JSON files beside the tensors, in which published formats keep what the tensors do not say.
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
    """Give its subclass, which has ``close``, to ``with``, and close it at the end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


def open_file(path: Path | str) -> int:
    """Open ``path`` and return its descriptor; raises OSError, or CheckpointError unless it is a regular file.

    What was opened is asked, not the name, so that nobody can exchange it between; and nothing waits for a writer.
    """
    descriptor = os.open(path, _FLAGS)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise CheckpointError(f"it is {_KINDS.get(kind, 'something else')}, not a file to read", name=str(path))
    return descriptor


def read_file(path: Path | str, limit: int) -> bytes:
    """Return what ``path`` holds; raises as ``open_file``, and CheckpointError if that is more than ``limit`` bytes."""
    made = bytearray()
    descriptor = open_file(path)
    try:
        while piece := os.read(descriptor, min(2**20, limit + 1 - len(made))):
            made += piece
            if len(made) > limit:  # whatever its size was said to be
                raise CheckpointError(f"it has more than {limit} bytes", name=str(path))
    finally:
        os.close(descriptor)
    return bytes(made)


SINQ_SETTINGS = "model.safetensors.index.json.meta.json"

BESIDE = (
    *("config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json", "quanto_qmap.json"),
    SINQ_SETTINGS,
)
"""Their names; all but the first speak of nothing else."""

_LIMIT = 64 * 2**20  # bytes


def read_beside(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Return the objects in those of ``BESIDE`` that are in ``folder``, by file name.

    Raises CheckpointError for one that cannot be read or is no JSON.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for name in BESIDE:
        path = folder / name
        try:
            content = json.loads(read_file(path, _LIMIT))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"cannot be read: {error}", name=str(path)) from None
        if isinstance(content, dict):
            found[name] = content
    return found
