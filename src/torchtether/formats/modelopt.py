"""NVIDIA ModelOpt: ``quant_method: modelopt`` or ``hf_quant_config.json``; scales are named after the weight.

    FP8      k float8_e4m3fn (*lead, N, K), k_scale () or (N,) or (N, 1): q * scale
    NVFP4    k uint8 (*lead, K / 2), low nibble first; k_scale e4m3 (*lead, K / 16); k_scale_2 (), multiplied
    MXFP8    k float8_e4m3fn, k_scale uint8 (*lead, K / 32): exponents
    MXFP4    k uint8 (*lead, K / 2), k_scale uint8 (*lead, K / 32), no k_scale_2

The tensors determine which of these a weight is. ``quant_algo``, or in a MIXED_PRECISION model the entry of the layer
in ``quantized_layers``, must agree, and gives the group size. Lists of excluded modules are not read: weights of those
are plain tensors.

ModelOpt itself rounds the scale of FP8 to the dtype that it decodes to, before it multiplies. Here the stored float32
scale multiplies, as in serving engines, which differs by one unit in the last place at most.
Source: nvidia-modelopt 0.47 torch/export and torch/quantization/qtensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..files.strict_json import short_repr
from ..schemes import ScaledFloat
from .entry import FLOAT8, NOTHING, Contents, Entry, Evidence, Found, check_rows, expect, float8_scheme, spec_of
from .rows import all_along

name = "modelopt"
evidence = Evidence(methods=(name,), files=("hf_quant_config.json",))
rows = all_along

ALGORITHMS = {
    "FP8": "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN": "FP8",
    "NVFP4": "NVFP4",
    "W4A16_NVFP4": "NVFP4",
    "W4A8_NVFP4_FP8": "NVFP4",
    "NVFP4_AWQ": "NVFP4",
    "MXFP8": "MXFP8",
    "W4A8_MXFP4_FP8": "MXFP4",
    "MXFP4": "MXFP4",
}
"""The kind of weights that each of ModelOpt's algorithms has. An algorithm that is not listed is not checked."""

_REFUSED = {"W4A16_AWQ": "int4", "W4A8_AWQ": "int4"}
"""Kinds that are not read, and would be taken for NVFP4: they are uint8 too, two rows to a byte."""

_SPARE = (
    ".input_scale",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".kv_scale",
    ".activation_scale",
    ".input_scale_2",
)
_INPUTS = ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b")


def recognise(contents: Contents) -> Found | None:
    """Return every float8 or uint8 tensor with its scales; codes or scales without the other are a fault."""
    beside = contents.beside.get("hf_quant_config.json", NOTHING).get("quantization")
    if contents.method != name and (contents.method or not isinstance(beside, Mapping)):
        return None
    config = contents.quantization if contents.method else beside
    assert isinstance(config, Mapping)
    found = Found()
    tensors = contents.tensors
    for key, stored in tensors.items():
        if key.endswith(_SPARE):
            found.spare.add(key)
        if key.endswith(("weight_scale", "weight_scale_2")):
            owner = key.removesuffix("_2").removesuffix("_scale")
            if owner not in tensors or tensors[owner].dtype not in (*FLOAT8, torch.uint8):
                held = f"its codes are {tensors[owner].dtype}" if owner in tensors else "no codes"
                found.fault(owner, f"it has a scale ({key}), but {held}", {"scale": key})
                found.spare.update({owner} & tensors.keys())
        is_codes = stored.dtype in FLOAT8 and not key.endswith(("_scale", "_scale_2"))
        if not is_codes and not (stored.dtype == torch.uint8 and key.endswith("weight")):
            continue
        keys = {"qdata": key}
        keys |= {role: k for role, k in (("scale", f"{key}_scale"), ("scale_2", f"{key}_scale_2")) if k in tensors}
        found.add(key, keys, _entry, contents, config, key, keys)
    return found


