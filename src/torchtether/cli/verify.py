"""Verify every byte and record of a checkpoint, and measure its error relative to the source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .._dtypes import dtype_name
from ..checkpoint.reader import Checkpoint
from ..errors import CheckpointError
from ..files.checksum import crc32
from ..geometry.views import Shape, View, contiguous_stride
from ..progress import Progress, Tick, ticking
from ..schemes import Parts, Scheme, part_rows, row_unit, same_bits, scheme_to_text, view_parts
from ..schemes.blocks import flat
from ..weights.weight import Weight

_PIECE = 2**18  # elements that are decoded and compared at a time, in float64


@dataclass(frozen=True)
class Difference:
    """The error of one tensor relative to the source: the largest, and the signal-to-noise ratio in decibels."""

    name: str
    scheme: str
    largest: float
    sqnr: float
    is_expected: bool
    """Whether errors are within the bound of the scheme; for a plain tensor, whether values are equal in its dtype."""


@dataclass(frozen=True)
class VerifyReport:
    """The results of ``verify``: a line per fault and, with a source, the differences, worst first."""

    tensors: int
    bytes: int
    """The bytes of all stored tensors, including copies of aliases."""
    faults: tuple[str, ...]
    differences: tuple[Difference, ...] = ()
    stored: int = 0
    """The number of tensors in the files: a quantized weight has several, an alias none."""
    without_checksum: int = 0
    """The number of those without a checksum, as in files of other tools."""


def verify_checkpoint(
    path: Path | str, *, against: Path | str | None = None, progress: Progress = None
) -> VerifyReport:
    """Read every byte of ``path``, check every record, and return a report that lists all ``faults``.

    Opening the checkpoint checks headers, offsets, sizes, the index and the record. After that:

    - the bytes of each stored tensor must have their checksum, if the file records one;
    - stored copies of aliases must equal their owners;
    - quantized weights must be readable in their format, and decode to numbers that are finite in their dtype;
    - with ``against``, every name is compared with that checkpoint. A name on one side only, another shape, plain
      values that differ from the source's in the same dtype, fractions or other values that an integer cannot have, and
      errors beyond the bound of the scheme are faults.

    A large plain tensor is read in small pieces, and of a quantized one all parts. A whole tensor is in memory only if
    its values cannot be read in order, because the other checkpoint has it transposed, or if it exceeds a bound that
    depends on a part that all rows share.

    Raises CheckpointError if a file cannot be opened, or ends early.
    """
    with Checkpoint(path) as checkpoint:
        stored = checkpoint.store.header.tensors
        total = sum(one.nbytes for one in stored.values())
        with ticking(progress, total, "verify") as tick:
            faults = [fault for key in stored for fault in _wrong_bytes(checkpoint, key, tick)]
        faults += [(name, f"{path}: {name}: {what}") for name, what in checkpoint.faults.items()]
        faults += _wrong_values(checkpoint, damaged={key for key, _ in faults})
        differences: list[Difference] = []
        words = [what for _, what in faults]
        if against is not None:
            with Checkpoint(against) as source:
                differences = _compare(checkpoint, source, words, progress)
        without = len(stored.keys() - checkpoint.store.record.checksums.keys())
        return VerifyReport(len(checkpoint), total, tuple(words), tuple(differences), len(stored), without)


def _wrong_bytes(checkpoint: Checkpoint, key: str, tick: Tick) -> Iterator[tuple[str, str]]:
    """Read all bytes of ``key``, and yield a fault if their checksum differs from the recorded one."""
    file, wanted, found = checkpoint.store.file_of(key), checkpoint.store.record.checksums.get(key), 0
    for piece in file.pieces(key):
        found = found if wanted is None else crc32(piece, found)
        tick(len(piece))
    if wanted is not None and found != wanted:
        yield key, f"{file.path.name}: {key}: its bytes have the checksum {found:08x}, but {wanted:08x} is recorded"


def _wrong_values(checkpoint: Checkpoint, damaged: set[str]) -> Iterator[tuple[str, str]]:
    """Yield a fault for each weight that decodes to invalid values, and each copy that differs from its owner.

    Tensors in ``damaged`` are skipped, because they are reported already.
    """
    for name, entry in checkpoint.entries.items():
        if entry.spec is not None and damaged.isdisjoint(entry.keys.values()):
            held = checkpoint.read_briefly(name)
            weight = held.to(torch.float32)
            assert isinstance(weight, Weight)
            scheme, worst = weight.scheme, ""
            for parts, base in _runs(scheme, weight.parts, weight.spec.base, _PIECE):
                values = scheme.decode(parts, base, torch.float32)
                if not values.isfinite().all():
                    worst = "that are not finite"
                    break
                if held.dtype == torch.float16 and not values.to(held.dtype).isfinite().all():
                    worst = f"that are too large for {dtype_name(held.dtype)}"
            if worst:
                yield name, f"{name}: it decodes to values {worst}"
    for alias, entry in checkpoint.copies.items():
        owner = checkpoint.entries[checkpoint.find(alias)[0]]
        if damaged.isdisjoint((*entry.keys.values(), *owner.keys.values())):
            try:
                checkpoint.check_copy(alias)
            except CheckpointError as error:
                yield alias, str(error)


# -- against a source -------------------------------------------------------------------------------------------------


def _compare(checkpoint: Checkpoint, source: Checkpoint, faults: list[str], progress: Progress) -> list[Difference]:
    found: list[Difference] = []
    names = [name for name in checkpoint if not _is_done(checkpoint, source, name)]
    faults += [f"{name}: it is missing in {source.path}" for name in _only_in(checkpoint, source)]
    faults += [f"{name}: it is in {source.path}, but not here" for name in _only_in(source, checkpoint)]
    names = [name for name in names if name in source]
    with ticking(progress, sum(checkpoint.nbytes(name) for name in names), "compare") as tick:
        for name in names:
            shape, wanted = checkpoint.spec(name).shape, source.spec(name).shape
            if shape != wanted:
                faults.append(f"{name}: it has shape {shape}, but {wanted} in {source.path}")
                continue
            one = _difference(name, checkpoint, source)
            tick(checkpoint.nbytes(name))
            if not one.is_expected:
                allowed = f"more than {one.scheme} allows" if one.scheme else "but should be equal"
                what = f"differ by up to {one.largest:.3g}" if one.largest else "are equal as float64, not bit for bit"
                faults.append(f"{name}: its values {what}, {allowed}")
            found.append(one)
    return sorted(found, key=lambda one: (one.sqnr, -one.largest, one.name))


def _only_in(one: Checkpoint, other: Checkpoint) -> list[str]:
    """Return the names in ``one`` of which ``other`` has neither the name nor another that ``one`` ties to it."""
    found = {name: one.find(name) for name in one}
    held = {owner for name, (owner, view) in found.items() if view is None and name in other}
    lacks = [name for name, (owner, view) in found.items() if name not in other and (view or owner not in held)]
    return [name for name in lacks if not one.is_padding(name)]


def _is_done(checkpoint: Checkpoint, source: Checkpoint, name: str) -> bool:
    """Return whether ``name`` is an alias of the same owner on both sides, so that comparing the owner suffices."""
    owner, view = checkpoint.find(name)
    is_alias = owner != name and view is None and owner in source and owner in checkpoint
    return is_alias and name in source and source.find(owner) == source.find(name)


def _difference(name: str, checkpoint: Checkpoint, source: Checkpoint) -> Difference:
    mine, theirs = checkpoint.spec(name), source.spec(name)
    if not mine.scheme.transparent:
        order, dtype, scheme = mine.order, torch.float32, scheme_to_text(mine.scheme)
    else:
        order = tuple(range(len(mine.shape))) if theirs.scheme.transparent else theirs.order
        dtype, scheme = mine.dtype if mine.dtype.is_floating_point else torch.float32, ""
    count = math.prod(mine.shape)
    is_shared = any(part.span == 0 for part in mine.scheme.layout(tuple(mine.base)).values()) if scheme else False
    for limit in (_PIECE, count):
        made = _stream(checkpoint, name, order, dtype, limit=limit, bounds=bool(scheme))
        wanted = _stream(source, name, order, dtype)
        largest, sqnr, is_expected = _measured(_paired(made, wanted))
        if is_expected or not is_shared:  # the bound for a part of the rows may be tighter than for all of them
            break
    return Difference(name, scheme, largest, sqnr, is_expected)


Compared = tuple[Tensor, Tensor | None, Tensor]
"""Elements, the bounds of their errors if they are quantized, and the source's elements; all 1-D."""


