"""A reader of the pickle ``.metadata`` by torch.distributed.checkpoint; it runs nothing that the pickle names."""

from __future__ import annotations

import pickle
from typing import Any, ClassVar

import torch


class _Bag:
    """Stands for a dataclass of torch.distributed.checkpoint: its fields, and no code."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.__dict__["values"] = state


class _Ignored:
    """A stand-in for layouts, memory formats and paths, which are ignored; no instruction can set attributes on it.

    Python 3.11.2, that of Debian 12, writes a member of an enum, here a memory format, as a call of ``getattr``.
    """

    __slots__ = ()

    def __call__(self, *given: Any) -> None:
        """Return ``None`` for any arguments."""


_IGNORE = _Ignored()


def _empty_dict() -> dict[Any, Any]:
    """Return a dict in place of an OrderedDict, which a pickle creates empty and fills key by key."""
    return {}


_KEYS = (str, int, _Bag)
"""Types allowed as keys of dicts: they are fast to hash and to print."""

_BAGS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties ChunkStorageMetadata MetadataIndex"
        " StorageMeta"
    ).split(),
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
}
_IGNORED = {
    ("builtins", "getattr"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    *(
        (module, name)
        for module in ("pathlib", "pathlib._local")  # Python 3.13 writes the latter
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path")
    ),
}


_UnpicklerInPython: Any = pickle._Unpickler


class MetadataUnpickler(_UnpicklerInPython):  # type: ignore[misc]
    """An unpickler that accepts only the classes of the metadata, as bags of fields.

    It derives from Python's unpickler in Python. The one in C allocates a list as long as the largest index of a PUT,
    so that a file of ten bytes can fill the memory, and hashes any key, which never ends for deeply nested tuples.
    """

    stack: list[Any]
    dispatch: ClassVar = {  # without sets, whose items are hashed, too, and bytearrays, allocated before they are read
        code: run for code, run in _UnpicklerInPython.dispatch.items() if code not in b"\x8f\x90\x91\x96\x97\x98"
    }

    def load_setitems(self) -> None:
        """Put pairs into a dict; keys must be of ``_KEYS``."""
        pairs = self.pop_mark()
        if type(self.stack[-1]) is not dict or not all(type(key) in _KEYS for key in pairs[::2]):
            raise pickle.UnpicklingError("it changes a dict in a way that no checkpoint needs")
        self.stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))

    dispatch[pickle.SETITEMS[0]] = load_setitems

    def load_setitem(self) -> None:
        """Put one pair into a dict."""
        pair = self.stack[-2:]
        del self.stack[-2:]
        self.metastack.append(self.stack)
        self.stack = pair
        self.load_setitems()

    dispatch[pickle.SETITEM[0]] = load_setitem

    def find_class(self, module: str, name: str) -> Any:
        if name in _BAGS.get(module, ()):
            return _Bag
        if (module, name) in _IGNORED:
            return _IGNORE
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return _empty_dict
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
