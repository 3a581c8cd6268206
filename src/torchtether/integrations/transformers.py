"""transformers: ``from_pretrained`` quantizes at load, and ``save_pretrained`` writes Weights that it reads back.

Importing this registers the method ``torchtether``, and lets ``resize_token_embeddings`` keep a head that is a Weight.
``quantization_config.py`` says how Weights are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .transformers_version import check_version

try:
    from transformers.core_model_loading import ConversionOps, WeightRenaming
    from transformers.integrations.accelerate import load_offloaded_parameter
except ImportError:
    check_version()
    raise

from ..errors import CheckpointError
from ..files.record import check_parts, part_key, part_keys
from ..schemes import Scheme
from ..ties.names import named_tensors
from ..ties.records import find_ties
from ..weights.spec import Tie, WeightSpec
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
from .transformers_files import dtype_of, join_parts, under_names_of


@register_quantization_config(METHOD)
class TetherConfig(LoadRules, QuantizationConfigMixin):  # type: ignore[misc]
    """Configure which parameters ``from_pretrained`` quantizes, and how.

    ``scheme``    a scheme or its name, for the weights of ``nn.Linear`` and experts, and for their aliases
    ``rules``     as in ``tt.quantize``: a glob over parameter names to a scheme or ``None``; they take precedence
    ``weights``   the specs of a saved model's Weights, by name; written by ``save_pretrained``

    >>> TetherConfig("int8", rules={"lm_head.weight": None}).to_dict()["scheme"]
    'int8'
    """


class _Encode(ConversionOps):  # type: ignore[misc]
    """Encode a parameter that transformers has just read into a Weight."""

    def __init__(self, quantizer: TetherQuantizer) -> None:
        self.hf_quantizer = quantizer

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], *, model: Any, missing_keys: Any = None, **others: Any
    ) -> dict[str, Tensor]:
        """Return the Weight of each parameter, by name; one without a scheme or of a wrong shape stays as it is.

        Each leaves ``chosen``, because transformers checks no shape of a parameter that is still to be encoded.
        """
        made = {}
        for name, value in input_dict.items():
            values = value[0] if isinstance(value, list) else value
            scheme = self.hf_quantizer.chosen.pop(name, None)
            if scheme is not None and values.shape == model.get_parameter(name).shape:
                values = encoded(values, scheme)  # a state dict may hold Weights
            made[name] = values
            if missing_keys is not None:
                missing_keys.discard(name)
        return made


class _Rebuild(ConversionOps):  # type: ignore[misc]
    """Rebuild a stored Weight from its parts. ``hf_quantizer`` makes transformers keep the dtypes of the parts."""

    def __init__(self, quantizer: TetherQuantizer) -> None:
        self.hf_quantizer = quantizer

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], *, full_layer_name: str, model: Any = None, **others: Any
    ) -> dict[str, Tensor]:
        """Return the Weight by the name of its parameter, in the dtype in which the model computes with it.

        Raises CheckpointError if a part is absent or has a wrong dtype or shape.
        """
        spec = self.hf_quantizer.specs.get(full_layer_name)
        if spec is None:
            what = "is stored as a Weight, but neither config.json nor the files describe it"
            raise CheckpointError(what, name=full_layer_name)
        found = {
            part_key(full_layer_name, key.rpartition(".")[2]): one[0] if isinstance(one, list) else one
            for key, one in input_dict.items()
        }
        check_parts(full_layer_name, spec, found, name=full_layer_name)
        dtype = spec.dtype if model is None else dtype_of(model, full_layer_name)
        parts = {part: found[key] for part, key in part_keys(full_layer_name, spec).items()}
        return {full_layer_name: frozen(Weight(parts, spec).to(dtype))}


@register_quantizer(METHOD)
class TetherQuantizer(QuantizerTraits, HfQuantizer):  # type: ignore[misc]
    """The quantizer with which transformers loads and saves models whose parameters are Weights."""

    requires_calibration = False
    quantization_config: TetherConfig

    def __init__(self, quantization_config: TetherConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.chosen: dict[str, Scheme] = {}
        self.specs: dict[str, WeightSpec] = {}
        self.given: Mapping[str, Tensor] | None = None
        """The state dict that ``save_pretrained`` was given: transformers does not pass it on to a quantizer."""
        self._own: list[str] = []
        self._conversions: Any = None

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raise ImportError for an old transformers, CheckpointError for "disk": accelerate would read floats there."""
        check_version()
        fix = "Load without it, then tt.save(model, dir) and accelerate.cpu_offload(..., state_dict=tt.open(dir))."
        check_device_map(device_map, fix)

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> nn.Module:
        specs = specs_of(checkpoint_files) if checkpoint_files else self.quantization_config.specs()
        self.specs, self._own = under_names_of(model, specs)
        self.pre_quantized = bool(self.specs)
        if not self.specs:
            self.chosen = self.quantization_config.schemes(model, _ties_of(model))
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> nn.Module:
        self.validate_environment(device_map=getattr(model, "hf_device_map", None))  # "auto" is resolved by now
        model.register_load_state_dict_pre_hook(join_parts)
        if self.pre_quantized:
            model.__dict__.pop("_weight_conversions", None)  # ours have no inverse; its class gives those for a save
        finish_load(model)
        return model  # type: ignore[no-any-return]

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        """Return whether the parameter will be encoded."""
        return param_name in self.chosen

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Return the bytes of one element after loading: ``device_map="auto"`` is planned with them."""
        spec = self.specs.get(param_name)
        scheme, shape = (spec.scheme, spec.base) if spec is not None else (self.chosen.get(param_name), param.shape)
        if scheme is None or not param.numel():
            return param.element_size()
        return scheme.nbytes(tuple(shape), param.dtype) / param.numel()

    def adjust_max_memory(self, max_memory: dict[str, Any]) -> dict[str, Any]:
        """Return what a device map may fill: a tenth is left for the values that are being encoded."""
        return {place: size * 0.9 for place, size in max_memory.items()} if self.chosen else max_memory

    def get_quantize_ops(self) -> ConversionOps:
        """Return the operation that encodes a parameter."""
        return _Encode(self)

    @property
    def serialized_names(self) -> dict[str, list[str]]:  # type: ignore[override]
        """Return the last components of the parts' keys, by the last component of the parameter's name."""
        found: dict[str, dict[str, None]] = {}
        for name, spec in self.specs.items():
            leaf = name.rpartition(".")[2]
            for part in spec.scheme.layout(spec.base):
                found.setdefault(leaf, {})[f"{leaf}.{part}"] = None
        return {leaf: list(keys) for leaf, keys in found.items()}

    def get_load_operations(self) -> dict[str, type[ConversionOps]]:
        """Return the operation that rebuilds a Weight from its parts."""
        return {"deserialize": _Rebuild}

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Return the conversions of a load: ours first, without renamings of Weights whose names are the model's."""
        kept = [
            one
            for one in weight_conversions
            if not isinstance(one, WeightRenaming) or all(one.rename_source_key(name)[0] == name for name in self._own)
        ]
        return self.get_weight_conversions() + kept  # type: ignore[no-any-return]

    def is_serializable(self) -> bool:
        """Return True: ``save_pretrained`` can write the model."""
        return True

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """Return the state dict with the parts of each Weight in place of it, once per tied group, and no metadata.

        The state dict is the given one, else that of ``model``. The specs of the Weights go to
        ``model.config.quantization_config``, which transformers writes afterwards. A model without Weights gives
        ``None``: transformers then takes its own state dict. So does one with adapters of PEFT, of which only these are
        saved.
        """
        given = None if self.given is None else dict(self.given)
        if getattr(model, "_hf_peft_config_loaded", False):
            from . import peft  # noqa: F401 - its import makes PEFT save Weights as values

            return given, {}
        tensors: Mapping[str, Tensor] = model.state_dict() if given is None else given
        held = {name: _in_memory(model, name, one) for name, one in tensors.items() if isinstance(one, Weight)}
        state, specs = in_parts({**tensors, **held})
        self.quantization_config.weights = specs
        self._undo_conversions(model, not specs)
        if not specs:  # the model was dequantized after loading, or the given tensors are plain
            model.config.__dict__.pop("quantization_config", None)
            return given, {}
        model.config.quantization_config = self.quantization_config
        return state, {}

    def _undo_conversions(self, model: Any, is_wanted: bool) -> None:
        """Make ``save_pretrained`` undo the conversions of the load if ``is_wanted``, else none.

        They rename and split whole tensors, which the parts of Weights are not.
        """
        held = model.__dict__.pop("_weight_conversions", None)
        if held != []:
            self._conversions = held
        if not is_wanted or self._conversions is not None:
            model._weight_conversions = self._conversions if is_wanted else []


