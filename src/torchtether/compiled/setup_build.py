"""The commands of setuptools that build the extension module from ``sources/``, once, when the package is installed.

``pyproject.toml`` names them; nothing else imports them. Kernels are compiled once for each level and kind of codes,
and the module picks the level of the processor. If something fails, one line of the log says what, and the package is
installed without the module: torch computes then.
"""

from __future__ import annotations

import os
import runpy
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools.command.bdist_wheel import bdist_wheel  # type: ignore[import-untyped]
from setuptools.command.build_ext import build_ext  # type: ignore[import-untyped]

SOURCES = Path("src/torchtether/compiled/sources")
_digest_of = runpy.run_path(str(SOURCES.parent / "digest.py"))["digest_of"]
KINDS = ("STREAM", "INT8", "UINT8", "INT4", "E4M3", "E5M2", "TABLE4")
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, *(f"-mavx512{unit}" for unit in ("f", "bw", "dq", "vl", "vnni"))]
BF16 = ["-mavx512bf16"]
TILES = ["-mamx-tile", "-mamx-bf16", "-mamx-int8"]
# As torch's wheels: a Python that was built for macOS 10.9 asks for that, where std::shared_mutex is an error.
MACOS = ["-mmacosx-version-min=11.0"]
LEVELS = {"portable": ["-O2"], "avx2": AVX2, "avx512": AVX512}
# No multiplication is fused with an addition unless the source says so: the bits are those of torch's ops. Loops begin
# lines of the cache: a short one across two lines took 1.2 times as long.
FLAGS = ["-O3", "-g0", "-fPIC", "-w", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off", "-falign-loops=64"]

IS_FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))

_Task = tuple[str, str, list[tuple[str, str]], list[str]]  # its folder, the source, macros, flags


class BuildWheel(bdist_wheel):  # type: ignore[misc, unused-ignore]
    """Build one wheel for all versions of Python; without a GIL there is no limited API, and wheels are for one."""

    def finalize_options(self) -> None:
        if IS_FREE_THREADED:
            self.py_limited_api = ""
        super().finalize_options()


class BuildNative(build_ext):  # type: ignore[misc, unused-ignore]
    """Build ``torchtether.compiled._native``, or print one line that says why it is not built."""

    def build_extension(self, ext: Any) -> None:
        begun, target = time.monotonic(), Path(self.get_ext_fullpath(ext.name))
        levels = {name: LEVELS[name] for name in LEVELS if name == "portable" or self.plat_name.endswith("x86_64")}
        try:
            if IS_FREE_THREADED:  # importing the module would bring the GIL back
                raise NotImplementedError("they need a Python with a GIL")
            target.parent.mkdir(parents=True, exist_ok=True)
            self._compile_and_link(target, levels)
        except Exception as error:  # compilers, linkers and platforms raise errors of many types
            target.unlink(missing_ok=True)
            self._inplace(ext).unlink(missing_ok=True)  # of an earlier build, from other sources
            first = (str(error) or type(error).__name__).splitlines()[0]
            print(f"torchtether: built without its compiled kernels, so torch ops compute: {first}")
            return
        seconds = time.monotonic() - begun
        print(f"torchtether: built its kernels ({', '.join(levels)}) in {seconds:.0f} s")

    def _inplace(self, ext: Any) -> Path:
        return Path("src", *ext.name.split(".")[:-1], Path(self.get_ext_filename(ext.name)).name)

    def _takes(self, flags: list[str]) -> bool:
        """Return whether the compiler knows ``flags``: GCC does since version 11."""
        source = Path(self.build_temp, "flags.cpp")
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text("int nothing;\n")
        try:
            self.compiler.compile([str(source)], output_dir=self.build_temp, extra_postargs=flags)
        except Exception:  # of a type that depends on the compiler
            return False
        return True

    def _compile_and_link(self, target: Path, levels: dict[str, list[str]]) -> None:
        has_tiles = "avx512" in levels and self.plat_name.startswith("linux") and self._takes(TILES)
        oldest = MACOS if self.plat_name.startswith("macosx") else []
        macros = [("WITH_AVX2", "1" if "avx2" in levels else "0"), ("WITH_TILES", "1" if has_tiles else "0")]
        macros.append(("SOURCES", _digest_of(SOURCES)))
        tasks: list[_Task] = [("module", "module.cpp", macros, [])]
        for level, flags in reversed(levels.items()):  # what takes longest first, so that no core waits at the end
            for kind in KINDS:
                source = "stream.cpp" if kind == "STREAM" else "kernels.cpp"
                tasks.append((f"{level}-{kind}", source, [("LEVEL", level), ("CODES", kind)], flags))
            if level == "avx512":  # encoders are those of AVX2
                blocks = [("LEVEL", level), ("CODES", "STREAM")]
                tasks.append(("blocks", "blocks.cpp", blocks, [*flags, *BF16]))
                if has_tiles:
                    tasks.append(("tiles", "tiles.cpp", blocks, [*flags, *BF16, *TILES]))
                continue
            tasks.append((f"{level}-encoders", "encoders.c", [("LEVEL", level)], [*flags, "-O3", "-fno-trapping-math"]))

        def compiled(task: _Task) -> list[str]:
            name, source, macros, flags = task
            standard = "-std=c11" if source.endswith(".c") else "-std=c++17"
            made: list[str] = self.compiler.compile(
                [str(SOURCES / source)],
                output_dir=str(Path(self.build_temp, name)),
                macros=macros,
                include_dirs=self.include_dirs,
                extra_postargs=[standard, *FLAGS, *oldest, *flags],
                depends=[str(path) for path in SOURCES.iterdir()],
            )
            return made

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with ThreadPoolExecutor(cores) as threads:
            objects = [made for some in threads.map(compiled, tasks) for made in some]
        self.compiler.link_shared_object(objects, str(target), target_lang="c++", extra_postargs=["-s", *oldest])
