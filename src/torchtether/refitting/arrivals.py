"""Pieces that arrive one after the other, in any order; each tensor is written as soon as it is complete."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._checks import describe
from ..checkpoint.held import HeldCheckpoint
from ..errors import TetherError
from ..integrations.imported import names_of_library
from ..loading.matching import SAME_VALUES, match_component
from ..loading.options import LoadOptions, fault
from ..loading.steps import Draft, Step, find_targets
from ..renaming.named_tensors import Rule
from ..renaming.renamed_checkpoint import RenamedCheckpoint
from ..renaming.steps import Rename, renamed
from ..ties.components import Component
from ..ties.names import is_sharded
from ..weights.weight import Weight
from .report import checksum_by_all
from .target import Target
from .writing import Writer


@dataclass
class _Group:
    """Pieces that wait for other pieces from which the rules make the same tensors."""

    names: set[str]
    """Names of the tensors that the rules make of the pieces, as far as each piece alone determines them."""
    pieces: dict[str, Tensor] = field(default_factory=dict)
    numel: int = 0
    nbytes: int = 0


class Arrivals:
    """Take pieces, write each tensor that is complete, and collect the faults of all pieces at the end.

    A piece that completes no tensor is copied, so that its sender may reuse the memory for the next piece.
    """

    def __init__(self, target: Target, rename: Rename, writer: Writer) -> None:
        self._target, self._writer = target, writer
        self._rename = _prepared(rename)
        self._library: Rename = None
        renamed((), self._rename)  # raises RuleError if it has something that is not a rule
        self.faults: list[str] = []
        self._targets = find_targets(target.whole, LoadOptions(is_refit=True), [])  # ``end`` reports its faults
        self._home = {name: component for component in self._targets.components for name in component.names}
        self._came: dict[str, Tensor] = {}
        """Every piece that has come, by its name: on ``meta``, or with its values while it waits."""
        self._groups: dict[str, _Group] = {}
        """The group of waiting pieces for each name of the model."""
        self._settled: dict[int, tuple[str, Any]] = {}
        """By id of each written component: the name under which it came, and ``_bits`` if it has other names."""
        self._waiting: set[str] = set()
        self._waits = self._items = 0
        self.waited: int = 0
        """The peak bytes of waiting pieces."""

    def take(self, pair: Any) -> None:
        """Take one (name, tensor) pair."""
        self._items += 1
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        name, tensor = pair if is_pair else (None, None)
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            kind = f"({describe(name)}, {describe(tensor)})" if is_pair else describe(pair)
            self.faults.append(fault(f"item {self._items}", f"it is {kind}, not a pair of a name and a tensor"))
            return
        if name in self._came:
            self.faults.append(
                fault(name, "the source has sent it twice, and only the first was used. Send each name once.")
            )
            return
        wrong = fault_of_tensor(tensor)
        if wrong:
            self.faults.append(fault(name, wrong))
            return
        tensor = self._target.receive(tensor.detach())
        self._came[name] = tensor
        alone = self._renamed({name: tensor})
        wanted = {*alone, *alone.broken}
        group = self._join(wanted)
        if group is None and self._is_complete(alone):
            self._write(alone)
        elif wanted:
            self._wait(group or _Group(set()), name, tensor, wanted)
        self._forget(name)

    def _wait(self, group: _Group, name: str, tensor: Tensor, wanted: set[str]) -> None:
        """Add a piece to ``group``; if the group is complete, write its tensors."""
        given = None
        group.names |= wanted
        homes = {id(self._home[one]): self._home[one].member(one).tensor for one in group.names if one in self._home}
        if group.numel + tensor.numel() >= sum(held.numel() for held in homes.values()):
            given = self._renamed({**group.pieces, name: tensor})
        if given is not None and self._is_complete(given):
            self._write(given)
            for one in group.names:
                self._groups.pop(one, None)
            self._waits -= group.nbytes
            self._waiting -= group.pieces.keys()
            for piece in group.pieces:
                self._forget(piece)
            return
        group.pieces[name] = self._came[name] = tensor.clone()
        group.numel, group.nbytes = group.numel + tensor.numel(), group.nbytes + tensor.nbytes
        self._waiting.add(name)
        self._groups.update(dict.fromkeys(group.names, group))
        self._waits += tensor.nbytes
        self.waited = max(self.waited, self._waits)

    def _join(self, wanted: Iterable[str]) -> _Group | None:
        """Merge the groups that wait for any of ``wanted``, and return the result; ``None`` if there are none."""
        found = list({id(g): g for g in (self._groups.get(one) for one in wanted) if g is not None}.values())
        for other in found[1:]:
            found[0].names |= other.names
            found[0].pieces |= other.pieces
            found[0].numel, found[0].nbytes = found[0].numel + other.numel, found[0].nbytes + other.nbytes
        return found[0] if found else None

    def _forget(self, name: str) -> None:
        """Keep only shape and dtype of a piece, unless it waits."""
        if name not in self._waiting:
            self._came[name] = _outline(self._came[name])

    # -- complete tensors -----------------------------------------------------------------------------------------

    def _renamed(self, pieces: Mapping[str, Tensor]) -> RenamedCheckpoint:
        checkpoint = self._target.hold(pieces)
        return RenamedCheckpoint(checkpoint, self._rules(checkpoint, pieces))

    def _rules(self, checkpoint: HeldCheckpoint, pieces: Mapping[str, Tensor]) -> Rename:
        """Return the rules for ``pieces``: the user's, or, if names and shapes do not fit, those of the library."""
        if self._rename is not None or all(
            name in self._home and self._home[name].member(name).tensor.shape == piece.shape
            for name, piece in pieces.items()
        ):
            return self._rename
        if self._library is None:
            self._library = _prepared(names_of_library(self._target.whole, checkpoint))
        return self._library

    def _is_complete(self, given: RenamedCheckpoint) -> bool:
        """Return whether no further piece can change the tensors that the rules make of these."""
        return not given.broken and all(self._is_final(name, given) for name in given)

    def _is_final(self, name: str, given: RenamedCheckpoint) -> bool:
        """Return whether ``name`` is complete, though it may not fit: it came as one tensor, or has the final shape."""
        component = self._home.get(name)
        if component is None:
            return True
        if len(component.members) > 1:
            return False  # views of one memory are compared when all of them have come
        return given.is_as_it_is(name) or given.spec(name).shape == tuple(component.members[0].tensor.shape)

    def _write(self, given: RenamedCheckpoint) -> None:
        """Write the tensors of ``given``; compare those that have come under another name already."""
        homes = {id(self._home[name]): self._home[name] for name in given if name in self._home}
        for key, component in homes.items():
            if key in self._settled:
                self._compare(component, given)
                continue
            names = [name for name in component.names if name in given]
            draft = Draft(self._assembled(given, names), self._targets)
            step = match_component(draft, component)
            if step is None:
                self.faults += draft.faults
                continue
            draft.steps.append(step)
            bits = _bits(draft.given, names[0]) if len(component.names) > 1 else None
            self._settled[key] = names[0], bits
            draft = self._target.cut(draft)
            self.faults += draft.faults
            if not draft.faults:
                self._finish(draft.steps, draft.given)

    def _assembled(self, given: RenamedCheckpoint, names: list[str]) -> RenamedCheckpoint:
        """Return ``names`` of ``given``; tensors of several pieces are assembled once, because they are read twice."""
        keys = [key for name in names for key in given.keys_of(name)]
        if all(map(given.is_as_it_is, names)) or any(is_sharded(self._came[key]) for key in keys):
            return given
        try:
            return RenamedCheckpoint(self._target.hold({name: given.read_briefly(name) for name in names}))
        except TetherError:
            return given  # Weights that cannot be joined, which matching reports as a fault

    def _finish(self, steps: list[Step], given: RenamedCheckpoint) -> None:
        """Write ``steps`` if their schemes can hold all values; else add the faults."""
        faults = self._writer.check(steps, given)
        self.faults += faults
        if not faults:
            self._writer.write(steps, given)

    def _compare(self, component: Component, given: RenamedCheckpoint) -> None:
        first, bits = self._settled[id(component)]
        for name in component.names:
            if name in given and name != first and _bits(given, name) != bits:
                what = f"the model ties it to {first}, the source has other values for it. {SAME_VALUES}"
                self.faults.append(fault(name, what))

    # -- the end --------------------------------------------------------------------------------------------------

    def end(self) -> Draft:
        """Write the tensors that were left for the end; return the draft of all pieces, with every fault."""
        rename = self._rename if self._library is None else self._library
        given = _Outlines(self._target.hold(self._came), rename)
        draft = self._target.match(given, LoadOptions(is_refit=True))
        late = [step for step in draft.steps if id(self._home[step.name]) not in self._settled]
        for step in late:
            keys = [key for source in step.sources for key in given.keys_of(source.name)]
            if any(self._came[key].is_meta for key in keys):
                self.faults.append(fault(step.name, "its pieces were dropped too early. Report this as a bug."))
            elif not any(one.startswith(f"{name}:") for name in step.component.names for one in draft.faults):
                self._finish([step], draft.given)
        draft.faults = list(dict.fromkeys([*self.faults, *draft.faults]))
        return draft


