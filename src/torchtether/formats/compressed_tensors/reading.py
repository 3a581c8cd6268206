"""Recognise the weights of compressed-tensors from their tensors and the config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ...errors import CheckpointError
from ...files import Stored
from ...geometry.views import Shape
from ...schemes import Affine, ScaledFloat, Scheme, bits
from ..entry import FLOAT8, FLOATS, Contents, Entry, Found, check_rows, spec_of
from ..words import word_count
from .config import FLOAT, INT, MXFP4, MXFP6, MXFP8, NAIVE, NVFP4, PACK, UNKNOWN, Args, Config, ConfigGroup, parse
from .module import SUFFIX, Module

METHODS = ("compressed-tensors", "compressed_tensors")

_ACTIVATIONS = tuple(
    f"{who}_{what}" for who in ("input", "output", "q", "k", "v") for what in ("scale", "zero_point", "global_scale")
)
_POWERS = (torch.uint8, torch.float8_e8m0fnu)
_CODES = (torch.int8, torch.uint8, torch.int16, torch.int32, *FLOAT8)
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
        if keys.keys() != {"weight"} or contents.tensors[keys["weight"]].dtype in _CODES:
            module = Module(name, keys, contents, config.version if config else ())
            found.add(module.weight_name, keys, _entry, module, config)
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


def _entry(module: Module, config: Config | None) -> Entry:
    reading, dtype = _read_module(module, config), module.stored("scale").dtype
    dtype = dtype if dtype in (torch.bfloat16, torch.float16) else module.contents.dtype
    spec = spec_of(reading.shape, dtype, reading.scheme, name=module.weight_name)
    used = {role: module.keys[stored] for role, stored in reading.roles.items()}
    return Entry.of(used, spec, dense=reading.dense)


def _read_module(module: Module, config: Config | None) -> Reading:
    """Return how to read ``module``. Raise CheckpointError if it cannot be read."""
    if module.keys.keys() == {"weight"}:
        raise CheckpointError(f"it is {module.stored('weight').dtype} and has no weight_scale")
    if config is None:
        groups: tuple[ConfigGroup, ...] = (UNKNOWN,)
    elif config.is_ignored(module.name):
        raise CheckpointError("it is quantized, but config.json ignores its module")
    else:
        groups = tuple(group for group in config.targets.find(module.name) if group.args is not None)
    if not groups:
        raise CheckpointError("it is quantized, but no config group in config.json describes its weights")
    readings: list[Reading] = []
    faults: list[CheckpointError] = []
    for group in groups:
        try:
            reading = _reading(module, group)
            readings += [reading] if reading not in readings else []
        except CheckpointError as fault:
            faults.append(fault)
    if not readings:
        raise faults[0]
    if len(readings) > 1:
        names = " and ".join(group.name for group in groups)
        raise CheckpointError(f"the config groups {names} fit it, but they contradict each other")
    return readings[0]


def _reading(module: Module, group: ConfigGroup) -> Reading:
    if "packed" not in module and "weight" not in module:
        raise CheckpointError(f"it has a {SUFFIX[next(iter(module.keys))]}, but no codes")
    if "packed" in module and "weight" in module:
        raise CheckpointError("it is stored twice, as weight and as weight_packed")
    args = group.args or Args()
    if "packed" not in module:
        weight, scale = module.stored("weight"), module.stored("scale")
        if weight.dtype in FLOAT8:
            is_mx = scale.dtype in _POWERS
            _agree(group, "float", (8,), (MXFP8,) if is_mx else (FLOAT, NAIVE))
            if is_mx:
                return _microscaled(module, args, weight.shape, "weight", FLOAT8[weight.dtype])
            return _floats(module, args)
        if weight.dtype == torch.int8:
            _agree(group, "int", range(1, 9), (INT, NAIVE))
            return _integers(module, args)
        if weight.dtype.is_floating_point:
            raise CheckpointError(
                f"it is {weight.dtype} with a weight_scale: weights that are quantized at run time are not supported"
            )
        raise CheckpointError(f"it is {weight.dtype} with a weight_scale, not torch.int8 or float8")
    packed = module.stored("packed")
    if packed.dtype == torch.int32:
        _agree(group, "int", range(1, 9), (PACK,))
        return _packed(module, args)
    if packed.dtype != torch.uint8 or not packed.shape:
        raise CheckpointError(
            f"its weight_packed is {packed.dtype} {packed.shape}, not rows of torch.int32 or torch.uint8"
        )
    if module.stored("scale").dtype not in _POWERS:
        _agree(group, "float", (4,), (NVFP4,))
        return _nvfp4(module, args)
    _agree(group, "float", (4, 6), (MXFP6,) if args.bits == 6 else (MXFP4,) if args.bits == 4 else (MXFP4, MXFP6))
    return _microscaled_packed(module, args)


def _agree(group: ConfigGroup, kind: str, widths: range | tuple[int, ...], formats: tuple[str, ...]) -> None:
    """Raise CheckpointError if the config contradicts the way in which the module is stored."""
    args = group.args or Args()
    if args.kind not in (None, kind) or (args.bits is not None and args.bits not in widths):
        raise CheckpointError(f"it is stored as {formats[0]}, but config.json says {args}")
    if group.format and group.format not in formats:
        raise CheckpointError(f"it is stored as {formats[0]}, but config.json says {group.format}")


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

    Raise CheckpointError if nothing fits, or if several widths or packings fit and the config does not decide.
    """
    words = module.stored("packed").shape[-1]
    fits: dict[tuple[int, bool], None] = {}
    for width in range(1, 9) if args.bits is None else (args.bits,):
        for dense in (True, False):
            zeros_wanted = (*shape[:-2], _words(shape[-2], width, dense), groups)
            if _words(shape[-1], width, dense) == words and zeros in (None, zeros_wanted):
                fits[width, dense or _is_either(shape, width, zeros is not None)] = None
    if not fits:
        held = f"{words} words a row" + (f" and zero points of shape {zeros}" if zeros else "")
        need = f"; {args.bits} bits need {_words(shape[-1], args.bits, True)} words" if args.bits else ""
        raise CheckpointError(
            f"its weight_packed has {held}, which does not fit shape {shape} in {groups} groups{need}"
        )
    if len({width for width, _ in fits}) > 1:
        found = " or ".join(f"{width} bits ({'dense' if dense else 'whole words'})" for width, dense in fits)
        raise CheckpointError(f"its codes can have {found}, and config.json has no num_bits")
    if len(fits) == 1:
        return next(iter(fits))
    width = next(iter(fits))[0]
    if not module.version:
        raise CheckpointError(f"its {width}-bit codes can be dense or in whole words, and config.json has no version")
    return width, module.version >= _DENSE_SINCE


