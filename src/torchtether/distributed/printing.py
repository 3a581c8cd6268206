"""A unit plan in words and columns."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .units import Unit, UnitPlan

_SHOWN = 12


def said(plan: UnitPlan) -> str:
    """The plan as ``print`` shows it: ranks, units, what is gathered when, peaks, and what to look at."""
    world = f"{plan.ranks} ranks" + (f" x {plan.replicas} replicas" if plan.replicas > 1 else "")
    total = sum(parameter.held_bytes(0, 1) for parameter in plan.parameters)
    lines = [f"{len(plan.units)} units over {world}, {_bytes(total)} of parameters"]
    first, last = plan.held_bytes(0), plan.held_bytes(plan.ranks - 1)
    spread = _bytes(first) if first == last else f"{_bytes(first)} on the first, {_bytes(last)} on the last"
    lines.append(f"each rank: {spread}, {_bytes(plan.shard_bytes)} with padding; buffers {_bytes(plan.buffer_bytes)}")
    lines += _table(plan)
    peaks = plan.peaks()
    lines.append(f"peak in forward:  {_bytes(peaks.forward)} beside the shards, at {peaks.forward_at or 'root'}")
    lines.append(f"peak in backward: {_bytes(peaks.backward)} beside the shards, in {peaks.backward_at or 'root'}")
    lines.append(
        "  (parameters and gradients in their own dtypes, decoded values; activations and optimizer states come on top)"
    )
    if not plan.is_traced:
        lines.append("no forward was traced: give inputs= to find tied weights that are used outside of their modules")
    for title, found in (("tied", map(str, plan.ties)), ("note", plan.notes)):
        lines += _few(title, list(found))
    lines += _few("warning", list(plan.warnings)) + _few("FAULT", list(plan.faults))
    return "\n".join(lines)


def _table(plan: UnitPlan) -> list[str]:
    rows = [("unit", "per rank", "gathered", "when")]
    for (size, shard, when), units in groupby(plan.units, key=lambda unit: _look(plan, unit)):
        found = list(units)
        label = found[0].label if len(found) == 1 else f"{found[0].label} ... {found[-1].label} ({len(found)} units)"
        rows.append((_cut(label), _bytes(shard), _bytes(size), when))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [f"  {row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip() for row in rows]


def _look(plan: UnitPlan, unit: Unit) -> tuple[int, int, str]:
    shard = sum(parameter.shard_bytes(plan.ranks) for parameter in unit.parameters)
    if unit.modules == ("",):
        when = "at the start of forward, until the end of backward"
    elif len(unit.modules) > 1:
        when = "from the first of its modules to the last, again in backward"
    else:
        when = "for its forward, again for its backward"
    return unit.cost(plan.ranks).gathered, shard, when


def _few(title: str, found: list[str]) -> list[str]:
    more = [f"{title}: and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return [f"{title}: {line}" for line in found[:_SHOWN]] + more


def _cut(label: str) -> str:
    return label if len(label) <= 60 else label[:40] + " ... " + label[-15:]


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
