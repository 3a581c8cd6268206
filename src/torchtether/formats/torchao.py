"""torchao's safetensors: the components of its tensor subclasses, described by the metadata of the file.

    m._weight_qdata, m._weight_scale, ...   the components of ``m.weight``
    metadata["m.weight"]                    JSON: ``_type``, ``_data`` (its attributes), ``_tensor_data_names``

    Int8Tensor                (qdata - zero_point) * scale, one zero point and scale per block of ``block_size``
    IntxUnpackedToInt8Tensor  the same, with ``target_dtype`` of 1 to 8 bits, one int8 per code; packed when read
    Float8Tensor              qdata * scale
    MXTensor                  small floats under e8m0 scales, E2M1 two to a byte, low nibble first
    NVFP4Tensor               E2M1 under e4m3 scales, times per_tensor_scale

The types are those of a fixed table: no class is imported by a name in the file. Every shard describes some tensors,
and ``tensor_names`` differs from shard to shard, so the descriptions are read and not that list.
Source: torchao 0.18 prototype/safetensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, SchemeError
from ..files.strict_json import parse_object, short_repr
from ..geometry.views import Shape
from ..schemes import Affine, ScaledFloat, Scheme
from ..schemes.bits import pack
from ..schemes.blocks import CHUNK, Block, pieces
from .entry import FLOAT8, FLOATS, Contents, Entry, Evidence, Found, check_dtype, expect, spec_of
from .rows import all_along

name = "torchao"
evidence = Evidence(metadata=("tensor_names",))
rows = all_along

PLAIN = ("Tensor", "torch.Tensor")
_ACTIVATIONS = ("act_quant_scale", "act_quant_zero_point", "act_per_tensor_scale")

Made = tuple[Scheme, Shape]


def recognise(contents: Contents) -> Found | None:
    """Return every tensor that the metadata describe as a subclass; an unknown type is a fault."""
    if contents.method not in ("", name) or "tensor_names" not in contents.metadata:
        return None
    found = Found()
    for key, text in contents.metadata.items():
        if key == "tensor_names" or not text.lstrip().startswith("{") or '"_type"' not in text:
            continue
        keys: dict[str, str] = {}
        try:
            record = parse_object(text, name=key, what="description in the metadata", floats=True)
            kind = record.get("_type")
            if kind in PLAIN:
                continue
            keys = _keys(contents, key, record)
            found.weights[key] = _entry(contents, key, kind, record, keys)
        except (CheckpointError, SchemeError) as error:
            found.fault(key, error.what, keys)
        found.spare.update(keys.values())
    return found


def unpack(entry: Entry, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts as they are stored; codes of less than 8 bits are packed.

    Raises SchemeError for a code out of range.
    """
    assert entry.spec is not None
    scheme = entry.spec.scheme
    layout = scheme.layout(entry.spec.base)
    parts = {role: tensor.reshape(layout[role].shape) for role, tensor in tensors.items() if role != "codes"}
    if "codes" in tensors:
        assert isinstance(scheme, Affine)
        parts["qdata"] = _packed(tensors["codes"], scheme.bits).reshape(layout["qdata"].shape)
    return {role: parts[role] for role in layout}


