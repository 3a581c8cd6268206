"""Opening files that come from strangers to read them: regular files only, and no more bytes than are expected."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ..errors import CheckpointError

_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFDIR: "a folder"}


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
