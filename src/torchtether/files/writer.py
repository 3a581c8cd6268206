"""A writer of safetensors files, tensor by tensor: the same tensors and metadata give the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import FileIO

import torch
from torch import Tensor

from .._checks import describe
from ..errors import CheckpointError
from ..geometry.blocks import is_strided
from ..geometry.views import Shape
from ..progress import Tick, no_tick
from .checksum import Checksum
from .header import digest, format_header
from .memory import memory_of, pieces
from .system import begin_writing_back

Layout = Mapping[str, tuple[torch.dtype, Shape]]
"""The tensors of a file to write: dtype and shape by key."""

Metadata = Callable[[Mapping[str, int]], Mapping[str, str]]
"""A function from the CRC-32 of every tensor, by key, to the metadata; their size must not depend on the values."""

PIECE = 4 * 2**20
"""Bytes that are written at once. A copy of a piece, if the tensor is not contiguous, is held for its checksum."""


def write_made(
    file: FileIO,
    layout: Layout,
    made: Iterable[tuple[str, Tensor]],
    metadata: Metadata,
    *,
    name: str,
    tick: Tick = no_tick,
) -> str:
    """Write tensors, which ``made`` yields one at a time in any order, to ``file``; return the digest of the header.

    Tensors may have any strides and any device: conjugated and negated views are resolved, others are written in
    row-major order, with scratch of at most one piece. Each tensor is dropped before the next one is requested, and
    their order does not change the file. The header is written twice: first with checksums of 0, because its size
    determines where tensors begin, and at the end with the real ones.
    Raises CheckpointError if the tensors do not agree with ``layout``.
    """
    header, start = format_header(layout, metadata(dict.fromkeys(layout, 0)), name=name)
    write_bytes(file, memoryview(header))
    checksums: dict[str, int] = {}
    with ThreadPoolExecutor(1) as aside:
        checksum = Checksum(aside)
        for key, tensor in made:
            tensor = as_planned(tensor, key, layout, start)
            file.seek(start.pop(key))
            write_tensor(file, tensor, tick, checksum)
            checksums[key] = checksum.value()
            del tensor
    if start:
        raise CheckpointError("it was planned, but no tensor was made for it", name=min(start))
    final, _ = format_header(layout, metadata(checksums), name=name)
    if final != header:
        assert len(final) == len(header)
        file.seek(0)
        write_bytes(file, memoryview(final))
    return digest(final[8:])


def as_planned(tensor: Tensor, key: str, layout: Layout, missing: Container[str]) -> Tensor:
    """Return ``tensor``, detached. Raise CheckpointError unless it is one of ``missing``, has its layout, and memory.

    What is detached stays as it is when a progress callback or another thread converts the model.
    """
    tensor = tensor.detach()
    if layout.get(key) != (tensor.dtype, tuple(tensor.shape)) or key not in missing:
        given = f"it was planned as {layout.get(key)}, and made as {tensor.dtype} {tuple(tensor.shape)}"
        raise CheckpointError(given, name=key)
    if not is_strided(tensor):  # its address leads nowhere, and reading there would end the process
        what = f"it became {describe(tensor)} while it was saved"
        raise CheckpointError(what, name=key, fix="Change the model before the save or after it.")
    return tensor


def check_writable(name: str, tensor: Tensor) -> None:
    """Raise CheckpointError, naming ``name``, if the format cannot hold ``tensor``."""
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"is {describe(tensor)}, not a tensor", name=name, fix="Leave it out.")
    if tensor.layout != torch.strided or tensor.is_nested:
        raise CheckpointError(f"safetensors cannot store a {tensor.layout} tensor", name=name, fix="Call .to_dense().")
    if tensor.device.type == "meta":
        raise CheckpointError("it is on meta and has no values", name=name, fix="Load or materialize it first.")


def write_tensor(file: FileIO, tensor: Tensor, tick: Tick, checksum: Checksum | None = None) -> None:
    """Write the values of ``tensor`` in row-major order; add the written bytes to ``checksum``."""
    for piece in pieces(tensor, PIECE):
        flat = memory_of(piece.resolve_conj().resolve_neg().contiguous().cpu())
        if checksum is not None:
            checksum.add(flat)
        at = file.tell()
        write_bytes(file, flat)
        begin_writing_back(file.fileno(), at, len(flat))
        tick(len(flat))


def write_bytes(file: FileIO, memory: memoryview) -> None:
    """Write all of ``memory`` to ``file`` at its current position."""
    while memory:
        count = file.write(memory)
        memory = memory[count or 0 :]
