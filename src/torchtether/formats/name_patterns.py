"""Match regular expressions from a config against names, with the results of ``re``, in bounded time.

``re`` backtracks: it tries one path through a pattern after the other, and there may be exponentially many, as for
``(a+)+$``. Here the number of paths is bounded first. If it is small, ``re`` matches. If not, each part of the pattern
computes the set of all positions at which it can end, as the bits of an integer. That takes time polynomial in the
length of the name, and stops at a limit.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from ..errors import CheckpointError

_LENGTH_LIMIT = 2000  # characters of a pattern; usual ones have tens
_WORK = 2**26  # paths through a pattern, times the length of the name: at most tenths of a second of ``re``
_LITTLE = 2**14  # the same, below which matching takes less time than reading the clock
_STEPS = 2**17  # parts of a pattern that are evaluated for one name
_SECONDS = 60.0  # of processor time, for all patterns of a config and all names of a model; usual ones take hundredths
_ENDLESS = 99

_FLAGS = re.compile(r"\(\?[aimsu]+\)")
_ZERO_WIDTH = {"^", "$", r"\b", r"\B", r"\A", r"\Z"}
_LEAF = re.compile(
    r"\\[dDsSwWbBAZnrtfva]|\\x[0-9a-fA-F]{2}|\\[^0-9A-Za-z]|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\()\[|*+?]", re.DOTALL
)
_GROUP = re.compile(r"\((?P<kind>\?:|\?P<\w+>|\?<?[=!])?(?!\?)")
_QUANTIFIER = re.compile(r"(?:(?P<sign>[*+?])|\{(?!\})(?P<low>[0-9]*)(?P<comma>,(?P<high>[0-9]*))?\})(?P<rest>[?+]?)")


class Clock:
    """The processor time that remains for the patterns of one config."""

    def __init__(self) -> None:
        self.left: float = _SECONDS


def is_pattern(text: str) -> bool:
    """Return whether ``text`` is a valid regular expression of at most ``_LENGTH_LIMIT`` characters."""
    try:
        return len(text) <= _LENGTH_LIMIT and re.compile(text) is not None
    except (re.error, ValueError, RecursionError, OverflowError):
        return False


class NamePattern:
    """A regular expression from the config ``file``. Raises CheckpointError for one that is invalid or not supported.

    >>> pattern = NamePattern(r".*\\.(q|k|v)_proj", file="config.json", clock=Clock())
    >>> pattern.match("layers.0.k_proj"), pattern.match("layers.0.o_proj"), pattern.search("x.layers.0.k_proj.x")
    (True, False, True)
    >>> NamePattern("(a+)+$", file="config.json", clock=Clock()).match("a" * 1000 + "!")
    False
    """

    def __init__(self, text: str, *, file: str, clock: Clock) -> None:
        self._text, self._file, self._clock = text, file, clock
        if not is_pattern(text):
            self._refuse(f"of {len(text)} characters is invalid or longer than {_LENGTH_LIMIT}")
        self._compiled = re.compile(text)
        try:
            self._node = _parse(text)
        except (_UnknownError, RecursionError) as error:
            self._refuse(f"contains {str(error)[:40]!r}, which is not supported in the patterns of a config")

    def match(self, name: str) -> bool:
        """Return whether the pattern matches at the beginning of ``name``, as ``re.match``."""
        return self._finds(name, 1, self._compiled.match)

    def search(self, name: str) -> bool:
        """Return whether the pattern matches anywhere in ``name``, as ``re.search``."""
        return self._finds(name, (2 << len(name)) - 1, self._compiled.search)

    def _finds(self, name: str, starts: int, find: Callable[[str], object]) -> bool:
        length = len(name) + 1
        work = self._node.factor * length ** (self._node.exponent + (starts > 1) + 1)
        began = time.thread_time() if work > _LITTLE else 0.0
        if work <= _WORK:
            found = find(name) is not None
        else:
            try:
                found = self._node.ends(_Run(name), starts) != 0
            except (_UnknownError, RecursionError):
                self._refuse(f"takes too long for a name of {len(name)} characters")
        self._clock.left -= time.thread_time() - began if work > _LITTLE else 1e-6
        if self._clock.left < 0:
            self._refuse(f"and the others of the config take more than {_SECONDS:.0f} s")
        return found

    def _refuse(self, what: str) -> NoReturn:
        fix = "Correct or remove it."
        raise CheckpointError(f"the regular expression {self._text[:80]!r} {what}", name=self._file, fix=fix) from None


class _UnknownError(Exception):
    """A pattern has syntax that is not supported here, or a name takes too many steps."""


class _Run:
    """One name, with the positions at which the leaves of a pattern match in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps = 0
        self._places: dict[re.Pattern[str], int] = {}

    def places(self, leaf: re.Pattern[str]) -> int:
        """Return the positions, as bits, at which ``leaf`` matches."""
        if leaf not in self._places:
            self.steps += len(self.name) >> 4
            found = "".join("1" if leaf.match(self.name, at) else "0" for at in range(len(self.name), -1, -1))
            self._places[leaf] = int(found, 2)
        return self._places[leaf]


