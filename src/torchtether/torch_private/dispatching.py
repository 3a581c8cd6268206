"""Ops as the dispatcher knows them, and trees of arguments. None of this has a public name."""

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
    "written_by",
]


def schema_of(op: Any) -> Any:
    """Return the schema of an op: nothing public says which arguments it writes to."""
    return op._schema


def written_by(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: type) -> list[Any]:
    """Return the tensors of ``kind`` that ``op`` writes to, each once."""
    found = {}
    for i, argument in enumerate(schema_of(op).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for leaf in tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name)):
                if isinstance(leaf, kind):
                    found[id(leaf)] = leaf
    return list(found.values())


def can_decompose(op: Any) -> bool:
    """Return whether ``op.decompose`` has a decomposition; the public method only fails if there is none."""
    return bool(op._can_decompose())


_OF_TORCH = frozenset(
    "aten prim prims c10d c10d_functional _c10d_functional _c10d_functional_autograd _dtensor bucketing fsdp inductor "
    "mkldnn profiler quantized rngprims streams symm_mem torchtether".split()
)


def is_foreign_write(op: Any) -> bool:
    """Return whether another library defined the op, with a schema that writes to arguments and returns nothing."""
    return op.namespace not in _OF_TORCH and op._schema.is_mutable and not op._schema.returns


def has_kernel(op: Any) -> bool:
    """Return whether this build of torch has a kernel for ``op``, not only its declaration."""
    return bool(torch._C._dispatch_has_kernel(op.name()))


def is_composite(op: Any) -> bool:
    """Return whether ``op`` is composed of other ops, gradients included; inference mode dispatches it undecomposed."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"))
