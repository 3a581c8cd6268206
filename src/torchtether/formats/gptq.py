"""GPTQ, as GPTQModel, AutoGPTQ, GPTQ-for-LLaMa and AutoRound write it.

    m.qweight  int32 (ceil(K * bits / 32), N)   each column is the dense stream of codes of one output
    m.qzeros   int32 (G, ceil(N * bits / 32))   each row is the dense stream of zero points of one group
    m.scales   float (G, N)
    m.g_idx    int32 (K,)                       the group of each column; absent or all zero: groups are contiguous
    m.bias     float (N,)                       AutoGPTQ stores one for every module: zeros where the model has none

``m.weight`` (N, K) is ``scales[g_idx[k], n] * (q[k, n] - zero[g_idx[k], n])``.

Version 1 (also without a ``checkpoint_format``) stores ``zero - 1``; version 2 ("gptq_v2") stores ``zero``. GPTQModel
subtracts 1 from all fields of a word with one subtraction, so a zero point of 0 borrows from the field above. One
addition to the word undoes that. Fields that cross words (3, 5, 6 and 7 bits) wrap independently.

Labels are sometimes wrong (vLLM issue 38966). If weights may be symmetric, the version is ignored where all zero points
equal the middle of the range, or all equal the middle less one: either means the middle.

Source: GPTQModel 7.7, AutoGPTQ 0.7.1, AutoRound 0.16.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..files import Stored
from ..schemes import Affine
from ..schemes import bits as streams
from .entry import FLOATS, Contents, Entry, Evidence, Found, spec_of
from .linears import (
    Options,
    Settings,
    check_shape,
    compute_dtype,
    dynamic_overrides,
    find_modules,
    groups_over,
    has_shapes,
    matrix,
    options_of,
    read_modules,
)
from .rows import Along
from .words import as_bytes, word_count

name = "gptq"
evidence = Evidence(methods=(name,), files=("quantize_config.json",), keys=("qweight\n",))

WIDTHS = range(2, 9)
_SIDE = "quantize_config.json"
_VERSIONS = {"": 1, "gptq": 1, "gptq_v1": 1, "gptq_v2": 2}
_REFUSED = {
    "marlin": "the order of Marlin's kernel",
    "gptq_marlin": "the order of Marlin's kernel",
    "marlin_24": "2:4 sparse codes in the order of Marlin's kernel",
    "gptq_p": "codes split into planes",
    "bitblas": "the order of BitBLAS's kernel",
    "qqq": "the order of QQQ's kernel",
}
_UNPACKED = "Use a checkpoint in the format 'gptq' or 'gptq_v2', or convert it with the package that wrote it."


def recognise(contents: Contents) -> Found | None:
    """Return every module with a ``qweight``; bits and shapes come from its tensors, the group size from the config.

    Without a config, tensors that look like GPTQ are read as version 1, if they determine the rest.
    """
    config, file = _config(contents)
    if config is None:
        return None
    version = _version(config, file)
    return read(contents, Settings(options_of(config, file=file), dynamic_overrides(config, file=file)), version)


def read(contents: Contents, settings: Settings, version: int) -> Found:
    """Return every module with a ``qweight``; zero points are read by ``version``."""
    found = read_modules(contents, settings, partial(_entry, version=version))
    biases = {f"{name.removesuffix('weight')}bias" for name in found.weights}
    found.padding = biases & contents.tensors.keys()
    return found


def unpack(entry: Entry, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts: columns of words become rows of bytes, zero points one byte each."""
    assert entry.spec is not None
    scheme = entry.spec.scheme
    assert isinstance(scheme, Affine)
    rows, columns = entry.shape
    size = streams.packed_size(columns, scheme.bits)
    options = dict(entry.options)
    first, total = options.pop("rows", (0, rows))
    zeros = _zero_points(tensors["qzeros"], scheme.bits, total, **options)[:, first : first + rows]
    parts = {
        "qdata": as_bytes(tensors["qweight"].t())[:, :size].contiguous(),
        "scale": tensors["scales"].t().contiguous(),
        "zero_point": zeros.t().contiguous(),
    }
    if scheme.act_order:
        parts["g_idx"] = tensors["g_idx"].to(torch.int32)
    return parts


def rows(entry: Entry, tensors: Mapping[str, Stored]) -> Mapping[str, Along]:
    """Return where rows lie: along the columns of codes and scales; zero points are needed whole."""
    return {"qweight": Along(1), "scales": Along(1)}


# -- the config ---------------------------------------------------------------------------------------------------


def _config(contents: Contents) -> tuple[Mapping[str, Any] | None, str]:
    """Return the config and the name of its file; ``None`` as config if the checkpoint has another format."""
    if contents.method:
        return (contents.quantization if contents.method == name else None), "config.json"
    side = contents.beside.get(_SIDE)
    if side is not None:
        method = str(side.get("quant_method") or side.get("method") or name).lower()
        is_ours = method == name and bool(find_modules(contents) or side.get("is_marlin_format") or _label(side))
        return (side if is_ours else None), _SIDE
    fits = has_shapes(contents, lambda codes, zeros, scales: (zeros[0], codes[1]) == scales)
    return (contents.quantization if fits else None), "config.json"


def _label(config: Mapping[str, Any]) -> str:
    return str(config.get("checkpoint_format") or config.get("format") or "").lower()


