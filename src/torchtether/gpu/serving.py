"""The test of whether the kernels can take given tensors."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .._warnings import warn
from ..torch_private.observers import is_direct

_PLAIN = (Tensor, torch.nn.Parameter)

_HERE: nullcontext[None] = nullcontext()

DEVICES = {"cuda"}
"""Types of devices whose tensors the kernels take; tests add "cpu" for Triton's interpreter."""


@cache
def has_triton() -> bool:
    """Return whether Triton is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def serves(*tensors: Tensor) -> bool:
    """Return whether the kernels can use these tensors: plain tensors on one GPU, no mode or tracer observes ops."""
    device = tensors[0].device
    if device.type not in DEVICES or not has_triton() or not is_direct():
        return False
    for tensor in tensors:
        if type(tensor) not in _PLAIN or tensor.device != device:
            return False
    return runs_on(device)


@cache
def runs_on(device: torch.device) -> bool:
    """Return whether kernels run on ``device``: run the smallest one; warn if Triton cannot build it.

    Triton needs a GPU of compute capability 8.0, a driver that it knows and, in some versions, a C compiler.
    """
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        from .trial_kernel import write_one  # which imports Triton

        out = torch.empty(1, device=device)
        with on(out):
            write_one[(1,)](out)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the compiler, the linker and the driver raise many types
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        fix = "Install a C compiler, or a driver that this Triton supports; torch ops are used instead."
        warn(f"gpu: Triton cannot build kernels for {device}: {reason}. {fix}")
        return False
    return True


def on(tensor: Tensor) -> Any:
    """Return a context in which kernels start on the device of ``tensor``."""
    is_elsewhere = tensor.is_cuda and tensor.get_device() != torch.cuda.current_device()
    return torch.cuda.device(tensor.device) if is_elsewhere else _HERE
