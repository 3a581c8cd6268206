"""The wrapper subclass Weight: plain tensors, its parts, and one frozen spec that describes them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .._checks import check_tensor, describe
from ..errors import ArgumentError, SchemeError, UnsupportedOpError
from ..schemes import Flattened, Scheme, check_encoded, same_bits
from ..torch_private.dispatching import OpOverload, is_composite, is_foreign_write, return_and_correct_aliasing
from ..torch_private.observers import never_compiled
from ..torch_private.tensors import any_requires_grad, as_plain, make_wrapper
from .dispatch import ATTACHED, FOLDS, FOREIGN_WRITES, HOOKS, REFUSED, RULES, SHORTCUTS
from .exporting import Dequantize, Exporting
from .graph_cache_key import digest_of_code
from .inner import from_pickle, to_pickle
from .products import decoding
from .products.layout import PREFIX, Layout, layout_of
from .spec import Tie, WeightSpec
from .wrapping import PRIVATE, reseat

_PART = PREFIX  # parts are attributes, as torch.compile needs
_UNKNOWN: Any = object()
_is_compiling = torch.compiler.is_compiling


class Weight(Exporting):
    """Hold a tensor as the *parts* of a scheme, with its ties.

        weight.parts    the plain tensors that hold it, e.g. qdata (N, K) int8, scale (N, 1) float32
        weight.spec     WeightSpec(shape, stride, dtype, scheme, tie, activations); ``dtype`` is the compute dtype

    To the outside it is a float tensor of ``spec.shape``, ``spec.stride`` and ``spec.dtype``.  Ops that move or copy
    it run on each part; ops that read its values run on ``dequantize()``; in-place ops encode the result into the same
    storage; ops without a rule raise UnsupportedOpError.

    >>> import torch, torchtether as tt
    >>> weight = tt.Weight.encode(torch.eye(4), tt.int8())
    >>> weight.to(torch.bfloat16).parts["scale"].dtype, weight.to(torch.bfloat16).dequantize().dtype
    (torch.float32, torch.bfloat16)
    """

    _spec: WeightSpec
    _names: tuple[str, ...]
    _cut: tuple[str, ...]
    _kernel_layout: Layout | None

    @staticmethod
    def __new__(
        cls: type[Weight],
        parts: Mapping[str, Tensor] | Tensor,
        spec: WeightSpec | None = None,
        requires_grad: bool = False,
        cut: tuple[str, ...] = (),
    ) -> Weight:
        if spec is None:
            return cls._parameter(parts, requires_grad)
        if not isinstance(spec, WeightSpec) or isinstance(parts, Tensor):
            what = f"are {describe(parts)} and {describe(spec)}, not a mapping of tensors and a WeightSpec"
            raise ArgumentError(what, name="parts, spec", fix="To encode values, use Weight.encode(values, scheme).")
        first = next(iter(parts.values()))
        offset = first.storage_offset() if spec.scheme.transparent else 0
        # As in torch, a view of a normal tensor is a normal tensor, in inference mode too.
        with torch.inference_mode(first.is_inference()) if torch.is_inference_mode_enabled() else nullcontext():
            place = {"device": first.device, "storage_offset": offset}
            made: Weight = make_wrapper(
                cls, spec.shape, strides=spec.stride, dtype=spec.dtype, requires_grad=requires_grad, **place
            )
        return made

    def __init__(
        self,
        parts: Mapping[str, Tensor] | Tensor,
        spec: WeightSpec | None = None,
        requires_grad: bool = False,
        cut: tuple[str, ...] = (),
    ) -> None:
        """Wrap ``parts`` as they are; use ``Weight.encode`` to make one from values.

        ``cut`` is for rows of a larger Weight: it names the parts that other rows use too, which must not change.
        ``Weight(weight, requires_grad=...)`` returns ``nn.Parameter(weight, ...)``, because libraries call
        ``type(parameter)(data, requires_grad=...)``.

        Raises ArgumentError for a plain tensor: its scheme is unknown.
        """
        if spec is None or isinstance(parts, Tensor):
            return
        self._spec = spec
        self._names = tuple(parts)
        self._cut = cut
        self._kernel_layout = _UNKNOWN
        for name, part in parts.items():
            setattr(self, _PART + name, part)

    @classmethod
    def _parameter(cls, weight: object, requires_grad: bool) -> Weight:
        if not isinstance(weight, Weight):
            raise ArgumentError(
                f"is {describe(weight)} without a spec, so its scheme is not known",
                name="parts",
                fix="Use Weight.encode(values, scheme), tt.load, or assign the values to .data of the old Weight.",
            )
        return torch.nn.Parameter(weight, requires_grad)  # type: ignore[return-value]

    @classmethod
    def encode(cls, values: Tensor, scheme: Scheme, *, tie: Tie | None = None) -> Weight:
        """Return a new contiguous Weight that holds ``values`` (any strides, any float dtype) in ``scheme``.

        No autograd graph is recorded.

        Raises SchemeError if the shape does not fit, or the values are not floating point or not finite.
        """
        check_tensor(values, "values")
        if not isinstance(scheme, Scheme):
            fix = "Give one such as tt.int8()."
            raise ArgumentError(f"is {describe(scheme)}, not a scheme", name="scheme", fix=fix)
        if not isinstance(tie, Tie | None):
            raise ArgumentError(f"is {describe(tie)}, not a tie", name="tie", fix="Give a tt.Tie, or None.")
        if not values.is_floating_point() and not scheme.transparent:
            raise SchemeError(f"a {values.dtype} tensor cannot be quantized", fix="Convert it to a float dtype first.")
        spec = WeightSpec.of(tuple(values.shape), values.dtype, scheme, tie)
        if isinstance(values, Weight):
            adopted = scheme.adopt(values.scheme, values.parts, spec.shape) if values.spec.is_contiguous else None
            if adopted is not None:
                return cls(adopted, spec)
            values = values.dequantize()
        values = values.detach()
        if scheme.transparent:
            spec = spec.replace(stride=tuple(values.stride()))
        parts = scheme.encode(values)
        layout = scheme.layout(spec.shape).items()
        check_encoded(scheme, parts, {name: (tuple(part.shape), part.dtype or values.dtype) for name, part in layout})
        return cls(parts, spec)

    # -- what it is -----------------------------------------------------------------------------------------------

    @property
    def spec(self) -> WeightSpec:
        """Return the description: shape, stride, compute dtype, scheme, tie."""
        return self._spec

    @property
    def scheme(self) -> Scheme:
        """Return the scheme, which encodes values as parts."""
        return self._spec.scheme

    @property
    def tie(self) -> Tie | None:
        """Return the names under which this tensor was registered when its tie was recorded."""
        return self._spec.tie

    @property
    def parts(self) -> Mapping[str, Tensor]:
        """Return the plain tensors that hold the Weight, by name, in the scheme's order; a read-only view."""
        return MappingProxyType({name: getattr(self, _PART + name) for name in self._names})

    @property
    def kernel_layout(self) -> Layout | None:
        """Return the layout of the parts for the compiled kernels; ``None`` if they cannot read it, or if permuted."""
        found = self._kernel_layout
        if found is _UNKNOWN:
            spec = self._spec
            found = layout_of(spec.scheme, spec.shape, spec.activations) if spec.is_contiguous else None
            self._kernel_layout = found
        return found

    def set_activations(self, activations: str | None) -> None:
        """Set the format to which ``F.linear`` rounds its inputs, as ``tt.quantize_activations`` explains them.

        Raises ArgumentError for any other value than those.
        """
        spec = self._spec.replace(activations=activations)
        self._kernel_layout = None  # so that other threads call no kernel with the old layout
        self._spec = spec
        self._kernel_layout = _UNKNOWN

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Return the bytes of all parts."""
        return sum(part.numel() * part.element_size() for part in self.parts.values())

    def dequantize(self) -> Tensor:  # type: ignore[override]
        """Return the values as a new plain tensor of this shape, stride and dtype; gradients flow through.

        Values beyond the range of the dtype become infinite, as in any conversion; ``.to(torch.float32)`` keeps them.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            values: Tensor = Dequantize.apply(self)
            return values
        return self.values_of().clone() if self.scheme.transparent else self.values_of()

    def values_of(self) -> Tensor:
        """Return the values outside of autograd; for a transparent scheme, the wrapped tensor itself."""
        spec = self._spec
        if spec.scheme.transparent:
            (tensor,) = self.parts.values()
            return tensor
        values = decoding.values(spec.scheme, self.parts, spec.base, spec.dtype)
        return values if spec.is_contiguous else values.permute(spec.order)

    def map(
        self,
        function: Callable[[Tensor], Tensor],
        spec: WeightSpec | None = None,
        *,
        cut: tuple[str, ...] | None = None,
    ) -> Weight:
        """Return a Weight whose parts are ``function(part)`` of these. Every Weight derived from another is made so."""
        return self.map_named(lambda _, part: function(part), spec, cut=self._cut if cut is None else cut)

    def with_parts(
        self, parts: Mapping[str, Tensor], spec: WeightSpec | None = None, *, cut: tuple[str, ...] = ()
    ) -> Weight:
        """Return a Weight with other parts of the same names."""
        return self.map_named(lambda name, _: parts[name], spec, cut=cut)

    def map_named(
        self, function: Callable[[str, Tensor], Tensor], spec: WeightSpec | None = None, *, cut: tuple[str, ...] = ()
    ) -> Weight:
        """Return a Weight as ``map`` does, with a function that takes the name of a part, too."""
        parts = {name: function(name, part) for name, part in self.parts.items()}
        return type(self)(parts, self._marked(spec or self._spec), cut=cut)

    @property
    def is_trained(self) -> bool:
        """Return whether in-place ops on it are updates: it requires grad, or is derived from a Parameter that does."""
        return any_requires_grad(self) or (self._spec.trained and not isinstance(self, torch.nn.Parameter))

    def _marked(self, spec: WeightSpec) -> WeightSpec:
        trained = self.is_trained
        return spec if spec.trained == trained else spec.replace(trained=trained)

    def around(self, tensor: Tensor) -> Weight:
        """Return ``tensor`` in a Weight with the scheme and tie of this one, whose scheme is transparent."""
        spec = self._spec.replace(shape=tuple(tensor.shape), stride=tuple(tensor.stride()), dtype=tensor.dtype)
        return self.map(lambda _: tensor, spec, cut=())

    def set_parts(self, parts: Mapping[str, Tensor]) -> None:
        """Copy ``parts`` into the storage of these; nothing is written unless all of them fit."""
        held = self.parts
        for name, part in held.items():
            if parts[name].shape != part.shape:
                raise SchemeError(f"part {name!r} has shape {tuple(parts[name].shape)}, expected {tuple(part.shape)}")
        for name in self._cut:
            if not held[name].is_meta and not same_bits(held[name], parts[name].to(held[name].device)):
                raise UnsupportedOpError(
                    f"these rows share their part {name!r} with other rows of the Weight, and it would change",
                    fix="Write the whole Weight (tt.refit writes a sharded one), or use a scheme with a scale per row.",
                )
        for name, part in held.items():
            part.copy_(parts[name])

    def _facts(self) -> list[str]:
        spec = self._spec
        words = [f"{spec.scheme}", f"shape={tuple(spec.shape)}", f"dtype={spec.dtype}", f"{self.nbytes} bytes"]
        if self.device.type != "cpu":
            words.append(f"device='{self.device}'")
        if self.requires_grad:
            words.append("requires_grad=True")
        if spec.activations is not None:
            words.append(f"activations={spec.activations}")
        if spec.tie is not None:
            words.append(f"tie: {spec.tie}")
        return words

    # -- torch's protocols ----------------------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], WeightSpec]:
        reseat(self)
        return [_PART + name for name in self._names], self._marked(self._spec)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, Tensor], spec: WeightSpec, outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> Weight:
        return cls({name.removeprefix(_PART): part for name, part in inner.items()}, spec)

    def _stable_hash_for_caching(self) -> str:
        """Return the key of this Weight in torch's cache of compiled graphs: everything but its values.

        The key contains a digest of the traced code, so that a graph of another version is never run.
        """
        spec = json.dumps(self._spec.to_json(), sort_keys=True)
        code = digest_of_code(type(self), type(self.scheme))
        parts = [(name, str(p.dtype), tuple(p.shape), p.stride(), str(p.device)) for name, p in self.parts.items()]
        return f"{type(self).__qualname__} {spec} {parts} {self.requires_grad} {self.is_trained} {code}"

    @classmethod
    @never_compiled
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        short = SHORTCUTS.get(func)
        if short is not None:
            found = short(args, kwargs)
            if found is not None:
                return found
        if not _is_compiling():  # the compiler must see aten ops, which have rules of their own
            answer = RULES.get(func)
            if answer is not None and type(func) is not OpOverload:  # overloads are answered below autograd
                return answer(func, *args, **kwargs) if kwargs else answer(func, *args)
        elif func in FOLDS:
            return FOLDS[func](func, *args, **(kwargs or {}))
        with as_plain():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") and not issubclass(kind, Weight) for kind in types):
            return NotImplemented  # DTensor and the like wrap a Weight, never the reverse
        reseat(*args)
        kwargs = kwargs or {}
        answer = RULES.get(func) or RULES.get(func.name())
        if answer is None and is_foreign_write(func):
            answer = FOREIGN_WRITES[0]
        if answer is not None:
            return return_and_correct_aliasing(func, args, kwargs, answer(func, *args, **kwargs))
        if func not in REFUSED and is_composite(func):
            return func.decompose(*args, **kwargs)  # inference mode dispatches composite ops undecomposed
        raise UnsupportedOpError(
            f"{func} {REFUSED.get(func, 'has no rule for Weight')}", fix="Call .dequantize() on the Weight first."
        )

    @property
    def fsdp_pre_all_gather(self) -> Callable[..., Any]:
        """Return the hook by which FSDP2 gets the tensors to gather; see ``ops.sharding``."""
        return HOOKS["fsdp_pre_all_gather"](self)  # type: ignore[no-any-return]

    @property
    def fsdp_post_all_gather(self) -> Callable[..., Any]:
        """Return the hook that FSDP2 calls with the gathered tensors; see ``ops.sharding``."""
        return HOOKS["fsdp_post_all_gather"](self)  # type: ignore[no-any-return]

    # -- copying, pickling, sharing -------------------------------------------------------------------------------

    def _attributes(self) -> dict[str, Any]:
        """Return the attributes that users have set on this tensor."""
        known = ("_spec", "_names", "_cut", "_kernel_layout", *PRIVATE)
        own = {*known, *(_PART + name for name in self._names), *ATTACHED}
        return {key: value for key, value in self.__dict__.items() if key not in own}

    def _inner(self) -> Mapping[str, Tensor]:
        return self.parts

    def __deepcopy__(self, memo: dict[int, Any]) -> Weight:
        if id(self) not in memo and not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user support the deepcopy protocol at the moment"
            )
        return super().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        spec, flat = self._spec, self._spec.scheme
        if isinstance(flat, Flattened):  # a scheme that has no JSON
            record = {**spec.shaped(flat.shape, scheme=flat.inner, tie=spec.tie).to_json(), "flat": True}
        else:
            record = spec.to_json()
        if self.is_trained and not self.requires_grad:
            record["trained"] = True  # state of an optimizer, such as the averages of a schedule-free one
        text, is_param = json.dumps(record, sort_keys=True), isinstance(self, torch.nn.Parameter)
        parts, float8 = to_pickle(self.parts)
        return rebuild_weight, (parts, float8, text, self.requires_grad, is_param, self._cut, self._attributes())


def rebuild_weight(
    parts: dict[str, Tensor],
    float8: dict[str, str],
    spec: str,
    requires_grad: bool,
    is_param: bool,
    cut: tuple[str, ...],
    attributes: dict[str, Any],
) -> Weight:
    """Rebuild a Weight for pickle. The spec is JSON, so that this is the only callable that a pickle names."""
    record = json.loads(spec)
    made = WeightSpec.from_json(record).replace(trained=record.get("trained") is True)
    if record.get("flat") is True:
        made = made.shaped((math.prod(made.shape),), scheme=Flattened(made.scheme, made.base), tie=made.tie)
    weight = Weight(from_pickle(parts, float8), made, cut=cut)
    return weight._restore(requires_grad, is_param, attributes)


rebuild_weight.__module__ = "torchtether"  # pickles know it by this name, wherever it is defined
torch.serialization.add_safe_globals([rebuild_weight])
