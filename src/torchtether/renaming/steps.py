"""The ``rename`` argument of a load: steps, applied in order, that change a checkpoint's names to a model's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from .._checks import describe
from ..errors import RuleError, TetherError
from ..ties.names import nearest
from ..torch_private.modules import wrapped_paths
from .named_tensors import NamedTensor, Rule

Substitution = tuple[str, str]
Naming = Callable[[str], str | None]
Rename = Mapping[str, str] | Naming | Rule | Sequence[Substitution | Rule | Mapping[str, str] | Naming] | None
"""A mapping, a function, a rule, or a list of these and of (regex, replacement) pairs, applied in order."""


def renamed(names: Iterable[NamedTensor], rename: Rename) -> tuple[list[NamedTensor], list[str]]:
    """Return ``names`` after all steps of ``rename``, each applied to the result of the last; and the faults.

    A rule that matches no name is a fault; a substitution, a mapping and a function need not match.

    >>> import torch
    >>> from torchtether.renaming.pieces import whole
    >>> from torchtether.schemes import Plain
    >>> from torchtether.weights.spec import WeightSpec
    >>> gamma = NamedTensor("model.norm.gamma", whole("model.norm.gamma", WeightSpec.of((2,), torch.float32, Plain())))
    >>> renamed([gamma], [(r"^model\\.", ""), (r"gamma$", "weight")])[0][0].name
    'norm.weight'
    """
    now, faults = list(names), []
    for step in _steps(rename):
        if isinstance(step, Rule):
            made = step.apply(now)
            if made is None:
                near = nearest(_sought(step), [one.name for one in now])
                near = f", the nearest is {near!r}" if near else ""
                faults.append(f"rename: {step} matches no name of the checkpoint{near}. Correct or remove it.")
            else:
                now = made
        else:
            called = ((one, _called(step, one.name)) for one in now)
            now = [replace(one, name=name) for one, name in called if name is not None]
    return now, faults


def with_wrappers(rename: Rename, model: nn.Module) -> Rename:
    """Return ``rename``, then a step for modules of ``model`` in a ``checkpoint_wrapper``, which files do not name."""
    paths = wrapped_paths(model)
    if not paths:
        return rename

    def wrap(name: str) -> str:
        path, _, leaf = name.rpartition(".")
        return f"{paths[path]}.{leaf}" if path in paths else name

    return [*_steps(rename), wrap]


_FIX = "Give pairs, tt.Concat, tt.Split, tt.Stack, tt.Transpose, tt.Rotary, mappings or functions."


def _steps(rename: Rename) -> list[Rule | Naming]:
    if rename is None:
        return []
    if isinstance(rename, (Rule, Mapping)) or callable(rename):
        rename = [rename]
    try:
        if isinstance(rename, str):  # its letters are no rules
            raise TypeError
        return [_step(step) for step in rename]
    except TypeError:
        raise RuleError(f"is {describe(rename)}, not a list of rules", name="rename", fix=_FIX) from None


def _step(step: Substitution | Rule | Mapping[str, str] | Naming) -> Rule | Naming:
    if isinstance(step, Mapping):
        table = dict(step)
        return lambda name: table.get(name, name)
    if isinstance(step, Rule) or callable(step):
        return step
    try:
        pattern, replacement = step
        compiled = re.compile(pattern)
        compiled.sub(replacement, "")
    except (re.error, TypeError, ValueError) as error:
        raise RuleError(
            f"{step!r} is not a (regex, replacement) pair: {error}",
            name="rename",
            fix=_FIX,
        ) from None
    return lambda name: compiled.sub(replacement, name)


def _called(function: Naming, name: str) -> str | None:
    """Return ``function(name)``. Raise RuleError if it fails, or returns neither a name nor ``None``."""
    try:
        made = function(name)
    except TetherError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise RuleError(f"the function fails for {name!r} with {why}", name="rename", fix=_NAMING) from error
    if made is not None and not isinstance(made, str):
        raise RuleError(f"the function returns {describe(made)} for {name!r}, not a name", name="rename", fix=_NAMING)
    return made


_NAMING = "Give a function of a name that gives a name, or None to leave the tensor out."


def _sought(rule: Any) -> str:
    return str(rule.sources[0] if hasattr(rule, "sources") else rule.source)