def _in_memory(model: Any, name: str, weight: Weight) -> Weight:
    """Return ``weight``, or, if accelerate has offloaded it, the Weight of its values."""
    return load_offloaded_parameter(model, name) if weight.is_meta else weight  # type: ignore[return-value]


def attach(model: Any) -> Callable[[], None] | None:
    """Make ``model.save_pretrained`` and ``model.config.save_pretrained`` write the Weights of ``model``.

    ``load_state_dict`` reads them back. ``tt.quantize`` and ``tt.load`` call this. A model that has a quantizer keeps
    it. The model is not marked as quantized, so that ``.half()`` and similar calls stay allowed. Return a function that
    undoes it; ``None`` if nothing was done.
    """
    if getattr(model, "hf_quantizer", None) is not None:
        return None
    held = getattr(model.config, "quantization_config", None)
    config = held if isinstance(held, TetherConfig) else TetherConfig(weights={})
    is_shared = config is held  # a model around this one, with the same config, has a quantizer
    model.hf_quantizer = TetherQuantizer(config, pre_quantized=False)
    model.config.quantization_config = config
    hook = model.register_load_state_dict_pre_hook(join_parts)

    def detach() -> None:
        hook.remove()
        del model.hf_quantizer
        if not is_shared:
            model.config.__dict__.pop("quantization_config", None)

    return detach


