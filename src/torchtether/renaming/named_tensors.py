"""The tensors of a checkpoint under the names that rename rules have given them, and the common logic of rules."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..geometry.views import Shape
from .pieces import CompositeTensor, keys_of


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor and its name after the rules so far; ``listed`` ones are unexpected if the model lacks them."""

    name: str
    tensor: CompositeTensor
    listed: bool = True


class Rule(ABC):
    """Change names or tensors of a checkpoint: the base of ``tt.Concat`` and others, and of a library's rules."""

    @abstractmethod
    def apply(self, names: Sequence[NamedTensor]) -> list[NamedTensor] | None:
        """Return ``names`` after this rule; ``None`` if it matches none of them."""

    def prepared(self) -> Rule:
        """Return a form of the rule for many calls of ``apply`` while the model does not change."""
        return self


def change_found(
    names: Sequence[NamedTensor], source: str, change: Callable[[NamedTensor, re.Match[str]], list[NamedTensor]]
) -> list[NamedTensor] | None:
    """Replace every tensor whose name ``source`` matches by the result of ``change``; return ``None`` if none does."""
    made: list[NamedTensor] = []
    is_used = False
    for one in names:
        found = re.search(source, one.name)
        if found is None:
            made.append(one)
            continue
        is_used = True
        made += change(one, found)
    return made if is_used else None


def join_found(
    names: Sequence[NamedTensor],
    place: Callable[[str], tuple[str, int] | None],
    join: Callable[[str, dict[int, list[NamedTensor]]], CompositeTensor],
) -> list[NamedTensor] | None:
    """Join the tensors to which ``place`` gives the same name; the result takes the place of the first one."""
    made: list[NamedTensor | str] = []
    groups: dict[str, dict[int, list[NamedTensor]]] = {}
    for one in names:
        where = place(one.name)
        if where is None:
            made.append(one)
            continue
        name, i = where
        if name not in groups:
            made.append(name)
        groups.setdefault(name, {}).setdefault(i, []).append(one)

    def joined(name: str) -> NamedTensor:
        listed = any(one.listed for ones in groups[name].values() for one in ones)
        return NamedTensor(name, join(name, groups[name]), listed)

    return [one if isinstance(one, NamedTensor) else joined(one) for one in made] if groups else None


def broken(given: Sequence[NamedTensor], *, lacks: str = "", wrong: str = "") -> CompositeTensor:
    tensors = [one.tensor for one in given]
    return replace(
        tensors[0],
        shape=(),
        pieces=(),
        keys=keys_of(tensors),
        lacks=tuple(dict.fromkeys([*(w for t in tensors for w in t.lacks), *([lacks] if lacks else [])])),
        wrong=tuple(dict.fromkeys([*(w for t in tensors for w in t.wrong), *([wrong] if wrong else [])])),
    )


def find_duplicate(name: str, rule: object, found: dict[int, list[NamedTensor]]) -> str:
    for ones in found.values():
        if len(ones) > 1:
            return f"{name}: {type(rule).__name__} finds {ones[0].name} and {ones[1].name} for the same piece"
    return ""


def find_dim(name: str, one: NamedTensor, dim: int) -> tuple[int, str]:
    rank = len(one.tensor.shape)
    if -rank <= dim < rank:
        return dim % rank, ""
    return 0, f"{name}: {one.name} has shape {one.tensor.shape}, which has no dim {dim}"


def find_mismatch(name: str, rule: object, given: Sequence[NamedTensor], free: int | None) -> str:
    """Return the reason that the tensors cannot be joined, or ""; their sizes along ``free`` may differ."""
    first = given[0]

    def rest(shape: Shape) -> Shape:
        return shape if free is None or free >= len(shape) else (*shape[:free], -1, *shape[free + 1 :])

    for other in given[1:]:
        one, two = first.tensor, other.tensor
        if (one.dtype, one.scheme) != (two.dtype, two.scheme):
            kinds = [f"{n.name} ({_kind(n.tensor)})" for n in (first, other)]
            return f"{name}: {type(rule).__name__} cannot join {kinds[0]} and {kinds[1]}, which differ"
        if rest(one.shape) != rest(two.shape):
            along = "" if free is None else f" along dim {free}"
            shapes = f"{first.name} of shape {one.shape} and {other.name} of shape {two.shape}"
            return f"{name}: {type(rule).__name__} cannot join {shapes}{along}"
    return ""


def _kind(tensor: CompositeTensor) -> str:
    return str(tensor.dtype) if tensor.scheme.transparent else f"{tensor.dtype} as {tensor.scheme}"
