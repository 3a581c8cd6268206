"""The search for references that forbid an exchange, described so that the user can release them.

It walks all graphs and views of the process, which takes some tenths of a second.  ``refusals`` checks reference counts
first, which is fast, and calls this module only for tensors with references too many.
"""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_private.graphs import is_released, saved_by
from ..torch_private.tensors import as_plain, base_of, has_gradient_edge, use_count


@dataclass
class Survey:
    """The result of one walk over every graph and view that Python can see."""

    wanted: set[int]
    together: set[int]
    inner: Counter[int]
    live: dict[int, Tensor | Any] = field(default_factory=dict)
    spent: dict[int, set[int]] = field(default_factory=dict)
    views: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        roots: list[tuple[Any, Any]] = []
        kinds: dict[type, bool] = {}
        for thing in gc.get_objects():
            kind = type(thing)
            is_tensor = kinds.get(kind)
            if is_tensor is None:
                is_tensor = kinds[kind] = issubclass(kind, Tensor)
            try:
                if is_tensor:
                    with as_plain():
                        if id(base_of(thing)) in self.wanted and id(thing) not in self.together:
                            self.views[id(base_of(thing))] = thing
                        if thing.grad_fn is not None:
                            roots.append((thing.grad_fn, thing))
                elif kind is torch.autograd.graph.GradientEdge:
                    roots.append((thing.node, thing))
            except Exception:
                continue  # a half-initialized object of other code
        seen: dict[tuple[int, bool], Any] = {}  # keeps the nodes alive, so that no id is reused
        for node, root in roots:
            self._walk(node, root, seen)

    def _walk(self, node: Any, root: Any, seen: dict[tuple[int, bool], Any]) -> None:
        stack = [(node, False)]
        while stack:
            node, blocked = stack.pop()
            if (id(node), blocked) in seen:
                continue
            seen[id(node), blocked] = node
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) in self.wanted:
                if blocked:
                    self.spent.setdefault(id(variable), set()).add(id(node))
                else:
                    self.live.setdefault(id(variable), root)
            if not blocked:
                for saved in saved_by(node):
                    for one in (saved, base_of(saved)):
                        if id(one) in self.wanted:
                            self.live.setdefault(id(one), root)
                blocked = is_released(node)
            stack += [(following, blocked) for following, _ in node.next_functions if following is not None]

    def holder(self, tensor: Tensor, *, detail: bool) -> str:
        key = id(tensor)
        count = use_count(tensor) - self.inner[key]
        if key in self.live and self.live[key] is not self.views.get(key):
            root = self.live[key]
            return f"a live graph, between forward and backward ({_describe(root, detail)})"
        if key in self.views:
            return f"a view of it ({_describe(self.views[key], detail)})"
        # After a conversion in place torch makes new AccumulateGrad nodes; those of freed graphs stay owners.
        if count == 1 + len(self.spent.get(key, ())):
            return ""
        edge = has_gradient_edge(tensor)
        wrapper = _replica_of(tensor) if detail else ""
        if wrapper:
            return wrapper
        if edge:
            return "a gradient edge or AccumulateGrad node outside of any visible graph (a hook on the node, DDP, FSDP)"
        return f"something in C++ that Python does not see (use_count {count}, expected 1)"


def _replica_of(tensor: Tensor) -> str:
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, nn.parallel.DistributedDataParallel) and any(p is tensor for p in thing.parameters()):
            return "DistributedDataParallel, whose reducer hooks the old gradient node"
        if issubclass(kind, torch.jit.ScriptModule) and any(p is tensor for p in thing.parameters()):
            return f"TorchScript ({kind.__name__})"
    return ""


def weak_holder(refs: Sequence[Any]) -> str:
    """Describe the first weak reference by its variable, else by its container's class, else by its own class."""
    name = _name_of(refs[0])
    if name.startswith(("variable", "global")):
        return f"a weak reference ({name})"
    level: list[Any] = [refs[0]]
    for _ in range(3):
        found = [owner for thing in level for owner in gc.get_referrers(thing)]
        level = [owner for owner in found if owner is not level and owner is not refs]
        for owner in level:
            kind = type(owner)
            if kind.__module__ not in ("builtins", "types") and not issubclass(kind, (Tensor, weakref.ref)):
                return f"a weak reference in a {kind.__module__}.{kind.__qualname__}"
        level = [owner for owner in level if type(owner) in (dict, list, tuple, set) and "__name__" not in owner]
    return f"a weak reference ({type(refs[0]).__name__})"


def _describe(thing: Any, detail: bool) -> str:
    if isinstance(thing, Tensor):
        with as_plain():
            node = thing.grad_fn
            text = f"a tensor of shape {tuple(thing.shape)}" + (f" from {type(node).__name__}" if node else "")
    else:
        text = f"a {type(thing).__name__}"
    name = _name_of(thing) if detail else ""
    return f"{text}, {name}" if name else text


def _name_of(thing: Any) -> str:
    """Describe the variable or attribute in which user code keeps ``thing``; return "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith("torchtether."):
            for names, what in ((_variables(frame, thing), "variable"), (_keys(frame.f_globals, thing), "global")):
                if names:
                    return f"{what} {names[0]!r} in {frame.f_code.co_name}"
        frame = frame.f_back
    for owner in gc.get_referrers(thing):
        if type(owner) is dict:
            key = next((key for key, value in owner.items() if value is thing), None)
            holder = next((one for one in gc.get_referrers(owner) if getattr(one, "__dict__", None) is owner), None)
            if holder is not None:
                return f"attribute {key!r} of {type(holder).__name__}"
    return ""


def _variables(frame: FrameType, thing: Any) -> list[str]:
    """Return the names of ``thing`` in ``frame``, and leave no copy of its variables behind.

    Before Python 3.13 ``f_locals`` is a copy that the frame keeps: ``del loss`` would no longer free the loss.  Under a
    debugger the copy cannot be cleared, because the debugger writes it back.
    """
    if sys.version_info >= (3, 13) or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return _keys(frame.f_locals, thing)
    if sys.gettrace() is not None:
        return []
    variables = frame.f_locals
    names = _keys(variables, thing)
    variables.clear()
    return names


def _keys(space: Mapping[str, Any], thing: Any) -> list[str]:
    return [name for name, value in list(space.items()) if value is thing]
