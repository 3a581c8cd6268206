"""Self-contained SVG: elements as text, and colours for light and dark pages."""

from __future__ import annotations

from html import escape

from .text import clean

FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
CHARACTER = 6.7
"""Pixels of one column in the font at 11 pixels; a little more than most fonts take."""

_LIGHT = {
    "page": "#ffffff", "ink": "#1f2430", "faint": "#6b7280", "line": "#d9dde4", "band": "#f5f6f8",
    "parameter": "#3b73c8", "buffer": "#2f9070", "tensor": "#5d6b82", "part": "#8a5cc2", "rest": "#e4e7ec",
    "tie": "#c2410c", "second": "#d08a1d",
}  # fmt: skip
_DARK = {
    "page": "#14171c", "ink": "#e6e8ec", "faint": "#98a1b0", "line": "#333a45", "band": "#1b1f26",
    "parameter": "#6ea0ee", "buffer": "#55bd98", "tensor": "#93a1b8", "part": "#b58be6", "rest": "#2b313b",
    "tie": "#fb923c", "second": "#e5b052",
}  # fmt: skip
COLOURS = tuple(_LIGHT)


def style() -> str:
    """Return the style of all pictures, with the colours as CSS variables for light and dark pages."""

    def variables(colours: dict[str, str]) -> str:
        return "".join(f"--{name}:{value};" for name, value in colours.items())

    fills = "".join(f".{name}{{fill:var(--{name})}}" for name in COLOURS)
    return (
        f":root{{color-scheme:light dark;{variables(_LIGHT)}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{variables(_DARK)}}}}}"
        f"svg text{{font:11px {FONT};fill:var(--ink);white-space:pre}}svg text.faint{{fill:var(--faint)}}"
        f"svg text.strong{{font-weight:600}}{fills}"
        ".rule{stroke:var(--line);fill:none}.link{stroke:var(--tie);stroke-width:1.5;fill:none}"
        ".curve{fill:none;stroke-width:1.5;stroke-linejoin:round}"
    )


def safe(text: str) -> str:
    """Escape markup and unprintable characters of ``text`` for XML."""
    return escape(clean(text), quote=True)


def element(tag: str, content: str = "", **attributes: object) -> str:
    """Return an element; ``content`` is markup, attributes are escaped. ``klass`` means ``class``, ``_`` means ``-``.

    >>> element("rect", x=1.5, klass="part", stroke_width=2)
    '<rect x="1.5" class="part" stroke-width="2"/>'
    """
    given = "".join(
        f' {"class" if key == "klass" else key.replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{given}>{content}</{tag}>" if content else f"<{tag}{given}/>"


def _value(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else safe(str(value))


def words(x: float, y: float, text: str, klass: str | None = None, anchor: str | None = None) -> str:
    """Return one line of text at ``x`` with the base line ``y``; ``anchor`` is the SVG ``text-anchor``."""
    return element("text", safe(text), x=float(x), y=float(y), klass=klass, text_anchor=anchor)


def document(content: str, width: float, height: float, label: str) -> str:
    """Return ``content`` as an SVG document."""
    return element(
        "svg",
        element("title", safe(label)) + element("style", style()) + content,
        xmlns="http://www.w3.org/2000/svg",
        width=float(width),
        height=float(height),
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=label,
    )


def gaps(name: str) -> tuple[str, str]:
    """Return the definition and the url of a hatched fill in the colour ``name``, for memory that is partly covered."""
    inner = element("rect", width=6, height=6, klass=name, opacity=0.25) + element(
        "path", d="M0 6 6 0M-1 1 1 -1M5 7 7 5", stroke=f"var(--{name})", stroke_width=1.2
    )
    return (
        element("pattern", inner, id=f"gaps-{name}", width=6, height=6, patternUnits="userSpaceOnUse"),
        f"url(#gaps-{name})",
    )
