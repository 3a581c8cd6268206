"""The smallest kernel, which is run first, to test whether Triton can build and start kernels."""
# Triton would take annotations of arguments as types to compile for.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_one(out):
    """Write 1 to the first element of ``out``."""
    tl.store(out, 1.0)
