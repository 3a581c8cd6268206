"""AMD Quark: ``quant_method: quark``. ``weight`` in the settings of a layer determines what its tensors are.

    int8, uint8            m.weight (N, K); m.weight_scale () or (N,); m.weight_zero_point alike
                           per group: m.weight (K, N); m.weight_scale (G, N); m.weight_zero_point (G, N)
    int4, uint4            m.weight int32 (N, K / 8); zero points int32 (), or packed into words (N / 8,)
                           per group: m.weight int32 (K, N / 8); m.weight_scale (G, N); zero points (G, N / 8)
    fp8_e4m3, fp8_e5m2     m.weight (N, K); m.weight_scale () or (N,), or per block
    fp4, fp6_e2m3          m.weight uint8, a dense stream of (*lead, N, K); m.weight_scale (*lead, N, G): floats, or
                           exponents as bytes ("e8m0"), or float8_e4m3fn that m.weight_scale_2 () multiplies

Nibble i of a word is element ``(0, 2, 4, 6, 1, 3, 5, 7)[i]`` of its 8, or element i with ``pack_method: order``. Signed
nibbles are in two's complement. Zero points of a symmetric layer are stored too, and are 0.

The settings of a layer are those of the first pattern in ``layer_quant_config`` that matches its name, else those of
``Linear`` in ``layer_type_quant_config``, else ``global_quant_config``. Weights with ``weight_format: fake_quantized``
are rounded floats, and load as floats. Exports with ``custom_mode`` "fp8" or "awq" have that as their ``quant_method``,
and are read by those formats.
Source: amd-quark 0.13 torch/export (realquantizer, qparamslinear_builder, quant_config_parser), torch/utils/pack.py,
torch/kernel/hw_emulation.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..files import Stored
from ..files.strict_json import short_repr
from ..schemes import Affine, ScaledFloat, Scheme
from ..schemes import bits as streams
from ..schemes.blocks import CHUNK, Block, pieces
from .awq import OUTPUTS, reordered, zero_points
from .entry import FLOATS, NOTHING, Contents, Entry, Evidence, Found, Wanted, check_dtype, expect, spec_of
from .linears import check_shape, groups_over
from .rows import Along

name = "quark"
evidence = Evidence(methods=(name,))

INTEGERS = {"int8": (8, True), "uint8": (8, False), "int4": (4, True), "uint4": (4, False)}
"""The bits of each integer dtype, and whether it is signed."""
_INTEGER_BLOCKS: dict[str, Block] = {"per_tensor": (None, None), "per_channel": (1, None)}
FLOAT8 = {"fp8_e4m3": ("e4m3", torch.float8_e4m3fn), "fp8_e5m2": ("e5m2", torch.float8_e5m2)}
PACKED = {"fp4": ("e2m1", 4), "fp6_e2m3": ("e2m3", 6)}
KNOWN = (*INTEGERS, *FLOAT8, *PACKED)
ORDERS = {"reorder": OUTPUTS, "order": tuple(range(8))}
"""The element, out of 8, that each nibble of a word holds."""

_ROLES = {
    "weight": "qdata",
    "weight_scale": "scale",
    "weight_scale_inv": "scale",
    "weight_zero_point": "zero_point",
    "weight_scale_2": "global_scale",
    "weight_zero_point_2": "zero_point_2",
}
_SPARE = re.compile(r"(.*\.)?((input|output)_(scale|zero_point)(_\d)?|[kvq]_scale|(kv|prob)_scale)")
_CHANGED = re.compile(r"(.*\.)?(input_rotation|input_prescale|smooth_factor|shared_input_rotation_\d+)")
_CODES = (torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)
_MATCHES = 2**22  # of patterns with names: some seconds; usual configs need thousands
_LONGEST = 2000  # characters of a pattern


def recognise(contents: Contents) -> Found | None:
    """Return every weight of codes with its scales; scales of float weights are spare.

    Raises CheckpointError for an invalid config, and for layers that rotate or scale their inputs.
    """
    if contents.method != name:
        return None
    config = contents.quantization
    order = _order(config)
    found = Found()
    modules: dict[str, dict[str, str]] = {}
    for key, stored in contents.tensors.items():
        module, _, leaf = key.rpartition(".")
        if _CHANGED.fullmatch(key):
            raise CheckpointError(
                "it rotates or scales the inputs of its layer, which is not supported",
                name=key,
                fix="Use a checkpoint without online rotations and SVDQuant.",
            )
        if _SPARE.fullmatch(key):
            found.spare.add(key)
        elif leaf in _ROLES and (leaf != "weight" or stored.dtype in _CODES):
            modules.setdefault(module, {})[_ROLES[leaf]] = key
        elif leaf in ("bias_scale", "bias_zero_point"):
            bias = f"{module}.bias" if module else "bias"
            found.fault(bias, "it is quantized, and only float biases are supported", {"scale": key, "bias": bias})
    settings = _Settings(config, len(modules))
    for module, keys in modules.items():
        weight = f"{module}.weight" if module else "weight"
        if "qdata" not in keys and weight in contents.tensors:
            found.spare.update(keys.values())
            continue
        found.add(weight, keys, _entry, contents, settings, module, keys, order)
    return found


def unpack(entry: Entry, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts. Raise CheckpointError for zero points other than 0 in a symmetric layer."""
    assert entry.spec is not None
    scheme, layout = entry.spec.scheme, entry.spec.scheme.layout(entry.spec.base)
    if isinstance(scheme, Affine):
        parts = _integers(entry, scheme, tensors)
    else:
        parts = {role: tensors[role] for role in layout}
        if parts["scale"].dtype == torch.uint8:
            parts["scale"] = parts["scale"].view(torch.float8_e8m0fnu)
        if "global_scale" in parts:
            parts["global_scale"] = parts["global_scale"].float()
    return {role: parts[role].reshape(part.shape).contiguous() for role, part in layout.items()}


