"""What other libraries must be told of Weights: a module for each library, which its users import."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from .imported import tell_peft


def tell_libraries(model: nn.Module, path: str) -> Callable[[], None] | None:
    """Let the libraries that the user has imported know of the Weights in ``model``'s module at ``path``.

    Returns what takes it back; ``None`` where nothing was done.
    """
    tell_peft()
    return _tell_transformers(model, path)


def _tell_transformers(model: nn.Module, path: str) -> Callable[[], None] | None:
    """Attach each ``PreTrainedModel`` on the way from ``model`` to its module at ``path``.

    Returns what takes it back; ``None`` where nothing was done.
    """
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return None
    modules: list[Any] = [model]
    for name in path.split(".") if path else ():
        modules.append(getattr(modules[-1], name))
    found = [module for module in modules if isinstance(module, modeling.PreTrainedModel)]
    if not found:
        return None
    try:
        from .transformers import attach
    except ImportError:  # a transformers that has no quantizers of others yet
        return None
    undone = [undo for undo in map(attach, found) if undo is not None]

    def detach() -> None:
        for undo in undone:
            undo()

    return detach
