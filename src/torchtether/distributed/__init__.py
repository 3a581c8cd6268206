"""Many machines: tied and quantized models under FSDP2 and DTensor, on PyTorch's own engine."""

from .flat import state_dict
from .loading import load
from .saving import save

__all__ = ["load", "save", "state_dict"]
