"""Prepare libraries that the user has imported for Weights, and take rename rules from them.

No library is imported here before the user has imported it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import nn

from .._dtypes import dtype_name
from ..checkpoint.reader import Checkpoint
from ..errors import CheckpointError
from ..formats import gguf
from ..renaming.gguf_names import gguf_names, is_of_llama_cpp
from ..renaming.steps import Rename
from ..ties.names import named_tensors
from ..torch_private.modules import buffers_of, parameters_of, unwrapped_name

_MODELING = "transformers.modeling_utils"
_DIFFUSERS = "diffusers.models.modeling_utils"
_HUB = "huggingface_hub.hub_mixin"
_KEPT = "_keep_in_fp32_modules"

NAMING = "transformers.conversion_mapping"
"""The module of transformers 5 that maps names in files; ``names_of_library`` needs it."""


def _whole(name: str) -> ModuleType | None:
    """Return a module of ``sys.modules`` when its import has ended, which another thread may have begun.

    Until then names are missing in it, and an import of its submodules could make that of the other thread fail.
    ``None`` if the import fails.
    """
    with suppress(ImportError):
        return import_module(name)
    return None


def _tell_transformers(model: nn.Module, path: str) -> Callable[[], None] | None:
    """Attach each ``PreTrainedModel`` on the path from ``model`` to its module at ``path``.

    Return a function that undoes it; ``None`` if nothing was done.
    """
    kind: Any = getattr(_whole(_MODELING), "PreTrainedModel", ())
    modules: list[Any] = [model]
    for name in path.split(".") if path else ():
        modules.append(getattr(modules[-1], name))
    found = [module for module in modules if isinstance(module, kind)]
    try:
        from .transformers import attach  # its import prepares save_pretrained of models around this one, too
    except ImportError:  # an old transformers without custom quantizers
        return None
    undone = [undo for undo in map(attach, found) if undo is not None]

    def detach() -> None:
        for undo in undone:
            undo()

    return detach if undone else None


ABOVE: dict[str, Callable[..., Any]] = {}
"""Functions of rooms above this one that modules here call, by their public names; the package puts them here."""


@cache  # Python would run an import that has failed again for each module
def _prepare(library: str, integration: str) -> None:
    """Import a module of this room, whose import prepares the library for Weights."""
    _whole(library)
    with suppress(ImportError):  # an unsupported version of the library
        import_module(f".{integration}", __package__)


def _tell_peft(model: nn.Module, path: str) -> None:
    """Let the layers of PEFT merge into Weights."""
    _prepare("peft", "peft")


def _tell_diffusers(model: nn.Module, path: str) -> None:
    """Let ``save_pretrained`` of diffusers write Weights."""
    _prepare(_DIFFUSERS, "diffusers")


def _tell_hub(model: nn.Module, path: str) -> None:
    """Let models with ``PyTorchModelHubMixin`` write Weights and read them."""
    _prepare(_HUB, "huggingface_hub")


LISTENERS = {"peft": _tell_peft, _MODELING: _tell_transformers, _DIFFUSERS: _tell_diffusers, _HUB: _tell_hub}
"""Functions that prepare an imported library for the Weights of a module; see ``exchange.LISTENERS``."""


def _initialising_transformers() -> AbstractContextManager[None]:
    """Return a context inside which models of transformers 5 initialise on ``meta``; version 4 does so by itself."""
    if not hasattr(_whole(_MODELING), "get_torch_context_manager_or_global_device"):
        return nullcontext()
    from .transformers_building import initialising

    return initialising()


INITIALISING = {_MODELING: _initialising_transformers}
"""Contexts for imported libraries whose models skip their initialisation on ``meta``; see ``building.INITIALISING``."""


def _mark_for_transformers(model: nn.Module, left: Collection[str]) -> None:
    """Mark the modules of transformers models as initialised, except those with tensors in ``left`` or on ``meta``.

    ``from_pretrained`` does so. A model that is built around unmarked modules initialises them again.
    """
    kind: Any = getattr(sys.modules[_MODELING], "PreTrainedModel", ())
    paths = {name.rpartition(".")[0] for name in left}
    skipped = {id(module) for path, module in model.named_modules(remove_duplicate=False) if path in paths}
    for owner in (module for module in model.modules() if isinstance(module, kind)):
        for module in owner.modules():
            own = (*parameters_of(module).values(), *buffers_of(module).values())
            if id(module) not in skipped and not any(tensor is not None and tensor.is_meta for tensor in own):
                vars(module)["_is_hf_initialized"] = True


FILLED = {_MODELING: _mark_for_transformers}
"""Functions that tell an imported library which modules have their values; see ``materializing.FILLED``."""


def _config_of_transformers(model: nn.Module) -> dict[str, Any]:
    """Return the entries of ``config.json`` for a transformers model, as its ``save_pretrained`` does; else none.

    Raise CheckpointError if JSON cannot hold them.
    """
    config: Any = getattr(model, "config", None)
    if not isinstance(model, getattr(_whole(_MODELING), "PreTrainedModel", ())) or config is None:
        return {}
    try:
        made = json.loads(config.to_json_string(), object_hook=_without_quantization)
    except (TypeError, ValueError) as error:
        what = f"the config of the model cannot be written as JSON: {error}"
        raise CheckpointError(what, name="config.json", fix="Write one to the folder before.") from error
    # fully_shard gives a model a class of torch's
    kinds = (kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch."))
    dtypes = [dtype_name(one.dtype) for one in model.parameters() if one.is_floating_point()]
    return {**made, "architectures": [next(kinds).__name__], **({"dtype": dtypes[0]} if dtypes else {})}


def _without_quantization(entries: dict[str, Any]) -> dict[str, Any]:
    """Return ``entries`` of a config, or of one within it, as of a text model, without those about quantization."""
    return {key: value for key, value in entries.items() if key != "quantization_config"}


CONFIGS = {_MODELING: _config_of_transformers}
"""Functions that give the config of an imported library's model to a save; see ``saver.CONFIGS``."""


