"""transformers: models built inside ``tt.on_meta()`` are initialised, which ``init_weights`` skips on ``meta``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from transformers import PreTrainedModel

_building = threading.local()
"""``modules``: those that this thread has initialised inside the block, and that were not before."""


@contextmanager
def initialising() -> Iterator[None]:
    """Let models that this thread builds on ``meta`` inside the block call their ``initialize_weights``.

    The marks by which transformers initialises a module once are removed at the end, as stock models on ``meta`` have
    none: after ``to_empty``, ``init_weights`` initialises all.
    """
    if not hasattr(PreTrainedModel.init_weights, "__wrapped__"):
        PreTrainedModel.init_weights = _on_meta_too(PreTrainedModel.init_weights)  # type: ignore[method-assign]
    outer, _building.modules = getattr(_building, "modules", None), []
    try:
        yield
    finally:
        for module in _building.modules:
            module.__dict__.pop("_is_hf_initialized", None)
        _building.modules = outer


def _on_meta_too(original: Any) -> Any:
    @wraps(original)
    def init_weights(model: PreTrainedModel) -> None:
        modules = getattr(_building, "modules", None)
        if modules is not None and torch.get_default_device().type == "meta":
            modules += [module for module in model.modules() if "_is_hf_initialized" not in vars(module)]
            model.initialize_weights()
        original(model)

    return init_weights
