"""A storage map as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .drawing import Scale, clean, describe_bytes, padded, width_of, wrapped
from .facts import StorageGroup
from .rows import MapRow, rows_of

_BAR = 20
_WIDTH = 120
_NARROW = 100


def lines_of(groups: Sequence[StorageGroup], limit: int | None = 40, width: int = _WIDTH) -> list[str]:
    """Return each row as a line of bytes, device, bar, name and facts, within ``width`` columns.

    Names and facts are not shortened: if they do not fit beside each other, the facts follow on lines of their own,
    and the row's note (the place in a file) is omitted.
    """
    rows = rows_of(groups, limit)
    scale = Scale.of(row.total for row in rows)
    devices = max((len(row.device) for row in rows), default=0)
    bar = _BAR if width >= _NARROW else _BAR // 2
    room = width - (10 + devices + 2 + bar + 2)
    label = max((width_of(_label(row)) for row in rows if width_of(_label(row)) <= room * 3 // 5), default=0)
    return [line for row in rows for line in _lines(row, scale, bar, devices, label, room)]


def _lines(row: MapRow, scale: Scale, bar: int, devices: int, label: int, room: int) -> Iterator[str]:
    size = "" if row.nbytes is None else describe_bytes(row.nbytes)
    before = f"{padded(size, 8, right=True)}  {padded(row.device, devices)}  {_bar(row, scale, bar)}  "
    facts, indent = clean(row.facts), "  " * (row.depth + 2)
    name = _label(row) + " " * (label - width_of(_label(row)))
    whole = [f"{name}  {facts}{clean(f', {row.note}' if row.note else '')}", f"{name}  {facts}"]
    lines = [line for line in whole if width_of(line) <= room][:1]
    if not lines:
        lines = [*wrapped(_label(row), room), *(f"{indent}{line}" for line in wrapped(facts, room - len(indent)))]
    yield from (f"{before if i == 0 else ' ' * len(before)}{line}".rstrip() for i, line in enumerate(lines))


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
