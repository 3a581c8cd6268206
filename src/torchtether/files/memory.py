"""Tensors as bytes: the memory of a contiguous one, and any other in contiguous pieces of bounded size."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from functools import lru_cache
from weakref import WeakSet

import torch
from torch import Tensor

from ..geometry.views import Shape
from ..torch_private.observers import is_observed
from ..torch_private.tensors import empty_on_cpu
from .system import HUGE_PAGE, ask_for_huge_pages

PIECE = 16 * 2**20  # bytes of scratch; large enough for the disk, small beside any checkpoint

_OWN_MAPPING = 2**20  # bytes; below it a mapping costs more than it saves
MOST_MAPPINGS = 2**14  # a process may have 65,530 mappings (Linux), and one of which a part is on huge pages takes two

_PAGE = 4096  # bytes; two addresses that are alike within it look alike to a processor that copies
SHIFT = 64  # bytes; what torch aligns memory to

MAPPINGS: WeakSet[mmap.mmap] = WeakSet()
"""The mappings that tensors have for themselves now."""


def scratch(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised CPU tensor for a short while; its memory is the system's again as soon as it is dropped.

    ``torch.empty`` allocates with malloc, which keeps up to 64 MB of what is freed for itself.
    """
    made = torch.empty(shape, dtype=dtype, device="meta")
    if made.nbytes < _OWN_MAPPING:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(_anonymous(made.nbytes), dtype=torch.uint8).view(dtype).reshape(shape)


def _anonymous(nbytes: int) -> mmap.mmap:
    if hasattr(mmap, "MAP_PRIVATE"):  # shared anonymous memory, the default, would live in /dev/shm
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, nbytes)


def clear_of(at: int, address: int = 0) -> int:
    """Return how far behind ``address``, by default any begin of a page, to read what a file has from byte ``at`` on.

    0 or 64.

    The system copies from pages of its own, in which a byte lies as far behind the begin of a page as in the file.
    Where a copy begins less than 32 bytes behind its original, as far as addresses within a page tell, processors may
    be slow: AMD's Zen 4 then copies 2.4 or 6 GB/s instead of 8.5. Of files with headers of any length, that is one in
    170.
    """
    return SHIFT if 0 < (address - at) % _PAGE < SHIFT // 2 else 0


def allocate(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    stride: Shape | None = None,
    *,
    at: int = 0,
) -> Tensor:
    """Return an uninitialised tensor, contiguous unless its strides are given.

    A large one on the CPU lies on huge pages.

    Half of the time of a load can go into the first touch of 4 KB pages. Memory of ``torch.empty`` begins somewhere
    within a huge page, so a part of every tensor would still lie on small ones: this begins on one, in a mapping of its
    own, of which there are at most 16,384 at a time. Its storage cannot be resized. ``at`` is the byte of the file that
    its first is going to come from; see ``clear_of``.
    """
    laid, nbytes = _layout(shape, stride, dtype)
    if nbytes < HUGE_PAGE or torch.device(device).type != "cpu" or len(MAPPINGS) >= MOST_MAPPINGS:
        return torch.empty_strided(shape, laid, dtype=dtype, device=device)
    try:
        mapping = _anonymous(nbytes + HUGE_PAGE)
    except OSError:  # torch says what is wanting, if it cannot have it either
        return torch.empty_strided(shape, laid, dtype=dtype, device=device)
    MAPPINGS.add(mapping)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    start = -address % HUGE_PAGE
    bare = torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=start + clear_of(at))
    ask_for_huge_pages(address + start, nbytes // HUGE_PAGE * HUGE_PAGE)  # no more than what the tensor fills
    with torch.no_grad():
        return torch.empty(0, dtype=dtype, device="cpu").set_(bare.untyped_storage(), 0, shape, laid)


def allocate_each(kinds: Sequence[tuple[Shape, torch.dtype, Shape, int]]) -> list[Tensor]:
    """Return ``allocate`` on the CPU for each shape, dtype, strides and byte of a file, in half of the time.

    Small memory comes past torch's dispatcher, if nothing looks on there.
    """
    if is_observed():
        return [allocate(shape, dtype, "cpu", stride, at=at) for shape, dtype, stride, at in kinds]
    return [
        empty_on_cpu(shape, stride, dtype)
        if _layout(shape, stride, dtype)[1] < HUGE_PAGE
        else allocate(shape, dtype, "cpu", stride, at=at)
        for shape, dtype, stride, at in kinds
    ]


@lru_cache(maxsize=4096)
def _layout(shape: Shape, stride: Shape | None, dtype: torch.dtype) -> tuple[Shape, int]:
    """Return the strides and the bytes of such a tensor. Thousands have a few shapes, and most are small."""
    if stride is None:
        made = torch.empty(shape, dtype=dtype, device="meta")
    else:
        made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return made.stride(), made.untyped_storage().nbytes()


def private_map(descriptor: int) -> mmap.mmap:
    """Return the whole file, in memory when it is used; what is written there stays there and never reaches the file.

    Without a reservation, because a file that is larger than the memory could not be mapped otherwise.
    """
    if hasattr(mmap, "MAP_PRIVATE"):
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        return mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, writable, not copied; they keep the tensor alive.

    In a sixth of the time that torch and numpy take for it, which counts when there are thousands of tensors.
    """
    nbytes = tensor.nbytes
    if not nbytes:
        return memoryview(b"")
    made = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    made.owner = tensor  # type: ignore[attr-defined]
    return memoryview(made).cast("B")


def pieces(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """Yield views that make up ``tensor`` in row-major order, each of at most ``limit`` bytes (or of one element).

    >>> [piece.tolist() for piece in pieces(torch.arange(6).view(2, 3).t(), 16)]
    [[0, 3], [1, 4], [2, 5]]
    """
    if tensor.nbytes <= limit or tensor.dim() == 0:
        if tensor.numel():
            yield tensor
        return
    row = max(tensor[0].nbytes, 1)
    if row > limit:
        for inner in tensor:
            yield from pieces(inner, limit)
        return
    step = limit // row
    for at in range(0, tensor.shape[0], step):
        piece = tensor[at : at + step]
        yield piece[0] if step == 1 else piece
