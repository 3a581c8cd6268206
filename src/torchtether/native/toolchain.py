"""What compiles, for which processor, and where the result is kept: shared by the loops and by the kernels."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path


def is_switched_off() -> bool:
    """Whether ``TORCHTETHER_COMPILE=0`` keeps everything compiled away."""
    return os.environ.get("TORCHTETHER_COMPILE", "1").lower() in ("0", "false", "off", "no")


def find_compiler(variable: str, names: Iterable[str]) -> list[str]:
    """The command that the environment names, or the first of ``names`` that is there; empty if there is none."""
    named = shlex.split(os.environ.get(variable, ""))
    for command in (named, *([name] for name in names)):
        if command and (path := shutil.which(command[0])):
            return [path, *command[1:]]
    return []


def said_compiler(compiler: str) -> bytes:
    """Which compiler it is, so that another one builds anew."""
    path = Path(compiler).resolve()
    found = path.stat()
    return f"{path} {found.st_size} {found.st_mtime_ns}".encode()


def said_processor() -> bytes:
    """What code for this processor may use: a home folder may be shared by several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.node()}".encode()
    return "\n".join(line for line in lines if line.split(":")[0].strip() in _OF_PROCESSOR).encode()


_OF_PROCESSOR = ("model name", "flags", "Features", "CPU part", "CPU implementer", "CPU variant")


def is_own(path: Path) -> bool:
    """Whether ``path`` is there, and only this user can have written it."""
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def own_folder() -> Path | None:
    """A folder that only this user may write, ``None`` if there is no place: what lies there is loaded as code.

    ``$XDG_CACHE_HOME/torchtether`` (``~/.cache/torchtether``), else one under the folder for temporary files.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for folder in (Path(home) / "torchtether", Path(tempfile.gettempdir()) / f"torchtether-{os.getuid()}"):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()
        except OSError:
            continue
        is_folder = not folder.is_symlink()
        if is_folder and found.st_uid == os.getuid() and not found.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    return None
