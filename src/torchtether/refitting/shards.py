"""Reading the values of DTensors: gathered from all ranks, shard by shard, or this rank's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from ..checkpoint.held import Ranges
from ..geometry.shards import box_of, local_of


class OwnShard:
    """Read this rank's shard of a DTensor, without communication."""

    def read(self, tensor: Any, box: Ranges) -> Tensor:
        """Return the elements of ``box``, all of which this rank holds; with an empty box, its whole shard."""
        local = local_of(tensor)
        if not box:
            return local
        held = box_of(tensor)
        return local[tuple(slice(s.start - start, s.stop - start) for s, (start, _) in zip(box, held, strict=True))]

    def holds(self, tensor: Any, test: Callable[[Tensor], bool]) -> bool:
        """Return whether ``test`` holds for this rank's shard."""
        return test(local_of(tensor))


class AllShards:
    """Read the whole of a DTensor; every rank of its mesh must do so at the same time."""

    def read(self, tensor: Any, box: Ranges) -> Tensor:
        """Return the elements of ``box``; with an empty box, all elements.

        The ranks broadcast their shards one after the other; only elements of the box are sent.
        """
        placement, mesh = tensor.placements[0], tensor.device_mesh
        ranges = [(one.start, one.stop) for one in box] or [(0, size) for size in tensor.shape]
        local = local_of(tensor)
        if len(tensor.placements) == 1 and isinstance(placement, Replicate):
            return local[tuple(slice(*one) for one in ranges)]
        if len(tensor.placements) > 1 or type(placement) is not Shard or type(local) is not Tensor:
            with torch.no_grad():
                whole: Tensor = tensor.full_tensor()
                return whole[tuple(slice(*one) for one in ranges)] if box else whole
        made = torch.empty([stop - start for start, stop in ranges], dtype=tensor.dtype, device=local.device)
        dim, group, size = placement.dim, mesh.get_group(), tensor.shape[placement.dim]
        first, last = ranges[dim]
        each = -(-size // mesh.size())  # the rule of torch.chunk
        for place, rank in enumerate(mesh.mesh.tolist()):
            begin, start, stop = place * each, max(first, place * each), min(last, (place + 1) * each, size)
            if start >= stop:
                continue
            out = made.narrow(dim, start - first, stop - start)
            if mesh.get_local_rank() == place:
                ranges[dim] = (start - begin, stop - begin)
                out.copy_(local[tuple(slice(*one) for one in ranges)])
            sent = out.contiguous()
            dist.broadcast(sent, src=rank, group=group)
            if sent.data_ptr() != out.data_ptr():
                out.copy_(sent)
        return made

    def holds(self, tensor: Any, test: Callable[[Tensor], bool]) -> bool:
        """Return whether ``test`` holds for the shards of all ranks."""
        local, mesh = local_of(tensor), tensor.device_mesh
        flag = torch.tensor(int(test(local)), device=local.device)
        for dim in range(mesh.ndim):
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=mesh.get_group(dim))
        return bool(flag)
