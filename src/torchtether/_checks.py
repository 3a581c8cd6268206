"""Checks of public arguments: an error of one line that names the argument, instead of a trace from inside."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .errors import ArgumentError, CheckpointError
from .torch_private.modules import uncompiled

Model = TypeVar("Model", bound=nn.Module)


def describe(value: object) -> str:
    """Return a description of ``value`` for an error message.

    >>> describe(3), describe(int), describe(None)
    ('an int', 'the class int', 'None')
    """
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    word = type(value).__name__
    return f"{'an' if word[:1].lower() in 'aeiou' else 'a'} {word}"


def describe_some(words: Sequence[str], most: int = 4, *, between: str = ", ") -> str:
    """Return the first ``most`` of ``words`` on one line, and how many more there are.

    >>> describe_some(["a", "b", "c"], 2), describe_some(["a", "b"], 2)
    ('a, b and 1 more', 'a, b')
    """
    return between.join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def as_module(model: Model) -> Model:
    """Return ``model``, without the wrapper of ``torch.compile``. Raise ArgumentError if it is not a module."""
    if not isinstance(model, nn.Module):
        fix = "Give an instance of it." if isinstance(model, type) else "Give a torch.nn.Module."
        raise ArgumentError(f"is {describe(model)}, not a module", name="model", fix=fix)
    return uncompiled(model)


def check_path(path: object, name: str = "path") -> None:
    """Raise ArgumentError unless ``path`` is text or a path object, CheckpointError if no file can have that path."""
    text = path.__fspath__() if isinstance(path, PathLike) and not isinstance(path, type) else path
    if not isinstance(text, str):
        raise ArgumentError(f"is {describe(path)}, not a path", name=name, fix="Give text, or a pathlib.Path.")
    if not text:
        raise CheckpointError("is empty", name=name, fix="Give '.' for the current folder.")
    try:
        is_path = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        is_path = False
    if not is_path:
        raise CheckpointError("has a character that no path can have", name=repr(text), fix="Give another path.")


def check_unicode(name: str) -> None:
    """Raise CheckpointError for a name of a tensor with a lone surrogate, which no file can hold."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"the name is not Unicode text: {error.reason}", name=name, fix="Rename it.") from None


def check_int(value: object, name: str) -> None:
    """Raise ArgumentError unless ``value`` is an int."""
    if not isinstance(value, int):
        raise ArgumentError(f"is {describe(value)}, not an int", name=name, fix="Give a number.")


def check_tensor(tensor: object, name: str) -> None:
    """Raise ArgumentError unless ``tensor`` is a tensor."""
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"is {describe(tensor)}, not a tensor", name=name, fix="Give a torch.Tensor.")


def check_name(value: object, name: str) -> None:
    """Raise ArgumentError unless ``value`` is text."""
    if not isinstance(value, str):
        raise ArgumentError(f"is {describe(value)}, not the name of a tensor", name=name, fix="Give text.")


def check_flag(value: object, name: str) -> None:
    """Raise ArgumentError unless ``value`` is a bool; "no" and a size in the place of a flag would count as true."""
    if not isinstance(value, int) or value not in (0, 1):
        got = str(value) if isinstance(value, int) else describe(value)
        raise ArgumentError(f"is {got}, not a bool", name=name, fix="Give True or False.")


def check_callable(value: object, name: str, *, or_flag: bool = False, is_of_module: bool = False) -> None:
    """Raise ArgumentError unless ``value`` is None, a function or, with ``or_flag``, a bool.

    With ``is_of_module`` the function takes a module and changes it; a class is refused, although it can be called.
    """
    if value is None or callable(value) or (or_flag and isinstance(value, bool)):
        if is_of_module and isinstance(value, type):
            raise ArgumentError(f"is {describe(value)}, not a function", name=name, fix="Give a function of a module.")
        return
    word = "a bool or a function" if or_flag else "a function"
    raise ArgumentError(f"is {describe(value)}, not {word}", name=name, fix=f"Give {word}, or None.")


def as_size(size: int | str, name: str) -> int:
    """Return ``size`` in bytes. Raise ArgumentError if it is not a size.

    >>> as_size("1.5GB", "bytes"), as_size("200MiB", "bytes")
    (1500000000, 209715200)
    """
    if type(size) is int and size > 0:
        return size
    pattern = r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*"
    found = re.fullmatch(pattern, size.lower(), re.ASCII) if isinstance(size, str) else None
    if found is None or float(found[1]) == 0 or (found[3] and not found[2]):
        raise ArgumentError(f"{size!r:.40} is not a size", name=name, fix="Give bytes, or text like '5GB'.")
    return max(int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2] or " ")), 1)


def as_device(device: Any, name: str = "device") -> torch.device:
    """Return ``torch.device(device)``, with the index of the current device if ``device`` has none.

    Raises ArgumentError if it is not a device, or a device that this machine or this build of torch lacks.
    """
    try:
        place = torch.device(device)
    except (TypeError, RuntimeError) as error:
        why = first_line(error).partition(", got")[0] if isinstance(device, (str, int)) else ""
        raise ArgumentError(
            f"{device!r} is not a device" if len(repr(device)) < 40 else f"is {describe(device)}, not a device",
            name=name,
            fix=f"Give 'cpu', 'cuda:0' or a torch.device{f' ({why})' if why else ''}.",
        ) from None
    if place.type in ("cpu", "meta"):
        return place
    try:
        return torch.empty(0, device=place).device
    except (RuntimeError, AssertionError, ImportError) as error:  # torch raises one of these if a backend is absent
        what = f"{str(place)!r} cannot be used here: {first_line(error)}"
        raise ArgumentError(what, name=name, fix="Give a device that torch has here, such as 'cpu'.") from None


def first_line(error: BaseException) -> str:
    """Return the first line of the text of ``error``, shortened; its type if it has no text."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200].rstrip(".")
