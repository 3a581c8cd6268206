"""A digest of the code of a class, for torch's cache of compiled graphs, which outlives a process."""

from __future__ import annotations

import hashlib
import secrets
import sys
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

_PACKAGE = __name__.partition(".")[0]
_STARTED = time.time()
_OF_OTHERS = ("torch", *sys.stdlib_module_names)  # the cache records their versions itself


def digest_of_code(*kinds: type) -> str:
    """Return a digest of this package, of the files that define ``kinds``, and of those of their bases.

    Where the code is unknown, the digest is random and new in every process: a class has no file, as in a notebook, or
    its file was written after the process began and may differ from the code that runs. Imports do not count.
    """
    return " ".join(sorted({_digest(base) for kind in kinds for base in kind.__mro__}))


@lru_cache(maxsize=1024)
def _digest(kind: type) -> str:
    """Return the digest of one class; cached by class, not by module, because a notebook defines classes repeatedly."""
    package = kind.__module__.partition(".")[0]
    if package in _OF_OTHERS:
        return ""
    return _of_package() if package == _PACKAGE else _of_files(_file_of(kind.__module__))


@lru_cache(maxsize=1)
def _of_package() -> str:
    return _of_files(sorted(Path(__file__).parents[1].rglob("*.py")))


def _file_of(module: str) -> list[Path]:
    file = getattr(sys.modules.get(module), "__file__", None)
    return [] if file is None else [Path(file)]


def _of_files(files: Sequence[Path]) -> str:
    try:
        is_known = all(file.stat().st_mtime < _STARTED for file in files)
        content = [file.read_bytes() for file in files]
    except OSError:
        is_known, content = False, []
    return hashlib.sha256(b"\0".join(content)).hexdigest() if content and is_known else secrets.token_hex()
