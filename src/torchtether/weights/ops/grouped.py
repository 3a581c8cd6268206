"""The rule for ``F.grouped_mm``: products of groups of rows, each with its own matrix, for mixtures of experts.

Only the matrices of groups that have rows are decoded: on the CPU one at a time; on CUDA as many as can have rows, in
pieces that torch's op multiplies. Autograd calls the same op for the gradient of the rows, with the Weight transposed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedOpError
from ...geometry.views import Shape
from ...schemes import ColumnScaled, Scheme
from ...schemes.column_scaled import COLUMNS
from ...torch_private.observers import is_observed
from ...torch_private.tensors import as_plain, is_fake
from ..dispatch import FOLDS, rule
from ..products import chunks, fitting, gpu, rounding, scaled_mm
from ..products.layout import Layout, layout_of
from ..weight import Weight
from .embedding import gather
from .graph_ops import LIBRARY, spec_from, text_of, weight_from
from .product import ON_CUDA, by_parts, decoded_linear, decoder, gradient, rows_at_once, same
from .views import select, view

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
    """Return ``rows[offs[i - 1]:offs[i]] @ weight[i]`` for each group i, concatenated by rows.

    rows (M, K)    weight (G, K, N)    offs (G,) int32, on the device of ``rows``    result (M, N), zeros after the
    last group. Any other call of the op runs on the decoded values.
    """
    if not isinstance(weight, Weight) or weight.dim() != 3 or rows.dim() != 2 or offs is None:
        return _plain(op, rows, weight, offs, bias, out_dtype)
    if isinstance(rows, Weight) or weight.scheme.transparent or rows.dtype is not weight.dtype:
        return _plain(op, rows, weight, offs, bias, out_dtype)
    is_transposed = weight.spec.order == (0, 2, 1) and not weight.spec.is_contiguous
    if bias is not None or out_dtype not in (None, rows.dtype) or not (is_transposed or weight.spec.is_contiguous):
        return _plain(op, rows, weight, offs, bias, out_dtype)
    is_plain = rows.is_cuda and is_transposed and weight.spec.activations is None and not torch.compiler.is_compiling()
    if is_plain and (each := by_each(rows, weight, offs)) is not None:
        return each
    base = weight.map(same, weight.spec.permute((0, 2, 1))) if is_transposed else weight
    if torch.compiler.is_compiling():
        if torch.compiler.is_exporting():
            return _plain(op, rows, weight, offs, bias, out_dtype)
        parts = list(base.parts.values())
        return torch.ops.torchtether.grouped.default(rows, offs, parts, text_of(base.spec), is_transposed)  # type: ignore[no-any-return]
    if rows.is_meta or offs.is_meta:
        return rows.new_empty(rows.shape[0], weight.shape[2])
    return _product(rows, base, offs, is_transposed)


@rule(torch._grouped_mm)
def experts(op: Any, rows: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Refuse what cannot round its inputs before autograd is called, whose gradients are rows, too."""
    _check_rounding(weight)
    with as_plain():
        return op(rows, weight, *args, **kwargs)  # type: ignore[no-any-return]


FOLDS[torch._grouped_mm] = experts


def _check_rounding(weight: Tensor) -> None:
    """Refuse to round inputs for matrices that are used as they lie: autograd would round its gradients instead."""
    if isinstance(weight, Weight) and weight.spec.activations is not None and weight.spec.is_contiguous:
        raise UnsupportedOpError(
            f"experts of shape {tuple(weight.shape)}, multiplied without a transpose, cannot round their inputs",
            fix="Call tt.quantize_activations(model, None, only=...) for them.",
        )


def _plain(op: Any, rows: Tensor, weight: Tensor, *others: Any) -> Tensor:
    values = (one.values_of() if isinstance(one, Weight) else one for one in (rows, weight, *others))
    return op(*values)  # type: ignore[no-any-return]


