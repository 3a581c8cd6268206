"""Whether a checkpoint is what it says, read to its last byte; and how far it is from the one it was made from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint import Checkpoint
from .errors import CheckpointError
from .files import Tick
from .report import Progress, ticking
from .schemes import Parts, same_bits
from .weight import Weight

_PIECE = 2**18  # elements that are compared at a time, in float64


@dataclass(frozen=True)
class Difference:
    """How far one tensor is from that of the source: the largest error, and signal to noise in decibels."""

    name: str
    scheme: str
    largest: float
    sqnr: float
    is_expected: bool
    """Within what its scheme promises; of a plain tensor, the very values in its dtype."""


@dataclass(frozen=True)
class VerifyReport:
    """What was found: a line per fault, and with a source the differences, worst first."""

    tensors: int
    bytes: int
    faults: tuple[str, ...]
    differences: tuple[Difference, ...] = ()


def verify_checkpoint(
    path: Path | str, *, against: Path | str | None = None, progress: Progress = None
) -> VerifyReport:
    """Every byte of ``path`` has been read and every record checked; what is wrong is in ``faults``.

    Opening it checks headers, offsets, sizes, the index and the record. Here each tensor is read, stored copies of
    aliases are compared with their owners, and quantized weights must decode to finite numbers. With ``against``
    every name is compared with that checkpoint's: a name on one side only, another shape, values that are not the
    source's in the dtype at hand, and errors beyond the bound of the scheme are faults. Scratch is one tensor; with
    ``against``, where bounds are computed too, several times the largest.

    Raises CheckpointError if a file cannot be opened, or ends early.
    """
    with Checkpoint(path) as checkpoint:
        total = sum(checkpoint.nbytes(name) for name in checkpoint.entries)
        faults: list[str] = []
        with ticking(progress, total, "verify") as tick:
            for name in checkpoint.entries:
                _read(checkpoint, name, faults, tick)
        for alias in checkpoint.copies:
            try:
                checkpoint.check_copy(alias)
            except CheckpointError as error:
                faults.append(str(error))
        differences: list[Difference] = []
        if against is not None:
            with Checkpoint(against) as source:
                differences = _compare(checkpoint, source, faults, progress)
        return VerifyReport(len(checkpoint), total, tuple(faults), tuple(differences))


def _read(checkpoint: Checkpoint, name: str, faults: list[str], tick: Tick) -> None:
    entry = checkpoint.entries[name]
    if entry.spec is None:
        for key in entry.keys.values():
            for piece in checkpoint.store.file_of(key).pieces(key):
                tick(len(piece))
    elif not all(bool(piece.isfinite().all()) for piece in _pieces(_values(checkpoint.read_briefly(name, tick)))):
        faults.append(f"{name}: it decodes to values that are not finite")


# -- against a source -------------------------------------------------------------------------------------------------


def _compare(checkpoint: Checkpoint, source: Checkpoint, faults: list[str], progress: Progress) -> list[Difference]:
    found: list[Difference] = []
    names = [name for name in checkpoint if not _is_done(checkpoint, source, name)]
    faults += [f"{name}: {source.path} does not have it" for name in names if name not in source]
    faults += [f"{name}: it is in {source.path}, and missing here" for name in source if name not in checkpoint]
    names = [name for name in names if name in source]
    with ticking(progress, sum(checkpoint.nbytes(name) for name in names), "compare") as tick:
        for name in names:
            shape, wanted = checkpoint.spec(name).shape, source.spec(name).shape
            if shape != wanted:
                faults.append(f"{name}: it has shape {shape}, in {source.path} {wanted}")
                continue
            one = _difference(name, checkpoint.read_briefly(name, tick), source.read_briefly(name))
            if not one.is_expected:
                allowed = f"more than {one.scheme} allows" if one.scheme else "and should be the same"
                faults.append(f"{name}: it is off by up to {one.largest:.3g}, {allowed}")
            found.append(one)
    return sorted(found, key=lambda one: (one.sqnr, -one.largest, one.name))


def _is_done(checkpoint: Checkpoint, source: Checkpoint, name: str) -> bool:
    """Whether ``name`` is on both sides only another name of its owner, which is compared anyway."""
    owner, view = checkpoint.find(name)
    is_alias = owner != name and view is None and owner in source and owner in checkpoint
    return is_alias and name in source and source.find(owner) == source.find(name)


def _difference(name: str, made: Tensor, given: Tensor) -> Difference:
    if isinstance(made, Weight):
        scheme, bound = str(made.scheme), _bound(made)
        made, given = _values(made), _values(given)
        limits: Iterator[Tensor] | None = _pieces(bound)
    else:
        scheme, limits = "", None
        given = given.to(made.dtype).dequantize() if isinstance(given, Weight) else given
    largest = noise = signal = 0.0
    is_expected = True
    for mine, theirs in zip(_pieces(made), _pieces(given), strict=True):
        one, two = _numbers(mine), _numbers(theirs)
        error = (one - two).abs()
        error[(one == two) | (one.isnan() & two.isnan())] = 0
        error[error.isnan()] = math.inf
        if limits is None:
            is_expected &= same_bits(mine, theirs.to(mine.dtype))
        else:
            is_expected &= bool((error <= next(limits).double() * (1 + 1e-6)).all())
        largest = max(largest, float(error.max()))
        noise += float(error.square().sum())
        signal += float(two.square().nan_to_num(0, 0, 0).sum())
    sqnr = math.inf if noise == 0 else -math.inf if signal == 0 else 10 * math.log10(signal / noise)
    return Difference(name, scheme, largest, sqnr, is_expected)


def _values(tensor: Tensor) -> Tensor:
    """In float32, so that the dtype in which a weight computes adds no error of its own."""
    return tensor.to(torch.float32).dequantize() if isinstance(tensor, Weight) else tensor


def _bound(weight: Weight) -> Tensor:
    parts: Parts = weight.parts
    return weight.scheme.bound(parts, weight.spec.base).expand(weight.spec.base).permute(weight.spec.order)


def _numbers(piece: Tensor) -> Tensor:
    if piece.dtype == torch.float4_e2m1fn_x2:  # torch computes nothing with it
        piece = piece.view(torch.uint8)
    return torch.view_as_real(piece).flatten().double() if piece.is_complex() else piece.double()


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    flat = tensor.reshape(-1)
    for at in range(0, flat.numel(), _PIECE):
        yield flat[at : at + _PIECE].contiguous()
