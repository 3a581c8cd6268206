"""The compiled extension: its binding, the behaviour if it is absent or does not match, and its build."""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import torchtether
from torchtether import compiled
from torchtether.compiled import room
from torchtether.schemes import int8
from torchtether.weights.products.layout import layout_of

ROOT = Path(__file__).parents[2]
PRODUCT = """
import torch, torchtether as tt
weight = tt.Weight.encode(torch.eye(4, 64), tt.int8()).to(torch.bfloat16)
with torch.no_grad():
    out = torch.nn.functional.linear(torch.ones(1, 64, dtype=torch.bfloat16), weight)
assert torch.allclose(out.float(), torch.ones(1, 4), atol=0.02), out
from torchtether import compiled
print(compiled.state())
"""
needs_room = pytest.mark.skipif(compiled.native() is None, reason="nothing compiled is there")


def child(code, **environment):
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "TORCHTETHER_COMPILE": "1", **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)


def test_switched_off():
    found = child(PRODUCT, TORCHTETHER_COMPILE="0")
    assert (found.stdout, found.stderr) == ("disabled by TORCHTETHER_COMPILE\n", "")


@pytest.mark.parametrize("word", ["0", "off", "False"])
def test_words_that_switch_it_off(monkeypatch, word):
    monkeypatch.setattr(room, "_module", None)
    monkeypatch.setattr(room, "_state", "")
    monkeypatch.setenv("TORCHTETHER_COMPILE", word)
    assert (compiled.native(), compiled.state()) == (None, "disabled by TORCHTETHER_COMPILE")


@pytest.mark.slow
@needs_room
def test_an_older_processor_is_asked_for_as_torch_asks():
    found = child(PRODUCT, ATEN_CPU_CAPABILITY="default")
    assert (found.stdout, found.stderr) == ("compiled (portable)\n", "")


MISSING = """
import sys
sys.modules["torchtether.compiled._native"] = None  # as where no compiler was there
"""


def test_where_it_was_not_built_torch_computes_and_nothing_is_printed():
    found = child(MISSING + PRODUCT)
    assert (found.stdout, found.stderr) == ("torchtether was installed without a compiler\n", "")


OTHER_TORCH = """
from torchtether.compiled import room
room._LIBRARIES = ("libanother.so",)
"""


@pytest.mark.slow
@needs_room
def test_a_torch_that_it_does_not_know_is_said_once_and_torch_computes():
    found = child(OTHER_TORCH + PRODUCT)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "the compiled module cannot be used: torch does not have libanother.so\n"
    assert found.stderr.count("torchtether: the compiled module cannot be used") == 1


OTHER_SOURCES = """
import shutil, sys, tempfile
from pathlib import Path
from torchtether.compiled import room
newer = Path(tempfile.mkdtemp(), "sources")
shutil.copytree(room._SOURCES, newer)
with (newer / "layout.h").open("a") as file:
    file.write("//")
room._SOURCES = newer
"""


@pytest.mark.slow
@needs_room
def test_a_module_of_other_sources_is_not_taken():
    found = child(OTHER_SOURCES + PRODUCT)
    assert found.returncode == 0, found.stderr
    what = "the compiled module cannot be used: it was built from other sources. Install torchtether again"
    assert found.stdout == f"{what}\n"
    assert found.stderr.count(what) == 1


@needs_room
def test_a_layout_is_filled_by_name_and_a_wrong_one_is_an_error():
    layout = layout_of(int8(), (4, 64))
    module = compiled.native()
    assert module.Layout(layout.attributes, **layout.fields) is not None
    for change, word in (
        ({"rows": None}, "rows"),
        ({"more": 1}, "fields are given"),
        ({"table": [0.0] * 17}, "table: 17 values, of 16"),
        ({"kind": 99}, "kind"),
        ({"rows": "many"}, "int"),
    ):
        fields = {name: value for name, value in {**layout.fields, **change}.items() if value is not None}
        with pytest.raises(TypeError, match=word):
            module.Layout(layout.attributes, **fields)
    for given in ((), (1,), (None, None, None, None, None, None, None)):
        for function in (module.linear, module.decode, module.remember, module.set_rows, module.encode, module.bind):
            with pytest.raises(TypeError):
                function(*given)


