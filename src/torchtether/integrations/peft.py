"""PEFT: merge adapters into Weights with one rounding, and unmerge them exactly.

Importing this module makes ``merge`` and ``unmerge`` of every PEFT layer support Weights. PEFT's own code then sees
plain values in place of the Weights of its base layer, and the result is encoded again. The layer keeps the codes from
before the merge until ``unmerge``. Their memory is held as long as an adapter is merged; ``merge_and_unload`` frees it.
Adapters that add to a copy of the base weight in every forward (SHiRA, some forms of MiSS) add to its decoded values.

Files of adapters store decoded values of a base embedding, a head or a copy of a module, if PEFT stores those. A Weight
with the same values keeps its codes when such a file is loaded; other values are encoded.
"""

from __future__ import annotations

import math
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, wraps
from inspect import isfunction
from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import save_and_load
from torch import Tensor, nn

from ..errors import TieError, UnsupportedOpError
from ..ties.records import find_ties
from ..torch_private.modules import parameters_of
from ..weights.ops.inplace import encode_like
from ..weights.weight import Weight
from . import peft_experts

_KEPT = "_tether_kept"  # attribute of a layer: a _Kept for each parameter that it has merged into


@dataclass
class _Kept:
    """A parameter as it was before adapters were merged into it."""

    base: Tensor
    merged: set[int] = field(default_factory=set)
    """The checksums of the merged parameter; unmerging restores the base only if it still has one of them."""
    is_known: bool = True
    """Whether the parameter was not changed by other code between two merges."""
    layers: int = 0
    """The number of layers that have merged into it; those over a tied parameter make the same change."""


@dataclass
class _Report:
    """Record of the merges of one call."""

    names: dict[int, str] = field(default_factory=dict)
    """The name of each layer, by the id of the layer."""
    alike: set[int] = field(default_factory=set)
    """The ids of tied Weights to which every layer over them makes the same change."""
    is_kept: bool = True
    kept: dict[int, _Kept] = field(default_factory=dict)
    """The base of each Weight, by the id of the Weight."""
    errors: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """The norms of the rounding error, of the values, and of the adapters' change, by name."""

    def warn(self) -> None:
        """Warn of the rounding error of encoding, if there is one."""
        error, values, change = (math.hypot(*column) for column in zip(*self.errors.values(), strict=True))
        if not error:
            return
        shares = {name: of / (norm or 1.0) for name, (of, norm, _) in self.errors.items()}
        worst = max(shares, key=shares.__getitem__)
        of_change = f", {error / change:.1%} of what the adapters change" if change else ""
        most = f" (most in {worst}, {shares[worst]:.2%})" if len(shares) > 1 else ""
        then = "unmerge restores the base exactly" if self.is_kept else "to merge without rounding, tt.dequantize first"
        warnings.warn(
            f"merging encoded {len(shares)} Weights again, with an error of {error / (values or 1.0):.2%} of their norm"
            f"{of_change}{most}; {then}.",
            stacklevel=5 if self.is_kept else 6,  # the caller of merge_adapter, or of merge_and_unload
        )


_REPORT: ContextVar[_Report | None] = ContextVar("_REPORT", default=None)


@contextmanager
def _reported(make: Callable[[], _Report]) -> Iterator[_Report]:
    """Yield the report of an outer call, or else a new one, and warn at the end of the call that made it."""
    report = _REPORT.get()
    if report is not None:
        yield report
        return
    report = make()
    token = _REPORT.set(report)
    try:
        yield report
    finally:
        _REPORT.reset(token)
    if report.errors:
        report.warn()


# -- a whole model ----------------------------------------------------------------------------------------------------


