"""Tied and quantized models on many ranks, under FSDP2, DTensor and ``torch.distributed.checkpoint``."""

from .flat import state_dict
from .guards import resync
from .loading import load
from .saving import save
from .sharding import restore_ties, shard
from .unit_plan import Unit, UnitPlan
from .units import plan_units

__all__ = ["plan_units", "shard", "load", "save", "state_dict", "restore_ties", "resync", "Unit", "UnitPlan"]
