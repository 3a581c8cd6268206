"""Checks of arguments for products of torch and other libraries, for tensors on any device, real or fake."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from .layout import Layout

_PLAIN = (Tensor, torch.nn.Parameter)


def fits(layout: Layout, parts: Sequence[Tensor], x: Tensor, bias: Tensor | None) -> bool:
    """Return whether all tensors are on one device, parts are contiguous, and sizes and dtypes match the product."""
    if x.shape[-1:] != (layout.columns,) or x.numel() == 0:
        return False
    if bias is not None and (bias.dtype is not x.dtype or bias.shape != (layout.rows,) or bias.device != x.device):
        return False
    return all(part.device == x.device and part.is_contiguous() for part in parts)


def is_plain(*tensors: Tensor | None) -> bool:
    """Return whether no tensor is of a subclass, whose memory need not hold the values that its ops return."""
    return all(tensor is None or type(tensor) in _PLAIN for tensor in tensors)


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU; (0, 0) if absent, as it may be for fake tensors."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.get_device_capability(device)