def rows(entry: Entry, tensors: Mapping[str, Stored]) -> Mapping[str, Along] | None:
    """Return where rows lie: as columns for integers in groups, else as rows; some 4-bit words hold 8 rows."""
    assert entry.spec is not None
    scheme, found = entry.spec.scheme, {}
    assert isinstance(scheme, Affine | ScaledFloat)
    grouped, words = entry.options.get("grouped", False), isinstance(scheme, Affine) and scheme.bits == 4
    for role, key in entry.keys.items():
        shape = tensors[key].shape
        if role == "global_scale" or (role != "qdata" and scheme.block == (None, None)):
            continue
        in_words = words and role != "scale" and (grouped or role == "zero_point")
        if not shape or not (in_words or shape[int(grouped)] == entry.spec.base[0]):
            return None
        found[role] = Along(int(grouped), 1, 8 if in_words else 1)
    return found


# -- settings -----------------------------------------------------------------------------------------------------


def _order(config: Mapping[str, Any]) -> str:
    export = config.get("export") or NOTHING
    order = export.get("pack_method", "reorder") if isinstance(export, Mapping) else None
    if not isinstance(order, str) or order not in ORDERS:
        raise CheckpointError(
            f"the pack_method is {short_repr(order)}, not one of {', '.join(ORDERS)}",
            name="config.json",
            fix="Export the model from Quark with one of them.",
        )
    return order


class _Settings:
    """The settings of layers: by name, by a pattern for names, or for all others."""

    def __init__(self, config: Mapping[str, Any], count: int) -> None:
        by_name, by_type = (_object(config, one) for one in ("layer_quant_config", "layer_type_quant_config"))
        self.rest = by_type.get("Linear", config.get("global_quant_config"))
        self.exact = {text: (at, settings) for at, (text, settings) in enumerate(by_name.items())}
        globs = [text for text in by_name if any(sign in text for sign in "*?[")]
        if len(globs) * count > _MATCHES or any(len(text) > _LONGEST for text in globs):
            what = f"layer_quant_config has {len(globs)} patterns for {count} modules"
            limits = f"the limits are {_MATCHES} pairs and {_LONGEST} characters for each pattern"
            raise CheckpointError(f"{what}, but {limits}", name="config.json")
        self.patterns = [(re.compile(fnmatch.translate(text)), *self.exact[text]) for text in globs]

    def of(self, module: str) -> Any:
        """Return ``weight`` of the settings of ``module``. Raise CheckpointError if there are no settings."""
        at, settings = self.exact.get(module, (None, self.rest))
        for pattern, place, other in self.patterns:
            if at is not None and place > at:
                break
            if pattern.match(module):
                settings = other
                break
        if not isinstance(settings, Mapping):
            raise CheckpointError(f"its settings are {short_repr(settings)}, not an object")
        return settings.get("weight")


def _object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = config.get(key) or NOTHING
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{key} is {short_repr(found)}, not an object", name="config.json")
    return found


def _stage(weight: Any) -> tuple[Mapping[str, Any], bool]:
    """Return the settings of the codes, and whether the scales are quantized too (fp4 with scales in fp8).

    Raise CheckpointError for other numbers or kinds of stages.
    """
    stages = weight if isinstance(weight, list) else [weight]
    if not stages or not all(isinstance(stage, Mapping) for stage in stages):
        raise CheckpointError(f"it is stored as codes, but its settings are {short_repr(weight)}")
    first, *others = stages
    if not others:
        return first, False
    second = others[0]
    is_nvfp4 = len(others) == 1 and first.get("dtype") == "fp4" and second.get("is_scale_quant") is True
    if is_nvfp4 and (second.get("dtype"), second.get("qscheme")) == ("fp8_e4m3", "per_tensor"):
        return first, True
    stages_of = " and ".join(short_repr(stage.get("dtype")) for stage in stages)
    raise CheckpointError(f"it is quantized in the stages {stages_of}, not fp4 with scales in fp8_e4m3 per_tensor")


