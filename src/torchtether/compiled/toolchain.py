"""What compiles, for which processor, and where the result is kept: shared by the loops and by the kernels.

A library is ``NAME-DIGEST.so`` in ``own_folder()``: its name says what it was built from and what its bytes are, so
what is cut, zeroed or written by others is not loaded (``find_built``). Run as a program, this builds one library.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

DAY = 86400.0
"""Seconds for which it is believed that a compiler fails."""

_PASSING = ("no space left", "memory exhausted", "out of memory", "cannot allocate", "killed", "signal", "disk quota")
"""What compilers say of failures that another time may not have."""


def is_switched_off() -> bool:
    """Return whether ``TORCHTETHER_COMPILE=0`` keeps everything compiled away."""
    return os.environ.get("TORCHTETHER_COMPILE", "1").lower() in ("0", "false", "off", "no")


def find_compiler(variable: str, names: Iterable[str]) -> list[str]:
    """Return the command that the environment names, or the first of ``names`` that is there.

    Empty if there is none.
    """
    named = shlex.split(os.environ.get(variable, ""))
    for command in (named, *([name] for name in names)):
        if command and (path := shutil.which(command[0])):
            return [path, *command[1:]]
    return []


def compiler_version(command: Sequence[str]) -> bytes:
    """Return which compiler it is, and what else it is told, so that another one builds anew."""
    path = Path(command[0]).resolve()
    found = path.stat()
    return f"{path} {found.st_size} {found.st_mtime_ns} {list(command[1:])}".encode()


def processor_flags() -> bytes:
    """Return what code for this processor may use: a home folder may be shared by several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.node()}".encode()
    return "\n".join(line for line in lines if line.split(":")[0].strip() in _OF_PROCESSOR).encode()


_OF_PROCESSOR = ("model name", "flags", "Features", "CPU part", "CPU implementer", "CPU variant")


def own_folder() -> Path | None:
    """Return a folder that only this user may write, ``None`` if there is no place: what lies there is loaded as code.

    ``$XDG_CACHE_HOME/torchtether`` (``~/.cache/torchtether``), else one under the folder for temporary files. Nobody
    else can put another in its place: the folders above are root's or this user's, and where others may write there,
    too, they cannot rename what is not theirs (the sticky bit).
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for folder in (Path(home) / "torchtether", Path(tempfile.gettempdir()) / f"torchtether-{os.getuid()}"):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.is_symlink():
                continue
            folder = folder.resolve()
            if _is_own(folder) and all(map(_is_guarded, folder.parents)) and os.access(folder, os.W_OK):
                return folder
        except OSError:
            continue
    return None


def _is_own(path: Path) -> bool:
    """Return whether only this user can have written it."""
    found = path.lstat()
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _is_guarded(path: Path) -> bool:
    """Return whether others cannot rename what is this user's there."""
    found = path.stat()
    return found.st_uid in (0, os.getuid()) and (not found.st_mode & 0o022 or bool(found.st_mode & stat.S_ISVTX))


def find_built(folder: Path, name: str) -> Path | None:
    """Return the library of that name, which this user has written and which is whole; ``None`` where there is none."""
    try:
        for file in os.listdir(folder):
            if not file.startswith(f"{name}-"):
                continue
            path = folder / file
            if _is_own(path) and file == _named(name, path.read_bytes()):
                return path
    except OSError:
        pass
    return None


def _named(name: str, library: bytes) -> str:
    return f"{name}-{hashlib.sha256(library).hexdigest()[:32]}.so"


def build(steps: Sequence[Sequence[str]], folder: Path, name: str) -> str:
    """Run ``steps``, of which the last makes ``made.so`` where it runs, and puts that into ``folder`` as a whole.

    Returns what went wrong, "" if nothing did.
    """
    try:
        with tempfile.TemporaryDirectory(dir=folder) as workdir:
            for step in steps:
                subprocess.run(step, check=True, capture_output=True, timeout=300, umask=0o077, cwd=workdir)
            made = Path(workdir, "made.so")
            with made.open("rb") as file:
                library = file.read()
                os.fsync(file.fileno())
            os.replace(made, folder / _named(name, library))  # processes that build at once put the same file there
    except (OSError, subprocess.SubprocessError) as error:
        return f"{(getattr(error, 'stderr', None) or b'').decode(errors='replace')}\n{error}".strip()
    return ""


def find_failure(folder: Path, name: str) -> Path | None:
    """Return where it is noted that the compiler failed; ``None`` if it did not, or more than a day ago."""
    path = folder / f"{name}.failed"
    try:
        return path if abs(time.time() - path.stat().st_mtime) < DAY else None
    except OSError:
        return None


if __name__ == "__main__":  # FOLDER NAME COMPILER...: one step, in the background
    os.nice(10)
    os.umask(0o077)
    _folder, _name = Path(sys.argv[1]), sys.argv[2]
    try:
        _wrong = build([sys.argv[3:]], _folder, _name)
        if _wrong and not any(word in _wrong.lower() for word in _PASSING):
            Path(_folder, f"{_name}.failed").write_text(_wrong)
    finally:
        Path(_folder, f"{_name}.lock").rmdir()
