"""Compute tensors that no file stores by transformers' ``_init_weights``: rotary frequencies, position ids, and others.

``from_pretrained`` runs ``_init_weights`` for tensors that a checkpoint lacks. Here it runs on copies of modules, whose
tensors are on ``meta`` except the requested ones, so that it cannot change the model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..ties.names import named_tensors
from ..torch_private.modules import buffers_of, parameters_of


def optional_names(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Return those of ``names`` that a checkpoint may lack according to the model."""
    if not isinstance(model, PreTrainedModel):
        return set()
    patterns = [f"(?:{pattern})" for pattern in model._keys_to_ignore_on_load_missing or ()]
    unsaved = model._keys_to_ignore_on_save or ()
    return {name for name in names if name in unsaved or (patterns and re.search("|".join(patterns), name))}


def initial_values(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the values that ``_init_weights`` of transformers computes for ``names``, which are on ``meta``.

    It runs on the CPU, on the module that holds a tensor or, if that gives no value, on the modules around it. A name
    is left out if no transformers model contains it, if nothing is written to it, or if the values are random.
    ``model`` and the state of torch's CPU generator do not change.
    """
    modules, tensors = dict(model.named_modules(remove_duplicate=False)), named_tensors(model)
    found: dict[str, Tensor] = {}
    left = {name: name.rpartition(".")[0] for name in names}
    while left:
        for scope in dict.fromkeys(left.values()):
            owner, start = _owner(modules, scope), len(scope) + 1 if scope else 0
            wanted = {name[start:]: tensors[name] for name, place in left.items() if place == scope}
            if owner is not None:
                made = _computed(owner, modules[scope], wanted)
                found |= {f"{scope}.{name}" if scope else name: value for name, value in made.items()}
        left = {name: scope.rpartition(".")[0] for name, scope in left.items() if name not in found and scope}
    return found


def _owner(modules: dict[str, nn.Module], scope: str) -> PreTrainedModel | None:
    """Return the innermost transformers model that contains the module ``scope`` or is that module."""
    while not isinstance(modules[scope], PreTrainedModel):
        if not scope:
            return None
        scope = scope.rpartition(".")[0]
    return modules[scope]  # type: ignore[return-value]


def _computed(owner: PreTrainedModel, module: nn.Module, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the values of ``wanted``, by name in ``module``, that are equal in two runs from different contents."""
    first, second = (_run(owner, module, wanted, fill) for fill in (0, 1))
    return {
        name: value
        for name, value in first.items()
        if name in second and torch.equal(_bytes(value), _bytes(second[name]))
    }


def _run(owner: PreTrainedModel, module: nn.Module, wanted: dict[str, Tensor], fill: int) -> dict[str, Tensor]:
    """Return the values of ``wanted`` after one run; ``fill`` is the value of their bytes before it, and the seed."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.default_generator.manual_seed(fill)
        try:
            twin = _twin(module, {id(tensor) for tensor in wanted.values()}, fill)
            (twin if module is owner else owner)._init_weights(twin)
        except Exception:  # the model's code may need tensors that are on meta here: then it computes nothing
            return {}
    made = {name: tensor.detach() for name, tensor in named_tensors(twin).items() if name in wanted}
    return {name: new for name, new in made.items() if not new.is_meta and _kind(new) == _kind(wanted[name])}


def _twin(module: nn.Module, real: set[int], fill: int) -> Any:
    """Return a copy of ``module`` with all tensors on ``meta`` except those whose ids are in ``real``."""
    memo: dict[int, Any] = {}
    for inner in module.modules():
        config = getattr(inner, "config", None)
        memo[id(config)] = config
        for tensor in (*parameters_of(inner).values(), *buffers_of(inner).values()):
            if tensor is None or id(tensor) in memo:
                continue
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu" if id(tensor) in real else "meta")
            if id(tensor) in real:
                _bytes(made).fill_(fill)
            memo[id(tensor)] = nn.Parameter(made, False) if isinstance(tensor, nn.Parameter) else made
    return copy.deepcopy(module, memo)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape
