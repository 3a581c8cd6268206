"""``F.grouped_mm``: rows in groups, each times a matrix of its own, as mixtures of experts call it.

Only the matrices of groups that have rows are decoded, one at a time. Autograd calls the same op for the gradient of
the rows, with the Weight transposed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedOpError
from ...torch_private.observers import is_observed
from ...torch_private.tensors import is_fake
from ..dispatch import rule
from ..products import chunks
from ..weight import Weight
from .graph_ops import LIBRARY, spec_from, text_of, weight_from
from .product import by_parts, decoded_linear, decoder, gradient, rows_at_once, same
from .views import select

aten = torch.ops.aten


@rule(aten._grouped_mm.default)
def grouped_mm(
    op: Any,
    rows: Tensor,
    weight: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``rows[offs[i - 1]:offs[i]] @ weight[i]`` for each group i, one below the other.

    rows (M, K)    weight (G, K, N)    offs (G,) int32, on the device of ``rows``    result (M, N), zeros behind the
    last group. Any other call of the op is answered with the values of its Weights.
    """
    if not isinstance(weight, Weight) or weight.dim() != 3 or rows.dim() != 2 or offs is None:
        return _plain(op, rows, weight, offs, bias, out_dtype)
    if isinstance(rows, Weight) or weight.scheme.transparent or rows.dtype is not weight.dtype:
        return _plain(op, rows, weight, offs, bias, out_dtype)
    is_transposed = weight.spec.order == (0, 2, 1) and not weight.spec.is_contiguous
    if bias is not None or out_dtype not in (None, rows.dtype) or not (is_transposed or weight.spec.is_contiguous):
        return _plain(op, rows, weight, offs, bias, out_dtype)
    base = weight.map(same, weight.spec.permute((0, 2, 1))) if is_transposed else weight
    if torch.compiler.is_compiling():
        if torch.compiler.is_exporting():
            return _plain(op, rows, weight, offs, bias, out_dtype)
        parts = list(base.parts.values())
        return torch.ops.torchtether.grouped.default(rows, offs, parts, text_of(base.spec), is_transposed)  # type: ignore[no-any-return]
    if rows.is_meta or offs.is_meta or is_fake(offs):
        return rows.new_empty(rows.shape[0], weight.shape[2])
    return _product(rows, base, offs, is_transposed)


def _plain(op: Any, rows: Tensor, weight: Tensor, *others: Any) -> Tensor:
    values = (one.values_of() if isinstance(one, Weight) else one for one in (rows, weight, *others))
    return op(*values)  # type: ignore[no-any-return]


def _product(rows: Tensor, base: Weight, offs: Tensor, is_transposed: bool) -> Tensor:
    """Return the product of each group with its matrix of ``base`` (G, N, K), or (G, K, N) if not ``is_transposed``."""
    made = rows.new_zeros(rows.shape[0], base.shape[1 if is_transposed else 2])
    start, scratch = 0, rows.new_empty(base.shape[1:]) if base.is_cpu else None
    for group, stop in enumerate(offs.tolist()):
        if stop > start:
            made[start:stop] = _one(rows[start:stop], base, group, is_transposed, scratch)
        start = max(start, stop)
    return made


def _one(rows: Tensor, base: Weight, group: int, is_transposed: bool, scratch: Tensor | None) -> Tensor:
    """Return the product with one matrix, which is decoded into ``scratch``: the system takes longer to find new
    memory for each matrix than decoding takes."""
    try:
        matrix = select(aten.select.int, base, 0, group)
    except UnsupportedOpError:  # two matrices share a block of the scheme
        values = base.values_of()[group]
        return rows @ (values.t() if is_transposed else values)
    layout = None if is_observed() else matrix.kernel_layout
    if is_transposed and not is_observed():
        made = by_parts(matrix, rows, None)
        if made is not None:
            return made
    if layout is None or scratch is None or matrix.spec.activations is not None:
        return (
            decoded_linear(torch.nn.functional.linear, rows, matrix, None) if is_transposed else gradient(rows, matrix)
        )
    decode, (count, columns) = decoder(matrix), matrix.shape
    product = partial(chunks.linear, rows, None) if is_transposed else partial(chunks.product, rows)
    return product(count, columns, rows_at_once(matrix) or count, lambda start, stop, _: decode(start, stop, scratch))


# -- in compiled graphs -----------------------------------------------------------------------------------------------

LIBRARY.define("grouped(Tensor rows, Tensor offs, Tensor[] parts, str weight, bool is_transposed) -> Tensor")


@torch.library.impl(LIBRARY, "grouped", "CompositeExplicitAutograd")
def grouped_in_graph(rows: Tensor, offs: Tensor, parts: list[Tensor], weight: str, is_transposed: bool) -> Tensor:
    """Return what ``grouped_mm`` does; how many rows each group has is known when the graph runs."""
    return _product(rows, weight_from(weight, parts), offs, is_transposed)


@torch.library.register_fake("torchtether::grouped", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _fake_grouped(rows: Tensor, offs: Tensor, parts: list[Tensor], weight: str, is_transposed: bool) -> Tensor:
    return rows.new_empty(rows.shape[0], spec_from(weight).shape[1 if is_transposed else 2])
