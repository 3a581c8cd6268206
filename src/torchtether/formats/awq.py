"""AWQ with 4 bits, as AutoAWQ, AutoRound and GPTQModel write it.

    gemm    m.qweight int32 (K, N / 8)    nibble i of a word is for output ``8 * word + (0, 2, 4, 6, 1, 3, 5, 7)[i]``
            m.qzeros  int32 (G, N / 8)    the same
            m.scales  float (G, N)
    gemv    m.qweight int32 (N, K / 8)    nibbles in order
            m.qzeros  int32 (N, Z)        the same; groups first, then padding
            m.scales  float (N, 8 * Z)

``m.weight`` (N, K) is ``(q - zero) * scale``. Without ``qzeros`` (``zero_point`` false) every zero point is 8.

``version`` in the config says which of the two a module has; without it, gemm.
Source: AutoAWQ 0.2.9, AutoAWQConverter of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import CheckpointError
from ..files import Stored
from ..files.strict_json import short_repr
from ..schemes import Affine
from ..schemes import bits as streams
from ..schemes.blocks import CHUNK, pieces
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
from .rows import Along, all_along
from .words import as_bytes

name = "awq"
evidence = Evidence(methods=(name,), keys=("qweight\n", "qzeros\n"))

GEMM, GEMV = "gemm", "gemv"
OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, out of 8, that each nibble of a gemm word is for."""

_GEMM = ("", GEMM, "exllama", "exllamav2", "ipex")  # kernels that read gemm files
_REFUSED = {
    "gemv_fast": "16-bit words in the order of its kernel, scaled zero points",
    "llm-awq": "16-bit words in the order of its kernel, scaled zero points",
    "marlin": "the order of Marlin's kernel",
}
_LOW = 0x0F0F0F0F  # the low nibble of every byte of a word
_PADDING = {64: 2, 32: 4}
"""Words of zero points are padded to a multiple of this, by group size."""


def recognise(contents: Contents) -> Found | None:
    """Return every module with a ``qweight``.

    Shapes come from its tensors; version and group size come from the config. Without a config, tensors that look like
    gemm are read as gemm, if their shapes determine the group size.
    """
    config, file = _config(contents)
    if config is None:
        return None
    version = str(config.get("version") or config.get("checkpoint_format") or config.get("format") or "").lower()
    if version not in (*_GEMM, GEMV):
        what = f" ({_REFUSED[version]})" if version in _REFUSED else ""
        raise CheckpointError(
            f"AWQ in the version {version[:40]!r}{what} is not supported, only gemm and gemv",
            name=file,
            fix="Use a checkpoint in one of these versions.",
        )
    if str(config.get("pack_method") or "reorder") != "reorder":
        raise CheckpointError(
            f"AWQ with the pack_method {str(config['pack_method'])[:40]!r} is not supported, only with 'reorder'",
            name=file,
            fix="Export it from Quark with pack_method='reorder'.",
        )
    zero_point = config.get("zero_point")
    if zero_point is not None and type(zero_point) is not bool:
        raise CheckpointError(f"zero_point is {short_repr(zero_point)}, not true or false", name=file)
    settings = Settings(options_of(config, file=file), dynamic_overrides(config, file=file))
    return read(contents, settings, GEMV if version == GEMV else GEMM, zero_point)


def read(contents: Contents, settings: Settings, version: str = GEMM, zero_point: bool | None = None) -> Found:
    """Return every module with a ``qweight``, in the layout of ``version``.

    ``zero_point`` is that field of the config: false means that every zero point is 8.
    """
    return read_modules(contents, settings, partial(_entry, version=version, zero_point=zero_point))


