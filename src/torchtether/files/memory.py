"""Memory for tensors, and tensors as bytes: whole if contiguous, else in contiguous pieces of bounded size."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from functools import lru_cache
from weakref import WeakSet

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..geometry.views import Shape
from ..torch_private.observers import is_observed
from ..torch_private.tensors import empty_on_cpu
from .system import HUGE_PAGE, ask_for_huge_pages

PIECE = 16 * 2**20  # bytes of scratch; large enough for the disk, small beside any checkpoint

_OWN_MAPPING = 2**20  # bytes; below it a mapping costs more than it saves
MOST_MAPPINGS = 2**14  # a process may have 65,530 mappings (Linux); one that is partly on huge pages counts as two

_PAGE = 4096  # bytes; copying processors compare addresses modulo this size only
SHIFT = 64  # bytes; torch's alignment of memory

MAPPINGS: WeakSet[mmap.mmap] = WeakSet()
"""The mappings that each belong to one live tensor."""


def scratch(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised CPU tensor for temporary use; its memory returns to the system when it is freed.

    ``torch.empty`` allocates with malloc, which may keep up to 64 MB of freed memory.
    """
    made = torch.empty(shape, dtype=dtype, device="meta")
    if made.nbytes < _OWN_MAPPING:
        return torch.empty(shape, dtype=dtype, device="cpu")
    bare = torch.frombuffer(_anonymous(made.nbytes), dtype=torch.uint8)
    ask_for_huge_pages(bare.data_ptr(), made.nbytes)
    return bare.view(dtype).reshape(shape)


def _anonymous(nbytes: int) -> mmap.mmap:
    if hasattr(mmap, "MAP_PRIVATE"):  # shared anonymous memory, the default, would live in /dev/shm
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, nbytes)


def clear_of(at: int, address: int = 0) -> int:
    """Return the offset, 0 or 64, from ``address`` at which to store the bytes of a file from ``at`` on.

    ``address`` 0 is the start of any page. The system copies from its page cache, in which a byte has the same offset
    within its page as in the file. If the target begins less than 32 bytes after the source, modulo a page, processors
    may be slow: AMD's Zen 4 then copies 2.4 or 6 GB/s instead of 8.5. One in 170 files with headers of any length is
    affected.
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
    """Return an uninitialised tensor, contiguous unless its strides are given; a large one on the CPU is on huge pages.

    Page faults of 4 KB pages can take half of the time of a load. Memory by ``torch.empty`` begins within a huge page,
    so that a part of every tensor would still be on small pages. This memory begins at a huge page, in a mapping of its
    own; at most 16,384 of these exist at a time. Its storage cannot be resized. ``at`` is the byte of the file from
    which its first byte will be read; see ``clear_of``.
    """
    laid, nbytes = _layout(shape, stride, dtype)
    if nbytes < HUGE_PAGE or torch.device(device).type != "cpu" or len(MAPPINGS) >= MOST_MAPPINGS:
        return torch.empty_strided(shape, laid, dtype=dtype, device=device)
    try:
        mapping = _anonymous(nbytes + HUGE_PAGE)
    except OSError:  # if torch cannot allocate it either, it raises the error
        return torch.empty_strided(shape, laid, dtype=dtype, device=device)
    MAPPINGS.add(mapping)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    start = -address % HUGE_PAGE
    bare = torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=start + clear_of(at))
    ask_for_huge_pages(address + start, nbytes // HUGE_PAGE * HUGE_PAGE)  # only pages that the tensor fills
    with torch.no_grad():
        return torch.empty(0, dtype=dtype, device="cpu").set_(bare.untyped_storage(), 0, shape, laid)


def allocate_each(kinds: Sequence[tuple[Shape, torch.dtype, Shape, int]]) -> list[Tensor]:
    """Return ``allocate`` on the CPU for each shape, dtype, strides and byte of a file, in half of the time.

    Small tensors bypass torch's dispatcher, unless a mode or tracer observes it.
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
    """Return the strides and the bytes of such a tensor; cached, because thousands of tensors share a few shapes."""
    if stride is None:
        made = torch.empty(shape, dtype=dtype, device="meta")
    else:
        made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return made.stride(), made.untyped_storage().nbytes()


def private_map(descriptor: int) -> mmap.mmap:
    """Return a private mapping of the whole file: pages are read on first use, and writes never reach the file.

    No swap space is reserved, because a file larger than the memory could not be mapped otherwise.
    """
    if hasattr(mmap, "MAP_PRIVATE"):
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        return mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, writable, not copied; they keep the tensor alive.

    It takes a sixth of the time of torch and numpy, which matters for thousands of tensors.
    """
    nbytes = tensor.nbytes
    if not nbytes:
        return memoryview(b"")
    address = tensor.data_ptr()
    if not address:  # reading there would end the process
        raise CheckpointError(f"a {type(tensor).__name__} has no memory of its own")
    made = (ctypes.c_char * nbytes).from_address(address)
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
