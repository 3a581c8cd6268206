"""The architecture, checked against the code: imports point down, and importing stays fast."""

import ast
import graphlib
import itertools
import re
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import torchtether

SOURCE = Path(torchtether.__file__).parent

# Rooms from the ground up. A room may import from its own level only within itself, and from levels below.
LEVELS = [
    {"_interruptions", "_version", "_warnings", "errors", "progress"},
    {"_dtypes", "torch_private"},
    {"_checks"},
    {"compiled", "geometry", "gpu"},
    {"schemes"},
    {"weights"},
    {"ties"},
    {"exchange", "files"},
    {"conversion", "formats"},
    {"checkpoint"},
    {"pictures", "renaming", "testing"},
    {"integrations"},
    {"loading"},
    {"__main__", "cli", "distributed"},
    {"refitting"},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
THIRD_PARTY = {"torch", "safetensors", "numpy", "tqdm"}
# Modules that nothing in the package imports before its user has imported those libraries, or that import them when
# they are called.
NEEDED_ELSEWHERE = {
    "__main__.py": {"torchtether_cli"},
    "compiled/setup_build.py": {"setuptools"},
    "gpu/decoding_kernels.py": {"triton"},
    "gpu/tile_kernels.py": {"triton"},
    "testing/strategies.py": {"hypothesis"},
    "files/hub.py": {"huggingface_hub"},
    "gpu/encoding_kernels.py": {"triton"},
    "gpu/rounding_kernels.py": {"triton"},
    "gpu/trial_kernel.py": {"triton"},
    "integrations/accelerate.py": {"accelerate"},
    "integrations/bitsandbytes.py": {"bitsandbytes"},
    "integrations/diffusers.py": {"accelerate", "diffusers"},
    "integrations/huggingface_hub.py": {"huggingface_hub"},
    "integrations/peft.py": {"peft"},
    "integrations/transformers.py": {"transformers"},
    "integrations/transformers_building.py": {"transformers"},
    "integrations/transformers_files.py": {"transformers"},
    "integrations/transformers_names.py": {"transformers"},
    "integrations/transformers_values.py": {"transformers"},
    "integrations/transformers_version.py": {"transformers"},
    "weights/products/bitsandbytes_4bit.py": {"bitsandbytes"},
}


def _modules():
    return sorted(SOURCE.rglob("*.py"))


def _room(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.fixture(scope="module")
def files():
    """The nodes of every file's syntax tree, by its path."""
    return {path: list(ast.walk(ast.parse(path.read_text()))) for path in _modules()}


def _imports(path, nodes):
    """(room or package, line) of every import in a file: top level, lazy and TYPE_CHECKING alike."""
    package = ["torchtether", *path.relative_to(SOURCE).parts[:-1]]
    for node in nodes:
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


def test_imports_point_down(files):
    for path, nodes in files.items():
        if _room(path) != "__init__":
            _check_imports(path, nodes)


def _check_imports(path, nodes):
    room, place = _room(path), path.relative_to(SOURCE)
    assert room in LEVEL, f"{room} stands on no level: add it to LEVELS"
    for full, line in _imports(path, nodes):
        if full[0] == "torchtether":
            assert len(full) > 1, f"{place}:{line} imports the package itself"
            other = full[1]
            assert other == room or LEVEL[other] < LEVEL[room], (
                f"{place}:{line} imports {other}, which is not below {room}"
            )
        else:
            known = THIRD_PARTY | NEEDED_ELSEWHERE.get(str(place), set())
            assert full[0] in known or full[0] in sys.stdlib_module_names, f"{place}:{line} imports {full[0]}"


def _dotted(path):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported_modules(path, nodes, names):
    """The modules of the package that ``path`` imports, by their dotted names."""
    parts = path.relative_to(SOURCE).parts
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*parts[: len(parts) - node.level], *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                one = ".".join([*base, alias.name])
                yield one if one in names else ".".join(base)


def test_no_module_imports_itself_through_others(files):
    """Not inside a package either; ``graphlib`` raises CycleError, which names the circle."""
    names = {_dotted(path): path for path in files}
    graph = {name: {*_imported_modules(path, files[path], names)} - {name} for name, path in names.items()}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) >= len(names)


def _is_private(name):
    return name.startswith("_") and not name.startswith("__")


def _own_private_names(files):
    """The private names that the package defines: functions, classes, variables, attributes of its own objects."""
    found = set()
    for node in itertools.chain.from_iterable(files.values()):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in {"self", "cls", "made"}:
            found.add(node.attr)
    return {name for name in found if _is_private(name)}


OPERATORS = {"aten", "ops", "collectives"}
"""What the operators of ATen hang on: their names belong to the schema, with an underscore or without."""


def _is_operator(node):
    """Whether an attribute is an operator, such as ``aten._unsafe_view.default`` or ``torch._int_mm``."""
    value = node.value
    last = value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""
    return last in OPERATORS or (last == "torch" and hasattr(torch.ops.aten, node.attr))


def _private_uses(nodes, own):
    """(name, line) of what a file takes from others that begins with one underscore."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and not node.level:
            taken = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((name, node.lineno) for name in taken if _is_private(name))
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            is_own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
            if not is_own and node.attr not in own and not _is_operator(node):
                yield node.attr, node.lineno


OF_PYTHON = {"_getframe", "_exit", "_fields", "_asdict", "_replace", "_at_fork_reinit", "_slotnames", "_Unpickler"}
"""Names of Python's own that begin with an underscore: frames, named tuples, fork, slots, pickle's twin of its C."""


def test_only_torch_private_names_what_torch_keeps_to_itself(files):
    own = _own_private_names(files)
    for path, nodes in files.items():
        if _room(path) in {"torch_private", "integrations"}:  # the latter: what other libraries keep, where they say so
            continue
        found = [(name, line) for name, line in _private_uses(nodes, own) if name not in OF_PYTHON]
        assert not found, f"{path.relative_to(SOURCE)}: {found}: give it a name, and a reason, in torch_private/"


DISK = {
    "open", "fdopen", "read_bytes", "read_text", "write_bytes", "write_text", "mkdir", "unlink", "rename", "rmdir",
    "iterdir", "glob", "rglob", "stat", "lstat", "exists", "is_file", "is_dir", "listdir", "scandir", "makedirs",
    "pread", "pwrite", "tempfile", "shutil", "fcntl",
}  # fmt: skip
DOORS = {
    "cli": "prints, and makes the folders of the demo",
    "compiled/digest.py": "reads the sources of the extension module",
    "compiled/setup_build.py": "builds the extension module, when the package is installed",
    "weights/graph_cache_key.py": "digests the sources of this package",
    "progress.py": "reads the memory of the process",
    "testing": "makes folders and pipes for what it tests",
}
"""Beside ``files/``, and why."""


def test_only_files_opens_the_disk(files):
    for path, nodes in files.items():
        place = path.relative_to(SOURCE)
        if _room(path) != "files" and not any(place.is_relative_to(door) for door in DOORS):
            _check_disk(place, nodes)


def test_files_are_synced_in_one_way(files):
    """On macOS ``os.fsync`` alone leaves them in the cache of the disk."""
    found = {
        str(path.relative_to(SOURCE))
        for path, nodes in files.items()
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr in ("fsync", "fdatasync")
    }
    assert found == {"files/system.py"}


def _check_disk(place, nodes):
    for node in nodes:
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            assert name not in DISK, f"{place}:{node.lineno} calls {name}: that is for files/"
        elif isinstance(node, ast.Import):
            assert not {alias.name for alias in node.names} & DISK, f"{place}:{node.lineno}: that is for files/"


BROAD = {"AssertionError", "Exception"}
"""What takes the error of an assert for a refusal. (``BaseException`` is for rollbacks, which raise it again.)"""


def test_no_check_is_an_assert(files):
    """``python -O`` removes asserts, so that what one refuses inside ``try`` would be accepted."""
    found = [
        f"{path.relative_to(SOURCE)}:{inner.lineno}"
        for path, nodes in files.items()
        for node in nodes
        if isinstance(node, ast.Try) and any(getattr(h.type, "id", "") in BROAD for h in node.handlers)
        for line in node.body
        for inner in ast.walk(line)
        if isinstance(inner, ast.Assert)
    ]
    assert found == []


FACTORIES = {
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint", "randn",
    "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip


def test_every_tensor_is_made_on_a_named_device(files):
    """Else it is on the user's default device: ``meta`` in a block that builds a model, where it has no values."""
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path, nodes in files.items()
        for node in nodes
        if isinstance(node, ast.Call) and _room(path) != "testing" and path.name != "demonstration.py"
        if isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "torch"
        if node.func.attr in FACTORIES and not {"device", None} & {keyword.arg for keyword in node.keywords}
    ]
    assert found == []


