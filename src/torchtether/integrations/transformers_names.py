"""Rename rules for files of transformers 5, from the conversion mapping of a model.

For many models ``save_pretrained`` writes names that differ from the model's, experts one by one, and fused projections
separately. ``from_pretrained`` reverses that by the transforms that ``get_model_conversion_mapping`` returns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers import core_model_loading as ops
from transformers.conversion_mapping import get_model_conversion_mapping

from .._checks import describe
from ..errors import ArgumentError, RuleError
from ..geometry.views import Shape
from ..renaming.named_tensors import NamedTensor, Rule, broken, find_dim, find_mismatch
from ..renaming.pieces import concatenated, narrowed, reordered, stacked, transposed
from ..ties.names import named_tensors
from ..torch_private.modules import transient_names, unwrapped_name
from .transformers_version import CONVERTS_NAMES, is_before

_Values = dict[str, list[NamedTensor]]
"""The intermediate tensors of a converter, by the source or target pattern that they belong to."""


def transformers_names(model: PreTrainedModel) -> list[Rule]:
    """Return the rename rules with which ``tt.load`` fills ``model`` from a folder that transformers 5 has written.

    ``tt.load`` uses them by itself if no ``rename`` is given and a file has other names or shapes than the model. You
    need them only to put rules of your own before or after them. They do the same as ``from_pretrained``:

    - rename by the model's conversion mapping; a name that is one of the model's stays;
    - join, split, transpose and reorder tensors (quantized ones without decoding, where no block is cut);
    - add or remove the prefix of the base model;
    - leave out keys that the model says to ignore.

    Nothing is read. A tensor that does not fit is a fault of the plan, and so is an operation of transformers that this
    package does not know. Raises ArgumentError if ``model`` is no model of transformers.

        from torchtether.integrations.transformers_names import transformers_names
        tt.load(model, folder, rename=[("^old", "new"), *transformers_names(model)])
    """
    if not isinstance(model, PreTrainedModel):
        raise ArgumentError(f"is {describe(model)}, not a PreTrainedModel", name="model", fix="Give the model inside.")
    return [_ModelNames(model)]


@dataclass(frozen=True)
class _ModelNames(Rule):
    """The rename rule of one model: the changes of names and shapes that ``from_pretrained`` makes."""

    model: PreTrainedModel

    def apply(self, names: Sequence[NamedTensor]) -> list[NamedTensor]:
        """Return ``names`` renamed and converted to the tensors of the model."""
        return self.prepared().apply(names)

    def prepared(self) -> _PreparedNames:
        """Return the rule with the tensors and transforms of the model, which take time to collect."""
        transient = transient_names(self.model)
        every = named_tensors(self.model).items()
        tensors = {unwrapped_name(name): tensor for name, tensor in every if name not in transient}
        transforms = get_model_conversion_mapping(self.model)
        renamings = [one for one in transforms if isinstance(one, ops.WeightRenaming)]
        converters = [one for one in transforms if isinstance(one, ops.WeightConverter)]
        return _PreparedNames(self.model, tensors, renamings, converters, _ignored(self.model))

    def __str__(self) -> str:
        return f"transformers_names({type(self.model).__name__})"


@dataclass(frozen=True)
class _PreparedNames(_ModelNames):
    """The rename rule of one model, with the model's tensors by name and the transforms of transformers."""

    tensors: dict[str, Tensor]
    renamings: list[Any]
    converters: list[Any]
    ignored: re.Pattern[str] | None

    def apply(self, names: Sequence[NamedTensor]) -> list[NamedTensor]:
        """Return ``names`` renamed and converted to the tensors of the model."""
        tensors, renamings, converters = self.tensors, self.renamings, self.converters
        by_source = {source: one for one in converters for source in one.source_patterns}
        prefix = self.model.base_model_prefix
        stored = {one.tensor.keys[0]: one.tensor.shape for one in names if one.tensor.is_stored}
        made: list[NamedTensor] = []
        groups: dict[str, _Values] = {}
        for one in sorted(names, key=lambda one: ops.dot_natural_key(one.name)):  # some transforms depend on the order
            name, source = ops.rename_source_key(one.name, renamings, converters, prefix, tensors)
            if name not in tensors and one.name in tensors:
                name, source = ops.rename_source_key(one.name, [], [], prefix, tensors)
            if name in tensors and source is not None:
                groups.setdefault(name, {}).setdefault(source, []).append(one)
            elif name in tensors or not (self.ignored and self.ignored.search(name)):
                made.append(one if source else replace(one, name=name))
        for name, found in groups.items():
            group = _Group(name, by_source[next(iter(found))], self.model, tensors, stored)
            made += group.converted(found)
        return made