def unpack(entry: Entry, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts; exponents stored as bytes are viewed as e8m0."""
    assert entry.spec is not None
    layout = entry.spec.scheme.layout(entry.spec.base)
    parts = {role: tensors[role] for role in tensors if role in layout}
    if "exponents" in tensors:
        parts["scale"] = tensors["exponents"].view(torch.float8_e8m0fnu)
    return {role: parts[role].reshape(part.shape) for role, part in layout.items()}


def _entry(contents: Contents, config: Mapping[str, Any], key: str, keys: Mapping[str, str]) -> Entry:
    """Return the entry of codes and their scales. Raise CheckpointError if they cannot be read."""
    tensors = contents.tensors
    module = key.rpartition(".")[0]
    lost = [one for one in _INPUTS if f"{module}.{one}" in tensors]
    if lost:
        raise CheckpointError(f"its layer has a {lost[0]}, which changes what the layer computes and would be lost")
    if "scale" not in keys:
        raise CheckpointError(f"it is {tensors[key].dtype} and has no scale ({key}_scale)")
    codes, scale = tensors[key], tensors[keys["scale"]]
    check_rows(codes.shape)
    is_fp4, is_power = codes.dtype == torch.uint8, scale.dtype == torch.uint8
    kind = ("MXFP4" if is_power else "NVFP4") if is_fp4 else ("MXFP8" if is_power else "FP8")
    own = _options(config, module)
    algorithm = own.get("quant_algo")
    if isinstance(algorithm, str) and algorithm in _REFUSED:
        raise CheckpointError(f"its quant_algo is {algorithm} ({_REFUSED[algorithm]}), which is not supported")
    if isinstance(algorithm, str) and ALGORITHMS.get(algorithm, kind) != kind:
        raise CheckpointError(f"its tensors are {kind}, but its quant_algo is {algorithm}")
    roles = dict(keys)
    shape = (*codes.shape[:-1], codes.shape[-1] * 2) if is_fp4 else codes.shape
    if kind == "FP8":
        scheme = float8_scheme(codes.dtype, scale, shape)
    else:
        group = own.get("group_size") or (16 if kind == "NVFP4" else 32)
        if type(group) is not int or not 0 < group < 2**31:
            raise CheckpointError(f"its group_size is {short_repr(group)}, not a positive integer")
        if shape[-1] % group:
            raise CheckpointError(f"its {shape[-1]} columns are not a multiple of its group_size {group}")
        element = "e2m1" if is_fp4 else FLOAT8[codes.dtype]
        if kind == "NVFP4":
            if "scale_2" not in keys:
                raise CheckpointError(f"its scale is {scale.dtype}, which requires a second scale ({key}_scale_2)")
            roles["global_scale"] = roles.pop("scale_2")
            scheme = ScaledFloat(element, (1, group), torch.float8_e4m3fn, global_scale=True)
        else:
            scheme = ScaledFloat(element, (1, group), torch.float8_e8m0fnu)
            roles["exponents"] = roles.pop("scale")
    if "scale_2" in roles:
        raise CheckpointError(f"its tensors are {kind}, which has no second scale ({keys['scale_2']})")
    layout = scheme.layout(shape)
    dtypes = {"scale": (scheme.scale_dtype,), "global_scale": (torch.float32,), "exponents": (torch.uint8,)}
    shapes = {**{role: part.shape for role, part in layout.items()}, "exponents": layout["scale"].shape}
    expect(tensors, roles, {role: (dtypes[role], shapes[role]) for role in roles if role != "qdata"})
    return Entry.of(roles, spec_of(shape, contents.dtype, scheme, name=key))


def _options(config: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """Return the config of one module: algorithm and group size."""
    if str(config.get("quant_algo")).upper() != "MIXED_PRECISION":
        return config
    layers = config.get("quantized_layers")
    own = layers.get(module) if isinstance(layers, Mapping) else None
    return own if isinstance(own, Mapping) else NOTHING
