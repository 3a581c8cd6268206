"""The rename rules that join and split tensors of a checkpoint: Concat, Split and Stack."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..errors import RuleError
from ..geometry.views import Shape
from .named_tensors import NamedTensor, Rule, broken, change_found, find_dim, find_duplicate, find_mismatch, join_found
from .patterns import NUMBER, TURN_BY_HAND, check_dims, check_pattern, invert_pattern, left_out, replaced
from .pieces import CompositeTensor, concatenated, keys_of, narrowed, selected, stacked


@dataclass(frozen=True)
class Concat(Rule):
    """Join tensors of the checkpoint into one of the model: ``torch.cat`` in the order of ``sources``.

    ``sources``  regexes, one per piece, searched anywhere in a name. ``target`` replaces the match, as in ``re.sub``.
                 Names that become equal are the pieces of one tensor, so one rule serves all layers, weights and
                 biases. A name belongs to the first regex that matches
    ``sizes``    the sizes of the pieces along ``dim``; only checked, and needed for ``inverse`` unless all are equal
    ``groups``   the number of chunks per piece, which alternate: with ``groups=heads`` the first of ``heads`` equal
                 chunks of every piece comes first, then the second of every piece, ...

    Quantized pieces are joined without decoding, if no block is cut.

    >>> import torch, torchtether as tt, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tt.save({"q_proj.bias": torch.tensor([1.]), "k_proj.bias": torch.tensor([2., 3.])}, folder)
    ...     model = torch.nn.ModuleDict({"qk": torch.nn.Linear(3, 3)})
    ...     rule = tt.Concat(["q_proj", "k_proj"], "qk")
    ...     _ = tt.load(model, folder, rename=rule, strict=False)
    >>> model["qk"].bias.tolist()
    [1.0, 2.0, 3.0]
    """

    sources: Sequence[str]
    target: str
    dim: int = 0
    sizes: Sequence[int] | None = None
    groups: int = 1

    def __post_init__(self) -> None:
        _take_many(self, "sources", self.sources)
        for source in self.sources:
            check_pattern(self, source, self.target)
        check_dims(self, "dim", (self.dim,))
        _take_sizes(self, len(self.sources), self.sizes, self.groups)

    @property
    def inverse(self) -> Split:
        """Return the inverse rule. Raise RuleError if a regex is more than a name with groups."""
        pairs = [invert_pattern(source, self.target) for source in self.sources]
        if len({pattern for pattern, _ in pairs}) != 1:
            raise RuleError("the patterns of its sources have different groups", name=str(self), fix=TURN_BY_HAND)
        return Split(pairs[0][0], [template for _, template in pairs], self.dim, self.sizes, self.groups)

    def apply(self, names: Sequence[NamedTensor]) -> list[NamedTensor] | None:
        """Return ``names`` after this rule; ``None`` if it matches none of them."""

        def place(name: str) -> tuple[str, int] | None:
            for i, source in enumerate(self.sources):
                found = re.search(source, name)
                if found is not None:
                    return replaced(found, self.target), i
            return None

        return join_found(names, place, self._join)

    def _join(self, name: str, found: dict[int, list[NamedTensor]]) -> CompositeTensor:
        given = [one for i in sorted(found) for one in found[i]]
        absent = [source for i, source in enumerate(self.sources) if i not in found]
        wrong = find_duplicate(name, self, found)
        if absent:
            there, what = ", ".join(one.name for one in given), ", ".join(map(repr, absent))
            return broken(given, lacks=f"{name}: Concat finds {there}, but no tensor of the checkpoint for {what}")
        if wrong or any(one.tensor.is_broken for one in given):
            return broken(given, wrong=wrong)
        dim, wrong = find_dim(name, given[0], self.dim)
        wrong = wrong or find_mismatch(name, self, given, dim)
        if wrong:
            return broken(given, wrong=wrong)
        tensors = [one.tensor for one in given]
        sizes = tuple(tensor.shape[dim] for tensor in tensors)
        if self.sizes is not None and sizes != self.sizes:
            return broken(given, wrong=f"{name}: its pieces have sizes {sizes} along dim {dim}, not {self.sizes}")
        if self.groups == 1:
            return concatenated(tensors, dim)
        if any(size % self.groups for size in sizes):
            wrong = f"{name}: sizes {sizes} along dim {dim} cannot all be divided into {self.groups} groups"
            return broken(given, wrong=wrong)
        chunks = [_chunk(one, dim, i, self.groups) for i in range(self.groups) for one in tensors]
        return replace(concatenated(chunks, dim), keys=keys_of(tensors))

    def __str__(self) -> str:
        return f"Concat({list(self.sources)} -> {self.target!r})"


@dataclass(frozen=True)
class Split(Rule):
    """Split a tensor of the checkpoint for the model: ``torch.split``, the inverse of ``Concat``; or ``unbind``.

    ``source``   a regex, searched anywhere in a name
    ``targets``  one replacement for the match per piece, as in ``re.sub``; or one text with ``{}`` for the index along
                 ``dim``: then each index gives one piece without that dimension, the inverse of ``Stack``
    ``sizes``    the sizes of the pieces along ``dim``; equal by default
    ``groups``   the number of chunks per piece, which alternate; see ``Concat``

    Along dim 0, each piece reads only its own rows. Quantized tensors are split without decoding, if no block is cut.

    >>> import torch, torchtether as tt, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tt.save({"qkv.weight": torch.arange(4.).view(4, 1)}, folder)
    ...     model = torch.nn.ModuleDict({name: torch.nn.Linear(1, 2, bias=False) for name in ("q", "kv")})
    ...     _ = tt.load(model, folder, rename=tt.Split("qkv", ["q", "kv"]))
    >>> model["q"].weight.tolist(), model["kv"].weight.tolist()
    ([[0.0], [1.0]], [[2.0], [3.0]])
    """

    source: str
    targets: Sequence[str] | str
    dim: int = 0
    sizes: Sequence[int] | None = None
    groups: int = 1

    def __post_init__(self) -> None:
        check_dims(self, "dim", (self.dim,))
        if isinstance(self.targets, str):
            if self.targets.count(NUMBER) != 1 or self.sizes is not None or self.groups != 1:
                raise RuleError(
                    f"got targets={self.targets!r}, sizes={self.sizes}, groups={self.groups}",
                    name="Split",
                    fix="Give a list of targets, or one text with {} for the number, without sizes and groups.",
                )
            check_pattern(self, self.source, self.targets)
            return
        _take_many(self, "targets", self.targets)
        for target in self.targets:
            check_pattern(self, self.source, target)
        _take_sizes(self, len(self.targets), self.sizes, self.groups)

    @property
    def inverse(self) -> Concat | Stack:
        """Return the inverse rule. Raise RuleError if a regex is more than a name with groups."""
        if isinstance(self.targets, str):
            return Stack(*invert_pattern(self.source, self.targets), self.dim)
        pairs = [invert_pattern(self.source, target) for target in self.targets]
        if len({template for _, template in pairs}) != 1:
            raise RuleError("its targets use the groups in different orders", name=str(self), fix=TURN_BY_HAND)
        return Concat([pattern for pattern, _ in pairs], pairs[0][1], self.dim, self.sizes, self.groups)

    def apply(self, names: Sequence[NamedTensor]) -> list[NamedTensor] | None:
        """Return ``names`` after this rule; ``None`` if it matches none of them."""
        return change_found(names, self.source, self._cut)

    def _cut(self, one: NamedTensor, found: re.Match[str]) -> list[NamedTensor]:
        dim, wrong = (0, "") if one.tensor.is_broken else find_dim(one.name, one, self.dim)
        if isinstance(self.targets, str):
            if wrong or one.tensor.is_broken:
                return [replace(one, tensor=broken([one], wrong=wrong))]
            name = replaced(found, self.targets)
            return [
                replace(one, name=name.replace(NUMBER, str(i)), tensor=selected(one.tensor, dim, i))
                for i in range(one.tensor.shape[dim])
            ]
        targets = [replaced(found, target) for target in self.targets]
        wrong = wrong or ("" if one.tensor.is_broken else self._misfit(one, dim))
        if wrong or one.tensor.is_broken:
            return [replace(one, name=name, tensor=broken([one], wrong=wrong)) for name in targets]
        sizes = self._sizes(one.tensor.shape[dim])
        made, offset = [], 0
        for name, size in zip(targets, sizes, strict=True):
            made.append(replace(one, name=name, tensor=self._piece(one.tensor, dim, offset, size)))
            offset += size
        return made

    def _piece(self, tensor: CompositeTensor, dim: int, offset: int, size: int) -> CompositeTensor:
        chunks = []
        for i in range(self.groups):
            start = i * (tensor.shape[dim] // self.groups) + offset // self.groups
            chunks.append(narrowed(tensor, dim, start, start + size // self.groups))
        return replace(concatenated(chunks, dim), keys=tensor.keys)

    def _sizes(self, total: int) -> Shape:
        count = len(self.targets)
        return (total // count,) * count if self.sizes is None else tuple(self.sizes)

    def _misfit(self, one: NamedTensor, dim: int) -> str:
        total, sizes = one.tensor.shape[dim], self._sizes(one.tensor.shape[dim])
        if sum(sizes) != total:
            if self.sizes is None:
                count = len(self.targets)
                return f"{one.name}: size {total} along dim {dim} does not split in {count} equal pieces. Give sizes=."
            return f"{one.name}: sizes {sizes} add up to {sum(sizes)}, it has {total} along dim {dim}"
        if any(size % self.groups for size in sizes):
            return f"{one.name}: sizes {sizes} along dim {dim} cannot all be divided into {self.groups} groups"
        return ""

    def __str__(self) -> str:
        targets = self.targets if isinstance(self.targets, str) else list(self.targets)
        return f"Split({self.source!r} -> {targets!r})"


@dataclass(frozen=True)
class Stack(Rule):
    """Stack numbered tensors of the checkpoint along a new dimension ``dim``: ``torch.stack``.

    ``source``   a regex, searched anywhere in a name; its one group that ``target`` leaves out is the number
    ``target``   the replacement for the match, as in ``re.sub``; tensors whose names become equal are stacked

    Numbers count from 0 in numeric order (2 before 10), and none may be missing. Quantized tensors are stacked without
    decoding, if no block is cut.

    >>> import torch, torchtether as tt, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tt.save({f"experts.{i}.w1.weight": torch.full((2, 1), float(i)) for i in range(11)}, folder)
    ...     model = torch.nn.Module()
    ...     model.register_parameter("w1", torch.nn.Parameter(torch.zeros(11, 2, 1)))
    ...     _ = tt.load(model, folder, rename=tt.Stack(r"experts\\.(\\d+)\\.w1\\.weight", "w1"))
    >>> model.w1.shape, model.w1[10].tolist()
    (torch.Size([11, 2, 1]), [[10.0], [10.0]])
    """

    source: str
    target: str
    dim: int = 0

    def __post_init__(self) -> None:
        check_pattern(self, self.source, self.target)
        check_dims(self, "dim", (self.dim,))
        if len(left_out(self.source, self.target)) != 1:
            raise RuleError(
                f"the target {self.target!r} must leave out one group of {self.source!r}, the number, and leaves out "
                f"{len(left_out(self.source, self.target))}",
                name="Stack",
                fix=r"Put (\d+) where the number is, and use every other group in the target.",
            )

    @property
    def inverse(self) -> Split:
        """Return the inverse rule. Raise RuleError if a regex is more than a name with groups."""
        return Split(*invert_pattern(self.source, self.target, left_out(self.source, self.target)[0]), self.dim)

    def apply(self, names: Sequence[NamedTensor]) -> list[NamedTensor] | None:
        """Return ``names`` after this rule; ``None`` if it matches none of them."""
        (group,) = left_out(self.source, self.target)

        def place(name: str) -> tuple[str, int] | None:
            found = re.search(self.source, name)
            if found is None or not (found[group] or "").isdecimal():
                return None
            return replaced(found, self.target), int(found[group])

        return join_found(names, place, self._join)

    def _join(self, name: str, found: dict[int, list[NamedTensor]]) -> CompositeTensor:
        given = [one for i in sorted(found) for one in found[i]]
        absent = [i for i in range(max(found)) if i not in found]
        if absent:
            others = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            lacks = f"{name}: Stack finds {len(found)} tensors up to number {max(found)}, but not number {absent[0]}"
            return broken(given, lacks=lacks + others)
        wrong = find_duplicate(name, self, found)
        if wrong or any(one.tensor.is_broken for one in given):
            return broken(given, wrong=wrong)
        rank = len(given[0].tensor.shape) + 1
        dim, wrong = self.dim % rank, find_mismatch(name, self, given, None)
        if not -rank <= self.dim < rank:
            wrong = f"{name}: Stack makes a tensor of {rank} dimensions, which has no dim {self.dim}"
        return broken(given, wrong=wrong) if wrong else stacked([one.tensor for one in given], dim)

    def __str__(self) -> str:
        return f"Stack({self.source!r} -> {self.target!r})"


def _chunk(tensor: CompositeTensor, dim: int, i: int, count: int) -> CompositeTensor:
    size = tensor.shape[dim] // count
    return narrowed(tensor, dim, i * size, (i + 1) * size)


def _take_many(rule: Concat | Split, field: str, texts: Sequence[str]) -> None:
    if isinstance(texts, Iterable) and not isinstance(texts, (str, bytes, set, frozenset)):  # a set has no order
        texts = tuple(texts)  # it may be a generator
    are_texts = isinstance(texts, tuple) and all(isinstance(text, str) for text in texts)
    if not are_texts or not texts or len(set(texts)) != len(texts):
        raise RuleError(f"{field} must be a list of different texts, got {texts!r}", name=type(rule).__name__)
    object.__setattr__(rule, field, tuple(texts))


def _take_sizes(rule: Concat | Split, count: int, sizes: Sequence[int] | None, groups: int) -> None:
    word = type(rule).__name__
    if type(groups) is not int or groups < 1:
        raise RuleError(f"groups must be a positive int, got {groups!r}", name=word)
    if sizes is None:
        return
    sizes = tuple(sizes) if isinstance(sizes, Iterable) else ()
    if len(sizes) != count or not all(type(size) is int and size >= 0 for size in sizes):
        raise RuleError(f"sizes must have one int for each of {count} pieces, got {sizes!r}", name=word)
    object.__setattr__(rule, "sizes", tuple(sizes))
