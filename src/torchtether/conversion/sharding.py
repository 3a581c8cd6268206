"""Values for tensors that are sharded over ranks. Imported where one is met: ``DTensor`` takes half a second."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ..geometry.shards import box_of, local_of


def shard_like(held: Any, values: Tensor) -> DTensor:
    """Return a DTensor like ``held``, another one, with this rank's part of ``values``, which has the shape of all.

    Ranks may have other values: replicas take the part of the first of them, which sends it.
    """
    mesh, shape = held.device_mesh, local_of(held).shape
    if mesh.get_coordinate() is None:  # this rank is not in the mesh
        local = torch.empty(shape, dtype=held.dtype, device=values.device)
    else:
        local = values[tuple(slice(start, stop) for start, stop in box_of(held))].to(held.dtype).contiguous().clone()
        for dim, placement in enumerate(held.placements):
            if isinstance(placement, Replicate) and mesh.size(dim) > 1:
                dist.broadcast(local, group=mesh.get_group(dim), group_src=0)
    return DTensor.from_local(local, mesh, held.placements, run_check=False, shape=held.shape, stride=held.stride())
