"""A warning about code of a model that ``load_state_dict`` calls, and ``tt.load`` does not."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from .._checks import describe_some
from .._warnings import warn
from ..torch_private.modules import code_of_load

_KNOWN = ("torch", "torchtether", "transformers")
"""Packages whose hooks a load need not run: it does what they are for, or they only rename what it renames."""


def warn_of_hooks(modules: Mapping[str, nn.Module]) -> None:
    """Warn if a module, given by name, has hooks of ``load_state_dict``, or such a method, from outside of torch."""
    found = {}
    for name, module in modules.items():
        theirs = [_describe(call) for call in code_of_load(module) if _package_of(call) not in _KNOWN]
        if theirs:
            found[name or type(module).__name__] = theirs[0]
    if found:
        what = describe_some([f"{name} ({call})" for name, call in found.items()])
        fix = "with tt.swapping(model): model.load_state_dict(dict(tt.open(path)), assign=True)"
        warn(f"{what}: load_state_dict calls this, tt.load does not. If it changes or uses values, load by: {fix}")


def _plain(call: Any) -> Any:
    while isinstance(call, partial):
        call = call.func
    return call


def _package_of(call: Any) -> str:
    call = _plain(call)
    return str(getattr(call, "__module__", None) or type(call).__module__).partition(".")[0]


def _describe(call: Any) -> str:
    call = _plain(call)
    return str(getattr(call, "__qualname__", type(call).__qualname__))
