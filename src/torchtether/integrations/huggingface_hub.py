"""huggingface_hub: models with ``PyTorchModelHubMixin`` write Weights to ``model.safetensors``, and read them back.

Importing this changes the mixin for models and files with Weights only. Stock ``from_pretrained`` does not find the
quantized parameters in such a file, and leaves the random values of a new model in them, without a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import SAFETENSORS_SINGLE_FILE
from huggingface_hub.hub_mixin import PyTorchModelHubMixin
from safetensors import safe_open
from torch import Tensor, nn

from ..checkpoint.aliases import view_of
from ..checkpoint.reader import Checkpoint
from ..checkpoint.saver import save
from ..errors import CheckpointError
from ..exchange.exchange import add_load_hook
from ..geometry.views import View
from ..ties.names import named_tensors
from ..weights.spec import Tie
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
        with safe_open(model_file, framework="pt") as file:
            has_places = model.state_dict().keys() >= set(file.keys())
        if has_places:  # of plain tensors, or of those in which modules of other libraries hold quantized ones
            return original(cls, model, model_file, map_location, strict)
        with Checkpoint(model_file) as checkpoint:
            if all(entry.spec is None for entry in checkpoint.entries.values()):
                return original(cls, model, model_file, map_location, strict)
            read = {name: checkpoint[name] for name in checkpoint}
            ties = checkpoint.ties
        _fill(model, read, ties, strict)
        return model.to(map_location).eval()

    return classmethod(_load_as_safetensor)


def _fill(model: nn.Module, read: dict[str, Tensor], ties: Sequence[Tie], strict: bool) -> None:
    """Put Weights, tied as in the file, in the place of parameters and buffers, and copy plain values into theirs.

    A name that the file lacks gets the Weight of a name that the model ties to it. Raises CheckpointError, before
    anything is changed, for a Weight of another shape, for a model on ``meta``, or if ``strict`` for names that only
    the model or only the file has.
    """
    held = model.state_dict(keep_vars=True)
    places = {name: (tie.owner, view) for tie in ties for name, view in zip(tie.names, tie.views, strict=True)}
    named = {id(held[name]): name for name in held if name in read}
    same = {name: named[id(held[name])] for name in held if name not in read and id(held[name]) in named}
    apart = sorted(held.keys() ^ read.keys() ^ same.keys())
    if strict and apart:
        where = "is only in the model" if apart[0] in held else "is only in the file"
        raise CheckpointError(f"{where}, as {len(apart) - 1} other names are in one of both", name=apart[0])
    made: dict[tuple[str, View | None, torch.dtype], Weight] = {}
    weights: dict[str, Weight] = {}
    for name in sorted(held, key=lambda one: places.get(one, (one, None))[1] is not None):  # views after their owners
        source, place = same.get(name, name), held[name]
        tensor = read.get(source)
        if not isinstance(tensor, Weight):
            continue
        if place.is_meta:
            what, fix = "is on meta, where stock loads put no values", "Build the model outside of tt.on_meta."
            raise CheckpointError(what, name=name, fix=fix)
        if tensor.shape != place.shape:
            what = f"has the shape {tuple(tensor.shape)} in the file, and {tuple(place.shape)} in the model"
            raise CheckpointError(what, name=name)
        owner, view = places.get(source, (source, None))
        if (owner, view, place.dtype) not in made:
            whole = made.get((owner, None, place.dtype))
            value: Any = tensor.to(place.dtype) if whole is None else view_of(whole, view)
            if isinstance(place, nn.Parameter):
                value = nn.Parameter(value, requires_grad=place.requires_grad)
            made[owner, view, place.dtype] = value
        weights[name] = made[owner, view, place.dtype]
    model.load_state_dict({name: tensor for name, tensor in read.items() if name not in weights}, strict=False)
    model.load_state_dict(weights, strict=False, assign=True)
    for path in {name.rpartition(".")[0] for name in weights}:
        add_load_hook(model.get_submodule(path))


if not hasattr(PyTorchModelHubMixin._save_pretrained, "__wrapped__"):
    PyTorchModelHubMixin._save_pretrained = _saving(PyTorchModelHubMixin._save_pretrained)  # type: ignore[method-assign]
    stock = PyTorchModelHubMixin._load_as_safetensor.__func__  # type: ignore[attr-defined]
    PyTorchModelHubMixin._load_as_safetensor = _loading(stock)  # type: ignore[method-assign]
