"""SINQ: integers with scales for groups and for columns; settings are in one JSON file beside the index.

    m.W_q                   (R / codes in a word, group_size): one group of columns per field; the highest bits of the
                            words hold the first groups, the lowest the last. uint8, or int32 of 30 bits for 3, 5 and 6
                            bits
    m.meta.scale, .zero     (R, 1), or 8-bit codes: .x * .s + .m in the dtype of .s, laid out (R, 1)
    m.meta.scale2           (1, K): one for each column
    model.safetensors.index.json.meta.json    by module: shape, packing, method, compute_dtype, ...

A value is ``((q - zero) * scale) * scale2``. Each step is rounded to the wider one of compute_dtype and the dtype of
scales and zeros, and the result once more to compute_dtype. Only integers with ``tiling_mode="1D"`` are read.
Source: sinq 0.2.0 quantizer.py (quantize, dequantize, rtn8, dq8), bitpack.py, patch_model.py
(save_weights_safetensors); transformers 5.23 integrations/sinq.py, whose models are saved by the same functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError, SchemeError
from ..files.opening import SINQ_SETTINGS
from ..files.strict_json import short_repr
from ..geometry.views import Shape
from ..schemes import Affine, Biased, ColumnScaled, scheme_to_text
from ..schemes import bits as streams
from ..schemes.column_scaled import COLUMNS
from ..weights.spec import WeightSpec
from ..weights.weight import Weight
from .entry import NOTHING, Contents, Entry, Evidence, Found, Wanted, expect, refuse_other, spec_of
from .hqq import DTYPES
from .words import split_fields

name = "sinq"
evidence = Evidence(methods=(name,), keys=(".meta.scale2\n",))

PACKINGS = {
    "8bit_u8": (8, 1),
    "6bit_32": (6, 5),
    "5bit_32": (5, 6),
    "4bit_u8": (4, 2),
    "3bit_32": (3, 10),
    "2bit_u8": (2, 4),
    "1bit_u8": (1, 8),
}
"""Bits of a code, and codes in a word, by the name of the packing."""

_TABLES = ("nf4", "nf3")


def recognise(contents: Contents) -> Found | None:
    """Return every ``W_q`` with its ``meta``; table codes and tiles of two dimensions are faults."""
    if contents.method != name and (contents.method or ".meta.scale2\n" not in contents.key_text):
        return None
    found, settings = Found(), contents.beside.get(SINQ_SETTINGS, NOTHING)
    modules = {key.removesuffix(".W_q"): {"packed": key} for key in contents.tensors if key.endswith(".W_q")}
    for key in contents.tensors:
        module, dot, role = key.partition(".meta.")
        if dot and module in modules:
            modules[module][role] = key
    for module, keys in modules.items():
        found.add(f"{module}.weight", keys, _entry, contents, module, keys, settings.get(module))
    return found


def unpack(entry: Entry, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts: codes row by row, the bias, which is the negated zero, and the scales of columns."""
    assert entry.spec is not None
    layout = entry.spec.scheme.layout(entry.spec.base)
    (bits, count), words = entry.options["packing"], tensors["packed"]
    shifts, groups = range(bits * (count - 1), -1, -bits), entry.options["groups"]
    if bits * words.shape[-1] % 8:  # a group ends within a byte
        fields = [((words >> shift) & ((1 << bits) - 1)).to(torch.uint8) for shift in shifts]
        qdata = streams.pack(torch.cat(fields)[:groups].reshape(-1, entry.shape[1]), bits)
    else:
        qdata = split_fields(words, bits, shifts, groups)
    parts = {
        "qdata": qdata,
        "scale": _numbers(tensors, "scale"),
        "bias": -_numbers(tensors, "zero"),
        COLUMNS: tensors["scale2"].float(),
    }
    return {role: part.reshape(layout[role].shape) for role, part in parts.items()}


def _numbers(tensors: Mapping[str, Tensor], role: str) -> Tensor:
    """Return scales or zeros, decoded if they are stored as codes."""
    if role in tensors:
        return tensors[role]
    scale, offset = (tensors[f"{role}.{one}"].reshape(-1) for one in "sm")
    return tensors[f"{role}.x"].reshape(-1, len(scale)).to(scale.dtype) * scale + offset


# -- settings -----------------------------------------------------------------------------------------------------


