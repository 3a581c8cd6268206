"""A storage map as an SVG document, and the HTML page around it, both self-contained: no script, no font, no link."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .drawing import Scale, cut, cut_end, describe_bytes
from .drawing.svg import CHARACTER, document, element, gaps, safe, style, words
from .facts import StorageGroup
from .rows import MapRow, rows_of

_HEIGHT, _LABEL, _BAR, _FACTS, _TOP = 20.0, 300.0, 300.0, 640.0, 96.0
_RAIL, _RAILS = 9.0, 4
_KEY = (
    ("parameter", "parameter"), ("buffer", "buffer"), ("tensor", "tensor"), ("part", "part of one (qdata, scale, ...)"),
    ("rest", "not reached"),
)  # fmt: skip


def draw(groups: Sequence[StorageGroup], title: str, limit: int | None = 300) -> str:
    """Return the storage map as an SVG document; at most ``limit`` different groups are drawn."""
    rows = rows_of(groups, limit)
    scale = Scale.of(row.total for row in rows)
    left = 12 + _RAIL * (1 + min(_RAILS, max((max(row.links) + 1 for row in rows if row.links), default=0)))
    x_bar = left + _LABEL + 118
    x_facts = x_bar + _BAR + 14
    width, height = x_facts + _FACTS, _TOP + _HEIGHT * max(len(rows), 1) + 16
    patterns = {name: gaps(name) for name in ("parameter", "buffer", "tensor", "part")}
    made = [
        element("defs", "".join(definition for definition, _ in patterns.values())),
        element("rect", width=width, height=height, klass="page"),
        words(12, 22, title, "strong"),
        *_key(12.0, 44.0),
        *_axis(scale, x_bar, height),
    ]
    is_banded = True
    for i, row in enumerate(rows):
        y = _TOP + i * _HEIGHT
        is_banded = is_banded != row.is_first
        if is_banded:
            made.append(element("rect", y=y, width=width, height=_HEIGHT, klass="band", opacity=0.75))
    for i, row in enumerate(rows):
        made.append(_row(row, _TOP + i * _HEIGHT, scale, (left, x_bar, x_facts), patterns))
    made += _links(rows, left)
    if not rows:
        made.append(words(12, _TOP + 14, "no tensors", "faint"))
    return document("".join(made), width, height, title)


def _row(
    row: MapRow, y: float, scale: Scale, columns: tuple[float, float, float], patterns: dict[str, tuple[str, str]]
) -> str:
    x_label, x_bar, x_facts = columns
    line = y + 14
    indent = 14 * row.depth
    times = f" x{row.count:,}" if row.count > 1 else ""
    shown = int((_LABEL - indent - 6) / CHARACTER) - len(times)
    made = [words(x_label + indent, line, cut(row.label, shown) + times, "strong" if row.is_first else None)]
    if row.nbytes is not None:
        made.append(words(x_bar - 52, line, describe_bytes(row.nbytes), None, "end"))
    if row.device and (row.nbytes is not None or row.is_first):
        made.append(words(x_bar - 8, line, cut(row.device, 6), "faint", "end"))
    if row.total > 0:
        made.append(_bar(row, y, scale, x_bar, patterns))
    shown = int(_FACTS / CHARACTER)
    made.append(words(x_facts, line, cut_end(row.facts, shown), "faint"))
    tooltip = "\n".join(part for part in (row.label, row.facts, row.note) if part)
    return element("g", element("title", safe(tooltip)) + "".join(made))


def _bar(row: MapRow, y: float, scale: Scale, x: float, patterns: dict[str, tuple[str, str]]) -> str:
    length = max(scale.length(row.total) * _BAR, 2.0)
    first, last = (min(at / row.total, 1.0) * length for at in (row.start, row.stop))
    size: dict[str, Any] = {"y": y + 4, "height": _HEIGHT - 8, "rx": 2}
    if row.is_frame:
        return element("rect", x=x, width=length, klass="rest", **size)
    whole = (
        "" if first == 0 and last == length else element("rect", x=x, width=length, klass="rest", opacity=0.35, **size)
    )
    if row.stop <= row.start:
        return whole
    size |= {"x": x + first, "width": max(last - first, 1.5)}
    if row.is_meta:
        return whole + element("rect", fill="none", stroke=f"var(--{row.colour})", stroke_dasharray="3 2", **size)
    if not row.is_dense:
        return whole + element("rect", fill=patterns[row.colour][1], stroke=f"var(--{row.colour})", **size)
    return whole + element("rect", klass=row.colour, **size)


def _links(rows: Sequence[MapRow], left: float) -> Iterable[str]:
    """Yield elements that draw each tie as a line beside its names."""
    members: dict[int, list[float]] = {}
    for i, row in enumerate(rows):
        for tie in row.links:
            members.setdefault(tie, []).append(_TOP + i * _HEIGHT + _HEIGHT / 2)
    for tie, heights in members.items():
        x = left - 8 - _RAIL * (tie % _RAILS)
        if len(heights) > 1:
            yield element("path", d=f"M{x:g} {min(heights):g}V{max(heights):g}", klass="link")
        for y in heights:
            yield element("path", d=f"M{x:g} {y:g}H{left - 3:g}", klass="link")
            yield element("circle", cx=x, cy=y, r=3, klass="tie")


def _key(x: float, y: float) -> Iterable[str]:
    for name, label in _KEY:
        yield element("rect", x=x, y=y - 10, width=12, height=12, rx=2, klass=name)
        yield words(x + 18, y, label, "faint")
        x += 36 + CHARACTER * len(label)
    yield element("rect", x=x, y=y - 10, width=12, height=12, rx=2, fill="url(#gaps-tensor)", stroke="var(--tensor)")
    yield words(x + 18, y, "with gaps", "faint")
    x += 36 + CHARACTER * 9
    yield element("rect", x=x, y=y - 10, width=12, height=12, rx=2, fill="none", stroke="var(--tensor)",
                  stroke_dasharray="3 2")  # fmt: skip
    yield words(x + 18, y, "no memory yet (meta)", "faint")
    x += 36 + CHARACTER * 20
    yield element("path", d=f"M{x:g} {y - 4:g}h14", klass="link")
    yield element("circle", cx=x, cy=y - 4, r=3, klass="tie")
    yield words(x + 22, y, "tied", "faint")


def _axis(scale: Scale, x: float, height: float) -> Iterable[str]:
    kind = "logarithmic" if scale.is_log else "linear"
    yield words(x, _TOP - 28, f"bytes of a storage ({kind}); inside a bar, positions are linear", "faint")
    for tick in scale.ticks:
        at = x + scale.length(tick) * _BAR
        yield element("path", d=f"M{at:.2f} {_TOP - 4:g}V{height - 12:g}", klass="rule")
        yield words(at, _TOP - 8, describe_bytes(tick), "faint", "middle")


_PAGE = (
    "body{margin:0;padding:20px 24px;background:var(--page);color:var(--ink);"
    "font:14px system-ui,-apple-system,'Segoe UI',sans-serif;line-height:1.45}"
    "h1{font-size:20px;margin:0 0 4px}h2{font-size:15px;margin:24px 0 6px}p{margin:0 0 12px;color:var(--faint)}"
    ".wide{overflow-x:auto;border:1px solid var(--line);border-radius:6px}.wide svg{display:block}"
    "table{border-collapse:collapse;font:12px ui-monospace,Menlo,Consolas,monospace}"
    "td,th{text-align:left;padding:2px 14px 2px 0;vertical-align:top;border-bottom:1px solid var(--line);"
    "overflow-wrap:anywhere}th{color:var(--faint);font-weight:500}details{margin-top:20px}summary{cursor:pointer}"
    "td.n{text-align:right;white-space:nowrap}ul{margin:0;padding-left:18px;overflow-wrap:anywhere}"
)


def page(title: str, summary: str, sections: Iterable[tuple[str, str]]) -> str:
    """Return an HTML page; ``sections`` are pairs of a heading and markup."""
    body = "".join((element("h2", safe(heading)) if heading else "") + markup for heading, markup in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{safe(title)}</title><style>{style()}{_PAGE}</style></head><body>"
        f"<h1>{safe(title)}</h1><p>{safe(summary)}</p>{body}</body></html>\n"
    )


def wide(svg: str) -> str:
    """Wrap a picture so that it scrolls horizontally if the page is too narrow."""
    return element("div", svg, klass="wide")


def bullets(lines: Iterable[str]) -> str:
    """Return ``lines`` as an HTML list."""
    return element("ul", "".join(element("li", safe(line)) for line in lines)) or "<p>nothing</p>"


def table(groups: Sequence[StorageGroup]) -> str:
    """Return a collapsed table of every name with its facts, as text that can be searched and copied."""
    head = "".join(
        element("th", safe(text))
        for text in ("name", "kind", "dtype", "shape", "stride", "device", "bytes", "decoded", "scheme", "shares with")
    )
    rows = []
    for group in groups:
        partners = {name: tie for tie in group.ties for name in tie.names}
        for held in group.tensors:
            for name in held.names:
                tie = partners.get(name)
                others = "" if tie is None else ", ".join(other for other in tie.names if other != name)
                cells = (name, held.kind, held.dtype, str(list(held.shape)), str(list(held.stride)), held.device)
                counts = (f"{held.nbytes:,}", f"{held.decoded:,}" if held.decoded else "")
                rows.append(
                    "<tr>"
                    + "".join(f"<td>{safe(cell)}</td>" for cell in cells)
                    + "".join(f'<td class="n">{cell}</td>' for cell in counts)
                    + f"<td>{safe(held.scheme)}</td><td>{safe(others)}</td></tr>"
                )
    return f"<details><summary>Every name</summary><table><tr>{head}</tr>{''.join(rows)}</table></details>"
