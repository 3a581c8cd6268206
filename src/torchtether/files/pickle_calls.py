"""A check of the calls in a pickle, found in its instructions without running them."""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError

_LIMIT = 2**23
"""The most instructions: about two hundred thousand tensors. Each can take Python some hundred bytes."""

_TUPLE_LIMIT = 2**12
"""The most values in a tuple, nested ones included: forty instructions can make 2**40, which cannot be hashed."""

_CALLED = {
    "collections.OrderedDict",
    "torch.Size",
    "torch.device",
    "torch.serialization._get_layout",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch._utils._rebuild_qtensor",
    "torchtether.rebuild_weight",
    # other values in the checkpoint of a training
    "_codecs.encode",
    "builtins.complex",
    "builtins.set",
    "collections.Counter",
}
_CALLS = {"REDUCE", "NEWOBJ"}
_GETS = {"BINGET", "LONG_BINGET"}
_PUTS = {"BINPUT", "LONG_BINPUT"}
_TUPLES = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
_TEXTS = {"BINUNICODE", "SHORT_BINSTRING"}
_OTHERS = set(
    "PROTO STOP MARK GLOBAL BINPERSID BUILD APPEND APPENDS SETITEM SETITEMS EMPTY_TUPLE EMPTY_LIST EMPTY_DICT EMPTY_SET"
    " TUPLE TUPLE1 TUPLE2 TUPLE3 NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE"
    " SHORT_BINSTRING".split()
)


class _Value(NamedTuple):
    """A stand-in for a value on the stack of the unpickler."""

    name: str = ""
    """The full name of a global; empty for anything else."""
    text: str = ""
    """The text of a string; empty for anything else."""
    parts: tuple[_Value, ...] = ()
    """The items of a tuple."""
    size: int = 1
    """The number of values in a tuple, with nested ones and itself; 1 for anything else."""


_ANYTHING = _Value()


def load_to_meta(file: Any, *, name: str) -> Any:
    """Return the object in ``file``, by ``torch.save``, with its tensors on ``meta``; the calls are checked first.

    Raises CheckpointError for a pickle that is refused, and any error for a damaged file.
    """
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise CheckpointError("its entries are compressed, which torch.save never does", name=name)
            if entry.filename.endswith("data.pkl"):
                if entry.CRC == 0:  # torch.serialization.set_crc32_options(False) computes none, and zipfile checks it
                    del entry.CRC
                check_calls(archive.read(entry), name=name)
    file.seek(0)
    return torch.load(file, map_location="meta", weights_only=True)


def check_calls(pickle: bytes, *, name: str) -> None:
    """Raise CheckpointError if reading ``pickle`` would call a function that no state dict needs.

    ``weights_only`` runs no foreign code, but lets a file call ``bytearray(2**40)`` or ``torch.Tensor``. Tuples that
    would take forever to hash or to print are refused, too.
    """
    for called, given in _calls(pickle, name):
        if called == "torch._utils._rebuild_sparse_tensor":  # torch 2.15 cannot load one to meta
            raise CheckpointError("it holds a sparse tensor", name=name, fix="Save it with .to_dense(), or without it.")
        if called not in _CALLED:
            raise CheckpointError(
                f"its pickle calls {called}, which no state dict needs", name=name, fix="Save model.state_dict() alone."
            )
        if called == "_codecs.encode" and [part.text for part in given.parts[1:]] != ["latin1"]:
            # some codecs take quadratic time
            raise CheckpointError("its pickle encodes text by another codec than latin1", name=name)


def _calls(pickle: bytes, name: str) -> Iterator[tuple[str, _Value]]:
    """Yield the full name and the arguments of each call; values on the stack are stand-ins."""
    stack: list[_Value] = []
    marks: list[int] = []
    memo: dict[int, _Value] = {}
    argument: Any
    for count, (code, argument, _) in enumerate(pickletools.genops(pickle)):
        if count > _LIMIT:
            raise CheckpointError(f"its pickle has more than {_LIMIT} instructions", name=name)
        taken: list[_Value] = []
        if code.name in _CALLS:
            yield stack[-2].name or "an object that is not a global", stack[-1]
        elif code.name in _PUTS:
            memo[argument] = stack[-1]
            continue
        elif code.name not in _OTHERS and code.name not in _GETS:
            what = f"its pickle uses {code.name}, which torch.save does not write with pickle_protocol=2, its default"
            raise CheckpointError(what, name=name, fix="Load it with torch.load, and save it again.")
        if code.name == "MARK":
            marks.append(len(stack))
        elif pickletools.markobject in code.stack_before:
            start = marks.pop()
            taken = stack[start:]
            del stack[start - code.stack_before.index(pickletools.markobject) :]
        elif code.stack_before:
            taken = stack[-len(code.stack_before) :]
            del stack[-len(code.stack_before) :]
        if code.name == "GLOBAL":
            module, _, attribute = argument.partition(" ")
            stack.append(_Value(f"{'builtins' if module == '__builtin__' else module}.{attribute}"))
        elif code.name in _GETS:
            stack.append(memo[argument])
        elif code.name in _TUPLES:
            size = 1 + sum(part.size for part in taken)
            if size > _TUPLE_LIMIT:
                raise CheckpointError(f"a tuple in its pickle holds more than {_TUPLE_LIMIT} values", name=name)
            stack.append(_Value(parts=tuple(taken), size=size))
        elif code.name in _TEXTS:
            stack.append(_Value(text=argument))
        elif code.name != "MARK":
            stack += [_ANYTHING] * len(code.stack_after)
