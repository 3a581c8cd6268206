"""The versions of torch that are tested, and the private names that exchanging tensors needs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._warnings import warn
from ..errors import ConversionError

_NEEDED: tuple[tuple[Any, str], ...] = (
    (torch._C, "_swap_tensor_impl"),
    (torch._C, "_current_graph_task_id"),
    (torch._C, "_disabled_torch_function_impl"),
    (torch, "_has_compatible_shallow_copy_type"),
    (Tensor, "_use_count"),
    (Tensor, "_cdata"),
    (Tensor, "_make_subclass"),
    (Tensor, "_backward_hooks"),
    (Tensor, "_post_accumulate_grad_hooks"),
)

TESTED = ("2.13.0", "2.15.0")
"""The oldest and the newest torch with which all tests pass; README lists them."""


def warn_if_untested() -> None:
    """Warn, on one line, if this torch is newer than the newest that was tested."""
    if minor_of(torch.__version__) > minor_of(TESTED[-1]):
        warn(f"torchtether was tested with torch {TESTED[0]} to {TESTED[-1]}, this is torch {torch.__version__}")


@contextmanager
def naming_torch() -> Iterator[None]:
    """Raise ImportError with torch's version if the block lacks a name of a torch that was not tested."""
    try:
        yield
    except (AttributeError, ImportError) as error:
        is_tested = minor_of(TESTED[0]) <= minor_of(torch.__version__) <= minor_of(TESTED[-1])
        absent = error.name or "torch" if isinstance(error, ModuleNotFoundError) else "torch"
        if is_tested or absent.partition(".")[0] != "torch":
            raise
        why = " ".join(str(error).split())
        raise ImportError(
            f"torch {torch.__version__} lacks what torchtether uses: {why}. Use torch {TESTED[0]} to {TESTED[-1]}, "
            "or a newer torchtether."
        ) from error


def minor_of(version: str) -> list[int]:
    """Return the first two numbers of ``version``: patch releases change no behaviour."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def find_missing() -> tuple[str, ...]:
    """Return the private names that exchanging tensors needs and this torch lacks."""
    return tuple(f"{owner.__name__}.{name}" for owner, name in _NEEDED if not hasattr(owner, name))


MISSING = find_missing()
"""Found once, at import: torch does not change while it runs."""


def refuse_torch() -> NoReturn:
    """Raise ConversionError with the private names that this torch lacks."""
    raise ConversionError(
        f"torch {torch.__version__} has no {', '.join(MISSING)}, without which tensors cannot be exchanged",
        fix=f"Use torch {TESTED[0]} to {TESTED[-1]}.",
    )
