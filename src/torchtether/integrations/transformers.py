"""transformers: ``from_pretrained`` quantizes while it loads, and ``save_pretrained`` writes what it reads back.

Importing this module registers the quantization method ``torchtether`` with transformers, and lets
``resize_token_embeddings`` keep a head that is a Weight.

What ``save_pretrained`` writes: part ``p`` of the Weight ``n`` under the key ``n.p``, as ``tt.save`` does, and what the
Weights are in ``config.json`` (``quantization_config["weights"]``), since transformers shards without asking which
records belong to which file. Folders by ``tt.save`` have the same keys, and the record in the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoint.reader import Checkpoint
from ..conversion.selection import Rules, schemes_for
from ..errors import CheckpointError
from ..schemes import Scheme, resolve, scheme_from_json
from ..ties.records import find_ties
from ..weights.spec import Tie, WeightSpec
from ..weights.weight import Weight

METHOD = "torchtether"


@register_quantization_config(METHOD)
class TetherConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Say which parameters ``from_pretrained`` quantizes, and how.

    ``scheme``    a scheme or its name, for the weights of ``nn.Linear`` and experts, with what is tied to them
    ``rules``     as ``tt.quantize`` takes them, a glob over parameter names to a scheme or ``None``; they come first
    ``weights``   what the Weights of a saved model are, by name; written by ``save_pretrained``

    >>> TetherConfig("int8", rules={"lm_head.weight": None}).to_dict()["scheme"]
    'int8'
    """

    def __init__(
        self,
        scheme: Scheme | str | None = None,
        *,
        rules: Mapping[str, Scheme | str | None] | None = None,
        weights: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        self.scheme = _written(scheme)
        self.rules = {glob: _written(one) for glob, one in (rules or {}).items()}
        self.weights = dict(weights or {})
        for one in (self.scheme, *self.rules.values()):
            _read(one)

    def schemes(self, model: nn.Module, ties: tuple[Tie, ...]) -> dict[str, Scheme]:
        """Return the scheme of each parameter of ``model`` that is to be quantized, by its owner's name.

        Raises RuleError and SchemeError as ``tt.quantize`` does.
        """
        rules: Rules = {glob: _read(one) for glob, one in self.rules.items()}
        chosen = schemes_for(model, rules, ties) if rules else {}
        if self.scheme is None:
            return chosen
        by_scheme = schemes_for(model, _read(self.scheme), ties)
        return {**{n: s for n, s in by_scheme.items() if not self._is_ruled(n, ties)}, **chosen}

    def _is_ruled(self, name: str, ties: tuple[Tie, ...]) -> bool:
        names = next((tie.names for tie in ties if name in tie.names), (name,))
        return any(fnmatchcase(one, glob) for one in names for glob in self.rules)


def _written(scheme: Scheme | str | Mapping[str, Any] | None) -> Any:
    """Return ``scheme`` as JSON writes it: ``None``, a name, or the fields of a scheme."""
    return scheme.to_json() if isinstance(scheme, Scheme) else scheme


def _read(written: Any) -> Scheme | None:
    if written is None:
        return None
    return scheme_from_json(written) if isinstance(written, Mapping) else resolve(written)


class _Encode(ConversionOps):  # type: ignore[misc]
    """Turn a parameter that has just been read into a Weight."""

    def __init__(self, quantizer: TetherQuantizer) -> None:
        self.quantizer = quantizer

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], *, missing_keys: Any = None, **others: Any
    ) -> dict[str, Tensor]:
        """Return the Weight by the name of its parameter."""
        made = {}
        for name, value in input_dict.items():
            values = value[0] if isinstance(value, list) else value
            scheme = self.quantizer.chosen.get(name)
            made[name] = values if scheme is None else _frozen(Weight.encode(values, scheme))
            if missing_keys is not None:
                missing_keys.discard(name)
        return made


class _Rebuild(ConversionOps):  # type: ignore[misc]
    """Put the parts of a stored Weight together."""

    def __init__(self, quantizer: TetherQuantizer) -> None:
        self.quantizer = quantizer

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], *, full_layer_name: str, **others: Any
    ) -> dict[str, Tensor]:
        """Return the Weight by the name of its parameter. Raises CheckpointError where a part is absent."""
        spec = self.quantizer.specs.get(full_layer_name)
        if spec is None:
            raise CheckpointError("config.json and the files say nothing of this weight", name=full_layer_name)
        parts = {}
        for part in spec.scheme.layout(spec.base):
            found = next((given for key, given in input_dict.items() if key.endswith(f".{part}")), None)
            if not found:
                raise CheckpointError(f"its part {part!r} is absent", name=full_layer_name, fix="Is a shard missing?")
            parts[part] = found[0] if isinstance(found, list) else found
        return {full_layer_name: _frozen(Weight(parts, spec))}


