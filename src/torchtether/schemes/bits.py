"""Codes of 1 to 8 bits as one dense stream of bytes.

Code ``i`` of a row occupies the bits ``[i * bits, (i + 1) * bits)`` of the row's bytes, read little-endian: with 4 bits
the low nibble comes first, with 3 bits eight codes fill three bytes.  Every row is padded to whole bytes with zeros.
compressed-tensors, GPTQ and MLX store this stream in 32-bit words.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..torch_private.observers import is_direct
from ..torch_private.tensors import is_fake

# Where the low byte comes first, viewing a wider integer as bytes is 14 times faster than stacking bytes.
_VIEWABLE = sys.byteorder == "little"


def packed_size(count: int, bits: int) -> int:
    """Return how many bytes ``count`` codes take.

    >>> packed_size(10, 3)
    4
    """
    return (count * bits + 7) // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return the stream of ``codes``, row by row.

        codes (*lead, K) uint8, each below 2**bits    packed (*lead, ceil(K * bits / 8)) uint8

    >>> pack(torch.tensor([1, 2, 3], dtype=torch.uint8), 4).tolist()
    [33, 3]
    """
    if bits == 8:
        return codes
    count = codes.shape[-1]
    if count == 0:
        return codes
    codes = F.pad(codes, (0, -count % 8))
    if bits == 4 and _VIEWABLE:
        pairs = codes.reshape(-1).view(torch.int16)  # low | high << 8
        packed = (pairs | (pairs >> 4)).to(torch.uint8).view(*codes.shape[:-1], codes.shape[-1] // 2)
    elif _VIEWABLE:
        words = codes.reshape(-1).view(torch.int64)  # eight codes; neighbours are joined in three steps
        for lane in (8, 16, 32):
            held = bits * lane // 8
            low = sum(((1 << held) - 1) << at for at in range(0, 64, 2 * lane))
            words = (words & low) | ((words >> (lane - held)) & (low << held))
        packed = words.view(torch.uint8).view(*codes.shape[:-1], codes.shape[-1] // 8, 8)[..., :bits].flatten(-2)
    else:
        octets = codes.unflatten(-1, (codes.shape[-1] // 8, 8))
        word = octets[..., 0].to(torch.int64)
        for i in range(1, 8):
            word = word | (octets[..., i].to(torch.int64) << (bits * i))
        packed = torch.stack([((word >> (8 * j)) & 0xFF).to(torch.uint8) for j in range(bits)], -1).flatten(-2)
    return packed[..., : packed_size(count, bits)]


def pack_into(codes: Tensor, bits: int, out: Tensor) -> None:
    """Write the stream of each row of ``codes`` (R, K) to the rows of ``out`` (R, bytes), and zeros after it."""
    packed = pack(codes, bits)
    out[:, : packed.shape[1]].copy_(packed)
    out[:, packed.shape[1] :].zero_()  # a stream is padded to a run of 8 codes


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the first ``count`` codes of every row; the inverse of ``pack``.

        packed (*lead, at least ceil(count * bits / 8)) uint8    codes (*lead, count) uint8

    >>> unpack(torch.tensor([33, 3], dtype=torch.uint8), 4, 3).tolist()
    [1, 2, 3]
    """
    if bits == 8:
        return packed[..., :count]
    packed = packed[..., : packed_size(count, bits)]
    if bits in (1, 2, 4) and _VIEWABLE and not _is_for_onnx():
        return _spread(packed, bits)[..., :count]
    groups = (count + 7) // 8
    octets = F.pad(packed, (0, groups * bits - packed.shape[-1])).unflatten(-1, (groups, bits))
    word = octets[..., 0].to(torch.int64)
    for j in range(1, bits):
        word = word | (octets[..., j].to(torch.int64) << (8 * j))
    mask = (1 << bits) - 1
    fields = [((word >> (bits * i)) & mask).to(torch.uint8) for i in range(8)]
    return torch.stack(fields, -1).flatten(-2)[..., :count]


def _is_for_onnx() -> bool:
    """Return whether ``torch.onnx.export`` traces this: ONNX has no views as another dtype."""
    return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()


def _spread(packed: Tensor, bits: int) -> Tensor:
    """Move every field of a byte to a byte of its own: halves are pushed apart until one field is left in each."""
    if bits == 4:
        wide = packed.to(torch.int16)
        wide = (wide | (wide << 4)) & 0x0F0F
    elif bits == 2:
        wide = packed.to(torch.int32)
        wide = (wide | (wide << 12)) & 0x000F000F
        wide = (wide | (wide << 6)) & 0x03030303
    else:
        wide = packed.to(torch.int64)
        wide = (wide | (wide << 28)) & 0x0000000F0000000F
        wide = (wide | (wide << 14)) & 0x0003000300030003
        wide = (wide | (wide << 7)) & 0x0101010101010101
    return wide.reshape(-1).view(torch.uint8).view(*packed.shape[:-1], packed.shape[-1] * (8 // bits))


def table_of(values: Sequence[float], device: torch.device) -> Tensor:
    """Return ``values`` as a float32 tensor, (len(values),).

    During export it is joined from scalars: decompositions lose constant tensors that are made inside a subclass.
    Tables on other devices are cached: a copy to them waits for the device, and cannot be part of a CUDA graph.

    >>> table_of((0.5, 1.0), torch.device("cpu"))
    tensor([0.5000, 1.0000])
    """
    if torch.compiler.is_exporting():
        return torch.cat([torch.full((1,), value, dtype=torch.float32, device=device) for value in values])
    if device.type != "cpu" and is_direct():
        return _kept_table(tuple(values), device)
    return torch.tensor(values, dtype=torch.float32, device=device)


@lru_cache(maxsize=64)
def _kept_table(values: tuple[float, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device)


def lookup(packed: Tensor, table: Tensor, bits: int, count: int) -> Tensor:
    """Return ``table[unpack(packed, bits, count)]``, by one gather per byte where bytes hold whole codes.

    Codes beyond the end of a shorter table give 0.

        packed (*lead, bytes) uint8    table (at most 2**bits,)    values (*lead, count), the dtype of table

    >>> lookup(torch.tensor([0x20], dtype=torch.uint8), torch.tensor([0.0, 0.5, 1.0]), 4, 2).tolist()
    [0.0, 1.0]
    """
    table = F.pad(table, (0, (1 << bits) - table.shape[0]))
    if bits not in (1, 2, 4, 8):
        codes = unpack(packed, bits, count)
        return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)
    packed = packed[..., : packed_size(count, bits)]
    every_byte = torch.arange(256, device=packed.device)
    fields = [(every_byte >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    rows = torch.stack([table[field] for field in fields], -1)
    wide = _AS_ONE.get(rows.shape[1] * rows.itemsize) if is_direct() else None
    if wide is not None and _VIEWABLE:  # gathering numbers is several times faster than gathering short rows
        values = rows.view(-1).view(wide).index_select(0, packed.reshape(-1).int()).view(table.dtype)
    else:
        values = rows.index_select(0, packed.reshape(-1).int())
    return values.view(*packed.shape[:-1], packed.shape[-1] * (8 // bits))[..., :count]


_AS_ONE = {4: torch.float32, 8: torch.float64, 16: torch.complex128}
"""The dtypes as which a gather moves so many bytes."""


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bits: ``torch.equal``, also for float8 and NaN.

    For fake tensors, which have no values, it is True.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return is_fake(one) or torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (one, other)))
