"""Advice to the operating system that Python's library cannot give; systems that do not take it do without."""

from __future__ import annotations

import ctypes
import mmap
import sys
from array import array
from collections.abc import Sequence
from typing import Any

HUGE_PAGE = 2 * 2**20


def ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Let the system back these bytes, from whole pages around them, with huge pages where it has none yet."""
    if _madvise is not None:
        page = mmap.PAGESIZE
        start, stop = address // page * page, -(-(address + nbytes) // page) * page
        _madvise(start, stop - start, mmap.MADV_HUGEPAGE)  # advice: what it returns changes nothing


def begin_writing_back(descriptor: int, at: int, nbytes: int) -> None:
    """Begin to bring these bytes of the file to the disk, so that a later ``fsync`` has less to wait for.

    Unlike ``posix_fadvise`` it leaves them in the page cache, for the next to read the file.
    """
    if _sync_file_range is not None:
        _sync_file_range(descriptor, at, nbytes, 2)  # SYNC_FILE_RANGE_WRITE; advice again


def read_at_once(descriptor: int, spans: Sequence[int], at: int, nbytes: int) -> bool:
    """Return whether the ``nbytes`` from ``at`` on have been read into ``spans``, an address and a length each.

    If not, for whatever reason, the memory holds anything, and ``os.preadv`` may be asked, which tells the reason. It
    needs an object for each span, and these take four times as long to make as the bytes of a small tensor to read.
    """
    if _preadv is None:
        return False
    vector = array("Q", spans)  # struct iovec
    return bool(_preadv(descriptor, vector.buffer_info()[0], len(vector) // 2, at) == nbytes)


def _find(name: str, *arguments: Any) -> Any:
    try:
        found = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
    found.argtypes, found.restype = arguments, ctypes.c_int
    return found


def _find_preadv() -> Any:
    if ctypes.sizeof(ctypes.c_void_p) != 8:  # elsewhere an offset in a file may have another size than we say
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
