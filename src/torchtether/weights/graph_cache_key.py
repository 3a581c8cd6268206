"""What code stands behind a class, for caches that outlive a process: torch keeps graphs that it traced through it."""

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
_OF_OTHERS = ("torch", *sys.stdlib_module_names)  # a cache knows their versions itself


def digest_of_code(*kinds: type) -> str:
    """Return a digest of this package, of the files that define ``kinds``, and of those of their bases.

    It is new in every process where that is not known: where a class has no file, as in a notebook, or where a file was
    written after the process began, so that what runs may be older. What a file imports does not count.
    """
    return " ".join(sorted({_digest(base) for kind in kinds for base in kind.__mro__}))


@lru_cache(maxsize=1024)
def _digest(kind: type) -> str:
    """Return the digest by class, not by module: a notebook defines a class again and again."""
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