def _frozen(weight: Weight) -> nn.Parameter:
    """Return ``weight`` as a parameter that no optimizer changes: steps below the rounding step would be lost."""
    return nn.Parameter(weight, requires_grad=False)


@register_quantizer(METHOD)
class TetherQuantizer(HfQuantizer):  # type: ignore[misc]
    """Let transformers load and save models whose parameters are Weights."""

    requires_calibration = False
    quantization_config: TetherConfig

    def __init__(self, quantization_config: TetherConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.chosen: dict[str, Scheme] = {}
        self.specs: dict[str, WeightSpec] = {}

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> nn.Module:
        self.specs = {name: WeightSpec.from_json(one) for name, one in self.quantization_config.weights.items()}
        if not self.specs and checkpoint_files:
            self.specs = _specs_of(checkpoint_files)
        self.pre_quantized = bool(self.specs)
        if not self.specs:
            self.chosen = self.quantization_config.schemes(model, _ties_of(model))
        return model

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        """Return whether the parameter is to be encoded."""
        return param_name in self.chosen

    def get_quantize_ops(self) -> ConversionOps:
        """Return what encodes a parameter."""
        return _Encode(self)

    @property
    def serialized_names(self) -> dict[str, list[str]]:  # type: ignore[override]
        """Return the keys of the parts by the last part of the parameter's name."""
        found: dict[str, dict[str, None]] = {}
        for name, spec in self.specs.items():
            leaf = name.rpartition(".")[2]
            for part in spec.scheme.layout(spec.base):
                found.setdefault(leaf, {})[f"{leaf}.{part}"] = None
        return {leaf: list(keys) for leaf, keys in found.items()}

    def get_load_operations(self) -> dict[str, type[ConversionOps]]:
        """Return what puts parts together."""
        return {"deserialize": _Rebuild}

    def is_serializable(self) -> bool:
        """Return that ``save_pretrained`` can write the model."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Return that what is not quantized can be trained."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Return that ``torch.compile`` takes the model."""
        return True

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """Return the parts of each Weight by their keys, once per tied group, with all else as it is.

        What the Weights are goes to ``model.config.quantization_config``, which transformers writes afterwards.
        """
        aliases = {alias for tie in find_ties(model) for alias in tie.aliases}
        state: dict[str, Tensor] = {}
        specs: dict[str, Any] = {}
        for name, tensor in model.state_dict().items():
            if not isinstance(tensor, Weight):
                state[name] = tensor
            elif name not in aliases:
                specs[name] = tensor.spec.replace(tie=None).to_json()
                state |= {f"{name}.{part}": one.detach() for part, one in tensor.parts.items()}
        if not specs:
            return None, {}
        self.quantization_config.weights = specs
        model.config.quantization_config = self.quantization_config
        model._weight_conversions = []  # they rename and split whole tensors, and parts have other shapes
        return state, {}

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        from ..conversion.quantizing import dequantize

        return dequantize(model)


def attach(model: Any) -> None:
    """Let ``model.save_pretrained`` and ``model.config.save_pretrained`` know that ``model`` holds Weights.

    ``model`` is a ``PreTrainedModel`` that ``tt.quantize`` or ``tt.load`` has quantized; one that has a quantizer keeps
    it. It is not marked as quantized, so that ``.half()`` and the like stay allowed.
    """
    if getattr(model, "hf_quantizer", None) is None:
        config = TetherConfig()
        model.hf_quantizer = TetherQuantizer(config, pre_quantized=False)
        model.config.quantization_config = config


def _specs_of(files: list[str]) -> dict[str, WeightSpec]:
    """Return what the record in the checkpoint says of its Weights; none for other people's files."""
    path = Path(files[0])
    with Checkpoint(path if len(files) == 1 else path.parent) as checkpoint:
        return {
            name: checkpoint.spec(name)
            for name, entry in checkpoint.entries.items()
            if not checkpoint.spec(name).scheme.transparent and entry is not None
        }


def _ties_of(model: Any) -> tuple[Tie, ...]:
    """Return the ties of a model on meta: those that are live, and those that transformers makes after loading."""
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
    """Let the longer head, which transformers makes as a plain one, hold the Weight of the head before it."""

    @wraps(original)
    def resized(model: Any, old_lm_head: nn.Linear, *args: Any, **kwargs: Any) -> nn.Linear:
        made: nn.Linear = original(model, old_lm_head, *args, **kwargs)
        held = old_lm_head.weight
        if isinstance(held, Weight) and made.weight is not held:
            held.data = made.weight.data
            made.weight = held
        return made

    return resized


if not hasattr(PreTrainedModel._get_resized_lm_head, "__wrapped__"):
    PreTrainedModel._get_resized_lm_head = _keep_kind(PreTrainedModel._get_resized_lm_head)  # type: ignore[method-assign]