def _ignored(model: PreTrainedModel) -> re.Pattern[str] | None:
    """Return a pattern for the names that ``from_pretrained`` ignores if the model lacks them; ``None`` without any."""
    patterns = list(model._keys_to_ignore_on_load_unexpected or ())
    for name, pattern in (("rotary_emb.inv_freq", r"rotary_emb\.inv_freq"), ("position_ids", r"(^|\.)position_ids$")):
        patterns += [pattern] if any(buffer.endswith(name) for buffer, _ in model.named_buffers()) else []
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns)) if patterns else None


@dataclass(frozen=True)
class _Group:
    """The source tensors of one converter; ``name`` is the name of its first target in the model."""

    name: str
    converter: Any
    model: PreTrainedModel
    tensors: Mapping[str, Tensor]
    """The tensors of the model, by name."""
    stored: Mapping[str, Shape]
    """The shapes of stored tensors, by key."""

    def converted(self, found: _Values) -> list[NamedTensor]:
        """Return the targets that the converter makes of ``found``; if it cannot, broken tensors with the reason."""
        sources = [one for ones in found.values() for one in ones]
        listed, lacks = any(one.listed for one in sources), self._absent(found)
        try:
            if not lacks and not any(one.tensor.is_broken for one in sources):
                values = found
                for operation in self.converter.operations:
                    values = self._step(operation)(self, operation, values)
                named = self._named({pattern: ones[0] for pattern, ones in values.items()})
                return [replace(one, name=name, listed=listed) for name, one in named.items()]
            what = ""
        except RuleError as error:
            what = str(error)
        wrong = broken(sources, lacks=lacks, wrong=what)
        targets = dict.fromkeys(self.converter.target_patterns, NamedTensor(self.name, wrong, listed))
        return [replace(one, name=name) for name, one in self._named(targets).items()]

    def _step(self, operation: Any) -> Callable[[_Group, Any, _Values], _Values]:
        kind = type(operation)
        if is_before(CONVERTS_NAMES):
            self.refuse(
                f"transformers converts it by {kind.__name__}, and torchtether knows that from {CONVERTS_NAMES} on, "
                f"this is {transformers.__version__}. Update transformers."
            )
        if kind.__name__ not in _STEPS or kind.__module__ != ops.__name__:
            self.refuse(
                f"transformers converts it by {kind.__name__}, which torchtether does not know. "
                "Load it by from_pretrained, and save it with tt.save."
            )
        return _STEPS[kind.__name__]

    def _named(self, values: Mapping[str, NamedTensor]) -> dict[str, NamedTensor]:
        """Return ``values`` by their names in the model, made of patterns as in ``WeightConverter.convert``."""
        whole = self.name.replace("*.", "0.")
        pattern = next((pattern for pattern in values if pattern in whole), None)
        if pattern is None:
            return dict(zip([self.name], values.values(), strict=True)) if len(values) == 1 else dict(values)
        prefix, _, suffix = whole.partition(pattern)
        return {prefix + pattern + suffix: one for pattern, one in values.items()}

    def _absent(self, found: _Values) -> str:
        """Return which source tensors the checkpoint lacks, as a message; empty if it has all."""
        for pattern in self.converter.source_patterns:
            if pattern not in found:
                there = ", ".join(one.name for ones in found.values() for one in ones[:1])
                return f"{self.name}: the checkpoint has {there}, and nothing for {pattern!r}"
            number = pattern.replace("*.", r"(?P<number>\d+)\.", 1).replace("*.", r".*\.")
            matches = [re.search(number, one.name) for one in found[pattern]] if "*." in pattern else []
            numbers = {int(match["number"]) for match in matches if match}
            absent = [i for i in range(min(numbers, default=0), max(numbers, default=0)) if i not in numbers]
            if absent:
                return f"{self.name}: the checkpoint has {len(numbers)} of {pattern!r}, without number {absent[0]}"
        return ""

    def refuse(self, what: str) -> None:
        """Raise RuleError for ``what`` under the name of the group."""
        raise RuleError(what, name=self.name)

    def dim(self, one: NamedTensor, dim: int) -> int:
        """Return ``dim`` as a non-negative index. Raise RuleError if ``one`` does not have it."""
        found, wrong = find_dim(self.name, one, dim)
        if wrong:
            self.refuse(wrong.partition(": ")[2])
        return found

    def check_alike(self, operation: Any, ones: Sequence[NamedTensor], dim: int | None) -> None:
        """Raise RuleError unless ``ones`` have the same dtype, scheme and, except along ``dim``, shape."""
        wrong = find_mismatch(self.name, operation, ones, dim)
        if wrong:
            self.refuse(wrong.partition(": ")[2])


