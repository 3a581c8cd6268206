"""The uses of a model's parameters: recorded in a forward on ``meta``, with the modules that run at that moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..ties.names import named_tensors
from ..torch_private.dispatching import tree_flatten, tree_map_only
from ..torch_private.modules import tables_of

_VIEWS = {"T", "mT", "H", "mH", "data"}
"""Attributes whose value is a view of the tensor; all others (``shape``, ``dtype``) do not read its values."""


@dataclass(frozen=True)
class Use:
    """Record that ``name`` is an argument of a function while the modules of ``running``, outermost first, run."""

    name: str
    running: tuple[str, ...]


def find_uses(model: nn.Module, inputs: Any) -> tuple[Use, ...]:
    """Return every use of a parameter in ``model(*inputs)`` (a mapping gives keywords), each combination once.

    The forward runs with every tensor on ``meta``: nothing is computed, and the model keeps its own tensors.

    Raises:
        Whatever the forward raises, where it needs values that ``meta`` does not have.

    >>> class Tied(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.emb = nn.Embedding(5, 2)
    ...     def forward(self, ids):
    ...         return self.emb(ids) @ self.emb.weight.T
    >>> [use.running for use in find_uses(Tied(), (torch.tensor([1]),))]
    [('', 'emb'), ('',)]
    """
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
    names: dict[int, str] = {}
    stand_ins: dict[int, Tensor] = {}
    for name, tensor in named_tensors(model).items():
        if id(tensor) not in stand_ins:
            stand_ins[id(tensor)] = made = tensor.detach().to("meta")
            names[id(made)] = name
    known = {id(module): name for name, module in reversed(list(model.named_modules()))}
    stack: list[str] = []
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(_entering(stack, known[id(module)])))
        handles.append(module.register_forward_hook(lambda *_: _leave(stack), always_call=True))
    watch = _Watch(names, stack)
    slots: list[tuple[dict[str, Any], str, Tensor]] = [
        (held, leaf, tensor)  # type: ignore[misc]
        for module in model.modules()
        for held in (tables_of(module).parameters, tables_of(module).buffers)
        for leaf, tensor in held.items()
        if tensor is not None
    ]
    try:
        # not functional_call, which leaves the given tensors in modules that are registered twice
        for held, leaf, tensor in slots:
            held[leaf] = stand_ins[id(tensor)]
        with torch.no_grad(), torch.device("meta"), watch:
            model(*args, **kwargs)
    finally:
        for held, leaf, tensor in slots:
            held[leaf] = tensor
        for handle in handles:
            handle.remove()
    return tuple(dict.fromkeys(watch.uses))


def _entering(stack: list[str], name: str) -> Callable[..., None]:
    """Return a hook that pushes the module ``name`` on ``stack``."""
    return lambda *_: stack.append(name)


def _leave(stack: list[str]) -> None:
    """Pop the innermost module off ``stack``."""
    stack.pop()


class _Watch(TorchFunctionMode):
    """Record the parameters that torch functions are called with."""

    def __init__(self, names: Mapping[int, str], stack: list[str]) -> None:
        super().__init__()
        self._names, self._stack = names, stack
        self.uses: list[Use] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if self._stack and (name != "__get__" or attribute in _VIEWS):
            for one in tree_flatten((args, kwargs))[0]:
                if id(one) in self._names and isinstance(one, Tensor):
                    self.uses.append(Use(self._names[id(one)], tuple(self._stack)))
        return func(*args, **(kwargs or {}))
