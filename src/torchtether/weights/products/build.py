"""The compiled kernels: built once per machine and kind of codes by the C++ compiler that is there, kept in a folder.

Nothing is built before a product asks for it (``load(kind)``), which then waits, up to seven seconds; later processes
find it in ``$XDG_CACHE_HOME/torchtether`` (``~/.cache/torchtether``). It waits, and does not go on with torch, because
sums that are added in another order are rounded otherwise: the same call would change its result once the build is
done. Without a compiler, or with ``TORCHTETHER_COMPILE=0`` in the environment, torch computes everything.
"""

from __future__ import annotations

import hashlib
import platform
import sys
import tempfile
import threading
import warnings
from functools import lru_cache
from pathlib import Path

from ..._signals import renewed_after_fork
from ...compiled import toolchain
from ...compiled.toolchain import (
    compiler_version,
    find_built,
    find_compiler,
    is_switched_off,
    own_folder,
    processor_flags,
)
from .binding import Kernels, bind

SOURCE = Path(__file__).with_name("cpu.cpp")
INCLUDED = tuple(sorted(SOURCE.parent.glob("*.h")))
KINDS = ("INT8", "UINT8", "E4M3", "E5M2", "TABLE4", "INT4", "STREAM")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-w", "-fno-math-errno")
EXACT = "-ffp-contract=off"
"""No multiplication is fused with an addition unless the source says so: decoded values have the bits of ``decode``."""

_LOCK = renewed_after_fork(threading.Lock())
FOUND: dict[str, Kernels | None] = {}


def load(kind: str, *, build: bool = True) -> Kernels | None:
    """Return the kernels for one kind of codes, ``None`` without any; without ``build`` only built ones.

    >>> load("INT8", build=False) is None or True
    True
    """
    if kind in FOUND:
        return FOUND[kind]
    with _LOCK:
        if kind in FOUND:
            return FOUND[kind]
        command = _command()
        if command is None:
            FOUND[kind] = None
            return None
        folder, name = _folder(), f"{kind.lower()}-{_key(command)}"
        path = find_built(folder, name)
        if path is None:
            if not build:
                return None  # another time it may be
            _compile(command, kind, folder, name)
            path = find_built(folder, name)
        FOUND[kind] = None if path is None else bind(path)
        return FOUND[kind]


def is_possible() -> bool:
    """Return whether there is a compiler, and nothing forbids its use."""
    return _command() is not None


@lru_cache(maxsize=1)
def _command() -> tuple[str, ...] | None:
    """Return how to compile; ``None`` if that is switched off, or there is no compiler."""
    if is_switched_off() or sys.platform != "linux":
        return None
    found = find_compiler("CXX", ("g++", "clang++"))
    if not found:
        return None
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    return (*found, *FLAGS, EXACT, native)


@lru_cache(maxsize=1)
def _key(command: tuple[str, ...]) -> str:
    """Return a digest of all that a build depends on: the sources, the command, the compiler, the processor."""
    known = hashlib.sha256(b"".join(source.read_bytes() for source in (SOURCE, *INCLUDED)))
    known.update(compiler_version(command) + processor_flags())
    return known.hexdigest()[:24]


@lru_cache(maxsize=1)
def _folder() -> Path:
    """Return the folder of builds, to which nobody else can write; at worst one for this process alone."""
    return own_folder() or Path(tempfile.mkdtemp(prefix="torchtether-"))


def _compile(command: tuple[str, ...], kind: str, folder: Path, name: str) -> None:
    """Compile without linking OpenMP: its calls find the one that torch has loaded."""
    openmp = ["-fopenmp"] if "g++" in Path(command[0]).name else []  # clang's needs a runtime of its own
    steps = (
        [*command, *openmp, f"-DCODES={kind}", "-c", str(SOURCE), "-o", "kernels.o"],
        [command[0], "-shared", "kernels.o", "-o", "made.so"],
    )
    if wrong := toolchain.build(steps, folder, name):
        warnings.warn(
            f"torchtether could not compile its kernels, so torch computes: {wrong.splitlines()[0]}", stacklevel=2
        )
