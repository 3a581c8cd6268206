"""All formats. This module is imported when the first checkpoint is opened, not with the package."""

from __future__ import annotations

from . import (
    auto_round,
    awq,
    bitsandbytes,
    comfy,
    compressed_tensors,
    fp8,
    gguf,
    gptq,
    hqq,
    mlx,
    modelopt,
    mxfp4,
    native,
    quanto,
    quark,
    sinq,
    torchao,
)
from .entry import Format, Writable

FORMATS: list[Format] = [
    native,
    gguf,
    torchao,
    comfy,
    compressed_tensors,
    modelopt,
    auto_round,
    gptq,
    awq,
    bitsandbytes,
    quanto,
    quark,
    sinq,
    hqq,
    mlx,
    mxfp4,
    fp8,
]
"""All formats, in the order in which they are tried: the first that recognises a checkpoint reads it."""

WRITABLE: list[Writable] = [native, compressed_tensors, bitsandbytes, comfy, sinq, gguf]
"""The formats that can be written."""