def test_torch_ops_do_the_work_where_it_is_not_there(monkeypatch):
    w = torch.randn(4, 8)
    parts = int8().encode(w)
    monkeypatch.setattr(room, "_module", None)
    assert all(torch.equal(part, parts[name]) for name, part in int8().encode(w).items())


COMPILED_FIRST = """
import torch, torchtether as tt
with torch.device("meta"):
    model = torch.nn.Linear(64, 64)
tt.load(model, PATH)  # as it is: nothing is encoded
model.requires_grad_(False)
x = torch.ones(2, 64)
assert torch.compile(model, backend="aot_eager", fullgraph=True)(x).allclose(model(x), atol=1e-5)
from torchtether import compiled
print(compiled.state())
"""


@pytest.mark.slow
@needs_room
@pytest.mark.parametrize("scheme", ["int8", "nf4", "mxfp4"])
def test_a_compiled_graph_may_be_the_first_to_use_it(tmp_path, scheme):
    """Its tensors are fake while it is traced, and the module is bound by a real one."""
    torchtether.save(torchtether.quantize(torch.nn.Linear(64, 64), scheme), tmp_path / "one.safetensors")
    code = COMPILED_FIRST.replace("PATH", repr(str(tmp_path / "one.safetensors")))
    found = child(code, PYTHONWARNINGS="ignore:Guards may run slower")  # torch on Python 3.13.0
    assert (found.stdout, found.stderr) == (f"{compiled.state()}\n", "")


# -- building ---------------------------------------------------------------------------------------------------------


def wheel(folder, **environment):
    """Return the log of a build in ``folder`` from a copy of the sources, and the names of what is in the wheel."""
    copy = folder / "copy"
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-v",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(folder),
        str(copy),
    ]
    environment["PIP_QUIET"] = "0"  # what is built is said at -v alone
    made = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert made.returncode == 0, made.stdout + made.stderr
    (path,) = folder.glob("*.whl")
    return made.stdout + made.stderr, path.name, zipfile.ZipFile(path).namelist()


@pytest.mark.skipif(not (ROOT / "src").is_dir(), reason="the sources are not there")
@pytest.mark.parametrize("platform", ["macosx-10.9-universal2", "linux-x86_64"])
def test_kernels_for_macos_may_use_what_torch_needs_there(monkeypatch, tmp_path, platform):
    """A Python for macOS 10.9 builds for that, where std::shared_mutex and aligned_alloc are not."""
    setuptools = pytest.importorskip("setuptools", minversion="77")
    monkeypatch.chdir(ROOT)
    command = import_module("torchtether.compiled.setup_build").BuildNative(setuptools.Distribution())
    command.plat_name, command.build_temp, command.include_dirs, calls = platform, str(tmp_path), [], []
    command.compiler = SimpleNamespace(
        compile=lambda sources, **options: calls.append(options["extra_postargs"]) or [],
        link_shared_object=lambda objects, target, **options: calls.append(options["extra_postargs"]),
    )
    command._compile_and_link(tmp_path / "module.so", {"portable": []})
    assert len(calls) > 9
    assert {"-mmacosx-version-min=11.0" in flags for flags in calls} == {platform.startswith("macosx")}


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["/bin/false", "no-such-compiler"])
def test_a_compiler_that_fails_is_said_in_one_line_and_the_package_is_installed(tmp_path, compiler):
    pytest.importorskip("setuptools", minversion="77")
    log, _, names = wheel(tmp_path, CC=compiler, CXX=compiler)
    assert log.count("torchtether: built without its compiled kernels, so torch ops compute: ") == 1
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert modules | {"torchtether/py.typed"} <= set(names)
    assert not [name for name in names if name.endswith(".so")]


@pytest.mark.slow
def test_a_python_without_a_gil_gets_a_wheel_of_its_own_without_kernels(tmp_path):
    """It has no limited API, and a module that does not name itself safe brings the GIL back."""
    pytest.importorskip("setuptools", minversion="77")
    (tmp_path / "sitecustomize.py").write_text("import sysconfig; sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1")
    log, name, names = wheel(tmp_path, PYTHONPATH=str(tmp_path))
    assert log.count("so torch ops compute: they need a Python with a GIL") == 1
    assert "abi3" not in name
    assert not [name for name in names if name.endswith(".so")]
