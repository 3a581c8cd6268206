"""The exchange: a parameter or buffer gets other contents, and stays the same object.

Every such change in this package goes through ``Exchange``: it checks everything first, keeps hooks, grads, attributes
and class, converts optimizer state, and can take all of it back.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterable
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._interruptions import Arguments, Deferred, Result, renewed_after_fork, take
from ..errors import ConversionError, TetherError
from ..torch_private import versions
from ..torch_private.fsdp2 import fsdp2_state, renew_shards
from ..torch_private.modules import buffers_of, forward_hooks_of, load_hooks_of, parameters_of, transient_of
from ..torch_private.tensors import as_class, base_of, reset, swap_impl
from ..weights.contents import can_put
from ..weights.module_load import as_loaded, module_load
from ..weights.weight import Weight
from .module_caches import Caches
from .optimizer_state import Before, Journal, Optimizers, check_belongs, follow, optimizers_of
from .refusals import check_held, check_place, format_names, is_distributed, names_of
from .replacement import can_refill, is_simple, replace

Atomic = Literal["checked", "full"]

_FIXES = {
    "load": "The finished tensors stay changed. Load again.",
    "materialize": "The tensors go back to meta: call it again.",
}
"""What to do after an error in the middle, by the verbs that do not take ``atomic``."""

LOCK = renewed_after_fork(threading.RLock())
"""The lock of all converters. Threads that read do not take it: they can see a Weight that is half exchanged."""


class Exchange:
    """Give parameters and buffers new contents by ``put`` inside a ``with`` block; optimizer state follows at its end.

        with Exchange(model, optimizer=optimizer, verb="convert") as exchange:
            exchange.check(tensors)                 raises before the first change
            for held in tensors:
                exchange.put(held, made_from(held))

    ``atomic="checked"`` frees old contents at once; after an error inside the block (out of memory, say) the tensors
    exchanged so far stay exchanged, consistent with their optimizer state, and the error says so.  ``atomic="full"``
    keeps old contents until the end; an error leaves everything bit for bit as it was.

    Signals (Ctrl-C) are deferred inside.  They raise where ``safe_point`` is called, inside ``during``, or at the end:
    in either mode the changes between two safe points are complete.

    Raises:
        ConversionError: on entry, in ``inference_mode``, ``parametrize.cached()``, DDP, FSDP1, or a forwarded FSDP2.
        OptimizerError: on entry, the optimizer belongs to another model.
    """

    def __init__(
        self, model: nn.Module, *, optimizer: Optimizers = None, atomic: Atomic = "checked", verb: str = "convert"
    ) -> None:
        if atomic not in ("checked", "full"):
            raise ConversionError(f"atomic={atomic!r} is neither 'checked' nor 'full'")
        self._optimizers = () if optimizer is None else optimizers_of(optimizer)
        self._model, self._verb = model, verb
        self._journal: Journal | None = [] if atomic == "full" else None
        self._changes: dict[int, Before] = {}
        self._checked: set[int] = set()
        self._signals = Deferred()

    def __enter__(self) -> Exchange:
        if versions.MISSING:
            versions.refuse_torch()
        self._signals.begin()
        try:
            take(LOCK, self._signals)
        except BaseException:
            self._signals.end()
            raise
        try:
            self._grad_mode = torch.is_grad_enabled()
            self.modules = list(self._model.modules())
            check_place(self.modules, self._verb)
            if self._optimizers:
                check_belongs(self._model, self._optimizers)
            torch.clear_autocast_cache()  # holds C++ weak references, and casts of the old values
            keeping = [m for m in self.modules if forward_hooks_of(m) or isinstance(m, nn.RNNBase)]
            self._caches = Caches(keeping) if keeping else None
            if self._caches is not None:
                self._caches.park()
        except BaseException:
            LOCK.release()
            self._signals.end()
            raise
        return self

    def safe_point(self) -> None:
        """Deliver a deferred signal here, where every tensor that was put is consistent."""
        if self._signals.waiting:
            self._signals.deliver()

    def during(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Call ``function``, which may take long and must not change the model; signals are delivered meanwhile."""
        return self._signals.during(function, *args, **kwargs)

    def on_rollback(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` at a rollback: for changes other than those of tensor contents."""
        if self._journal is not None:
            self._journal.append(undo)

    def check(self, held: Iterable[Tensor], *, stay_weights: bool = False) -> None:
        """Check that every tensor of ``held`` can be exchanged now; nothing is changed.

        Weak references of Python are allowed: the object stays.  ``stay_weights`` means that every Weight in ``held``
        will get the contents of another Weight, on ``meta`` only if it is there: then weak references of C++ are
        allowed, too.

        Raises ConversionError that names all tensors that cannot, their aliases, their holders, and what to do.
        """
        tensors = list({id(tensor): tensor for tensor in held}.values())
        swapped = [t for t in tensors if not (stay_weights and isinstance(t, Weight) and can_refill(t))]
        check_held(tensors, self._model, self._verb, swapped=swapped)
        self._checked.update(map(id, tensors))

    def put_each(self, held: Iterable[Tensor], made: Iterable[Tensor], *, is_own: bool = False) -> None:
        """Put each tensor of ``made`` into the corresponding one of ``held``, in a fraction of the time of ``put``.

        ``made`` may be a generator; it runs without grad mode. There is a safe point after each tensor. With ``is_own``
        the caller gives the tensors of ``made`` away, they may be changed, and there are no safe points.
        """
        checked, is_streamed = self._checked, self._journal is None
        waiting = () if is_own else self._signals.waiting
        if waiting:
            self._signals.deliver()
        with torch.no_grad():
            for tensor, new in zip(held, made, strict=True):
                is_put, key = False, id(tensor)
                if is_streamed and key in checked:
                    if is_own:
                        is_put = tensor.size() == new.size() and is_simple(tensor, new) and base_of(new) is None
                        if is_put:  # one with a base would stay a view: put detaches it
                            self._swap(tensor, new.requires_grad_(tensor.requires_grad))
                    else:
                        change = (tensor, tensor.dtype, tensor.device)
                        noted = self._changes.setdefault(key, change)  # first: an interrupt may follow
                        is_put = reset(tensor, new)
                        if not is_put and noted is change:
                            del self._changes[key]
                if not is_put:
                    self.put(tensor, new, is_own=is_own)
                if waiting:
                    self._signals.deliver()

    def put(self, held: Tensor, new: Tensor, *, is_own: bool = False) -> None:
        """Give the object ``held`` the contents of ``new``: values, dtype, device, layout, and whether it is a Weight.

        ``held`` keeps ``requires_grad``, hooks of both kinds, attributes, and as a Parameter its class; its grad stays
        the same object, in the new dtype and on the new device.  A Weight keeps its tie record and ``activations`` if
        ``new`` has none.  ``new`` stays the caller's, and shares its memory with ``held`` from now on; with ``is_own``
        the caller gives it away, and it may be changed.
        """
        is_ready = id(held) in self._checked and new is not held and held.shape == new.shape
        if self._journal is None and is_ready and is_simple(held, new):
            self._swap(held, as_class(type(held), new, held.requires_grad))
        else:
            self.put_together([(held, new)], is_own=is_own)

    def put_together(
        self,
        pairs: Iterable[tuple[Tensor, Tensor]],
        *,
        is_own: bool = False,
        replaced: Collection[str] | None = None,
    ) -> None:
        """Put several tensors, such as those that share memory, as ``put`` does: all of them, or after an error none.

        All memory, also that of grads, is allocated before the first tensor changes. ``replaced`` names the attributes
        that the classes keep on their tensors: then class, shape and these attributes are replaced, too.
        """
        made = []
        for held, new in pairs:
            if id(held) not in self._checked:
                self.check([held], stay_weights=can_put(held, new))
            if new is held:
                continue
            if new.shape != held.shape and replaced is None:
                raise ConversionError(
                    f"has shape {tuple(held.shape)}, its new values have {tuple(new.shape)}",
                    name=self.name(held),
                    fix="Give values of the same shape.",
                )
            try:
                made.append((held, replace(held, new, is_own=is_own, replaced=replaced)))
            except TetherError as error:
                raise error.named(self.name(held)) from None
        begun, noted = [], []
        try:
            for held, replacement in made:
                if self._journal is not None:
                    self._journal.append(replacement.undo)  # before the first step, so that each can be undone
                begun.append(replacement)
                if id(held) not in self._changes:
                    noted.append(id(held))
                    self._changes[id(held)] = (held, held.dtype, held.device)  # first: an interrupt may follow
                replacement.apply()
        except BaseException:
            for replacement in reversed(begun):
                replacement.undo()  # in either mode no tensor stays half exchanged
            for key in noted:
                self._changes.pop(key, None)
            raise

    def _swap(self, held: Tensor, shell: Tensor) -> None:
        """Swap ``held`` with ``shell``: the one step of a simple exchange."""
        change = (held, held.dtype, held.device)
        noted = self._changes.setdefault(id(held), change)
        try:
            swap_impl(held, shell)
        except RuntimeError:
            if noted is change:
                del self._changes[id(held)]
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                try:
                    if self._optimizers:
                        follow(self._optimizers, self._changes.values(), self._journal)
                    self._renew()
                except BaseException as late:
                    self._give_up(late)
                    raise
            else:
                self._give_up(error)
        finally:
            self._journal = None  # frees what was held for a rollback
            if torch.is_grad_enabled() is not self._grad_mode:  # an interrupt may have split torch's own no_grad
                torch.set_grad_enabled(self._grad_mode)
            LOCK.release()
            self._signals.end()

    def _renew(self, *, is_partial: bool = False) -> None:
        if self._caches is not None:
            self._caches.renew(changed=bool(self._changes), is_partial=is_partial)
        if self._changes:
            torch.clear_autocast_cache()
            for module in self.modules:
                state = fsdp2_state(module) if is_distributed(type(module)) else None  # type: ignore[arg-type]
                if state is not None:
                    renew_shards(state)

    def _give_up(self, error: BaseException) -> None:
        if self._journal is not None:
            for undo in reversed(self._journal):
                undo()
            self._journal.clear()
            self._renew()
            return
        try:
            if self._optimizers:
                follow(self._optimizers, self._changes.values())
        finally:
            self._renew(is_partial=True)
        if self._changes and isinstance(error, Exception):
            fix = "The finished tensors stay changed. With atomic='full' an error changes nothing."
            last = self.name(list(self._changes.values())[-1][0])
            raise ConversionError(
                f"{self._verb} stopped after {len(self._changes)} of {len(self._checked)} tensors, the last {last}: "
                f"{type(error).__name__}: {error}",
                fix=_FIXES.get(self._verb, fix),
            ) from error

    def keep_loading(self, names: Iterable[str]) -> None:
        """Register the hook ``keep_policy`` on the modules of the Parameters ``names``, which are or were Weights.

        With it, stock ``load_state_dict`` keeps these Parameter objects. A rollback removes the hook.
        """
        for path in {name.rpartition(".")[0] for name in names}:
            handle = add_load_hook(self._model.get_submodule(path))
            if handle is not None:
                self.on_rollback(handle.remove)

    def know_weights(self, names: Collection[str]) -> None:
        """Register the new Weights ``names``: with stock ``load_state_dict`` and with ``LISTENERS``."""
        self.keep_loading(names)
        for undo in tell_listeners(self._model, names):
            self.on_rollback(undo)

    def name(self, held: Tensor) -> str:
        """Return the names of ``held`` in the model, formatted for errors; this walks the whole model."""
        return format_names(names_of(self._model).get(id(held), ()))


# -- stock load_state_dict afterwards ---------------------------------------------------------------------------------


LISTENERS: dict[str, Callable[[nn.Module, str], Callable[[], None] | None]] = {}
"""Functions to call for new Weights, by the module name of another library: called only if that is imported.

Each takes a model and the path of a module in it that has a new Weight, and returns a function that undoes its effect,
or ``None``.
"""


def tell_listeners(model: nn.Module, names: Iterable[str]) -> list[Callable[[], None]]:
    """Call ``LISTENERS`` for the modules that hold the Weights ``names``; return the functions that undo it."""
    listeners = [listener for library, listener in LISTENERS.items() if library in sys.modules]
    paths = {name.rpartition(".")[0] for name in names} if listeners else ()
    undone = [listener(model, path) for path in paths for listener in listeners]
    return [undo for undo in undone if undo is not None]


def add_load_hook(module: nn.Module) -> RemovableHandle | None:
    """Make stock ``load_state_dict`` of ``module`` follow ``module_load``, whether torch's swap flag is on or off.

    Returns the handle of the hook; ``None`` if the module has the hook already.
    """
    present = (getattr(hook, "hook", hook) for hook in load_hooks_of(module).values())
    return None if keep_policy in present else module.register_load_state_dict_pre_hook(keep_policy)


def keep_policy(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
) -> None:
    """Load the tensors of ``module`` that ``assign=True`` would replace; a hook that runs before torch loads them.

    The held Parameter takes the contents that ``module_load`` returns, and replaces the given tensor in the (local
    copy of the) state dict, so that torch assigns the Parameter to its own name.  With ``assign=False`` torch copies in
    place what ``as_loaded`` returns; with the swap flag on torch calls ``Tensor.module_load``; torch itself reports
    shapes that differ.
    """
    errors: list[str] = rest[-1]
    if torch.__future__.get_swap_module_params_on_conversion():
        return
    is_assigned = local_metadata.get("assign_to_params_buffers", False)
    buffers = {n: b for n, b in buffers_of(module).items() if n not in transient_of(module)}
    for leaf, held in {**parameters_of(module), **buffers}.items():
        key = prefix + leaf
        given = state_dict.get(key)
        if held is None or not isinstance(given, Tensor) or given is held or given.shape != held.shape:
            continue
        if not (isinstance(held, Weight) or isinstance(given, Weight)):
            continue
        try:
            if not is_assigned:
                state_dict[key] = as_loaded(held, given)
                continue
            made = module_load(None, held, given, assign=True)
            with Exchange(module, verb="load") as exchange:
                exchange.check([held])
                exchange.put(held, made)
        except Exception as error:  # as torch does: every tensor is tried, and all errors are reported at once
            errors.append(f'While loading the parameter named "{key}", an exception occurred : {error}')
        state_dict[key] = held


keep_policy.__module__ = "torchtether"  # pickles of models know it by this name, wherever it is defined
