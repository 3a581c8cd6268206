"""The libraries of kernels, bound: they know Python and torch by the addresses of functions, without headers."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..._signals import renewed_after_fork
from ...torch_private.observers import WATCHED
from ...torch_private.tensors import any_requires_grad, empty_on_cpu, impl_id
from .layout import Layout


class Kernels(NamedTuple):
    """What a library does, as Python functions; ``cpu.cpp`` says what they take and give."""

    linear: Callable[..., Any]
    decode: Callable[..., Any]
    shortcut_linear: Callable[..., Any]
    shortcut_gather: Callable[..., Any]


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
    *(None, NotImplemented, False, IndexError, MemoryError),
    Layout,
    *(sys.intern("_kernel_layout"), sys.intern("_spec"), sys.intern("dtype")),
    *(sys.intern("max_norm"), sys.intern("padding_idx")),
    *WATCHED,
    *(torch.autograd.forward_ad, sys.intern("_current_level")),
    any_requires_grad,
    *(0, -1),
)
"""What the entries know by its address: ``Python`` of ``python.h``, in its order."""

_LOCK = renewed_after_fork(threading.Lock())
_SERVING: list[ctypes.CDLL] = []  # the one whose kernel is that of the op
_REMEMBERED: dict[str, Layout] = {}


def _addresses(functions: Iterable[Any], objects: Iterable[Any] = ()) -> Any:
    found = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    found += [id(known) for known in objects]
    return (ctypes.c_void_p * len(found))(*found)


def bind(path: Path) -> Kernels | None:
    """Return the library after it has learnt how to ask torch about tensors; ``None`` if torch is another one."""
    try:
        library, torch_ = ctypes.CDLL(str(path)), ctypes.CDLL("libtorch_cpu.so")  # loaded, so its name is enough
        of_python = _addresses((getattr(ctypes.pythonapi, name) for name in _OF_PYTHON), _OBJECTS)
        of_torch = _addresses(getattr(torch_, f"aoti_torch_{name}") for name in _OF_TORCH)
        made = ctypes.cast(ctypes.pythonapi.PyCFunction_NewEx, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):  # built with an OpenMP that this torch does not bring, or another torch
        return None
    known = torch.empty(7, device="cpu", dtype=torch.float32)[1:].view(2, 3)
    library.tether_bind.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    if not library.tether_bind(of_python, of_torch, impl_id(known), known.data_ptr()):
        return None
    as_function = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    make = as_function(made)
    _serve(library, torch_)
    methods = [ctypes.addressof(ctypes.c_char.in_dll(library, f"tether_{name}")) for name in Kernels._fields]
    return Kernels(*(make(method, None, None) for method in methods))


def _serve(library: ctypes.CDLL, torch_: ctypes.CDLL) -> None:
    """Let the op ``torchtether::linear`` run without Python for remembered Weights."""
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
    """Let the op ``torchtether::linear`` multiply ``weight`` without Python from now on.

    It is given that many ``parts``; ``order`` says which of them the kernels take, in the order in which they do.
    """
    with _LOCK:
        if _SERVING and weight not in _REMEMBERED:
            _REMEMBERED[weight] = layout  # the library keeps its address
            numbers = (ctypes.c_int64 * len(order))(*order)
            _SERVING[0].tether_remember(weight.encode(), layout.address, parts, numbers, len(order))
