"""Threads that torch's kernels use, and instructions of this processor that they support."""

from __future__ import annotations

import ctypes
import platform
from typing import Any

import torch


def one_core() -> None:
    """Make ops of the calling thread use one core from now on, if torch computes with OpenMP.

    ``torch.set_num_threads`` is process-wide. OpenMP keeps a number for each thread, which torch sets at first use.
    """
    torch.get_num_threads()
    if _set_openmp_threads is not None:
        _set_openmp_threads(1)


def _find_openmp() -> Any:
    try:
        found = ctypes.CDLL(None).omp_set_num_threads
    except (OSError, AttributeError, TypeError):
        return None
    found.argtypes, found.restype = (ctypes.c_int,), None
    return found


_set_openmp_threads = _find_openmp()


def has_fast_float16() -> bool:
    """Return whether oneDNN multiplies float16 by vector instructions here; False if this torch does not report it."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):
        return False


def has_arm_bfloat16() -> bool:
    """Return whether this is a 64-bit ARM processor on which oneDNN multiplies bfloat16 by vector instructions."""
    try:
        is_supported = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False
    return is_supported and platform.machine().lower() in ("aarch64", "arm64")


def has_tiles() -> bool:
    """Return whether this processor has AMX tiles; False if this torch does not report it."""
    try:
        return bool(torch.cpu._is_amx_tile_supported())
    except (AttributeError, RuntimeError):
        return False
