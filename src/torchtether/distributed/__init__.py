"""Many machines: tied and quantized models under FSDP2 and DTensor, on PyTorch's own engine."""

from .flat import state_dict
from .guards import resync
from .loading import load
from .saving import save
from .sharding import restore_ties, shard
from .units import Unit, UnitPlan, plan_units

__all__ = ["plan_units", "shard", "load", "save", "state_dict", "restore_ties", "resync", "Unit", "UnitPlan"]
