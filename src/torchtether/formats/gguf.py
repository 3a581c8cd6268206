"""GGUF, the files of llama.cpp: blocks of 32 or 256 columns, each with its scales among its codes.

The names are llama.cpp's (``blk.0.attn_q.weight``); ``tt.gguf_names`` gives the renames for a model of transformers.
A quantized tensor is uint8 (*lead, N, bytes per row) in the file, and one Weight of the scheme that its type has in
``CODECS``. Every tensor carries its type, so nothing is guessed.
Source: ggml ``docs/gguf.md``; the ``gguf`` package, whose float32 values ours are bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..files import PACKINGS, Stored
from ..schemes import Shape
from ..schemes.bits import pack
from .entry import Contents, Entry, Found, spec_of
from .gguf_blocks import CODECS

name = "gguf"

_PIECE = 2**20  # elements that are taken apart at once


def recognise(contents: Contents) -> Found | None:
    """Every quantized tensor; a type without a scheme is a fault. ``None`` unless the file is a GGUF file."""
    if not any(stored.packing for stored in contents.tensors.values()):
        return None
    found = Found()
    for key, stored in contents.tensors.items():
        packing = stored.packing
        if packing in CODECS:
            spec = spec_of(_shape(stored), contents.dtype, CODECS[packing].scheme, name=key)
            found.weights[key] = Entry.of({"blocks": key}, spec, packing=packing)
        elif packing and PACKINGS[packing].dtype is None:
            what = f"it is {packing}, which is not read; read are {', '.join(CODECS)}, and floats"
            found.fault(key, what, {"blocks": key})
    return found


def _shape(stored: Stored) -> Shape:
    packing = PACKINGS[stored.packing]
    return (*stored.shape[:-1], stored.shape[-1] // packing.nbytes * packing.elements)


def unpack(entry: Entry, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parts: bits are moved, a bounded number of blocks at a time."""
    assert entry.spec is not None
    packing, scheme = PACKINGS[entry.options["packing"]], entry.spec.scheme
    blocks = tensors["blocks"].reshape(-1, packing.nbytes)
    parts = scheme.empty(entry.spec.base, entry.spec.dtype, blocks.device)
    count = blocks.shape[0]
    bits = parts["qdata"].nbytes * 8 // max(count * packing.elements, 1)
    step = _PIECE // packing.elements
    for at in range(0, count, step):
        made = CODECS[packing.name].apart(blocks[at : at + step])
        made["qdata"] = pack(made["qdata"], bits)
        for part, values in made.items():
            place = _bytes(parts[part]).view(count, -1)[at : at + step]
            place.copy_(_bytes(values.contiguous()).view(place.shape))
    return parts


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
