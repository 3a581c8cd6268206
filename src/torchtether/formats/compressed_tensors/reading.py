"""Recognise the weights of compressed-tensors from their tensors and the config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ...files import Stored
from ...geometry.views import Shape
from ...schemes import Affine, ScaledFloat, Scheme, bits
from ..entry import Contents, Entry, Found, spec_of
from .config import FLOAT, INT, MXFP4, MXFP6, MXFP8, NAIVE, NVFP4, PACK, UNKNOWN, Args, Config, ConfigGroup, parse
from .module import SUFFIX, Fault, Module

METHODS = ("compressed-tensors", "compressed_tensors")

_ACTIVATIONS = tuple(
    f"{who}_{what}" for who in ("input", "output", "q", "k", "v") for what in ("scale", "zero_point", "global_scale")
)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_ELEMENTS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_POWERS = (torch.uint8, torch.float8_e8m0fnu)
_CODES = (torch.int8, torch.uint8, torch.int16, torch.int32, *_ELEMENTS)
_DENSE_SINCE = (0, 18)


class Reading(NamedTuple):
    """The Weight that the tensors of one module make.

    ``roles`` maps each part to the role of a stored tensor. The roles ``packed`` and ``packed_zero_point`` have to be
    unpacked: from one dense stream or, if not ``dense``, from words that hold whole codes.
    """

    shape: Shape
    scheme: Scheme
    roles: Mapping[str, str]
    dense: bool = True


def recognise(contents: Contents) -> Found | None:
    """Return every module with a packed weight, or with codes and a scale; an incomplete set of tensors is a fault.

    The tensors of a module determine how it is stored; bits, groups and blocks come from ``quantization_config``. A
    config that contradicts the tensors is a fault. So is a weight without a config if its tensors are ambiguous.
    """
    settings = _settings(contents)
    if settings is None and (contents.method or "weight_packed" not in contents.leaves):
        return None
    config = None if settings is None else parse(settings)
    found = Found()
    for name, keys in _modules(contents, found).items():
        module = Module(name, keys, contents, config.version if config else ())
        try:
            reading = _read_module(module, config)
        except Fault as fault:
            found.fault(module.weight_name, str(fault), keys)
            continue
        if reading is None:
            continue
        dtype = module.stored("scale").dtype
        dtype = dtype if dtype in (torch.bfloat16, torch.float16) else contents.dtype
        spec = spec_of(reading.shape, dtype, reading.scheme, name=module.weight_name)
        used = {role: keys[stored] for role, stored in reading.roles.items()}
        found.weights[module.weight_name] = Entry.of(used, spec, dense=reading.dense)
        found.spare.update(set(keys.values()) - set(used.values()))
    return found


def _settings(contents: Contents) -> Mapping[str, Any] | None:
    """Return ``quantization_config``; before version 0.6 that was ``compression_config``, or a field of it."""
    if contents.method in METHODS:
        return contents.quantization
    old = contents.config.get("compression_config")
    if isinstance(old, Mapping) and not contents.method:
        inner = old.get("quantization_config")
        return inner if isinstance(inner, Mapping) else old
    return None


def _modules(contents: Contents, found: Found) -> dict[str, dict[str, str]]:
    """Return the keys by module and role; keys of activation scales become spare keys of ``found``."""
    role_of = {suffix: role for role, suffix in SUFFIX.items()}
    modules: dict[str, dict[str, str]] = {}
    for key in contents.tensors:
        name, _, last = key.rpartition(".")
        if last in role_of:
            modules.setdefault(name, {})[role_of[last]] = key
        elif last in _ACTIVATIONS:
            found.spare.add(key)
    return modules


def _read_module(module: Module, config: Config | None) -> Reading | None:
    """Return how to read ``module``; ``None`` if it is not quantized. Raise Fault if it cannot be read."""
    if module.keys.keys() <= {"weight"}:
        if "weight" in module and module.stored("weight").dtype in _CODES:
            raise Fault(f"it is {module.stored('weight').dtype} and has no weight_scale")
        return None
    if config is None:
        groups: tuple[ConfigGroup, ...] = (UNKNOWN,)
    elif config.is_ignored(module.name):
        raise Fault("config.json ignores its module, and it is quantized")
    else:
        groups = tuple(group for group in config.targets.find(module.name) if group.args is not None)
    if not groups:
        raise Fault("it is quantized, and no config group in config.json describes its weights")
    readings: list[Reading] = []
    faults: list[Fault] = []
    for group in groups:
        try:
            reading = _reading(module, group)
            readings += [reading] if reading not in readings else []
        except Fault as fault:
            faults.append(fault)
    if not readings:
        raise faults[0]
    if len(readings) > 1:
        raise Fault(f"the config groups {' and '.join(group.name for group in groups)} both fit it, and differ")
    return readings[0]


def _reading(module: Module, group: ConfigGroup) -> Reading:
    if "packed" not in module and "weight" not in module:
        raise Fault(f"its {SUFFIX[next(iter(module.keys))]} is there, its codes are not")
    if "packed" in module and "weight" in module:
        raise Fault("it is stored twice, as weight and as weight_packed")
    args = group.args or Args()
    if "packed" not in module:
        weight, scale = module.stored("weight"), module.stored("scale")
        if weight.dtype in _ELEMENTS:
            is_mx = scale.dtype in _POWERS
            _agree(group, "float", (8,), (MXFP8,) if is_mx else (FLOAT, NAIVE))
            if is_mx:
                return _microscaled(module, args, weight.shape, "weight", _ELEMENTS[weight.dtype])
            return _floats(module, args)
        if weight.dtype == torch.int8:
            _agree(group, "int", range(1, 9), (INT, NAIVE))
            return _integers(module, args)
        if weight.dtype.is_floating_point:
            raise Fault(f"it is {weight.dtype} with a weight_scale: not compressed yet, the model rounds as it runs")
        raise Fault(f"it is {weight.dtype} with a weight_scale, and only int8 and float8 have one")
    packed = module.stored("packed")
    if packed.dtype == torch.int32:
        _agree(group, "int", range(1, 9), (PACK,))
        return _packed(module, args)
    if packed.dtype != torch.uint8 or not packed.shape:
        raise Fault(f"its weight_packed is {packed.dtype} {packed.shape}, not int32 or uint8 with rows")
    if module.stored("scale").dtype not in _POWERS:
        _agree(group, "float", (4,), (NVFP4,))
        return _nvfp4(module, args)
    _agree(group, "float", (4, 6), (MXFP6,) if args.bits == 6 else (MXFP4,) if args.bits == 4 else (MXFP4, MXFP6))
    return _microscaled_packed(module, args)


def _agree(group: ConfigGroup, kind: str, widths: range | tuple[int, ...], formats: tuple[str, ...]) -> None:
    """Raise Fault if the config contradicts the way in which the module is stored."""
    args = group.args or Args()
    if args.kind not in (None, kind) or (args.bits is not None and args.bits not in widths):
        raise Fault(f"it is stored as {formats[0]}, and config.json says {args}")
    if group.format and group.format not in formats:
        raise Fault(f"it is stored as {formats[0]}, and config.json says {group.format}")


# -- integers -----------------------------------------------------------------------------------------------------


def _integers(module: Module, args: Args) -> Reading:
    shape = module.stored("weight").shape
    scale, block = _blocks(module, args, shape)
    is_symmetric = _check_zero_point(module, args)
    if not is_symmetric:
        module.checked("zero_point", (torch.int8,), scale, f"{args}")
    scheme = Affine(8, symmetric=is_symmetric, block=block, scale_dtype=module.stored("scale").dtype)
    zero = {} if is_symmetric else {"zero_point": "zero_point"}
    return Reading(shape, scheme, {"qdata": "weight", "scale": "scale", **zero})


def _packed(module: Module, args: Args) -> Reading:
    packed = module.stored("packed")
    shape = _stated_shape(module, packed)
    scale, block = _blocks(module, args, shape)
    roles = {"packed": "packed", "scale": "scale"}
    zeros: Shape | None = None
    is_symmetric = _check_zero_point(module, args)
    if not is_symmetric and module.stored("zero_point").dtype == torch.int8:
        module.checked("zero_point", (torch.int8,), scale, f"{args}")
        roles["zero_point"] = "zero_point"
    elif not is_symmetric:
        zeros = module.checked("zero_point", (torch.int32,), module.stored("zero_point").shape, "").shape
        roles["packed_zero_point"] = "zero_point"
    width, dense = _packing(module, args, shape, zeros, scale[-1])
    is_ordered = _check_order(module, args, shape, scale, block)
    if is_ordered:
        roles["g_idx"] = "g_idx"
    dtype = module.stored("scale").dtype
    scheme = Affine(width, symmetric=is_symmetric, block=block, act_order=is_ordered, scale_dtype=dtype)
    return Reading(shape, scheme, roles, dense)


def _packing(module: Module, args: Args, shape: Shape, zeros: Shape | None, groups: int) -> tuple[int, bool]:
    """Return the bits of codes and zero points, and whether they are dense streams, as the stored words imply.

    Raise Fault if nothing fits, or if several widths or packings fit and the config does not decide.
    """
    words = module.stored("packed").shape[-1]
    fits: dict[tuple[int, bool], None] = {}
    for width in range(1, 9) if args.bits is None else (args.bits,):
        for dense in (True, False):
            zeros_wanted = (*shape[:-2], _words(shape[-2], width, dense), groups)
            if _words(shape[-1], width, dense) == words and zeros in (None, zeros_wanted):
                fits[width, dense or _is_either(shape, width, zeros is not None)] = None
    if not fits:
        who = f"codes of {args.bits} bits" if args.bits else "no number of bits"
        need = f" need {_words(shape[-1], args.bits, True)}" if args.bits else ""
        and_zeros = f" and zero points {zeros}" if zeros else ""
        raise Fault(f"its weight_packed has {words} words a row{and_zeros}; {who} for {shape} by {groups} groups{need}")
    if len({width for width, _ in fits}) > 1:
        found = ", ".join(f"{width} bits {'dense' if dense else 'in whole words'}" for width, dense in fits)
        raise Fault(f"nothing says how many bits its codes have ({found}); num_bits in config.json is missing")
    if len(fits) == 1:
        return next(iter(fits))
    width = next(iter(fits))[0]
    if not module.version:
        raise Fault(f"its {width}-bit codes may be one stream or whole words; version in config.json is missing")
    return width, module.version >= _DENSE_SINCE


def _words(count: int, width: int, dense: bool) -> int:
    """Return the number of int32 words of ``count`` codes: a dense stream, or as many whole codes to a word as fit."""
    return -(-count * width // 32) if dense else -(-count // (32 // width))


def _is_either(shape: Shape, width: int, with_zeros: bool) -> bool:
    """Return whether both packings give the same bits: the width divides 32, or all codes fit into one word."""
    fit = 32 // width
    return 32 % width == 0 or (shape[-1] <= fit and (not with_zeros or shape[-2] <= fit))


def _stated_shape(module: Module, packed: Stored) -> Shape:
    stored = module.stored("shape")
    if stored.dtype not in (torch.int64, torch.int32) or stored.shape != (len(packed.shape),):
        raise Fault(f"its weight_shape is {stored.dtype} {stored.shape}, not int64 ({len(packed.shape)},)")
    shape = tuple(module.read("shape").tolist())
    if len(shape) < 2 or shape[:-1] != packed.shape[:-1] or shape[-1] < 0:
        raise Fault(f"its weight_shape says {shape}, its weight_packed has shape {packed.shape}")
    return shape


def _check_order(module: Module, args: Args, shape: Shape, scale: Shape, block: tuple[int | None, int | None]) -> bool:
    """Return whether ``weight_g_idx`` reorders columns. Raise Fault if it is required and absent, or invalid."""
    if "g_idx" not in module:
        if args.is_reordered and scale[-1] > 1 and block[1] is not None:
            raise Fault("its weight_g_idx is absent, and the config says that columns are reordered (actorder: group)")
        return False
    module.checked("g_idx", (torch.int32,), (shape[-1],), f"shape {shape}")
    g_idx = module.read("g_idx").reshape(-1)
    if bool((g_idx == -1).all()) or scale[-1] == 1 or block[1] is None:
        return False
    if bool(((g_idx < 0) | (g_idx >= scale[-1])).any()):
        low, high = int(g_idx.min()), int(g_idx.max())
        raise Fault(f"its weight_g_idx names groups {low} to {high}, and there are {scale[-1]}")
    return not torch.equal(g_idx, torch.arange(shape[-1], dtype=torch.int32) // block[1])


def _check_zero_point(module: Module, args: Args) -> bool:
    """Return whether no zero points are stored. Raise Fault if the config requires them and they are absent."""
    if "zero_point" not in module and args.symmetric is False:
        raise Fault("its weight_zero_point is absent, and config.json says that it is not symmetric")
    return "zero_point" not in module


# -- small floats -------------------------------------------------------------------------------------------------


def _floats(module: Module, args: Args) -> Reading:
    weight = module.stored("weight")
    _check_symmetric(module, args)
    _, block = _blocks(module, args, weight.shape)
    scheme = ScaledFloat(_ELEMENTS[weight.dtype], block, module.stored("scale").dtype)
    return Reading(weight.shape, scheme, {"qdata": "weight", "scale": "scale"})


def _microscaled(module: Module, args: Args, shape: Shape, codes: str, element: str) -> Reading:
    size = _group_size(args, 32)
    _check_symmetric(module, args)
    _check_groups(module, _POWERS, shape, size, element)
    scheme = ScaledFloat(element, (1, size), torch.float8_e8m0fnu)
    return Reading(shape, scheme, {"qdata": codes, "scale": "scale"})


def _microscaled_packed(module: Module, args: Args) -> Reading:
    *rows, length = module.stored("packed").shape
    size = _group_size(args, 32)
    groups = (module.stored("scale").shape or (1,))[-1]
    fits = [  # with whole groups, bytes and scales determine the number of columns
        (element, count)
        for width, element, count in ((4, "e2m1", length * 2), (6, "e2m3", length * 4 // 3))
        if args.bits in (None, width) and length == bits.packed_size(count, width) and count == groups * size
    ]
    if len(fits) != 1:
        what = f"float{args.bits} by {size}" if args.bits else "num_bits in config.json is missing"
        raise Fault(f"its weight_packed has {length} bytes a row under {groups} scales; {what}")
    return _microscaled(module, args, (*rows, fits[0][1]), "packed", fits[0][0])


def _nvfp4(module: Module, args: Args) -> Reading:
    *rows, length = module.stored("packed").shape
    shape, size = (*rows, length * 2), _group_size(args, 16)
    _check_symmetric(module, args)
    _check_groups(module, (torch.float8_e4m3fn,), shape, size, "e2m1")
    module.checked("global_scale", (torch.float32,), (1,), "a tensor")
    scheme = ScaledFloat("e2m1", (1, size), torch.float8_e4m3fn, global_scale=True, global_divides=True)
    return Reading(shape, scheme, {"qdata": "packed", "scale": "scale", "global_scale": "global_scale"})


def _group_size(args: Args, default: int) -> int:
    if args.strategy not in (None, "group", "tensor_group"):
        raise Fault(f"its scales are one per group, and config.json says {args}")
    return args.group_size or default


def _check_groups(module: Module, dtypes: tuple[torch.dtype, ...], shape: Shape, size: int, element: str) -> None:
    if len(shape) < 2:
        raise Fault(f"its codes have shape {shape}, which has no rows")
    module.checked("scale", dtypes, (*shape[:-1], -(-shape[-1] // size)), f"{element} {shape} by {size}")


def _check_symmetric(module: Module, args: Args) -> None:
    """Raise Fault for zero points other than 0; old releases store zeros for float codes."""
    if args.symmetric is False or ("zero_point" in module and bool(module.read("zero_point").float().any())):
        raise Fault("its codes are floats, which have no zero point, and it is not symmetric")


# -- scales -------------------------------------------------------------------------------------------------------


def _blocks(module: Module, args: Args, shape: Shape) -> tuple[Shape, tuple[int | None, int | None]]:
    """Return the shape of the scales as a part of a Weight, and the block under one scale. Raise Fault if none fits."""
    stored = module.stored("scale")
    if len(shape) < 2:
        raise Fault(f"its codes have shape {shape}, which has no rows")
    *lead, rows, columns = shape
    strategy = args.strategy or _strategy(stored.shape, shape)
    size = args.group_size
    if strategy == "group" and size is None:
        groups = stored.shape[-1]
        if not groups or not columns or columns % groups:
            raise Fault(
                f"its weight_scale has {groups} groups for {columns} columns; group_size in config.json is missing"
            )
        size = columns // groups
    scale: Shape
    block: tuple[int | None, int | None]
    if strategy == "tensor":
        scale, block = (1,) * len(shape), (None, None)
    elif strategy == "channel":
        scale, block = (*lead, rows, 1), (1, None)
    elif strategy == "block" and args.block is not None:
        scale, block = (*lead, -(-rows // args.block[0]), -(-columns // args.block[1])), args.block
    elif strategy == "group" and size is not None:
        scale, block = (*lead, rows, -(-columns // size)), (1, size)
    else:
        raise Fault(f"its scales are {stored.dtype}, and config.json says {args}")
    module.checked("scale", _FLOATS, scale, f"{strategy} over {shape}")
    return scale, block


def _strategy(scale: Shape, shape: Shape) -> str:
    """Return the strategy that the shape of the scale implies. Raise Fault if it implies none."""
    if math.prod(scale) == 1:
        return "tensor"
    if scale in (shape[:-1], (*shape[:-1], 1)):
        return "channel"
    if scale[:-1] == shape[:-1]:
        return "group"
    raise Fault(f"its weight_scale has shape {scale}, neither rows nor groups of {shape}; config.json is missing")