def _version(config: Mapping[str, Any], file: str) -> int:
    label = "marlin" if config.get("is_marlin_format") is True else _label(config)
    if label not in _VERSIONS:
        what = f" ({_REFUSED[label]})" if label in _REFUSED else ""
        raise CheckpointError(f"GPTQ in the format {label[:40]!r}{what} is not supported", name=file, fix=_UNPACKED)
    words = str(config.get("pack_dtype") or "int32").removeprefix("torch.")
    if words != "int32":
        raise CheckpointError(f"GPTQ packed in {words[:40]} is not supported, only in int32", name=file, fix=_UNPACKED)
    return _VERSIONS[label]


# -- the tensors --------------------------------------------------------------------------------------------------


def _entry(contents: Contents, keys: Mapping[str, str], options: Options, version: int) -> Entry:
    codes = matrix(contents, keys, "qweight", (torch.int32,))
    scales = matrix(contents, keys, "scales", FLOATS)
    if "qzeros" not in keys:
        raise CheckpointError("it has qweight and scales, but no qzeros")
    zeros = matrix(contents, keys, "qzeros", (torch.int32,))
    (words, rows), groups = codes.shape, scales.shape[0]
    check_shape("scales", scales, (groups, rows), f"qweight {codes.shape}")
    listed = contents.tensors[keys["g_idx"]] if "g_idx" in keys else None
    bits = _bits(codes, zeros, listed, options)
    check_shape("qzeros", zeros, (groups, word_count(rows, bits)), f"scales {scales.shape} and {bits} bits")
    columns = _columns(words, bits, listed)
    block, order = _groups(contents, keys, columns, groups, options)
    scheme = Affine(bits=bits, signed=False, symmetric=False, block=block, act_order=order, scale_dtype=scales.dtype)
    spec = spec_of((rows, columns), compute_dtype(scales.dtype), scheme, name=keys["qweight"])
    used = {role: keys[role] for role in ("qweight", "qzeros", "scales", *(["g_idx"] if order else []))}
    return Entry.of(used, spec, is_less_one=version == 1, may_be_symmetric=options.symmetric is not False)


def _bits(codes: Stored, zeros: Stored, listed: Stored | None, options: Options) -> int:
    """Return the number of bits that fits the shapes of all tensors.

    Raise CheckpointError if none fits, if the config names another, or if several fit and the config names none.
    """
    words, rows = codes.shape
    fitting = (
        [
            bits
            for bits in WIDTHS
            if zeros.shape[1] == word_count(rows, bits)
            and (listed is None or words == word_count(listed.shape[0], bits))
        ]
        if listed is None or len(listed.shape) == 1
        else []
    )
    if options.bits in fitting:
        return options.bits  # type: ignore[return-value]
    shapes = f"qweight {codes.shape}, qzeros {zeros.shape}" + ("" if listed is None else f", g_idx {listed.shape}")
    if options.bits is not None:
        fits = f"fit {' or '.join(map(str, fitting))} bits" if fitting else "fit no number of bits from 2 to 8"
        raise CheckpointError(f"{shapes} {fits}, and the config says {options.bits} bits")
    if len(fitting) != 1:
        fits = f"fit {' and '.join(map(str, fitting))} bits" if fitting else "fit no number of bits from 2 to 8"
        raise CheckpointError(f"{shapes} {fits}, and no config has a number of bits")
    return fitting[0]


def _columns(words: int, bits: int, listed: Stored | None) -> int:
    if listed is not None:
        return listed.shape[0]
    if words * 32 % bits:
        raise CheckpointError(
            f"its {words} rows of words are not a whole number of {bits}-bit codes, and its g_idx is absent"
        )
    return words * 32 // bits


def _groups(
    contents: Contents, keys: Mapping[str, str], columns: int, groups: int, options: Options
) -> tuple[tuple[int | None, int | None], bool]:
    """Return the block under one scale, and whether ``g_idx`` has groups of columns that are not contiguous."""
    if "g_idx" not in keys:
        if groups > 1 and contents.quantization.get("desc_act") is True:
            raise CheckpointError("its g_idx is absent, and the config says that columns are reordered (desc_act)")
        return groups_over(columns, groups, options.group_size), False
    if contents.tensors[keys["g_idx"]].dtype not in (torch.int32, torch.int64):
        raise CheckpointError(f"its g_idx is {contents.tensors[keys['g_idx']].dtype}, not torch.int32")
    order = contents.read(keys["g_idx"])
    lowest, highest = int(order.min()), int(order.max())
    if lowest < 0 or highest >= groups:
        raise CheckpointError(f"its g_idx names groups {lowest} to {highest}, but its scales are for {groups} groups")
    if highest == 0:  # even with several groups: AutoGPTQ stored zeros where it did not reorder
        return groups_over(columns, groups, options.group_size), False
    size = options.group_size if options.group_size is not None else int(order.bincount().max())
    block = groups_over(columns, groups, size)
    return block, not torch.equal(
        order, torch.arange(columns, dtype=order.dtype, device=order.device) // (block[1] or columns)
    )


# -- zero points --------------------------------------------------------------------------------------------------


def _zero_points(words: Tensor, bits: int, rows: int, *, is_less_one: bool, may_be_symmetric: bool) -> Tensor:
    """Return the zero points (G, rows) uint8 that are packed in ``words``."""
    fields = streams.unpack(as_bytes(words), bits, rows)
    middle = 1 << (bits - 1)
    if may_be_symmetric:
        for stored in (middle, middle - 1):
            if bool((fields == stored).all()):
                return torch.full_like(fields, middle)
    if not is_less_one:
        return fields
    if 32 % bits:
        return (fields + 1) & ((1 << bits) - 1)
    one = sum(1 << at for at in range(0, 32, bits))
    return streams.unpack(as_bytes(words + one), bits, rows)
