"""Conversion between the blocks of GGUF's types and the parts of our schemes, byte by byte.

Each codec splits the bytes of blocks, uint8 (n, bytes), into codes (n, elements), one to a byte, and the other parts
(n, entries), and joins them again. Nothing is rounded.
Source: ggml ``ggml-common.h`` and ``ggml-quants.c``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..schemes import Affine, Biased, ScaledFloat, Scheme, SuperBlocks

TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The 4-bit values of IQ4_NL and IQ4_XS."""

Parts = dict[str, Tensor]


class Codec(NamedTuple):
    """The conversion of one GGUF type: ``split`` blocks into parts, ``join`` parts into blocks.

    ``qdata`` holds codes here, one to a byte.
    """

    scheme: Scheme
    split: Callable[[Tensor], Parts]
    join: Callable[[Mapping[str, Tensor]], Tensor]


def _half(raw: Tensor) -> Tensor:
    """Return pairs of bytes (n, 2 * count) as float16 (n, count)."""
    return raw.contiguous().view(torch.float16)


def _bytes(halves: Tensor) -> Tensor:
    return halves.contiguous().view(torch.uint8)


def _halves(raw: Tensor) -> Tensor:
    """Return the 4-bit codes of ``raw``: first all low nibbles, then all high nibbles."""
    raw = raw.contiguous()  # ops on rows that are 16 bytes apart take three times as long
    return torch.cat((raw & 15, raw >> 4), -1)


def _nibbles(codes: Tensor) -> Tensor:
    """Return the inverse of ``_halves``."""
    half = codes.shape[-1] // 2
    return (codes[:, :half] & 15) | (codes[:, half:] << 4)


def _bit_of_each(raw: Tensor) -> Tensor:
    """Return the bits of (n, 4) bytes, low first, as (n, 32)."""
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)
    bits: Tensor = (raw.unsqueeze(-1) >> shifts) & 1
    return bits.flatten(-2)


