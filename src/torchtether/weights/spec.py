"""Descriptions of a tensor: the names of a tied one (Tie), and how parts represent a Weight (WeightSpec)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._dtypes import dtype_from_name, dtype_name
from ..errors import ArgumentError, SchemeError, TieError
from ..geometry.views import Shape, View, contiguous_stride
from ..schemes import Plain, Scheme, scheme_from_json
from ..torch_private.observers import cached

ACTIVATIONS = ("int8", "float8", "mxfp8", "mxfp4", "nvfp4")
"""The formats to which a Weight can round the inputs of its products."""


def check_activations(value: object, name: str) -> None:
    """Raise ArgumentError unless ``value`` is one of ``ACTIVATIONS`` or None."""
    if value is not None and value not in ACTIVATIONS:
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ArgumentError(f"is {value!r:.40}, not one of {known} or None", name=name, fix="Give one of them.")


@dataclass(frozen=True)
class Tie:
    """Hold the names under which one tensor is registered, owner first.

    A checkpoint stores the owner; every other name is an alias and is restored on load.
    ``views[i]`` is ``None`` where ``names[i]`` is the owner's own object or an equal view of all of it,
    and the geometry of the view otherwise; ``objects[i]`` says whether ``names[i]`` is the owner's own object.

    >>> Tie(("emb.weight", "head.weight")).aliases
    ('head.weight',)
    """

    names: tuple[str, ...]
    views: tuple[View | None, ...] = ()
    objects: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.names, Iterable) and not isinstance(self.names, (str, bytes)):
            object.__setattr__(self, "names", tuple(self.names))
        if not isinstance(self.names, tuple) or not all(isinstance(name, str) for name in self.names):
            raise TieError(f"a tie needs names, got {self.names!r:.60}", fix="Give a tuple of them.")
        count = len(self.names)
        if count < 2 or len(set(self.names)) != count:
            raise TieError(f"a tie needs two or more distinct names, got {self.names}")
        object.__setattr__(self, "views", self.views or (None,) * count)
        object.__setattr__(self, "objects", self.objects or tuple(view is None for view in self.views))
        if len(self.views) != count or len(self.objects) != count or self.views[0] is not None or not self.objects[0]:
            raise TieError("a tie needs one view and one object flag per name, none for its owner", name=self.owner)
        if any(view is not None and same for view, same in zip(self.views, self.objects, strict=True)):
            raise TieError("an alias cannot be both a view and the owner's own object", name=self.owner)

    @property
    def owner(self) -> str:
        """Return the name under which the tensor is stored."""
        return self.names[0]

    @property
    def aliases(self) -> tuple[str, ...]:
        """Return every name but the owner's."""
        return self.names[1:]

    def __str__(self) -> str:
        words = [self.owner]
        for name, view, same in zip(self.aliases, self.views[1:], self.objects[1:], strict=True):
            how = "" if same else " (same storage)" if view is None else f" (view {list(view.size)} of it)"
            words.append(name + how)
        return " = ".join(words)

    def to_json(self) -> dict[str, Any]:
        """Return the tie as JSON values, which ``from_json`` reads."""
        return {
            "names": list(self.names),
            "views": [view and view.to_json() for view in self.views],
            "objects": list(self.objects),
        }

    @staticmethod
    def from_json(record: Any) -> Tie:
        """Return what ``to_json`` wrote. Raises TieError for anything else."""
        if not isinstance(record, dict) or record.keys() != {"names", "views", "objects"}:
            raise TieError("a tie record needs exactly names, views and objects")
        names, views, objects = record["names"], record["views"], record["objects"]
        if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise TieError(f"a tie record holds bad names {names!r}")
        if not (isinstance(objects, list) and all(isinstance(flag, bool) for flag in objects)):
            raise TieError(f"a tie record holds bad object flags {objects!r}")
        if not isinstance(views, list):
            raise TieError(f"a tie record holds bad views {views!r}")
        made = tuple(None if view is None else View.from_json(view) for view in views)
        return Tie(tuple(names), made, tuple(objects))


def tie_among(tie: Tie, names: Collection[str]) -> Tie | None:
    """Return the tie of those names of ``tie`` that are in ``names``; ``None`` if its owner is not, or no alias.

    >>> tie_among(Tie(("emb.weight", "head.weight", "out.weight")), {"emb.weight", "out.weight"}).aliases
    ('out.weight',)
    """
    kept = [each for each in zip(tie.names, tie.views, tie.objects, strict=True) if each[0] in names]
    return Tie(*zip(*kept, strict=True)) if len(kept) > 1 and tie.owner in names else None


