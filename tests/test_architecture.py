"""The house plan, checked against the code: imports point down, and importing stays lean."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import torchtether

SOURCE = Path(torchtether.__file__).parent

# Rooms from the ground up. A room may import from its own level only within itself, and from levels below.
LEVELS = [
    {"_gc", "_signals", "errors", "progress"},
    {"_checks", "_dtypes", "torch_private"},
    {"compiled", "geometry"},
    {"schemes"},
    {"weights"},
    {"ties"},
    {"exchange", "files"},
    {"conversion", "formats"},
    {"checkpoint"},
    {"pictures", "renaming", "testing"},
    {"loading"},
    {"cli", "distributed"},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
THIRD_PARTY = {"torch", "safetensors", "numpy", "tqdm"}
# Modules that nothing in the package imports: users of Hypothesis do.
NEEDED_ELSEWHERE = {"testing/strategies.py": {"hypothesis"}}


def _modules():
    return sorted(SOURCE.rglob("*.py"))


def _room(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def _imports(path):
    """(room or package, line) of every import in a file: top level, lazy and TYPE_CHECKING alike."""
    package = ["torchtether", *path.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
                full = [*base, *(node.module.split(".") if node.module else [])]
                if full == ["torchtether"]:
                    for alias in node.names:
                        yield ["torchtether", alias.name], node.lineno
                    continue
            else:
                full = node.module.split(".")
            yield full, node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split("."), node.lineno


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_down(path):
    room = _room(path)
    if room == "__init__":
        return
    assert room in LEVEL, f"{room} stands on no level: add it to LEVELS"
    for full, line in _imports(path):
        if full[0] == "torchtether":
            assert len(full) > 1, f"{path.name}:{line} imports the package itself"
            other = full[1]
            assert other == room or LEVEL[other] < LEVEL[room], (
                f"{path.name}:{line} imports {other}, which is not below {room}"
            )
        else:
            known = THIRD_PARTY | NEEDED_ELSEWHERE.get(str(path.relative_to(SOURCE)), set())
            assert full[0] in known or full[0] in sys.stdlib_module_names, f"{path.name}:{line} imports {full[0]}"


def test_only_one_room_calls_private_torch():
    """``torch._C`` is feature-detected in ``torch_private/``."""
    allowed = {"torch_private"}
    for path in _modules():
        if _room(path) not in allowed:
            assert "torch._C" not in path.read_text(), f"{path.name} calls torch._C: move it to torch_private"


def test_only_files_opens_the_disk():
    """``files/`` is the only room with a door to the disk; the demo and the command line may print and make folders."""
    for path in _modules():
        if _room(path) in {"files", "demo", "cli"}:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            is_open = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open"
            assert not is_open, f"{path.name}:{node.lineno} opens a file"


def test_public_names_are_the_ones_promised():
    promised = """
    load plan_load save open quantize dequantize convert on_meta materialize swapping find_ties check_ties tie
    untie check_optimizer Weight WeightSpec Tie int8 int4 fp8 nf4 mxfp4 nvfp4 Scheme Affine ScaledFloat Codebook
    Plain
""".split()
    assert set(promised) <= set(torchtether.__all__)
    for name in torchtether.__all__:
        assert getattr(torchtether, name).__doc__, f"{name} has no docstring"


def test_import_is_lean():
    """Importing the package needs none of what only the command line and the peers need, and changes no global."""
    code = (
        "import sys, torch; before = torch.__future__.get_swap_module_params_on_conversion(); import torchtether;"
        "bad = {'rich', 'transformers', 'torchao', 'hypothesis', 'pytest'} & set(sys.modules);"
        "assert not bad, bad; assert torch.__future__.get_swap_module_params_on_conversion() == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_file_of_the_package_is_installed():
    """``pip install -e`` finds files that a wheel has not: kernels are compiled from sources that lie beside them."""
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["torchtether"]
    installed = {path for pattern in patterns for path in SOURCE.glob(pattern)}
    others = {path for path in SOURCE.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}}
    assert others <= installed, f"not in package-data: {sorted(path.name for path in others - installed)}"
