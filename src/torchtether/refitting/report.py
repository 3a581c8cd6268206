"""The report of a refit, and the checksums by which ranks can compare their tensors."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from .._checks import describe_some
from ..files.batch import SLICE
from ..files.checksum import crc32, joined
from ..files.crew import Job, Scratch, together
from ..files.memory import memory_of, pieces
from ..pictures.drawing import describe_bytes
from ..progress import no_tick
from ..weights.weight import Weight


@dataclass(frozen=True)
class RefitReport:
    """Report what a refit has written; ``checksum``, and ``checksums`` by name, can be compared between ranks.

    >>> print(RefitReport(bytes=5_000_000, nbytes=2_500_000, seconds=0.5, checksums={"w": 7}, encoded={"w": "int8"}))
    1 tensor, 1 of them encoded, 5 MB into 2.5 MB in 0.50 s, checksum f1952881
    """

    bytes: int = 0
    """Bytes of the source that fill the model."""
    nbytes: int = 0
    """Bytes of the model that were written: parts of Weights, and plain tensors."""
    seconds: float = 0.0
    checksums: Mapping[str, int] = field(default_factory=dict)
    """The CRC-32 of each tensor by the owner's name, tied tensors once. It covers the bytes in row-major order; of a
    Weight, those of its parts one after the other; of a sharded tensor, those of this rank's rows."""
    encoded: Mapping[str, str] = field(default_factory=dict)
    """The scheme of each Weight into which values were encoded, by name."""
    left: tuple[str, ...] = ()
    """Tensors that the source does not have and that were left as they are: non-persistent buffers, and what a
    transformers model declares optional."""
    waiting: int = 0
    """The peak bytes of pieces that waited for other pieces of a fused tensor; only for iterables of pairs."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the written tensors, tied ones once, in the order of writing."""
        return tuple(self.checksums)

    @property
    def checksum(self) -> int:
        """Return one CRC-32 of all names and checksums, which does not depend on their order."""
        lines = (f"{name} {self.checksums[name]:08x}\n" for name in sorted(self.checksums))
        return zlib.crc32("".join(lines).encode())

    def __str__(self) -> str:
        count = len(self.checksums)
        words = [f"{count} tensor{'' if count == 1 else 's'}"]
        if self.encoded:
            words.append(f"{len(self.encoded)} of them encoded")
        words.append(f"{describe_bytes(self.bytes)} into {describe_bytes(self.nbytes)} in {self.seconds:.2f} s")
        words.append(f"checksum {self.checksum:08x}")
        if self.waiting:
            words.append(f"{describe_bytes(self.waiting)} waited for other pieces")
        if self.left:
            words.append(f"left as they are: {describe_some(self.left)}")
        return ", ".join(words)


def checksum_of(tensor: Tensor, start: int = 0) -> int:
    """Return the CRC-32 of the bytes of ``tensor`` in row-major order, or of a Weight's parts, continuing ``start``.

    >>> import torch
    >>> checksum_of(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)) == zlib.crc32(bytes([1, 2, 3, 4]))
    True
    """
    if isinstance(tensor, Weight):
        for part in tensor.parts.values():
            start = checksum_of(part, start)
        return start
    return crc32(_bytes_of(tensor), start)


def checksum_by_all(tensor: Tensor) -> int:
    """Return ``checksum_of(tensor)``, computed by several threads.

    >>> import torch
    >>> checksum_by_all(torch.arange(3 * 2**20)) == checksum_of(torch.arange(3 * 2**20))
    True
    """
    checksum = Checksum(tensor)
    together(checksum.jobs(), no_tick)
    return checksum.value()


class Checksum:
    """Compute ``checksum_of(tensor)`` by jobs that several threads may do, in any order."""

    def __init__(self, tensor: Tensor) -> None:
        tensors = tensor.parts.values() if isinstance(tensor, Weight) else (tensor,)
        self._pieces = [piece for one in tensors for piece in pieces(one.detach(), SLICE)]
        self._found = [(0, 0)] * len(self._pieces)

    def jobs(self) -> list[Job]:
        """Return the jobs, all of which must be done before ``value`` is called."""
        return [partial(self._job, i) for i in range(len(self._pieces))]

    def _job(self, i: int, space: Scratch) -> int:
        piece = self._pieces[i]
        if not _is_as_it_lies(piece):
            piece = space.take(tuple(piece.shape), piece.dtype, 0).copy_(piece)
        self._found[i] = crc32(memory_of(piece)), piece.nbytes
        return piece.nbytes

    def value(self) -> int:
        """Return the checksum."""
        whole = 0
        for one, length in self._found:
            whole = joined(whole, one, length)
        return whole


def _is_as_it_lies(tensor: Tensor) -> bool:
    is_lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not is_lazy


def _bytes_of(tensor: Tensor) -> memoryview:
    return memory_of(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous())
