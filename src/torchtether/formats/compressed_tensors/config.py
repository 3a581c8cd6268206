"""Parse the ``quantization_config`` of compressed-tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ...errors import CheckpointError
from ...files.strict_json import short_repr
from ..name_patterns import Clock, NamePattern

PACK, INT, FLOAT, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
NVFP4, MXFP4, MXFP6, MXFP8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized"
MIXED = "mixed-precision"

_UNSAID = ("", MIXED)
_PLAIN = ("dense", "fakequant")
_KNOWN = (PACK, INT, FLOAT, NAIVE, NVFP4, MXFP4, MXFP6, MXFP8, *_UNSAID, *_PLAIN)
_REFUSED = {
    "marlin-24": "2:4 sparse int4 in the order of Marlin's kernel",
    "sparse-bitmask": "sparse values under a bitmask",
    "sparse-24-bitmask": "2:4 sparse values under a bitmask",
}
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")


@dataclass(frozen=True)
class Args:
    """Quantization arguments of weights; ``None`` where the config gives none."""

    kind: str | None = None
    bits: int | None = None
    strategy: str | None = None
    group_size: int | None = None
    block: tuple[int, int] | None = None
    symmetric: bool | None = None
    is_reordered: bool = False
    """Whether columns are reordered (``actorder: group``), so that ``weight_g_idx`` must give their groups."""

    def __str__(self) -> str:
        size = f" of {self.group_size or self.block}" if self.group_size or self.block else ""
        return f"{self.kind}{self.bits} by {self.strategy}{size}"


@dataclass(frozen=True)
class ConfigGroup:
    """A config group; ``args`` is ``None`` if it does not quantize weights, ``format`` is "" if it names none."""

    name: str
    targets: tuple[str, ...]
    format: str
    args: Args | None


UNKNOWN = ConfigGroup("", (), "", Args())
"""The group of every module if there is no config."""

_IGNORED = ConfigGroup("ignore", (), "", None)


@dataclass(frozen=True)
class Names:
    """Targets of config groups: names of modules, patterns for names (``re:``), and classes, each with its group."""

    exact: Mapping[str, ConfigGroup]
    patterns: tuple[tuple[NamePattern, ConfigGroup], ...]
    classes: tuple[ConfigGroup, ...]

    @staticmethod
    def of(pairs: Iterable[tuple[str, ConfigGroup]]) -> Names:
        """Index ``pairs`` of target and group. Of equal targets the last counts; patterns are tried in sorted order."""
        named, clock = dict(pairs), Clock()
        patterns = (
            (NamePattern(target.removeprefix("re:"), file="config.json", clock=clock), named[target])
            for target in sorted(named)
            if target.startswith("re:")
        )
        # a target that begins with a capital is taken for a class of torch; names do not tell which modules have it
        classes = dict.fromkeys(group for target, group in named.items() if target[:1].isupper())
        return Names(named, tuple(patterns), tuple(classes))

    def find(self, module: str) -> tuple[ConfigGroup, ...]:
        """Return the group that names ``module``, else that of the first matching pattern, else those of classes."""
        if module in self.exact:
            return (self.exact[module],)
        matching = next((group for pattern, group in self.patterns if pattern.match(module)), None)
        return self.classes if matching is None else (matching,)


@dataclass(frozen=True)
class Config:
    """A checked ``quantization_config``. ``version`` is that of the package that wrote it, () if it is absent."""

    targets: Names
    ignored: Names
    version: tuple[int, ...]

    def is_ignored(self, module: str) -> bool:
        """Return whether ``ignore`` has the name of ``module`` or a pattern for it; its classes are skipped."""
        names = self.ignored
        return module in names.exact or any(pattern.match(module) for pattern, _ in names.patterns)


def parse(settings: Mapping[str, Any]) -> Config:
    """Return ``settings`` as a Config.

    Raises CheckpointError under the name ``config.json`` for settings that are not read, and for invalid ones.

    >>> config = parse({"config_groups": {"W4A16": ["Linear"]}, "format": "pack-quantized", "ignore": ["lm_head"]})
    >>> [str(group.args) for group in config.targets.find("layer.0")]
    ['int4 by group of 128']
    """
    _refuse_rotations(settings.get("transform_config"))
    sparsity = settings.get("sparsity_config")
    _format(sparsity.get("format") if isinstance(sparsity, Mapping) else None, known=False)
    format = _format(settings.get("format"))
    groups = settings.get("config_groups")
    if groups is None:
        groups = {}
    if not isinstance(groups, Mapping):
        _refuse(f"config_groups is {short_repr(groups)}, not an object")
    ignore = _strings(settings.get("ignore") or [], "ignore")
    found = tuple(_group(str(name), group, format) for name, group in groups.items())
    targets = Names.of((target, group) for group in found for target in group.targets)
    return Config(targets, Names.of((target, _IGNORED) for target in ignore), _version(settings.get("version")))


def _group(name: str, group: Any, format: str) -> ConfigGroup:
    if isinstance(group, list):
        if name.upper() not in PRESETS:
            _refuse(f"config group {name} is a list of targets, but no preset has that name")
        group = {"targets": group, "weights": PRESETS[name.upper()]}
    if not isinstance(group, Mapping):
        _refuse(f"config group {name} is {short_repr(group)}, not an object or a list of targets")
    weights = group.get("weights")
    if weights is not None and not isinstance(weights, Mapping):
        _refuse(f"weights of config group {name} is {short_repr(weights)}, not an object")
    own = _format(group.get("format"))
    return ConfigGroup(
        name,
        _strings(group.get("targets"), f"targets of config group {name}"),
        own or (format if format not in _UNSAID else ""),
        None if weights is None else _args(name, weights),
    )


def _args(name: str, weights: Mapping[str, Any]) -> Args:
    who = f"of config group {name}"
    kind = str(weights.get("type") or "int").lower()
    bits = weights.get("num_bits", 8)
    if (
        kind not in ("int", "float")
        or type(bits) is not int
        or bits not in (range(1, 9) if kind == "int" else (4, 6, 8))
    ):
        _refuse(f"weights {who} are {short_repr(kind)} with num_bits {short_repr(bits)}, not int1 to 8 or float4, 6, 8")
    size = weights.get("group_size")
    if size is not None and (type(size) is not int or size < -1 or size == 0):
        _refuse(f"group_size {who} is {short_repr(size)}, not a positive integer")
    size = None if size == -1 else size
    strategy = weights.get("strategy")
    if strategy is None:
        strategy = "group" if size else "channel" if weights.get("group_size") == -1 else "tensor"
    strategy = str(strategy).lower()
    if strategy not in _STRATEGIES:
        _refuse(f"strategy {who} is {short_repr(strategy)}, not one of {', '.join(_STRATEGIES)}")
    block = _block(weights.get("block_structure"), who)
    if (strategy in ("group", "tensor_group")) != (size is not None) or (strategy == "block") != (block is not None):
        _refuse(f"strategy {who} is {strategy}, which contradicts group_size {size} and block_structure {block}")
    symmetric = weights.get("symmetric", True)
    if type(symmetric) is not bool:
        _refuse(f"symmetric {who} is {short_repr(symmetric)}, not true or false")
    order = weights.get("actorder")
    is_reordered = order is True or (isinstance(order, str) and order.lower() == "group")
    return Args(kind, bits, strategy, size, block, symmetric, is_reordered)


def _block(block: Any, who: str) -> tuple[int, int] | None:
    if block is None:
        return None
    if isinstance(block, str) and re.fullmatch(r"\d{1,9}x\d{1,9}", block):
        block = [int(number) for number in block.split("x")]
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        _refuse(f"block_structure {who} is {short_repr(block)}, not [rows, columns]")
    return block[0], block[1]


def _format(format: Any, *, known: bool = True) -> str:
    if format is not None and not isinstance(format, str):
        _refuse(f"format is {short_repr(format)}, not a string")
    named = (format or "").lower().replace("_", "-")
    if named in _REFUSED:
        _refuse(
            f"the format {named} ({_REFUSED[named]}) is not supported",
            "Decompress the checkpoint with compressed-tensors.",
        )
    if known and named not in _KNOWN:
        _refuse(f"unknown format {short_repr(named)}")
    return named


def _refuse_rotations(transform: Any) -> None:
    rotations = transform.get("config_groups", transform) if isinstance(transform, Mapping) else transform
    if rotations:
        _refuse(
            f"transform_config {short_repr(rotations)} rotates activations, which is not supported",
            "Load the model with transformers and compressed-tensors.",
        )


def _version(version: Any) -> tuple[int, ...]:
    found = re.match(r"\d{1,6}(\.\d{1,6})*", version) if isinstance(version, str) else None
    return tuple(int(number) for number in found[0].split(".")) if found else ()


def _strings(values: Any, who: str) -> tuple[str, ...]:
    if not (isinstance(values, list) and all(isinstance(value, str) for value in values)):
        _refuse(f"{who} is {short_repr(values)}, not a list of names")
    return tuple(values)


def _refuse(what: str, fix: str = "") -> NoReturn:
    raise CheckpointError(what, name="config.json", fix=fix)


# -- presets ------------------------------------------------------------------------------------------------------


def _weights(kind: str, bits: int, strategy: str, size: int | None = None, **more: Any) -> Mapping[str, Any]:
    return {"type": kind, "num_bits": bits, "strategy": strategy, "group_size": size, **more}


def _presets() -> Iterable[tuple[str, Mapping[str, Any] | None]]:
    for activations in (4, 8, 16):
        for bits in range(2, min(activations, 8) + 1):
            yield f"W{bits}A{activations}", _weights("int", bits, "group", 128)
    yield "W8A8", _weights("int", 8, "channel")
    yield "INT8", _weights("int", 8, "channel")
    yield "W4A16_ASYM", _weights("int", 4, "group", 128, symmetric=False)
    yield "W4AFP8", _weights("int", 4, "group", 128)
    yield "FP8", _weights("float", 8, "tensor")
    yield "FP8_DYNAMIC", _weights("float", 8, "channel")
    yield "FP8_BLOCK", _weights("float", 8, "block", block_structure=[128, 128])
    for name in ("NVFP4", "NVFP4A16"):
        yield name, _weights("float", 4, "tensor_group", 16)
    for bits, names in {
        4: ("MXFP4", "MXFP4A16", "MXFP4XFP8"),
        6: ("MXFP6A16", "MXFP6A8"),
        8: ("MXFP8", "MXFP8A16"),
    }.items():
        for name in names:
            yield name, _weights("float", bits, "group", 32)
    yield "UNQUANTIZED", None


PRESETS = dict(_presets())
"""The ``weights`` of a group that has only a preset's name and targets."""
