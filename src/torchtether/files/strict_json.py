"""JSON from strangers, read strictly: no duplicate keys, no floats, no NaN, no bottomless nesting."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from ..errors import CheckpointError


def parse_object(text: bytes | str, *, name: str, what: str, floats: bool = False) -> dict[str, Any]:
    """The JSON object in ``text``; ``name`` is the file and ``what`` the place in it that an error is about.

    Raises CheckpointError for anything but one object in UTF-8 with unique keys; for fractions unless ``floats``;
    for NaN and infinities always.

    >>> parse_object('{"a": [1, null]}', name="f", what="header")
    {'a': [1, None]}
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(f"the {what} holds the key {twice!r} twice", name=name)
        return made

    def refuse(word: str) -> NoReturn:
        raise CheckpointError(f"the {what} holds the number {word[:40]}", name=name)

    def finite(word: str) -> float:
        return float(word) if math.isfinite(float(word)) else refuse(word)

    try:
        words = text.decode("utf-8") if isinstance(text, bytes) else text
        found = json.loads(
            words, object_pairs_hook=unique, parse_constant=refuse, parse_float=finite if floats else refuse
        )
    except CheckpointError:
        raise
    except UnicodeDecodeError as error:
        raise CheckpointError(f"the {what} is not UTF-8: {error.reason} at byte {error.start}", name=name) from None
    except RecursionError:
        raise CheckpointError(f"the {what} is nested too deeply", name=name) from None
    except ValueError as error:  # a syntax error, or an integer of thousands of digits
        raise CheckpointError(f"the {what} is not JSON: {error}", name=name) from None
    if not isinstance(found, dict):
        raise CheckpointError(f"the {what} is a {type(found).__name__}, not an object", name=name)
    return found


def is_count(value: Any) -> bool:
    """Whether ``value`` is an integer that can be a size, a stride or an offset (``True`` is not).

    >>> is_count(3), is_count(True), is_count(-1)
    (True, False, False)
    """
    return type(value) is int and 0 <= value < 2**48
