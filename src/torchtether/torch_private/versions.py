"""The versions of torch that are tested, and the private names that exchanging tensors needs."""

from __future__ import annotations

import re
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._warnings import warn
from ..errors import ConversionError

_NEEDED: tuple[tuple[Any, str], ...] = (
    (torch._C, "_swap_tensor_impl"),
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