def _product(rows: Tensor, base: Weight, offs: Tensor, is_transposed: bool) -> Tensor:
    """Return the product of each group with its matrix of ``base`` (G, N, K), or (G, K, N) if not ``is_transposed``."""
    if rows.is_cuda and is_answered(rows, base, offs):
        return on_cuda(rows, base, offs, is_transposed)
    if is_fake(offs):
        return rows.new_empty(rows.shape[0], base.shape[1 if is_transposed else 2])
    made = rows.new_zeros(rows.shape[0], base.shape[1 if is_transposed else 2])
    start, scratch = 0, rows.new_empty(base.shape[1:]) if base.is_cpu else None
    for group, stop in enumerate(offs.tolist()):
        if stop > start:
            made[start:stop] = _one(rows[start:stop], base, group, is_transposed, scratch)
        start = max(start, stop)
    return made


def _one(rows: Tensor, base: Weight, group: int, is_transposed: bool, scratch: Tensor | None) -> Tensor:
    """Return the product with the matrix of one group.

    It is decoded into ``scratch``: new memory for each matrix would take longer than decoding.
    """
    try:
        matrix = select(aten.select.int, base, 0, group)
    except UnsupportedOpError:  # two matrices share a block of the scheme
        values, kind = base.values_of()[group], base.spec.activations
        rows = rounding.rounded(rows, kind) if kind is not None and is_transposed else rows
        return rows @ (values.t() if is_transposed else values)
    layout = None if is_observed() else matrix.kernel_layout
    if is_transposed and not is_observed():
        made = by_parts(matrix, rows, None)
        if made is not None:
            return made
    if layout is None or scratch is None or matrix.spec.activations is not None:
        return decoded_linear(rows, matrix, None) if is_transposed else gradient(rows, matrix)
    decode, (count, columns) = decoder(matrix), matrix.shape
    product = partial(chunks.linear, rows, None) if is_transposed else partial(chunks.product, rows)
    return product(count, columns, rows_at_once(matrix) or count, lambda start, stop, _: decode(start, stop, scratch))


# -- on CUDA ----------------------------------------------------------------------------------------------------------

FEW = 16
"""The most rows for which one matrix per row is decoded; for more, reading the groups pays off. Not measured."""

EACH = 4
"""The rows for each matrix up to which one kernel that reads a matrix for each row is faster than decoding: on an H100,
64 of 1536 x 4096, 256 rows take 0.3 to 0.9 of it; 8 of 8192 x 4096, 32 rows 0.4 to 0.9, 64 rows 0.8 to 1.7."""

_ALIGNED = 16
"""The factor of all sides of matrices for ``torch._grouped_mm``, which needs rows aligned to 16 bytes."""


def is_answered(rows: Tensor, base: Weight, offs: Tensor) -> bool:
    """Return whether the product needs no transfer of ``offs`` to the host: torch has an op, or there are few rows."""
    if offs.dtype is not torch.int32 or rows.shape[0] == 0 or matrix_of(base) is None:
        return False
    return torch_multiplies(rows, base) or rows.shape[0] <= FEW


def torch_multiplies(rows: Tensor, base: Weight) -> bool:
    """Return whether ``torch._grouped_mm`` multiplies the arguments without waiting for the GPU.

    It does for bfloat16 and sides that are multiples of 16, from capability 9.0 to 10.3; elsewhere it reads ``offs``.
    """
    is_able = rows.is_cpu or fitting.capability(rows.device)[0] in (9, 10)
    return is_able and rows.dtype is torch.bfloat16 and not any(side % _ALIGNED for side in base.spec.shape[1:])


def matrix_of(base: Weight) -> Weight | None:
    """Return (G, N, K) as a matrix of G * N rows; ``None`` if blocks of its scheme do not allow that view.

    For ``ColumnScaled``, whose column scales differ per matrix, return the unscaled Weight, in float32.
    """
    groups, count, columns = base.spec.shape
    if isinstance(base.scheme, ColumnScaled):
        parts = {name: part for name, part in base.parts.items() if name != COLUMNS}
        base = Weight(parts, base.spec.replace(scheme=base.scheme.scheme, dtype=torch.float32))
    try:
        return view(aten.view.default, base, [groups * count, columns])  # type: ignore[no-any-return]
    except UnsupportedOpError:
        return None


def on_cuda(rows: Tensor, base: Weight, offs: Tensor, is_transposed: bool) -> Tensor:
    """Return the product of each group with its matrix of ``base``, after rounding rows to its activations, if any."""
    kind = base.spec.activations
    if kind is None or not is_transposed:
        return without_waiting(rows, base, offs, is_transposed)
    if torch_multiplies(rows, base) and multiplies_codes(base, fitting.capability(rows.device)):
        return by_codes(rows, base, offs)
    units, scale = rounding.units_of(rows, kind)
    sums = without_waiting(units, base, offs, is_transposed)
    return zeros_behind(rounding.scaled(sums, scale, rows.dtype), offs)


