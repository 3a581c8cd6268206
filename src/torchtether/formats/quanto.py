"""optimum-quanto: the components of its tensor subclasses, with ``quanto_qmap.json`` or ``_quanto_qmap`` of the config.

    m.weight._data         8 bits: int8 or float8 (N, ...); ``_scale`` (N, 1, ...) or (): q * scale
    m.weight._data._data   4 and 2 bits: uint8 (ceil(R * bits / 8), group_size), R groups of group_size columns;
                           group r is field r // rows of the byte, counted from the lowest bits
    m.weight._scale        (R, 1) with packed codes, like ``_shift``: round(round(scale * q) - shift) in their dtype

Files with packed codes do not store the shape of the weight, only the number of groups. The module knows the shape:
``fit`` gives the weight any shape with the same number of elements whose rows are whole groups. Until then the weight
has as many rows as the bias of its module, or else one group in each row.
Source: optimum-quanto 0.2.7 tensor/weights and tensor/packed.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..geometry.views import Shape
from ..schemes import Affine, ScaledFloat, Scheme
from ..schemes.biased import Biased
from .entry import FLOAT8, FLOATS, GUESSED, Contents, Entry, Evidence, Found, check_dtype, expect, spec_of
from .words import split_fields

name = "quanto"
evidence = Evidence(methods=(name,), files=("quanto_qmap.json",), config=("_quanto_qmap",), keys=("._data\n",))

BITS = {"qint4": 4, "qint2": 2}
DATA, PACKED = "._data", "._data._data"


def recognise(contents: Contents) -> Found | None:
    """Return every ``_data`` with its scale (and shift); an incomplete set of components is a fault."""
    qmap = _map(contents)
    ends = (f".weight{DATA}", f".weight{PACKED}")
    guessed = not contents.method and "_data" in contents.leaves and any(key.endswith(ends) for key in contents.tensors)
    if qmap is None and contents.method != name and not guessed:
        return None
    found = Found()
    for key in contents.tensors:
        for suffix in (PACKED, DATA, "._scale", "._shift"):
            if key.endswith(suffix):
                owner = key.removesuffix(suffix)
                if owner not in found.weights and owner not in found.faults:
                    roles = {"packed": PACKED, "qdata": DATA, "scales": "._scale", "shifts": "._shift"}
                    keys = {role: owner + end for role, end in roles.items() if owner + end in contents.tensors}
                    found.add(owner, keys, _entry, contents, qmap or {}, owner, keys)
                break
    for owner in (*found.weights, *found.faults):
        module = owner.rpartition(".")[0]
        found.spare.update({f"{module}.input_scale", f"{module}.output_scale"} & contents.tensors.keys())
    return found


def unpack(entry: Entry, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts; packed codes become codes row by row, and the bias is the negated shift."""
    assert entry.spec is not None
    layout = entry.spec.scheme.layout(entry.spec.base)
    if "packed" not in tensors:
        scale = tensors["scale"] if "scale" in tensors else tensors["scales"].expand(layout["scale"].shape).contiguous()
        return {"qdata": tensors["qdata"], "scale": scale.reshape(layout["scale"].shape)}
    scheme = entry.spec.scheme
    assert isinstance(scheme, Biased)
    packed, scale = tensors["packed"], tensors["scales"]
    codes = split_fields(packed, scheme.bits, range(0, 8, scheme.bits), scale.numel())
    parts = {"qdata": codes, "scale": scale, "bias": -tensors["shifts"]}
    return {role: part.reshape(layout[role].shape) for role, part in parts.items()}


def fit(entry: Entry, shape: Shape) -> Entry | None:
    """Return the same weight in ``shape``; ``None`` if ``shape`` has another size, or groups would cross rows."""
    spec = entry.spec
    if "packed" not in entry.keys or spec is None or not shape:
        return None
    assert isinstance(spec.scheme, Biased)
    group = entry.options["group_size"]
    if math.prod(shape) != math.prod(spec.shape) or not _are_rows(shape[-1], group, spec.scheme.bits):
        return None
    return Entry.of(entry.keys, spec_of(shape, spec.dtype, spec.scheme, name=entry.keys["packed"]), group_size=group)


def _are_rows(columns: int, group: int, bits: int) -> bool:
    """Return whether rows are whole groups, and no byte holds codes of two groups."""
    return columns == group or (columns % group == 0 and group * bits % 8 == 0)


def _map(contents: Contents) -> Mapping[str, Any] | None:
    """Return quanto's map from modules to their qtypes; ``None`` without one."""
    beside = contents.beside.get("quanto_qmap.json")
    own = contents.config.get("_quanto_qmap")
    return beside if beside is not None else own if isinstance(own, Mapping) else None


