"""transformers: models built inside ``tt.on_meta()`` are initialised, which ``init_weights`` skips on ``meta``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from transformers import PreTrainedModel

_MARK, _OURS = "_is_hf_initialized", "_tether_initialised"
"""The attributes by which transformers, and the block, initialise a module once. Deep copies have them, too."""

_building = threading.local()
"""``modules``: those that this thread has initialised inside the block, and that had no mark before."""


@contextmanager
def initialising() -> Iterator[None]:
    """Let models that this thread builds on ``meta`` inside the block call their ``initialize_weights``.

    Transformers' mark is on modules during that call only, as stock models on ``meta`` have none: after ``to_empty``,
    ``init_weights`` initialises all, and ``from_pretrained``, which builds on ``meta`` itself, what no file has.
    """
    if not hasattr(PreTrainedModel.init_weights, "__wrapped__"):
        PreTrainedModel.init_weights = _on_meta_too(PreTrainedModel.init_weights)  # type: ignore[method-assign]
    outer, _building.modules = getattr(_building, "modules", None), []
    try:
        yield
    finally:
        for module in _building.modules:
            vars(module).pop(_OURS, None)
        _building.modules = outer


def _on_meta_too(original: Any) -> Any:
    @wraps(original)
    def init_weights(model: PreTrainedModel) -> None:
        modules = getattr(_building, "modules", None)
        if modules is not None and torch.get_default_device().type == "meta":
            unmarked = [module for module in model.modules() if _MARK not in vars(module)]
            for module in unmarked:
                if _OURS in vars(module):
                    vars(module)[_MARK] = True
            try:
                model.initialize_weights()
            finally:
                for module in unmarked:
                    vars(module).pop(_MARK, None)
                    vars(module)[_OURS] = True
                modules += unmarked
        original(model)

    return init_weights
