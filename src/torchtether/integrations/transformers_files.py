"""Weights in the files of transformers: their names, their dtypes, and state dicts with parts in place of Weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, build_glob_alternation, rename_source_key

from ..errors import CheckpointError
from ..files.record import check_parts, part_keys
from ..ties.names import named_tensors
from ..weights.spec import WeightSpec
from ..weights.weight import Weight


def under_names_of(model: Any, specs: Mapping[str, WeightSpec]) -> tuple[dict[str, WeightSpec], list[str]]:
    """Return ``specs`` by the names in ``model``, and which of their names are the model's already.

    Those may lack the prefix of the base model, or have it. All others are renamed as ``from_pretrained`` does. Raises
    CheckpointError for a weight that ``from_pretrained`` would join with others, such as a single expert.
    """
    names, prefix = model.state_dict(), model.base_model_prefix
    conversions = get_model_conversion_mapping(model)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    found, own = {}, []
    for name, spec in specs.items():
        target, _ = rename_source_key(name, [], [], prefix, names)
        if target in names:
            own.append(name)
        else:
            target, source = rename_source_key(name, renamings, converters, prefix, names)
            if source is not None:
                fix = "Load the folder by tt.load, or quantize the plain one by from_pretrained."
                raise CheckpointError(
                    f"is quantized by itself, and transformers joins it with others to {target}", name=name, fix=fix
                )
        found[target] = spec
    return found, own


def dtype_of(model: Any, name: str) -> torch.dtype:
    """Return the dtype of the parameter ``name`` after loading: some modules stay in float32 in models of 16 bits."""
    dtype: torch.dtype = model.get_parameter(name).dtype
    plan = model._get_dtype_plan(dtype)
    pattern, globs, _ = build_glob_alternation(list(plan))
    found = pattern.search(name) if plan else None
    return plan[globs[found.lastgroup]] if found and found.lastgroup else dtype


def join_parts(model: Any, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    """Put Weights in place of their parts in ``state_dict``, for the Weights that ``model`` holds.

    This is a hook before ``load_state_dict``, with which ``Trainer`` and accelerate's ``load_checkpoint_in_model`` read
    the files of ``save_pretrained``.

    Raises CheckpointError, before anything is loaded, if a part is absent or has a wrong dtype or shape.
    """
    for name, held in named_tensors(model).items():
        if not isinstance(held, Weight):
            continue
        key = prefix + name
        parts = part_keys(key, held.spec)
        is_absent = state_dict.get(key, held) is held  # torch's set_model_state_dict adds those of the model itself
        if is_absent and not state_dict.keys().isdisjoint(parts.values()):
            fix = "If it is in another shard, read all of them by tt.load(model, folder)."
            check_parts(key, held.spec, state_dict, name=key, fix=fix)
            found = {part: state_dict.pop(stored) for part, stored in parts.items()}
            state_dict[key] = Weight(found, held.spec.replace(tie=None))
