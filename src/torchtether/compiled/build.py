"""The compiled loops: built once per machine, in the background, by the C compiler that is there; or not at all."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from . import toolchain
from .toolchain import (
    compiler_version,
    find_built,
    find_compiler,
    find_failure,
    is_switched_off,
    own_folder,
    processor_flags,
)

_SOURCE = Path(__file__).with_name("loops.c")
_INCLUDED = tuple(Path(__file__).with_name(name) for name in ("encode.h", "encode_avx2.h"))
_FLAGS = (
    *(("-march=native",) if platform.machine().lower() in ("x86_64", "amd64") else ()),
    # -O3 vectorises; no contraction, so that a product and a sum are rounded one after the other, as torch does it.
    *"-O3 -std=c11 -ffp-contract=off -fno-math-errno -fno-trapping-math -shared -fPIC".split(),
)
_COMPILERS = ("cc", "gcc", "clang")
_STALE = 120.0
"""Seconds after which a build that another process began counts as lost."""

_SCRIPT = '"$@" </dev/null >/dev/null 2>&1 &'
"""The build outlives the process that asked for it, so nobody waits for it, and its next process has it."""


class Build:
    """The library of the loops: ``library`` never waits; ``warm`` has it built; ``state`` says how far it is.

    It is kept in ``$XDG_CACHE_HOME/torchtether`` (``~/.cache/torchtether``), under a name made of the source, the
    compiler, the processor and its own bytes, in a folder that only its owner may write. A compiler that failed is
    asked again after a day, or the next time if memory or disk were full. ``TORCHTETHER_COMPILE=0`` keeps it off.
    """

    def __init__(self) -> None:
        self.state = ""
        self._library: ctypes.CDLL | None = None
        self._folder: Path | None = None
        self._name = ""
        self._is_settled = self._is_begun = False

    def library(self) -> ctypes.CDLL | None:
        """Return the loops, if they are at hand."""
        if self._is_settled:
            return self._library
        if self._folder is None and not self._find_name():
            return None
        assert self._folder is not None
        is_ended = self._is_begun and not self._lock().exists()  # asked first: the library is there before it goes
        if (built := find_built(self._folder, self._name)) is not None:
            self._open(built)
        elif is_ended:
            failed = find_failure(self._folder, self._name)
            self._settle(f"the compiler failed: {failed}" if failed else "the compiler did not end its work")
        return self._library

    def warm(self) -> None:
        """Start the build of the loops, if they are not at hand and can be."""
        if self.library() is not None or self._is_settled or self._is_begun:
            return
        assert self._folder is not None
        if (failed := find_failure(self._folder, self._name)) is not None:
            self._settle(f"the compiler failed: {failed}")
            return
        lock, compiler = self._lock(), find_compiler("CC", _COMPILERS)
        try:
            lock.mkdir()
        except FileExistsError:
            try:
                is_lost = time.time() - lock.stat().st_mtime >= _STALE
                if is_lost:
                    os.utime(lock)
            except OSError:
                is_lost = False  # it has ended just now
            if not is_lost:
                self._is_begun, self.state = True, "being compiled"  # by another process
                return
        except OSError as error:
            self._settle(f"no place for it: {error}")
            return
        self._is_begun, self.state = True, "being compiled"
        step = [*compiler, *_FLAGS, "-o", "made.so", str(_SOURCE)]
        command = [sys.executable, "-I", "-S", toolchain.__file__, str(self._folder), self._name, *step]
        try:
            subprocess.run(["/bin/sh", "-c", _SCRIPT, "sh", *command], check=True, timeout=10)
        except (OSError, subprocess.SubprocessError) as error:
            self._settle(f"the compiler could not be run: {error}")

    def _lock(self) -> Path:
        return Path(f"{self._folder}", f"{self._name}.lock")

    def wait(self, seconds: float = 60.0) -> bool:
        """Return whether the loops are at hand, after a build at most; for benchmarks and tests."""
        self.warm()
        end = time.monotonic() + seconds
        while self.library() is None and not self._is_settled and time.monotonic() < end:
            time.sleep(0.02)
        return self._library is not None

    def _settle(self, state: str) -> bool:
        self.state, self._is_settled = state, True
        return False

    def _find_name(self) -> bool:
        if is_switched_off():
            return self._settle("off by TORCHTETHER_COMPILE")
        if os.name != "posix" or sys.byteorder != "little":
            return self._settle("only for little-endian POSIX systems")
        try:
            compiler = find_compiler("CC", _COMPILERS)
            if not compiler:
                return self._settle("no C compiler")
            folder = own_folder()
            if folder is None:
                return self._settle("no folder to keep it in")
            name = hashlib.sha256()
            sources = [path.read_bytes() for path in (_SOURCE, *_INCLUDED)]
            for word in (*sources, repr(_FLAGS).encode(), compiler_version(compiler), processor_flags()):
                name.update(hashlib.sha256(word).digest())
        except OSError as error:
            return self._settle(f"no place for it: {error}")
        self._folder, self._name = folder, f"loops-{name.hexdigest()[:24]}"
        return True

    def _open(self, target: Path) -> None:
        try:
            self._library = declared(ctypes.CDLL(str(target)))
        except (OSError, AttributeError) as error:
            self._settle(f"it does not load: {error}")
            return
        self.state, self._is_settled = "compiled", True


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Return ``library`` with the types of its functions, as ``loops.c`` has them."""
    kinds = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}
    for name, letters in _FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes = [kinds[letter] for letter in letters]
        function.restype = ctypes.c_int if name in _ANSWERING else None
    return library


_FUNCTIONS = {
    "tt_magnitudes": "pinnnp",
    "tt_extremes": "pinnnpp",
    "tt_encode_affine": "pinnnppniiiiipn",
    "tt_encode_float8": "pinnnpnifiip",
    "tt_encode_nearest": "pinnnpniipippn",
    "tt_encode": "ppnppp",
    "tt_encode_file": "pinnpnppp",
    "tt_decode_affine": "pinnnnppnffpin",
    "tt_decode_table": "pinnnnpnppin",
}
_ANSWERING = ("tt_encode", "tt_encode_file")