def multiplies_codes(base: Weight, capability: tuple[int, int]) -> bool:
    """Return whether ``torch._scaled_grouped_mm`` supports ``base``: float8 by row, on GPUs of capability 9.0.

    ``torch_multiplies`` must hold, so that sides are multiples of 16.
    """
    groups, count, columns = base.spec.shape
    layout = layout_of(base.scheme.decoder, (groups * count, columns), base.spec.activations)
    is_by_row = layout is not None and layout.fields["height"] == 1 and scaled_mm.recipe_of(layout) == "rows"
    return is_by_row and capability == (9, 0)


def by_codes(rows: Tensor, base: Weight, offs: Tensor) -> Tensor:
    """Return the product of the codes of ``rows`` with those of ``base`` (G, N, K), by torch's op.

    It reads the matrices of groups that have rows, in place.
    """
    codes, steps = rounding.codes_of(rows.contiguous(), "float8")
    matrices, scale = base.parts["qdata"].transpose(1, 2), base.parts["scale"].view(base.shape[:2])
    made = torch._scaled_grouped_mm(codes, matrices, steps.view(-1), scale, offs=offs, out_dtype=torch.bfloat16)
    return zeros_behind(made, offs)


def zeros_behind(made: Tensor, offs: Tensor) -> Tensor:
    """Set the rows after the last group to 0."""
    behind = torch.arange(made.shape[0], device=made.device) >= offs[-1]
    return made.masked_fill_(behind.unsqueeze(1), 0)


def without_waiting(rows: Tensor, base: Weight, offs: Tensor, is_transposed: bool) -> Tensor:
    """Return the product of each group with its matrix of ``base``, without waiting for the GPU.

    The number of groups with rows is at most the number of rows. So many matrices, those with rows first, are decoded,
    in pieces of some rows of each, and torch multiplies. If torch has no op, there are few rows, and one matrix per row
    is decoded. All sizes depend only on those of the arguments, as CUDA graphs require.
    """
    groups, count, columns = base.spec.shape
    matrix, used, is_one_op = matrix_of(base), min(rows.shape[0], groups), torch_multiplies(rows, base)
    assert matrix is not None
    if is_transposed and (each := by_each(rows, base, offs)) is not None:
        return each
    if is_one_op:
        rows, (numbers, ends) = aligned(rows), in_use(offs, used)
        multiply: Callable[[Tensor, Tensor], Tensor] = partial(torch._grouped_mm, offs=ends)
    else:
        numbers, multiply, used = group_of_each(rows, offs), _by_row, rows.shape[0]
    scales = base.parts[COLUMNS][numbers].unsqueeze(1) if isinstance(base.scheme, ColumnScaled) else None
    step = max(ON_CUDA // (used * columns * matrix.dtype.itemsize) // 128 * 128, 128)
    made: list[Tensor] = []
    for start in range(0, count, step):
        some = torch.arange(start, min(start + step, count), device=rows.device)
        values = gather(matrix, numbers.unsqueeze(1) * count + some)  # (used, some, columns)
        values = values if scales is None else values.mul_(scales).to(rows.dtype)
        if is_transposed:
            made.append(multiply(rows, values.transpose(1, 2)))
        else:
            more = multiply(rows[:, start : start + step], values)
            made = [more.float() if step < count else more] if start == 0 else [made[0].add_(more)]
    product = made[0] if len(made) == 1 else torch.cat(made, -1)
    return zeros_behind(product.to(rows.dtype), offs)


def by_each(rows: Tensor, weight: Weight, offs: Tensor) -> Tensor | None:
    """Return the product of each row with its matrix by one kernel, which reads the codes in place.

    ``None`` if no kernel does, or there are so many rows that reading a matrix for each takes longer than decoding it.
    """
    shape = weight.spec.base
    if rows.shape[0] > max(FEW, EACH * shape[0]) or offs.shape != shape[:1]:
        return None
    layout = layout_of_stack(weight.scheme.decoder, shape)
    return None if layout is None else gpu.linear_of_each(layout, layout.pick_from(weight), rows, offs)


@lru_cache(maxsize=1024)
def layout_of_stack(scheme: Scheme, shape: Shape) -> Layout | None:
    """Return the layout of a stack (G, N, K) as one matrix; ``None`` if blocks of its scheme do not allow that view."""
    matrix = (shape[0] * shape[1], shape[2])
    return layout_of(scheme, matrix) if scheme.can_view(shape, matrix) else None


def aligned(rows: Tensor) -> Tensor:
    """Return ``rows``, or a copy, in which each row is aligned to 16 bytes of the storage."""
    fits = rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1] and rows.stride(0) % 8 == 0
    return rows if fits and rows.storage_offset() % 8 == 0 else rows.clone(memory_format=torch.contiguous_format)


