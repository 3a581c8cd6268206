"""A base class for wrapper subclasses, with the methods and ops that torch expects of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._checks import describe
from ..errors import TetherError, UnsupportedOpError
from ..geometry.views import Shape, contiguous_stride
from ..schemes import Plain
from ..torch_private.dispatching import (
    can_decompose,
    return_and_correct_aliasing,
    schema_of,
    tree_map_only,
    written_by,
)
from ..torch_private.observers import never_compiled
from ..torch_private.tensors import as_plain, make_wrapper
from .dispatch import PRODUCTS
from .inner import empty_storage, from_pickle, to_pickle
from .spec import WeightSpec, to_base
from .wrapping import PRIVATE, REQUIRES_GRAD, Wrapping, reseat

aten = torch.ops.aten

_GEOMETRY = Plain()


class WrapperTensor(Wrapping):
    """Hold a tensor as inner tensors, with everything that torch expects of such a class.

    Subclass it, name the inner tensors and the metadata, and write ``decode``; with ``encode`` it can be written to
    as well.  It then passes every law of ``tt.testing.check_tensor_subclass``: it is detached, cloned, moved, emptied,
    flattened, deep-copied, pickled, saved, shared, swapped, loaded, trained and compiled without losing a field.

    Ops that read values run on the decoded values.  In-place ops encode their result into the same inner tensors.
    Transposing and permuting share the inner tensors; any other view raises UnsupportedOpError rather than copy.  For a
    new *quantized kind* a ``tt.Scheme`` is less work, and it also saves, loads, cuts rows and shards.

    Every inner tensor but the first may be None.  A subclass inherits the names of its base unless it sets its own.
    The constructor takes the fields by keyword.  For other arguments write a ``__new__`` that ends in
    ``return super().__new__(cls, codes=..., step=..., dtype=...)``; tensors derived from a tensor do not call it.

    Metadata must be comparable constants that do not depend on the values: ``torch.compile`` guards on them.

    >>> import torch, torchtether as tt
    >>> class Sixteenths(tt.WrapperTensor):
    ...     inner_names, metadata_names = ("codes",), ("step",)
    ...     def decode(self):
    ...         return self.codes.to(self.dtype) * self.step
    ...     def encode(self, values):
    ...         return {"codes": (values / self.step).round().clamp(-128, 127).to(torch.int8)}
    >>> x = Sixteenths(codes=torch.arange(6, dtype=torch.int8).view(2, 3), step=1 / 16, dtype=torch.float32)
    >>> x.to(torch.bfloat16).t().mul_(2).step, x.dtype, (x + 0)[1]
    (0.0625, torch.float32, tensor([0.1875, 0.2500, 0.3125]))
    """

    inner_names: ClassVar[tuple[str, ...]] = ()
    """The attributes that are tensors and hold the values, in order."""
    metadata_names: ClassVar[tuple[str, ...]] = ()
    """The attributes that are constants."""

    @cached_property
    def _geometry(self) -> WeightSpec:
        """Return the geometry that torch reports, for a tensor that ``WrapperTensor.__new__`` did not make."""
        return WeightSpec(tuple(self.shape), tuple(self.stride()), self.dtype, _GEOMETRY)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for names in (cls.inner_names, cls.metadata_names):
            if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
                fix = 'Write ("codes",), with the comma.'
                raise TetherError(f"{names!r} is not a tuple of names", name=cls.__name__, fix=fix)
        for name in (*cls.inner_names, *cls.metadata_names):
            if hasattr(Tensor, name):
                raise TetherError(f"{name!r} is an attribute of every tensor", name=cls.__name__, fix="Rename it.")
        torch.serialization.add_safe_globals([cls])  # torch.load(weights_only=True) passes it to rebuild_wrapper

    @staticmethod
    def __new__(
        cls: type[WrapperTensor],
        *,
        dtype: torch.dtype,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        requires_grad: bool = False,
        **fields: Any,
    ) -> WrapperTensor:
        """Wrap inner tensors as they are. ``shape`` is by default that of the first."""
        expected = {*cls.inner_names, *cls.metadata_names}
        if not cls.inner_names:
            fix = 'Name its inner tensors, as in inner_names = ("codes",).'
            raise TetherError("inner_names is empty, so nothing holds its values", name=cls.__name__, fix=fix)
        if fields.keys() != expected:
            raise TetherError(f"needs the fields {sorted(expected)}, got {sorted(fields)}", name=cls.__name__)
        first = fields[cls.inner_names[0]]
        for name in cls.inner_names:
            one = fields[name]
            if not isinstance(one, Tensor) and (one is not None or one is first):
                fix = "Give a tensor." if one is first else "Give a tensor, or None."
                raise TetherError(f"{name} is {describe(one)}, not an inner tensor", name=cls.__name__, fix=fix)
        for name in cls.metadata_names:
            if isinstance(fields[name], Tensor):
                fix = "Name it in inner_names."
                raise TetherError(f"{name} is a tensor, not metadata", name=cls.__name__, fix=fix)
        size = tuple(first.shape if shape is None else shape)
        steps = contiguous_stride(size) if stride is None else tuple(stride)
        made: WrapperTensor = make_wrapper(
            cls, size, strides=steps, dtype=dtype, device=first.device, requires_grad=requires_grad
        )
        made._geometry = WeightSpec(size, steps, dtype, _GEOMETRY)
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, and accept the arguments of any ``__new__`` that a subclass writes."""

    # -- for subclasses to write ----------------------------------------------------------------------------------

    def decode(self) -> Tensor:
        """Return the values: a new plain contiguous tensor of ``self.base`` and ``self.dtype``, by tensor functions."""
        raise NotImplementedError(f"{type(self).__name__}: it has no decode(), which returns its values. Write it.")

    def encode(self, values: Tensor) -> Mapping[str, Tensor]:
        """Return the inner tensors of other ``values`` (of ``self.base``, dtype, device), with this one's metadata."""
        raise UnsupportedOpError(f"a {type(self).__name__} cannot be written to", fix="Give its class an encode().")

    # -- provided -------------------------------------------------------------------------------------------------

    @property
    def inner_tensors(self) -> dict[str, Tensor]:
        """Return the inner tensors by name; those that are None are left out."""
        found = {name: getattr(self, name) for name in self.inner_names}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @property
    def metadata(self) -> dict[str, Any]:
        """Return the constants by name."""
        return {name: getattr(self, name) for name in self.metadata_names}

    @property
    def base(self) -> Shape:
        """Return the shape of the contiguous tensor that the inner tensors describe: this one before transposing."""
        return self._geometry.base

    def dequantize(self) -> Tensor:  # type: ignore[override]
        """Return the values as a new plain tensor of this shape, stride and dtype, outside of autograd."""
        with torch.no_grad():
            values = self.decode()
        return values if self._geometry.is_contiguous else values.permute(self._geometry.order)

    def like(
        self, inner: Mapping[str, Tensor], geometry: WeightSpec | None = None, *, dtype: torch.dtype | None = None
    ) -> WrapperTensor:
        """Return ``inner`` in a tensor of this class and metadata. Every tensor derived from another is made here."""
        geometry = geometry or self._geometry
        return self._wrap(inner, self.metadata, dtype or geometry.dtype, geometry.shape, geometry.stride)

    @classmethod
    def _wrap(
        cls, inner: Mapping[str, Tensor], metadata: Mapping[str, Any], dtype: torch.dtype, shape: Any, stride: Any
    ) -> WrapperTensor:
        """Return ``inner`` in a tensor of this class, without a call of the class's own constructor."""
        fields: dict[str, Any] = {**dict.fromkeys(cls.inner_names), **inner, **metadata}
        return WrapperTensor.__new__(cls, dtype=dtype, shape=shape, stride=stride, **fields)

    def map(self, function: Callable[[Tensor], Tensor], *, dtype: torch.dtype | None = None) -> WrapperTensor:
        """Return a tensor of this class whose inner tensors are ``function(inner)`` of these."""
        return self.like({name: function(tensor) for name, tensor in self.inner_tensors.items()}, dtype=dtype)

    def encoded(self, values: Tensor) -> Mapping[str, Tensor]:
        """Return the inner tensors that ``encode`` makes of ``values``; raise TetherError if their shapes differ."""
        made = self.encode(to_base(self._geometry, values).to(self.device, self.dtype).contiguous())
        for name, held in self.inner_tensors.items():
            if name not in made or made[name].shape != held.shape:
                got = f"of shape {tuple(made[name].shape)}" if name in made else "as no tensor"
                fix = "Inner tensors keep their shapes: pad them to one that fits all values."
                raise TetherError(f"encode returns {name!r} {got}, not {tuple(held.shape)}", name=_name(self), fix=fix)
        return made

    def write(self, inner: Mapping[str, Tensor]) -> None:
        """Copy ``inner`` into the storage of the inner tensors that are held."""
        for name, held in self.inner_tensors.items():
            held.copy_(inner[name])

    def _facts(self) -> list[str]:
        words = [f"{name}={value}" for name, value in self.metadata.items()]
        return [*words, f"shape={tuple(self.shape)}", f"dtype={self.dtype}", f"device='{self.device}'"]

    # -- torch's protocols ----------------------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        reseat(self)
        return list(self.inner_tensors), (self.dtype, tuple(self.metadata.items()))

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, Tensor], context: Any, outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> WrapperTensor:
        dtype, metadata = context
        return cls._wrap(inner, dict(metadata), dtype, outer_size, outer_stride)

    @classmethod
    @never_compiled
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.module_load:
            return _module_load(*args, **(kwargs or {}))
        if func in (Tensor.untyped_storage, Tensor.storage):
            return empty_storage(args[0], func)
        if func == REQUIRES_GRAD:
            return args[0]._requires_grad_for(2)
        if func is Tensor.data.__set__:  # type: ignore[attr-defined]
            raise UnsupportedOpError(
                f".data of a {cls.__name__} cannot be set: torch would ignore it silently", fix="Use copy_()."
            )
        if func in PRODUCTS:
            return PRODUCTS[func](func, *args, **(kwargs or {}))
        with as_plain():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") and not issubclass(kind, WrapperTensor) for kind in types):
            return NotImplemented  # DTensor and the like wrap this class, never the reverse
        reseat(*args)
        kwargs = kwargs or {}
        answer = _ANSWERS.get(func)
        if answer is not None:
            return return_and_correct_aliasing(func, args, kwargs, answer(func, *args, **kwargs))
        if can_decompose(func) and torch.is_inference_mode_enabled():  # it dispatches composite ops undecomposed
            return func.decompose(*args, **kwargs)
        if func.is_view:
            raise UnsupportedOpError(
                f"{func} of a {cls.__name__} would be a copy, not a view", fix="Call .dequantize() on it first."
            )
        if schema_of(func).is_mutable:
            return _write(func, args, kwargs)
        plain_args, plain_kwargs = _values((args, kwargs))
        return func(*plain_args, **plain_kwargs)

    # -- copying, pickling, sharing -------------------------------------------------------------------------------

    def _attributes(self) -> dict[str, Any]:
        """Return the attributes that users have set on this tensor."""
        own = {"_geometry", *PRIVATE, *self.inner_names, *self.metadata_names}
        return {key: value for key, value in self.__dict__.items() if key not in own}

    def _inner(self) -> Mapping[str, Tensor]:
        return self.inner_tensors

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        inner, float8 = to_pickle(self.inner_tensors)
        how = (self.metadata, self.dtype, tuple(self.shape), tuple(self.stride()))
        is_param = isinstance(self, torch.nn.Parameter)
        return rebuild_wrapper, (type(self), inner, float8, how, self.requires_grad, is_param, self._attributes())


