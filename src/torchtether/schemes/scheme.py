"""The interface of every scheme, which encodes values as plain tensors (*parts*) and decodes them.

A scheme is a frozen dataclass: comparable and hashable, so that JSON and guards of ``torch.compile`` need no more code.
To add one, add a file with such a class; defining the class registers its ``kind``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import compiled
from .._checks import describe
from .._dtypes import dtype_from_name, dtype_name
from ..errors import SchemeError, UnsupportedOpError
from ..geometry.views import Shape
from . import encoders

Parts = Mapping[str, Tensor]

NAMING: list[Callable[[Scheme], str]] = []
"""Functions that return the name of a scheme with its options, or "": a module above knows the schemes with names."""

SCHEMES: dict[str, type[Scheme]] = {}
"""Every scheme class by its ``kind``; filled as the classes are defined."""


class Part(NamedTuple):
    """Describe one part of a Weight without its data; ``Scheme.layout`` returns one for each part.

    ``shape``  the shape of the part
    ``dtype``  its dtype; ``None`` where it is the compute dtype of the Weight, to which ``convert`` must cast the part
    ``span``   the number of elements of the Weight, in row-major order, that one entry along dim 0 of the part covers;
               0 if every row of the Weight needs the whole part. Cutting and joining rows needs nothing else

    >>> Part((4, 6), torch.int8, 6), Part((4, 1), torch.float32, 6).span  # codes and a scale per row of (4, 6)
    (Part(shape=(4, 6), dtype=torch.int8, span=6), 6)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    span: int


def check_flags(scheme: Scheme, *fields: str) -> None:
    """Raise SchemeError unless each of ``fields`` is a bool; "no" in the place of a flag would count as true."""
    for field in fields:
        value = getattr(scheme, field)
        if not isinstance(value, int) or value not in (0, 1):
            raise SchemeError(f"{field} must be True or False, got {value!r}", name=type(scheme).__name__)


def check_encoded(scheme: Scheme, made: Parts, layout: Mapping[str, tuple[Shape, torch.dtype | None]]) -> None:
    """Raise SchemeError unless ``encode`` has made parts of the names, shapes and dtypes of ``layout``.

    ``None`` stands for any dtype.
    """
    encoder = f"{type(scheme).__name__}.encode"
    if made.keys() != layout.keys():
        raise SchemeError(
            f"{encoder} returns the parts {', '.join(made)}, layout has {', '.join(layout)}",
            fix="The parts may depend on the shape only, not on the values: encode all that layout has.",
        )
    for name, (shape, dtype) in layout.items():
        part, is_any = made[name], dtype is None
        if not isinstance(part, Tensor):
            raise SchemeError(f"{encoder} returns {name} as {type(part).__name__}, not as a tensor")
        if tuple(part.shape) != shape or not (is_any or part.dtype is dtype):
            kind = "" if is_any else f" in {dtype}"
            raise SchemeError(
                f"{encoder} returns {name} of shape {tuple(part.shape)} in {part.dtype}, layout has {shape}{kind}"
            )


