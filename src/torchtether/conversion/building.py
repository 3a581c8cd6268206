"""Building models on ``meta``, without memory, with a record of how their constructors compute each tensor."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, contextmanager
from types import FrameType
from typing import Any

from torch import nn
from torch.nn.modules import module as hooks
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from .._checks import describe_some
from .._interruptions import Deferred
from .._warnings import warn
from ..torch_private.modules import buffers_of, parameters_of
from .attributes import attributes_of
from .programs import Recipe
from .recording import Recorder, recording

RECIPE = "_tether_recipe"
"""The attribute of a tensor on ``meta`` that holds its recipe."""

RECIPES = "_tether_recipes"
"""The attribute of a module that holds recipes of its tensors: ``.to(dtype)`` replaces buffers, ``deepcopy`` all."""

INITIALISING: dict[str, Callable[[], AbstractContextManager[None]]] = {}
"""Contexts for libraries whose models skip their initialisation on ``meta``, by a module that is imported then.

Inside such a context the models that the thread builds initialise their tensors on ``meta``, too.
"""


def on_meta() -> _OnMeta:
    """Build modules on ``meta`` inside the block, and record how each of their tensors is computed.

    Like ``torch.device("meta")``, but ``materialize`` or ``load`` can restore exactly what the constructors computed
    (rotary frequencies, masks, ``torch.tensor`` constants), which no checkpoint stores.  Code that reads values
    (``.item()``, ``.tolist()``, ``nonzero``) gets them if the record determines them.  Random numbers are drawn when
    the record is replayed, from the generator as it is then; after a seed or with a generator that a constructor sets,
    they are those that it determines on the CPU.  Only modules that this thread builds are recorded.

    >>> import torch, torchtether as tt
    >>> with tt.on_meta():
    ...     norm = torch.nn.BatchNorm1d(2)
    >>> norm.running_var.device.type, tt.materialize(norm).running_var
    ('meta', tensor([1., 1.]))
    """
    return _OnMeta()


class _OnMeta(ContextDecorator):
    """The context manager of a block. No signal interrupts its steps, which switch what holds for the whole process."""

    def __init__(self) -> None:
        self._stacks: list[ExitStack] = []

    def _recreate_cm(self) -> _OnMeta:
        return _OnMeta()

    def __enter__(self) -> None:
        signals = Deferred(_is_switching)
        with ExitStack() as stack:
            stack.callback(signals.end)
            signals.begin()
            stack.enter_context(_recorded())
            signals.deliver()
            self._stacks.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._stacks.pop().__exit__(*error)


_SWITCHING = {function.__code__ for function in (_OnMeta.__enter__, _OnMeta.__exit__)}


def _is_switching(frame: FrameType | None) -> bool:
    """Return whether a signal that arrives in ``frame`` must wait: a block begins or ends."""
    while frame is not None and frame.f_code not in _SWITCHING:
        frame = frame.f_back
    return frame is not None


@contextmanager
def _recorded() -> Iterator[None]:
    """Record inside the block, and give the modules that were built there their recipes at its end."""
    with _modules_built() as modules:
        with recording() as recorder:
            yield
        _attach_recipes(modules, recorder)
    if failed := describe_some(list(recorder.failed)):
        fix = "If the values of a module depend on this, build that module on a real device."
        warn(f"{failed}: not possible on meta, and the code inside tt.on_meta() went on without it. {fix}")


class _Watchers(threading.local):
    """What follows the modules that a thread builds, of its blocks from the outermost on."""

    def __init__(self) -> None:
        self.all: list[Callable[[nn.Module, Any], None]] = []


_WATCHERS = _Watchers()
_HOOKS: list[RemovableHandle] = []


def _hook_registrations() -> None:
    """Let torch tell the watchers of a thread what its modules register, from the first block on.

    The hooks stay: torch loops over them in every thread that builds a module, which fails if one is removed meanwhile.
    No lock, which a process that is forked meanwhile would wait for: if two threads register them, all is told twice.
    """
    if not _HOOKS:
        registrations = (
            hooks.register_module_parameter_registration_hook,
            hooks.register_module_buffer_registration_hook,
            hooks.register_module_module_registration_hook,
        )
        _HOOKS.extend([register(_tell_watchers) for register in registrations])


def _tell_watchers(parent: nn.Module, name: str, value: Any) -> None:
    for watch in tuple(_WATCHERS.all):
        watch(parent, value)


@contextmanager
def _modules_built() -> Iterator[dict[int, nn.Module]]:
    """Yield a dictionary in which the block collects, by id, the modules in which this thread registers something."""
    built: dict[int, nn.Module] = {}
    left = dict(INITIALISING)
    contexts = ExitStack()

    def watch(parent: nn.Module, value: Any) -> None:
        for library in [one for one in left if one in sys.modules]:  # it may be imported inside the block
            contexts.enter_context(left.pop(library)())
        built[id(parent)] = parent
        if isinstance(value, nn.Module):
            built[id(value)] = value

    _hook_registrations()
    watchers = _WATCHERS.all
    watchers.append(watch)
    try:
        with contexts:
            yield built
    finally:
        watchers.remove(watch)
        built.clear()


def _attach_recipes(built: dict[int, nn.Module], recorder: Recorder) -> None:
    """Attach its recipe to every tensor in or below the modules ``built`` whose values the record determines."""
    kept: list[Recipe] = []
    # a copied module registers nothing but its top in another
    modules = {id(module): module for top in built.values() for module in top.modules()}
    for module in modules.values():
        own: dict[str, Recipe] = {}
        for name, tensor in {**parameters_of(module), **buffers_of(module), **dict(attributes_of(module))}.items():
            recipe = None if tensor is None or is_lazy(tensor) else recorder.recipe(tensor)
            if recipe is not None and tensor is not None and not recorder.is_stale(recipe):
                setattr(tensor, RECIPE, recipe)
                kept.append(recipe)
                if name in parameters_of(module) or name in buffers_of(module):
                    own[name] = recipe
        if own:
            module.__dict__[RECIPES] = own
    recorder.close(kept)
