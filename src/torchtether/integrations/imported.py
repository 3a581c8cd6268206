"""Libraries that the user has imported: they must know of Weights before they see one, and know names of their models.

Nothing is imported for a library before that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import nn

from ..checkpoint.reader import Checkpoint
from ..renaming.steps import Rename
from ..ties.names import named_tensors

_MODELING = "transformers.modeling_utils"

NAMING = "transformers.conversion_mapping"
"""The module of transformers 5 that maps the names in its files; without it ``names_of_library`` knows of none."""


def _tell_transformers(model: nn.Module, path: str) -> Callable[[], None] | None:
    """Attach each ``PreTrainedModel`` on the way from ``model`` to its module at ``path``; return what undoes that."""
    modeling: Any = sys.modules[_MODELING]
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


def _tell_peft(model: nn.Module, path: str) -> None:
    """Let the layers of PEFT merge into Weights."""
    with suppress(ImportError):  # one of another version
        from . import peft  # noqa: F401 - does so


LIBRARIES = {"peft": _tell_peft, _MODELING: _tell_transformers}
"""What lets an imported library know of the Weights in a module of a model; see ``exchange.LISTENERS``."""


def names_of_library(model: nn.Module, checkpoint: Checkpoint) -> Rename:
    """Return the rename rules of a model of transformers; ``None`` where names and shapes are the model's already."""
    if not is_of_transformers(model):
        return None
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
    if all(name in shapes and checkpoint.fit(name, shapes[name]) == shapes[name] for name in checkpoint):
        return None
    from .transformers_names import transformers_names

    return transformers_names(model)  # type: ignore[arg-type]


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether ``model`` is one of transformers 5, which has a mapping of names."""
    kind = getattr(sys.modules.get(_MODELING), "PreTrainedModel", None)
    return kind is not None and isinstance(model, kind) and NAMING in sys.modules
