"""A storage map as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from .drawing import Scale, clean, cut_end, describe_bytes, padded, width_of
from .facts import StorageGroup
from .rows import MapRow, rows_of

_BAR = 20
_WIDTH = 120
_NARROW = 100


def lines_of(groups: Sequence[StorageGroup], limit: int | None = 40, width: int = _WIDTH) -> list[str]:
    """Return one line for each row: bytes, device, bar, name and facts; none is longer than ``width`` columns."""
    rows = rows_of(groups, limit)
    scale = Scale.of(row.total for row in rows)
    devices = max((len(row.device) for row in rows), default=0)
    bar = _BAR if width >= _NARROW else _BAR // 2
    before = 10 + devices + 2 + bar + 2
    label = max((width_of(_label(row)) for row in rows), default=0)
    label = min(label, max(20, (width - before) * (2 if width >= _NARROW else 3) // 5))
    return [_line(row, scale, bar, devices, label, width) for row in rows]


def _line(row: MapRow, scale: Scale, bar: int, devices: int, label: int, width: int) -> str:
    size = "" if row.nbytes is None else describe_bytes(row.nbytes)
    facts = row.facts + (f", {row.note}" if row.note else "")
    line = "  ".join((padded(size, 8, right=True), padded(row.device, devices), _bar(row, scale, bar),
                      padded(_label(row), label), clean(facts)))  # fmt: skip
    return cut_end(line.rstrip(), width)


def _label(row: MapRow) -> str:
    times = f" x{row.count:,}" if row.count > 1 else ""
    return f"{'  ' * row.depth}{clean(row.label)}{times}"


def _bar(row: MapRow, scale: Scale, width: int) -> str:
    if row.total <= 0:
        return " " * width
    length = max(1, round(scale.length(row.total) * width))
    if row.is_frame:
        return ("░" * length).ljust(width)
    first = min(int(row.start * length / row.total), length - 1)
    last = max(first + 1, min(length, -(-row.stop * length // row.total))) if row.stop > row.start else first
    sign = "▒" if row.is_meta or not row.is_dense else "█"
    return (" " * first + sign * (last - first)).ljust(width)