def _words(count: int, width: int, dense: bool) -> int:
    """Return the number of int32 words of ``count`` codes: a dense stream, or as many whole codes to a word as fit."""
    return word_count(count, width) if dense else -(-count // (32 // width))


def _is_either(shape: Shape, width: int, with_zeros: bool) -> bool:
    """Return whether both packings give the same bits: the width divides 32, or all codes fit into one word."""
    fit = 32 // width
    return 32 % width == 0 or (shape[-1] <= fit and (not with_zeros or shape[-2] <= fit))


def _stated_shape(module: Module, packed: Stored) -> Shape:
    stored = module.stored("shape")
    if stored.dtype not in (torch.int64, torch.int32) or stored.shape != (len(packed.shape),):
        raise CheckpointError(f"its weight_shape is {stored.dtype} {stored.shape}, not int64 ({len(packed.shape)},)")
    shape = tuple(module.read("shape").tolist())
    if len(shape) < 2 or shape[:-1] != packed.shape[:-1] or shape[-1] < 0:
        raise CheckpointError(f"its weight_shape is {shape}, but its weight_packed has shape {packed.shape}")
    return shape


def _check_order(module: Module, args: Args, shape: Shape, scale: Shape, block: tuple[int | None, int | None]) -> bool:
    """Return whether ``weight_g_idx`` reorders columns. Raise CheckpointError if it is invalid or missing."""
    if "g_idx" not in module:
        if args.is_reordered and scale[-1] > 1 and block[1] is not None:
            raise CheckpointError(
                "its weight_g_idx is absent, but config.json says that columns are reordered (actorder)"
            )
        return False
    module.checked("g_idx", (torch.int32,), (shape[-1],), f"shape {shape}")
    g_idx = module.read("g_idx").reshape(-1)
    if bool((g_idx == -1).all()) or scale[-1] == 1 or block[1] is None:
        return False
    if bool(((g_idx < 0) | (g_idx >= scale[-1])).any()):
        low, high = int(g_idx.min()), int(g_idx.max())
        raise CheckpointError(f"its weight_g_idx names groups {low} to {high}, but it has {scale[-1]} groups")
    return not torch.equal(g_idx, torch.arange(shape[-1], dtype=torch.int32, device=g_idx.device) // block[1])


def _check_zero_point(module: Module, args: Args) -> bool:
    """Return whether no zero points are stored. Raise CheckpointError if they are absent, but the config needs them."""
    if "zero_point" not in module and args.symmetric is False:
        raise CheckpointError("its weight_zero_point is absent, but config.json says that it is not symmetric")
    return "zero_point" not in module


# -- small floats -------------------------------------------------------------------------------------------------


def _floats(module: Module, args: Args) -> Reading:
    weight = module.stored("weight")
    _check_symmetric(module, args)
    _, block = _blocks(module, args, weight.shape)
    scheme = ScaledFloat(FLOAT8[weight.dtype], block, module.stored("scale").dtype)
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
        what = f"which is not float{args.bits} in groups of {size}" if args.bits else "and config.json has no num_bits"
        raise CheckpointError(f"its weight_packed has {length} bytes and {groups} scales a row, {what}")
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
        raise CheckpointError(f"it has a scale for each group, but config.json says {args}")
    return args.group_size or default


def _check_groups(module: Module, dtypes: tuple[torch.dtype, ...], shape: Shape, size: int, element: str) -> None:
    check_rows(shape)
    module.checked("scale", dtypes, (*shape[:-1], -(-shape[-1] // size)), f"{element} {shape} by {size}")


def _check_symmetric(module: Module, args: Args) -> None:
    """Raise CheckpointError for zero points other than 0; old releases store zeros for float codes."""
    if args.symmetric is False or ("zero_point" in module and bool(module.read("zero_point").float().any())):
        raise CheckpointError("its codes are floats, which have no zero points, but it is not symmetric")


# -- scales -------------------------------------------------------------------------------------------------------


def _blocks(module: Module, args: Args, shape: Shape) -> tuple[Shape, tuple[int | None, int | None]]:
    """Return the shape of the scales as a part of a Weight, and the block under one scale.

    Raise CheckpointError if none fits.
    """
    stored = module.stored("scale")
    check_rows(shape)
    *lead, rows, columns = shape
    strategy = args.strategy or _strategy(stored.shape, shape)
    size = args.group_size
    if strategy == "group" and size is None:
        groups = stored.shape[-1]
        if not groups or not columns or columns % groups:
            raise CheckpointError(
                f"its weight_scale has {groups} groups for {columns} columns, and config.json has no group_size"
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
        raise CheckpointError(f"its scales are {stored.dtype}, but config.json says {args}")
    module.checked("scale", FLOATS, scale, f"{strategy} over {shape}")
    return scale, block


def _strategy(scale: Shape, shape: Shape) -> str:
    """Return the strategy that the shape of the scale implies. Raise CheckpointError if it implies none."""
    if math.prod(scale) == 1:
        return "tensor"
    if scale in (shape[:-1], (*shape[:-1], 1)):
        return "channel"
    if scale[:-1] == shape[:-1]:
        return "group"
    raise CheckpointError(
        f"its weight_scale has shape {scale}, which is not per row or group of {shape}, and there is no config.json"
    )