def names_of_library(model: nn.Module, checkpoint: Checkpoint) -> Rename:
    """Return the rename rules of a transformers model; ``None`` if all names and shapes match the model already.

    Raises RuleError for a GGUF file of llama.cpp for whose architecture there are no rules.
    """
    if not is_of_transformers(model):
        return None
    shapes = {unwrapped_name(name): tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
    if all(name in shapes and checkpoint.fit(name, shapes[name]) == shapes[name] for name in checkpoint):
        return None
    if checkpoint.format == gguf.name and is_of_llama_cpp(checkpoint):
        embedding = "embed_tokens.weight"
        place = next((name.removesuffix(embedding) for name in shapes if name.endswith(embedding)), "model.")
        return [*gguf_names(checkpoint), (r"^model\.", place)]  # a model without a head has no "model."
    from .transformers_names import transformers_names

    return transformers_names(model)  # type: ignore[arg-type]


def kept_in_float32(model: nn.Module, dtype: torch.dtype) -> set[str]:
    """Return the names of tensors that ``from_pretrained(dtype=dtype)`` of transformers or diffusers keeps in float32.

    Models list them: routers of experts, for example, which in bfloat16 choose others.
    """
    names: set[str] = set()
    if dtype not in (torch.float16, torch.bfloat16):
        return names
    transformers = getattr(sys.modules.get(_MODELING), "PreTrainedModel", ())
    diffusers = getattr(sys.modules.get(_DIFFUSERS), "ModelMixin", ())
    for path, module in model.named_modules():
        if isinstance(module, transformers):
            listed = _listed(module, f"{_KEPT}_strict") + (_listed(module, _KEPT) if dtype is torch.float16 else [])
            pattern = re.compile("|".join(one.replace("*", ".*") for one in listed))
            is_kept: Callable[[str], object] = pattern.search
        elif isinstance(module, diffusers):
            listed = _listed(module, _KEPT)
            is_kept = partial(_has_part, listed)
        else:
            continue
        before = f"{path}." if path else ""
        names.update(before + name for name in (named_tensors(module) if listed else ()) if is_kept(name))
    return names


def _listed(module: nn.Module, attribute: str) -> list[str]:
    held = getattr(module, attribute, None) or ()
    return [held] if isinstance(held, str) else [*held]


def _has_part(parts: Collection[str], name: str) -> bool:
    return not {*name.split(".")}.isdisjoint(parts)


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether ``model`` is a model of transformers 5, which has a mapping of names."""
    kind = getattr(sys.modules.get(_MODELING), "PreTrainedModel", None)
    return kind is not None and isinstance(model, kind) and NAMING in sys.modules
