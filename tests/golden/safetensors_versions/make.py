"""Writes the files of this folder with the safetensors that is installed: ``python make.py FOLDER``."""

import sys
from pathlib import Path

import safetensors
import safetensors.torch
import torch


class Tied(torch.nn.Module):
    """An embedding whose weight is also the head's, and one bias under two names."""

    def __init__(self):
        super().__init__()
        self.emb, self.head = torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4)
        self.emb.weight.data = torch.arange(12.0).view(4, 3) / 8
        self.head.bias.data = torch.arange(4.0)
        self.head.weight = self.emb.weight
        self.bias = self.head.bias


def tensors():
    """A tensor of each dtype that this version writes, whose values are told by the dtype."""
    made = {}
    for dtype in safetensors.torch._TYPES.values():
        if dtype.is_complex:
            made[str(dtype)] = torch.complex(torch.arange(4.0), -torch.arange(4.0)).to(dtype)
        else:
            made[str(dtype)] = torch.arange(4).to(torch.float32).to(dtype)
    made["scalar"] = torch.tensor(1.5)
    if safetensors.__version__ != "0.3.0":  # which cannot write it
        made["empty"] = torch.empty(0, 3)
    return made


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    version = safetensors.__version__
    metadata = {"format": "pt", "version": version}
    safetensors.torch.save_file(tensors(), folder / f"{version}-tensors.safetensors", metadata)
    if hasattr(safetensors.torch, "save_model"):  # since 0.3.1
        safetensors.torch.save_model(Tied(), str(folder / f"{version}-model.safetensors"))