def _ties_of(model: Any) -> tuple[Tie, ...]:
    """Return the ties of a model on meta: those that exist, and those that transformers makes after loading."""
    ties = list(find_ties(model))
    known = {name for tie in ties for name in tie.names}
    owners: dict[str, list[str]] = {}
    for alias, owner in getattr(model, "all_tied_weights_keys", {}).items():
        if alias not in known and owner not in known:
            owners.setdefault(owner, []).append(alias)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for owner, found in owners.items():
        if {owner, *found} <= names:
            ties.append(Tie((owner, *found)))
    return tuple(ties)


def _keep_kind(original: Any) -> Any:
    """Make the resized head hold the Weight of the old one; transformers makes it with plain values."""

    @wraps(original)
    def resized(model: Any, old_lm_head: nn.Linear, *args: Any, **kwargs: Any) -> nn.Linear:
        made: nn.Linear = original(model, old_lm_head, *args, **kwargs)
        held = old_lm_head.weight
        if isinstance(held, Weight) and made.weight is not held:
            held.data = made.weight.data
            made.weight = held
        return made

    return resized


def _as_held(original: Any) -> Any:
    """Make ``save_pretrained`` follow the tensors of the model: a part may be quantized alone, a config be shared."""

    @wraps(original)
    def save_pretrained(model: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(tensor, Weight) for tensor in named_tensors(model).values()):
            attach(model)
        quantizer = getattr(model, "hf_quantizer", None)
        if isinstance(quantizer, TetherQuantizer):
            quantizer.given = signature(original).bind(model, *args, **kwargs).arguments.get("state_dict")
            try:
                return original(model, *args, **kwargs)
            finally:
                quantizer.given = None
        config, found = model.config, getattr(model.config, "quantization_config", None)
        if quantizer is not None or not is_ours(found):
            return original(model, *args, **kwargs)
        del config.quantization_config
        try:
            return original(model, *args, **kwargs)
        finally:
            config.quantization_config = found

    return save_pretrained


if not hasattr(PreTrainedModel._get_resized_lm_head, "__wrapped__"):
    PreTrainedModel._get_resized_lm_head = _keep_kind(PreTrainedModel._get_resized_lm_head)  # type: ignore[method-assign]
    PreTrainedModel.save_pretrained = _as_held(PreTrainedModel.save_pretrained)  # type: ignore[method-assign]
