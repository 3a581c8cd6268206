"""Private parts of ``nn.Module``: the method behind stock conversions, tables of tensors, hooks, flat weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from operator import attrgetter
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.nn.utils import parametrize

Method = Callable[..., Any]
_Model = TypeVar("_Model")


COMPILED = "_orig_mod."
"""The part of a name that stands for the wrapper of ``torch.compile``."""


def uncompiled(model: _Model) -> _Model:
    """Return the module that ``torch.compile`` wrapped as ``model``; anything else itself.

    The wrapper puts ``_orig_mod.`` before every name, which no checkpoint and no rule has.
    """
    compiling = sys.modules.get("torch._dynamo.eval_frame")  # absent until something is compiled; importing it is slow
    kind: Any = getattr(compiling, "OptimizedModule", ())  # absent while another thread imports that
    found: Any = model
    return found._orig_mod if isinstance(model, kind) else found  # type: ignore[no-any-return]


_WRAPPED = "_checkpoint_wrapped_module"
"""The name of the module inside the one that torch's ``checkpoint_wrapper`` (activation checkpointing) makes."""


def unwrapped_name(name: str) -> str:
    """Return ``name`` as ``state_dict()`` spells it: without the parts that torch's ``checkpoint_wrapper`` adds."""
    return name.replace(f"{_WRAPPED}.", "")


def wrapped_paths(model: nn.Module) -> dict[str, str]:
    """Return the path of each module inside a ``checkpoint_wrapper``, by the path that ``state_dict()`` has for it."""
    paths = [path for path, _ in model.named_modules(remove_duplicate=False) if _WRAPPED in path]
    return {unwrapped_name(f"{path}.")[:-1]: path for path in paths}


def current_method(name: str) -> tuple[Method, bool]:
    """Return the current method ``name`` of ``nn.Module``, and whether it is torch's own."""
    found = getattr(nn.Module, name)
    return found, (found.__module__, found.__qualname__) == ("torch.nn.modules.module", f"Module.{name}")


def replace_method(name: str, function: Method, expected: Method) -> None:
    """Make ``function`` the method ``name`` of ``nn.Module``, if the current one is ``expected``.

    Torch has no other way to observe that a stock conversion (``_apply``) or load of a module begins, except a mode
    that sees every tensor function; even a mode that does nothing doubles the time of a conversion.
    """
    if getattr(nn.Module, name) is expected:
        setattr(nn.Module, name, function)


def flat_weight_refs(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the weak references that ``nn.RNNBase`` modules keep to their own weights."""
    return {
        id(ref)
        for module in modules
        if isinstance(module, nn.RNNBase)
        for ref in getattr(module, "_flat_weight_refs", ())
    }


def forget_flat_weights(module: nn.RNNBase) -> None:
    """Drop the module's weak references to its weights, so that torch's own exchange does not refuse them."""
    module._flat_weight_refs = []


def renew_flat_weights(module: nn.RNNBase) -> None:
    """Set the module's list of flat weights to its parameters, compact in memory where cuDNN wants it."""
    module._init_flat_weights()


def is_parametrization_cached() -> bool:
    """Return whether ``parametrize.cached()`` holds computed weights, which would be stale after a conversion."""
    return bool(getattr(parametrize, "_cache_enabled", 0)) and bool(getattr(parametrize, "_cache", None))


def transient_names(model: nn.Module) -> set[str]:
    """Return the names of buffers that are not persistent; only this private set of torch records them."""
    return {
        f"{path}.{leaf}" if path else leaf
        for path, module in model.named_modules(remove_duplicate=False)
        for leaf in module._non_persistent_buffers_set
    }


class Tables(NamedTuple):
    """Hold the dictionaries in which a module registers its own tensors and modules; not copies."""

    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, Tensor | None]
    modules: dict[str, nn.Module | None]
    transient: set[str]
    """Names of buffers that are not persistent."""


def tables_of(module: nn.Module) -> Tables:
    """Return the tables of ``module``; public methods cannot replace an entry and keep its place in the order."""
    return Tables(module._parameters, module._buffers, module._modules, module._non_persistent_buffers_set)


def set_tables(module: nn.Module, parameters: Any, buffers: Any, modules: Any) -> None:
    """Give ``module`` tables of its own; without them ``register_*`` fails on a module made without its constructor."""
    vars(module).update(_parameters=parameters, _buffers=buffers, _modules=modules)


def set_transient(module: nn.Module, leaf: str, is_transient: bool) -> None:
    """Make the buffer ``leaf`` persistent or not; replaces the set, which a copy of the module may share."""
    others = module._non_persistent_buffers_set - {leaf}
    module._non_persistent_buffers_set = others | {leaf} if is_transient else others


parameters_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_parameters")
"""The dictionary of a module's own parameters. The public iterator leaves out ``None`` and repeated tensors."""

buffers_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_buffers")
"""The dictionary of a module's own buffers, for the same reason."""

transient_of: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
"""The names of a module's own buffers that are not persistent."""

load_hooks_of: Callable[[nn.Module], dict[int, Any]] = attrgetter("_load_state_dict_pre_hooks")
"""The hooks that run before a module's own tensors are loaded; no public name lists them."""

forward_hooks_of: Callable[[nn.Module], dict[int, Any]] = attrgetter("_forward_pre_hooks")
"""The hooks that run before a module's forward; pruning recomputes its weight in one."""

pruned_name_of: Callable[[Any], str] = attrgetter("_tensor_name")
"""The name of the tensor that a pruning method masks."""


def code_of_load(module: nn.Module) -> list[Any]:
    """Return what ``load_state_dict`` calls for ``module`` itself: its hooks, before and after, and its method."""
    hooks = (*load_hooks_of(module).values(), *module._load_state_dict_post_hooks.values())
    return [*(getattr(hook, "hook", hook) for hook in hooks), type(module)._load_from_state_dict]


def code_of_conversion(module: nn.Module, is_root: bool) -> list[Any]:
    """Return the methods by which ``.to`` of a model converts ``module``, unless they are those of ``nn.Module``.

    ``to`` itself is called for the root alone; below it torch calls ``_apply``.
    """
    own = type(module)
    methods = [own._apply] if own._apply is not nn.Module._apply else []
    return [*methods, own.to] if is_root and own.to is not nn.Module.to else methods


_PARAMETRIZE = parametrize.ParametrizationList.__init__.__code__


def is_unwrapping(caller: FrameType) -> bool:
    """Return whether ``caller`` is torch's code that makes Parameters of a subclass's inner tensors, as in export.

    That code reads ``requires_grad`` of the subclass and sets it on each inner tensor, integer tensors included, which
    cannot require grad. Torch has no public way to give another answer for each inner tensor, so the caller's frame
    is compared.
    """
    if caller.f_code is not _PARAMETRIZE:
        return False
    return any(type(one).__name__ == "UnwrapTensorSubclass" for one in caller.f_locals["self"])
