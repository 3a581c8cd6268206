"""System calls that Python's library lacks, by ctypes, and calls that some systems lack.

On systems without them the functions do nothing, or read in another way.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

try:
    import fcntl as fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

HUGE_PAGE = 2 * 2**20

IS_WINDOWS = sys.platform == "win32"
"""Whether the system neither renames, replaces nor removes a file that is open or mapped, nor replaces a folder."""


def advice(error: OSError) -> str:
    """Return what to do about an error of the system; empty if its own text says enough."""
    return "Raise the limit of this process (ulimit -n)." if error.errno == errno.EMFILE else ""


def unwritable(path: Path | str, error: OSError, fix: str = "") -> CheckpointError:
    """Return the error of a save to ``path`` that the system refuses."""
    return CheckpointError(f"cannot be written: {error.strerror or error}", name=str(path), fix=fix or advice(error))


def ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Advise the system to back the pages of these bytes with huge pages, where they are not backed yet."""
    if _madvise is not None:
        page = mmap.PAGESIZE
        start, stop = address // page * page, -(-(address + nbytes) // page) * page
        _madvise(start, stop - start, mmap.MADV_HUGEPAGE)  # only advice: its result is ignored


def begin_writing_back(descriptor: int, at: int, nbytes: int) -> None:
    """Start to write these bytes of the file to the disk, so that a later ``fsync`` takes less time.

    Unlike ``posix_fadvise`` it leaves them in the page cache, for later readers of the file.
    """
    if _sync_file_range is not None:
        _sync_file_range(descriptor, at, nbytes, 2)  # SYNC_FILE_RANGE_WRITE; only advice, too


def sync(descriptor: int) -> None:
    """Write the file to the disk, and wait until it is there: on macOS ``os.fsync`` leaves it in the disk's cache."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        with contextlib.suppress(OSError):  # some file systems lack it
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Sync the directory ``folder`` to the disk, if the file system supports that."""
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            sync(descriptor)
        finally:
            os.close(descriptor)


def read_at_once(descriptor: int, spans: Sequence[int], at: int, nbytes: int) -> bool:
    """Read ``nbytes`` bytes from ``at`` on into ``spans``, pairs of address and length; return whether all were read.

    If not, for any reason, the contents of the memory are undefined, and the caller can use ``os.preadv``, which raises
    the error. ``os.preadv`` needs an object per span, which takes four times as long to make as a small tensor to read.
    """
    if _preadv is None:
        return False
    vector = array("Q", spans)  # struct iovec
    return bool(_preadv(descriptor, vector.buffer_info()[0], len(vector) // 2, at) == nbytes)


def read_into(descriptor: int, buffers: Sequence[memoryview], at: int) -> int:
    """Fill the buffers in order with bytes of the file from ``at`` on; return how many, as ``os.preadv`` does.

    Windows does not have it. There one buffer is filled, and threads take turns: they share the place in the file.
    """
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, buffers, at)
    with _TURNS:
        os.lseek(descriptor, at, os.SEEK_SET)
        read = os.read(descriptor, len(buffers[0]))
    buffers[0][: len(read)] = read
    return len(read)


_TURNS = threading.Lock()


def _find(name: str, *arguments: Any) -> Any:
    try:
        found = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
    found.argtypes, found.restype = arguments, ctypes.c_int
    return found


def _find_preadv() -> Any:
    if ctypes.sizeof(ctypes.c_void_p) != 8:  # elsewhere file offsets may have another size than the declared one
        return None
    found = _find("preadv", ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    if found is not None:
        found.restype = ctypes.c_ssize_t
    return found


_preadv = _find_preadv()
_madvise = _find("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int) if hasattr(mmap, "MADV_HUGEPAGE") else None
_sync_file_range = (
    _find("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    if sys.platform == "linux"
    else None
)
