"""The arguments of a load in one object, and what they ask for each tensor of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from .._checks import as_device
from ..conversion.selection import Rules, schemes_for, unmatched
from ..errors import TetherError
from ..renaming.steps import Rename
from ..schemes import Scheme
from ..ties.components import Component, find_components, tie_of
from ..torch_private.modules import transient_names
from ..weights.spec import Tie

Value = TypeVar("Value")

Ties = Literal["match", "file", "model"]

Dtype = torch.dtype | Mapping[str, torch.dtype | None] | None
"""One dtype for all tensors, or one per glob over names; the first match wins, ``None`` is the default of ``load``."""

Device = torch.device | str | Mapping[str, torch.device | str | None] | None
"""One device for all tensors, or one per glob, as for ``Dtype``."""


@dataclass(frozen=True)
class LoadOptions:
    """Hold the arguments of ``tt.load`` that decide which steps a plan has; ``tt.load`` describes those that it has."""

    quantize: Rules = None
    dtype: Dtype = None
    device: Device = None
    strict: bool = True
    ties: Ties = "match"
    rename: Rename = None
    is_refit: bool = False
    """Whether values alone are wanted: real non-persistent buffers take theirs, and ties of the file do not matter."""


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes that values may be converted between while they are loaded."""


@dataclass(frozen=True)
class Targets:
    """Hold the tensors of a model, and by name the dtype, device and scheme that the options ask for."""

    options: LoadOptions
    components: tuple[Component, ...]
    """The tensors of the model, grouped by the memory that they share."""
    modules: dict[str, nn.Module]
    transient: set[str]
    """Names of buffers that are not persistent."""
    ties: dict[int, Tie]
    """The tie of each component that has one, by the component's id."""
    dtypes: dict[str, torch.dtype]
    devices: dict[str, torch.device]
    schemes: dict[str, Scheme]


def find_targets(model: nn.Module, options: LoadOptions, faults: list[str]) -> Targets:
    """Return the tensors of ``model`` with what ``options`` ask for each; append to ``faults`` what does not fit."""
    components = find_components(model)
    ties: dict[int, Tie] = {}
    for component in components:
        try:
            tie = tie_of(component)
        except TetherError as error:
            faults.append(str(error))
            continue
        if tie is not None:
            ties[id(component)] = tie
    dtypes = _by_name("dtype", options.dtype, _check_dtype, components, ties, faults)
    devices = _by_name("device", options.device, _check_device, components, ties, faults)
    schemes: dict[str, Scheme] = {}
    try:
        schemes = schemes_for(model, options.quantize, ties.values())
    except TetherError as error:
        faults.append(str(error))
    modules = dict(model.named_modules())
    return Targets(options, components, modules, transient_names(model), ties, dtypes, devices, schemes)


def fault(name: str, what: str) -> str:
    """Return the one line that says ``what`` is wrong with the tensor or argument ``name``."""
    return " ".join(f"{name}: {what}".split())


def _by_name(
    argument: str,
    asked: Any,
    check: Callable[[Any], Value],
    components: Sequence[Component],
    ties: Mapping[int, Tie],
    faults: list[str],
) -> dict[str, Value]:
    """Return the value that ``asked`` has for each name of each component; names of the default are left out."""
    if asked is None:
        return {}
    rules = asked if isinstance(asked, Mapping) else {"*": asked}
    values: dict[str, Value | None] = {}
    for glob, value in rules.items():
        try:
            values[glob] = None if value is None else check(value)
        except (ValueError, TypeError, RuntimeError) as error:
            faults.append(fault(f"{argument}: {glob}" if rules is asked else argument, str(error)))
    if rules is asked:
        for glob, near in unmatched(rules, [name for component in components for name in component.names]).items():
            what = f"this rule matches no tensor of the model{near}. Correct or remove it."
            faults.append(fault(f"{argument}: {glob}", what))
    found: dict[str, Value] = {}
    for component in components:
        tie = ties.get(id(component))
        globs = {
            name: next((glob for glob in rules if fnmatchcase(name, glob)), None)
            for name in (tie.names if tie else component.names)
        }
        answers = {name: values[glob] for name, glob in globs.items() if glob in values}
        first, value = next(iter(answers.items()), ("", None))
        for name, answer in answers.items():
            if answer != value:
                what = (
                    f"{argument}= asks for {answer or 'the default'}, and for {value or 'the default'} under {first}, "
                    "to which it is tied. Ask for the same under both names, or call tt.untie."
                )
                faults.append(fault(name, what))
                break
        if value is not None:
            found.update((name, value) for name in component.names)
    return found


def _check_dtype(dtype: Any) -> torch.dtype:
    """Return ``dtype``; raise ValueError unless it is a dtype to compute in."""
    if dtype not in FLOATS:
        fix = "Use quantize=." if isinstance(dtype, torch.dtype) and dtype.itemsize == 1 else "Give a float dtype."
        raise ValueError(f"{dtype} is not a dtype to compute in. {fix}")
    return dtype  # type: ignore[no-any-return]


def _check_device(device: Any) -> torch.device:
    """Return ``device`` as torch's object; raise ValueError if it is ``meta``."""
    made = as_device(device, name="")
    if made.type == "meta":
        raise ValueError("nothing can be loaded to meta. Name a real device.")
    return made
