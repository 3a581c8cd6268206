"""View ops: the result shares the parts' storage, or the op raises; never a silent copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedOpError
from ...geometry.views import Shape
from ...schemes import Flattened, view_parts
from ..dispatch import refuse, rule
from ..weight import Weight
from .padding import is_padded, keep_padding
from .rows import cut_rows, first_rows, join_rows, shared_by_rows, take_rows
from .values import read

aten = torch.ops.aten

_WHOLE = 2**63 - 1


def _on_tensor(op: Any, weight: Weight, *args: Any, **kwargs: Any) -> Any:
    """View the tensor of a transparent Weight."""
    made = op(weight.values_of(), *args, **kwargs)
    return [weight.around(t) for t in made] if isinstance(made, (list, tuple)) else weight.around(made)


def _viewed(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the rule of ``ops``; of a transparent Weight they view its tensor."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(op: Any, weight: Weight, *args: Any, **kwargs: Any) -> Any:
            return (_on_tensor if weight.scheme.transparent else function)(op, weight, *args, **kwargs)

        return rule(*ops)(run)

    return register


def _cannot(
    op: Any, weight: Weight, why: str, fix: str = "Call .dequantize() on the Weight first."
) -> UnsupportedOpError:
    return UnsupportedOpError(f"{op} of a Weight of shape {tuple(weight.shape)} {why}", fix=fix)


# -- permutations -------------------------------------------------------------------------------------------------


@rule(aten.t.default)
def t(op: Any, weight: Weight) -> Weight:
    if weight.dim() > 2:
        raise UnsupportedOpError(
            f"{op} takes at most 2 dimensions, a Weight of shape {tuple(weight.shape)} has more", fix="Use .mT."
        )
    return permute(op, weight, tuple(reversed(range(weight.dim()))))


@rule(aten.transpose.int)
def transpose(op: Any, weight: Weight, dim0: int, dim1: int) -> Weight:
    order = list(range(weight.dim()))
    if not order and {dim0, dim1} <= {0, -1}:  # torch lets 0-dim tensors pass
        return permute(op, weight, ())
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute(op, weight, tuple(order))


@rule(aten.permute.default)
def permute(op: Any, weight: Weight, dims: Sequence[int]) -> Weight:
    """Return the same parts under a permuted shape and stride."""
    if weight.scheme.transparent:
        return weight.around(weight.values_of().permute(tuple(dims)))  # a view of the tensor
    return weight.map(aten.alias.default, weight.spec.permute(tuple(d % max(weight.dim(), 1) for d in dims)))


# -- reshapes -----------------------------------------------------------------------------------------------------


@rule(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)
def view(op: Any, weight: Weight, size: Sequence[int], stride: Sequence[int] | None = None) -> Weight:
    """Merge or split leading dimensions; the last one, along which the scheme works, cannot change."""
    if weight.scheme.transparent:
        return weight.around(weight.values_of().view(tuple(size)))
    return _reshape(op, weight, _infer(tuple(size), weight.numel()))


@_viewed(aten.unsqueeze.default)
def unsqueeze(op: Any, weight: Weight, dim: int) -> Weight:
    shape, stride = list(weight.shape), list(weight.spec.stride)
    dim %= len(shape) + 1
    stride.insert(dim, max(shape[dim], 1) * stride[dim] if dim < len(shape) else 1)  # as torch has it
    shape.insert(dim, 1)
    return _with_ones(op, weight, tuple(shape), tuple(stride))


@_viewed(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(op: Any, weight: Weight, dim: int | Sequence[int] | None = None) -> Weight:
    every = range(weight.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    gone = {d % weight.dim() for d in every}
    kept = [d for d, n in enumerate(weight.shape) if d not in gone or n != 1]
    return _with_ones(op, weight, tuple(weight.shape[d] for d in kept), tuple(weight.spec.stride[d] for d in kept))


def _with_ones(op: Any, weight: Weight, shape: Shape, stride: Shape) -> Weight:
    """Insert or remove dimensions of size 1, also of a permuted Weight."""
    spec = weight.spec
    if spec.is_contiguous or shape == spec.shape:
        return _reshape(op, weight, shape)
    seen = spec.replace(shape=shape, stride=stride)
    base = permute(op, weight, [spec.order.index(d) for d in range(weight.dim())])
    return permute(op, _reshape(op, base, seen.base), seen.order)


def _infer(size: Shape, numel: int) -> Shape:
    if -1 not in size:
        return size
    known = math.prod(n for n in size if n != -1)
    return tuple(numel // known if n == -1 and known else n for n in size)


def _reshape(op: Any, weight: Weight, shape: Shape) -> Weight:
    spec = weight.spec
    if tuple(shape) == spec.shape:
        return keep_padding(weight.map(aten.alias.default), weight)
    if (
        spec.is_contiguous
        and isinstance(spec.scheme, Flattened)
        and spec.scheme.inner.can_view(spec.scheme.shape, shape)
    ):
        inner = spec.scheme.inner
        made = spec.shaped(shape, scheme=inner, tie=spec.tie)
        return weight.with_parts(view_parts(inner, dict(weight.parts), shape), made, cut=weight._cut)
    if spec.is_contiguous and len(shape) == 1 and not spec.scheme.can_view(spec.base, shape):
        made = spec.shaped(shape, scheme=Flattened(spec.scheme, spec.base), tie=spec.tie)
        return weight.map(aten.alias.default, made)
    if not spec.is_contiguous or not spec.scheme.can_view(spec.base, shape):
        raise _cannot(op, weight, f"as {tuple(shape)} cannot share its storage")
    parts = view_parts(spec.scheme, dict(weight.parts), shape)
    made = spec.shaped(shape, tie=spec.tie)
    return weight.with_parts(parts, made, cut=weight._cut)


@_viewed(aten.expand.default)
def expand(op: Any, weight: Weight, size: Sequence[int], *, implicit: bool = False) -> Weight:
    """Expand to its own shape with leading ones; for a repeated Weight the parts would have to be copied."""
    new = len(size) - weight.dim()
    own = tuple(n if s == -1 else s for s, n in zip(size[new:], weight.shape, strict=True)) if new >= 0 else ()
    if own != weight.spec.shape or any(n != 1 for n in size[:new]):
        raise _cannot(op, weight, f"to {tuple(size)} cannot share its storage")
    return _reshape(op, weight, (1,) * new + own)


@rule(aten.as_strided.default)
def as_strided(
    op: Any, weight: Weight, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Weight:
    """Return the Weight itself or, where sharding has padded it, its first rows; of a transparent one, any view.

    Other rows have an offset that a Weight does not tell: compiled code would make its outputs of the first rows. The
    tensor in a transparent one has an offset. But where that is not 0, torch 2.15 counts from there, and older ones
    from the start of the memory.
    """
    shape, is_own = weight.spec.shape, (tuple(size), tuple(stride)) == (weight.spec.shape, weight.spec.stride)
    if weight.scheme.transparent:
        if (
            weight.storage_offset() == 0
            or storage_offset is None
            or (is_own and storage_offset == weight.storage_offset())
        ):
            return _on_tensor(op, weight, size, stride, storage_offset)  # type: ignore[no-any-return]
        raise _cannot(op, weight, f"as {tuple(size)}, {storage_offset} elements from the start or from its own offset")
    is_rows = is_padded(weight) and tuple(size[1:]) == shape[1:] and size[0] <= shape[0] and weight.spec.is_contiguous
    if (
        storage_offset
        or tuple(stride) != weight.spec.stride
        or len(size) != len(shape)
        or not (tuple(size) == shape or is_rows)
    ):
        raise _cannot(op, weight, f"as {tuple(size)} with stride {tuple(stride)} cannot share its storage")
    return _rows(op, weight, 0, 0, size[0]) if is_rows else keep_padding(weight.map(aten.alias.default), weight)


# -- rows ---------------------------------------------------------------------------------------------------------


def _rows(op: Any, weight: Weight, dim: int, start: int, stop: int) -> Weight:
    """Return rows ``start:stop`` of the base tensor, seen in the Weight's own order."""
    dim %= weight.dim()
    spec = weight.spec
    if is_padded(weight) and start == 0 == dim:
        return first_rows(weight, stop)  # type: ignore[return-value]
    if (start, stop) == (0, spec.shape[dim]):
        return keep_padding(weight.map(aten.alias.default), weight)
    if spec.order[dim] != 0 or (weight.dim() == 1 and any(p.span != 1 for p in _layout(weight) if p.span)):
        raise _cannot(op, weight, f"along dim {dim} cannot share its storage: the scheme works along that dimension")
    base = (stop - start, *spec.base[1:])
    made = spec.shaped(base).permute(spec.order)
    return weight.with_parts(cut_rows(weight, start, stop), made, cut=shared_by_rows(weight))