def _packed(codes: Tensor, bits: int) -> Tensor:
    half = 1 << (bits - 1)
    table = codes.reshape(-1, codes.shape[-1])
    out = codes.new_empty((table.shape[0], -(-codes.shape[-1] * bits // 8)), dtype=torch.uint8)
    for start, stop in pieces(0, table.shape[0], max(1, CHUNK // max(1, table.shape[1]))):
        some = table[start:stop].to(torch.int16) + half
        if bool(((some < 0) | (some >= 2 * half)).any()):
            lowest, highest = int(some.min()) - half, int(some.max()) - half
            raise SchemeError(f"its codes are from {lowest} to {highest}, but int{bits} is from {-half} to {half - 1}")
        out[start:stop] = pack(some.to(torch.uint8), bits)
    return out


# -- the metadata -------------------------------------------------------------------------------------------------


def _keys(contents: Contents, key: str, record: Mapping[str, Any]) -> dict[str, str]:
    """Return the stored key of each component."""
    names = record.get("_tensor_data_names")
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise CheckpointError(f"its _tensor_data_names is {short_repr(names)}, not a list of names")
    module, dot, leaf = key.rpartition(".")
    keys = {one: f"{module}{dot}_{leaf}_{one}" for one in names}
    absent = [one for one, stored in keys.items() if stored not in contents.tensors]
    if absent:
        raise CheckpointError(f"its {absent[0]} ({keys[absent[0]]}) is absent")
    return keys


def _entry(contents: Contents, key: str, kind: Any, record: Mapping[str, Any], keys: Mapping[str, str]) -> Entry:
    """Return the entry of the weight that a description and its components make."""
    if not isinstance(kind, str) or kind not in _TYPES:
        raise CheckpointError(f"its torchao type is {short_repr(kind)}, not one of the supported {', '.join(_TYPES)}")
    data = record.get("_data")
    if not isinstance(data, Mapping):
        raise CheckpointError(f"its _data is {short_repr(data)}, not an object")
    if "act_pre_scale" in keys:
        raise CheckpointError(
            "it has an act_pre_scale, which multiplies the inputs of its layer and would be lost: "
            "fold it into the layer before with torchao"
        )
    if data.get("is_swizzled_scales"):
        raise CheckpointError("its scales are swizzled, which is not supported: save it with is_swizzled_scales=False")
    for role in ("qdata", "scale"):
        if role not in keys:
            raise CheckpointError(f"its {role} is absent")
    if not contents.tensors[keys["qdata"]].shape:
        raise CheckpointError("its codes have no dimensions")
    scheme, shape = _TYPES[kind](contents, data, keys)
    spec = spec_of(shape, _dtype_of(data), scheme, name=key)
    roles = {role: stored for role, stored in keys.items() if role not in _ACTIVATIONS}
    roles = {_RENAMED.get(role, role): stored for role, stored in roles.items()}
    layout = scheme.layout(shape)
    wanted = {role: ((part.dtype or spec.dtype,), part.shape) for role, part in layout.items()}
    if isinstance(scheme, Affine) and scheme.bits < 8:
        roles["codes"] = roles.pop("qdata")
        wanted = {"codes": ((torch.int8,), shape), **{role: wanted[role] for role in layout if role != "qdata"}}
    expect(contents.tensors, roles, wanted)
    if others := roles.keys() - wanted.keys():
        raise CheckpointError(f"it has a {min(others)}, which a {kind} does not have")
    return Entry.of(roles, spec)


_RENAMED = {"per_tensor_scale": "global_scale"}


def _int8(contents: Contents, data: Mapping[str, Any], keys: Mapping[str, str]) -> Made:
    return _affine(contents, data, keys, 8)


def _intx(contents: Contents, data: Mapping[str, Any], keys: Mapping[str, str]) -> Made:
    target = data.get("target_dtype")
    text = target.get("_data") if isinstance(target, Mapping) else target
    bits = re.fullmatch("int([1-8])", text) if isinstance(text, str) else None
    if bits is None:
        raise CheckpointError(f"its target_dtype is {short_repr(text)}, not one of int1 to int8")
    return _affine(contents, data, keys, int(bits[1]))


def _affine(contents: Contents, data: Mapping[str, Any], keys: Mapping[str, str], bits: int) -> Made:
    shape = contents.tensors[keys["qdata"]].shape
    symmetric = "zero_point" not in keys
    return Affine(bits, symmetric=symmetric, block=_block(data, shape), scale_dtype=_scale_dtype(contents, keys)), shape


def _float8(contents: Contents, data: Mapping[str, Any], keys: Mapping[str, str]) -> Made:
    codes = contents.tensors[keys["qdata"]]
    check_dtype("qdata", codes.dtype, FLOAT8)
    return ScaledFloat(FLOAT8[codes.dtype], _block(data, codes.shape), _scale_dtype(contents, keys)), codes.shape


def _mx(contents: Contents, data: Mapping[str, Any], keys: Mapping[str, str]) -> Made:
    elem = data.get("elem_dtype")
    text = elem.get("_data") if isinstance(elem, Mapping) else elem
    elements = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float4_e2m1fn_x2": "e2m1"}
    if not isinstance(text, str) or text not in elements:
        raise CheckpointError(f"its elem_dtype is {short_repr(text)}, not one of {', '.join(elements)}")
    shape = contents.tensors[keys["qdata"]].shape
    shape = (*shape[:-1], shape[-1] * 2) if elements[text] == "e2m1" else shape
    return ScaledFloat(elements[text], (1, _width(data, shape)), torch.float8_e8m0fnu), shape


def _nvfp4(contents: Contents, data: Mapping[str, Any], keys: Mapping[str, str]) -> Made:
    *lead, half = contents.tensors[keys["qdata"]].shape
    shape = (*lead, half * 2)
    has_global = "per_tensor_scale" in keys
    return ScaledFloat("e2m1", (1, _width(data, shape)), torch.float8_e4m3fn, global_scale=has_global), shape


_TYPES: dict[str, Callable[[Contents, Mapping[str, Any], Mapping[str, str]], Made]] = {
    "Int8Tensor": _int8,
    "IntxUnpackedToInt8Tensor": _intx,
    "Float8Tensor": _float8,
    "MXTensor": _mx,
    "NVFP4Tensor": _nvfp4,
}


def _scale_dtype(contents: Contents, keys: Mapping[str, str]) -> torch.dtype:
    dtype = contents.tensors[keys["scale"]].dtype
    check_dtype("scale", dtype, FLOATS)
    return dtype


def _block(data: Mapping[str, Any], shape: Shape) -> Block:
    """Return ``block_size``, the size of a block in every dimension, as the block of a scheme."""
    block = data.get("block_size")
    if not isinstance(block, list) or len(block) != len(shape) or not all(type(n) is int and n > 0 for n in block):
        raise CheckpointError(f"its block_size is {short_repr(block)}, not a block of codes of shape {shape}")
    if tuple(block) == shape:
        return None, None
    rows, columns = block[-2] if len(shape) > 1 else 1, block[-1]
    if any(n != 1 for n in block[:-2]) or any(n % b for n, b in zip(shape, block, strict=True)):
        raise CheckpointError(f"its block_size {block} does not divide the rows and columns of {shape}")
    return rows, (None if columns == shape[-1] else columns)


def _width(data: Mapping[str, Any], shape: Shape) -> int:
    width = data.get("block_size")
    if type(width) is not int or width < 1 or shape[-1] % width:
        raise CheckpointError(f"its block_size is {short_repr(width)}, not a divisor of the {shape[-1]} columns")
    return width


def _dtype_of(data: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that torchao decodes to."""
    dtype = data.get("dtype", data.get("orig_dtype"))
    text = dtype.get("_data") if isinstance(dtype, Mapping) else dtype
    known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
    if not isinstance(text, str) or text not in known:
        raise CheckpointError(f"its dtype is {short_repr(text)}, not one of {', '.join(known)}")
    return known[text]