def unpack(entry: Entry, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts: nibbles in the order of the columns, zero points with one byte each.

    Raises CheckpointError for zero points other than 8 where the config says ``zero_point: false``.
    """
    assert entry.spec is not None
    rows, columns = entry.shape
    scale = tensors["scales"]
    if entry.options["version"] == GEMV:
        groups = entry.spec.scheme.layout(entry.shape)["scale"].shape[1]
        parts = {"qdata": as_bytes(tensors["qweight"]), "scale": scale[:, :groups].contiguous()}
        zeros = streams.unpack(as_bytes(tensors["qzeros"]), 4, groups) if "qzeros" in tensors else None
    else:
        parts = {"qdata": reordered(tensors["qweight"], rows, columns), "scale": scale.t().contiguous()}
        zeros = zero_points(tensors["qzeros"]).t() if "qzeros" in tensors else None
    if zeros is not None:
        if entry.options["zero_point"] is False and bool((zeros != 8).any()):
            reach = f"from {int(zeros.min())} to {int(zeros.max())}"
            raise CheckpointError(f"its zero points are {reach}, but the config says zero_point: false, which means 8")
        parts["zero_point"] = zeros.contiguous()
    return parts


def rows(entry: Entry, tensors: Mapping[str, Stored]) -> Mapping[str, Along] | None:
    """Return where rows lie: in gemm, 8 rows share a column of words; in gemv, rows are rows."""
    if entry.options["version"] == GEMV:
        return all_along(entry, tensors)
    return {"qweight": Along(1, 1, 8), "qzeros": Along(1, 1, 8), "scales": Along(1)}


def _config(contents: Contents) -> tuple[Mapping[str, Any] | None, str]:
    """Return the config and the name of its file; ``None`` as config if the checkpoint has another format."""
    if contents.method:
        return (contents.quantization if contents.method == name else None), "config.json"
    if not find_modules(contents):
        return None, ""
    old = contents.beside.get("quant_config.json")
    if old is not None and ("w_bit" in old or str(old.get("quant_method")).lower() == name):
        return old, "quant_config.json"
    side = contents.beside.get("quantize_config.json")
    if side is not None:
        is_ours = str(side.get("quant_method") or side.get("method")).lower() == name
        return (side if is_ours else None), "quantize_config.json"
    fits = has_shapes(
        contents, lambda codes, zeros, scales: (scales[0], codes[1]) == zeros and scales[1] == 8 * codes[1]
    )
    return (contents.quantization if fits else None), "config.json"


def _entry(
    contents: Contents, keys: Mapping[str, str], options: Options, *, version: str, zero_point: bool | None
) -> Entry:
    if options.bits not in (None, 4):
        raise CheckpointError(f"the config says {options.bits} bits, but AWQ is supported with 4 bits only")
    codes = matrix(contents, keys, "qweight", (torch.int32,))
    scales = matrix(contents, keys, "scales", FLOATS)
    if version == GEMV:
        if options.group_size is None:
            raise CheckpointError("its scales are padded, and no config has a group_size")
        rows, columns = codes.shape[0], 8 * codes.shape[1]
        size = columns if options.group_size == -1 else options.group_size
        groups, multiple = -(-columns // size), _PADDING.get(size, 1)
        words = -(-groups // (8 * multiple)) * multiple
        scales_shape, zeros_shape = (rows, 8 * words), (rows, words)
        why = f"qweight {codes.shape} of version gemv with group_size {size}"
    else:
        (columns, words), groups = codes.shape, scales.shape[0]
        rows = 8 * words
        scales_shape, zeros_shape = (groups, rows), (groups, words)
        why = f"qweight {codes.shape} of version gemm with {groups} groups"
    check_shape("scales", scales, scales_shape, why)
    if "qzeros" in keys:
        check_shape("qzeros", matrix(contents, keys, "qzeros", (torch.int32,)), zeros_shape, why)
    elif zero_point is not False:
        raise CheckpointError("it has qweight and scales, but no qzeros, and no config says zero_point: false")
    scheme = Affine(
        bits=4,
        signed=False,
        symmetric="qzeros" not in keys,
        block=groups_over(columns, groups, options.group_size),
        scale_dtype=scales.dtype,
    )
    spec = spec_of((rows, columns), compute_dtype(scales.dtype), scheme, name=keys["qweight"])
    used = {role: keys[role] for role in ("qweight", "qzeros", "scales") if role in keys}
    return Entry.of(used, spec, version=version, zero_point=zero_point)


def reordered(words: Tensor, rows: int, columns: int, outputs: Sequence[int] = OUTPUTS) -> Tensor:
    """Return the codes of ``words`` (columns, rows / 8) int32 row by row: (rows, ceil(columns / 2)) uint8.

    ``outputs`` gives the output, out of 8, that each nibble of a word is for. Two columns make a byte: the low nibbles
    of their words give four outputs at once, the high nibbles the other four.
    """
    made = torch.empty((rows // 8, 8, streams.packed_size(columns, 4)), dtype=torch.uint8, device=words.device)
    for start, stop in pieces(0, rows // 8, max(1, 2 * CHUNK // columns)):
        some = F.pad(words[:, start:stop], (0, 0, 0, columns % 2))
        first, second = some[0::2], some[1::2]
        for high in (0, 1):
            pairs = (first >> 4 * high).bitwise_and_(_LOW)
            pairs |= second & ~_LOW if high else (second & _LOW) << 4
            by_output = pairs.view(torch.uint8).t().contiguous().view(stop - start, 4, -1)
            for byte in range(4):
                made[start:stop, outputs[2 * byte + high]] = by_output[:, byte]
    return made.view(rows, -1)


def zero_points(words: Tensor, outputs: Sequence[int] = OUTPUTS) -> Tensor:
    """Return the zero points (G, N) uint8 of ``words`` (G, N / 8); ``outputs`` as in ``reordered``."""
    nibbles = streams.unpack(as_bytes(words), 4, 8 * words.shape[1])
    return nibbles.view(words.shape[0], -1, 8)[..., [outputs.index(output) for output in range(8)]].flatten(1)