def _of_model(tuner: Any, adapter_names: list[str] | None, *, is_kept: bool) -> _Report:
    """Return the report for merging into a model. Raise TieError if a merge would change a tensor of another module."""
    layers = {name: one for name, one in tuner.model.named_modules() if isinstance(one, BaseTunerLayer)}
    report = _Report({id(layer): name for name, layer in layers.items()}, is_kept=is_kept)
    owners = {id(layer.get_base_layer()): layer for layer in layers.values()}
    names_of = {name: tie.names for tie in find_ties(tuner.model) for name in tie.names}
    modules = dict(tuner.model.named_modules())
    faults = []
    for path, layer in layers.items():
        if not _has_to_merge(layer, adapter_names):
            continue
        base = next(name for name, module in modules.items() if module is layer.get_base_layer())
        for leaf, weight in _weights_of(layer).items():
            name = f"{base}.{leaf}" if base else leaf
            others = [owners.get(id(modules[one.rpartition(".")[0]])) for one in names_of.get(name, ())]
            if all(isinstance(other, TrainableTokensLayer) for other in others):
                report.alike.add(id(weight))
            else:
                faults.append((path, name, next(one for one in names_of[name] if one != name)))
    if faults:
        raise _tied(*faults[0], more=len(faults) - 1)
    return report


def _tied(layer: str, name: str, other: str, more: int = 0) -> TieError:
    others = f" (and {more} more layers)" if more else ""
    return TieError(
        f"its base weight is tied to {other}, which merging would change as well{others}",
        name=layer,
        fix=f"Untie it first: tt.untie(model.get_base_model(), {name!r}), model.config.tie_word_embeddings = False.",
    )


def _has_to_merge(layer: Any, adapter_names: list[str] | None) -> bool:
    asked = [name for name in adapter_names or layer.active_adapters if name not in layer.merged_adapters]
    tables = [getattr(layer, name, ()) for name in layer.adapter_layer_names]
    return any(name in table for name in asked for table in tables)


def _merge_adapter(original: Any) -> Any:
    @wraps(original)
    def merge_adapter(tuner: Any, adapter_names: list[str] | None = None, *args: Any, **kwargs: Any) -> Any:
        with _reported(partial(_of_model, tuner, adapter_names, is_kept=True)):
            return original(tuner, adapter_names, *args, **kwargs)

    return merge_adapter


def _unload(original: Any) -> Any:
    @wraps(original)
    def unload(tuner: Any, merge: bool = True, *args: Any, **kwargs: Any) -> Any:
        if not merge:
            return original(tuner, merge, *args, **kwargs)
        with _reported(partial(_of_model, tuner, kwargs.get("adapter_names"), is_kept=False)):
            return original(tuner, merge, *args, **kwargs)

    return unload


# -- one layer --------------------------------------------------------------------------------------------------------


def _weights_of(layer: Any) -> dict[str, Weight]:
    """Return the Weights that ``layer`` merges into, by name in its base layer."""
    held = parameters_of(layer.get_base_layer())
    leaves = [layer.parameter_name] if hasattr(layer, "parameter_name") else list(held)
    found = {leaf: held.get(leaf) for leaf in leaves}
    return {leaf: one for leaf, one in found.items() if isinstance(one, Weight) and not one.scheme.transparent}


def _merge(original: Any) -> Any:
    @wraps(original)
    def merge(layer: Any, *args: Any, **kwargs: Any) -> Any:
        held = _weights_of(layer)
        if not held:
            return original(layer, *args, **kwargs)
        if type(layer).__name__ == "MultiheadAttention":
            raise UnsupportedOpError(
                "PEFT merges adapters of nn.MultiheadAttention at every forward, and each merge would round",
                fix="Leave this module plain, by a rule of None or tt.dequantize on it.",
            )
        with _reported(_Report) as report:
            for leaf, weight in held.items():
                if weight.tie is not None and id(weight) not in report.alike:
                    raise _tied(report.names.get(id(layer), type(layer).__name__), leaf, ", ".join(weight.tie.names))
            return _merge_into(layer, held, report, partial(original, layer, *args, **kwargs))

    return merge


