"""Tables as text: whole in a pipe, no wider than the terminal on one."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest

from ..pictures.drawing import clean, cut_end


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print columns side by side.

    Into a pipe or a file nothing is cut, because names go into other programs. On a terminal long lines lose their end.
    No cell moves the cursor.
    """
    rows = [tuple(map(clean, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        print(line if limit is None else cut_end(line, limit))


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
