"""Weights in the files of transformers: their specs, their names, and state dicts with parts in place of Weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ..checkpoint.reader import Checkpoint
from ..errors import CheckpointError
from ..files.record import check_parts, part_key
from ..formats import native
from ..ties.names import named_tensors
from ..weights.spec import WeightSpec
from ..weights.weight import Weight


def specs_of(files: list[str]) -> dict[str, WeightSpec]:
    """Return the specs of the Weights in our own checkpoint files, by name; empty for files of other formats.

    Only headers are read. Raises CheckpointError if a part is absent or has a wrong dtype or shape.
    """
    path = Path(files[0])
    with Checkpoint(path if len(files) == 1 else path.parent) as checkpoint:
        if checkpoint.format != native.name:
            return {}
        return {name: entry.spec for name, entry in checkpoint.entries.items() if entry.spec is not None}


def under_names_of(model: Any, specs: Mapping[str, WeightSpec]) -> dict[str, WeightSpec]:
    """Return ``specs`` by the names in ``model``, renamed as ``from_pretrained`` does.

    Raises CheckpointError for a weight that ``from_pretrained`` would join with others, such as a single expert.
    """
    names = model.state_dict()
    conversions = get_model_conversion_mapping(model)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    found = {}
    for name, spec in specs.items():
        target, source = rename_source_key(name, renamings, converters, model.base_model_prefix, names)
        if name not in names and source is not None:
            fix = "Load the folder by tt.load, or quantize the plain one by from_pretrained."
            raise CheckpointError(
                f"is quantized by itself, and transformers joins it with others to {target}", name=name, fix=fix
            )
        found[name if name in names else target] = spec
    return found


def join_parts(model: Any, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    """Put Weights in place of their parts in ``state_dict``, for the Weights that ``model`` holds.

    This is a hook before ``load_state_dict``, with which ``Trainer`` reads the files of ``save_pretrained``.

    Raises CheckpointError, before anything is loaded, if a part is absent or has a wrong dtype or shape.
    """
    for name, held in named_tensors(model).items():
        if not isinstance(held, Weight):
            continue
        key = prefix + name
        parts = {part: part_key(key, part) for part in held.parts}
        if key not in state_dict and not state_dict.keys().isdisjoint(parts.values()):
            check_parts(key, held.spec, state_dict, name=key)
            found = {part: state_dict.pop(stored) for part, stored in parts.items()}
            state_dict[key] = Weight(found, held.spec.replace(tie=None))