def _merge_into(layer: Any, held: dict[str, Weight], report: _Report, run: Callable[[], Any]) -> Any:
    """Run PEFT's ``merge`` on plain values and encode the result. If either fails, restore the layer."""
    table, biases, before = parameters_of(layer.get_base_layer()), _biases_of(layer), list(layer.merged_adapters)
    name, made = report.names.get(id(layer), type(layer).__name__), {}
    with _as_values(layer, held) as values:
        try:
            answer = run()
            if list(layer.merged_adapters) == before:
                return answer
            for leaf, weight in held.items():
                made[leaf] = _encoded(weight, values(leaf))
                report.errors[f"{name}.{leaf}"] = _error(weight, made[leaf], values(leaf))
        except BaseException:
            layer.merged_adapters[:] = before
            for leaf, bias in biases.items():
                table[leaf].data = bias
            raise
    kept: dict[str, _Kept] = vars(layer).setdefault(_KEPT, {})
    for leaf in (*held, *biases):
        if report.is_kept or leaf in kept:
            _keep(kept, leaf, biases.get(leaf, table[leaf].data), report.kept, id(table[leaf]))
        if leaf in made:
            table[leaf].data = made[leaf]
        if leaf in kept:
            kept[leaf].merged = _checksums(table[leaf])
    return answer


def _keep(kept: dict[str, _Kept], leaf: str, base: Tensor, shared: dict[int, _Kept], key: int) -> None:
    """Keep ``base``, once for all layers over the parameter ``key``; if it is kept, note a change since the merge."""
    if leaf not in kept:
        kept[leaf] = shared.setdefault(key, _Kept(base))
        kept[leaf].layers += 1
    elif _checksum(base) not in kept[leaf].merged:
        kept[leaf].is_known = False


def _unmerge(original: Any) -> Any:
    @wraps(original)
    def unmerge(layer: Any, *args: Any, **kwargs: Any) -> Any:
        held, kept = _weights_of(layer), vars(layer).get(_KEPT, {})
        if not (held or kept) or not layer.merged_adapters:
            return original(layer, *args, **kwargs)
        table = parameters_of(layer.get_base_layer())
        unchanged = {leaf: one.is_known and _checksum(table[leaf]) in one.merged for leaf, one in kept.items()}
        if not held:  # plain values in place of the Weights: they were dequantized, or DoRA unmerges inside a merge
            answer = original(layer, *args, **kwargs)
            for leaf in (leaf for leaf in kept if unchanged[leaf]):
                table[leaf].data.copy_(kept[leaf].base)
                kept[leaf].merged.add(_checksum(table[leaf]))  # for another layer over it, which unmerges it again
            if _REPORT.get() is None:
                vars(layer).pop(_KEPT)
            return answer
        with _as_values(layer, held) as values:
            answer = original(layer, *args, **kwargs)
            made = {leaf: _encoded(one, values(leaf)) for leaf, one in held.items() if not unchanged.get(leaf)}
        for leaf, one in kept.items():
            one.layers -= 1
            if unchanged[leaf] and not one.layers:
                table[leaf].data = one.base.to(table[leaf].device, table[leaf].dtype)
        for leaf, weight in made.items():
            held[leaf].data = weight
        if made:
            warnings.warn(
                f"{type(layer).__name__}: the base of {', '.join(made)} was not kept, or the merged values changed, "
                "so it is computed by subtraction and rounded. Import torchtether.integrations.peft before merging.",
                stacklevel=2,
            )
        vars(layer).pop(_KEPT, None)
        return answer

    return unmerge


def _base_weight(original: Any) -> Any:
    """Wrap what SHiRA and some forms of MiSS add to in every forward: a Weight would round the sum to its codes."""

    @wraps(original)
    def get_base_weight(layer: Any) -> Tensor:
        weight: Tensor = original(layer)
        return weight.dequantize() if isinstance(weight, Weight) else weight

    return get_base_weight


def _biases_of(layer: Any) -> dict[str, Tensor]:
    """Return copies of the base layer's plain parameters below two dimensions, which some adapters change too."""
    if hasattr(layer, "parameter_name"):
        return {}
    held = parameters_of(layer.get_base_layer())
    found = {leaf: one for leaf, one in held.items() if one is not None and not isinstance(one, Weight)}
    return {leaf: one.detach().clone() for leaf, one in found.items() if one.dim() < 2}


