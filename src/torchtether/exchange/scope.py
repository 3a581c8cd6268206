"""The scope in which *stock* torch calls keep a model's parameters attached."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, contextmanager, suppress
from functools import wraps
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from .._checks import check_module
from .._interruptions import Deferred, take
from ..errors import TetherError
from ..ties.components import find_components, tie_of
from ..ties.names import named_tensors
from ..torch_private import versions
from ..torch_private.modules import Method, current_method, replace_method
from ..torch_private.observers import GRAD_SWITCH, function_modes, never_compiled, set_function_modes
from ..weights.spec import order_of
from ..weights.weight import Weight
from .exchange import LOCK
from .optimizer_state import Optimizers, check_belongs, optimizers_of
from .refusals import check_place
from .stock_call import StockCall

_LOAD = "load_state_dict"


def swapping(model: nn.Module | None = None, *, optimizer: Optimizers = None) -> AbstractContextManager[None]:
    """Keep attached what stock ``.to()``, ``.bfloat16()``, ``.to_empty()`` and ``load_state_dict`` change inside.

    Parameters and buffers are the objects that they were, with ties (object, view, buffer), grads, hooks of both kinds,
    attributes and classes; state of ``optimizer`` (one or several) follows.  What holds a parameter is found before the
    call changes anything.  A state dict may lack the aliases of tied tensors, and its ``_metadata`` stays clean; if it
    contradicts itself on them, nothing is loaded.  Ctrl-C during such a call waits for the end of a module or tensor;
    what was done until then is attached.

    What it cannot promise, because torch does the walking: to take back a call that fails in the middle (a key that is
    missing or of another shape is found when others have been loaded), to refuse what stock calls do silently (drop
    imaginary parts, round into whole numbers, leave ``meta`` as it is without ``assign=True``), and to run a function
    of your own (``model._apply(f)``) once per tied tensor.  ``assign=True`` shares memory with the state dict, as
    always.  Use ``tt.convert`` and ``tt.load`` where you can.

    The scope sets ``torch.__future__.set_swap_module_params_on_conversion(True)``, which holds for the whole *process*,
    and puts it back; it takes the lock of all converters, so a second thread waits.  Other threads that call stock
    conversions meanwhile get torch's own swapping, without this care: ``_apply`` and ``load_state_dict`` of
    ``nn.Module``, which the scope replaces until its end, are torch's own for them.

    Args:
        model: checked on entry. Needed for state dicts that lack aliases; the rest works for any model in the scope.

    Raises:
        ConversionError: in ``inference_mode``, or for DDP, FSDP1, a forwarded FSDP2; and from the calls inside.
        TieError: from a load inside, whose state dict gives tied names different values; nothing has changed.
        OptimizerError: the optimizer is that of another model.

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
    """The scope from outside. No signal comes between its steps: see ``_waits``."""

    def __init__(self, model: nn.Module | None, optimizer: Optimizers) -> None:
        self._model, self._optimizer = model, optimizer

    def _recreate_cm(self) -> _Swapping:
        return _Swapping(self._model, self._optimizer)

    def __enter__(self) -> None:
        if versions.MISSING:
            versions.refuse_torch()
        if self._model is not None:
            check_module(self._model)
        optimizers = optimizers_of(self._optimizer)
        self._signals = Deferred(_waits)
        with ExitStack() as stack:
            stack.callback(self._signals.end)
            self._signals.begin()
            take(LOCK, self._signals)
            stack.callback(LOCK.release)
            self._open(stack, optimizers)
            self._signals.deliver()
            self._stack = stack.pop_all()

    def _open(self, stack: ExitStack, optimizers: tuple[Optimizer, ...]) -> None:
        """Switch everything on; ``stack`` switches it off."""
        scope = _Scope((*(_scopes[-1].optimizers if _scopes else ()), *optimizers), self._signals)
        stack.callback(scope.end_call)
        if self._model is not None:
            check_place(self._model.modules(), "convert")
            check_belongs(self._model, optimizers)
            stack.callback(self._model.register_load_state_dict_pre_hook(_fill_aliases).remove)
        stack.enter_context(scope)
        stack.callback(scope.process.close)
        before = torch.__future__.get_swap_module_params_on_conversion()
        scope.process.callback(torch.__future__.set_swap_module_params_on_conversion, before)
        torch.__future__.set_swap_module_params_on_conversion(True)
        scope.process.enter_context(_watching(scope))

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class _Scope(TorchFunctionMode):
    """Sees every tensor function of a stock call that torch carries out itself.

    That a call begins, and of which module, is what the replaced ``_apply`` and ``load_state_dict`` tell (see
    ``_watching``). One look at frames is left: a module whose class has an ``_apply`` of its own converts its children
    one by one, and what they share with each other is kept only by one call around all of them, which nothing but the
    stack knows. So the outermost ``_apply`` is looked for where a conversion begins, once.
    """

    def __init__(self, optimizers: tuple[Optimizer, ...], signals: Deferred) -> None:
        super().__init__()
        self._signals = signals
        self.process = ExitStack()
        """Switches off what is switched on for the whole process."""
        self.thread = get_ident()
        self.optimizers = optimizers
        """Those of the scopes around it too, because only the innermost scope sees all that changes."""
        self._call: StockCall | None = None
        self.frame: FrameType | None = None
        """The ``_apply`` whose conversion is under way; it may have ended since."""
        self._load: _Load | None = None
        """The load that is under way; its call begins with the first tensor that is loaded."""
        self._modes: list[Any] | None = None
        """The function modes to come back to, while a conversion runs without those of the scopes."""

    @never_compiled
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is GRAD_SWITCH or torch.compiler.is_compiling():  # the compiler follows this, and nothing is converted
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
        """Return whether no exchange, or of several over one memory, is under way when ``func`` is called."""
        if func is Tensor.module_load:
            return self._call is None or not self._call.is_splitting()
        return not _waits(sys._getframe())

    def _begin(self, call: StockCall, frame: FrameType | None = None) -> None:
        self._call = call
        self.frame = frame
        call.begin()

    def apply(self, module: nn.Module, function: Any, recurse: bool, stock: Method, is_torchs: bool) -> nn.Module:
        """Convert as ``nn.Module._apply`` does, without a look at every tensor function; return ``module``."""
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
        """Convert inside as a stock call, while no function mode of ours looks on; that alone would double its time."""
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
                self.end_call()  # else something around it goes on, and the next function outside ends it
        except BaseException as error:
            try:
                if self._call is not None:
                    with suppress(Exception):  # the function may fail again; then end_call says what is apart
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
            error = self._call and self._call.error
            self._load = outer
            self.end_call()
            self._signals.deliver()
            if error:
                raise error  # torch has caught it, and would repeat it for every name

    def end_call(self) -> None:
        """Attach again what the last stock call changed."""
        call, self._call, self.frame = self._call, None, None
        if call is not None:
            call.end()


