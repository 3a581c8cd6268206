"""Common code of GPTQ, AWQ and AutoRound: modules with ``qweight``, ``qzeros`` and ``scales``.

One config gives the options of all modules, with overrides for some of them by name or pattern. The tensors determine
which modules are quantized, and their shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError
from ..files import Stored
from ..files.strict_json import short_repr
from ..geometry.views import Shape
from ..schemes.blocks import Block
from .entry import Contents, Entry, Found, check_dtype
from .name_patterns import Clock, NamePattern, is_pattern

_ROLES = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True)
class Options:
    """Options of a module's quantization; ``None`` if the config does not give one. Group size -1 is the whole row."""

    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None


class Override(NamedTuple):
    """Options for the modules whose name ``matches`` accepts."""

    matches: Callable[[str], object]
    options: Options


@dataclass(frozen=True)
class Settings:
    """Options of all modules, and overrides for some: of these, the first that matches applies."""

    options: Options = Options()
    rules: tuple[Override, ...] = ()

    def of(self, module: str) -> Options:
        """Return the options of ``module``; a field that its override leaves ``None`` is that of all modules."""
        rule = next((rule for rule in self.rules if rule.matches(module)), None)
        if rule is None:
            return self.options
        overridden = {name: value for name, value in vars(rule.options).items() if value is not None}
        return replace(self.options, **overridden)


def options_of(config: Mapping[str, Any], *, file: str) -> Options:
    """Return the options in ``config``, under the names of AutoGPTQ or of old AWQ.

    Raise CheckpointError under the name ``file`` for an invalid value.

    >>> options_of({"w_bit": 4, "q_group_size": 128, "sym": None}, file="quant_config.json")
    Options(bits=4, group_size=128, symmetric=None)
    """

    def first(*names: str) -> Any:
        return next((config[name] for name in names if config.get(name) is not None), None)

    bits, group_size, symmetric = first("bits", "w_bit"), first("group_size", "q_group_size"), config.get("sym")
    if bits is not None and (type(bits) is not int or not 1 <= bits <= 64):
        raise CheckpointError(f"bits is {short_repr(bits)}, not an integer from 1 to 64", name=file)
    if group_size is not None and (type(group_size) is not int or not (group_size == -1 or 0 < group_size < 2**31)):
        raise CheckpointError(f"group_size is {short_repr(group_size)}, not -1 or a positive integer", name=file)
    if symmetric is not None and type(symmetric) is not bool:
        raise CheckpointError(f"sym is {short_repr(symmetric)}, not true or false", name=file)
    return Options(bits, group_size, symmetric)


def dynamic_overrides(config: Mapping[str, Any], *, file: str) -> tuple[Override, ...]:
    """Return the overrides in ``dynamic`` of GPTQModel: patterns for the beginning of a module's name.

    A pattern with ``+:`` or no prefix has options. One with ``-:`` excludes modules from quantization; if such a module
    is quantized nevertheless, it has the options of all modules.

    >>> rules = dynamic_overrides({"dynamic": {r"-:lm_head": {}, r"+:.*down": {"bits": 8}}}, file="config.json")
    >>> Settings(Options(4), rules).of("layers.0.down").bits, Settings(Options(4), rules).of("lm_head").bits
    (8, 4)
    """
    rules, clock = [], Clock()
    for text, options in _object(config, "dynamic", file).items():
        if not isinstance(options, Mapping):
            raise CheckpointError(f"dynamic[{short_repr(text)}] is {short_repr(options)}, not an object", name=file)
        made = Options() if text.startswith("-:") else options_of(options, file=file)
        pattern = NamePattern(text[2:] if text[:2] in ("+:", "-:") else text, file=file, clock=clock)
        rules.append(Override(pattern.match, made))
    return tuple(rules)


def extra_overrides(config: Mapping[str, Any], names: Container[str], *, file: str) -> tuple[Override, ...]:
    """Return the overrides in ``extra_config`` of AutoRound, by the name of a module or a pattern.

    A key that is not in ``names``, the names of all modules, is a pattern, which may match any part of a name.
    """
    extra = _object(config, "extra_config", file)
    exact, patterns, clock = [], [], Clock()
    for text, options in extra.items():
        if not isinstance(options, Mapping):
            raise CheckpointError(
                f"extra_config[{short_repr(text)}] is {short_repr(options)}, not an object", name=file
            )
        made = options_of(options, file=file)
        if text in names:
            exact.append(Override(text.__eq__, made))
        elif is_pattern(text):  # a name of a module in another file need not be a valid pattern
            patterns.append(Override(NamePattern(text, file=file, clock=clock).search, made))
    return (*exact, *patterns)