def _entry(contents: Contents, qmap: Mapping[str, Any], owner: str, keys: Mapping[str, str]) -> Entry:
    """Return the entry of a weight with these components. Raise CheckpointError if it cannot be read."""
    qmap_entry = qmap.get(owner.rpartition(".")[0])
    qtype = qmap_entry.get("weights") if isinstance(qmap_entry, Mapping) else None
    qtype = qtype if qtype is None else str(qtype)[:40]
    if ("packed" in keys) == ("qdata" in keys):
        held = f"both {DATA} and {PACKED}" if "qdata" in keys else f"neither {DATA} nor {PACKED}"
        raise CheckpointError(f"it has {held}")
    if "scales" not in keys:
        raise CheckpointError("its _scale is absent")
    check_dtype("_scale", contents.tensors[keys["scales"]].dtype, FLOATS)
    return (_packed if "packed" in keys else _bytes)(contents, owner, keys, qtype)


def _bytes(contents: Contents, owner: str, keys: Mapping[str, str], qtype: str | None) -> Entry:
    """Return the entry of a weight with one byte for each code."""
    codes, scale = (contents.tensors[keys[role]] for role in ("qdata", "scales"))
    if "shifts" in keys:
        raise CheckpointError("it has a _shift, which 8-bit codes do not have")
    if qtype in BITS:
        raise CheckpointError(f"it is stored as {codes.dtype}, but the quantization map says {qtype}")
    if not codes.shape:
        raise CheckpointError("its codes have no dimensions")
    one = math.prod(scale.shape) == 1
    rows = (codes.shape[0], *(1 for _ in codes.shape[1:]))
    if not one and scale.shape != rows:
        raise CheckpointError(f"its _scale has shape {scale.shape}, not {rows}")
    block = (None, None) if one else (1, None)
    scheme: Scheme
    if codes.dtype == torch.int8:
        scheme = Affine(block=block, scale_dtype=scale.dtype)
    elif codes.dtype in FLOAT8:
        scheme = ScaledFloat(FLOAT8[codes.dtype], block, scale.dtype)
    else:
        raise CheckpointError(f"its codes are {codes.dtype}, not torch.int8 or float8")
    spec = spec_of(codes.shape, scale.dtype, scheme, name=owner)
    is_part = math.prod(scheme.layout(codes.shape)["scale"].shape) == math.prod(scale.shape)
    return Entry.of({"qdata": keys["qdata"], "scale" if is_part else "scales": keys["scales"]}, spec)


def _packed(contents: Contents, owner: str, keys: Mapping[str, str], qtype: str | None) -> Entry:
    """Return the entry of a weight with several codes in each byte."""
    tensors = contents.tensors
    packed, scale = (tensors[keys[role]] for role in ("packed", "scales"))
    if "shifts" not in keys:
        raise CheckpointError("its _shift is absent")
    if packed.dtype != torch.uint8 or len(packed.shape) != 2 or 0 in packed.shape:
        raise CheckpointError(f"its codes are {packed.dtype} of shape {packed.shape}, not a matrix of torch.uint8")
    groups = math.prod(scale.shape)
    expect(tensors, keys, {"scales": ((scale.dtype,), (groups, 1)), "shifts": ((scale.dtype,), (groups, 1))})
    if qtype is not None and qtype not in BITS:
        raise CheckpointError(f"its codes are packed, but the quantization map says {qtype}")
    bits = [n for n in BITS.values() if -(-groups * n // 8) == packed.shape[0] and qtype in (None, f"qint{n}")]
    if len(bits) != 1:
        kinds = f"as {qtype} stores them" if qtype else "as exactly one of qint4 and qint2 stores them"
        raise CheckpointError(f"its {packed.shape[0]} rows of bytes are not {groups} groups {kinds}")
    group_size = packed.shape[1]
    bias = tensors.get(f"{owner.rpartition('.')[0]}.bias")
    rows = bias.shape[0] if bias is not None and len(bias.shape) == 1 else 0
    is_known = bool(rows) and groups % rows == 0 and _are_rows(groups // rows * group_size, group_size, bits[0])
    rows = rows if is_known else groups
    scheme = Biased(bits[0], (1, group_size), scale.dtype, scale.dtype)
    spec = spec_of((rows, groups // rows * group_size), scale.dtype, scheme, name=owner)
    return Entry.of(dict(keys), spec, group_size=group_size, **{GUESSED: not is_known})
