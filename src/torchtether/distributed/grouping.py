"""Grouping modules into sharding units so that every tied group lies in one unit; computed from module paths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from torch import nn

from .._checks import describe_some

Policy = Literal["group", "root"]
Key = frozenset[int]
"""A unit, as the ids of the modules that are passed to ``fully_shard`` together."""

ROOT: Key = frozenset()


@dataclass(frozen=True)
class TiedNames:
    """Hold names that must lie in one unit, and the stacks of modules that run when one of them is used."""

    names: tuple[str, ...]
    stacks: tuple[tuple[int, ...], ...] = ()


@dataclass
class Grouping:
    """Hold the units of ``model``: at first each module of ``wanted`` alone; ``settle`` merges them for tied groups."""

    model: nn.Module
    wanted: Sequence[nn.Module]
    policy: Policy
    units: set[Key] = field(init=False)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._modules = dict(self.model.named_modules(remove_duplicate=False))
        self._path_of: dict[int, str] = {}
        self._outside: dict[int, set[int]] = {}
        for path, module in self._modules.items():
            self._path_of.setdefault(id(module), path)
            self._outside.setdefault(id(module), set()).update(self._above(path))
        self.units = {frozenset({id(module)}) for module in self.wanted if module is not self.model}
        self._tried: set[tuple[str, ...]] = set()

    def settle(self, groups: Iterable[TiedNames]) -> None:
        """Change the units until each of ``groups`` lies in one unit that is gathered whenever the group is used."""
        groups = list(groups)
        while True:
            split = next((group for group in groups if self._is_split(group)), None)
            if split is not None:
                self._join(split)
                continue
            circle = self._circle()
            if not circle:
                return
            self.units -= circle

    def home(self, name: str) -> Key:
        """Return the unit of the tensor ``name``: that of the innermost module above it in a unit, else ``ROOT``."""
        return self.homes([name])[name]

    def homes(self, names: Iterable[str]) -> dict[str, Key]:
        """Return the unit of each of ``names``."""
        unit_of = {module: unit for unit in self.units for module in unit}
        return {n: next((unit_of[m] for m in self._above(n) if m in unit_of), ROOT) for n in names}

    def order(self) -> list[Key]:
        """Return the units in the order that ``fully_shard`` needs: inner ones first, otherwise in module order."""
        rank = {module: place for place, module in enumerate(self._path_of)}
        left = sorted(self.units, key=lambda unit: min(rank[module] for module in unit))
        done: list[Key] = []
        while left:
            free = next(unit for unit in left if not any(self._is_inside(o, unit) for o in left if o is not unit))
            left.remove(free)
            done.append(free)
        return done

    def paths(self, unit: Key) -> tuple[str, ...]:
        """Return the first path of each module of ``unit``, in module order; the empty path is the root's."""
        return tuple(path for module, path in self._path_of.items() if module in unit) if unit else ("",)

    # -- merging and removing units -----------------------------------------------------------------------------------

    def _above(self, name: str) -> list[int]:
        """Return the ids of the modules above a tensor (or module), innermost first, without the root."""
        path, found = name.rpartition(".")[0], []
        while path:
            found.append(id(self._modules[path]))
            path = path.rpartition(".")[0]
        return found

    def _is_split(self, group: TiedNames) -> bool:
        """Return whether ``group`` lies in several units, or in one that is not gathered at one of its uses."""
        homes = set(self.homes(group.names).values())
        if len(homes) > 1:
            return True
        (unit,) = homes
        return unit != ROOT and any(not unit & set(stack) for stack in group.stacks)

    def _join(self, group: TiedNames) -> None:
        """Change the units so that one holds ``group``: merge those of its owners, or hoist it to an outer unit."""
        key = tuple(sorted(group.names))
        owners = {self._owner(name) for name in group.names}
        is_used_elsewhere = len(set(self.homes(group.names).values())) == 1
        if self.policy == "root" or is_used_elsewhere or key in self._tried or id(self.model) in owners:
            self._hoist(group, owners)
            return
        self._tried.add(key)
        outer = {
            owner
            for owner in owners
            if not all(
                set(self._above(name)) & (owners - {owner}) for name in group.names if self._owner(name) == owner
            )
        }
        for name in group.names:  # no unit may lie between a name and the outer module of its unit
            above = self._above(name)
            reach = max((place for place, module in enumerate(above) if module in outer), default=0)
            self.units -= {unit for unit in self.units if unit & set(above[:reach]) and not unit & outer}
        merged = {unit for unit in self.units if unit & outer}
        made = frozenset(outer).union(*merged)
        self.units = self.units - merged | {made}
        self.notes.append(f"{' = '.join(group.names)}: {describe_some(self.paths(made))} are one unit")

    def _hoist(self, group: TiedNames, owners: set[int]) -> None:
        """Remove the units below the innermost module that is above all names and runs at all uses."""
        chains = [self._above(name) for name in group.names]
        common = set.intersection(*map(set, [*chains, *group.stacks]))
        below = {module for chain in chains for module in takewhile(lambda one: one not in common, chain)}
        dropped = {unit for unit in self.units if unit & below}
        if not dropped:
            dropped = {unit for unit in self.units if any(unit & set(self._above(name)) for name in group.names)}
        self.notes.append(
            f"{' = '.join(group.names)}: moved to an outer unit, so {describe_some(self._labels(dropped))} are no units"
        )
        self.units -= dropped

    def _labels(self, units: set[Key]) -> tuple[str, ...]:
        """Return the paths of all modules of ``units``, in the order of their first modules."""
        return tuple(path for unit in sorted(units, key=self.paths) for path in self.paths(unit))

    def _owner(self, name: str) -> int:
        """Return the id of the innermost module above ``name`` that has a forward."""
        path = name.rpartition(".")[0]
        while path and type(self._modules[path]).forward is nn.Module.forward:  # ParameterList and other containers
            path = path.rpartition(".")[0]
        return id(self._modules[path])

    def _is_inside(self, inner: Key, outer: Key) -> bool:
        """Return whether a module of ``inner`` lies below one of ``outer``."""
        return any(self._outside[module] & outer for module in inner)

    def _circle(self) -> set[Key]:
        """Return two units each of which has a module inside the other; empty if there are none."""
        lists = sorted((unit for unit in self.units if len(unit) > 1), key=self.paths)  # the same on all ranks
        for one in lists:
            for other in lists:
                if one is not other and self._is_inside(one, other) and self._is_inside(other, one):
                    return {one, other}
        return set()
