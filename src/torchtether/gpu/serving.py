"""Which tensors the kernels take."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

from ..torch_private.observers import is_direct

DEVICES = {"cuda"}
"""Types of devices whose tensors the kernels take; tests add "cpu", where Triton interprets."""


@cache
def has_triton() -> bool:
    """Return whether Triton is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def serves(*tensors: Tensor) -> bool:
    """Return whether the kernels can read and write these tensors: plain memory of one GPU that nothing looks on."""
    first = tensors[0]
    if first.device.type not in DEVICES or not has_triton() or not is_direct():
        return False
    return all(tensor.device == first.device and type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)