def _measured(pieces: Iterable[Compared]) -> tuple[float, float, bool]:
    """Return the largest error, the SQNR in decibels, and whether all errors are as expected."""
    largest = noise = signal = 0.0
    is_expected = True
    for mine, limits, theirs in pieces:
        one, two = _numbers(mine), _numbers(theirs)
        error = (one - two).abs()
        is_equal = (one == two) | (one.isnan() & two.isnan())
        error[is_equal] = 0
        error[error.isnan()] = math.inf
        if limits is None:
            if not mine.is_complex() and (theirs.is_complex() or not mine.is_floating_point()):
                is_expected &= bool(is_equal.all())  # else fractions or imaginary parts would be dropped
            if mine.is_complex() or not theirs.is_complex():
                is_expected &= same_bits(mine, theirs.to(mine.dtype))
        else:
            is_expected &= bool((error <= limits.double() * (1 + 1e-6)).all())
        largest = max(largest, float(error.max()))
        noise += float(error.square().sum())
        signal += float(two.abs().square().nan_to_num(0, 0, 0).sum())
    ratio = math.inf if noise == 0 else signal / noise  # 0 beside an infinite error
    sqnr = 10 * math.log10(ratio) if ratio > 0 else -math.inf
    return largest, sqnr, is_expected


def _numbers(piece: Tensor) -> Tensor:
    if piece.dtype == torch.float4_e2m1fn_x2:  # torch computes nothing with it
        piece = piece.view(torch.uint8)
    return piece.to(torch.complex128) if piece.is_complex() else piece.double()


