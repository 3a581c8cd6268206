"""Words of packed codes: their bytes, and fields that hold whole groups of columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..schemes.bits import pack, packed_size
from ..schemes.blocks import CHUNK, pieces


def word_count(count: int, bits: int) -> int:
    """Return the number of 32-bit words of a dense stream of ``count`` codes."""
    return -(-count * bits // 32)


def as_bytes(words: Tensor) -> Tensor:
    """Return the bytes of ``words`` (*lead, W) int32, row by row: (*lead, 4 * W) uint8, lowest byte first."""
    # flat first: a dimension of size 1 may have any stride, and view(dtype) needs a last stride of 1
    return words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], 4 * words.shape[-1])


def split_fields(words: Tensor, bits: int, shifts: Sequence[int], groups: int) -> Tensor:
    """Return the packed codes of each group of columns: (groups, ceil(K * bits / 8)) uint8.

    ``words`` is (R, K). The fields at ``shifts[i]`` of all words hold the codes of R groups, from group ``i * R`` on.
    """
    rows, columns = words.shape
    codes = torch.empty((groups, packed_size(columns, bits)), dtype=torch.uint8, device=words.device)
    for i, shift in enumerate(shifts):
        first = i * rows
        for start, stop in pieces(first, min(groups, first + rows), max(1, CHUNK // max(1, columns))):
            some = (words[start - first : stop - first] >> shift) & ((1 << bits) - 1)
            codes[start:stop] = pack(some.to(torch.uint8), bits)
    return codes
