"""Laws, and how they are run: one by one, without lasting effects on the process."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import LawError
from .report import Report, Result, Status

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_TRACE = logging.getLogger("torch.__trace")  # torch's structured log of compilations


class Broken(Exception):
    """Signal that a law does not hold; the text says what happened."""


class NotApplicable(Exception):
    """Signal that a law does not apply to this subject; the text says why."""


@dataclass(frozen=True)
class Law:
    """Hold one law: its id, its texts and its function.

    id        short and stable; reports, ``laws=`` and test ids use it
    says      what the law requires
    loses     what a user loses if it does not hold
    test      the function that checks it: raises Broken or NotApplicable, or any error of the subject
    optional  whether it runs only if it is named
    """

    id: str
    says: str
    loses: str
    test: Callable[[Any], None]
    optional: bool = False


def law(
    laws: list[Law], id: str, says: str, loses: str, *, optional: bool = False
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Add the decorated function to ``laws``."""

    def register(test: Callable[[Any], None]) -> Callable[[Any], None]:
        laws.append(Law(id, says, loses, test, optional))
        return test

    return register


def require(holds: bool, what: str) -> None:
    """Raise Broken with ``what`` unless it ``holds``."""
    if not holds:
        raise Broken(what)


def chosen(laws: Sequence[Law], names: Iterable[str] | str | None) -> tuple[Law, ...]:
    """Return the laws with these ids, in the order of ``laws``; without ids, those that are not optional."""
    if names is None:
        return tuple(law for law in laws if not law.optional)
    asked = {names} if isinstance(names, str) else set(names)
    known = {law.id for law in laws}
    if not asked <= known:
        raise LawError(
            f"there is no law {sorted(asked - known)[0]!r}, the laws are {', '.join(law.id for law in laws)}"
        )
    return tuple(law for law in laws if law.id in asked)


def run(laws: Iterable[Law], subject: Any, name: str) -> Report:
    """Run each of ``laws`` on ``subject``."""
    return Report(name, tuple(_run_one(law, subject) for law in laws))


def _run_one(law: Law, subject: Any) -> Result:
    status: Status = "passed"
    what = ""
    try:
        with quiet():
            law.test(subject)
    except NotApplicable as reason:
        status, what = "skipped", _line(reason)
    except Broken as fault:
        status, what = "failed", _line(fault)
    except Exception as error:
        status, what = "failed", f"raises {type(error).__name__}: {_line(error)}"
    return Result(law.id, status, what, law.says, law.loses)


def _line(error: BaseException, longest: int = 160) -> str:
    """Return the text of an error on one line of bounded length; of its cause if torch's swap has wrapped it."""
    if type(error) is RuntimeError and isinstance(error.__cause__, Exception) and "Couldn't swap" in str(error):
        error = error.__cause__
    text = " ".join(_COLOURS.sub("", str(error)).split())
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 + 5 :]}"


@contextmanager
def quiet() -> Iterator[None]:
    """Run the block with torch's default flags and seed 0; restore flags and random state afterwards."""
    future = torch.__future__
    before = future.get_swap_module_params_on_conversion(), future.get_overwrite_module_params_on_conversion()
    dtype = torch.get_default_dtype()
    grad = torch.is_grad_enabled()
    listening = list(_TRACE.handlers)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        warnings.simplefilter("ignore")
        _set_flags(False, False)
        # With a handler on that log (pytest adds one), torch prints the tensors that it traces. The default repr of a
        # class reads values, so that a compilation fails which succeeds without the handler.
        for handler in listening:
            _TRACE.removeHandler(handler)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.manual_seed(0)
        try:
            yield
        finally:
            _set_flags(*before)
            for handler in listening:
                _TRACE.addHandler(handler)
            torch.set_default_dtype(dtype)
            torch.set_grad_enabled(grad)


def _set_flags(swap: bool, overwrite: bool) -> None:
    torch.__future__.set_swap_module_params_on_conversion(swap)
    torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
