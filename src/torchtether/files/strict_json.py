"""A strict parser for untrusted JSON: no duplicate keys, no floats, no NaN, and limits on every size."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from itertools import chain
from reprlib import Repr
from typing import Any, NoReturn

import numpy as np

from ..errors import CheckpointError

VALUES = 2**21
"""The most values in one text: enough for a quarter of a million tensors. Each value takes some hundred bytes."""

_DEPTH = 32
_NAME_LIMIT = 2**16  # characters of a key, which errors repeat
_PIECE = 2**16
_COUNT_LIMIT = 2**48
_UNMARKED = bytes(byte for byte in range(256) if byte not in b'"{}[],:')

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlist = _SHORT.maxtuple = 10
_SHORT.maxlevel = 3  # a pickle can nest one list ten times in another, and so on
_HALVES = re.compile(r"\\u[dD][89a-fA-F]")


def parse_object(
    text: bytes | str, *, name: str, what: str, floats: bool = False, values: int = VALUES, widest: int = VALUES
) -> dict[str, Any]:
    """Return the JSON object in ``text``; errors name the file ``name`` and the place ``what`` in it.

    Raises CheckpointError for anything but one object in UTF-8 with unique keys; for fractions unless ``floats``;
    for NaN and infinities always; and, before parsing, for more than ``values`` values, or more than ``widest`` in one
    of its direct objects and lists.

    >>> parse_object('{"a": [1, null]}', name="f", what="header")
    {'a': [1, None]}
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(f"the {what} holds the key {short_repr(twice)} twice", name=name)
        for key in made:
            if len(key) > _NAME_LIMIT:
                check_length(key, name=name)
        return made

    def refuse(word: str) -> NoReturn:
        raise CheckpointError(f"the {what} holds the number {word[:40]}, which is not allowed there", name=name)

    def finite(word: str) -> float:
        return float(word) if math.isfinite(float(word)) else refuse(word)

    try:
        pairs = check_extent(text if isinstance(text, bytes) else text.encode(), values, widest, name=name, what=what)
        words = text.decode("utf-8") if isinstance(text, bytes) else text
        read = partial(json.loads, parse_constant=refuse, parse_float=finite if floats else refuse)
        found = read(words)
        if not _is_unique(found, pairs):
            found = read(words, object_pairs_hook=unique)
        if _HALVES.search(words):  # an escape can be half a surrogate pair, which cannot be encoded
            json.dumps(found, ensure_ascii=False).encode()
    except CheckpointError:
        raise
    except UnicodeDecodeError as error:
        raise CheckpointError(f"the {what} is not UTF-8: {error.reason} at byte {error.start}", name=name) from None
    except UnicodeEncodeError as error:
        raise CheckpointError(f"the {what} holds text that is not Unicode: {error.reason}", name=name) from None
    except RecursionError:
        raise CheckpointError(f"the {what} is nested too deeply", name=name) from None
    except ValueError as error:  # a syntax error, or an integer of thousands of digits
        raise CheckpointError(f"the {what} is not JSON: {error}", name=name) from None
    if not isinstance(found, dict):
        raise CheckpointError(f"the {what} is a {type(found).__name__}, not an object", name=name)
    return found


def _is_unique(found: Any, pairs: int) -> bool:
    """Return whether ``found`` has all ``pairs`` pairs of its text, so no duplicates, under keys of allowed length.

    This takes a third of the time of a check in an ``object_pairs_hook``. Objects nested more deeply than in a header
    are not counted, so that the result is ``False`` if there are any.
    """
    if type(found) is not dict:
        return False
    inner = [value for value in found.values() if type(value) is dict]
    if len(found) + sum(map(len, inner)) != pairs:
        return False
    return max(map(len, chain(found, chain.from_iterable(inner))), default=0) <= _NAME_LIMIT


def check_extent(text: bytes, limit: int, widest: int, *, name: str, what: str) -> int:
    """Return the number of key-value pairs in ``text``; raise CheckpointError if it exceeds the limits.

    Writers call it, too, for their own text. It counts without making values: a list takes two bytes in a file and
    sixty in memory. Counts after a syntax error may be wrong, but the parser stops there.
    """
    if b"\\" in text:
        text = text.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")  # the remaining quotes begin or end a string
    values = pairs = depth = is_inside = width = 0
    for at in range(0, len(text), _PIECE):
        marks = np.frombuffer(text[at : at + _PIECE].translate(None, _UNMARKED), np.uint8)
        inside = np.bitwise_xor.accumulate((marks == ord('"')).view(np.uint8)) ^ is_inside
        is_inside = int(inside[-1]) if len(inside) else is_inside
        outside = marks[inside == 0]
        opens, commas = (outside == ord("{")) | (outside == ord("[")), outside == ord(",")
        closes = (outside == ord("}")) | (outside == ord("]"))
        levels = depth + np.cumsum(opens.view(np.int8) - closes.view(np.int8), dtype=np.int32)
        values += int(np.count_nonzero(opens)) + int(np.count_nonzero(commas))
        pairs += int(np.count_nonzero(outside == ord(":")))
        if len(levels):
            depth = int(levels[-1])
            if levels.max() > _DEPTH:
                raise CheckpointError(f"the {what} is nested too deeply", name=name)
            counts = width + np.cumsum(commas & (levels == 2))
            ends = np.concatenate(([0], counts[levels < 2], counts[-1:]))
            width = int(counts[-1] - ends[-2]) if depth >= 2 else 0
            if max(np.diff(ends).max(), 0) >= widest:
                raise CheckpointError(f"the {what} holds more than {widest} values in one object or list", name=name)
        if values > limit:
            raise CheckpointError(f"the {what} holds more than {limit} values", name=name)
    return pairs


def check_length(key: str, *, name: str) -> None:
    """Raise CheckpointError if ``key``, of the file ``name``, is too long."""
    if len(key) > _NAME_LIMIT:
        raise CheckpointError(f"{short_repr(key)} has {len(key)} characters, more than {_NAME_LIMIT}", name=name)


def short_repr(value: Any) -> str:
    """Return the repr of ``value`` for an error message, shortened if it is long.

    >>> short_repr("a"), len(short_repr("x" * 1000))
    ("'a'", 80)
    """
    return _SHORT.repr(value)


def is_count(value: Any) -> bool:
    """Return whether ``value`` is an int (not a bool) that can be a size, a stride or an offset.

    >>> is_count(3), is_count(True), is_count(-1)
    (True, False, False)
    """
    return type(value) is int and 0 <= value < _COUNT_LIMIT


def are_counts(values: Any) -> bool:
    """Return whether ``values`` is a list of integers that ``is_count`` accepts.

    >>> are_counts([3, 0]), are_counts([3, None]), are_counts(3)
    (True, False, False)
    """
    if type(values) is not list:
        return False
    for value in values:  # noqa: SIM110 - a header calls this half a million times; a generator takes twice as long
        if type(value) is not int or not 0 <= value < _COUNT_LIMIT:
            return False
    return True