def group_of_each(rows: Tensor, offs: Tensor) -> Tensor:
    """Return the index of the group of each row; rows after the last group get its index."""
    places = torch.arange(rows.shape[0], device=rows.device, dtype=offs.dtype)
    return torch.searchsorted(offs, places, right=True).clamp_max(offs.shape[0] - 1)


def _by_row(rows: Tensor, matrices: Tensor) -> Tensor:
    """Return the product of each row of (M, K) with its own matrix of (M, K, N)."""
    return torch.bmm(rows.unsqueeze(1), matrices).squeeze(1)


def in_use(offs: Tensor, used: int) -> tuple[Tensor, Tensor]:
    """Return the indices of ``used`` groups, those with rows first, in order; and the end of the rows of each.

    >>> in_use(torch.tensor([0, 2, 2, 5], dtype=torch.int32), 3)
    (tensor([1, 3, 0]), tensor([2, 5, 5], dtype=torch.int32))
    """
    if used == offs.shape[0]:
        return torch.arange(used, device=offs.device), offs
    is_empty = torch.diff(offs, prepend=offs.new_zeros(1)) <= 0
    numbers = torch.argsort(is_empty.int(), stable=True)[:used]
    return numbers, torch.cummax(offs[numbers], 0).values


# -- in compiled graphs -----------------------------------------------------------------------------------------------

LIBRARY.define("grouped(Tensor rows, Tensor offs, Tensor[] parts, str weight, bool is_transposed) -> Tensor")


@torch.library.impl(LIBRARY, "grouped", "CompositeExplicitAutograd")
def grouped_in_graph(rows: Tensor, offs: Tensor, parts: list[Tensor], weight: str, is_transposed: bool) -> Tensor:
    """Return the product as ``grouped_mm`` does; the sizes of the groups are known only when the graph runs."""
    return _product(rows, weight_from(weight, parts), offs, is_transposed)


@torch.library.register_fake("torchtether::grouped", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _fake_grouped(rows: Tensor, offs: Tensor, parts: list[Tensor], weight: str, is_transposed: bool) -> Tensor:
    return rows.new_empty(rows.shape[0], spec_from(weight).shape[1 if is_transposed else 2])


# -- in graphs of transformers ----------------------------------------------------------------------------------------
# Under the compiler its experts call these ops in place of F.grouped_mm, unless the dtype is bfloat16.


@rule("transformers::grouped_mm_fallback")
def of_transformers(op: Any, rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Return the product as ``F.grouped_mm`` does, and that of decoded values by ``op``: it knows more dtypes."""
    _check_rounding(weight)
    return grouped_mm(lambda *values: op(*values[:3]), rows, weight, offs)  # type: ignore[no-any-return]


@rule("transformers::grouped_mm_fallback_backward")
def gradients_of_transformers(
    op: Any, rows: Tensor, weight: Tensor, offs: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``rows`` and of ``weight``; those of a frozen Weight are zeros that take no memory."""
    if not isinstance(weight, Weight) or weight.requires_grad:
        return _plain(op, rows, weight, offs, grad)  # type: ignore[return-value]

    def plain(grad: Tensor, turned: Tensor, *others: Any) -> Tensor:
        return op(rows, turned.transpose(-2, -1), offs, grad)[0]  # type: ignore[no-any-return]

    of_rows = grouped_mm(plain, grad, weight.transpose(-2, -1), offs)
    return of_rows, rows.new_zeros(()).expand(weight.shape)
