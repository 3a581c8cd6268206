"""Functions of ``torch.nn.init`` that do nothing on ``meta``, and say so neither to modes nor to the caller."""

from __future__ import annotations

import sys
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

INITIALISERS = nn.init.__name__

_ASKING: dict[CodeType, str] = {
    value.__code__: name
    for name, value in vars(nn.init).items()
    if isinstance(value, FunctionType) and "is_meta" in value.__code__.co_names
}
"""By their code, the functions that ask whether the tensor is on ``meta``, and return it as it is if so."""

_FRAMES = 8
"""The most callers that are looked at: other modes may be between the function and ours."""


def initialiser_that_asks(tensor: Tensor) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the arguments of the function of ``torch.nn.init`` that asks for ``tensor.is_meta`` now."""
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        name = _ASKING.get(frame.f_code)
        if name is not None and frame.f_locals.get("tensor") is tensor:
            count = frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
            return name, {key: frame.f_locals[key] for key in frame.f_code.co_varnames[:count]}
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None
