"""Many machines: tied and quantized models under FSDP2 and DTensor, on PyTorch's own engine."""

from .loading import load

__all__ = ["load"]