# -- recognising --------------------------------------------------------------------------------------------------


def _entry(contents: Contents, layers: _Settings, module: str, keys: Mapping[str, str], order: str) -> Entry:
    """Return the entry of the weight of a layer. Raise CheckpointError if it cannot be read."""
    settings, in_stages = _stage(layers.of(module))
    dtype, qscheme = settings.get("dtype"), settings.get("qscheme")
    if not isinstance(dtype, str) or dtype not in KNOWN:
        raise CheckpointError(f"its dtype is {short_repr(dtype)}, not one of {', '.join(KNOWN)}")
    needed = {"qdata", "scale", *(("global_scale",) if in_stages else ())}
    for role in sorted(needed - keys.keys()):
        raise CheckpointError(f"it has {' and '.join(keys.values())}, but no {role}")
    for role in sorted(keys.keys() - needed - ({"zero_point"} if dtype in INTEGERS else set())):
        raise CheckpointError(f"its dtype is {dtype}, which has no {keys[role]}")
    codes = contents.tensors[keys["qdata"]]
    if len(codes.shape) < 2 or 0 in codes.shape or (dtype not in PACKED and len(codes.shape) > 2):
        raise CheckpointError(f"its codes have shape {codes.shape}, which is not a matrix")
    axis = settings.get("ch_axis")
    if axis not in {"per_channel": (0,), "per_group": (1, -1)}.get(str(qscheme), (axis,)):
        raise CheckpointError(f"its ch_axis is {short_repr(axis)}, which is not supported with the qscheme {qscheme}")
    if dtype in INTEGERS:
        return _integer_entry(contents, settings, keys, order)
    return _float_entry(contents, settings, keys, in_stages=in_stages)