@dataclass(frozen=True)
class WeightSpec:
    """Describe a Weight: everything but its parts.

    ``shape`` and ``stride`` are what the outside sees; ``dtype`` is the compute dtype, to which it decodes.
    ``activations`` is the format, one of ``ACTIVATIONS``, to which inputs of ``F.linear`` are rounded, or ``None``.
    ``trained`` marks a tensor, such as ``.data`` or a shard, that was derived from a Parameter that requires grad:
    in-place ops on it are updates. Comparisons of specs ignore it.

    >>> import torch, torchtether as tt
    >>> spec = WeightSpec.of((4, 2), torch.bfloat16, tt.int8())
    >>> spec.stride, WeightSpec.from_json(spec.to_json()) == spec
    ((2, 1), True)
    """

    shape: Shape
    stride: Shape
    dtype: torch.dtype
    scheme: Scheme
    tie: Tie | None = None
    activations: str | None = None
    trained: bool = dataclasses.field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_activations(self.activations, "activations")

    @staticmethod
    def of(shape: Shape, dtype: torch.dtype, scheme: Scheme, tie: Tie | None = None) -> WeightSpec:
        """Return the spec of a contiguous Weight."""
        return WeightSpec(tuple(shape), contiguous_stride(tuple(shape)), dtype, scheme, tie)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightSpec:
        return self  # it is immutable, and compiled graphs compare the original with a copy at every call

    def replace(self, **changes: Any) -> WeightSpec:
        """Return the spec with other values of the given fields."""
        return dataclasses.replace(self, **changes)

    def shaped(self, shape: Shape, *, scheme: Scheme | None = None, tie: Tie | None = None) -> WeightSpec:
        """Return the spec of a contiguous Weight of ``shape``, with the given tie and the other fields of this spec."""
        return self.replace(
            shape=tuple(shape), stride=contiguous_stride(tuple(shape)), scheme=scheme or self.scheme, tie=tie
        )

    @property
    def order(self) -> tuple[int, ...]:
        """Return the permutation that turns the contiguous base tensor, which the parts describe, into this one."""
        return _order(self.shape, self.stride)

    @property
    def base(self) -> Shape:
        """Return the shape of the contiguous tensor that the parts describe."""
        shape = [0] * len(self.shape)
        for dim, source in enumerate(self.order):
            shape[source] = self.shape[dim]
        return tuple(shape)

    @property
    def is_contiguous(self) -> bool:
        """Return whether this tensor has the dimension order of its parts; False also for views that have no order.

        Those are slices of columns, steps and repetitions of a transparent Weight.
        """
        return self.stride == contiguous_stride(self.shape)

    def permute(self, order: tuple[int, ...]) -> WeightSpec:
        """Return the spec of ``tensor.permute(order)``."""
        return self.replace(shape=tuple(self.shape[d] for d in order), stride=tuple(self.stride[d] for d in order))

    def to_json(self) -> dict[str, Any]:
        """Return the spec as JSON values, which ``from_json`` reads."""
        record: dict[str, Any] = {
            "shape": list(self.shape),
            "dtype": dtype_name(self.dtype),
            "scheme": self.scheme.to_json(),
        }
        if self.stride != contiguous_stride(self.shape):
            record["stride"] = list(self.stride)
        if self.tie is not None:
            record["tie"] = self.tie.to_json()
        if self.activations is not None:
            record["activations"] = self.activations
        return record

    @staticmethod
    def from_json(record: Any) -> WeightSpec:
        """Return the spec from a record by ``to_json``. Raises SchemeError for anything else."""
        if not isinstance(record, dict) or not {"shape", "dtype", "scheme"} <= record.keys():
            raise SchemeError("a weight record needs shape, dtype and scheme")
        shape = _numbers(record["shape"], "shape")
        stride = _numbers(record["stride"], "stride") if "stride" in record else contiguous_stride(shape)
        if len(shape) != len(stride):
            raise SchemeError(f"a weight record holds a shape {shape} and a stride {stride} of another length")
        tie = Tie.from_json(record["tie"]) if "tie" in record else None
        activations = record.get("activations")
        if activations not in (None, *ACTIVATIONS):
            raise SchemeError(f"a weight record holds unknown activations {activations!r:.60}")
        scheme = scheme_from_json(record["scheme"])
        return WeightSpec(shape, stride, dtype_from_name(record["dtype"]), scheme, tie, activations)


def _numbers(value: Any, what: str) -> Shape:
    if not isinstance(value, list) or len(value) > 64 or not all(type(n) is int and 0 <= n < 2**48 for n in value):
        raise SchemeError(f"a weight record holds a bad {what} {value!r}")
    return tuple(value)


@cached
def _order(shape: Shape, stride: Shape) -> tuple[int, ...]:
    """Return the order of dimensions by stride. Among equal strides only one size can exceed 1; it is outermost."""
    base = sorted(range(len(shape)), key=lambda d: (-stride[d], shape[d] <= 1, d))
    if contiguous_stride(tuple(shape[d] for d in base)) != tuple(stride[d] for d in base):
        raise SchemeError(f"stride {stride} is not a permutation of a contiguous tensor of shape {shape}")
    return tuple(base.index(d) for d in range(len(shape)))


def to_base(spec: WeightSpec, values: Tensor) -> Tensor:
    """Return ``values``, which have the shape of ``spec``, permuted to the dimension order of the parts."""
    return values.permute([spec.order.index(d) for d in range(values.dim())])


def order_of(view: View, owner: Tensor) -> tuple[int, ...] | None:
    """Return the permutation that turns the contiguous ``owner`` into ``view``; ``None`` if there is none."""
    if view.dtype != owner.dtype or view.offset or not owner.is_contiguous():
        return None
    try:
        spec = WeightSpec(view.size, view.stride, view.dtype, Plain())
        return spec.order if spec.base == tuple(owner.shape) else None
    except SchemeError:
        return None