def test_it_can_be_imported_where_a_model_is_built():
    code = "import torch\nwith torch.device('meta'): import torchtether"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_are_short_and_few_lie_on_top():
    lengths = {path: len(path.read_text().splitlines()) for path in _modules()}
    long = {path for path, length in lengths.items() if length > 400 and _room(path) != "testing"}
    assert not long, f"split by subject: {sorted(str(path.relative_to(SOURCE)) for path in long)}"
    assert statistics.median(lengths.values()) <= 140
    assert sum(path.parent == SOURCE for path in lengths) <= 12


def _imported_in_text(text):
    """The modules of the package that ``import`` and ``from`` name anywhere, in strings that are run elsewhere too."""
    for line in re.findall(r"^[^#\n]*?\b(?:from|import) (torchtether[\w., ]*)", text, re.MULTILINE):
        for one in line.split(" import ")[0].split(","):
            yield one.split(" as ")[0].strip().rstrip(".").split(" ")[0]


def test_modules_that_texts_import_are_there():
    root = SOURCE.parents[1]
    texts = [*root.glob("*.md"), *(p for f in ("src", "tests", "tutorials") for p in (root / f).rglob("*.[pm][yd]"))]
    named = {one: path for path in texts for one in _imported_in_text(path.read_text()) if one}
    assert len(named) > 50
    absent = {f"{path.name}: {one}" for one, path in named.items() if not _is_module(one)}
    assert not absent


