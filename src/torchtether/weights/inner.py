"""Pickling of inner tensors, and the empty storage of the wrapper subclass that holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._dtypes import dtype_from_name, dtype_name
from ..errors import UnsupportedOpError
from ..torch_private.tensors import as_plain

_UNSIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def to_pickle(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return ``tensors``, float8 and wide unsigned ones viewed as other integers, and the dtype names of those.

    Plain pickle has no storages of these types.

    >>> to_pickle({"codes": torch.ones(1).to(torch.float8_e4m3fn), "scale": torch.ones(1)})
    ({'codes': tensor([56], dtype=torch.uint8), 'scale': tensor([1.])}, {'codes': 'float8_e4m3fn'})
    """
    viewed = {name: dtype for name, one in tensors.items() if (dtype := _stand_in(one)) is not None}
    names = {name: dtype_name(tensors[name].dtype) for name in viewed}
    return {name: one.view(viewed[name]) if name in viewed else one for name, one in tensors.items()}, names


def from_pickle(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Invert ``to_pickle``. Raise SchemeError for a name that is no dtype's."""
    return {name: one.view(dtype_from_name(names[name])) if name in names else one for name, one in tensors.items()}


def _stand_in(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype in which plain pickle can store the bytes of ``tensor``; ``None`` if it has one for its own."""
    return torch.uint8 if tensor.is_floating_point() and tensor.itemsize == 1 else _UNSIGNED.get(tensor.dtype)


class EmptyStorage(torch.UntypedStorage):
    """The storage of a wrapper, which has no memory: ops that torch would run at address 0 raise UnsupportedOpError.

    ``nbytes()`` is the size of the values.  ``data_ptr()`` raises a RuntimeError that begins as torch's own does:
    on any other error tools assume the address 0, and take two Weights of one size for the same tensor.
    """

    def data_ptr(self) -> int:
        """Return 0 where nothing has memory, on ``meta``; else raise RuntimeError."""
        if self.device.type == "meta":
            return 0
        raise RuntimeError(
            "Attempted to access the data pointer on an invalid python storage: it is that of a wrapper around other "
            "tensors. Write a Weight by tt.save or torch.save, or through torchtether.integrations, and load a file "
            "into it by tt.load."
        )

    def __repr__(self) -> str:
        return f"EmptyStorage({self.nbytes()} bytes claimed, device='{self.device}')"

    __str__ = __repr__


_FIX = "Call share_memory_() on the tensor, or dequantize() for its values."
_FIX_OF_COPY = "Give torch's async_save tt.distributed.state_dict(model), or dequantize() the tensor for its values."


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedOpError(
            f"{name} needs memory, which the storage of a wrapper around other tensors does not have",
            fix=_FIX_OF_COPY if name == "copy_" else _FIX,  # torch stages a state dict by copying storages
        )

    refuse.__name__ = name
    return refuse


# Each of these would crash the process, because torch does not check for memory. Conversions such as float() call _to.
_OF_MEMORY = (
    *("__setitem__", "__delitem__", "_set_from_file", "_share_fd_cpu_", "_share_filename_cpu_", "_to"),
    *("byteswap", "copy_", "share_memory_"),
)
for _name in _OF_MEMORY:
    setattr(EmptyStorage, _name, _refusing(_name))


def empty_storage(tensor: Tensor, getter: Callable[[Tensor], Any] = Tensor.untyped_storage) -> Any:
    """Return ``getter(tensor)``, the storage of a wrapper, which from now on refuses ops that would crash.

    >>> from torchtether import Weight, int8
    >>> storage = Weight.encode(torch.ones(2, 4), int8()).untyped_storage()
    >>> storage.nbytes()
    32
    >>> storage.share_memory_()
    Traceback (most recent call last):
    torchtether.errors.UnsupportedOpError: share_memory_ needs memory, which the storage of a wrapper ...
    """
    with as_plain():
        held = tensor.untyped_storage()
        if type(held) is torch.UntypedStorage:  # torch keeps this object, so its class stays
            held.__class__ = EmptyStorage
        return held if getter is Tensor.untyped_storage else getter(tensor)
