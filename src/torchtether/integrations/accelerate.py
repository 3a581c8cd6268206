"""accelerate: let ``save_state`` and ``load_state`` write and read models whose parameters are Weights.

Offloading, device maps and ``prepare`` work without this module. To offload to disk, write the model first, and pass
the open checkpoint to accelerate as ``state_dict``; each tensor is read when a forward needs it::

    tt.save(model, folder)
    accelerate.cpu_offload(model, execution_device, state_dict=tt.open(folder))
    accelerate.dispatch_model(model, device_map, state_dict=tt.open(folder), offload_index={})
"""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import accelerate  # type: ignore[import-untyped]
from accelerate.utils import SAFE_WEIGHTS_NAME  # type: ignore[import-untyped]
from torch import nn

from ..checkpoint.reader import Checkpoint
from ..checkpoint.saver import save
from ..exchange.scope import fill_aliases
from ..weights.weight import Weight


def attach(accelerator: Any) -> None:
    """Let ``accelerator.save_state`` and ``load_state`` write and read its models as ``tt.save`` and ``tt.open`` do.

    The files have accelerate's names (``model.safetensors``, ``model_1.safetensors``), and record Weights and ties. If
    no model has a Weight, and under FSDP and DeepSpeed, accelerate's own code runs.

    ``load_state`` raises CheckpointError for an absent or damaged file, RuntimeError for a file of another model.
    ``attach`` raises ImportError if this accelerate cannot give the module inside a compiled model.
    """
    if "keep_torch_compile" not in signature(accelerator.unwrap_model).parameters:
        raise ImportError(f"accelerate: this is {accelerate.__version__}, and attach needs 1.3 or newer. Update it.")

    def save_models(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        if len(weights) != len(models) or not any(map(_has_weights, models)):
            return
        weights.clear()  # so that accelerate writes none of them
        if accelerator.is_main_process:
            for model, path in zip(models, _paths(output_dir, len(models)), strict=True):
                save(accelerator.unwrap_model(model, keep_torch_compile=False), path)

    def load_models(models: list[nn.Module], input_dir: str) -> None:
        if not any(map(_has_weights, models)):
            return
        for model, path in zip(models, _paths(input_dir, len(models)), strict=True):
            inner = accelerator.unwrap_model(model, keep_torch_compile=False)
            with Checkpoint(path) as checkpoint:
                state = dict(checkpoint)
                fill_aliases(inner, state, "")  # files of accelerate itself have one name of a tie, and no record
                inner.load_state_dict(state)
        models.clear()

    accelerator.register_save_state_pre_hook(save_models)
    accelerator.register_load_state_pre_hook(load_models)


def _has_weights(model: nn.Module) -> bool:
    return any(isinstance(tensor, Weight) for tensor in (*model.parameters(), *model.buffers()))


def _paths(folder: str, count: int) -> list[Path]:
    """Return the paths at which accelerate stores ``count`` models."""
    first = Path(folder) / SAFE_WEIGHTS_NAME
    return [first, *(first.with_stem(f"{first.stem}_{number}") for number in range(1, count))]
