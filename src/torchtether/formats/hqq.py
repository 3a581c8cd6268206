"""HQQ: codes ``W_q`` with scales and zeros, and one tensor for each scalar or string of the settings.

    m.W_q           uint8 (R / codes in a byte, group_size): one group of columns per field; the highest bits of the
                    bytes hold the first groups, the lowest the last. With view_as_float the same bytes in a float dtype
    m.scale, .zero  (R, 1) in compute_dtype; a value is round(round(q - zero) * scale) in that dtype
    m.shape         int64 (2,)
    m.nbits, .axis, .group_size, .packing, .compute_dtype, ...    numbers, and strings as uint8 characters

Groups along the columns (axis 1) that do not cross rows are read, packed in 8, 4, 2 or 1 bits. Dtypes are looked up in
a table by name.
Source: hqq 0.2.8 core/quantize.py, core/bitpack.py and core/utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..geometry.views import Shape
from ..schemes.biased import Biased
from .entry import Contents, Entry, Evidence, Found, expect, spec_of
from .words import split_fields

name = "hqq"
evidence = Evidence(methods=(name,), keys=(".W_q\n",))

PACKINGS = {"8bit_u8": 8, "4bit_u8": 4, "2bit_u8": 2, "1bit_u8": 1}
DTYPES = {"torch.bfloat16": torch.bfloat16, "torch.float16": torch.float16, "torch.float32": torch.float32}
_SETTINGS = (
    "W_q shape scale zero nbits axis group_size packing compute_dtype view_as_float unpack_view_dtype quant_scale "
    "quant_zero encoded_state_dict stores_quant_config channel_wise optimize round_zero offload_meta zero_scale"
).split()
_LONGEST = 256  # bytes of one setting


def recognise(contents: Contents) -> Found | None:
    """Return every ``W_q`` with its scales and settings; another packing is a fault, which names it."""
    if contents.method != name and (contents.method or "W_q" not in contents.leaves):
        return None
    modules = [key.removesuffix(".W_q") for key in contents.tensors if key.endswith(".W_q")]
    if not contents.method and not modules:
        return None
    found = Found()
    for module in modules:
        keys = {one: f"{module}.{one}" for one in _SETTINGS if f"{module}.{one}" in contents.tensors}
        found.add(f"{module}.weight", keys, _entry, contents, module, keys)
    for key, stored in contents.tensors.items():
        module, _, leaf = key.rpartition(".")
        if leaf == "stores_quant_config" and f"{module}.W_q" not in contents.tensors and stored.shape == ():
            found.fault(f"{module}.weight", "it has settings, but no W_q", {"setting": key})
    return found


def unpack(entry: Entry, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts: codes row by row, and the bias, which is the negated zero."""
    assert entry.spec is not None
    layout = entry.spec.scheme.layout(entry.spec.base)
    scheme = entry.spec.scheme
    assert isinstance(scheme, Biased)
    bits, columns = scheme.bits, entry.options["group_size"]
    packed = tensors["packed"].contiguous().view(torch.uint8).view(-1, columns)
    codes = split_fields(packed, bits, range(8 - bits, -1, -bits), packed.shape[0] * 8 // bits)
    parts = {"qdata": codes, "scale": tensors["scales"], "bias": -tensors["zeros"]}
    return {role: part.reshape(layout[role].shape) for role, part in parts.items()}


# -- settings -----------------------------------------------------------------------------------------------------


def _entry(contents: Contents, module: str, keys: Mapping[str, str]) -> Entry:
    """Return the entry of one module.

    Raise CheckpointError if settings or tensors are absent, contradict each other, or are of a kind that is not read.
    """
    for one in ("shape", "scale", "zero", "packing", "axis", "compute_dtype"):
        if one not in keys:
            held = "; a combined zero_scale is not supported" if "zero_scale" in keys else ""
            raise CheckpointError(f"its {one} is absent{held}")
    for one in ("quant_scale", "quant_zero"):
        if one in keys and _number(contents, keys[one]):
            raise CheckpointError(f"its {one} is set, but quantized scales and zeros are not supported")
    packing, axis = _text(contents, keys["packing"]), _number(contents, keys["axis"])
    if packing not in PACKINGS:
        raise CheckpointError(f"its packing is {packing!r}, not one of {', '.join(PACKINGS)}")
    if axis != 1:
        raise CheckpointError(f"its axis is {axis}, and only groups of columns (axis 1) are supported")
    words = _text(contents, keys["compute_dtype"])
    if words not in DTYPES:
        raise CheckpointError(f"its compute_dtype is {words!r}, not one of {', '.join(DTYPES)}")
    dtype = DTYPES[words]
    shape = _shape(contents, keys["shape"])
    group_size = _number(contents, keys["group_size"]) if "group_size" in keys else shape[-1]
    if not 0 < group_size <= shape[-1] or shape[-1] % group_size:
        raise CheckpointError(f"its group_size is {group_size}, which does not divide the columns of shape {shape}")
    bits = PACKINGS[packing]
    if group_size * bits % 8 and group_size != shape[-1]:
        raise CheckpointError(f"its group_size is {group_size}, but groups of {bits}-bit codes must fill whole bytes")
    groups = shape[0] * shape[1] // group_size
    if groups * bits % 8:
        raise CheckpointError(f"it has {groups} groups, but codes of {bits} bits require a multiple of {8 // bits}")
    stored = contents.tensors[keys["W_q"]]
    view_as_float = "view_as_float" in keys and _number(contents, keys["view_as_float"])
    wanted = dtype if view_as_float else torch.uint8
    count = group_size * groups * bits // 8
    if stored.dtype != wanted or stored.nbytes != count:
        raise CheckpointError(
            f"its W_q is {stored.dtype} of shape {stored.shape}, but shape {shape} in {packing} needs {wanted} of "
            f"{count} bytes"
        )
    roles = {"packed": keys["W_q"], "scales": keys["scale"], "zeros": keys["zero"]}
    expect(contents.tensors, roles, {role: ((dtype,), (groups, 1)) for role in ("scales", "zeros")})
    scheme = Biased(bits, (1, group_size), dtype, dtype, bias_first=True)
    return Entry.of(roles, spec_of(shape, dtype, scheme, name=f"{module}.weight"), group_size=group_size)


def _setting(contents: Contents, key: str) -> Tensor:
    stored = contents.tensors[key]
    if stored.nbytes > _LONGEST:
        raise CheckpointError(f"its setting {key} takes {stored.nbytes} bytes, but {_LONGEST} are the limit")
    if stored.dtype not in (torch.uint8, torch.int32, torch.int64):
        raise CheckpointError(f"its setting {key} is {stored.dtype}, not integers")
    return contents.read(key)


def _number(contents: Contents, key: str) -> int:
    value = _setting(contents, key)
    if value.numel() != 1:
        raise CheckpointError(f"its setting {key} has shape {tuple(value.shape)}, not one number")
    return int(value.item())


def _text(contents: Contents, key: str) -> str:
    return "".join(chr(n) for n in _setting(contents, key).reshape(-1).tolist() if 32 <= n < 127)


def _shape(contents: Contents, key: str) -> Shape:
    shape = tuple(_setting(contents, key).reshape(-1).tolist())
    if len(shape) != 2 or not all(0 < n < 2**31 for n in shape):
        raise CheckpointError(f"its shape is {shape}, not two positive integers")
    return shape
