"""Many machines: tied and quantized models under FSDP2 and DTensor, on PyTorch's own engine."""

from .loading import load
from .units import Unit, UnitPlan, plan_units

__all__ = ["plan_units", "load", "Unit", "UnitPlan"]
