"""A warning about code of a model that ``.to`` calls, and ``tt.convert`` does not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn

from .._checks import describe_some
from .._warnings import warn
from ..torch_private.modules import code_of_conversion

_KNOWN = ("torch", "torchtether", "transformers", "sentence_transformers", "diffusers")
"""Packages whose code a conversion need not run: it does what that is for, or refuses the same."""


def warn_of_overrides(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Warn if one of the ``modules`` of ``model`` has a method from outside of torch that converts its tensors."""

    def code_of(module: nn.Module) -> list[Any]:
        return code_of_conversion(module, is_root=module is model)

    if not any(map(code_of, modules)):
        return
    if found := foreign(dict(model.named_modules()), code_of, _KNOWN):
        fix = "with tt.swapping(model, optimizer=optimizer): model.to(...)"
        warn(f"{found}: .to() calls this, tt.convert does not. If it keeps a dtype, or moves more, convert by: {fix}")


def foreign(
    modules: Mapping[str, nn.Module], code_of: Callable[[nn.Module], Iterable[Any]], known: Collection[str]
) -> str:
    """Return the modules with a call in ``code_of(module)`` of a package not ``known``, and its first, as text."""
    found = {}
    for name, module in modules.items():
        theirs = [_describe(call) for call in code_of(module) if _package_of(call) not in known]
        if theirs:
            found[name or type(module).__name__] = theirs[0]
    return describe_some([f"{name} ({call})" for name, call in found.items()])


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
