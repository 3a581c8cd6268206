"""Read ComfyUI's files: find the weight of each layer, and unpack its codes and scales."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..._dtypes import dtype_name
from ...errors import CheckpointError
from ...files import Stored
from ...files.strict_json import parse_object, short_repr
from ...geometry.views import Shape
from ...schemes import Affine, ScaledFloat, Scheme
from ...schemes.blocks import CHUNK, Block, pieces
from ..entry import FLOAT8, FLOATS, Contents, Entry, Found, Wanted, check_rows, expect, spec_of
from ..rows import Along

SETTINGS, METADATA, MARKER, OLD_SCALE = ".comfy_quant", "_quantization_metadata", "scaled_fp8", ".scale_weight"

FLOAT8_KINDS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
WIDTH = {"mxfp8": 32, "nvfp4": 16}  # columns under one scale; rows and columns are padded to multiples of it
TILED = {
    "mxfp8": ScaledFloat("e4m3", (1, WIDTH["mxfp8"]), torch.float8_e8m0fnu),
    "nvfp4": ScaledFloat("e2m1", (1, WIDTH["nvfp4"]), torch.float8_e4m3fn, global_scale=True),
}
KINDS = (*FLOAT8_KINDS, "int8_tensorwise", "int8_blockwise", *TILED)
_PREFIXES = ("", "model.diffusion_model.", "model.model.", "net.")  # of keys; the metadata may name layers without them
_SPARE = (".input_scale", ".scale_input")
_LONGEST = 2**16  # bytes of the settings of a layer


def recognise(contents: Contents) -> Found | None:
    """Return every weight with settings, or in older files with a scale. A scale without settings is a fault."""
    tensors, leaves = contents.tensors, contents.leaves
    marked = MARKER in leaves
    old = [key.removesuffix(OLD_SCALE) for key in tensors if key.endswith(OLD_SCALE)]
    old = [layer for layer in old if marked or _is_float8(contents, layer)]
    if contents.method or not (METADATA in contents.metadata or SETTINGS[1:] in leaves or marked or old):
        return None
    found = Found()
    listed = _listed(contents)
    layers = dict.fromkeys((*listed, *old))
    for key, stored in tensors.items():
        layer, dot, leaf = key.rpartition(".")
        if leaf == MARKER or key.endswith(_SPARE):
            found.spare.add(key)
        elif dot + leaf == SETTINGS:
            layers[layer] = None
        elif leaf == "weight_scale":
            codes = tensors.get(f"{layer}.weight", stored)
            if dot and (codes is stored or codes.dtype not in FLOATS):
                layers[layer] = None
    for layer in layers:
        _add(found, contents, layer, listed)
    return found


def unpack(entry: Entry, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts without padding: E2M1 codes with the low nibble first, scales row by row."""
    assert entry.spec is not None
    scheme, base = entry.spec.scheme, entry.spec.base
    parts = {}
    for role, part in scheme.layout(base).items():
        dtype = part.dtype or entry.dtype
        if role == "scale" and "tiled_scale" in tensors:
            first, _ = entry.options.get("rows", (0, 0))
            tensor = _untiled(tensors["tiled_scale"].view(torch.uint8), base, part.shape, first)
        else:
            tensor = tensors[role]
        if role == "qdata" and scheme == TILED["nvfp4"]:
            tensor = swapped(tensor, part.shape, base[-1])
        elif role == "qdata" and tensor.shape != part.shape:
            tensor = tensor[..., : base[-2], : base[-1]]
        tensor = tensor.view(dtype) if tensor.dtype == torch.uint8 else tensor
        parts[role] = tensor.reshape(part.shape).contiguous()
    return parts