_Ends = Callable[[_Run, int], int]
"""A function from start positions to all positions at which a part of a pattern can end, both as bits."""


class _Node(NamedTuple):
    """A part of a pattern, with a bound on the number of paths through it: ``factor * (length + 1) ** exponent``."""

    ends: _Ends
    exponent: int = 0
    factor: int = 1
    leaf: re.Pattern[str] | None = None
    """The pattern of the part, if it matches one character."""


def _leaf(text: str, flags: str) -> _Node:
    leaf, width = re.compile(flags + text), int(text not in _ZERO_WIDTH)
    return _Node(lambda run, at: (at & run.places(leaf)) << width, leaf=leaf if width else None)


def _sequence(nodes: list[_Node]) -> _Node:
    def ends(run: _Run, at: int) -> int:
        run.steps += len(nodes) + 1
        if run.steps > _STEPS:
            raise _UnknownError
        for node in nodes:
            at = node.ends(run, at) if at else 0
        return at

    factor = 1
    for node in nodes:
        factor = min(factor * node.factor, 2 * _WORK)
    return _Node(ends, min(sum(node.exponent for node in nodes), _ENDLESS), factor)


def _alternation(nodes: list[_Node]) -> _Node:
    def ends(run: _Run, at: int) -> int:
        made = 0
        for node in nodes:
            made |= node.ends(run, at)
        return made

    if len(nodes) == 1:
        return nodes[0]
    return _Node(ends, max(node.exponent for node in nodes), sum(node.factor for node in nodes))


def _repeated(body: _Node, low: int, high: int | None) -> _Node:
    def ends(run: _Run, at: int) -> int:
        for _ in range(low):
            before, at = at, _step(run, body, at)
            if at in (0, before):
                break
        if high is None and body.leaf is not None:
            there = run.places(body.leaf)
            return (((at & there) + there) ^ there) | at  # the carry runs on as far as the leaf matches
        made, count = at, low
        while at and (high is None or count < high):
            at = _step(run, body, at) & ~made
            made, count = made | at, count + 1
        return made

    if high == 1:
        return _Node(ends, body.exponent, body.factor + 1)
    if body.exponent or body.factor > 1:
        return _Node(ends, _ENDLESS)
    return _Node(ends, 1) if high is None else _Node(ends, 0, high - low + 1)


def _step(run: _Run, body: _Node, at: int) -> int:
    run.steps += 1
    if run.steps > _STEPS:
        raise _UnknownError
    return body.ends(run, at)


def _lookaround(body: _Node, kind: str) -> _Node:
    """Return a lookahead or a lookbehind; ``kind`` is ``?=``, ``?!``, ``?<=`` or ``?<!``."""
    is_behind, is_wanted = "<" in kind, kind.endswith("=")

    def ends(run: _Run, at: int) -> int:
        made = 0
        for place in range(at.bit_length()):
            if at >> place & 1:
                if is_behind:
                    is_there = _step(run, body, (2 << place) - 1) >> place & 1 != 0
                else:
                    is_there = _step(run, body, 1 << place) != 0
                made |= (is_there == is_wanted) << place
        return made

    return _Node(ends, body.exponent, body.factor)


def _parse(text: str) -> _Node:
    """Return the node of a pattern that ``re`` has compiled, and which is therefore valid."""
    found = _FLAGS.match(text)
    node, at = _parse_alternation(text, found.end() if found else 0, found[0] if found else "")
    assert at == len(text)
    return node


def _parse_alternation(text: str, at: int, flags: str) -> tuple[_Node, int]:
    options: list[_Node] = []
    while True:
        nodes: list[_Node] = []
        while at < len(text) and text[at] not in "|)":
            node, at = _parse_atom(text, at, flags)
            node, at = _parse_quantifier(node, text, at)
            nodes.append(node)
        options.append(_sequence(nodes))
        if at == len(text) or text[at] == ")":
            return _alternation(options), at
        at += 1


def _parse_atom(text: str, at: int, flags: str) -> tuple[_Node, int]:
    if leaf := _LEAF.match(text, at):
        return _leaf(leaf[0], flags), leaf.end()
    group = _GROUP.match(text, at)
    if group is None:
        raise _UnknownError(text[at : at + 4])
    node, at = _parse_alternation(text, group.end(), flags)
    kind = group["kind"] or ""
    return (_lookaround(node, kind) if kind[-1:] in ("=", "!") else node), at + 1


def _parse_quantifier(node: _Node, text: str, at: int) -> tuple[_Node, int]:
    found = _QUANTIFIER.match(text, at)
    if found is None:
        return node, at
    if found["rest"] == "+":
        raise _UnknownError(found[0])
    if found["sign"]:
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[found["sign"]]
    else:
        low = int(found["low"] or 0)
        high = (int(found["high"]) if found["high"] else None) if found["comma"] else low
    return _repeated(node, low, high), found.end()
