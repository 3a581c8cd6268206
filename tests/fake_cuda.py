"""CUDA tensors without memory, on machines without a GPU: shapes, dtypes, and that nothing waits for the device.

Autograd cannot walk backward over such tensors without a GPU; what a backward calls can be called.
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
"""Numbers of the largest table of a scheme: those are kept on the device, but for observed ops (``bits.table_of``)."""


class CopyError(AssertionError):
    """Values came from another device, for which a CUDA graph cannot wait."""


class NoCopies(TorchDispatchMode):
    """Refuse copies between devices; fake tensors refuse to tell values, and sizes that follow from values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func in (aten._to_copy.default, aten.copy_.default):
            source = args[0] if func is aten._to_copy.default else args[1]
            if source.device != made.device and source.numel() > TABLE:
                raise CopyError(f"{tuple(source.shape)} {source.dtype} from {source.device} to {made.device}")
        return made


def _guards():
    """torch's guards of devices, by the number of their type; those of "meta" do nothing."""
    library = next(pathlib.Path(torch.__file__).parent.glob("lib/*c10.*"), None)
    name = "_ZN3c104impl26device_guard_impl_registryE"
    try:
        return (ctypes.c_void_p * 15).in_dll(ctypes.CDLL(str(library)), name)
    except (OSError, ValueError):
        pytest.skip("this torch does not show its guards of devices: fake CUDA tensors cannot be indexed")


@contextmanager
def fake_cuda():
    """All tensors that are made inside are fake; those of ``device="cuda"`` can be computed with.

    torch built without CUDA has no guard for such devices, for which indexing asks: the one of "meta" stands in.
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