def fit(entry: Entry, shape: Shape) -> Entry | None:
    """Return the same weight cut to ``shape``; ``None`` if padding ``shape`` does not give the stored shape."""
    spec, stored = entry.spec, entry.options.get("stored")
    if spec is None or stored is None or len(shape) != len(stored):
        return None
    multiple = entry.options["multiple"]
    padded = tuple(-(-n // multiple) * multiple for n in shape[-2:])
    if (*shape[:-2], *padded) != stored:
        return None
    return Entry.of(entry.keys, spec_of(shape, spec.dtype, spec.scheme, name=entry.keys["qdata"]), **entry.options)


def rows(entry: Entry, tensors: Mapping[str, Stored]) -> Mapping[str, Along] | None:
    """Return where rows lie: along dim 0 of codes and scales; tiled scales of a matrix are needed whole."""
    assert entry.spec is not None
    base, found = entry.spec.base, {}
    for role, key in entry.keys.items():
        shape = tensors[key].shape
        if math.prod(shape) == 1 or (role == "tiled_scale" and len(base) == 2):
            continue
        if not shape or (shape[0] != base[0] and role != "qdata"):
            return None
        found[role] = Along()
    return found


# -- recognising --------------------------------------------------------------------------------------------------


def _listed(contents: Contents) -> dict[str, Any]:
    """Return the settings in the metadata of the file, by layer, for the layers that the file has."""
    if METADATA not in contents.metadata:
        return {}
    layers = parse_object(contents.metadata[METADATA], name=METADATA, what="metadata", floats=True).get("layers")
    if not isinstance(layers, dict):
        raise CheckpointError(f"layers is {short_repr(layers)}, not an object", name=METADATA)
    listed = {}
    for layer, settings in layers.items():
        for prefix in _PREFIXES:
            if f"{prefix}{layer}.weight" in contents.tensors or f"{prefix}{layer}.weight_scale" in contents.tensors:
                listed[f"{prefix}{layer}"] = settings
                break
    return listed


def _is_float8(contents: Contents, layer: str) -> bool:
    stored = contents.tensors.get(f"{layer}.weight")
    return stored is not None and stored.dtype in FLOAT8


def _settings(contents: Contents, layer: str, listed: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a layer. Raise CheckpointError if there are none, or they are no JSON object."""
    tensors, key = contents.tensors, f"{layer}{SETTINGS}"
    if layer in listed:
        if not isinstance(listed[layer], dict):
            raise CheckpointError(f"its settings are {short_repr(listed[layer])}, not an object")
        return listed[layer]  # type: ignore[no-any-return]
    if key in tensors:
        if tensors[key].dtype != torch.uint8 or tensors[key].nbytes > _LONGEST:
            held = f"{tensors[key].dtype} of {tensors[key].nbytes} bytes"
            raise CheckpointError(f"its settings {key} are {held}, not at most {_LONGEST} bytes of JSON")
        text = bytes(contents.read(key).reshape(-1).tolist())
        return parse_object(text, name=key, what=f"JSON in {key}", floats=True)
    if f"{layer}{OLD_SCALE}" in tensors:
        codes = tensors.get(f"{layer}.weight")
        return {"format": dtype_name(codes.dtype) if codes else "float8_e4m3fn"}
    raise CheckpointError(f"it has a scale ({layer}.weight_scale), but no settings ({key})")


def _add(found: Found, contents: Contents, layer: str, listed: Mapping[str, Any]) -> None:
    tensors = contents.tensors
    weight = f"{layer}.weight"
    roles = {"qdata": weight, "scale": f"{weight}_scale", "global_scale": f"{weight}_scale_2"}
    keys = {role: key for role, key in roles.items() if key in tensors}
    if f"{layer}{OLD_SCALE}" in tensors:
        keys.setdefault("scale", f"{layer}{OLD_SCALE}")
    found.spare |= {f"{layer}{SETTINGS}", f"{layer}.pre_quant_scale", f"{layer}{OLD_SCALE}"} & tensors.keys()
    found.add(weight, keys, _entry, contents, layer, listed, keys)


def _entry(contents: Contents, layer: str, listed: Mapping[str, Any], keys: Mapping[str, str]) -> Entry:
    """Return the entry of the weight of a layer. Raise CheckpointError if it cannot be read."""
    tensors, settings = contents.tensors, _settings(contents, layer, listed)
    kind = settings.get("format")
    if not isinstance(kind, str) or kind not in KINDS:
        raise CheckpointError(f"the format of its layer {layer} is {short_repr(kind)}, not one of {', '.join(KINDS)}")
    inner = settings.get("params")
    if settings.get("convrot") or (isinstance(inner, Mapping) and inner.get("convrot")):
        raise CheckpointError("its columns are rotated (convrot), which is not supported: dequantize it with ComfyUI")
    if f"{layer}.pre_quant_scale" in tensors:
        raise CheckpointError("its layer has a pre_quant_scale, which changes what it computes and would be lost")
    for role, leaf in (("qdata", "weight"), ("scale", "weight_scale"), ("global_scale", "weight_scale_2")):
        if (role in keys) != (role != "global_scale" or kind == "nvfp4"):
            held = f"has no {layer}.{leaf}" if role in keys else f"requires {layer}.{leaf}, which is absent"
            raise CheckpointError(f"its format is {kind}, which {held}")
    codes, scale = tensors[keys["qdata"]], tensors[keys["scale"]]
    check_rows(codes.shape)
    if 0 in codes.shape:
        raise CheckpointError(f"its codes have shape {codes.shape}, which has no elements")
    if kind in TILED:
        return _tiled(contents, kind, keys)
    wanted = FLOAT8_KINDS.get(kind, torch.int8)
    known = (wanted, torch.uint8) if kind in FLOAT8_KINDS else (wanted,)
    expect(tensors, keys, {"qdata": (known, codes.shape), "scale": (FLOATS, scale.shape)})
    block = _block(settings, codes.shape, scale.shape, by_block=kind == "int8_blockwise")
    scheme: Scheme = (
        ScaledFloat(FLOAT8[wanted], block, scale.dtype)
        if kind in FLOAT8_KINDS
        else Affine(block=block, scale_dtype=scale.dtype)
    )
    return Entry.of(keys, spec_of(codes.shape, contents.dtype, scheme, name=keys["qdata"]))


def _block(settings: Mapping[str, Any], shape: Shape, held: Shape, *, by_block: bool) -> Block:
    """Return the block under one scale. Raise CheckpointError if the shape of the scales fits no block."""
    *lead, count, columns = shape
    if by_block:
        group = settings.get("group_size", 128)
        if type(group) is not int or not 0 < group < 2**31:
            raise CheckpointError(f"its group_size is {short_repr(group)}, not a positive integer")
        wanted = (*lead, -(-count // group), -(-columns // group))
        if held != wanted:
            raise CheckpointError(f"its scale has shape {held}, not {wanted}")
        return group, group
    if math.prod(held) == 1:
        return None, None
    if held == (*lead, count, 1):
        return 1, None
    if lead and held in ((*lead,), (*lead, 1, 1)):
        return count, None
    raise CheckpointError(f"its scale has shape {held}; codes of shape {shape} need one scale for all or one per row")


def _tiled(contents: Contents, kind: str, keys: Mapping[str, str]) -> Entry:
    """Return the entry of a weight whose scales lie in tiles."""
    scheme, width = TILED[kind], WIDTH[kind]
    codes, held = (contents.tensors[keys[role]] for role in ("qdata", "scale"))
    shape = (*codes.shape[:-1], codes.shape[-1] * (2 if kind == "nvfp4" else 1))
    if shape[-1] % width:
        raise CheckpointError(f"its {shape[-1]} columns are not a multiple of {width}")
    tiles = (*shape[:-2], -(-shape[-2] // 128) * 128, -(-shape[-1] // width // 4) * 4)
    if math.prod(held.shape) != math.prod(tiles):
        raise CheckpointError(f"its scale has shape {held.shape}, but the tiles for shape {shape} need {tiles}")
    roles = {("tiled_scale" if role == "scale" else role): key for role, key in keys.items()}
    wanted: dict[str, Wanted] = {
        "qdata": ((torch.uint8, *([torch.float8_e4m3fn] if kind == "mxfp8" else [])), codes.shape),
        "tiled_scale": ((scheme.scale_dtype, torch.uint8), held.shape),
        **({"global_scale": ((torch.float32,), ())} if kind == "nvfp4" else {}),
    }
    expect(contents.tensors, roles, wanted)
    spec = spec_of(shape, contents.dtype, scheme, name=keys["qdata"])
    return Entry.of(roles, spec, stored=shape, multiple=width)


# -- unpacking ----------------------------------------------------------------------------------------------------


def _untiled(tiles: Tensor, base: Shape, shape: Shape, first: int) -> Tensor:
    """Return the scales of a weight of shape ``base``, in ``shape``, row by row.

    For a matrix, ``tiles`` holds the scales of all its rows, and ``base`` begins at row ``first``.
    """
    start = first if len(base) == 2 else 0
    whole = -(-shape[-1] // 4) * 4
    table = tiles.reshape(math.prod(base[:-2]), -1, whole // 4, 32, 4, 4).permute(0, 1, 4, 3, 2, 5)
    return table.reshape(table.shape[0], -1, whole)[:, start : start + base[-2], : shape[-1]]


def swapped(codes: Tensor, shape: Shape, columns: int) -> Tensor:
    """Return E2M1 codes with the low nibble first, of ``shape``; a nibble beyond ``columns`` is 0."""
    made = codes.new_empty(shape)
    matrices = codes[..., : shape[-2], : shape[-1]].reshape(-1, *shape[-2:])
    for matrix, out in zip(matrices, made.view(-1, *shape[-2:]), strict=True):
        for start, stop in pieces(0, shape[-2], max(1, CHUNK // shape[-1])):
            torch.bitwise_left_shift(matrix[start:stop], 4, out=out[start:stop]).bitwise_or_(matrix[start:stop] >> 4)
    if columns % 2:
        made[..., -1] &= 15
    return made
