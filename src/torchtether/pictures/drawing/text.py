"""Untrusted text made safe to print: without control characters, and fitted to columns."""

from __future__ import annotations

import unicodedata


def clean(text: str) -> str:
    """Escape unprintable characters of ``text``, which could move the cursor, break lines or make invalid XML.

    >>> clean("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def width_of(text: str) -> int:
    """Return the columns that ``text`` takes in a terminal: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def cut(text: str, width: int) -> str:
    """Shorten ``text`` to ``width`` columns in its middle, because names differ most at the end.

    >>> cut("model.layers.31.mlp.down_proj.weight", 20)
    'model.…n_proj.weight'
    """
    if width_of(text) <= width:
        return text
    kept = max(width - 1, 0)
    head, tail = _first(text, kept // 3), _first(text[::-1], kept - kept // 3)[::-1]
    return f"{head}…{tail}" if width else ""


def cut_end(line: str, width: int) -> str:
    """Shorten ``line`` to ``width`` columns at its end."""
    return line if width_of(line) <= width else _first(line, width - 1) + "…"


def wrapped(text: str, width: int) -> list[str]:
    """Return ``text`` in one or more lines of at most ``width`` columns, broken at spaces if possible.

    >>> wrapped("bfloat16 [64, 64], frozen", 12)
    ['bfloat16', '[64, 64],', 'frozen']
    """
    lines = []
    while width_of(text) > width:
        taken = max(len(_first(text, width)), 1)
        space = text.rfind(" ", 0, taken + 1)
        lines.append(text[: space if space > 0 else taken].rstrip())
        text = text[space if space > 0 else taken :].lstrip()
    return [*lines, text]


def _first(text: str, width: int) -> str:
    used, taken = 0, 0
    for c in text:
        used += width_of(c)
        if used > width:
            break
        taken += 1
    return text[:taken]


def padded(text: str, width: int, *, right: bool = False) -> str:
    """Return ``text`` in exactly ``width`` columns."""
    text = cut(text, width)
    spaces = " " * (width - width_of(text))
    return spaces + text if right else text + spaces


def describe_bytes(count: float) -> str:
    """Return a number of bytes in B, kB, MB or GB.

    >>> describe_bytes(2_469_606_400)
    '2.47 GB'
    """
    for unit in ("B", "kB", "MB"):
        if abs(count) < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
