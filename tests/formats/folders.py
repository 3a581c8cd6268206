"""Checkpoints as others publish them, made for one test: tensors, metadata, and the JSON files beside them."""

import contextlib
import json
import tempfile
from pathlib import Path

from safetensors.torch import save_file

import torchtether as tt


def write(folder, tensors, metadata=None, file="model.safetensors", **beside):
    """``folder`` holds the checkpoint; ``config={...}`` becomes ``config.json`` and so on."""
    tensors = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
    save_file(tensors, Path(folder) / file, {"format": "pt", **(metadata or {})})
    for name, value in beside.items():
        (Path(folder) / f"{name}.json").write_text(json.dumps(value))


@contextlib.contextmanager
def opened(tensors, metadata=None, **beside):
    """The same, opened."""
    with tempfile.TemporaryDirectory() as folder:
        write(folder, tensors, metadata, **beside)
        with tt.open(folder) as checkpoint:
            yield checkpoint


def fault(tensors, metadata=None, **beside):
    """The one thing that is wrong with it, as ``name: what``."""
    with opened(tensors, metadata, **beside) as checkpoint:
        assert len(checkpoint.faults) == 1, checkpoint.faults
        ((name, what),) = checkpoint.faults.items()
        assert name not in checkpoint
        assert "\n" not in what
        return f"{name}: {what}"
