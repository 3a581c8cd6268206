"""Names of the files that a save makes: targets, the hidden ones in which they come into being, and the mark.

Where a mark stands, a save has not ended, and nothing is read.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from ..errors import CheckpointError

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MARK_SUFFIX = ".safetensors.torn"
"""How the name of the mark ends that stands beside files while several of them are exchanged; see ``replacing``."""

_STEM_LIMIT = 160  # bytes; with what is added a name stays below the 255 bytes that file systems allow
_REST = re.compile(r"(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json|\.torn)?\Z")
_HIDDEN = re.compile(r"\.(?P<target>.+)\.(?P<process>\d{1,9})\.[0-9a-f]{8}\.tmp", re.DOTALL)


def stem_of(name: str) -> str | None:
    """Return the stem under which a save makes ``name`` (a file, a numbered shard, an index, the mark), or ``None``.

    >>> stem_of("model-00001-of-00002.safetensors"), stem_of("model.safetensors.index.json"), stem_of("config.json")
    ('model', 'model', None)
    """
    found = _REST.search(name)
    return name[: found.start()] if found else None


def short(name: str) -> str:
    """Return ``name``, or if it is so long that nothing can be added to it, one that stands for it alone."""
    stem = stem_of(name)
    stem = name if stem is None else stem
    encoded = os.fsencode(stem)
    if len(encoded) <= _STEM_LIMIT:
        return name
    digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
    return f"{encoded[: _STEM_LIMIT - 20].decode(errors='ignore')}~{digest}{name[len(stem) :]}"


def name_beside(target: Path) -> Path:
    """Return a new hidden name beside ``target`` that says whose it is: ``.NAME.PID.HEX.tmp``."""
    return target.with_name(f".{short(target.name)}.{os.getpid()}.{os.urandom(4).hex()}.tmp")


def parse_hidden(name: str) -> tuple[str, int] | None:
    """Return the target, as ``short`` has it, and the process of a name by ``name_beside``; ``None`` for others."""
    found = _HIDDEN.fullmatch(name)
    return (found["target"], int(found["process"])) if found else None


def mark_of(folder: Path, stem: str) -> Path:
    """Return where the mark of the files of ``stem`` in ``folder`` stands."""
    return folder / short(stem + MARK_SUFFIX)


def check_whole(folder: Path, stem: str | None = None) -> None:
    """Raise CheckpointError if a save into ``folder`` has not ended: one under ``stem``, or any."""
    marks = [mark_of(folder, stem)] if stem else sorted(folder.glob(f"*{MARK_SUFFIX}"))
    for mark in marks:
        if os.path.lexists(mark):
            raise CheckpointError("the save that began here did not end", name=str(mark), fix="Save again.")