def _entry(contents: Contents, module: str, keys: Mapping[str, str], settings: Any) -> Entry:
    """Return the entry of one module.

    Raise CheckpointError if settings or tensors are absent, contradict each other, or are of a kind that is not read.
    """
    meta = settings.get("meta") if isinstance(settings, Mapping) else None
    if not isinstance(meta, Mapping):
        raise CheckpointError(f"its settings are absent from {SINQ_SETTINGS}")
    packing, dtype = _known(meta, "packing", PACKINGS), DTYPES[_known(meta, "compute_dtype", DTYPES)]
    method = str(meta.get("method"))[:60]
    if meta.get("view_as_float") or any(one in method.lower() for one in _TABLES):
        raise CheckpointError(f"its method is {method!r}, but table codes and codes viewed as floats are not supported")
    shape = _shape(meta.get("shape"))
    words = contents.tensors[keys["packed"]]
    group_size = words.shape[-1] if len(words.shape) == 2 else 0
    if not 0 < group_size <= shape[1] or shape[1] % group_size:
        raise CheckpointError(f"its W_q has shape {words.shape}, whose columns do not divide those of {shape}")
    groups, (bits, count) = shape[0] * (shape[1] // group_size), PACKINGS[packing]
    wanted: dict[str, Wanted] = {
        "packed": ((torch.uint8 if packing.endswith("u8") else torch.int32,), (-(-groups // count), group_size)),
        "scale2": (tuple(DTYPES.values()), (1, shape[1])),
    }
    stored: list[torch.dtype] = []
    for role in ("scale", "zero"):
        key = keys.get(role) or keys.get(f"{role}.s")
        if key is None:
            raise CheckpointError(f"its {role} is absent")
        stored.append(contents.tensors[key].dtype)
        if role in keys:
            wanted[role] = (tuple(DTYPES.values()), (groups, 1))
            continue
        if _shape(meta.get(f"{role}.shape")) != (groups, 1):
            raise CheckpointError(f"its {role} has shape {short_repr(meta.get(f'{role}.shape'))}, not ({groups}, 1)")
        tile = 32 if role == "scale" else groups  # rows of codes; each column has its own scale (.s) and offset (.m)
        if groups % tile:
            raise CheckpointError(f"it has {groups} {role} numbers, not a multiple of {tile}")
        row = (1, groups // tile)
        wanted |= {f"{role}.x": ((torch.uint8,), (tile, row[1]))}
        wanted |= {f"{role}.{one}": (tuple(DTYPES.values()), row) for one in "sm"}
    roles = {role: key for role, key in keys.items() if role in wanted}
    expect(contents.tensors, roles, wanted)
    if len({*stored, *(contents.tensors[keys[f"{r}.m"]].dtype for r in ("scale", "zero") if f"{r}.m" in roles)}) > 1:
        raise CheckpointError(f"its scales and zeros are {stored[0]} and {stored[1]}, but must have one dtype")
    arithmetic = torch.promote_types(dtype, stored[0])
    scheme = ColumnScaled(Biased(bits, (1, group_size), stored[0], arithmetic, bias_first=True))
    return Entry.of(roles, spec_of(shape, dtype, scheme, name=f"{module}.weight"), packing=(bits, count), groups=groups)


def _known(meta: Mapping[str, Any], setting: str, known: Iterable[str]) -> str:
    """Return a setting that is one of ``known``. Raise CheckpointError for any other value."""
    value = meta.get(setting)
    if not isinstance(value, str) or value not in known:
        raise CheckpointError(f"its {setting} is {short_repr(value)}, not one of {', '.join(known)}")
    return value


def _shape(value: Any) -> Shape:
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and 0 < n < 2**31 for n in value):
        raise CheckpointError(f"its shape is {short_repr(value)}, not two positive integers")
    return tuple(value)


# -- writing ------------------------------------------------------------------------------------------------------

is_indexed = True
"""The package takes file names from an index, even if there is only one file."""


class _Way(NamedTuple):
    """Storage of a weight: its packing, its group size, and the dtype of scales and zeros."""

    packing: str
    group_size: int
    dtype: torch.dtype


def layout(name: str, spec: WeightSpec) -> dict[str, tuple[torch.dtype, Shape]]:
    """Return what ``pack`` stores: words of codes, and scales, zeros and scales of columns as floats."""
    way = _way(name, spec)
    rows, columns = spec.shape
    groups, (_, count) = rows * (columns // way.group_size), PACKINGS[way.packing]
    words = torch.uint8 if way.packing.endswith("u8") else torch.int32
    module = name.removesuffix(".weight")
    return {
        f"{module}.W_q": (words, (-(-groups // count), way.group_size)),
        f"{module}.meta.scale": (way.dtype, (groups, 1)),
        f"{module}.meta.zero": (way.dtype, (groups, 1)),
        f"{module}.meta.scale2": (torch.float32, (1, columns)),
    }


def pack(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return the tensors to store for ``weight``, by key: the inverse of ``recognise`` and ``unpack``.

    >>> import torch, torchtether as tt
    >>> sorted(pack("m.weight", tt.Weight.encode(torch.eye(4), tt.sinq(group_size=4))))
    ['m.W_q', 'm.meta.scale', 'm.meta.scale2', 'm.meta.zero']
    """
    assert isinstance(weight, Weight)
    way, made = _way(name, weight.spec), layout(name, weight.spec)
    parts = {role: part.detach() for role, part in weight.parts.items()}
    scheme, keys = weight.scheme, list(made)
    assert isinstance(scheme, ColumnScaled)
    inner, scale = scheme.scheme, parts["scale"]
    if isinstance(inner, Biased):
        zero = -parts["bias"].to(way.dtype)
    else:
        assert isinstance(inner, Affine)
        middle = 1 << (inner.bits - 1)
        zero = parts["zero_point"].to(way.dtype) if "zero_point" in parts else torch.zeros_like(scale, dtype=way.dtype)
        zero = zero + (middle if inner.signed or inner.symmetric else 0)
    (bits, count), (dtype, shape) = PACKINGS[way.packing], made[keys[0]]
    words = torch.zeros(shape, dtype=dtype, device=scale.device)
    codes = _codes(parts["qdata"], bits, weight.shape[1]).reshape(-1, way.group_size)
    for i in range(count):
        some = codes[i * shape[0] : (i + 1) * shape[0]]
        words[: some.shape[0]] |= some.to(dtype) << (bits * (count - 1 - i))
    tensors = (words, scale.to(way.dtype), zero, parts[COLUMNS])
    return {key: tensor.reshape(made[key][1]) for key, tensor in zip(keys, tensors, strict=True)}


def announce(specs: Mapping[str, WeightSpec], plain: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """Return the ``quantization_config`` that transformers reads, and the settings file with each module."""
    settings: dict[str, Any] = {}
    for name, spec in specs.items():
        way = _way(name, spec)
        settings[name.removesuffix(".weight")] = {
            "meta": {
                "nbits": PACKINGS[way.packing][0],
                "group_size": way.group_size,
                "shape": list(spec.shape),
                "axis": 1,
                "packing": way.packing,
                "method": "sinq",
                "compute_dtype": str(spec.dtype),
                "unpack_view_dtype": "torch.uint8" if way.packing.endswith("u8") else "torch.int32",
                "view_as_float": False,
                "awq_scale": None,
            }
        }
    if not settings:
        return {}
    first = next(iter(settings.values()))["meta"]
    left = {key.removesuffix(".weight") for key in plain if key.endswith(".weight")}
    config = {
        "quant_method": "sinq",
        "nbits": first["nbits"],
        "group_size": first["group_size"],
        "tiling_mode": "1D",
        "method": "sinq",
        "modules_to_not_convert": sorted(left) or None,
    }
    return {"config.json": {"quantization_config": config}, SINQ_SETTINGS: settings}


holds_embeddings = False


def announce_others(announced: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Raise SchemeError: SINQ builds its modules for linear layers alone."""
    refuse_other(names[0], "SINQ reads no other quantized weights")


def _way(name: str, spec: WeightSpec) -> _Way:
    """Return how a Weight of this spec is stored. Raise SchemeError if the format cannot express it."""
    scheme, shape = spec.scheme, spec.shape
    inner = scheme.scheme if isinstance(scheme, ColumnScaled) else None
    bits, block, stored, arithmetic = 0, None, torch.float32, torch.float32
    if isinstance(inner, Affine) and inner.unit == 1 and not inner.act_order:
        bits, block, stored = inner.bits, inner.block, inner.scale_dtype
    elif isinstance(inner, Biased) and inner.bias_first:
        bits, block, stored, arithmetic = inner.bits, inner.block, inner.scale_dtype, inner.arithmetic
    packing = {known: packing for packing, (known, _) in PACKINGS.items()}.get(bits)
    size = (block[1] or shape[-1]) if block and block[0] == 1 else 0
    stored = stored if torch.promote_types(spec.dtype, stored) == arithmetic else arithmetic
    fits = len(shape) == 2 and spec.is_contiguous and size and not shape[-1] % size and name.endswith(".weight")
    if not packing or not fits or torch.promote_types(spec.dtype, stored) != arithmetic:
        raise SchemeError(
            f"SINQ cannot store {scheme_to_text(scheme)} of {spec.dtype} and shape {tuple(shape)}",
            name=name,
            fix="Quantize matrices with tt.sinq(), in groups that divide their columns.",
        )
    return _Way(packing, size, stored)


def _codes(stored: Tensor, bits: int, columns: int) -> Tensor:
    """Return unsigned codes, a byte each: streams already have their offset, int8 does not."""
    if stored.dtype == torch.int8:
        return stored.view(torch.uint8).bitwise_xor(0x80)
    return streams.unpack(stored, bits, columns)
