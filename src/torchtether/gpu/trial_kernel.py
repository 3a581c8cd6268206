"""The smallest kernel, which is run first, to see whether Triton can build and start any."""
# Triton reads annotations of arguments as what they are compiled for.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_one(out):
    """Write 1 to the first element of ``out``."""
    tl.store(out, 1.0)
