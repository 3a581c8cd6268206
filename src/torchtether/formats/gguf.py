"""GGUF, the files of llama.cpp: blocks of 32 or 256 columns, each with its scales among its codes.

The names are llama.cpp's (``blk.0.attn_q.weight``); ``tt.gguf_names`` returns the rename rules for a model of
transformers. A quantized tensor is uint8 (*lead, N, bytes per row) in the file, and becomes one Weight in the scheme
that ``CODECS`` gives for its type. The file records the type of every tensor, so only the compute dtype is inferred,
unless the file has our record.
Source: ggml ``docs/gguf.md``; the ``gguf`` package, whose float32 values ours equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import SchemeError
from ..files import GGUF_SUFFIX, PACKINGS, Packing, Pairs, Stored
from ..geometry.views import Shape
from ..schemes import Affine, Scheme
from ..schemes.bits import pack as packed
from ..schemes.bits import unpack as unpacked
from ..weights.spec import WeightSpec
from ..weights.weight import Weight
from .entry import Contents, Entry, Evidence, Found, spec_of
from .gguf_blocks import CODECS
from .rows import all_along

name = "gguf"
evidence = Evidence(packings=True)
rows = all_along
suffix = GGUF_SUFFIX

PIECE = 2**20  # elements that are unpacked at once


def recognise(contents: Contents) -> Found | None:
    """Return every quantized tensor; a type without a scheme is a fault. ``None`` if no tensor is in GGUF blocks."""
    if not contents.is_packed:
        return None
    found = Found()
    for key, stored in contents.tensors.items():
        packing = stored.packing
        if packing in CODECS:
            spec = spec_of(_shape(stored), contents.dtype, CODECS[packing].scheme, name=key)
            found.weights[key] = Entry.of({"blocks": key}, spec, packing=packing)
        elif packing and PACKINGS[packing].dtype is None:
            what = f"its type is {packing}, not one of {', '.join(CODECS)} or a float type"
            found.fault(key, what, {"blocks": key})
    return found


def _shape(stored: Stored) -> Shape:
    packing = PACKINGS[stored.packing]
    return (*stored.shape[:-1], stored.shape[-1] // packing.nbytes * packing.elements)


def unpack(entry: Entry, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts; bits are moved without rounding, a bounded number of blocks at a time."""
    assert entry.spec is not None
    packing, scheme = PACKINGS[entry.options["packing"]], entry.spec.scheme
    blocks = tensors["blocks"].reshape(-1, packing.nbytes)
    parts = scheme.empty(entry.spec.base, entry.spec.dtype, blocks.device)
    count = blocks.shape[0]
    bits = parts["qdata"].nbytes * 8 // max(count * packing.elements, 1)
    step = PIECE // packing.elements
    for at in range(0, count, step):
        made = CODECS[packing.name].split(blocks[at : at + step])
        made["qdata"] = packed(made["qdata"], bits)
        for part, values in made.items():
            place = _bytes(parts[part]).view(count, -1)[at : at + step]
            place.copy_(_bytes(values.contiguous()).view(place.shape))
    return parts


# -- writing ----------------------------------------------------------------------------------------------------------


def packing(name: str, spec: WeightSpec) -> Packing:
    """Return the type that stores a Weight of ``spec`` exactly. Raise SchemeError, listing all types, if none does."""
    scheme = _for_decoding(spec.scheme)
    found = next((PACKINGS[one] for one, codec in CODECS.items() if codec.scheme == scheme), None)
    if found is None:
        raise SchemeError(
            f"GGUF has no type for {spec.scheme}",
            name=name,
            fix="GGUF has Q8_0, which is tt.int8(32, scale_dtype=torch.float16), and "
            f"{', '.join(f'{one} ({codec.scheme})' for one, codec in CODECS.items() if one != 'Q8_0')}.",
        )
    if not spec.shape or spec.shape[-1] % found.elements:
        raise SchemeError(
            f"{found.name} needs rows of whole blocks of {found.elements}, but the shape is {spec.shape}",
            name=name,
            fix="Leave it unquantized.",
        )
    return found


def _for_decoding(scheme: Scheme) -> Scheme:
    """Return ``scheme`` with default values in the fields that do not affect decoding."""
    if not isinstance(scheme, Affine):
        return scheme
    scheme = replace(scheme, narrow_range=False, reciprocal=False)
    return replace(scheme, signed=True) if scheme.symmetric and scheme.bits < 8 else scheme


def layout(name: str, spec: WeightSpec) -> dict[str, tuple[torch.dtype, Shape]]:
    """Return what ``pack`` stores: the bytes of the blocks, row by row, under the name of the weight."""
    found = packing(name, spec)
    return {name: (torch.uint8, (*spec.shape[:-1], spec.shape[-1] // found.elements * found.nbytes))}


def pack(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return the bytes of the blocks; bits are moved without rounding, a bounded number of blocks at a time."""
    assert isinstance(weight, Weight)
    found = packing(name, weight.spec)
    ((_, shape),) = layout(name, weight.spec).values()
    out = torch.empty(shape, dtype=torch.uint8, device=weight.device)
    blocks = out.view(-1, found.nbytes)
    count = blocks.shape[0]
    parts = {part: tensor.detach().reshape(count, -1) for part, tensor in weight.parts.items() if count}
    step = PIECE // found.elements
    for at in range(0, count, step):
        some = {part: tensor[at : at + step] for part, tensor in parts.items()}
        codes = some["qdata"].view(torch.uint8)
        some["qdata"] = unpacked(codes, codes.shape[-1] * 8 // found.elements, found.elements)
        blocks[at : at + step] = CODECS[found.name].join(some)
    return {name: out}


def announce(specs: Mapping[str, WeightSpec], plain: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """Return nothing: the file records the type of every tensor."""
    return {}


_CONFIG = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "vocab_size": "vocab_size",
}


def pairs(config: Mapping[str, Any], given: Pairs | None = None) -> Pairs:
    """Return the key-value pairs of a file: those made from ``config`` (``config.json``), overridden by ``given``.

    The architecture is "unknown" if neither names one.

    >>> pairs({"model_type": "llama", "num_hidden_layers": 2})
    {'general.architecture': 'llama', 'general.quantization_version': 2, 'llama.block_count': 2}
    """
    family = str((given or {}).get("general.architecture") or config.get("model_type") or "unknown")
    made: dict[str, Any] = {"general.architecture": family, "general.quantization_version": 2}
    for key, ours in _CONFIG.items():
        value = config.get(key)
        if type(value) is int or type(value) is float:
            made[f"{family}.{ours}"] = float(value) if ours in ("rope.freq_base",) else value
    return made | dict(given or {})


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