# -- tensors as streams -----------------------------------------------------------------------------------------------

Stream = Iterator[tuple[Tensor, Tensor | None]]
"""Consecutive pieces of a tensor in row-major order, each with the bounds of its errors or ``None``."""


def _paired(made: Stream, wanted: Stream) -> Iterator[Compared]:
    """Yield pieces of two streams of the same length, cut at the same places."""
    theirs = torch.empty(0, device="cpu")
    for mine, limits in made:
        at = 0
        while at < len(mine):
            if not len(theirs):
                theirs, _ = next(wanted)
            stop = at + min(len(mine) - at, len(theirs))
            yield mine[at:stop], None if limits is None else limits[at:stop], theirs[: stop - at]
            theirs, at = theirs[stop - at :], stop


def _stream(
    checkpoint: Checkpoint,
    name: str,
    order: tuple[int, ...],
    dtype: torch.dtype,
    *,
    limit: int = _PIECE,
    bounds: bool = False,
) -> Stream:
    """Yield the elements of ``name`` with its dimensions in ``order``; quantized elements are decoded to ``dtype``."""
    owner, view = checkpoint.find(name)
    entry, spec = checkpoint.entries[owner], checkpoint.spec(name)
    count = math.prod(spec.shape)
    if not spec.scheme.transparent:
        weight = checkpoint.read_briefly(name).to(dtype)
        assert isinstance(weight, Weight)
        if weight.spec.order == order:
            scheme = weight.scheme
            for parts, base in _runs(scheme, weight.parts, weight.spec.base, limit):
                bound = scheme.bound(parts, base).expand(base).reshape(-1) if bounds else None
                yield scheme.decode(parts, base, dtype).reshape(-1), bound
            return
        whole = weight.dequantize()
    elif entry.spec is None and order == tuple(range(len(order))) and _is_run(view, entry.stride, entry.shape):
        key, first = entry.keys["tensor"], 0 if view is None else view.offset
        for at in range(0, count, limit):
            size = (min(limit, count - at),)
            yield checkpoint.store.read_view(key, View(spec.dtype, size, (1,), first + at)), None
        return
    else:
        whole = checkpoint.read_briefly(name)
        whole = whole.values_of() if isinstance(whole, Weight) else whole
    whole = whole.permute([order.index(dim) for dim in range(len(order))])
    for at in range(0, count, limit):
        yield flat(whole, at, min(at + limit, count)), None


def _is_run(view: View | None, stride: Shape, shape: Shape) -> bool:
    """Return whether the file stores the elements in their row-major order; an owner is always stored so."""
    is_plain = stride == contiguous_stride(shape)
    return view is None or (is_plain and view.stride == contiguous_stride(view.size))


def _runs(scheme: Scheme, parts: Parts, shape: Shape, limit: int) -> Iterator[tuple[Parts, Shape]]:
    """Yield a quantized tensor of ``shape`` in pieces of about ``limit`` elements, as far as blocks allow."""
    count = math.prod(shape)
    if count <= limit:
        yield parts, shape
        return
    for less in ((count,), (count // shape[-1], shape[-1])):
        if len(less) < len(shape) and scheme.can_view(shape, less):
            shape, parts = less, view_parts(scheme, dict(parts), less)
            break
    layout, row = scheme.layout(shape), count // shape[0]
    unit = row_unit(layout, row)
    step = unit * max(limit // (unit * row), 1)
    if step >= shape[0]:
        yield parts, shape
        return
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        cuts = part_rows(layout, shape, start, stop)
        some = {name: part if cuts[name] is None else part[cuts[name]] for name, part in parts.items()}
        yield from _runs(scheme, some, (stop - start, *shape[1:]), limit)
