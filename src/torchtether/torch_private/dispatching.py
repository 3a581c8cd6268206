"""Ops as torch's dispatcher knows them, and trees of arguments. There are no public names for any of it."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    return_and_correct_aliasing,
)
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only

__all__ = [
    "OpOverload",
    "TorchDispatchMode",
    "can_decompose",
    "has_kernel",
    "is_composite",
    "is_foreign_write",
    "is_traceable_wrapper_subclass",
    "return_and_correct_aliasing",
    "schema_of",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
]


def schema_of(op: Any) -> Any:
    """Return the arguments and results of an op: which are written to is said nowhere else."""
    return op._schema


def can_decompose(op: Any) -> bool:
    """Return whether ``op.decompose`` has something to call; the public method only fails where it has not."""
    return bool(op._can_decompose())


_OF_TORCH = frozenset(
    "aten prim prims c10d c10d_functional _c10d_functional _c10d_functional_autograd _dtensor bucketing fsdp inductor "
    "mkldnn profiler quantized rngprims streams symm_mem torchtether".split()
)


def is_foreign_write(op: Any) -> bool:
    """Return whether another library defined the op, and says that it writes to arguments and returns nothing."""
    return op.namespace not in _OF_TORCH and op._schema.is_mutable and not op._schema.returns


def has_kernel(op: Any) -> bool:
    """Return whether this build of torch has any kernel for an op that it declares."""
    return bool(torch._C._dispatch_has_kernel(op.name()))


def is_composite(op: Any) -> bool:
    """Return whether an op is a function of other ops, gradients included; inference mode hands us these whole."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"))
