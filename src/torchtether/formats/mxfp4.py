"""The experts of gpt-oss: E2M1 codes under scales that are powers of two, for 3-D Parameters outside linear layers.

    p_blocks   uint8 (E, N, K / 32, 16): 32 codes, the even one in the low nibble
    p_scales   uint8 (E, N, K / 32): 2 ** (byte - 127)

The Parameter ``p`` is the transpose, (E, K, N): a Weight with transposed strides over the parts as they are stored.
Source: openai/gpt-oss model repositories; transformers ``integrations/mxfp4.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..schemes import ScaledFloat
from ..weights.spec import WeightSpec
from .entry import Contents, Entry, Evidence, Found
from .rows import all_along

name = "mxfp4"
evidence = Evidence(methods=(name,), keys=("_blocks\n",))
rows = all_along

SCHEME = ScaledFloat("e2m1", block=(1, 32), scale_dtype=torch.float8_e8m0fnu)
BLOCKS, SCALES = "_blocks", "_scales"


def recognise(contents: Contents) -> Found | None:
    """Return every pair of blocks and scales; either without the other is a fault.

    Return ``None`` if there are no pairs and the config does not name mxfp4.
    """
    tensors = contents.tensors
    if not contents.method and not any(leaf.endswith(BLOCKS) for leaf in contents.leaves):
        return None
    ends = {key.removesuffix(end) for end in (BLOCKS, SCALES) for key in tensors if key.endswith(end)}
    pairs = {base for base in ends if base + BLOCKS in tensors and base + SCALES in tensors}
    if contents.method not in ("mxfp4", "") or (not contents.method and not pairs):
        return None
    found = Found()
    for base in sorted(ends):
        keys = {end[1:]: base + end for end in (BLOCKS, SCALES) if base + end in tensors}
        if len(keys) == 1:
            (there,) = keys
            found.fault(base, f"it has {there}, but no {'scales' if there == 'blocks' else 'blocks'}", keys)
            continue
        blocks, scales = tensors[base + BLOCKS], tensors[base + SCALES]
        if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
            held = f"its blocks are {blocks.dtype}, its scales {scales.dtype}"
            found.fault(base, f"{held}, and both must be torch.uint8", keys)
        elif len(blocks.shape) != 4 or blocks.shape[-1] != 16 or scales.shape != blocks.shape[:-1]:
            found.fault(
                base,
                f"its blocks have shape {blocks.shape} and its scales {scales.shape}, not (E, N, K / 32, 16) and "
                "(E, N, K / 32)",
                keys,
            )
        else:
            experts, count, groups, _ = blocks.shape
            spec = WeightSpec.of((experts, count, groups * 32), contents.dtype, SCHEME)
            found.weights[base] = Entry.of(keys, spec.permute((0, 2, 1)))
    return found


def unpack(entry: Entry, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts: blocks and scales as they are stored, viewed in the shape and dtype of the parts."""
    return {
        "qdata": tensors["blocks"].flatten(-2),
        "scale": tensors["scales"].view(torch.float8_e8m0fnu),
    }
