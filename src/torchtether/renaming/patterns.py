"""Regexes over names and the replacements of their matches: functions to check and to invert them."""

from __future__ import annotations

import re

from ..errors import RuleError

NUMBER = "{}"
"""The place in a target for the number of a piece."""

TURN_BY_HAND = "Write the rule for the other direction yourself."

_REFERENCE = re.compile(r"\\(?:g<(\w+)>|(\d+))")
_TOKEN = re.compile(
    r"\\(?P<escaped>[^A-Za-z0-9])|(?P<group>\((?!\?[^P])(?:\\.|[^()\\])*\))|(?P<plain>[^\\()\[\]{}*+?|^$])"
)
"""A literal, or a group without nested groups: the tokens of a pattern that can be inverted.

An unescaped dot counts as the dot of a name, because people write it so.
"""


def check_pattern(rule: object, pattern: str, target: str) -> None:
    """Raise RuleError if ``pattern`` is not a regex, or ``target`` cannot replace its matches."""
    for text in (pattern, target):
        if not isinstance(text, str):
            raise RuleError(f"{text!r:.40} is not text", name=type(rule).__name__, fix="Give a regex and a name.")
    try:
        re.compile(pattern).sub(target, "")
    except (re.error, TypeError, IndexError) as error:
        raise RuleError(f"{pattern!r} -> {target!r}: {error}", name=type(rule).__name__) from None


def check_dims(rule: object, field: str, dims: tuple[object, ...]) -> None:
    """Raise RuleError unless all ``dims``, which are the ``field`` of ``rule``, are ints."""
    for dim in dims:
        if type(dim) is not int:
            raise RuleError(f"{field}: {dim!r:.40} is not an int", name=type(rule).__name__, fix="Give 0 or 1, say.")


def replaced(found: re.Match[str], target: str) -> str:
    """Return the name with the match ``found`` replaced by ``target``."""
    return found.string[: found.start()] + found.expand(target) + found.string[found.end() :]


def left_out(pattern: str, target: str) -> list[int]:
    """Return the groups of ``pattern`` that ``target`` does not use."""
    compiled = re.compile(pattern)
    used = {_number(found, compiled) for found in _REFERENCE.finditer(target)}
    return [i for i in range(1, compiled.groups + 1) if i not in used]


def _number(reference: re.Match[str], pattern: re.Pattern[str]) -> int:
    name = reference[1] or reference[2]
    return int(name) if name.isdecimal() else pattern.groupindex[name]


def invert_pattern(pattern: str, target: str, number: int | None = None) -> tuple[str, str]:
    """Return the pattern and the target of the inverse substitution.

    Group ``number`` of ``pattern`` becomes ``{}`` in the new target; ``{}`` in ``target`` becomes a group of digits.
    Raises RuleError if ``pattern`` is more than a name with groups, or ``target`` leaves out another group.

    >>> print(*invert_pattern(r"(.*)\\.(\\d+)\\.w1", r"\\1.w1", 2))
    (.*)\\.w1 \\1.{}.w1
    """
    compiled = re.compile(pattern)
    start, stop = int(pattern.startswith("^")), len(pattern) - int(pattern.endswith("$") and pattern[-2:] != r"\$")
    tokens = _tokens(pattern, start, stop)
    texts = [token["group"] for token in tokens if token["group"]]
    made, count = "", 0
    new: dict[int, int] = {}
    for part in re.split(r"(\\g<\w+>|\\\d+|\{\})", target):
        reference = _REFERENCE.fullmatch(part)
        if part == NUMBER:
            made, count = made + r"(\d+)", count + 1
        elif reference is None:
            made += re.escape(part)
        elif (old := _number(reference, compiled)) in new:
            made += rf"(?:\{new[old]})"  # a repeated reference; the group separates it from a digit that follows
        else:
            count += 1
            new[old] = count
            made += texts[old - 1]
    lost = [i for i in range(1, len(texts) + 1) if i not in new and i != number]
    if lost:
        raise RuleError(f"has no inverse: {target!r} leaves out group {lost[0]}", name=pattern, fix=TURN_BY_HAND)
    back, old = "", 0
    for token in tokens:
        if token["group"]:
            old += 1
            back += NUMBER if old == number else rf"\g<{new[old]}>"
        else:
            back += token["escaped"] or token["plain"]
    back = re.sub(r"\\g<(\d+)>(?!\d)", r"\\\1", back)  # as people write it
    return "^" * start + made + "$" * (len(pattern) - stop), back


def _tokens(pattern: str, start: int, stop: int) -> list[re.Match[str]]:
    tokens: list[re.Match[str]] = []
    while start < stop:
        token = _TOKEN.match(pattern, start, stop)
        if token is None:
            what = f"has no inverse: {pattern[start:stop]!r} is more than text and groups"
            raise RuleError(what, name=pattern, fix=TURN_BY_HAND)
        tokens.append(token)
        start = token.end()
    return tokens
