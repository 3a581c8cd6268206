"""The extension module, imported and bound to the torch of this process at its first use, or why it is unavailable."""

from __future__ import annotations

import os
import sysconfig
import threading
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

from .._interruptions import renewed_after_fork
from .._warnings import warn
from ..torch_private.observers import WATCHED, past_modes
from ..torch_private.tensors import any_requires_grad, empty_on_cpu, impl_id
from .digest import digest_of

_LOCK = renewed_after_fork(threading.Lock())
_SOURCES = Path(__file__).parent / "sources"
_LIBRARIES = ("libtorch_cpu.so", "libtorch_cpu.dylib")
_module: ModuleType | None = None
_state = ""  # empty until the first use
_level = ""


def native() -> ModuleType | None:
    """Return the bound module; ``None`` if it is unavailable, and then ``state`` says why."""
    if not _state:
        with _LOCK:
            if not _state:
                _find()
    return _module


def state() -> str:
    """Return the state of the module: ``compiled (avx2)``, say, or why it is unavailable.

    ``TORCHTETHER_COMPILE=0`` in the environment of the process disables it.
    """
    native()
    return _state


def level() -> str:
    """Return the instruction set of the kernels in use; "" without the module.

    It is ``avx512_amx``, ``avx512_bf16`` (both include VNNI), ``avx512_vnni``, ``avx2`` or ``portable``.
    """
    native()
    return _level


def _find() -> None:
    global _module, _state, _level
    if os.environ.get("TORCHTETHER_COMPILE", "1").lower() in ("0", "false", "off", "no"):
        _state = "disabled by TORCHTETHER_COMPILE"
        return
    try:
        module, outcome = _load()
    except ModuleNotFoundError:
        lacks_gil = sysconfig.get_config_var("Py_GIL_DISABLED")
        _state = "the kernels need a Python with a GIL" if lacks_gil else "torchtether was installed without a compiler"
        return
    except (ImportError, KeyError, TypeError) as error:
        module, outcome = None, str(error)
    if module is None:
        _state = f"the compiled module cannot be used: {outcome}"
        warn(f"torchtether: {_state}. Torch ops compute instead")
    else:
        _module, _state, _level = module, f"compiled ({outcome})", outcome


def _load() -> tuple[ModuleType | None, str]:
    """Return the bound module and its level, or ``None`` and why it cannot be used."""
    module, here = import_module("torchtether.compiled._native"), digest_of(_SOURCES)
    if here and getattr(module, "SOURCES", "") != here:  # an editable installation with newer files
        return None, "it was built from other sources. Install torchtether again"
    return module, _bind(module)


def _bind(module: ModuleType) -> str:
    """Give the module the functions of torch that it calls; return its level. Raise ImportError if they do not fit."""
    with past_modes():  # the first use may be in a graph that is compiled
        given = torch.empty(7, device="cpu", dtype=torch.float32)[1:].view(2, 3)
        address = given.data_ptr()
    modes, level, casts, traces = WATCHED
    objects = {
        "tensor": torch.Tensor,
        "parameter": torch.nn.Parameter,
        "empty": empty_on_cpu,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "modes": modes,
        "level": level,
        "casts": casts,
        "traces": traces,
        "forward_ad": torch.autograd.forward_ad,
        "any_requires_grad": any_requires_grad,
    }
    vectors = torch.backends.cpu.get_cpu_capability()  # ATEN_CPU_CAPABILITY may limit it
    error: ImportError | None = None
    beside = os.path.join(os.path.dirname(torch.__file__), "lib", "")
    for library in (*_LIBRARIES, *(beside + name for name in _LIBRARIES)):  # for a loaded library its name is enough
        try:
            found: str = module.bind(library, objects, impl_id(given), address, vectors)
            return found
        except ImportError as failed:
            error = error or failed
    assert error is not None
    raise error
