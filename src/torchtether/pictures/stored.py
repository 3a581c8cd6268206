"""The facts of a checkpoint's storage map, from headers alone: every stored tensor, and the names that share it."""

from __future__ import annotations

import math

import torch

from .._dtypes import dtype_name
from ..checkpoint.reader import Checkpoint
from ..formats import Entry
from ..geometry.views import Shape, View, contiguous_stride, extent
from ..schemes import Plain, scheme_to_text
from ..weights.spec import Tie
from .facts import Held, Lane, Storage, StorageGroup, layout_of


def groups_of_checkpoint(checkpoint: Checkpoint) -> tuple[StorageGroup, ...]:
    """Return every stored tensor of ``checkpoint`` with its aliases, in the order of names; no values are read."""
    ties = {tie.owner: tie for tie in checkpoint.ties}
    shown = [name for name in checkpoint if name in checkpoint.entries]
    return tuple(_group(checkpoint, name, checkpoint.entries[name], ties.get(name)) for name in shown)


def _group(checkpoint: Checkpoint, name: str, entry: Entry, tie: Tie | None) -> StorageGroup:
    same = [name]
    views: dict[View, list[str]] = {}
    for alias, view in zip(tie.aliases, tie.views[1:], strict=True) if tie else ():
        (same if view is None else views.setdefault(view, [])).append(alias)
    spec = entry.kind
    nbytes = checkpoint.nbytes(name)
    scheme = "" if isinstance(spec.scheme, Plain) else scheme_to_text(spec.scheme)
    tensors = [_held(same, spec.dtype, spec.shape, spec.stride, nbytes, scheme)]
    for view, names in views.items():
        share = nbytes * math.prod(view.size) // max(math.prod(spec.shape), 1)
        own = share if scheme else math.prod(view.size) * view.dtype.itemsize
        tensors.append(_held(names, view.dtype, view.size, view.stride, own, scheme))
    storages = []
    for role, key in entry.keys.items():
        stored, file = checkpoint.store.stored(key), checkpoint.store.file_of(key)
        part = "" if entry.spec is None else role
        packing = stored.packing or "contiguous"
        whole = Lane(
            0, part, dtype_name(stored.dtype), stored.shape, contiguous_stride(stored.shape), packing, 0, stored.nbytes
        )
        lanes = (whole, *(_lane(owner, view, part, stored.nbytes, whole) for owner, view in enumerate(views, 1)))
        storages.append(Storage(stored.nbytes, "file", lanes, f"{file.path.name} at byte {stored.start}"))
    return StorageGroup(tuple(tensors), tuple(storages), (tie,) if tie else ())


def _held(names: list[str], dtype: torch.dtype, shape: Shape, stride: Shape, nbytes: int, scheme: str) -> Held:
    decoded, name = math.prod(shape) * dtype.itemsize if scheme else 0, dtype_name(dtype)
    return Held(tuple(names), "tensor", name, shape, stride, layout_of(shape, stride), "file", nbytes, scheme, decoded)


def _lane(owner: int, view: View, part: str, nbytes: int, whole: Lane) -> Lane:
    """Return the lane of a view over a stored tensor; over a part of a quantized weight, that of the whole part."""
    if part:
        return Lane(owner, part, whole.dtype, whole.shape, whole.stride, whole.layout, 0, nbytes)
    size = view.dtype.itemsize
    start, reach = view.offset * size, extent(view.size, view.stride) * size
    layout = layout_of(view.size, view.stride)
    is_dense = reach == math.prod(view.size) * size and layout != "overlapping"
    return Lane(owner, "", dtype_name(view.dtype), view.size, view.stride, layout, start, start + reach, is_dense)