def has_shapes(contents: Contents, fit: Callable[[Shape, Shape, Shape], bool]) -> bool:
    """Return whether ``fit`` accepts the shapes of ``qweight``, ``qzeros`` and ``scales`` of any module."""
    for keys in find_modules(contents).values():
        if {"qweight", "qzeros", "scales"} <= keys.keys():
            shapes = [contents.tensors[keys[role]].shape for role in ("qweight", "qzeros", "scales")]
            if all(len(shape) == 2 for shape in shapes) and fit(*shapes):
                return True
    return False


def find_modules(contents: Contents) -> dict[str, dict[str, str]]:
    """Return the keys by role of every module that has a ``qweight`` or ``qzeros``, by module."""
    modules: dict[str, dict[str, str]] = {}
    if contents.leaves.isdisjoint(("qweight", "qzeros")):
        return modules
    for key in contents.tensors:
        module, _, role = key.rpartition(".")
        if role in ("qweight", "qzeros"):
            modules.setdefault(module, {})
    for module, keys in modules.items():
        for role in (*_ROLES, "weight"):
            key = f"{module}.{role}" if module else role
            if key in contents.tensors:
                keys[role] = key
    return modules


def read_modules(
    contents: Contents, settings: Settings, understand: Callable[[Contents, Mapping[str, str], Options], Entry]
) -> Found:
    """Return every module with a ``qweight``, with the entry that ``understand`` makes of it.

    CheckpointErrors of ``understand`` are faults. A module that lacks ``qweight`` or ``scales``, or that also has a
    ``weight``, is a fault too.
    """

    def read(module: str, keys: Mapping[str, str]) -> Entry:
        if "weight" in keys:
            raise CheckpointError(f"it is stored twice, as {keys['weight']} and, quantized, as {module}.qweight")
        for role in ("qweight", "scales"):
            if role not in keys:
                raise CheckpointError(f"it has {' and '.join(keys)}, but no {role}")
        return understand(contents, keys, settings.of(module))

    found = Found()
    for module, keys in find_modules(contents).items():
        found.add(f"{module}.weight" if module else "weight", keys, read, module, keys)
    return found


def matrix(contents: Contents, keys: Mapping[str, str], role: str, dtypes: tuple[torch.dtype, ...]) -> Stored:
    """Return the header of the tensor with ``role``; CheckpointError unless it is a matrix in one of ``dtypes``."""
    stored = contents.tensors[keys[role]]
    check_dtype(role, stored.dtype, dtypes)
    if len(stored.shape) != 2 or 0 in stored.shape:
        raise CheckpointError(f"its {role} has shape {stored.shape}, which is not a matrix")
    return stored


def check_shape(role: str, stored: Stored, wanted: Shape, why: str) -> None:
    """Raise CheckpointError unless ``stored`` has the shape ``wanted``; ``why`` names what determines that shape."""
    if stored.shape != wanted:
        raise CheckpointError(f"its {role} has shape {stored.shape}, but {why} needs {wanted}")


def groups_over(columns: int, groups: int, size: int | None) -> Block:
    """Return the block under one scale, for ``groups`` groups of ``size`` (-1: the whole row) over ``columns``.

    Raise CheckpointError if the numbers contradict each other. A ``size`` of ``None`` means ``columns / groups``. With
    several groups that must be a power of two: otherwise other sizes are possible, with a shorter group at the end.

    >>> groups_over(192, 2, 128), groups_over(256, 2, None), groups_over(64, 1, -1)
    ((1, 128), (1, 128), (1, None))
    """
    if size is None:
        size = columns // groups
        if groups > 1 and (size * groups != columns or size & (size - 1)):
            raise CheckpointError(
                f"{groups} groups over {columns} columns can have several sizes, and no config has a group_size",
                fix="Put the config of the checkpoint into its folder.",
            )
    size = columns if size == -1 else size
    if -(-columns // size) != groups:
        made = -(-columns // size)
        raise CheckpointError(
            f"its scales are for {groups} groups, but group_size {size} over {columns} columns gives {made} groups"
        )
    return (1, None) if groups == 1 else (1, size)


def compute_dtype(scales: torch.dtype) -> torch.dtype:
    """Return the compute dtype that scales of this dtype imply: bfloat16 for bfloat16, else float16."""
    return scales if scales == torch.bfloat16 else torch.float16


def _object(config: Mapping[str, Any], name: str, file: str) -> Mapping[str, Any]:
    found = config.get(name) or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{name} is {short_repr(found)}, not an object", name=file)
    return found
