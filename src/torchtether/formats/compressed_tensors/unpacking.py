"""Unpack stored tensors into parts: words of codes and zero points. Nothing is rounded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...files import Stored
from ...schemes import Affine, bits
from ...schemes.blocks import CHUNK, pieces
from ..entry import Entry
from ..rows import Along, all_along
from ..words import as_bytes


def unpack(entry: Entry, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts: words become a stream of codes, zero points one to a byte, other tensors stay as they are."""
    assert entry.spec is not None
    scheme, layout = entry.spec.scheme, entry.spec.scheme.layout(entry.spec.base)
    parts: dict[str, Tensor] = {}
    for role, tensor in tensors.items():
        if role in layout:
            dtype, shape = layout[role].dtype, layout[role].shape
            parts[role] = (tensor if dtype is None else tensor.view(dtype)).reshape(shape)
            continue
        assert isinstance(scheme, Affine)
        if role == "packed":
            codes = _stream(tensor, scheme.bits, entry.shape[-1], entry.options["dense"])
            parts["qdata"] = codes if scheme.bits < 8 else codes.bitwise_xor(0x80).view(torch.int8)
        else:
            stream = _stream(tensor.transpose(-1, -2), scheme.bits, entry.shape[-2], entry.options["dense"])
            zeros = bits.unpack(stream, scheme.bits, entry.shape[-2]).to(torch.int16) - (1 << (scheme.bits - 1))
            parts["zero_point"] = zeros.to(torch.int8).transpose(-1, -2).contiguous()
    return {name: parts[name] for name in layout}


def rows(entry: Entry, tensors: Mapping[str, Stored]) -> Mapping[str, Along] | None:
    """Return where rows lie: every tensor has them as its rows; several rows of packed zero points share a word."""
    assert entry.spec is not None
    if "packed_zero_point" not in entry.keys or len(entry.shape) > 2:
        return all_along(entry, tensors)
    scheme = entry.spec.scheme
    assert isinstance(scheme, Affine)
    if 32 % scheme.bits:
        return None
    return all_along(entry, tensors, packed_zero_point=Along(0, 1, 32 // scheme.bits))


def _stream(words: Tensor, width: int, count: int, dense: bool) -> Tensor:
    """Return the dense stream of bytes of ``count`` codes a row, from int32 words."""
    size = bits.packed_size(count, width)
    if dense:
        return as_bytes(words)[..., :size].contiguous()
    rows = words.reshape(-1, words.shape[-1])
    made = torch.empty((rows.shape[0], size), dtype=torch.uint8, device=words.device)
    shifts = torch.arange(0, 32 // width * width, width, dtype=torch.int32, device=words.device)
    for start, stop in pieces(0, rows.shape[0], max(1, CHUNK // max(1, count))):
        codes = (rows[start:stop, :, None] >> shifts) & ((1 << width) - 1)
        made[start:stop] = bits.pack(codes.flatten(1)[:, :count].to(torch.uint8), width)
    return made.view(*words.shape[:-1], size)