def rebuild_wrapper(
    kind: type[WrapperTensor],
    inner: dict[str, Tensor],
    float8: dict[str, str],
    how: tuple[dict[str, Any], torch.dtype, tuple[int, ...], tuple[int, ...]],
    requires_grad: bool,
    is_param: bool,
    attributes: dict[str, Any],
) -> WrapperTensor:
    """Rebuild a WrapperTensor for pickle."""
    if not (isinstance(kind, type) and issubclass(kind, WrapperTensor)):
        raise TetherError(f"a pickle names {kind!r}, which is not a WrapperTensor")
    made = kind._wrap(from_pickle(inner, float8), *how)
    return made._restore(requires_grad, is_param, attributes)


rebuild_wrapper.__module__ = "torchtether"  # pickles know it by this name, wherever it is defined
torch.serialization.add_safe_globals([rebuild_wrapper])


def _name(tensor: WrapperTensor) -> str:
    return type(tensor).__name__


def _values(tree: Any) -> Any:
    return tree_map_only(WrapperTensor, WrapperTensor.dequantize, tree)


# -- ops ---------------------------------------------------------------------------------------------------------------


def _lift(func: Any, tensor: WrapperTensor, *args: Any, **kwargs: Any) -> WrapperTensor:
    return tensor.map(lambda inner: func(inner, *args, **kwargs))


