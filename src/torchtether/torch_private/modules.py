"""What stock conversions of modules go through, and what modules keep of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils import parametrize

Apply = Callable[..., nn.Module]


def stock_apply() -> Apply | None:
    """``nn.Module._apply`` as torch has it, through which every stock conversion goes; ``None`` if it was replaced."""
    found = nn.Module._apply
    is_torchs = (found.__module__, found.__qualname__) == ("torch.nn.modules.module", "Module._apply")
    return found if is_torchs else None


def replace_apply(function: Apply, expected: Apply) -> None:
    """``nn.Module._apply`` is ``function`` in this process, if it was ``expected``.

    Nothing else is told that a conversion begins, and which module it converts, without a mode that sees every tensor
    function; such a mode, even one that does nothing, doubles the time of a conversion.
    """
    if nn.Module._apply is expected:
        nn.Module._apply = function  # type: ignore[method-assign]


def flat_weight_refs(modules: Iterable[nn.Module]) -> set[int]:
    """The ids of the weak references that ``nn.RNNBase`` modules keep to their own weights."""
    return {
        id(ref)
        for module in modules
        if isinstance(module, nn.RNNBase)
        for ref in getattr(module, "_flat_weight_refs", ())
    }


def forget_flat_weights(module: nn.RNNBase) -> None:
    """The module has no weak reference to its weights, so that torch's own exchange does not refuse them."""
    module._flat_weight_refs = []


def renew_flat_weights(module: nn.RNNBase) -> None:
    """The module's list of flat weights is that of its parameters, compact in memory where cuDNN wants it."""
    module._init_flat_weights()


def is_parametrization_cached() -> bool:
    """Whether ``parametrize.cached()`` is active and holds computed weights, which a conversion would leave stale."""
    return bool(getattr(parametrize, "_cache_enabled", 0)) and bool(getattr(parametrize, "_cache", None))


def transient_names(model: nn.Module) -> set[str]:
    """Return the names of buffers that are not persistent; torch tells them apart in this private set alone."""
    return {
        f"{path}.{leaf}" if path else leaf
        for path, module in model.named_modules(remove_duplicate=False)
        for leaf in module._non_persistent_buffers_set
    }


class Tables(NamedTuple):
    """Hold the dictionaries in which a module registers its own tensors and modules; changes change the module."""

    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, Tensor | None]
    modules: dict[str, nn.Module | None]
    transient: set[str]
    """Names of buffers that are not persistent."""


def tables_of(module: nn.Module) -> Tables:
    """Return the tables of ``module``; public methods walk them, and neither replace an entry nor keep its place."""
    return Tables(module._parameters, module._buffers, module._modules, module._non_persistent_buffers_set)


def set_tables(module: nn.Module, parameters: Any, buffers: Any, modules: Any) -> None:
    """Give ``module``, made without its constructor, tables of its own; registering one by one asks for that."""
    vars(module).update(_parameters=parameters, _buffers=buffers, _modules=modules)


def set_transient(module: nn.Module, leaf: str, is_transient: bool) -> None:
    """Make the buffer ``leaf`` persistent or not, in a set that is this module's own: a twin may share it."""
    others = module._non_persistent_buffers_set - {leaf}
    module._non_persistent_buffers_set = others | {leaf} if is_transient else others
