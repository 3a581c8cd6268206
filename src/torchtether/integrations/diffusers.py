"""diffusers: ``from_pretrained`` quantizes at load, and ``save_pretrained`` writes Weights that it reads back.

Importing this registers the method ``torchtether``, for models, and for pipelines by their components, some of which
are of transformers. ``quantization_config.py`` says how Weights are stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from copy import copy
from functools import wraps
from inspect import signature
from typing import Any

import diffusers
import torch
from diffusers.configuration_utils import FrozenDict
from diffusers.models.modeling_utils import ModelMixin
from diffusers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.quantizers.quantization_config import QuantizationConfigMixin
from torch import Tensor, nn

from ..errors import CheckpointError, RuleError
from ..exchange.refusals import ON_DISK, is_on_disk
from ..files.record import part_keys
from ..formats import native
from ..schemes import Scheme
from ..ties.names import named_tensors
from ..ties.records import find_ties
from ..weights.spec import WeightSpec
from ..weights.weight import Weight
from .quantization_config import (
    METHOD,
    LoadRules,
    QuantizerTraits,
    check_device_map,
    encoded,
    finish_load,
    frozen,
    in_parts,
    is_ours,
    specs_of,
)

if not hasattr(DiffusersQuantizer, "maybe_update_loaded_keys"):
    raise ImportError(
        f"diffusers: this is {diffusers.__version__}, and Weights in its folders need 0.39 or newer. Update diffusers, "
        "or use tt.quantize, tt.load and tt.save."
    )
with suppress(ImportError):  # without it, text encoders of a pipeline would get random values, with only a warning
    from . import transformers  # noqa: F401


class TetherConfig(LoadRules, QuantizationConfigMixin):  # type: ignore[misc]
    """Configure which parameters ``from_pretrained`` quantizes, and how.

    ``scheme``    a scheme or its name, for the weights of ``nn.Linear``
    ``rules``     as in ``tt.quantize``: a glob over parameter names to a scheme or ``None``; they take precedence
    ``weights``   the specs of a saved model's Weights, by name; written by ``save_pretrained``

    >>> TetherConfig("int8", rules={"proj_out.weight": None}).to_dict()["scheme"]
    'int8'
    """

    def to_diff_dict(self) -> dict[str, Any]:
        """Return all entries: diffusers asks for it where it prints a config."""
        return self.to_dict()  # type: ignore[no-any-return]


class TetherQuantizer(QuantizerTraits, DiffusersQuantizer):  # type: ignore[misc]
    """The quantizer with which diffusers loads and saves models whose parameters are Weights."""

    use_keep_in_fp32_modules = True
    quantization_config: TetherConfig

    def __init__(self, quantization_config: TetherConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._chosen: dict[str, Scheme] = {}
        self._specs: dict[str, WeightSpec] = {}
        self._stored: dict[str, str] = {}
        """The names of Weights in the files, by their names in the model."""
        self._loaded: list[str] = []
        self._parts: dict[str, dict[str, Tensor]] = {}
        """The parts of Weights that have been read, by name, until all of one are there."""

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raise CheckpointError for "disk" in ``device_map``."""
        check_device_map(device_map, "Load without it, then call apply_group_offloading.")

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
        """Return ``loaded_keys`` with the names of Weights in place of the keys of their parts.

        Raises CheckpointError if a part is absent or has a wrong dtype or shape.
        """
        self._specs = specs_of(checkpoint_files) if self.pre_quantized else {}
        names = {key: name for name, spec in self._specs.items() for key in part_keys(name, spec).values()}
        self._loaded = list(dict.fromkeys(names.get(key, key) for key in loaded_keys))
        return self._loaded

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors of one file with Weights in place of their parts, which may be in several files.

        Raises CheckpointError for parts that nothing describes: ``from_single_file`` reads no ``config.json``.
        """
        state = dict(state_dict)
        if not self._specs:
            _check_described(state)
        for name, stored in self._stored.items():
            spec = self._specs[stored]
            keys = part_keys(stored, spec)
            read = self._parts.setdefault(name, {})
            read |= {part: state.pop(key) for part, key in keys.items() if key in state}
            if len(read) == len(keys):
                state[name] = Weight(self._parts.pop(name), spec)
        return state

    def get_special_dtypes_update(self, model: nn.Module, torch_dtype: torch.dtype) -> dict[str, Any]:
        """Return a dtype of about the size of each Weight: diffusers plans ``device_map="auto"`` with it."""
        from accelerate.utils import CustomDtype  # type: ignore[import-untyped] # diffusers plans maps with accelerate

        sizes = {CustomDtype.INT2: 0.25, CustomDtype.INT4: 0.5, torch.int8: 1.0, torch.int16: 2.0, torch.int32: 4.0}
        specs = {name: self._specs[stored] for name, stored in self._stored.items()}
        made: dict[str, Any] = {}
        for name, param in model.named_parameters():
            scheme = specs[name].scheme if name in specs else self._chosen.get(name)
            if scheme is not None and param.numel():
                size = scheme.nbytes(tuple(param.shape), torch_dtype or param.dtype) / param.numel()
                made[name] = next((one for one, room in sizes.items() if room >= 0.85 * size), torch.float64)
        return made

    def adjust_max_memory(self, max_memory: dict[str, Any]) -> dict[str, Any]:
        """Return what a device map may fill: a tenth is left for scales, and for the values that are being encoded."""
        return {place: size * 0.9 for place, size in max_memory.items()}

    @property
    def supports_parallel_loading(self) -> bool:
        """Return False: the parts of a Weight may be in two files."""
        return False

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        config = self.quantization_config
        self._stored = {name: name for name in self._specs}
        model._fix_state_dict_keys_on_load(self._stored)  # type: ignore[operator] # old names, as in the VAE of SD 1
        renamed = {stored: name for name, stored in self._stored.items()}
        self._loaded[:] = [renamed.get(key, key) for key in self._loaded]  # diffusers holds this list
        if not self._specs:
            if self.pre_quantized and not (config.scheme or config.rules):
                what = "config.json says that torchtether has quantized the model, but these files hold no Weights"
                fix = "Remove its quantization_config, or the files that diffusers should not read."
                raise CheckpointError(what, name=type(model).__name__, fix=fix)
            try:
                self._chosen = config.schemes(model, find_ties(model))
            except RuleError as error:  # in a pipeline: of which component
                raise error.named(type(model).__name__) from None

    def check_if_quantized_param(  # type: ignore[override]
        self, model: Any, param_value: Tensor, param_name: str, *args: Any, **kwargs: Any
    ) -> bool:
        """Return whether the parameter is a Weight, or will be encoded."""
        return isinstance(param_value, Weight) or param_name in self._chosen

    def check_quantized_param_shape(self, param_name: str, current_param: Tensor, loaded_param: Tensor) -> None:  # type: ignore[override]
        """Raise CheckpointError: diffusers asks this of shapes that differ."""
        what = f"has the shape {tuple(loaded_param.shape)} in the files, and {tuple(current_param.shape)} in the model"
        raise CheckpointError(what, name=param_name)

    def create_quantized_param(  # type: ignore[override]
        self, model: nn.Module, param_value: Tensor, param_name: str, target_device: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Put the Weight of ``param_value`` into ``model``, frozen, on ``target_device``."""
        values, scheme = param_value.detach().to(target_device), self._chosen.get(param_name)
        path, _, leaf = param_name.rpartition(".")
        setattr(model.get_submodule(path), leaf, encoded(values, scheme) if scheme else frozen(values))

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        finish_load(model)
        return model

    def get_state_dict_and_metadata(
        self, state_dict: Mapping[str, Tensor], safe_serialization: bool = False
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return ``state_dict`` with the parts of each Weight in place of it, and the specs of the Weights."""
        state, specs = in_parts(state_dict)
        return state, {native.WEIGHTS: json.dumps(specs)}

    @property
    def is_serializable(self) -> bool:
        """Return True: ``save_pretrained`` can write the model."""
        return True


def _check_described(keys: Iterable[str]) -> None:
    """Raise CheckpointError for a part of a Weight among ``keys``, of tensors that no config describes."""
    part = next((key for key in keys if key.endswith(".qdata")), None)
    if part is not None:
        what = "is a part of a Weight, and no config.json beside it describes the Weight"
        fix = "Read a folder by save_pretrained with from_pretrained, and other files with tt.load."
        raise CheckpointError(what, name=part, fix=fix)


def _described(model: Any) -> Any:
    """Return a shallow copy of ``model`` whose ``save_pretrained`` stores Weights, and describes them in its config.

    ``model`` itself stays as it is: another thread may save it, too. Raises CheckpointError for Weights that cannot be
    stored: tied ones, those whose values are elsewhere, and those beside tensors of another quantizer.
    """
    tensors = model.state_dict()
    weights = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Weight)}
    if weights and is_on_disk(model.modules()):
        raise CheckpointError(ON_DISK, name=next(iter(weights)), fix="Save before you offload.")
    for name, weight in weights.items():
        if weight.is_meta:
            raise CheckpointError("is on meta and has no values", name=name, fix="Save before you offload.")
    quantizer = vars(model).get("hf_quantizer")
    if weights and not isinstance(quantizer, TetherQuantizer | None):
        what = f"is a Weight in a model of {type(quantizer).__name__}, which would lose its other parameters"
        fix = "Call tt.adopt(model) first, which takes those of quanto, torchao and bitsandbytes."
        raise CheckpointError(what, name=next(iter(weights)), fix=fix)
    held = model.config.get("quantization_config")
    made = TetherConfig(**{**dict(held or {}), "weights": {}}) if is_ours(held) else TetherConfig(weights={})
    _, made.weights = in_parts(weights)
    if len(made.weights) < len(weights):
        name = next(name for name in weights if name not in made.weights)
        raise CheckpointError("is tied, which diffusers cannot store", name=name, fix="Save by tt.save(model, folder).")
    entries = {key: value for key, value in model.config.items() if key != "quantization_config"}
    described = copy(model)
    described._internal_dict = FrozenDict({**entries, "quantization_config": made} if weights else entries)
    described.hf_quantizer = TetherQuantizer(made) if weights else None
    return described


def _as_held(original: Any) -> Any:
    """Make ``save_pretrained`` follow the tensors of the model, which may have been quantized after loading."""

    @wraps(original)
    def save_pretrained(model: Any, *args: Any, **kwargs: Any) -> Any:
        is_held = any(isinstance(tensor, Weight) for tensor in named_tensors(model).values())
        is_described = is_held or is_ours(model.config.get("quantization_config"))
        return original(_described(model) if is_described else model, *args, **kwargs)

    return save_pretrained


def _noticing(original: Any) -> Any:
    """Make ``from_pretrained`` refuse parts of Weights that no config announces: it would leave their places empty."""

    @wraps(original)
    def _load_pretrained_model(cls: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature(original).bind(cls, *args, **kwargs).arguments
        if given.get("hf_quantizer") is None:
            _check_described({*given["loaded_keys"]} - given["model"].state_dict().keys())
        return original(cls, *args, **kwargs)

    return classmethod(_load_pretrained_model)


if METHOD not in AUTO_QUANTIZER_MAPPING:
    AUTO_QUANTIZER_MAPPING[METHOD] = TetherQuantizer
    AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = TetherConfig
    _stock = ModelMixin._load_pretrained_model.__func__  # type: ignore[attr-defined]
    ModelMixin._load_pretrained_model = _noticing(_stock)  # type: ignore[method-assign]
    ModelMixin.save_pretrained = _as_held(ModelMixin.save_pretrained)  # type: ignore[method-assign]