def _spread(raw: Tensor, run: int, bits: int) -> Tensor:
    """Return the fields of ``bits`` bits: for each run of ``run`` bytes all lowest fields, then all next ones, ..."""
    runs = raw.contiguous().unflatten(-1, (raw.shape[-1] // run, run))
    return torch.cat([(runs >> at) & ((1 << bits) - 1) for at in range(0, 8, bits)], -1).flatten(1)


def _joined(codes: Tensor, run: int, bits: int) -> Tensor:
    """Return the inverse of ``_spread``, from the lowest ``bits`` bits of each code."""
    each = 8 // bits
    runs = codes.unflatten(-1, (codes.shape[-1] // (each * run), each, run))
    fields: Tensor = runs & ((1 << bits) - 1)
    raw: Tensor = fields[:, :, 0]
    for i in range(1, each):
        raw = raw | (fields[:, :, i] << (bits * i))
    return raw.flatten(1)


# -- blocks of 32 -----------------------------------------------------------------------------------------------------


def _q8_0(raw: Tensor) -> Parts:
    return {"qdata": raw[:, 2:], "scale": _half(raw[:, :2])}


def _to_q8_0(parts: Mapping[str, Tensor]) -> Tensor:
    return torch.cat((_bytes(parts["scale"]), parts["qdata"]), -1)


def _codec_of_32(scheme: Scheme, bits: int, *halves: str) -> Codec:
    """Return the codec of blocks of a float16 for each part in ``halves``, then 32 codes of 4 or 5 ``bits``.

    Fifth bits come before the other four, in 4 bytes.
    """
    first = 2 * len(halves)
    fours = first + 4 * (bits == 5)

    def split(raw: Tensor) -> Parts:
        codes = _halves(raw[:, fours:])
        if bits == 5:
            codes |= _bit_of_each(raw[:, first:fours]) << 4
        return {"qdata": codes, **{part: _half(raw[:, 2 * i : 2 * i + 2]) for i, part in enumerate(halves)}}

    def join(parts: Mapping[str, Tensor]) -> Tensor:
        codes = parts["qdata"]
        fifths = [_joined((codes >> 4).unflatten(-1, (4, 8)).flatten(0, 1), 1, 1).view(-1, 4)] if bits == 5 else []
        return torch.cat([*(_bytes(parts[part]) for part in halves), *fifths, _nibbles(codes)], -1)

    return Codec(scheme, split, join)


def _mxfp4(raw: Tensor) -> Parts:
    codes = _halves(raw[:, 1:])
    codes = torch.where(codes == 8, 0, codes)  # ggml has no -0
    return {"qdata": codes, "scale": raw[:, :1].contiguous().view(torch.float8_e8m0fnu)}


def _to_mxfp4(parts: Mapping[str, Tensor]) -> Tensor:
    return torch.cat((_bytes(parts["scale"]), _nibbles(parts["qdata"])), -1)


# -- super-blocks of 256 ----------------------------------------------------------------------------------------------


def _q2_k(raw: Tensor) -> Parts:
    return {
        "qdata": _spread(raw[:, 16:80], 32, 2),
        "scale": raw[:, :16] & 15,
        "super_scale": _half(raw[:, 80:82]),
        "min": raw[:, :16] >> 4,
        "super_min": _half(raw[:, 82:84]),
    }


def _to_q2_k(parts: Mapping[str, Tensor]) -> Tensor:
    both = (parts["scale"] & 15) | (parts["min"] << 4)
    over = (_bytes(parts["super_scale"]), _bytes(parts["super_min"]))
    return torch.cat((both, _joined(parts["qdata"], 32, 2), *over), -1)


def _q3_k(raw: Tensor) -> Parts:
    low = torch.cat((raw[:, 96:104] & 15, raw[:, 96:104] >> 4), -1)
    high = _spread(raw[:, 104:108], 4, 2)
    return {
        "qdata": _spread(raw[:, 32:96], 32, 2) | (_spread(raw[:, :32], 32, 1) << 2),
        "scale": _signed(low | (high << 4), 32),
        "super_scale": _half(raw[:, 108:110]),
    }


def _to_q3_k(parts: Mapping[str, Tensor]) -> Tensor:
    codes, scale = parts["qdata"], _unsigned(parts["scale"], 32)
    scales = ((scale[:, :8] & 15) | (scale[:, 8:] << 4), _joined(scale >> 4, 4, 2))
    return torch.cat((_joined(codes >> 2, 32, 1), _joined(codes, 32, 2), *scales, _bytes(parts["super_scale"])), -1)


def _six_bits(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eight scales and eight minima in 12 bytes: six bits each, the last four of each in two places."""
    scale, low, rest = raw[:, :4], raw[:, 4:8], raw[:, 8:12]
    return (
        torch.cat((scale & 63, (rest & 15) | ((scale >> 6) << 4)), -1),
        torch.cat((low & 63, (rest >> 4) | ((low >> 6) << 4)), -1),
    )


def _q4_k(raw: Tensor) -> Parts:
    scale, low = _six_bits(raw[:, 4:16])
    return {
        "qdata": _spread(raw[:, 16:144], 32, 4),
        "scale": scale,
        "super_scale": _half(raw[:, :2]),
        "min": low,
        "super_min": _half(raw[:, 2:4]),
    }


def _twelve_bytes(scale: Tensor, low: Tensor) -> Tensor:
    """Return the inverse of ``_six_bits``."""
    first = (scale[:, :4] & 63) | ((scale[:, 4:] >> 4) << 6)
    second = (low[:, :4] & 63) | ((low[:, 4:] >> 4) << 6)
    return torch.cat((first, second, (scale[:, 4:] & 15) | (low[:, 4:] << 4)), -1)


def _k_head(parts: Mapping[str, Tensor]) -> Tensor:
    over = (_bytes(parts["super_scale"]), _bytes(parts["super_min"]))
    return torch.cat((*over, _twelve_bytes(parts["scale"], parts["min"])), -1)


def _to_q4_k(parts: Mapping[str, Tensor]) -> Tensor:
    return torch.cat((_k_head(parts), _joined(parts["qdata"], 32, 4)), -1)


def _to_q5_k(parts: Mapping[str, Tensor]) -> Tensor:
    codes = parts["qdata"]
    return torch.cat((_k_head(parts), _joined(codes >> 4, 32, 1), _joined(codes, 32, 4)), -1)


def _q5_k(raw: Tensor) -> Parts:
    codes = _spread(raw[:, 48:176], 32, 4) | (_spread(raw[:, 16:48], 32, 1) << 4)
    return {**_q4_k(raw[:, :144]), "qdata": codes}


def _q6_k(raw: Tensor) -> Parts:
    return {
        "qdata": _spread(raw[:, :128], 64, 4) | (_spread(raw[:, 128:192], 32, 2) << 4),
        "scale": raw[:, 192:208].view(torch.int8),
        "super_scale": _half(raw[:, 208:210]),
    }


def _to_q6_k(parts: Mapping[str, Tensor]) -> Tensor:
    codes = parts["qdata"]
    scales = (_bytes(parts["scale"]), _bytes(parts["super_scale"]))
    return torch.cat((_joined(codes, 64, 4), _joined(codes >> 4, 32, 2), *scales), -1)


def _iq4_xs(raw: Tensor) -> Parts:
    low = torch.stack((raw[:, 4:8] & 15, raw[:, 4:8] >> 4), -1).flatten(1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device)
    high = ((raw[:, 2:4].unsqueeze(-1) >> shifts) & 3).flatten(1)
    return {
        "qdata": _spread(raw[:, 8:], 16, 4),
        "scale": _signed(low | (high << 4), 32),
        "super_scale": _half(raw[:, :2]),
    }


def _to_iq4_xs(parts: Mapping[str, Tensor]) -> Tensor:
    scale = _unsigned(parts["scale"], 32)
    low = (scale[:, ::2] & 15) | (scale[:, 1::2] << 4)
    high = _joined((scale >> 4).unflatten(-1, (2, 4)).flatten(0, 1), 1, 2).view(-1, 2)
    return torch.cat((_bytes(parts["super_scale"]), high, low, _joined(parts["qdata"], 16, 4)), -1)


def _unsigned(scale: Tensor, offset: int) -> Tensor:
    """Return the inverse of ``_signed``."""
    return (scale + offset).to(torch.uint8)


def _signed(codes: Tensor, offset: int) -> Tensor:
    return codes.to(torch.int8).sub_(offset)


_HALF = torch.float16
CODECS: dict[str, Codec] = {
    "Q8_0": Codec(Affine(8, block=(1, 32), scale_dtype=_HALF), _q8_0, _to_q8_0),
    "Q4_0": _codec_of_32(Affine(4, block=(1, 32), scale_dtype=_HALF), 4, "scale"),
    "Q4_1": _codec_of_32(Biased(4, (1, 32), _HALF), 4, "scale", "bias"),
    "Q5_0": _codec_of_32(Affine(5, block=(1, 32), scale_dtype=_HALF), 5, "scale"),
    "Q5_1": _codec_of_32(Biased(5, (1, 32), _HALF), 5, "scale", "bias"),
    "MXFP4": Codec(ScaledFloat("e2m1", (1, 32), torch.float8_e8m0fnu), _mxfp4, _to_mxfp4),
    "IQ4_NL": _codec_of_32(SuperBlocks(4, 32, 32, 0, table=TABLE), 4, "super_scale"),
    "IQ4_XS": Codec(SuperBlocks(4, 32, 256, 6, table=TABLE), _iq4_xs, _to_iq4_xs),
    "Q2_K": Codec(SuperBlocks(2, 16, 256, 4, minimum=True), _q2_k, _to_q2_k),
    "Q3_K": Codec(SuperBlocks(3, 16, 256, 6, offset=4), _q3_k, _to_q3_k),
    "Q4_K": Codec(SuperBlocks(4, 32, 256, 6, minimum=True), _q4_k, _to_q4_k),
    "Q5_K": Codec(SuperBlocks(5, 32, 256, 6, minimum=True), _q5_k, _to_q5_k),
    "Q6_K": Codec(SuperBlocks(6, 16, 256, 8, offset=32), _q6_k, _to_q6_k),
}
"""A codec for each type that is read and written, by its name."""