class _Outlines(RenamedCheckpoint):
    """All pieces, most of them on ``meta``: those whose tensors were written were checked and compared before that."""

    def check(self, name: str) -> None:
        """Raise UnsupportedOpError if Weights that have their values cannot be cut or joined."""
        if self._are_here(name):
            super().check(name)

    def is_same(self, one: str, other: str) -> bool:
        """Return whether two names hold the same bits; pieces without values were compared when they came."""
        return not (self._are_here(one) and self._are_here(other)) or super().is_same(one, other)

    def _are_here(self, name: str) -> bool:
        checkpoint = self.checkpoint
        assert isinstance(checkpoint, HeldCheckpoint)
        return not any(checkpoint.tensor(key).is_meta for key in self.keys_of(name))


def fault_of_tensor(tensor: Any) -> str:
    """Return why ``tensor`` cannot be a source of values; empty if it can."""
    if not isinstance(tensor, Tensor):
        return f"the source has {describe(tensor)} for it, not a tensor"
    if tensor.is_meta:
        return "the source has it on meta, without values"
    return "" if tensor.layout == torch.strided else f"the source has a {tensor.layout} tensor for it"


def _bits(given: RenamedCheckpoint, name: str) -> tuple[Any, ...]:
    """Return shape, dtype and scheme of ``name``, and a checksum of its values."""
    spec = given.spec(name)
    return spec.shape, spec.dtype, spec.scheme, checksum_by_all(given.read_briefly(name))


def _outline(tensor: Tensor) -> Tensor:
    """Return a tensor like ``tensor`` on ``meta``."""
    if isinstance(tensor, Weight):
        return tensor.map(_outline)
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")


def _prepared(rename: Rename) -> Rename:
    """Return ``rename`` with prepared rules, because they are applied to each piece."""
    if isinstance(rename, Rule):
        return rename.prepared()
    if isinstance(rename, Iterable) and not isinstance(rename, Mapping):
        return [one.prepared() if isinstance(one, Rule) else one for one in rename]
    return rename