class Scheme:
    """Encode values as parts, and decode them.

    Subclass it as a frozen dataclass, give it a ``kind``, and write ``layout``, ``encode``, ``decode`` and ``bound``;
    or, for codes with numbers per block, subclass ``BlockScheme``, which needs less.  The number of parts and their
    shapes depend on the fields and ``shape`` alone, never on values.  The last dimension of a tensor is the quantized
    one; ``shape`` is always that of the whole contiguous tensor.

    Files hold ``kind`` and the fields that differ from their defaults: later changes of ``kind`` or of a default would
    give existing files another meaning.

    ``layout`` returns ``tt.Part(shape, dtype, span)`` for each part.  ``span`` is the number of elements of the tensor,
    in row-major order, that one entry along dim 0 of the part covers, or 0 if every row needs the whole part.  By it
    rows of the parts are cut and joined, for slices and shards.

    >>> from torchtether.schemes import Affine
    >>> Affine(bits=8).layout((4, 6))["scale"]
    Part(shape=(4, 1), dtype=torch.float32, span=6)
    """

    kind: ClassVar[str]
    transparent: ClassVar[bool] = False
    """True where the one part *is* the tensor (Plain): views and in-place ops then run on the part itself."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in cls.__dict__:
            known = SCHEMES.get(cls.kind)
            if known is not None and known.__qualname__ != cls.__qualname__:
                raise SchemeError(
                    f"the scheme kind {cls.kind!r} belongs to {known.__qualname__} already",
                    name=cls.__qualname__,
                    fix="Choose another kind.",
                )
            SCHEMES[cls.kind] = cls

    # -- for every scheme to write ------------------------------------------------------------------------------

    def layout(self, shape: Shape) -> dict[str, Part]:
        """Return the parts of a tensor of ``shape``, in order. Raises SchemeError if the shape does not fit."""
        raise NotImplementedError(_unwritten(self, "layout"))

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """Return the parts of ``values`` (any float dtype, any strides), as ``layout`` says, on the same device.

        Computed in float32 and in bounded scratch, and in new memory, also where a part holds ``values`` as they are.
        Raises SchemeError for values that are not finite.
        On ``meta`` it returns parts on ``meta``.
        """
        raise NotImplementedError(_unwritten(self, "encode"))

    def decode(self, parts: Parts, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Return the values of ``parts`` as a new contiguous tensor of ``shape`` and ``dtype``.

        They are computed in float32 and rounded once.  As in torch's own conversion, values beyond the range of
        ``dtype`` become infinite, also those that only rounding to a code moved there (65504 in float16, for most
        schemes).
        """
        raise NotImplementedError(_unwritten(self, "decode"))

    def bound(self, parts: Parts, shape: Shape) -> Tensor:
        """Return the largest error of ``decode(encode(values))`` per element: float32, broadcastable to ``shape``."""
        raise NotImplementedError(_unwritten(self, "bound"))

    # -- for schemes that wrap another ----------------------------------------------------------------------------

    @property
    def decoder(self) -> Scheme:
        """Return the scheme that decodes the parts: this one, or the one that it wraps."""
        return self

    def master(self, parts: Parts, shape: Shape) -> Tensor | None:
        """Return the part that in-place ops read and change; ``None`` if they start from the decoded values."""
        return None

    def adopt(self, given: Scheme, parts: Parts, shape: Shape) -> dict[str, Tensor] | None:
        """Return copies of ``parts``, which are in the scheme ``given``, as parts of this scheme.

        ``None`` if the values must be encoded.
        """
        if given.decoder != self or given == self:
            return None
        return {name: parts[name].clone() for name in self.layout(shape)}

    # -- defaults, which most schemes keep ------------------------------------------------------------------------

    def gather(self, parts: Parts, shape: Shape, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values of the dim-0 slices in the 1-D integer ``index``: ``decode(...)[index]``."""
        return self.decode(parts, shape, dtype).index_select(0, index)

    def encode_into(self, values: Tensor, parts: Parts) -> None:
        """Write the encoding of ``values`` to ``parts``, existing tensors (perhaps slices of larger ones).

        Raises SchemeError, before the first write, if ``encode`` returns other names or shapes.
        """
        made = self.encode(values)
        check_encoded(self, made, {name: (tuple(part.shape), None) for name, part in parts.items()})
        for name, part in made.items():
            parts[name].copy_(part)

    def recipe(self, shape: Shape, dtype: torch.dtype) -> compiled.Recipe | None:
        """Return the settings of the compiled loop for ``shape`` (contiguous) and ``dtype``; ``None`` without one."""
        return None

    def _try_encode(self, values: Tensor, parts: Parts) -> bool:
        """Write all of ``parts`` by a loop or kernel; return False if none takes ``values``, as under a tracer."""
        if not encoders.can_read(values):
            return False
        return encoders.encode_rows(self.recipe(tuple(values.shape), values.dtype), values, parts)

    def decode_into(self, parts: Parts, shape: Shape, start: int, stop: int, out: Tensor) -> None:
        """Write the rows from ``start`` to ``stop`` to ``out`` (stop - start, K), of any float dtype.

        Rows are those of the tensor seen as (M, K), every dimension but the last in one; ``out`` may be a reused
        buffer.  Schemes that can decode some rows alone do so, in scratch of the size of those rows.
        """
        out.copy_(self.decode(parts, shape, out.dtype).reshape(-1, shape[-1])[start:stop])

    def reencode(self, values: Tensor, held: Parts) -> dict[str, Tensor]:
        """Return the parts of ``values`` that replace ``held``, as in-place ops write them.

        Scales of ``held`` that still fit are kept, so that writing back unchanged values changes nothing.  Schemes
        whose ``encode`` has this property already need not override it.
        """
        return self.encode(values)

    def update(self, values: Tensor, held: Parts, *, shrink: bool = True) -> dict[str, Tensor] | None:
        """Return the parts of ``values``, an optimizer's update of ``held``; ``None`` if this scheme has no update.

        Each value becomes one of its two neighbours, drawn by torch's default generator so that the mean of many draws
        is the value; values on the grid stay.  Scales of ``held`` stay while they reach the values, and grow rather
        than clip.  Without ``shrink`` they also stay where the values use little of their range.  ``values`` should be
        float32. Raises SchemeError for values that are not finite, as ``encode`` does.

        After ``None`` the values are rounded to nearest, and steps below half a code have no effect.
        """
        return None

    def can_view(self, old: Shape, new: Shape) -> bool:
        """Return whether the parts of ``old``, reshaped without copying, are those of ``new``."""
        return old[-1:] == new[-1:] and math.prod(old) == math.prod(new)

    def convert(self, parts: Parts, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the parts for another compute dtype: the same ones, whose dtypes the scheme fixes."""
        return dict(parts)

    def empty(self, shape: Shape, dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
        """Return uninitialised parts of a tensor of ``shape`` whose compute dtype is ``dtype``."""
        layout = self.layout(tuple(shape))
        return {name: torch.empty(p.shape, dtype=p.dtype or dtype, device=device) for name, p in layout.items()}

    def check(self, shape: Shape, *, name: str = "") -> None:
        """Raise SchemeError, naming ``name``, if a tensor of ``shape`` does not fit this scheme."""
        try:
            self.layout(tuple(shape))
        except SchemeError as error:
            raise error.named(name) from None

    def nbytes(self, shape: Shape, dtype: torch.dtype) -> int:
        """Return the bytes that a tensor of ``shape`` takes in this scheme with the compute dtype ``dtype``."""
        return sum(math.prod(p.shape) * (p.dtype or dtype).itemsize for p in self.layout(tuple(shape)).values())

    def __str__(self) -> str:
        """Return its name with options, such as ``int4(group_size=32)``, or without a name its class with fields."""
        return next(filter(None, (name_of(self) for name_of in NAMING)), "") or self._as_class()

    def _as_class(self) -> str:
        """Return the class with its first field and those that differ from their defaults, long tables by length."""
        words: list[str] = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value != field.default or not words:
                is_long = isinstance(value, tuple) and len(value) > 4
                words.append(f"{field.name}=<{len(value)} values>" if is_long else f"{field.name}={value}")
        return f"{type(self).__name__}({', '.join(words)})"

    def to_json(self) -> dict[str, Any]:
        """Return the scheme as JSON values: its kind, and the fields that differ from their defaults.

        Raises SchemeError if its class is no dataclass, or has no kind of its own, or if a file cannot hold a field.

        >>> from torchtether.schemes import Affine, scheme_from_json
        >>> scheme_from_json(Affine(bits=4).to_json()) == Affine(bits=4)
        True
        """
        if "__dataclass_fields__" not in type(self).__dict__:  # what its base has are the fields and defaults of that
            fix = "Write @dataclass(frozen=True) above its class."
            raise SchemeError("it is not a dataclass, so its fields are unknown", name=type(self).__name__, fix=fix)
        if "kind" not in type(self).__dict__:  # by that of its base a file would be decoded as the base does
            other = f" of its own, only that of its base class ({self.kind!r})" if hasattr(self, "kind") else ""
            fix = 'Give its class one: kind: ClassVar[str] = "mine".'
            raise SchemeError(f"it has no kind{other}, by which files would name it", name=type(self).__name__, fix=fix)
        fields: dict[str, Any] = {"kind": self.kind}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value != field.default:
                fields[field.name] = _jsonable(value, f"{type(self).__name__}.{field.name}")
        return fields


def _unwritten(scheme: Scheme, method: str) -> str:
    return f"{type(scheme).__name__}: it has no {method}(). A scheme needs layout, encode, decode and bound."


def scheme_from_json(record: Any) -> Scheme:
    """Return the scheme that ``Scheme.to_json`` wrote. Raise SchemeError on anything else."""
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise SchemeError(f"a scheme record must be an object with a kind, got {type(record).__name__}")
    kind = record["kind"]
    if kind not in SCHEMES:
        raise SchemeError(
            f"unknown scheme kind {kind!r}, known are {', '.join(sorted(SCHEMES))}",
            fix="Import the module that defines it first.",
        )
    known = {field.name for field in dataclasses.fields(SCHEMES[kind])}  # type: ignore[arg-type]
    fields = {key: _unjson(value) for key, value in record.items() if key != "kind"}
    if not fields.keys() <= known:
        raise SchemeError(f"scheme {kind!r} has no field {sorted(fields.keys() - known)[0]!r}")
    try:
        return SCHEMES[kind](**fields)
    except TypeError as error:
        raise SchemeError(f"scheme {kind!r} cannot be built from its record: {error}") from None


def _jsonable(value: Any, name: str) -> Any:
    """Return ``value`` as JSON that ``_unjson`` reads as an equal one, or raise SchemeError, naming ``name``."""
    if isinstance(value, Scheme):
        return value.to_json()
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, tuple):
        return [_jsonable(item, name) for item in value]
    if not (value is None or isinstance(value, (int, str)) or (isinstance(value, float) and math.isfinite(value))):
        got = str(value) if isinstance(value, float) else describe(value)
        fix = "A field may be an int, a finite float, a bool, text, None, a dtype, a scheme, or a tuple of these."
        raise SchemeError(f"it is {got}, which a file cannot hold", name=name, fix=fix)
    return value


def _unjson(value: Any) -> Any:
    if isinstance(value, dict) and "kind" in value:
        return scheme_from_json(value)
    if isinstance(value, dict):
        if value.keys() != {"dtype"}:
            raise SchemeError(f"a scheme field holds an unknown object {sorted(value)}")
        return dtype_from_name(value["dtype"])
    return tuple(_unjson(item) for item in value) if isinstance(value, list) else value


def part_rows(
    layout: Mapping[str, Part], shape: Shape, start: int, stop: int, *, ends_in_padding: bool = False
) -> dict[str, slice | None]:
    """Return the dim-0 entries of each part that hold rows ``start:stop``; ``None`` for a part that all rows use.

    With ``ends_in_padding`` only padding lies behind ``stop``, as if the tensor ended there.

    Raises UnsupportedOpError where a block would be cut in two; the error names the multiples of rows that cut none.

    >>> from torchtether.schemes import int8, part_rows
    >>> part_rows(int8().layout((6, 4)), (6, 4), 2, 5)
    {'qdata': slice(2, 5, None), 'scale': slice(2, 5, None)}
    """
    row = math.prod(shape[1:])
    cuts: dict[str, slice | None] = {}
    for name, part in layout.items():
        span = part.span
        if row == 0 and part.shape and part.shape[0] == shape[0]:  # no elements to count
            cuts[name] = slice(start, stop)
        elif span == 0:
            cuts[name] = None
        elif start * row % span or (stop * row % span and stop != shape[0] and not ends_in_padding):
            raise UnsupportedOpError(
                f"rows {start}:{stop} of a Weight of shape {tuple(shape)} cut a block of {span} elements of {name!r}",
                fix=f"Cut at multiples of {row_unit(layout, row)} rows, or call .dequantize() first.",
            )
        else:
            cuts[name] = slice(start * row // span, math.ceil(stop * row / span))
    return cuts


def row_unit(layout: Mapping[str, Part], row: int) -> int:
    """Return the number of rows, of ``row`` elements each, at whose multiples no block is cut."""
    return math.lcm(*(part.span // math.gcd(part.span, row) for part in layout.values() if part.span))


def view_parts(scheme: Scheme, parts: dict[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """Reshape the parts, without copying, to the layout of ``scheme`` for ``shape``."""
    return {name: parts[name].view(part.shape) for name, part in scheme.layout(shape).items()}
