"""The unit plan, and its description as text and a table."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import TieError
from ..pictures.drawing import cut, describe_bytes
from ..weights.spec import Tie
from .grouping import Policy
from .memory import Cost, Peaks, UnitParameter, peaks

_SHOWN = 12


@dataclass(frozen=True)
class Unit:
    """Hold modules that FSDP2 gathers and frees together, by path (``""`` is the root), and their parameters."""

    modules: tuple[str, ...]
    parameters: tuple[UnitParameter, ...]

    @property
    def label(self) -> str:
        """Return the paths of its modules as text; ``root`` for the root."""
        return "[" + ", ".join(self.modules) + "]" if len(self.modules) > 1 else self.modules[0] or "root"

    def cost(
        self,
        ranks: int,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        *,
        device: str = "cpu",
    ) -> Cost:
        """Return the bytes that gathering and reducing the unit takes on a type of device."""
        reduce_dtype, held = reduce_dtype or param_dtype, self.parameters
        return Cost(
            label=self.label,
            gathered=sum(one.gathered_bytes(ranks, param_dtype) for one in held),
            cast=sum(one.cast_bytes(ranks, param_dtype) for one in held),
            grads=sum(one.grad_bytes(param_dtype) for one in held),
            meeting=max((2 * one.grad_bytes(param_dtype) for one in held if one.uses > 1), default=0),
            scattered=sum(one.grad_shard_bytes(ranks, reduce_dtype) * ranks for one in held),
            shards=sum(one.grad_shard_bytes(ranks) for one in held),
            decoded=max((one.decoded_bytes(param_dtype, device) for one in held), default=0),
            stays=len(self.modules) > 1 or self.modules == ("",),
        )


@dataclass(frozen=True)
class UnitPlan:
    """Hold the modules that ``shard`` passes to ``fully_shard``, in order, with their costs; made by ``plan_units``.

    plan.units                    inner units first, the root last
    plan.faults, plan.warnings    lines of text; ``shard`` refuses a plan with faults
    plan.ranks, plan.replicas     how many ranks share the rows, and how many such groups there are
    plan.device                   the type of device that the peaks are for: the mesh's, or the parameters'
    plan.held_bytes(rank)         bytes of parameters that a rank holds, without padding
    plan.peaks()                  the peak bytes beside the shards, in forward and in backward
    print(plan)
    """

    units: tuple[Unit, ...]
    ties: tuple[Tie, ...]
    ranks: int
    replicas: int
    policy: Policy
    faults: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    buffer_bytes: int
    is_traced: bool
    device: str = "cpu"
    mesh: DeviceMesh | None = None
    _model: weakref.ref[nn.Module] | None = field(default=None, repr=False, compare=False)
    _single: tuple[str, ...] = field(default=(), repr=False)

    @property
    def parameters(self) -> tuple[UnitParameter, ...]:
        """Return the parameters of all units."""
        return tuple(parameter for unit in self.units for parameter in unit.parameters)

    def unit_of(self, name: str) -> Unit:
        """Return the unit that holds the parameter ``name``, which may be any of its names. Raises KeyError."""
        for unit in self.units:
            if any(name in (*parameter.names, *parameter.views) for parameter in unit.parameters):
                return unit
        raise KeyError(name)

    def held_bytes(self, rank: int) -> int:
        """Return the bytes of parameters that ``rank`` of the sharding ranks holds, without padding."""
        return sum(parameter.held_bytes(rank, self.ranks) for parameter in self.parameters)

    @property
    def shard_bytes(self) -> int:
        """Return the bytes that every rank allocates for its parameters, padding included."""
        return sum(parameter.shard_bytes(self.ranks) for parameter in self.parameters)

    def peaks(
        self,
        *,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
    ) -> Peaks:
        """Return the peak bytes of gathered parameters, decoded values and whole gradients.

        The dtypes are those of FSDP2's ``MixedPrecisionPolicy``. On CUDA products decode larger pieces than elsewhere
        (``plan.device``).
        """
        costs = [unit.cost(self.ranks, param_dtype, reduce_dtype, device=self.device) for unit in self.units]
        return peaks(costs, keeps=not reshard_after_forward)

    def fsdp1_policy(self) -> Callable[..., bool]:
        """Return a policy for ``FullyShardedDataParallel(model, auto_wrap_policy=...)`` that keeps tied groups whole.

        FSDP1 wraps one module at a time, so modules that form one unit here are part of their enclosing unit there.
        """
        model = self._model() if self._model is not None else None
        if model is None:
            raise TieError("the model of this plan does not exist any more", fix="Call plan_units again.")
        views = [name for parameter in self.parameters for name in parameter.views]
        if views:
            raise TieError(
                f"is a view of a parameter in unit {self.unit_of(views[0]).label}, and FSDP1 would separate the two",
                name=views[0],
                fix="Use tt.distributed.shard, or call tt.untie.",
            )
        modules = dict(model.named_modules(remove_duplicate=False))
        wrapped = {id(modules[path]) for path in self._single}

        def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int = 0, **others: Any) -> bool:
            return True if recurse else id(module) in wrapped

        return policy

    def __str__(self) -> str:
        return describe_plan(self)


def describe_plan(plan: UnitPlan) -> str:
    """Return the plan as ``print`` shows it: ranks, units, when each is gathered, peaks, notes, warnings and faults."""
    world = f"{plan.ranks} ranks" + (f" x {plan.replicas} replicas" if plan.replicas > 1 else "")
    total = sum(parameter.held_bytes(0, 1) for parameter in plan.parameters)
    lines = [f"{len(plan.units)} units over {world}, {describe_bytes(total)} of parameters"]
    held = dict.fromkeys(describe_bytes(plan.held_bytes(rank)) for rank in (0, plan.ranks - 1))
    spread = " on the first, ".join(held) + (" on the last" if len(held) > 1 else "")
    padded, buffers = describe_bytes(plan.shard_bytes), describe_bytes(plan.buffer_bytes)
    lines.append(f"each rank: {spread}, {padded} with padding; buffers {buffers}")
    lines += _table(plan)
    peaks = plan.peaks()
    forward, backward = describe_bytes(peaks.forward), describe_bytes(peaks.backward)
    lines.append(f"peak in forward:  {forward} beside the shards, at {peaks.forward_at or 'root'}")
    lines.append(f"peak in backward: {backward} beside the shards, in {peaks.backward_at or 'root'}")
    lines.append(
        "  (parameters and gradients in their own dtypes, decoded values; activations and optimizer states come on top)"
    )
    if not plan.is_traced:
        lines.append("no forward was traced: give inputs= to find tied weights that are used outside of their modules")
    for title, found in (("tied", map(str, plan.ties)), ("note", plan.notes)):
        lines += _first_lines(title, list(found))
    lines += _first_lines("warning", list(plan.warnings)) + _first_lines("FAULT", list(plan.faults))
    return "\n".join(lines)


def _table(plan: UnitPlan) -> list[str]:
    """Return the lines of the table of units; equal consecutive units share a line."""
    rows = [("unit", "per rank", "gathered", "when")]
    for (size, shard, when), units in groupby(plan.units, key=lambda unit: _unit_row(plan, unit)):
        found = list(units)
        label = found[0].label if len(found) == 1 else f"{found[0].label} ... {found[-1].label} ({len(found)} units)"
        rows.append((cut(label, 60), describe_bytes(shard), describe_bytes(size), when))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [f"  {row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip() for row in rows]


def _unit_row(plan: UnitPlan, unit: Unit) -> tuple[int, int, str]:
    """Return the bytes gathered, the bytes of a shard, and when ``unit`` is gathered."""
    shard = sum(parameter.shard_bytes(plan.ranks) for parameter in unit.parameters)
    if unit.modules == ("",):
        when = "at the start of forward, until the end of backward"
    elif len(unit.modules) > 1:
        when = "from the first of its modules to the last, again in backward"
    else:
        when = "for its forward, again for its backward"
    return unit.cost(plan.ranks).gathered, shard, when


def _first_lines(title: str, found: list[str]) -> list[str]:
    """Return a line with ``title`` for each of the first texts of ``found``, and how many more there are."""
    more = [f"{title}: and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return [f"{title}: {line}" for line in found[:_SHOWN]] + more