def _clone(func: Any, tensor: WrapperTensor, *, memory_format: torch.memory_format | None = None) -> WrapperTensor:
    kept = (None, torch.preserve_format, *((torch.contiguous_format,) if tensor._geometry.is_contiguous else ()))
    if memory_format not in kept:
        raise UnsupportedOpError(f"a {_name(tensor)} cannot be laid out as {memory_format}", fix="Dequantize it first.")
    return tensor.map(func)


def _to_copy(func: Any, tensor: WrapperTensor, **kwargs: Any) -> Tensor:
    """Move inner tensors, which keep their dtype; a float dtype becomes the dtype to which values decode."""
    dtype = kwargs.pop("dtype", None) or tensor.dtype
    if not dtype.is_floating_point:
        return func(tensor.dequantize(), dtype=dtype, **kwargs)  # type: ignore[no-any-return]
    kwargs.pop("memory_format", None)
    return tensor.map(lambda inner: func(inner, **kwargs), dtype=dtype)


def _empty_like(func: Any, tensor: WrapperTensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    """Return zeros, so that no inner index is out of range."""
    if not (dtype or tensor.dtype).is_floating_point:
        return func(tensor.dequantize(), dtype=dtype, **kwargs)  # type: ignore[no-any-return]
    kwargs.pop("memory_format", None)
    return tensor.map(lambda inner: torch.zeros_like(inner, **kwargs), dtype=dtype)


def _permute(func: Any, tensor: WrapperTensor, *args: Any) -> WrapperTensor:
    sizes = torch.empty([d + 2 for d in range(tensor.dim())], device="meta")  # distinct sizes show the order
    order = tuple(size - 2 for size in func(sizes, *args).shape)
    return tensor.like({n: t.detach() for n, t in tensor.inner_tensors.items()}, tensor._geometry.permute(order))


def _copy_(func: Any, held: Tensor, given: Tensor, non_blocking: bool = False) -> Tensor:
    """Write the values of ``given`` to ``held``, which keeps its class; inner tensors are copied where they fit."""
    if not isinstance(held, WrapperTensor):
        func(held, _values(given), non_blocking)
        return held
    if held.device.type == "meta":
        return held  # as torch does: nothing to write to
    if type(given) is type(held) and _fits(given, held):
        held.write(given.inner_tensors)
    else:
        held.write(held.encoded(_values(given).expand(held.shape)))
    return held


def _fits(given: Tensor, held: WrapperTensor) -> bool:
    assert isinstance(given, WrapperTensor)
    shapes = [{name: tensor.shape for name, tensor in one.inner_tensors.items()} for one in (given, held)]
    geometry = given._geometry.replace(dtype=held.dtype) == held._geometry
    return geometry and shapes[0] == shapes[1] and given.metadata == held.metadata


def _write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an in-place op on the values, then encode those that it wrote; all are encoded before one is stored."""
    decoded: dict[int, tuple[WrapperTensor, Tensor]] = {}

    def values(tensor: WrapperTensor) -> Tensor:
        return decoded.setdefault(id(tensor), (tensor, tensor.dequantize()))[1]

    plain_args, plain_kwargs = tree_map_only(WrapperTensor, values, (args, kwargs))
    answer = func(*plain_args, **plain_kwargs)
    written = written_by(func, args, kwargs, WrapperTensor)
    encoded = [(tensor, tensor.encoded(decoded[id(tensor)][1])) for tensor in written]
    for tensor, inner in encoded:
        tensor.write(inner)
    wrappers = {id(plain): tensor for tensor, plain in decoded.values()}
    return tree_map_only(Tensor, lambda tensor: wrappers.get(id(tensor), tensor), answer)


def _module_load(held: Tensor, given: Tensor, assign: bool = False) -> Tensor:
    """Return the tensor that the parameter ``held`` becomes: of its own class, unless it is plain."""
    if held.shape != given.shape:
        raise TetherError(f"the state dict gives shape {tuple(given.shape)}, the module holds {tuple(held.shape)}")
    if not assign:
        with torch.no_grad():
            held.copy_(given)
        return held.detach()
    if isinstance(given, WrapperTensor) or not isinstance(held, WrapperTensor):
        return given.detach()
    with torch.no_grad():  # a copy, because ``encode`` may read inner tensors, such as a mask
        copied = torch.empty_like if held.is_meta else partial(Tensor.to, copy=True)
        return copied(held, device=given.device, dtype=given.dtype).copy_(given).detach()


_ANSWERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _lift,
    aten.alias.default: _lift,
    aten.lift_fresh.default: _lift,
    aten._pin_memory.default: _lift,
    aten.is_pinned.default: lambda func, tensor, *args: all(func(t, *args) for t in tensor.inner_tensors.values()),
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.empty_like.default: _empty_like,
    aten.copy_.default: _copy_,
    aten.t.default: _permute,
    aten.transpose.int: _permute,
    aten.permute.default: _permute,
}
