"""The compiled kernels: built once per machine and kind of codes by the C++ compiler that is there, kept in a folder.

Nothing is built before a product asks for it (``load(kind)``), which then waits, up to seven seconds; later processes
find it in ``$XDG_CACHE_HOME/torchtether`` (``~/.cache/torchtether``). It waits, and does not go on with torch, because
sums that are added in another order are rounded otherwise: the same call would change its result once the build is
done. Without a compiler, or with ``TORCHTETHER_COMPILE=0`` in the environment, torch computes everything.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._torch import WATCHED, any_requires_grad, empty_on_cpu
from ..native.toolchain import find_compiler, is_own, is_switched_off, own_folder, said_compiler, said_processor
from .layout import Layout

SOURCE = Path(__file__).with_name("cpu.cpp")
_HEADERS = ("avx2.h", "decode_avx2.h", "dispatcher.h", "python.h", "tensors.h")
INCLUDED = tuple(SOURCE.with_name(name) for name in _HEADERS)
KINDS = ("INT8", "UINT8", "E4M3", "E5M2", "TABLE4", "INT4")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-w", "-fno-math-errno")
EXACT = "-ffp-contract=off"
"""No multiplication is fused with an addition unless the source says so: decoded values have the bits of ``decode``."""


class Kernels(NamedTuple):
    """What a library does, as Python functions; ``cpu.cpp`` says what they take and give."""

    linear: Callable[..., Any]
    decode: Callable[..., Any]
    shortcut_linear: Callable[..., Any]
    shortcut_gather: Callable[..., Any]


_LOCK = threading.Lock()
FOUND: dict[str, Kernels | None] = {}
_SERVING: list[ctypes.CDLL] = []  # the one whose kernel is that of the op
_REMEMBERED: dict[str, Layout] = {}


def load(kind: str, *, build: bool = True) -> Kernels | None:
    """The kernels for one kind of codes, ``None`` where there are none; without ``build`` only if they are built.

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
        path = _folder() / f"{kind.lower()}-{_key(command)}.so"
        if not is_own(path):
            if not build:
                return None  # another time it may be
            if not _compile(command, kind, path):
                FOUND[kind] = None
                return None
        FOUND[kind] = _open(path)
        return FOUND[kind]


def is_possible() -> bool:
    """Whether there is a compiler, and nothing forbids its use."""
    return _command() is not None


@lru_cache(maxsize=1)
def _command() -> tuple[str, ...] | None:
    """How to compile; ``None`` where that is switched off, or there is nothing to compile with."""
    if is_switched_off() or sys.platform != "linux":
        return None
    found = find_compiler("CXX", ("g++", "clang++"))
    if not found:
        return None
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    return (*found, *FLAGS, EXACT, native)


@lru_cache(maxsize=1)
def _key(command: tuple[str, ...]) -> str:
    """What a build depends on: the source, the command, the compiler and the processor."""
    known = hashlib.sha256(b"".join(source.read_bytes() for source in (SOURCE, *INCLUDED)))
    known.update(repr(command).encode() + said_compiler(command[0]) + said_processor())
    return known.hexdigest()[:24]


@lru_cache(maxsize=1)
def _folder() -> Path:
    """Where builds are kept: a folder that nobody else can write to, at worst for this process alone."""
    return own_folder() or Path(tempfile.mkdtemp(prefix="torchtether-"))


