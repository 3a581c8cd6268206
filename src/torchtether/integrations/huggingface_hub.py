"""huggingface_hub: models with ``PyTorchModelHubMixin`` write Weights to ``model.safetensors``, and read them back.

Importing this changes the mixin for models and files with Weights only. Stock ``from_pretrained`` does not find the
quantized parameters in such a file, and leaves the random values of a new model in them, without a warning.
"""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

from huggingface_hub.constants import SAFETENSORS_SINGLE_FILE
from huggingface_hub.hub_mixin import PyTorchModelHubMixin
from safetensors import safe_open

from ..checkpoint.reader import Checkpoint
from ..checkpoint.saver import save
from ..ties.names import named_tensors
from ..weights.weight import Weight
from .imported import ABOVE


def _saving(original: Any) -> Any:
    @wraps(original)
    def _save_pretrained(model: Any, save_directory: Path) -> None:
        inner = getattr(model, "module", model)
        if any(isinstance(tensor, Weight) for tensor in named_tensors(inner).values()):
            save(inner, Path(save_directory) / SAFETENSORS_SINGLE_FILE)
        else:
            original(model, save_directory)

    return _save_pretrained


def _loading(original: Any) -> Any:
    @wraps(original)
    def _load_as_safetensor(cls: Any, model: Any, model_file: str, map_location: str, strict: bool) -> Any:
        with safe_open(model_file, framework="pt") as file:
            has_places = model.state_dict().keys() >= set(file.keys())
        if has_places:  # of plain tensors, or of those in which modules of other libraries hold quantized ones
            return original(cls, model, model_file, map_location, strict)
        with Checkpoint(model_file) as checkpoint:
            holds_weights = any(entry.spec is not None for entry in checkpoint.entries.values())
        if not holds_weights:
            return original(cls, model, model_file, map_location, strict)
        ABOVE["load"](model, model_file, strict=strict)
        return model.to(map_location).eval()

    return classmethod(_load_as_safetensor)


if not hasattr(PyTorchModelHubMixin._save_pretrained, "__wrapped__"):
    PyTorchModelHubMixin._save_pretrained = _saving(PyTorchModelHubMixin._save_pretrained)  # type: ignore[method-assign]
    _stock = PyTorchModelHubMixin._load_as_safetensor.__func__  # type: ignore[attr-defined]
    PyTorchModelHubMixin._load_as_safetensor = _loading(_stock)  # type: ignore[method-assign]
