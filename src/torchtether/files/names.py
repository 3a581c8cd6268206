"""Names of the files that a save makes: targets, hidden temporary files, and the mark.

A mark means that a save has not ended; see ``marks``.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from ..errors import CheckpointError

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MARK_SUFFIX = ".safetensors.torn"
"""The suffix of the mark, a file that exists while several files are exchanged; see ``replacing``."""

_STEM_LIMIT = 160  # bytes; with all additions a name stays below 255 bytes, the limit of file systems
_REST = re.compile(r"(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json|\.torn)?\Z")
_SHARD = re.compile(r"(?P<before>.*-)(?P<number>\d{5,})-of-(?P<count>\d{5,})\.safetensors", re.DOTALL)
_HIDDEN = re.compile(r"\.(?P<target>.+)\.(?P<process>\d{1,9})\.[0-9a-f]{8}\.tmp", re.DOTALL)


def stem_of(name: str) -> str | None:
    """Return the stem of ``name`` (a file, a numbered shard, an index, the mark) of a save; ``None`` for other names.

    >>> stem_of("model-00001-of-00002.safetensors"), stem_of("model.safetensors.index.json"), stem_of("config.json")
    ('model', 'model', None)
    """
    found = _REST.search(name)
    return name[: found.start()] if found else None


def short(name: str) -> str:
    """Return ``name``; if it is too long for additions, a shorter name with a digest that identifies it."""
    stem = stem_of(name)
    stem = name if stem is None else stem
    encoded = os.fsencode(stem)
    if len(encoded) <= _STEM_LIMIT:
        return name
    digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
    return f"{encoded[: _STEM_LIMIT - 20].decode(errors='ignore')}~{digest}{name[len(stem) :]}"


def name_beside(target: Path) -> Path:
    """Return a new hidden name beside ``target`` that identifies target and process: ``.NAME.PID.HEX.tmp``."""
    return target.with_name(f".{short(target.name)}.{os.getpid()}.{os.urandom(4).hex()}.tmp")


def parse_hidden(name: str) -> tuple[str, int] | None:
    """Return the target, as shortened by ``short``, and the process of a name by ``name_beside``; else ``None``."""
    found = _HIDDEN.fullmatch(name)
    return (found["target"], int(found["process"])) if found else None


def mark_of(folder: Path, stem: str) -> Path:
    """Return the path of the mark for the files of ``stem`` in ``folder``."""
    return folder / short(stem + MARK_SUFFIX)


def check_every_shard(folder: Path, names: Iterable[str]) -> None:
    """Raise CheckpointError if ``names``, shards in ``folder`` that no index lists, count more than there are."""
    numbers: dict[tuple[str, str], set[int]] = {}
    for name in names:
        if found := _SHARD.fullmatch(name):
            numbers.setdefault((found["before"], found["count"]), set()).add(int(found["number"]))
    for (before, count), some in numbers.items():
        if len(some) < int(count):
            absent = next(number for number in range(1, int(count) + 1) if number not in some)
            what = f"the shard {before}{absent:0{len(count)}}-of-{count}{SUFFIX} does not exist"
            raise CheckpointError(what, name=str(folder), fix="Fetch every shard.")
