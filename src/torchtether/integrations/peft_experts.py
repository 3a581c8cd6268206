"""PEFT's ``target_parameters`` on fused experts that are Weights: only the expert that is multiplied is decoded.

PEFT adds ``scale * B[e] @ A[e]`` to every expert e before any of them is used: all experts of a layer are dense at
once, and stay so until backward. Here the experts' own forward finds an ``AdaptedExperts`` in place of the parameter.
It multiplies by the Weight, which decodes one expert at a time in forward and backward, and by the two factors, and
adds the products. Adapters, their names, their files and merging remain PEFT's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..torch_private.dispatching import tree_map_only
from ..weights.weight import Weight

_BASE_ATTRIBUTES = frozenset({"dtype", "device", "layout", "is_cuda", "is_cpu", "is_meta", "requires_grad", "data_ptr"})


class AdaptedExperts:
    """Stand for ``base + lhs @ rhs``: for all experts, for those that ``ids`` picks, or (2 dimensions) for one.

    base (E, M, N)    lhs (E, M, r)    rhs (E, r, N)    ids (S,) int64 or ``None``

    ``F.linear``, ``matmul``, ``bmm`` and ``F.grouped_mm`` do not compute the sum. Transposing and indexing decode no
    values. Any other use computes the sum, as PEFT always does.
    """

    def __init__(self, base: Tensor, lhs: Tensor, rhs: Tensor, ids: Tensor | None = None) -> None:
        self.base, self.lhs, self.rhs, self.ids = base, lhs, rhs, ids
        self._each: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None

    def values(self) -> Tensor:
        """Return the sum."""
        base, lhs, rhs = (one if self.ids is None else one[self.ids] for one in (self.base, self.lhs, self.rhs))
        return base + (lhs @ rhs).to(base.dtype)

    # -- shape ----------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the sum."""
        return self.base.shape if self.ids is None else torch.Size((len(self.ids), *self.base.shape[1:]))

    @property
    def ndim(self) -> int:
        """Return the number of dimensions."""
        return self.base.dim()

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.base.dim()

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of ``dim``."""
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base if name in _BASE_ATTRIBUTES else self.values(), name)

    # -- indexing and transposing ---------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        if self.ndim == 3 and self.ids is None and _is_index(index):
            if isinstance(index, Tensor) and index.dim():
                return AdaptedExperts(self.base, self.lhs, self.rhs, index)
            if self._each is None:
                self._each = self.lhs.unbind(), self.rhs.unbind()  # once: each indexing has a gradient for all experts
            lhs, rhs = self._each
            return AdaptedExperts(self.base[int(index)], lhs[int(index)], rhs[int(index)])
        return self.values()[index]

    @property
    def mT(self) -> AdaptedExperts:
        """Return the experts with their last two dimensions transposed."""
        return AdaptedExperts(self.base.transpose(-2, -1), self.rhs.mT, self.lhs.mT, self.ids)

    def transpose(self, first: int, second: int) -> Any:
        """Return the experts with two dimensions transposed: a plain tensor unless these are the last two."""
        is_inner = {first % self.ndim, second % self.ndim} == {self.ndim - 2, self.ndim - 1}
        return self.mT if is_inner else self.values().transpose(first, second)

    def t(self) -> Any:
        """Return the transposed matrix."""
        return self.transpose(0, 1)

    # -- products -------------------------------------------------------------------------------------------------

    def __matmul__(self, other: Tensor) -> Tensor:
        return torch.matmul(self, other)  # type: ignore[arg-type]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        product = _PRODUCTS.get(getattr(func, "__name__", ""))
        made = NotImplemented if product is None else product(func, *args, **kwargs)
        if made is not NotImplemented:
            return made
        args, kwargs = tree_map_only(cls, cls.values, (args, kwargs))
        return func(*args, **kwargs)


def _is_index(index: Any) -> bool:
    if isinstance(index, Tensor):
        return index.dim() < 2 and index.dtype in (torch.int32, torch.int64)
    return isinstance(index, int) and not isinstance(index, bool)


def _linear(func: Any, x: Tensor, weight: Any, bias: Tensor | None = None) -> Any:
    if not isinstance(weight, AdaptedExperts) or weight.ndim != 2:
        return NotImplemented
    return func(x, weight.base, bias) + _of_one(x, weight.mT)


def _matmul(func: Any, first: Any, second: Any) -> Any:
    if isinstance(first, AdaptedExperts) and isinstance(second, Tensor) and second.dim() > 1:
        made = _matmul(torch.matmul, second.mT, first.mT)  # (A @ B).mT is B.mT @ A.mT
        return made if made is NotImplemented else made.mT
    if not isinstance(first, Tensor) or not isinstance(second, AdaptedExperts) or not first.dim():
        return NotImplemented
    if second.ndim == 3:
        return _batch(first, second) if first.dim() == 3 and len(first) == len(second) else NotImplemented
    return func(first, second.base) + _of_one(first, second)


def _rmatmul(func: Any, first: Any, second: Any) -> Any:
    return _matmul(torch.matmul, second, first)


def _grouped(func: Any, rows: Tensor, weight: Any, offs: Tensor | None = None, **others: Any) -> Any:
    is_plain = isinstance(rows, Tensor) and rows.dim() == 2 and all(other is None for other in others.values())
    if not is_plain or not isinstance(weight, AdaptedExperts) or weight.ids is not None or offs is None:
        return NotImplemented
    return func(rows, weight.base, offs=offs) + _low_rank(rows, weight.lhs, weight.rhs, offs.tolist())


_PRODUCTS: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "matmul": _matmul,
    "__matmul__": _matmul,
    "__rmatmul__": _rmatmul,
    "mm": _matmul,
    "bmm": _matmul,
    "_grouped_mm": _grouped,
}
"""Products by the name of torch's function. F.grouped_mm calls ``_grouped_mm``."""


