"""The scope in which torch's own conversions and loads keep a model's parameters attached."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager, suppress
from functools import wraps
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from .._checks import as_module
from .._interruptions import Deferred, take
from ..errors import TetherError
from ..geometry.views import lies_in
from ..ties.components import find_components, tie_of
from ..ties.names import named_tensors
from ..torch_private import versions
from ..torch_private.modules import Method, current_method, replace_method
from ..torch_private.observers import GRAD_SWITCH, function_modes, never_compiled, set_function_modes
from ..weights.spec import order_of
from ..weights.weight import Weight
from .exchange import LOCK
from .optimizer_state import Optimizers, check_belongs, optimizers_of
from .refusals import check_place, check_scripted
from .stock_call import StockCall

_LOAD = "load_state_dict"


def swapping(model: nn.Module | None = None, *, optimizer: Optimizers = None) -> _Swapping:
    """Keep parameters attached while torch's own ``.to()``, ``.to_empty()`` or ``load_state_dict`` changes them.

    Parameters and buffers stay the same objects, with ties (object, view, buffer), grads, hooks of both kinds,
    attributes and classes; state of ``optimizer`` (one or several) follows.  References that forbid an exchange are
    found before a call changes anything.  A state dict may lack the aliases of tied tensors, and its ``_metadata``
    stays clean; if it contradicts itself on them, nothing is loaded.  Ctrl-C during such a call waits until a module or
    tensor is done; all that was changed until then is attached.

    Three things are impossible, because torch walks the modules itself: to take back a call that fails in the middle (a
    key that is missing or of another shape is found when others have been loaded), to refuse losses that torch accepts
    silently (it drops imaginary parts, rounds to integers, leaves ``meta`` as it is without ``assign=True``), and to
    call a function of your own (``model._apply(f)``) only once for tied buffers and views. ``assign=True`` shares
    memory with the state dict, as always. Use ``tt.convert`` and ``tt.load`` where you can.

    The scope sets ``torch.__future__.set_swap_module_params_on_conversion(True)``, which holds for the whole *process*,
    and restores it.  It takes the lock of all converters, so a second thread waits.  It replaces ``_apply`` and
    ``load_state_dict`` of ``nn.Module``, but only for its own thread: other threads get torch's own swapping.

    Args:
        model: checked on entry. Needed for state dicts that lack aliases; the rest works for any model in the scope.

    Raises:
        ConversionError: in ``inference_mode``, or for DDP, FSDP1, a forwarded FSDP2, a ScriptModule; and from the
            calls inside.
        TieError: from a load inside, if its state dict gives tied names different values; nothing has changed.
        OptimizerError: the optimizer belongs to another model.

    >>> import torch, torchtether as tt
    >>> model = torch.nn.Linear(2, 2)
    >>> weight = model.weight
    >>> with tt.swapping(model):
    ...     _ = model.bfloat16()
    >>> model.weight is weight, weight.dtype
    (True, torch.bfloat16)
    """
    return _Swapping(model, optimizer)


class _Swapping(ContextDecorator):
    """The context manager of a scope. No signal interrupts its steps: see ``_defers_signals``."""

    def __init__(self, model: nn.Module | None, optimizer: Optimizers) -> None:
        self._model, self._optimizer = model, optimizer
        self._stacks: list[ExitStack] = []
        """What ends each entry, the innermost last; only the thread that holds the lock changes it."""

    def _recreate_cm(self) -> _Swapping:
        return _Swapping(self._model, self._optimizer)

    def __enter__(self) -> None:
        if versions.MISSING:
            versions.refuse_torch()
        if self._model is not None:
            as_module(self._model)
        optimizers = optimizers_of(self._optimizer)
        signals = Deferred(_defers_signals)
        with ExitStack() as stack:
            stack.callback(signals.end)
            signals.begin()
            take(LOCK, signals)
            stack.callback(LOCK.release)
            self._open(stack, optimizers, signals)
            signals.deliver()
            self._stacks.append(stack.pop_all())

    def _open(self, stack: ExitStack, optimizers: tuple[Optimizer, ...], signals: Deferred) -> None:
        """Switch the scope on; ``stack`` switches it off."""
        scope = _Scope((*(_scopes[-1].optimizers if _scopes else ()), *optimizers), signals)
        stack.callback(scope.end_call)
        if self._model is not None:
            check_place(self._model.modules(), "convert")
            check_belongs(self._model, optimizers)
            check_scripted(self._model)
            stack.callback(self._model.register_load_state_dict_pre_hook(fill_aliases).remove)
        stack.enter_context(scope)
        stack.callback(scope.process.close)
        before = torch.__future__.get_swap_module_params_on_conversion()
        scope.process.callback(torch.__future__.set_swap_module_params_on_conversion, before)
        torch.__future__.set_swap_module_params_on_conversion(True)
        scope.process.enter_context(_redirecting(scope))

    def __exit__(self, *error: object) -> None:
        self._stacks.pop().close()


class _Scope(TorchFunctionMode):
    """The function mode that sees every tensor function of a stock call that torch carries out itself.

    The replaced ``_apply`` and ``load_state_dict`` report that a call begins, and for which module (see
    ``_redirecting``). Frames are inspected only once, where a conversion begins, for the outermost ``_apply``: a class
    with its own ``_apply`` converts its children one by one, and memory that they share must be handled as one call.
    """

    def __init__(self, optimizers: tuple[Optimizer, ...], signals: Deferred) -> None:
        super().__init__()
        self._signals = signals
        self.process = ExitStack()
        """Restores the settings that hold for the whole process."""
        self.thread = get_ident()
        self.optimizers = optimizers
        """Includes those of the outer scopes, because only the innermost scope sees every change."""
        self._call: StockCall | None = None
        self.frame: FrameType | None = None
        """The frame of the ``_apply`` whose conversion is under way; it may have returned already."""
        self._load: _Load | None = None
        """The load that is under way; its StockCall begins with the first tensor that is loaded."""
        self._modes: list[Any] | None = None
        """The function modes to restore after a conversion, which runs without the scopes' modes."""

    @never_compiled
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is GRAD_SWITCH or torch.compiler.is_compiling():  # the compiler traces this, and converts nothing
            return func(*args, **(kwargs or {}))
        if self.frame is not None and not _is_running(self.frame):
            self.end_call()
        if func is Tensor.module_load and self._call is None and self._load is not None:
            root, given, metadata = self._load
            self._begin(StockCall(root, self.optimizers, loads=True, metadata=metadata, given=given))
        if self._call is not None:
            self._call.settle()
        if self._signals.waiting and self._is_safe(func):
            self._signals.deliver()
        if self._call is not None:
            for argument in args[:1]:
                self._call.touch(argument)
            if func is Tensor.module_load:
                return self._call.load(*args, **(kwargs or {}))
            try:
                made = func(*args, **(kwargs or {}))
            except TetherError as error:
                raise self._call.named(error, *args[:1]) from None
            return self._call.as_plain(made)
        return func(*args, **(kwargs or {}))

    def _is_safe(self, func: Callable[..., Any]) -> bool:
        """Return whether ``func`` is called outside of any exchange, also of several tensors over one memory."""
        if func is Tensor.module_load:
            return self._call is None or not self._call.is_splitting()
        return not _defers_signals(sys._getframe())

    def _begin(self, call: StockCall, frame: FrameType | None = None) -> None:
        self._call = call
        self.frame = frame
        call.begin()

    def apply(self, module: nn.Module, function: Any, recurse: bool, stock: Method, is_torchs: bool) -> nn.Module:
        """Convert as ``nn.Module._apply`` does, without this mode where possible; return ``module``."""
        if self._modes is None:
            try:
                with self._stock_call(_outermost(sys._getframe(1)), module, function, not is_torchs):
                    return self.apply(module, function, recurse, stock, is_torchs)
            finally:
                self._signals.deliver()
        if recurse and is_torchs:
            for child in module.children():
                child._apply(function)
        call = self._call
        assert call is not None
        self._signals.deliver()
        if is_torchs and call.convert(module, function):
            return module
        modes = function_modes()
        try:
            set_function_modes([mode for mode in self._modes if mode is self or mode not in _scopes])
            made: nn.Module = stock(module, function, *(() if recurse and not is_torchs else (False,)))
            return made
        finally:
            set_function_modes(modes)
            call.settle()

    @contextmanager
    def _stock_call(
        self, frame: FrameType, module: nn.Module, function: Callable[[Tensor], Tensor], swaps: bool
    ) -> Iterator[None]:
        """Run the body as a stock call without the scopes' function modes, which alone would double its time."""
        self._modes = function_modes()
        try:
            set_function_modes([mode for mode in self._modes if mode not in _scopes])
            if frame is not self.frame:
                self.end_call()
                root = _module_of(frame)
                assert root is not None
                self._begin(StockCall(root, self.optimizers, loads=False, swaps=swaps, metadata=None), frame)
            yield
            if _module_of(frame) is module:
                self.end_call()  # else an outer _apply goes on, and the first tensor function after it ends the call
        except BaseException as error:
            try:
                if self._call is not None:
                    with suppress(Exception):  # the function may fail again; then end_call names the split tensors
                        self._call.complete(function)
                self.end_call()
            except TetherError as late:
                error.add_note(str(late))
            raise
        finally:
            set_function_modes(self._modes)
            self._modes = None

    def load(self, module: nn.Module, stock: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Load as ``nn.Module.load_state_dict`` does, and return what it returns."""
        state_dict = args[0] if args else kwargs.get("state_dict")
        outer, load = self._load, _Load(module, {}, getattr(state_dict, "_metadata", None))
        note = module.register_load_state_dict_pre_hook(load.note)
        self._load = load
        self.end_call()
        try:
            return stock(module, *args, **kwargs)
        finally:
            note.remove()
            call, self._load = self._call, outer
            self.end_call()
            self._signals.deliver()
            if call is not None:
                call.raise_error()  # torch has caught it, and would report it once per name

    def end_call(self) -> None:
        """End the stock call that is under way, and attach again the tensors that it changed."""
        call, self._call, self.frame = self._call, None, None
        if call is not None:
            call.end()


class _Load(NamedTuple):
    """A stock load: the module, the given tensors, and the metadata of the state dict."""

    root: nn.Module
    given: dict[str, Any]
    metadata: Any

    def note(self, module: nn.Module, state_dict: dict[str, Any], *others: Any) -> None:
        """Record the tensors of ``state_dict`` as the earlier pre-hooks left it."""
        self.given.update(state_dict)


_scopes: list[_Scope] = []
"""The open scopes, the innermost last. All belong to the thread that holds the lock."""


@contextmanager
def _redirecting(scope: _Scope) -> Iterator[None]:
    """Redirect ``_apply`` and ``load_state_dict`` of ``nn.Module`` to ``scope`` inside the block, in this thread only.

    A function mode could do it alone, but modes cost several times more than the conversion, and would have to search
    the frames for the module at every tensor function.
    """
    if _scopes:  # the methods of the first scope call the innermost
        _scopes.append(scope)
        try:
            yield
        finally:
            _scopes.pop()
        return
    thread, (stock_apply, is_torchs), (stock_load, _) = get_ident(), current_method("_apply"), current_method(_LOAD)

    @wraps(stock_apply)
    def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if get_ident() != thread or not _scopes:
            return stock_apply(self, fn, recurse)
        return _scopes[-1].apply(self, fn, recurse, stock_apply, is_torchs)

    @wraps(stock_load)
    def load_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if get_ident() != thread or not _scopes:
            return stock_load(self, *args, **kwargs)
        return _scopes[-1].load(self, stock_load, args, kwargs)

    _scopes.append(scope)
    replace_method("_apply", _apply, stock_apply)
    replace_method(_LOAD, load_state_dict, stock_load)
    try:
        yield
    finally:
        replace_method(_LOAD, stock_load, load_state_dict)
        replace_method("_apply", stock_apply, _apply)
        _scopes.pop()


_UNINTERRUPTED = {
    function.__code__
    for function in (_Swapping.__enter__, _Swapping.__exit__, _Scope.apply, _Scope.load, _Scope.end_call)
}
"""Code that no signal interrupts, nor anything that it calls."""


def _defers_signals(frame: FrameType | None) -> bool:
    """Return whether a signal that arrives in ``frame`` must wait: the scope begins or ends, or a stock call runs."""
    call = _scopes[-1].frame if _scopes else None
    while frame is not None:
        if frame.f_code in _UNINTERRUPTED or frame is call:
            return True
        frame = frame.f_back
    return False


def _close_foreign_scopes() -> None:
    """Close the scopes of other threads, which a forked process does not have."""
    for scope in reversed(_scopes):
        if scope.thread != get_ident():
            scope.process.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_foreign_scopes)


def _outermost(frame: FrameType) -> FrameType:
    """Return the outermost frame of the chain of modules' ``_apply`` calls that ends in ``frame``."""
    while (back := frame.f_back) is not None and back.f_code.co_name == "_apply" and _module_of(back) is not None:
        frame = back
    return frame


def _is_running(frame: FrameType) -> bool:
    """Return whether ``frame`` is among the frames that called the caller."""
    caller: FrameType | None = sys._getframe(2)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None


def _module_of(frame: FrameType) -> nn.Module | None:
    """Return the module whose method ``frame`` runs: its first argument, whatever its name."""
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return first if isinstance(first, nn.Module) else None


def fill_aliases(module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    """Add the tied names that the state dict lacks, each with its owner's tensor or a view of it."""
    known = set(module.state_dict(keep_vars=True))
    tensors = named_tensors(module)
    for component in find_components(module):
        tie = tie_of(component)
        present = [name for name in component.names if prefix + name in state_dict]
        if tie is None or not present:
            continue
        for alias, view in zip(tie.names, tie.views, strict=True):
            if alias in present or alias not in known:
                continue
            twins = [n for n, other in zip(tie.names, tie.views, strict=True) if other == view and n in present]
            if twins:
                state_dict[prefix + alias] = state_dict[prefix + twins[0]]
            elif view is not None and tie.owner in present and lies_in(view, component.member(tie.owner).view):
                given, held = state_dict[prefix + tie.owner], tensors[tie.owner]
                order = order_of(view, held) if isinstance(given, Weight) else None
                if order is not None and given.stride() == held.stride():
                    state_dict[prefix + alias] = given.detach().permute(order)
                is_wrapped = isinstance(given, Weight) and given.scheme.transparent
                inner = given.values_of() if is_wrapped else given
                plain = type(inner) in (Tensor, nn.Parameter) and view.dtype == held.dtype
                if plain and inner.stride() == held.stride():
                    made = inner.detach().as_strided(view.size, view.stride, inner.storage_offset() + view.offset)
                    state_dict[prefix + alias] = given.around(made) if is_wrapped else made
