"""What a library knows of its models that a load needs: names in files, values that no file has.

Nothing is imported for it before the user has imported the library.
"""

from __future__ import annotations

import sys

from torch import nn

from ..checkpoint.reader import Checkpoint
from ..renaming.steps import Rename
from ..ties.names import named_tensors
from .steps import Draft


def names_of_library(model: nn.Module, checkpoint: Checkpoint) -> Rename:
    """Return the rename rules of a model of transformers; ``None`` where names and shapes are the model's already."""
    if not _is_of_transformers(model):
        return None
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
    if all(name in shapes and checkpoint.fit(name, shapes[name]) == shapes[name] for name in checkpoint):
        return None
    from ..integrations.transformers_names import transformers_names

    return transformers_names(model)  # type: ignore[arg-type]


def take_initial_values(draft: Draft, model: nn.Module) -> None:
    """Have ``draft`` fill what no file has with what the model's library computes there, where it always does so."""
    if not (draft.lost or draft.missing) or not any(map(_is_of_transformers, model.modules())):
        return
    from ..integrations.transformers_values import initial_values, optional_names

    alone = {
        name: one.members[0].tensor for one in draft.targets.components if len(one.members) == 1 for name in one.names
    }
    optional = {name for name in optional_names(model, draft.missing) if name in alone}
    draft.optional = {name for name in optional if not alone[name].is_meta}
    wanted = [name for name in (*draft.lost, *sorted(optional - draft.optional)) if name in alone]
    draft.computed = initial_values(model, wanted)
    draft.lost = [name for name in draft.lost if name not in draft.computed]
    draft.missing = [name for name in draft.missing if name not in draft.computed]


def _is_of_transformers(model: nn.Module) -> bool:
    """Return whether ``model`` is one of transformers 5, which has a mapping of names."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return kind is not None and isinstance(model, kind) and "transformers.conversion_mapping" in sys.modules
