"""The rules for FSDP2 and DTensor: they gather and scatter the bytes of the parts, never values.

A rank's shard is a Weight of its rows.  FSDP2 pads it, and the padded Weight is gathered; see ``padding``.
Parts that all rows use (one scale for the tensor, column groups) are whole on every rank and not gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import UnsupportedOpError
from ...geometry.views import Shape
from ...schemes import Part, row_unit, same_bits
from ...torch_private.tensors import local_or_itself
from ..dispatch import HOOKS, refuse, rule
from ..weight import Weight
from .padding import keep_padding, mark_padded, mark_shard, whole_of
from .rows import first_rows, shared_by_rows
from .values import read

aten = torch.ops.aten

Gathered = tuple[Tensor, tuple[Tensor, ...]]


def rows_per_rank(rows: int, ranks: int) -> int:
    """Return how many rows the fullest of ``ranks`` has, by the rule of ``torch.chunk`` (FSDP2, DTensor).

    >>> rows_per_rank(101, 4), rows_per_rank(3, 4)
    (26, 1)
    """
    return -(-rows // ranks)


def cut_block(layout: Mapping[str, Part], shape: Shape, ranks: int) -> tuple[str, int] | None:
    """Return the name of a part whose blocks ``ranks`` shards would cut, and the unit: a shard needs a multiple of it.

    The unit is a number of rows.  ``None`` where every block lies in one shard.

    >>> from torchtether.schemes import Affine
    >>> layout = Affine(block=(128, 128)).layout((1024, 256))
    >>> cut_block(layout, (1024, 256), 8), cut_block(layout, (1024, 256), 16)
    (None, ('scale', 128))
    """
    each, row = rows_per_rank(shape[0], ranks), math.prod(shape[1:])
    for name, part in layout.items():
        if part.span and each < shape[0] and each * row % part.span:
            return name, row_unit(layout, row)
    return None


# -- the two hooks of FSDP2 -------------------------------------------------------------------------------------------


def pre_all_gather(weight: Weight) -> Callable[..., tuple[tuple[Tensor, ...], None]]:
    """Return the hook for ``weight``, with one argument or five.

    FSDP2 reads the signature.  From a hook of five arguments it demands inputs of the padded size of the parameter,
    which only a transparent Weight has; from a hook of one it takes the bytes of the parts.
    """
    whole = whole_of(weight)

    def tensor(
        mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        values, dtype = whole.values_of(), mp_policy.param_dtype
        return (values if dtype is None or not values.is_floating_point() else values.to(dtype),), None

    def parts(mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        return tuple(_bytes(whole.parts[name]) for name in _cut_parts(whole)), None

    return tensor if weight.scheme.transparent else parts


def post_all_gather(weight: Weight) -> Callable[..., Gathered | None]:
    """Return the hook for ``weight``: it returns the Weight of all rows, with parts that view the gathered bytes."""

    def hook(
        outputs: Sequence[Tensor], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Gathered | None:
        names, device = _cut_parts(weight), outputs[0].device if outputs else weight.device
        is_alone = len(outputs) < len(names)  # on a single rank FSDP2 gathers only the first input
        if out is not None:
            # gathered parts need no renewal: FSDP2 has refilled their memory
            _renew(
                _weight(local_or_itself(out)), weight, weight.parts if is_alone else weight.parts.keys() - set(names)
            )
            return None
        if weight.scheme.transparent:
            made = weight.around(outputs[0])
        else:
            given = [_bytes(weight.parts[name]).to(device) for name in names] if is_alone else outputs
            made = _joined(weight, whole_of(weight), dict(zip(names, given, strict=True)), param_dtype)
        return mark_padded(made), ()  # FSDP2 cuts off the padding

    return hook


HOOKS["fsdp_pre_all_gather"] = pre_all_gather
HOOKS["fsdp_post_all_gather"] = post_all_gather


def _cut_parts(weight: Weight) -> list[str]:
    return [name for name, part in weight.scheme.layout(weight.spec.base).items() if part.span]


def _bytes(part: Tensor) -> Tensor:
    """Return the part as one row of bytes, which any backend can gather whatever the dtypes."""
    return part.detach().contiguous().view(-1).view(torch.uint8)


def _joined(weight: Weight, sent: Weight, gathered: Mapping[str, Tensor], dtype: torch.dtype) -> Weight:
    """Return the Weight whose parts are ``gathered``: the bytes of as many rows as ``sent`` has, from each rank."""
    nbytes = {name: sent.parts[name].nbytes for name in gathered}
    ranks = max((gathered[name].numel() // size for name, size in nbytes.items() if size), default=1)
    base = (sent.spec.base[0] * ranks, *sent.spec.base[1:])
    device = next((given.device for given in gathered.values()), weight.device)  # shards may be kept on the CPU
    if cut_block(weight.scheme.layout(base), base, ranks):  # such shards cannot be made: the first rank has all rows
        gathered = {name: given[: nbytes[name]] for name, given in gathered.items()}
        base = sent.spec.base
    parts = {}
    for name, part in weight.scheme.layout(base).items():
        held = weight.parts[name]
        parts[name] = gathered[name].view(held.dtype).view(part.shape) if part.span else held.to(device)
    return weight.with_parts(parts, weight.spec.shaped(base, tie=weight.tie).replace(dtype=dtype))


def _renew(out: Weight, weight: Weight, names: Iterable[str]) -> None:
    """Set the parts ``names`` of ``out`` to those of ``weight``, moved to its device: shards may be kept on the CPU."""
    for name in names:
        if out.parts[name] is not weight.parts[name]:
            setattr(out, f"_part_{name}", weight.parts[name].to(out.device))


# -- padding ----------------------------------------------------------------------------------------------------------


@rule(aten.constant_pad_nd.default)
def constant_pad_nd(op: Any, weight: Weight, pad: Sequence[int], value: float = 0) -> Any:
    """Return a padded Weight if the op appends zero rows, as DTensor does before it gathers; else pad the values."""
    *others, below = [0, 0, *pad][1:] if pad else [0]
    is_below = len(pad) == 2 * weight.dim() > 0 and not any(others) and below >= 0 == value
    if not is_below or not weight.spec.is_contiguous:
        return read(op, weight, pad, value)
    return padded_below(weight, weight.shape[0] + below)


def padded_below(weight: Weight, rows: int) -> Weight:
    """Return a padded copy of ``weight`` with ``rows`` rows."""
    made = weight.new_zeros((rows, *weight.shape[1:]))
    assert isinstance(made, Weight)
    if weight.shape[0]:
        first_rows(made, weight.shape[0]).copy_(weight)
    return made


# -- collectives ------------------------------------------------------------------------------------------------------


def all_gather_into_tensor(op: Any, weight: Weight, group_size: int, group_name: Any) -> Weight:
    """Gather the rows of all ranks along dim 0 and wait: a Weight cannot hold tensors still to be waited for."""
    wait = torch.ops._c10d_functional.wait_tensor.default
    if weight.scheme.transparent:
        made = weight.around(wait(op(weight.values_of().contiguous(), group_size, group_name)))
    elif not weight.spec.is_contiguous:
        raise UnsupportedOpError(f"a Weight of stride {weight.stride()} cannot be gathered by rows")
    else:
        gathered = {n: wait(op(_bytes(p), group_size, group_name)) for n, p in weight.parts.items()}
        shared = {n: gathered.pop(n) for n in weight.parts.keys() - set(_cut_parts(weight))}
        _check_shared(shared, group_size)
        made = _joined(weight, weight, gathered, weight.dtype)  # DTensor pads by itself, and sends no padding of FSDP2
    return mark_padded(made)


def _check_shared(gathered: Mapping[str, Tensor], ranks: int) -> None:
    """Raise UnsupportedOpError if the ranks have different copies of a part that all rows share.

    Only ranks that wrote to their rows by themselves do: FSDP2 and ``distribute_tensor`` mark shards, which refuse it.
    """
    for name, given in gathered.items():
        copies = given.view(ranks, given.numel() // ranks)
        has_values = type(given) is Tensor and not given.is_meta  # the compiler traces this, too
        if has_values and not same_bits(copies, copies[:1].expand_as(copies)):
            raise UnsupportedOpError(
                f"the ranks have different values of the part {name!r}, which all rows of the Weight share",
                fix="Load the same values on all ranks with tt.distributed.load or tt.refit.",
            )


def wait_tensor(op: Any, weight: Weight) -> Weight:
    """Return the Weight: its collectives have waited already."""
    return keep_padding(weight.map(aten.alias.default), weight)


def scatter_(op: Any, outputs: list[Tensor], inputs: list[list[Tensor]], *args: Any, **kwargs: Any) -> Any:
    """Scatter the root's Weights to the ranks, part by part."""
    (held,) = outputs
    work = None
    for name, part in _weight(held).parts.items():
        given = [[_bytes(_weight(one).parts[name]) for one in of_root] for of_root in inputs]
        target = torch.empty(part.nbytes, dtype=torch.uint8, device=part.device)
        _, work = op([target], given, *args, **kwargs)
        dist.Work.unbox(work).wait()  # type: ignore[attr-defined]
        part.copy_(target.view(part.dtype).view(part.shape))
    if sum(map(len, inputs)) != 1:  # one input: a group of one rank
        mark_shard(_weight(held), shared_by_rows(_weight(held)))
    return outputs, work


def _weight(tensor: Tensor) -> Weight:
    assert isinstance(tensor, Weight)
    return tensor


if dist.is_available():
    collectives = torch.ops._c10d_functional
    rule(collectives.all_gather_into_tensor.default)(all_gather_into_tensor)
    rule(collectives.wait_tensor.default, "_c10d_functional::_wrap_tensor_autograd")(wait_tensor)
    rule(torch.ops.c10d.scatter_.default)(scatter_)
    refuse(
        collectives.all_reduce.default, collectives.reduce_scatter_tensor.default, torch.ops.c10d.allreduce_.default,
        why="would add up the codes of Weights, not their values",
    )  # fmt: skip