def _layout(weight: Weight) -> list[Any]:
    return list(weight.scheme.layout(weight.spec.base).values())


@rule(aten.slice.Tensor)
def slice_rows(
    op: Any, weight: Weight, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Weight:
    if weight.scheme.transparent and not (is_padded(weight) and dim == 0 and not start and step == 1):
        return _on_tensor(op, weight, dim, start, end, step)  # type: ignore[no-any-return]
    first, last, _ = slice(start, None if end is None or end >= _WHOLE else end).indices(weight.shape[dim])
    if step != 1:
        raise _cannot(op, weight, f"with step {step} cannot share its storage")
    return _rows(op, weight, dim, first, max(first, last))


@_viewed(aten.select.int)
def select(op: Any, weight: Weight, dim: int, index: int) -> Weight:
    rows = weight.shape[dim]
    if not -rows <= index < rows:
        raise IndexError(
            f"select(): index {index} out of range for tensor of size {tuple(weight.shape)} at dimension {dim}"
        )
    if weight.dim() == 1 or not weight.spec.is_contiguous:
        fix = "Call .dequantize() on the Weight first. To write a file, call tt.save."  # huggingface_hub comes here
        raise _cannot(op, weight, "by one index cannot share its storage", fix)
    row = _rows(op, weight, dim, index % rows, index % rows + 1)
    dim %= weight.dim()
    return _reshape(op, row, tuple(n for d, n in enumerate(row.shape) if d != dim))


@_viewed(aten.split.Tensor)
def split(op: Any, weight: Weight, size: int, dim: int = 0) -> list[Weight]:
    total = weight.shape[dim]
    starts = range(0, total, size) if total and size else [0]
    return [_rows(op, weight, dim, start, min(start + size, total)) for start in starts]


@_viewed(aten.split_with_sizes.default)
def split_with_sizes(op: Any, weight: Weight, sizes: Sequence[int], dim: int = 0) -> list[Weight]:
    if sum(sizes) != weight.shape[dim]:
        raise RuntimeError(f"split_with_sizes: sizes {list(sizes)} do not sum to {weight.shape[dim]} along dim {dim}")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [_rows(op, weight, dim, start, start + size) for start, size in zip(starts, sizes, strict=True)]


@_viewed(aten.unbind.int)
def unbind(op: Any, weight: Weight, dim: int = 0) -> list[Weight]:
    return [select(op, weight, dim, index) for index in range(weight.shape[dim])]


@_viewed(aten.index_select.default)
def index_select(op: Any, weight: Weight, dim: int, index: Tensor) -> Any:
    """Return the rows as a Weight if no two rows share an entry of a part, else their values."""
    taken = (
        take_rows(weight, index) if dim % weight.dim() == 0 and weight.spec.is_contiguous and weight.dim() > 1 else None
    )
    if taken is None:
        return read(op, weight, dim, index)
    spec = weight.spec.shaped((index.numel(), *weight.shape[1:]))
    return weight.with_parts(taken, spec)


# -- joins --------------------------------------------------------------------------------------------------------


@rule(aten.cat.default)
def cat(op: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Return a Weight of the joined rows if the schemes are equal and no block is cut, else the joined values."""
    first = tensors[0]
    if isinstance(first, Weight) and all(_joins(first, other) for other in tensors) and dim % first.dim() == 0:
        if first.scheme.transparent:
            return first.around(op([w.values_of() for w in tensors if isinstance(w, Weight)], dim))
        weights = [w for w in tensors if isinstance(w, Weight)]
        joined = join_rows(weights) if first.dim() > 1 else None
        if joined is not None:
            shape = (sum(w.shape[0] for w in weights), *first.shape[1:])
            return first.with_parts(joined, first.spec.shaped(shape))
    return read(op, tensors, dim)


@rule(aten.stack.default)
def stack(op: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    first = tensors[0]
    if isinstance(first, Weight) and dim % (first.dim() + 1) == 0 and all(_joins(first, other) for other in tensors):
        if first.scheme.transparent:
            return first.around(op([w.values_of() for w in tensors if isinstance(w, Weight)], dim))
        shape = (1, *first.shape)
        if len({tuple(t.shape) for t in tensors}) == 1 and first.scheme.can_view(first.spec.base, shape):
            return cat(aten.cat.default, [_reshape(op, w, shape) for w in tensors if isinstance(w, Weight)])
    return read(op, tensors, dim)


def _joins(first: Weight, other: Tensor) -> bool:
    return (
        isinstance(other, Weight)
        and other.scheme == first.scheme
        and other.dtype == first.dtype
        and other.spec.is_contiguous
        and other.shape[1:] == first.shape[1:]
    )


refuse(
    aten.view.dtype, aten.view_as_real.default, aten.view_as_complex.default,
    why="would read the memory of a Weight, which has none of its own (tt.save writes it)",
)  # fmt: skip
refuse(
    aten.diagonal.default, aten.unfold.default, why="cannot share the storage of a Weight"
)  # fmt: skip
