"""Functions of torch's dispatch that have no public name."""

from __future__ import annotations

from torch.utils._pytree import tree_flatten, tree_map_only  # arguments of any nesting, as torch itself walks them

__all__ = ["tree_flatten", "tree_map_only"]