def _integer_entry(contents: Contents, settings: Mapping[str, Any], keys: Mapping[str, str], order: str) -> Entry:
    dtype, qscheme = settings["dtype"], settings.get("qscheme")
    bits, signed = INTEGERS[dtype]
    codes, scale = (contents.tensors[keys[role]] for role in ("qdata", "scale"))
    per_word, container = (8, torch.int32) if bits == 4 else (1, torch.int8 if signed else torch.uint8)
    grouped = qscheme == "per_group"
    (count, columns), block = codes.shape, _INTEGER_BLOCKS.get(str(qscheme))
    if grouped and len(scale.shape) == 2:
        (groups, count), columns = scale.shape, count
        block = groups_over(columns, groups, _size(settings))
    elif grouped or block is None:
        raise CheckpointError(
            f"its dtype is {dtype}, its qscheme is {short_repr(qscheme)} and its scale has shape {scale.shape}, "
            "but only per_tensor, per_channel, and per_group with a matrix are supported"
        )
    else:
        columns *= per_word
    words = -(-count // per_word)
    wanted: dict[str, Wanted] = {
        "qdata": ((container,), (columns, words) if grouped else codes.shape),
        "scale": (FLOATS, scale.shape if grouped else (count,) if block[0] else ()),
        "zero_point": ((container,), (scale.shape[0], words) if grouped else (words,) if block[0] else ()),
    }
    symmetric = signed and settings.get("symmetric") is True
    if symmetric and "zero_point" not in keys:
        del wanted["zero_point"]
    expect(contents.tensors, keys, wanted)
    for role in wanted if grouped else ():
        check_shape(role, contents.tensors[keys[role]], wanted[role][1], f"{dtype} with scale {scale.shape}")
    scheme = Affine(bits=bits, signed=signed, symmetric=symmetric, block=block, scale_dtype=scale.dtype)
    spec = spec_of((count, columns), contents.dtype, scheme, name=keys["qdata"])
    return Entry.of(keys, spec, grouped=grouped, order=order)


def _float_entry(contents: Contents, settings: Mapping[str, Any], keys: Mapping[str, str], *, in_stages: bool) -> Entry:
    dtype, qscheme, form = settings["dtype"], settings.get("qscheme"), settings.get("scale_format")
    codes, scale = (contents.tensors[keys[role]] for role in ("qdata", "scale"))
    shape = codes.shape
    known: tuple[torch.dtype, ...] = FLOATS
    block: Block
    if dtype in FLOAT8:
        element, container = FLOAT8[dtype]
        block, known = _block(settings, dtype), (*FLOATS, torch.float8_e8m0fnu)
    else:
        element, bits = PACKED[dtype]
        container = torch.uint8
        if codes.shape[-1] * 8 % bits:
            raise CheckpointError(f"its codes have shape {codes.shape}, whose rows are not whole {bits}-bit codes")
        shape = (*codes.shape[:-1], codes.shape[-1] * 8 // bits)
        if qscheme != "per_group" or form not in ("e8m0", "float32", None):
            raise CheckpointError(
                f"its dtype is {dtype}, its qscheme is {short_repr(qscheme)} and its scale_format {short_repr(form)}, "
                "but only per_group with e8m0 or float32 is supported"
            )
        block = 1, _size(settings) or shape[-1]
    held = scale.dtype
    if in_stages:
        known = (torch.float8_e4m3fn,)
    elif form == "e8m0":
        known, held = (torch.uint8, torch.float8_e8m0fnu), torch.float8_e8m0fnu
    check_dtype("scale", scale.dtype, known)
    scheme: Scheme = ScaledFloat(element, block, held, global_scale=in_stages)
    spec = spec_of(shape, contents.dtype, scheme, name=keys["qdata"])
    wanted: dict[str, Wanted] = {
        "qdata": ((container,), codes.shape),
        "scale": (known, scheme.layout(shape)["scale"].shape),
        **({"global_scale": (FLOATS, ())} if in_stages else {}),
    }
    expect(contents.tensors, keys, wanted)
    return Entry.of(keys, spec)


def _block(settings: Mapping[str, Any], dtype: str) -> Block:
    """Return the block under one scale of float8."""
    qscheme, size = settings.get("qscheme"), settings.get("block_size")
    pair = size if isinstance(size, list) and all(type(n) is int and 0 < n < 2**31 for n in size) else []
    if qscheme == "per_block" and len(pair) == 2:
        return pair[0], pair[1]
    if qscheme in ("per_tensor", "per_channel"):
        return (None, None) if qscheme == "per_tensor" else (1, None)
    raise CheckpointError(
        f"its dtype is {dtype}, its qscheme is {short_repr(qscheme)} and its block_size {short_repr(size)}, "
        "but only per_tensor, per_channel, and per_block of [rows, columns] are supported"
    )


def _size(settings: Mapping[str, Any]) -> int | None:
    size = settings.get("group_size")
    if size is not None and (type(size) is not int or not 0 < size < 2**31):
        raise CheckpointError(f"its group_size is {short_repr(size)}, not a positive integer")
    return size


# -- unpacking ----------------------------------------------------------------------------------------------------


def _integers(entry: Entry, scheme: Affine, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    count, columns = entry.shape
    grouped, order = entry.options["grouped"], ORDERS[entry.options["order"]]
    codes, scale = tensors["qdata"], tensors["scale"]
    if scheme.bits == 8:
        codes = codes.t() if grouped else codes
    elif grouped:
        codes = reordered(codes, 8 * codes.shape[1], columns, order)[:count]
    else:
        codes = _in_order(codes, order)
    if scheme.bits == 4 and scheme.signed:
        codes = codes ^ 0x88  # two's complement to offset binary
        if columns % 2:
            codes[:, -1] &= 0x0F
    parts = {"qdata": codes, "scale": scale.t() if grouped else scale}
    if "zero_point" in tensors:
        zeros = _zeros(tensors["zero_point"], scheme, order, grouped=grouped)
        zeros = zeros[:count] if zeros.dim() else zeros
        if not scheme.symmetric:
            parts["zero_point"] = zeros
        elif bool(zeros.any()):
            reach = f"from {int(zeros.min())} to {int(zeros.max())}"
            raise CheckpointError(f"its zero points are {reach}, but its settings say that it is symmetric")
    return parts


def _in_order(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return the codes of ``words`` (N, W) int32 row by row, in the order of their elements: (N, 4 * W) uint8."""
    made = words.new_empty((words.shape[0], 4 * words.shape[1]), dtype=torch.uint8)
    for start, stop in pieces(0, words.shape[0], max(1, CHUNK // (8 * words.shape[1]))):
        made[start:stop] = streams.pack(zero_points(words[start:stop], order), 4)
    return made


def _zeros(stored: Tensor, scheme: Affine, order: tuple[int, ...], *, grouped: bool) -> Tensor:
    """Return zero points, one to an element; (N, G) if ``grouped``."""
    zeros = stored
    if scheme.bits == 4 and scheme.block == (None, None):
        zeros = (stored & 15).to(torch.uint8)
    elif scheme.bits == 4:
        zeros = zero_points(stored.reshape(-1, stored.shape[-1]), order)
        zeros = zeros if grouped else zeros.reshape(-1)
    if scheme.bits == 4 and scheme.signed:
        zeros = (zeros ^ 8).view(torch.int8) - 8
    return zeros.t() if grouped else zeros
