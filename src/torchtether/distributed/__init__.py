"""Many machines: tied and quantized models under FSDP2 and DTensor, on PyTorch's own engine."""

from .guards import resync
from .loading import load
from .sharding import restore_ties, shard
from .units import Unit, UnitPlan, plan_units

__all__ = ["plan_units", "shard", "load", "restore_ties", "resync", "Unit", "UnitPlan"]
