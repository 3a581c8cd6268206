"""Print tables as text: one line a row into a pipe, at most the width of a terminal, names always whole."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest

from ..pictures.drawing import clean, padded, width_of, wrapped

_LAST = 20
"""The minimal width of the last column on a terminal."""


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print columns side by side. Names, in the first column, are never cut, because users copy them.

    Nothing is cut or wrapped in a pipe or a file. On a narrow terminal, a long name has a line of its own above the
    other cells, and the last cell wraps. Control characters are escaped.
    """
    rows = [tuple(map(clean, row)) for row in rows]
    names, *middle, last = (max(map(width_of, column)) for column in zip(*rows, strict=True))
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    between = sum(width + 2 for width in middle) + 2
    names = min(names, max(limit - between - min(last, _LAST), 8))
    for name, *cells, words in rows:
        if width_of(name) > names:
            print(name)
            name = ""
        before = "  ".join(map(padded, (name, *cells), (names, *middle))) + "  "
        for i, line in enumerate(wrapped(words, max(limit - names - between, _LAST))):
            print(f"{before if i == 0 else ' ' * (names + between)}{line}".rstrip())


def print_wrapped(rows: Sequence[tuple[str, ...]], width: int = 80) -> None:
    """Print columns side by side in at most ``width`` columns of text; cells after the first one wrap.

    >>> print_wrapped([("", "ours"), ("tie", "kept under both of its names")], 20)
         ours
    <BLANKLINE>
    tie  kept under both
         of its names
    """
    first = max(len(row[0]) for row in rows)
    each = (width - first) // (len(rows[0]) - 1) - 2
    for i, (label, *cells) in enumerate(rows):
        for start, *lines in zip_longest([label], *(textwrap.wrap(cell, each) for cell in cells), fillvalue=""):
            print("  ".join((start.ljust(first), *(line.ljust(each) for line in lines))).rstrip())
        if i == 0:
            print("")
