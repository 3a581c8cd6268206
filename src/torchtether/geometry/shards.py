"""The part of a DTensor that this rank holds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..torch_private.fsdp2 import local_shape_and_offset


def local_of(tensor: DTensor) -> Tensor:
    """Return this rank's part of ``tensor``, without a graph."""
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local


def box_of(tensor: DTensor) -> tuple[tuple[int, int], ...]:
    """Return the indices of ``tensor`` that this rank holds, as (start, stop) for each dimension.

    Raises NotImplementedError for placements without such a box (partial sums), and if the rank is not in the mesh.
    """
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise NotImplementedError(f"its placements {tensor.placements} are partial sums, which are not reduced yet")
    box, mesh = [(0, size) for size in tensor.shape], tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise NotImplementedError("this rank is not in its device mesh")
    if all(isinstance(placement, (Shard, Replicate)) for placement in tensor.placements):
        for place, ranks, placement in zip(coordinate, mesh.shape, tensor.placements, strict=True):
            if isinstance(placement, Shard):
                start, stop = box[placement.dim]
                each = -(-(stop - start) // ranks)  # the rule of torch.chunk
                box[placement.dim] = (min(start + place * each, stop), min(start + (place + 1) * each, stop))
    else:  # FSDP2 over tensor parallelism of the same dimension; torch knows the order of those shards
        shape, offset = local_shape_and_offset(tuple(tensor.shape), mesh, tensor.placements)
        box = [(start, start + size) for start, size in zip(offset, shape, strict=True)]
    size, local = tuple(stop - start for start, stop in box), tuple(local_of(tensor).shape)
    if size != local:
        raise NotImplementedError(
            f"its placements {tensor.placements} give this rank shape {size}, and it holds {local}"
        )
    return tuple(box)
