"""The rules for ``F.linear`` and ``matmul``, which run above aten, in ``__torch_function__``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...geometry.blocks import STOCK
from ...torch_private.observers import hides_batch, is_autocasting, is_observed, is_tracing, is_transforming
from ...torch_private.tensors import as_plain
from ..dispatch import FOLDS, PRODUCTS, SHORTCUTS, rule
from ..products import cpu, rounding
from ..products.layout import DTYPES
from ..weight import Weight
from ..wrapping import Wrapping
from .product import by_parts, decoded_linear, is_batch, plain_linear, records_graph, traced

aten = torch.ops.aten


@rule(torch.nn.functional.linear)
def linear(op: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``input @ weight.T + bias``.

    Where a graph is recorded, it holds the Weight, not its values, and lets the gradient of ``input`` through whether
    or not the Weight is frozen.
    """
    if not isinstance(weight, Weight):
        return plain_linear(op, input, weight, bias)
    observed = is_observed()
    if observed and is_tracing():
        kind, values = weight.spec.activations, traced(weight)
        return plain_linear(op, input if kind is None else rounding.rounded(input, kind), values, bias)
    if not observed and is_autocasting(weight.device):
        return _under_autocast(op, input, weight, bias)
    if _is_repeated(weight):
        return _packed(plain_linear(op, _packed(input), weight, bias))
    if records_graph(input, weight, bias):
        if not observed and _is_plain(input, weight, bias):
            product: Tensor = _FrozenLinear.apply(input.flatten(0, -2), weight, bias)
            return product if input.dim() == 2 else product.view(*input.shape[:-1], weight.shape[0])
        return plain_linear(op, input, weight, bias)
    if not observed:
        made = by_parts(weight, input, bias)
        if made is not None:
            SHORTCUTS[op] = cpu.shortcut_linear  # for the next call
            return made
    input, bias = (t.values_of() if isinstance(t, Weight) else t for t in (input, bias))  # type: ignore[assignment]
    return decoded_linear(input, weight, bias)


def _under_autocast(op: Any, input: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Cast the arguments as autocast does, then multiply without it."""
    kind = weight.device.type
    dtype, given = torch.get_autocast_dtype(kind), [t for t in (input, weight, bias) if t is not None]
    if not all(isinstance(t, Tensor) and t.dtype in DTYPES and t.device.type == kind for t in given):
        return plain_linear(op, input, weight, bias)
    if weight.requires_grad and weight.dtype is not dtype:
        return plain_linear(op, input, weight, bias)  # autocast remembers such a cast
    torch.set_autocast_enabled(kind, False)
    try:
        return linear(op, *(t if t.dtype is dtype else t.to(dtype) for t in given))  # type: ignore[no-any-return]
    finally:
        torch.set_autocast_enabled(kind, True)


def _is_plain(input: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    """Return whether ``_FrozenLinear`` takes the arguments."""
    spec = weight._spec
    if weight.requires_grad or spec.scheme.transparent or len(spec.shape) != 2 or not spec.is_contiguous:
        return False
    if type(input) not in STOCK or input.dtype is not spec.dtype or input.dim() < 2:
        return False
    if input.layout is not torch.strided or input.is_nested:
        return False
    return bias is None or (type(bias) in STOCK and bias.shape == spec.shape[:1])


class _FrozenLinear(torch.autograd.Function):
    """The product of a matrix with a Weight that does not require grad.

    Torch's own graph of it would hold a transposed Weight, which costs four turns through Python to make and to use.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight.detach())  # so that the graph does not keep the Parameter from being exchanged
        made = by_parts(weight, input, bias)
        if made is None:
            made = decoded_linear(input, weight, bias)
        return aten._unsafe_view(made, made.shape) if made._is_view() else made  # ops in place refuse a Function's view

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        grad = _packed(grad) if hides_batch(grad) else grad
        of_input = torch.mm(grad, weight) if ctx.needs_input_grad[0] else None
        return of_input, None, grad.sum(0) if ctx.needs_input_grad[2] else None


class _Packed(torch.autograd.Function):
    """Copy a tensor, and its gradient, into memory without gaps, repeats or another order, those of its batch too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor) -> Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return _packed(grad)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:  # type: ignore[override]
        return _packed(tangent)


def _packed(tensor: Tensor) -> Tensor:
    """Return a copy of a plain tensor that ``_Packed`` makes, any other tensor as it is."""
    if isinstance(tensor, Wrapping) or tensor.layout is not torch.strided:
        return tensor
    made: Tensor = _Packed.apply(tensor)
    return made


def _is_repeated(weight: Any) -> bool:
    """Return whether ``vmap`` would repeat ``weight`` for each matrix of a batch that is not packed.

    Torch makes one matrix of any batch if the weight requires grad, and repeats a plain tensor without a copy.
    """
    return is_transforming() and isinstance(weight, Weight) and not (weight.requires_grad or weight.scheme.transparent)


@rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__)
def matmul(op: Any, first: Any, second: Any, **kwargs: Any) -> Any:
    """Return the product; a batch of matrices is multiplied as one matrix with all of their rows."""
    with as_plain():
        if op is Tensor.__rmatmul__:
            op, first, second = torch.matmul, second, first
        if not kwargs and _is_matrix(second) and is_batch(first):
            return op(first.flatten(0, -2), second).view(*first.shape[:-1], second.shape[1])
        if not kwargs and _is_matrix(first) and is_batch(second):
            columns = second.transpose(-1, -2)  # A @ B = (B.T @ A.T).T, so the rows of B.T make one matrix
            made = op(columns.flatten(0, -2), first.t()).view(*columns.shape[:-1], first.shape[0])
            return made.transpose(-1, -2).contiguous()  # as torch's own, of which callers take views
        if not kwargs and _is_matrix(second) and _is_repeated(second):
            return _packed(op(_packed(first), second))
        if not kwargs and _is_matrix(first) and _is_repeated(first) and second.dim() <= 2:
            return _packed(op(_packed(second.t()), first.t())).t()
        return op(first, second, **kwargs)


def _is_matrix(weight: Any) -> bool:
    return isinstance(weight, Wrapping) and weight.dim() == 2


PRODUCTS.update(dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__), matmul))
PRODUCTS[torch.nn.functional.linear] = plain_linear
FOLDS.update(PRODUCTS)
