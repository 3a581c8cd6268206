"""Many machines: tied and quantized models on PyTorch's own FSDP2 and DTensor."""

from .units import Unit, UnitPlan, plan_units

__all__ = ["plan_units", "Unit", "UnitPlan"]
