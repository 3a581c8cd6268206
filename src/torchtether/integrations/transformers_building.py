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
"""``models``: those that this thread has initialised inside the block."""


@contextmanager
def initialising() -> Iterator[None]:
    """Let models that this thread builds on ``meta`` inside the block call their ``initialize_weights``.

    The marks by which transformers initialises a module once are removed at the end, as stock models on ``meta`` have
    none: after ``to_empty``, ``init_weights`` initialises all.
    """
    if not hasattr(PreTrainedModel.init_weights, "__wrapped__"):
        PreTrainedModel.init_weights = _on_meta_too(PreTrainedModel.init_weights)  # type: ignore[method-assign]
    outer, _building.models = getattr(_building, "models", None), []
    try:
        yield
    finally:
        for model in _building.models:
            for module in model.modules():
                module.__dict__.pop("_is_hf_initialized", None)
        _building.models = outer


def _on_meta_too(original: Any) -> Any:
    @wraps(original)
    def init_weights(model: PreTrainedModel) -> None:
        models = getattr(_building, "models", None)
        if models is not None and torch.get_default_device().type == "meta":
            model.initialize_weights()
            models.append(model)
        original(model)

    return init_weights