def _batch(x: Tensor, weight: AdaptedExperts) -> Tensor:
    """Return ``x[i] @ weight[i]`` for each i. Every expert is decoded once, for all of its rows.

    x (S, T, M)    weight (S, M, N)    result (S, T, N)
    """
    count, each, _ = x.shape
    ids = torch.arange(count, device=x.device) if weight.ids is None else weight.ids
    ids, order = ids.repeat_interleave(each).sort(stable=True)
    experts = torch.arange(len(weight.base), device=x.device)
    offs = torch.searchsorted(ids, experts, right=True, out_int32=True)
    weight = AdaptedExperts(weight.base, weight.lhs, weight.rhs)
    made: Tensor = torch.nn.functional.grouped_mm(x.flatten(0, 1)[order], weight, offs=offs)  # type: ignore[arg-type]
    return made[order.argsort()].view(count, each, -1)


def _of_one(x: Tensor, weight: AdaptedExperts) -> Tensor:
    """Return ``x @ lhs @ rhs`` of one expert."""
    rows = x.reshape(-1, x.shape[-1])
    return _low_rank(rows, weight.lhs[None], weight.rhs[None], [len(rows)]).view(*x.shape[:-1], weight.shape[1])


def _low_rank(rows: Tensor, lhs: Tensor, rhs: Tensor, stops: list[int]) -> Tensor:
    # torch keeps a compiled product of 16-bit floats for each number of rows: hundreds of MiB for these small factors
    wide = torch.promote_types(rows.dtype, torch.float32) if rows.is_cpu else rows.dtype
    made: Tensor = _LowRank.apply(rows, lhs.to(wide).contiguous(), rhs.to(wide).contiguous(), stops)
    return made


class _LowRank(torch.autograd.Function):
    """Compute ``rows[stops[e - 1]:stops[e]] @ lhs[e] @ rhs[e]`` for each e, one below the other, then zeros.

    rows (M, K)    lhs (E, K, r)    rhs (E, r, N)    result (M, N) of the dtype of ``rows``

    ``rows`` may have 16 bits and the factors 32: rows are converted one group at a time. Backward saves the arguments
    alone, and computes the products ``rows @ lhs`` again.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, lhs: Tensor, rhs: Tensor, stops: list[int]) -> Tensor:
        ctx.save_for_backward(rows, lhs, rhs)
        ctx.stops = stops
        made = rows.new_zeros(rows.shape[0], rhs.shape[2])
        with torch.autocast("cpu", enabled=False):  # _low_rank has chosen the dtype
            for expert, span in _spans(stops):
                made[span] = rows[span].to(lhs.dtype) @ lhs[expert] @ rhs[expert]
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, lhs, rhs = ctx.saved_tensors
        of_rows, of_lhs, of_rhs = (
            torch.zeros_like(one) if needed else None
            for one, needed in zip((rows, lhs, rhs), ctx.needs_input_grad, strict=False)
        )
        for expert, span in _spans(ctx.stops):
            x, up = rows[span].to(lhs.dtype), grad[span].to(lhs.dtype)
            inner = up @ rhs[expert].t()
            if of_rows is not None:
                of_rows[span] = inner @ lhs[expert].t()
            if of_lhs is not None:
                of_lhs[expert] = x.t() @ inner
            if of_rhs is not None:
                of_rhs[expert] = (x @ lhs[expert]).t() @ up
        return of_rows, of_lhs, of_rhs, None


def _spans(stops: list[int]) -> Iterator[tuple[int, slice]]:
    """Yield each group that has rows, with the slice of its rows."""
    start = 0
    for group, stop in enumerate(stops):
        if stop > start:
            yield group, slice(start, stop)
        start = max(start, stop)


# -- patching PEFT ----------------------------------------------------------------------------------------------------


def install(kind: Any) -> None:
    """Make ``kind``, PEFT's ``ParamWrapper``, use AdaptedExperts for Weights of three dimensions; once.

    PEFT before 0.21 has no factors to give: there its own code decodes all experts of a layer, and adds the product.
    """
    if hasattr(kind, "get_delta_factors") and kind.forward.__module__ != __name__:
        kind._activate_lora, kind.forward = _activated(kind._activate_lora), _outside_of_graphs(kind.forward)


def _is_ours(layer: Any) -> bool:
    held = layer.get_param()
    return isinstance(held, Weight) and held.dim() == 3


def _activated(original: Any) -> Any:
    @contextmanager
    def _activate_lora(layer: Any, active_adapters: list[str]) -> Iterator[None]:
        names = [one for one in active_adapters if one in layer.lora_A]
        if not names or not _is_ours(layer):
            with original(layer, active_adapters):
                yield
            return
        found = [layer.get_delta_factors(one) for one in names]
        lhs = torch.cat([scale * lhs for lhs, _, scale in found], dim=-1)
        rhs = torch.cat([rhs for _, rhs, _ in found], dim=-2)
        attributes = vars(layer.get_base_layer())  # attributes are found before parameters, whose table stays unchanged
        attributes[layer.parameter_name] = AdaptedExperts(layer.get_param(), lhs, rhs)
        try:
            yield
        finally:
            del attributes[layer.parameter_name]

    return _activate_lora


def _outside_of_graphs(original: Any) -> Any:
    """Keep these layers out of compiled graphs: the number of rows of an expert is known only at run time."""
    eager = torch.compiler.disable(original)

    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        run = eager if torch.compiler.is_compiling() and _is_ours(layer) else original
        return run(layer, *args, **kwargs)

    return forward