# -- the operations of transformers, as operations on stored pieces ---------------------------------------------------


def _first(values: _Values) -> NamedTensor:
    return next(iter(values.values()))[0]


def _cut(one: NamedTensor, dim: int, sizes: Sequence[int]) -> list[NamedTensor]:
    made, start = [], 0
    for size in sizes:
        made.append(replace(one, tensor=narrowed(one.tensor, dim, start, start + size)))
        start += size
    return made


def _chunk(group: _Group, operation: ops.Chunk, values: _Values) -> _Values:
    one, targets = _first(values), operation.get_target_patterns(group.converter.target_patterns, config=_config(group))
    dim = group.dim(one, operation.dim)
    total = one.tensor.shape[dim]
    size = max(1, -(-total // len(targets)))
    pieces = _cut(one, dim, [min(size, total - start) for start in range(0, total, size)])
    return {target: [piece] for target, piece in zip(targets, pieces, strict=False)}


def _split(group: _Group, operation: ops.Split, values: _Values) -> _Values:
    one, (first, *others) = _first(values), group.converter.target_patterns
    dim, names = group.dim(one, operation.dim), [group.name, *(group.name.replace(first, other) for other in others)]
    sizes = [group.tensors[name].shape[dim] if name in group.tensors else 0 for name in names]
    if sum(sizes) != one.tensor.shape[dim]:
        group.refuse(f"{one.name} has shape {one.tensor.shape}, the model splits dim {dim} into {sizes}")
    return {t: [p] for t, p in zip((first, *others), _cut(one, dim, sizes), strict=True)}


def _concatenate(group: _Group, operation: ops.Concatenate, values: _Values) -> _Values:
    ones = [one for pattern in group.converter.source_patterns for one in values[pattern]]
    dim = group.dim(ones[0], operation.dim)
    group.check_alike(operation, ones, dim)
    made = replace(ones[0], tensor=concatenated([one.tensor for one in ones], dim))
    return {operation.get_target_pattern(group.converter.target_patterns): [made]}


def _stack(group: _Group, operation: ops.MergeModulelist, values: _Values) -> _Values:
    made = {}
    for pattern, ones in values.items():
        group.check_alike(operation, ones, None)
        target = operation.get_target_pattern(len(values), pattern, group.converter.target_patterns)
        made[target] = [replace(ones[0], tensor=stacked([one.tensor for one in ones], operation.dim))]
    return made


def _transpose(group: _Group, operation: Any, values: _Values) -> _Values:
    one, converter = _first(values), group.converter
    target = operation.get_target_pattern(values, converter.source_patterns, converter.target_patterns)
    if operation.check_dims and one.tensor.shape == tuple(group.tensors[group.name].shape):
        return {target: [one]}
    tensor = transposed(one.tensor, group.dim(one, operation.dim0), group.dim(one, operation.dim1))
    return {target: [replace(one, tensor=tensor)]}


def _permute(group: _Group, operation: ops.PermuteForRope, values: _Values) -> _Values:
    config, made = _config(group), {}
    if operation.subconfig_key is not None:
        config = getattr(config, operation.subconfig_key, config)
    heads, chosen = getattr(config, "num_attention_heads", 1), operation.permute_layer_names
    for pattern, ones in values.items():
        target = operation.get_target_pattern(pattern, group.converter.source_patterns, group.converter.target_patterns)
        is_chosen = chosen is None or any(name in pattern for name in chosen)
        made[target] = [_in_halves(group, ones[0], 0, -heads if operation.inverse else heads)] if is_chosen else ones
    return made


def _interleave(group: _Group, operation: ops.Interleave, values: _Values) -> _Values:
    one = _in_halves(group, _first(values), operation.dim, -1 if operation.inverse else 1)
    return {group.converter.target_patterns[0]: [one]}


def _in_halves(group: _Group, one: NamedTensor, dim: int, heads: int) -> NamedTensor:
    """Return ``one`` with the pairs of each head in halves, or back if ``heads`` < 0.

    ``one`` must be whole heads of one stored tensor, since that tensor is reordered.
    """
    tensor, piece, dim = one.tensor, one.tensor.pieces[0], group.dim(one, dim)
    head, rest = divmod(tensor.shape[dim], abs(heads))
    total = group.stored.get(piece.key, tensor.shape)[dim]
    is_moved = len(tensor.pieces) > 1 or piece.heads or piece.dims != tuple(range(len(piece.dims)))
    if is_moved or not head or rest or head % 2 or piece.box[dim][0] % head or total % head:
        group.refuse(f"the {abs(heads)} heads of {one.name} are not whole in one stored tensor. Use from_pretrained.")
    return replace(one, tensor=reordered(tensor, total // head * (1 if heads > 0 else -1), dim))


def _fuse_and_split(group: _Group, operation: ops.ErnieFuseAndSplitTextVisionExperts, values: _Values) -> _Values:
    targets: list[str] = group.converter.target_patterns
    parts: _Values = {target: [] for target in targets}
    for pattern in group.converter.source_patterns:
        ones = values[pattern]
        group.check_alike(operation, ones, None)
        size = -(-len(ones) // len(targets))
        for i, target in enumerate(targets):
            some = [one.tensor for one in ones[i * size : (i + 1) * size]]
            parts[target].append(replace(ones[0], tensor=stacked(some, operation.stack_dim)))
    dim = group.dim(parts[targets[0]][0], operation.concat_dim)
    return {
        target: [replace(made[0], tensor=concatenated([one.tensor for one in made], dim))]
        for target, made in parts.items()
    }


def _config(group: _Group) -> Any:
    return group.model.config


_STEPS: dict[str, Callable[[_Group, Any, _Values], _Values]] = {
    "Chunk": _chunk,
    "Split": _split,
    "Concatenate": _concatenate,
    "MergeModulelist": _stack,
    "Transpose": _transpose,
    "PermuteForRope": _permute,
    "Interleave": _interleave,
    "ErnieFuseAndSplitTextVisionExperts": _fuse_and_split,
}
"""Operations by the names of their classes, because not every version of transformers has all classes."""