@contextmanager
def _as_values(layer: Any, held: dict[str, Weight]) -> Iterator[Callable[[str], Tensor]]:
    """Put plain values in place of Weights; yield a function that reads them back by name."""
    base = layer.get_base_layer()
    table = parameters_of(base)
    before = dict(table)
    for leaf, weight in held.items():
        table[leaf] = nn.Parameter(_values(weight), requires_grad=False)
    try:
        yield lambda leaf: getattr(base, leaf).detach()
    finally:
        for leaf in held:
            vars(base).pop(leaf, None)
        table.clear()
        table.update(before)


def _values(weight: Weight) -> Tensor:
    """Return the values in float32 at least, so that the sum is rounded only once, by the scheme."""
    with torch.no_grad():
        exact = weight.detach() if weight.dtype.itemsize >= 4 else weight.detach().to(torch.float32)
        return exact.dequantize()


def _encoded(weight: Weight, values: Tensor) -> Weight:
    """Return ``values`` in the scheme of ``weight``, in new memory; scales of ``weight`` that still fit are kept."""
    parts = encode_like(weight, values)
    assert parts is not None
    taken = {part.data_ptr() for part in weight.parts.values()}
    own = {name: part.clone() if part.data_ptr() in taken else part for name, part in parts.items()}
    return weight.with_parts(own)


def _error(weight: Weight, made: Weight, values: Tensor) -> tuple[float, float, float]:
    before = _values(weight)
    return float((_values(made) - values).norm()), float(values.norm()), float((values - before).norm())


def _checksum(tensor: Tensor) -> int:
    parts = tensor.parts.values() if isinstance(tensor, Weight) else (tensor,)
    found = 0
    for part in parts:
        found = zlib.crc32(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, found)
    return found


def _checksums(tensor: Tensor) -> set[int]:
    """Return the checksums of the parts and of the values of a Weight, or the one of a plain tensor."""
    forms = (tensor, _values(tensor), tensor.dequantize()) if isinstance(tensor, Weight) else (tensor,)
    return {_checksum(one) for one in forms}


def _collect(original: Any) -> Any:
    @wraps(original)
    def get_peft_model_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
        found = original(*args, **kwargs)
        return {name: one.detach().dequantize() if isinstance(one, Weight) else one for name, one in found.items()}

    return get_peft_model_state_dict


def _fill(original: Any) -> Any:
    @wraps(original)
    def set_peft_model_state_dict(model: Any, peft_model_state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        held = {name: one for name, one in model.state_dict().items() if isinstance(one, Weight)}
        given = dict(peft_model_state_dict)
        for name in held.keys() & given.keys():
            if torch.equal(held[name].dequantize().to(given[name]), given[name]):
                given[name] = held[name]  # encoding its values could give other codes
        return original(model, given, *args, **kwargs)

    return set_peft_model_state_dict


def _install() -> None:
    """Wrap, once, the methods of PEFT's layers that read a base weight, and the functions that a file goes through.

    Other modules of PEFT have these functions under the same names.
    """
    for name, wrap_function in {"get_peft_model_state_dict": _collect, "set_peft_model_state_dict": _fill}.items():
        original = getattr(save_and_load, name)
        if not hasattr(original, "__wrapped__"):
            wrapped = wrap_function(original)
            for module in [one for path, one in [*sys.modules.items()] if path.partition(".")[0] == "peft"]:
                if vars(module).get(name) is original:
                    setattr(module, name, wrapped)
    wrappers: list[tuple[type, dict[str, Any]]] = [
        (BaseTunerLayer, {"merge": _merge, "unmerge": _unmerge, "get_base_weight": _base_weight}),
        (BaseTuner, {"merge_adapter": _merge_adapter, "_unload_and_optionally_merge": _unload}),
    ]
    for root, wrap in wrappers:
        for kind in {root, *_subclasses(root)}:
            for name, wrapper in wrap.items():
                own = vars(kind).get(name)
                if isfunction(own) and own.__module__.startswith("peft.") and not hasattr(own, "__wrapped__"):
                    setattr(kind, name, wrapper(own))
    if hasattr(lora, "ParamWrapper"):  # since 0.17
        peft_experts.install(lora.ParamWrapper)


def _subclasses(kind: Any) -> Iterator[type]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


_install()
