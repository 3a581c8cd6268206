"""Schemes as text: a name, with options as in a Python call; nothing is evaluated."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

import torch

from .._dtypes import dtype_from_name, dtype_name
from ..errors import ArgumentError, RuleError, SchemeError
from .affine import Affine
from .biased import Biased
from .codebook import Codebook
from .column_scaled import ColumnScaled
from .named import FP8_BLOCKS, NAMED, resolve
from .scaled_float import ScaledFloat
from .scheme import NAMING, Scheme
from .search import RANGE
from .super_blocks import SuperBlocks

_LONGEST = 500

_CLASSES = {kind.__name__: kind for kind in (Affine, Biased, Codebook, ColumnScaled, ScaledFloat, SuperBlocks)}


def scheme_from_text(text: str) -> Scheme:
    """Return the scheme that ``text`` spells: ``int4``, ``int4(group_size=64, symmetric=True)``, ``Affine(bits=6)``.

    Names and options are those of ``tt.int4`` and its like, and of the classes of schemes, as ``str(scheme)`` prints
    them; they are looked up in tables. Values are numbers, ``True``, ``False``, ``None``, tuples, strings and names of
    dtypes, with or without quotes, and a scheme within a scheme. Raises RuleError for anything else, and SchemeError
    for a value that the scheme refuses.

    >>> scheme_from_text("int4(group_size=64, symmetric=True)") == NAMED["int4"](group_size=64, symmetric=True)
    True
    >>> scheme_from_text("SuperBlocks(4, minimum=True)") == SuperBlocks(4, minimum=True)
    True
    >>> scheme_from_text("int8(group=64)")
    Traceback (most recent call last):
    torchtether.errors.RuleError: int8: there is no option 'group'. It has group_size, symmetric, scale_dtype, fit.
    """
    text = text.strip().removeprefix("tt.")  # as errors and guides write it
    name, bracket, _ = text.partition("(")
    name = name.strip()
    make: Callable[..., Scheme] | None = _CLASSES.get(name)
    if make is None:
        default = resolve(name)
        if not bracket:
            return default
        make = NAMED[name]
    hints = typing.get_type_hints(vars(make).get("__init__", make))
    known = {option: one for option, one in hints.items() if option != "return"}
    call = _parsed(text if bracket else f"{name}()", name, make, tuple(known))
    given = dict(zip(known, call.args, strict=False))
    options: dict[str, Any] = {}
    for option, node in (*given.items(), *((keyword.arg, keyword.value) for keyword in call.keywords)):
        if option is None or option not in known:
            has = f"It has {', '.join(known)}." if known else "It has none."
            raise RuleError(f"there is no option {option!r}", name=name, fix=has)
        if option in options:
            raise RuleError(f"the option {option!r} is given twice", name=name)
        options[option] = _value(node, known[option], f"{name}({option}=)")
    try:
        return make(**options)
    except (SchemeError, ArgumentError) as error:
        raise error.named(name) from None
    except TypeError:  # an option without a default
        raise RuleError(f"{text[:80]!r} lacks an option", name=name, fix=f"It has {', '.join(known)}.") from None


_OPTIONS: dict[str, Callable[[Any], Any]] = {
    "group_size": lambda scheme: scheme.block[-1],
    "granularity": lambda scheme: {block: name for name, block in FP8_BLOCKS.items()}[scheme.block],
    "double_quant": lambda scheme: scheme.nested,
}
"""Functions that read an option from a scheme whose field has another name."""


def scheme_to_text(scheme: Scheme) -> str:
    """Return the shortest text that ``scheme_from_text`` reads as ``scheme``; ``str(scheme)`` if it has no name.

    >>> scheme_to_text(NAMED["int4"]()), scheme_to_text(NAMED["int4"](group_size=32, scale_dtype=torch.bfloat16))
    ('int4', 'int4(group_size=32, scale_dtype=bfloat16)')
    """
    return _name_of(scheme) or str(scheme)


def _name_of(scheme: Scheme) -> str:
    try:
        return _found_name(scheme)
    except TypeError:  # a scheme of somebody's own that has no hash
        return ""


def _name_with_fit(scheme: Scheme) -> str:
    text, fit = _name_of(scheme), getattr(_held(scheme), "fit", RANGE)
    if not text or fit == RANGE:
        return text
    return f"{text[:-1]}, fit={fit})" if text.endswith(")") else f"{text}(fit={fit})"


def _held(scheme: Scheme) -> Scheme:
    return scheme.scheme if isinstance(scheme, ColumnScaled) else scheme


NAMING.append(_name_with_fit)


@functools.lru_cache(256)
def _found_name(scheme: Scheme) -> str:
    held = _held(scheme)
    texts: list[str] = []
    for name, make in NAMED.items():
        parameters = inspect.signature(make).parameters
        keys = [key for key in parameters if key != "fit"]  # fit concerns encoding only
        try:
            options = {key: _OPTIONS[key](held) if key in _OPTIONS else getattr(held, key) for key in keys}
            if make(**options) != scheme:
                continue
        except (AttributeError, KeyError, TypeError, IndexError, SchemeError):  # a scheme of another family
            continue
        changed = [(key, value) for key, value in options.items() if value != parameters[key].default]
        words = (f"{key}={dtype_name(one) if isinstance(one, torch.dtype) else one}" for key, one in changed)
        texts.append(f"{name}({', '.join(words)})" if changed else name)
    return min(texts, key=len, default="")


def _parsed(text: str, name: str, make: Callable[..., Scheme], known: tuple[str, ...]) -> ast.Call:
    call = None
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        if len(text) <= _LONGEST:
            parsed = ast.parse(text.strip(), mode="eval").body
            ast.unparse(parsed)  # raises if the text is nested too deeply for ``_value``
            call = parsed
    positional = [one for one in inspect.signature(make).parameters.values() if one.kind is not one.KEYWORD_ONLY]
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or len(call.args) > len(positional):
        example = f"{name}({', '.join(f'{option}=...' for option in known)})"
        raise RuleError(f"{text[:80]!r} is not understood", name=name, fix=f"Write {name}, or {example}.")
    return call


def _kinds_of(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


def _value(node: ast.expr, kind: Any, where: str) -> Any:
    """Return the value that ``node`` spells, of the type ``kind``."""
    kinds = [typing.get_origin(one) or one for one in _kinds_of(kind)]
    if Scheme in kinds:
        return scheme_from_text(ast.unparse(node))
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # a string without quotes
        value = ast.unparse(node).removeprefix("torch.")
    if torch.dtype in kinds and isinstance(value, str):
        try:
            return dtype_from_name(value)
        except SchemeError as error:
            raise error.named(where) from None
    if type(value) not in kinds:
        words = " or ".join("None" if one is types.NoneType else one.__name__ for one in kinds)
        raise RuleError(f"{ast.unparse(node)[:80]} is no {words}", name=where)
    return value