def _compile(command: tuple[str, ...], kind: str, path: Path) -> bool:
    """Whether ``path`` is there now. Not linked with OpenMP: its calls find the one that torch has loaded."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made, linked = Path(folder, "kernels.o"), Path(folder, "kernels.so")
        openmp = ["-fopenmp"] if "g++" in Path(command[0]).name else []  # clang's needs a runtime of its own
        steps = (
            [*command, *openmp, f"-DCODES={kind}", "-c", str(SOURCE), "-o", str(made)],
            [command[0], "-shared", str(made), "-o", str(linked)],
        )
        try:
            for step in steps:
                subprocess.run(step, check=True, capture_output=True, timeout=300, umask=0o077)
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", b"") or str(error).encode()
            line = said.decode(errors="replace").strip().splitlines()[:1]
            warnings.warn(
                f"torchtether could not compile its kernels, so torch computes: {' '.join(line)}", stacklevel=2
            )
            return False
        os.replace(linked, path)  # processes that build at the same time put the same file there
    return True


_OF_PYTHON = (
    "PyObject_GetAttr PyObject_CallMethodObjArgs PyObject_CallFunctionObjArgs PyObject_Type Py_IncRef Py_DecRef "
    "PyLong_AsVoidPtr PyLong_AsLongLong PyLong_FromLongLong PyTuple_New PyTuple_SetItem PyEval_SaveThread "
    "PyEval_RestoreThread PyErr_Clear PyErr_SetString PyObject_GenericGetDict "
    "PyDict_GetItem PyTuple_GetItem PyTuple_Size PyDict_Size"
).split()
_OF_TORCH = (
    *(f"get_{fact}" for fact in ("dim", "sizes", "strides", "dtype", "device_type", "layout")),
    *("get_storage_size", "get_storage_offset", "get_data_ptr", "grad_mode_is_enabled"),
)
_OF_DISPATCHER = (
    *("aoti_torch_library_init_impl", "torch_library_impl", "torch_call_dispatcher"),
    *("torch_list_size", "torch_list_get_item", "torch_delete_list"),
    *("torch_string_length", "torch_string_c_str", "torch_delete_string"),
    *("torch_delete_stable_ivalue", "aoti_torch_delete_tensor_object", "aoti_torch_empty_strided"),
    "torch_exception_get_what_without_backtrace",
)
_OBJECTS = (
    *(torch.Tensor, torch.nn.Parameter),
    *(sys.intern("_cdata"), sys.intern("is_neg")),
    *(empty_on_cpu, torch.float32, torch.bfloat16, torch.float16),
    *(None, NotImplemented, False, IndexError),
    Layout,
    *(sys.intern("_kernel_layout"), sys.intern("_spec"), sys.intern("dtype")),
    *(sys.intern("max_norm"), sys.intern("padding_idx")),
    *WATCHED,
    *(torch.autograd.forward_ad, sys.intern("_current_level")),
    any_requires_grad,
    *(0, -1),
)
"""What the entries know by its address: ``Python`` of ``python.h``, in its order."""


def _addresses(functions: Iterable[Any], objects: Iterable[Any] = ()) -> Any:
    found = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    found += [id(known) for known in objects]
    return (ctypes.c_void_p * len(found))(*found)


def _open(path: Path) -> Kernels | None:
    """The library, which knows how to ask torch about tensors; ``None`` where that is not as it is known here."""
    try:
        library, torch_ = ctypes.CDLL(str(path)), ctypes.CDLL("libtorch_cpu.so")  # loaded, so its name is enough
        of_python = _addresses((getattr(ctypes.pythonapi, name) for name in _OF_PYTHON), _OBJECTS)
        of_torch = _addresses(getattr(torch_, f"aoti_torch_{name}") for name in _OF_TORCH)
        made = ctypes.cast(ctypes.pythonapi.PyCFunction_NewEx, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):  # built with an OpenMP that this torch does not bring, or another torch
        return None
    known = torch.empty(7, device="cpu", dtype=torch.float32)[1:].view(2, 3)
    library.tether_bind.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    if not library.tether_bind(of_python, of_torch, known._cdata, known.data_ptr()):  # type: ignore[attr-defined]
        return None
    as_function = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    make = as_function(made)
    _serve(library, torch_)
    methods = [ctypes.addressof(ctypes.c_char.in_dll(library, f"tether_{name}")) for name in Kernels._fields]
    return Kernels(*(make(method, None, None) for method in methods))


def _serve(library: ctypes.CDLL, torch_: ctypes.CDLL) -> None:
    """The op ``torchtether::linear`` runs no Python any more, for Weights that it is told to remember."""
    try:
        addresses = _addresses(getattr(torch_, name) for name in _OF_DISPATCHER)
    except AttributeError:  # another torch
        return
    library.tether_remember.argtypes = [
        *(ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64),
        *(ctypes.POINTER(ctypes.c_int64), ctypes.c_int64),
    ]
    library.tether_remember.restype = None
    if library.tether_serve(addresses, not _SERVING):
        _SERVING.append(library)


def remember(weight: str, layout: Layout, parts: int, order: Sequence[int]) -> None:
    """What the op ``torchtether::linear`` is told to be ``weight`` is multiplied without Python from now on.

    It is given that many ``parts``; ``order`` says which of them the kernels take, in the order in which they do.
    """
    with _LOCK:
        if _SERVING and weight not in _REMEMBERED:
            _REMEMBERED[weight] = layout  # the library keeps its address
            numbers = (ctypes.c_int64 * len(order))(*order)
            _SERVING[0].tether_remember(weight.encode(), layout.address, parts, numbers, len(order))
