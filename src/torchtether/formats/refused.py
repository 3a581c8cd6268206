"""Formats that are known and not read: each is refused by an error that names it and says what to do.

A checkpoint that no other module of this package recognises is refused in two cases: its keys are those of a format
listed here, or it has a ``quant_method`` and a matrix of codes (integers of up to 32 bits, float8). A ``quant_method``
without codes is not refused: tools that dequantize a model leave it in the config, and the floats load like any others.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from ..errors import CheckpointError
from .entry import Contents, Evidence

METHODS = {
    "aqlm": "AQLM (indices into learned codebooks)",
    "bitblas": "BitBLAS (GPTQ in the order of its kernel)",
    "bitnet": "BitNet (packed ternary weights)",
    "eetq": "EETQ (int8 in the order of its kernel)",
    "exl2": "EXL2 (ExLlamaV2)",
    "exl3": "EXL3 (ExLlamaV3)",
    "fp_quant": "FP-Quant (rotated weights in small floats)",
    "gptq_marlin": "GPTQ in the order of Marlin's kernel",
    "gptq_marlin_24": "2:4 sparse GPTQ in the order of Marlin's kernel",
    "higgs": "HIGGS (rotated weights on grids)",
    "llm-awq": "llm-awq (AWQ in 16-bit words)",
    "marlin": "GPTQ in the order of Marlin's kernel",
    "paroquant": "ParoQuant (rotated AWQ)",
    "qqq": "QQQ (int4 in the order of its kernel)",
    "quip": "QuIP# (rotated weights on a lattice)",
    "spqr": "SpQR (codes beside sparse outliers)",
    "torchao": "torchao pickled in .bin files, or a tensor class that safetensors cannot describe",
    "vptq": "VPTQ (indices into codebooks of vectors)",
}
_ALIASES = {
    "exllamav2": "exl2",
    "exllamav3": "exl3",
    "marlin_24": "gptq_marlin_24",
    "quip_sharp": "quip",
    "quip#": "quip",
}
_SUFFIXES = {
    "aqlm": ("codes", "codebooks"),
    "exl2": ("q_weight", "q_invperm"),
    "exl3": ("trellis", "suh"),
    "llm-awq": ("qweight", "scaled_zeros"),
    "marlin": ("B", "s"),
    "quip": ("Qidxs", "SU"),
    "spqr": ("dense_weights", "row_offsets"),
    "vptq": ("indices", "centroids.weight"),
}
evidence = Evidence(keys=tuple(f"{first}\n" for first, *_ in _SUFFIXES.values()))
"""As in the formats that are read. A ``quant_method`` that none of them reads is evidence too."""

_CODES = (
    *(torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
_FIX = "Use an unquantized checkpoint or one in a supported format, or dequantize it with the package that wrote it."


def check_refused(contents: Contents) -> None:
    """Raise CheckpointError, naming the format, for a checkpoint whose tensors are codes of a format that is not read.

    Call this for checkpoints that no format recognises; those that pass may be loaded as plain tensors.
    """
    for kind, suffixes in _SUFFIXES.items():
        key = _with(contents, suffixes) if suffixes[0] in contents.leaves else None
        if key is not None:
            _refuse(METHODS[kind], f"it has {' and '.join(suffixes)}", key)
    codes = find_codes(contents)
    if contents.method and codes is not None:
        method = _ALIASES.get(contents.method, contents.method)
        if method == "torchtether":
            why = "says that torchtether has quantized it, but neither it nor the files describe Weights"
            fix = "Save again: a config of transformers that is written after tt.save replaces what that has written."
            raise CheckpointError(why, name="config.json", fix=fix)
        what = METHODS.get(method, f"the unknown quant_method {contents.method[:60]!r}")
        _refuse(what, f"{codes} is {contents.tensors[codes].dtype}", "config.json")


def find_codes(contents: Contents) -> str | None:
    """Return the key of the first matrix of integers or float8, except masks, which old models store as ``bias``."""
    if contents.dtypes.isdisjoint(_CODES):
        return None
    for key, stored in contents.tensors.items():
        if stored.dtype in _CODES and len(stored.shape) >= 2 and not key.endswith("bias"):
            return key
    return None


def _with(contents: Contents, suffixes: tuple[str, ...]) -> str | None:
    """Return the first key of a module that has all of ``suffixes``, the first of them with integers."""
    first, *others = suffixes
    for key, stored in contents.tensors.items():
        module, _, last = key.rpartition(".")
        beside = (f"{module}.{other}" if module else other for other in others)
        if last == first and not stored.dtype.is_floating_point and all(other in contents.tensors for other in beside):
            return key
    return None


def _refuse(what: str, why: str, name: str) -> NoReturn:
    raise CheckpointError(f"the format of the checkpoint is {what}, which is not supported: {why}", name=name, fix=_FIX)