def _is_module(name):
    path = SOURCE.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


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
        "assert not bad, bad; assert torch.__future__.get_swap_module_params_on_conversion() == before;"
        "import gc; assert gc.isenabled(); assert 'torchtether.formats.catalog' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rooms_that_are_imported_late_are_there_for_everyone():
    """On first use, by many threads at once, by ``dir`` and by a star."""
    code = (
        "import threading, torchtether as tt; found = [];"
        "assert not set(tt._LATE) & set(vars(tt)) and set(tt.__all__) <= set(dir(tt));"
        "find = lambda name: found.append((name, getattr(tt, name).__all__));"
        "threads = [threading.Thread(target=find, args=(name,)) for name in tt._LATE * 4];"
        "[one.start() for one in threads]; [one.join() for one in threads];"
        "assert len(found) == 8 and all(vars(tt)[name].__all__ is one for name, one in found);"
        "space = {}; exec('from torchtether import *', space); assert set(tt.__all__) <= set(space)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not hasattr(torchtether, "absent")


def test_every_file_of_the_package_is_installed():
    """``pip install -e`` finds files that a wheel has not; a source distribution is built from the same list."""
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["torchtether"]
    installed = {path for pattern in patterns for path in SOURCE.glob(pattern)}
    others = {path for path in SOURCE.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc", ".so"}}
    assert others <= installed, f"not in package-data: {sorted(path.name for path in others - installed)}"


PEERS = sorted(Path(__file__).with_name("peers").glob("test_*.py"))


@pytest.mark.parametrize("path", PEERS, ids=lambda path: path.name)
def test_what_needs_a_peer_is_marked(path):
    assert "mark.peers" in path.read_text(), "the default suite runs where no peer is installed"
