"""huggingface_hub: models with ``PyTorchModelHubMixin`` write Weights to ``model.safetensors``, and read them back.

Importing this changes the mixin for models and files with Weights only. Stock ``from_pretrained`` finds none of their
names in such a file, and leaves the random values of a new model without a word.
"""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

from huggingface_hub.constants import SAFETENSORS_SINGLE_FILE
from huggingface_hub.hub_mixin import PyTorchModelHubMixin
from torch import Tensor, nn

from ..checkpoint.reader import Checkpoint
from ..checkpoint.saver import save
from ..errors import CheckpointError
from ..exchange.exchange import add_load_hook
from ..ties.names import named_tensors
from ..weights.weight import Weight


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
        with Checkpoint(model_file) as checkpoint:
            if all(entry.spec is None for entry in checkpoint.entries.values()):
                return original(cls, model, model_file, map_location, strict)
            read = {name: checkpoint[name] for name in checkpoint}
            owners = {alias: tie.owner for tie in checkpoint.ties for alias in tie.aliases}
        _fill(model, read, owners, strict)
        return model.to(map_location).eval()

    return classmethod(_load_as_safetensor)


def _fill(model: nn.Module, read: dict[str, Tensor], owners: dict[str, str], strict: bool) -> None:
    """Put Weights, one object under all names of a tie, in the place of parameters, and copy plain values into theirs.

    Raises CheckpointError, before anything is changed, for a Weight of another shape, or if ``strict`` for names that
    only the model or only the file has.
    """
    held = model.state_dict(keep_vars=True)
    made: dict[str, Tensor] = {}
    for name, tensor in sorted(read.items(), key=lambda one: one[0] in owners):  # owners first
        owner = owners.get(name, name)
        if isinstance(tensor, Weight) and owner in made and made[owner].shape == tensor.shape:
            tensor = made[owner]
        elif isinstance(tensor, Weight) and name in held:
            if tensor.shape != held[name].shape:
                what = f"has the shape {tuple(tensor.shape)} in the file, and {tuple(held[name].shape)} in the model"
                raise CheckpointError(what, name=name)
            tensor = nn.Parameter(tensor.to(held[name].dtype))
        made[name] = tensor
    apart = sorted(held.keys() ^ made.keys())
    if strict and apart:
        where = "is only in the model" if apart[0] in held else "is only in the file"
        raise CheckpointError(f"{where}, as {len(apart) - 1} other names are in one of both", name=apart[0])
    weights = {name: tensor for name, tensor in made.items() if isinstance(tensor, Weight)}
    model.load_state_dict({name: tensor for name, tensor in made.items() if name not in weights}, strict=False)
    model.load_state_dict(weights, strict=False, assign=True)
    for path in {name.rpartition(".")[0] for name in weights if name in held}:
        add_load_hook(model.get_submodule(path))


if not hasattr(PyTorchModelHubMixin._save_pretrained, "__wrapped__"):
    PyTorchModelHubMixin._save_pretrained = _saving(PyTorchModelHubMixin._save_pretrained)  # type: ignore[method-assign]
    stock = PyTorchModelHubMixin._load_as_safetensor.__func__  # type: ignore[attr-defined]
    PyTorchModelHubMixin._load_as_safetensor = _loading(stock)  # type: ignore[method-assign]