class _Load(NamedTuple):
    """A stock load: of which module, from which tensors, and the metadata of its state dict."""

    root: nn.Module
    given: dict[str, Any]
    metadata: Any

    def note(self, module: nn.Module, state_dict: dict[str, Any], *others: Any) -> None:
        """Keep the tensors of ``state_dict``, as the hooks before this one have made it."""
        self.given.update(state_dict)


_scopes: list[_Scope] = []
"""Those that are open, the innermost last. All are of one thread, which has the lock."""


@contextmanager
def _watching(scope: _Scope) -> Iterator[None]:
    """Have ``_apply`` and ``load_state_dict`` of ``nn.Module`` go through ``scope`` in this thread, inside the block.

    In all others they are what they were. A mode could do all of it; but modes cost several times more than the
    conversion, and have to look for the module in the frames of every tensor function.
    """
    if _scopes:  # those of the first one ask the innermost
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


_WHOLE = {
    function.__code__
    for function in (_Swapping.__enter__, _Swapping.__exit__, _Scope.apply, _Scope.load, _Scope.end_call)
}
"""What no signal interrupts, wherever it is."""


def _waits(frame: FrameType | None) -> bool:
    """Return whether a signal that arrives in ``frame`` waits.

    It waits while the scope begins or ends, and during a stock call.
    """
    call = _scopes[-1].frame if _scopes else None
    while frame is not None:
        if frame.f_code in _WHOLE or frame is call:
            return True
        frame = frame.f_back
    return False


def _leave_others() -> None:
    """Close, in a forked process, which has one thread, the scopes of the others."""
    for scope in reversed(_scopes):
        if scope.thread != get_ident():
            scope.process.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_others)


def _outermost(frame: FrameType) -> FrameType:
    """Return the first of the ``_apply`` of modules that have called each other down to ``frame``."""
    while (back := frame.f_back) is not None and back.f_code.co_name == "_apply" and _module_of(back) is not None:
        frame = back
    return frame


def _is_running(frame: FrameType) -> bool:
    """Return whether ``frame`` is among the callers of who asks."""
    caller: FrameType | None = sys._getframe(2)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None


def _module_of(frame: FrameType) -> nn.Module | None:
    """Return the module whose method ``frame`` runs: its first argument, whatever that is called."""
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return first if isinstance(first, nn.Module) else None


def _fill_aliases(module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    """Add the names of tied tensors that the state dict lacks, as the owner's tensor or a view of it."""
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
            elif view is not None and tie.owner in present:
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
