"""Observers of running ops: modes, traces, transforms, the compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch import overrides
from torch.utils import _python_dispatch


def is_direct() -> bool:
    """Return whether ops run at once, without a trace, mode, transform or compiler that observes them.

    Code that works on the memory of tensors without torch may run only then.  There are public ways to ask for some
    tracers, but none for all of them.
    """
    if torch.compiler.is_compiling() or is_tracing():
        return False
    return _count_modes() == 0 and _level() is None


GRAD_SWITCH = torch._C._set_grad_enabled
"""What ``no_grad`` calls on its way out; function modes see it, and an error there would leave gradients off."""


def function_modes() -> list[Any]:
    """Return the function modes of this thread, the innermost last."""
    return overrides._get_current_function_mode_stack()  # type: ignore[no-any-return]


def set_function_modes(modes: Sequence[Any]) -> None:
    """Set the function modes of this thread to ``modes``; a mode can be left only when it is the innermost."""
    for _ in overrides._get_current_function_mode_stack():
        overrides._pop_mode()
    for mode in modes:
        overrides._push_mode(mode)


def is_observed() -> bool:
    """Return whether ops must go through torch's dispatcher, because a mode, trace or transform acts on them.

    There is no public way to ask for the active modes, nor for the level of ``torch.func`` or of forward AD. Autocast
    is not among them: it casts arguments of products, and ``ops/linear.py`` does that itself.
    """
    return _count_modes() > 0 or _level() is not None or _forward_ad._current_level >= 0 or is_tracing()


def is_transforming() -> bool:
    """Return whether a transform of ``torch.func`` is active; those of batches see tensors without their batches."""
    return _level() is not None


_OLD_BATCH = torch._C._parse_dispatch_key("Batched")


def hides_batch(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` may hide a batch: of ``torch.func``, or of gradients by ``is_grads_batched=True``.

    The latter is an older class of batches, which has no level; its dispatch key is the only sign of it.
    """
    return _level() is not None or (_OLD_BATCH is not None and torch._C._dispatch_keys(tensor).has(_OLD_BATCH))


def is_autocasting(device: torch.device) -> bool:
    """Return whether autocast casts arguments on ``device``; torch raises an error for types that have none (meta)."""
    return _is_autocasting() and torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


past_modes = _python_dispatch._disable_current_modes
"""A context manager in which no mode sees ops, so that tensors are real while a compiler runs ops on fake ones."""

_forward_ad = torch.autograd.forward_ad
_count_modes = torch._C._len_torch_dispatch_stack
_level = torch._C._functorch.maybe_current_level
_is_autocasting = torch._C._is_any_autocast_enabled
Function = TypeVar("Function", bound=Callable[..., Any])


def never_compiled(function: Function) -> Function:
    """Return ``function``, marked so that the compiler skips its frame and the frames that it calls.

    Like ``torch.compiler.disable``, but it does not import the compiler, and the trace of a calling frame inlines the
    function.
    """
    frames = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def not_followed(function: Function) -> Function:
    """Return ``function``, marked so that compiled code calls it uncompiled: a graph break before and after.

    Like ``torch.compiler.disable``, but it does not import the compiler.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "it changes the parameters of a model"  # type: ignore[attr-defined]
    return never_compiled(function)


def cached(function: Function) -> Function:
    """Return ``function`` with an ``lru_cache``, which is bypassed under the compiler.

    The compiler traces a function under ``lru_cache`` too, but with a warning.
    """
    remembered = lru_cache(maxsize=4096)(function)

    @wraps(function)
    def answer(*args: Any) -> Any:
        return function(*args) if torch.compiler.is_dynamo_compiling() else remembered(*args)

    return cast(Function, answer)


is_tracing: Callable[[], bool] = torch._C._is_tracing
"""Return whether ``torch.jit.trace`` is tracing; it sees torch's own ops only."""

WATCHED = (_count_modes, _level, _is_autocasting, is_tracing)
"""Functions for compiled code, which leaves calls to Python if one of them tells of an observer or of autocast; it also
reads the level of forward AD."""


@contextmanager
def untraced() -> Iterator[None]:
    """Suspend ``torch.jit.trace`` inside the block: results are constants to it. Torch has no public name for this."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]
