"""The kernels of newer processors, on one without their instructions: a plugin of pytest.

    EMULATED_LEVEL=avx512_amx pytest -p tests.compiled.emulated tests/weights/test_kernels.py

The level is avx512_vnni, avx512_bf16 or avx512_amx. The extension module is built first, almost without optimization,
with ``emulated.h`` in place of the instructions; that takes about a minute, and ``python -m tests.compiled.emulated
FOLDER`` does it once for several runs, which find the module by ``EMULATED_MODULE``. Results are those of such a
processor, but for the order in which AMX adds up. It needs an x86-64 processor with AVX2, and GCC.
"""

import contextlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEADER = Path(__file__).with_suffix(".h")
NAME = "torchtether.compiled._native"


def build(folder: Path) -> Path:
    """Build the module into ``folder``, an absolute path; return its own."""
    from setuptools import Distribution, Extension

    with contextlib.chdir(ROOT):  # the recipe names its sources from there
        recipe = importlib.util.spec_from_file_location("setup_build", "src/torchtether/compiled/setup_build.py")
        setup_build = importlib.util.module_from_spec(recipe)
        recipe.loader.exec_module(setup_build)
        setup_build.FLAGS += ["-Wno-psabi", "-include", str(HEADER)]
        setup_build.LEVELS["avx512"] = [*setup_build.AVX2, "-DEMULATED=1"]
        setup_build.LEVELS = {level: [*flags, "-O0"] for level, flags in setup_build.LEVELS.items()}
        setup_build.BF16, setup_build.TILES = ["-O2"], []  # else products of many rows take minutes
        sources = [str(setup_build.SOURCES / "module.cpp")]
        command = setup_build.BuildNative(
            Distribution({"ext_modules": [Extension(NAME, sources, py_limited_api=True)]})
        )
        command.build_lib, command.build_temp = str(folder / "lib"), str(folder / "temp")
        command.ensure_finalized()
        command.run()
    return Path(command.get_ext_fullpath(NAME))


def pytest_configure(config):
    """Build the module, once for all workers, and give it to torchtether, which asks torch for the level."""
    import torch

    if "EMULATED_MODULE" not in os.environ:
        folder = config._emulated_folder = tempfile.TemporaryDirectory()
        os.environ["EMULATED_MODULE"] = str(build(Path(folder.name)))
    os.environ.setdefault("EMULATED_LEVEL", "avx512_amx")
    torch.backends.cpu.get_cpu_capability = lambda: "AVX512"
    found = importlib.util.spec_from_file_location(NAME, os.environ["EMULATED_MODULE"])
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    sys.modules[NAME] = module

    from torchtether import compiled

    assert compiled.level() == os.environ["EMULATED_LEVEL"], compiled.state()


if __name__ == "__main__":
    print(f"EMULATED_MODULE={build(Path(sys.argv[1]).absolute())}")
