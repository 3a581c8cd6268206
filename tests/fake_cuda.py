"""Fake CUDA tensors on machines without a GPU, to test shapes, dtypes, and that nothing waits for the device.

Autograd cannot run backward over such tensors without a GPU; the functions that backward calls can be called.
"""

import ctypes
import pathlib
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
TABLE = 256
"""Elements of a scheme's largest table; tables are cached on the device but for observed ops (``bits.table_of``)."""


class CopyError(AssertionError):
    """Raised for a copy of values from another device, which a CUDA graph cannot wait for."""


class NoCopies(TorchDispatchMode):
    """Raise CopyError for copies between devices; fake tensors themselves raise for reads of values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func in (aten._to_copy.default, aten.copy_.default):
            source = args[0] if func is aten._to_copy.default else args[1]
            if source.device != made.device and source.numel() > TABLE:
                raise CopyError(f"{tuple(source.shape)} {source.dtype} from {source.device} to {made.device}")
        return made


def _guards():
    """Return torch's table of device guards, by number of the device type; the guard of "meta" does nothing."""
    library = next(pathlib.Path(torch.__file__).parent.glob("lib/*c10.*"), None)
    name = "_ZN3c104impl26device_guard_impl_registryE"
    try:
        return (ctypes.c_void_p * 15).in_dll(ctypes.CDLL(str(library)), name)
    except (OSError, ValueError):
        pytest.skip("this torch does not show its guards of devices: fake CUDA tensors cannot be indexed")


@contextmanager
def fake_cuda():
    """Make all new tensors inside the block fake; ops work on those of ``device="cuda"``.

    A torch built without CUDA has no device guard for CUDA, which indexing needs, so that of "meta" is put there.
    """
    cuda, meta, guards = 1, 14, None if torch.backends.cuda.is_built() else _guards()
    if guards is not None:
        held, guards[cuda] = guards[cuda], guards[meta]
    try:
        with FakeTensorMode() as mode:
            yield mode
    finally:
        if guards is not None:
            guards[cuda] = held
