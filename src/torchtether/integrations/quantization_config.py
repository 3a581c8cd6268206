"""The ``quantization_config`` that transformers and diffusers share with us: rules of a load, Weights of a saved model.

Their ``save_pretrained`` writes part ``p`` of the Weight ``n`` under the key ``n.p``, as ``tt.save`` does. The specs of
the Weights are in ``config.json`` (``quantization_config["weights"]``), because these libraries split tensors into
files without our records. Folders by ``tt.save`` have the same keys, and the record in the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .._checks import describe
from ..checkpoint.reader import Checkpoint
from ..conversion.quantizing import dequantize
from ..conversion.selection import Rules, schemes_for
from ..errors import ArgumentError, CheckpointError
from ..exchange.exchange import add_load_hook, tell_listeners
from ..files.index import index_of
from ..files.record import weight_to_json
from ..formats import native
from ..schemes import Scheme, resolve, scheme_from_json
from ..ties.components import shared_components, tie_of
from ..ties.names import named_tensors
from ..weights.spec import Tie, WeightSpec
from ..weights.weight import Weight

METHOD = native.METHOD


class Method(StrEnum):  # diffusers asks for its ``value``
    """Name the quantization method, as the enums of these libraries do."""

    TORCHTETHER = METHOD


class LoadRules:
    """Choose which parameters ``from_pretrained`` quantizes, and how: what both ``TetherConfig`` classes hold.

    Raises ArgumentError if there is neither a scheme nor a rule, and for arguments of other libraries' configs.
    """

    def __init__(
        self,
        scheme: Scheme | str | None = None,
        *,
        rules: Mapping[str, Scheme | str | None] | None = None,
        weights: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        self.quant_method = Method.TORCHTETHER
        if isinstance(scheme, Mapping) and "kind" not in scheme:
            raise ArgumentError("is a mapping, not a scheme", name="scheme", fix="Give rules by glob as rules=.")
        self.scheme = _to_json(scheme)
        self.rules = {glob: _to_json(one) for glob, one in (rules or {}).items()}
        if others and "quant_method" not in others:  # which every stored config has
            fix = "Choose parameters by rules={glob: scheme or None}."
            raise ArgumentError("is no argument of TetherConfig", name=next(iter(others)), fix=fix)
        if scheme is None and not rules and weights is None and not others:
            fix = 'Give them, as in TetherConfig("int8"), or leave the config out.'
            raise ArgumentError("has neither a scheme nor rules", name="quantization_config", fix=fix)
        if not isinstance(weights, Mapping | None):
            raise ArgumentError(f"is {describe(weights)}, not a mapping", name="weights", fix="Leave it out.")
        self.weights = dict(weights or {})
        for one in (self.scheme, *self.rules.values()):
            _from_json(one)

    def get(self, key: str, default: Any = None) -> Any:
        """Return an entry, as a mapping does: transformers reads those of ``from_pretrained(config=model.config)``."""
        return getattr(self, key, default)

    def schemes(self, model: nn.Module, ties: tuple[Tie, ...]) -> dict[str, Scheme]:
        """Return the scheme of each parameter of ``model`` that will be quantized, by each of its names.

        Raises RuleError and SchemeError as ``tt.quantize`` does.
        """
        rules: Rules = {glob: _from_json(one) for glob, one in self.rules.items()}
        chosen = schemes_for(model, rules, ties) if rules else {}
        if self.scheme is not None:
            by_scheme = schemes_for(model, _from_json(self.scheme), ties)
            chosen = {**{n: s for n, s in by_scheme.items() if not self._is_ruled(n, ties)}, **chosen}
        names = {tie.owner: tie.names for tie in ties}
        return {name: scheme for owner, scheme in chosen.items() for name in names.get(owner, (owner,))}

    def specs(self) -> dict[str, WeightSpec]:
        """Return the specs of a saved model's Weights, by name. Raise SchemeError for an invalid spec."""
        return {name: WeightSpec.from_json(dict(entry)) for name, entry in self.weights.items()}

    def _is_ruled(self, name: str, ties: tuple[Tie, ...]) -> bool:
        names = next((tie.names for tie in ties if name in tie.names), (name,))
        return any(fnmatchcase(one, glob) for one in names for glob in self.rules)


def _to_json(scheme: Scheme | str | Mapping[str, Any] | None) -> Any:
    """Return ``scheme`` as a JSON value: ``None``, a name, or the fields of a scheme."""
    return scheme.to_json() if isinstance(scheme, Scheme) else scheme


def _from_json(value: Any) -> Scheme | None:
    if value is None:
        return None
    return scheme_from_json(value) if isinstance(value, Mapping) else resolve(value)


def is_ours(config: Any) -> bool:
    """Return whether ``config`` is ours; it is a mapping if a model's config was read from a folder by itself."""
    return isinstance(config, LoadRules) or (isinstance(config, Mapping) and config.get("quant_method") == METHOD)


def check_device_map(device_map: Any, fix: str) -> None:
    """Raise CheckpointError if a device map has "disk": accelerate would read floats there."""
    if isinstance(device_map, Mapping) and "disk" in device_map.values():
        raise CheckpointError("a Weight cannot be placed on 'disk'", name="device_map", fix=fix)


def specs_of(files: Sequence[str | Path]) -> dict[str, WeightSpec]:
    """Return the specs of the Weights in our own checkpoint files, by name; empty for files of other formats.

    Only headers are read. Raises CheckpointError if a part is absent or has a wrong dtype or shape.
    """
    first = Path(files[0])
    with Checkpoint(first if len(files) == 1 else index_of(first) or first.parent) as checkpoint:
        if checkpoint.format != native.name:
            return {}
        return {name: entry.spec for name, entry in checkpoint.entries.items() if entry.spec is not None}


class QuantizerTraits:
    """What the quantizers of both libraries answer alike."""

    @property
    def is_trainable(self) -> bool:
        """Return True: parameters that are not quantized can be trained."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Return True: ``torch.compile`` supports the model."""
        return True

    def _dequantize(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return dequantize(model)


def finish_load(model: Any) -> None:
    """Prepare a model whose Weights a library has put in place for stock loads, calls and saves."""
    model.is_quantized = False  # else these libraries forbid ``.half()`` and training, which Weights support
    names = [name for name, tensor in named_tensors(model).items() if isinstance(tensor, Weight)]
    for path in {name.rpartition(".")[0] for name in names}:
        add_load_hook(model.get_submodule(path))
    tell_listeners(model, names)


def encoded(values: Tensor, scheme: Scheme) -> nn.Parameter:
    """Return ``values`` as a frozen Weight of ``scheme``; one that has this scheme already, as it is."""
    is_encoded = isinstance(values, Weight) and values.scheme == scheme
    return frozen(values if is_encoded else Weight.encode(values, scheme))


def frozen(weight: Tensor) -> nn.Parameter:
    """Return ``weight`` as a frozen parameter: an optimizer's steps below the rounding step would be lost."""
    return nn.Parameter(weight, requires_grad=False)


def in_parts(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return ``tensors`` with the parts of each Weight in place of it, once per tied group, and the specs as JSON."""
    held = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Weight)}
    ties = [tie_of(component) for component in shared_components(held)]
    aliases = {alias for tie in ties if tie is not None for alias in tie.aliases}
    state: dict[str, Tensor] = {}
    specs: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name not in held:
            state[name] = tensor
        elif name not in aliases:
            specs[name] = weight_to_json(held[name].spec)
            state |= native.pack(name, held[name])
    return state, specs
