"""Writing steps into the memory that the model holds, undoing them, and reporting what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NoReturn, cast

import torch
from torch import Tensor

from .._checks import describe_some
from .._interruptions import Deferred
from ..checkpoint.held import HeldCheckpoint
from ..errors import LoadError, SchemeError, TetherError
from ..files import Batch, Ring, Scratch
from ..files.batch import SLICE
from ..files.crew import Crew, Job
from ..files.memory import pieces
from ..geometry.blocks import STOCK
from ..geometry.views import overlaps_itself
from ..loading.contents import encode_rows_into, encode_values_into, encode_whole
from ..loading.options import fault
from ..loading.steps import Source, Step
from ..progress import no_tick
from ..renaming.renamed_checkpoint import RenamedCheckpoint
from ..ties.spans import plain_values
from ..weights.weight import Weight
from .report import Checksum, RefitReport, checksum_of

_AT_ONCE = 64 * 2**20
"""Bytes of a group of steps: between groups, signals are delivered and checksums of the last group are started."""

_WORTHWHILE = 2**20
"""Bytes from which a checksum is computed by threads: a smaller one is finished before a thread has started."""

_PLAIN_RANGE = 256.0
"""The largest magnitude that every scheme can hold; tensors with larger or non-finite values are encoded as a trial."""


def unwritable(step: Step) -> str:
    """Return why the memory of ``step`` cannot be written; empty if it can."""
    if any(step.component.members[source.member].tensor.is_meta for source in step.sources):
        return fault(
            step.name, "it is on meta, and has no memory to write to. Use tt.load, or tt.materialize it first."
        )
    held = step.held
    if not isinstance(held, Weight) and not held.is_contiguous() and overlaps_itself(held.shape, held.stride()):
        return fault(step.name, "some of its elements share memory (expand), so it cannot be written to. Clone it.")
    return ""


class Writer:
    """Write steps in place. With ``is_atomic`` keep copies of the old values, which ``undo`` restores bit for bit."""

    def __init__(self, signals: Deferred, is_atomic: bool) -> None:
        self._signals, self.is_atomic = signals, is_atomic
        self._undo: list[tuple[Tensor, Tensor]] = []
        self._checksums: dict[str, Checksum | int] = {}
        self._behind: list[Job] = []
        """Jobs of checksums that are left to do; threads do them during the next group of steps."""
        self._encoded: dict[str, str] = {}
        self._begun: list[str] = []
        """The names of the steps that are being written."""
        self._bytes = self._nbytes = 0
        self._ring, self._crew = Ring(), Crew()

    # -- before the first change ----------------------------------------------------------------------------------

    def check(self, steps: Sequence[Step], given: RenamedCheckpoint) -> list[str]:
        """Return the faults of values that their scheme cannot hold; reads all values and changes nothing."""
        encoded, suspects = [step for step in steps if step.is_encoded], dict[str, Step]()

        def look(step: Step, values: Tensor) -> None:
            if not _is_in_plain_range(values):
                suspects[step.name] = step

        def job(step: Step, values: Tensor, space: Scratch) -> int:
            look(step, values)
            return values.nbytes

        jobs: list[Job] = []
        for some in _grouped(encoded):
            batch = Batch(crew=self._crew)
            for step in some:
                self._signals.deliver()
                place = _rows_in_file(step.sources[0], given)
                if place is not None:
                    self._look_later(step, given, place, batch, partial(look, step))
                elif _is_in_memory(step, given):
                    values = given.read_briefly(step.sources[0].name)
                    jobs += [partial(job, step, piece) for piece in pieces(values, SLICE)]
                elif not _holds(step, given):
                    suspects[step.name] = step
            self._signals.during(batch.run, no_tick)
        self._signals.during(self._crew.do, jobs, no_tick)
        faults = []
        for step in (step for step in encoded if step.name in suspects):
            try:
                self._signals.during(encode_whole, step, given, no_tick)
            except SchemeError as error:
                faults.append(str(error.named(step.name)))
        return faults

    def _look_later(
        self, step: Step, given: RenamedCheckpoint, place: tuple[str, int], batch: Batch, look: Callable[[Tensor], None]
    ) -> None:
        """Schedule in ``batch`` reads of the values of ``step``; ``place`` is (key, first row), ``look`` gets each."""
        (key, first), store, rows = place, given.checkpoint.store, given.spec(step.sources[0].name).shape[0]
        at_once = max(1, SLICE // max(store.stored(key).nbytes // store.stored(key).shape[0], 1))
        for start in range(0, rows, at_once):
            batch.rows(store.file_of(key), key, first + start, first + min(start + at_once, rows), look)

    # -- the changes ----------------------------------------------------------------------------------------------

    def write(self, steps: Sequence[Step], given: RenamedCheckpoint) -> None:
        """Write the values of ``steps`` into the tensors that the model holds."""
        for some in _grouped(steps):
            self._signals.deliver()
            if self.is_atomic:
                for step in some:
                    for tensor in _memory(step):
                        self._undo.append((tensor, tensor.clone()))
            batch = Batch(self._ring, self._crew)
            for step in some:
                self._begun.append(step.name)
                for source in reversed(step.sources):  # the first source is written last, so its values remain
                    with torch.no_grad():
                        _write(step, source, given, batch)
            behind, self._behind = self._behind, []
            for job in behind:
                batch.do(job, SLICE)
            self._signals.during(batch.run, no_tick)
            for step in some:
                self._note(step)
            self._begun.clear()

    def _note(self, step: Step) -> None:
        held = step.held
        for tensor in (held, *(held.parts.values() if isinstance(held, Weight) else ())):
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)  # backward must not use it as a saved tensor any more
        memory = plain_values(held) if isinstance(held, Weight) and held.scheme.transparent else held
        self._bytes, self._nbytes = self._bytes + step.nbytes, self._nbytes + memory.nbytes
        if isinstance(held, Weight) and not held.scheme.transparent:
            self._encoded[step.name] = str(held.scheme)
        if memory.nbytes > _WORTHWHILE and memory.device.type == "cpu":  # on a GPU, another thread has another stream
            self._checksums[step.name] = checksum = Checksum(memory)
            self._behind += checksum.jobs()
        else:
            self._checksums[step.name] = checksum_of(memory)

    def finish(self) -> None:
        """Do the jobs of checksums that are left."""
        self._crew.do(self._behind, no_tick)

    def report(self, seconds: float, left: Sequence[str], waiting: int) -> RefitReport:
        """Return the report; call ``finish`` before."""
        checksums = {name: one if isinstance(one, int) else one.value() for name, one in self._checksums.items()}
        return RefitReport(self._bytes, self._nbytes, seconds, checksums, self._encoded, tuple(left), waiting)

    # -- afterwards -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the threads, and free the buffers."""
        self._crew.close()
        self._ring.close()
        torch.clear_autocast_cache()  # it may hold casts of the old values

    def undo(self) -> bool:
        """Restore the old values, if they were kept; return whether the model is as before the refit."""
        with torch.no_grad():
            for tensor, old in reversed(self._undo):
                tensor.copy_(old)
        is_whole = self.is_atomic or not (self._checksums or self._begun)
        self._undo.clear()
        return is_whole

    def describe(self) -> str:
        """Return text that names the tensors with new values, and those that may have some of both."""
        names = [*self._checksums]
        done = f"{len(names)} tensors have been written ({describe_some(names)})." if names else ""
        begun = [name for name in self._begun if name not in self._checksums]
        mixed = f"{len(begun)} may have old and new values ({describe_some(begun)})." if begun else ""
        return " ".join(filter(None, (done, mixed))) or "Nothing has been written."

    def describe_stop(self) -> str:
        """Return text that says what was written before a stop, and what to do."""
        return f"{self.describe()} Refit again from a whole source."

    def stopped(self, error: Exception) -> NoReturn:
        """Raise an error caused by ``error`` whose text says what was written before it."""
        kind = type(error) if isinstance(error, TetherError) else LoadError
        raise kind(f"the refit stopped: {type(error).__name__}: {error}", fix=self.describe_stop()) from error


def _grouped(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Yield ``steps`` in groups of about ``_AT_ONCE`` bytes, each of which is read and encoded as one batch."""
    some, size = list[Step](), 0
    for step in steps:
        some.append(step)
        size += step.nbytes
        if size >= _AT_ONCE:
            yield some
            some, size = [], 0
    if some:
        yield some


def _rows_in_file(source: Source, given: RenamedCheckpoint) -> tuple[str, int] | None:
    """Return (key, first row) of the values of ``source``, if one stored tensor has them as its rows; else ``None``."""
    place = given.rows_in(source.name)
    if place is None or not given.checkpoint.store.stored(place[0]).shape:
        return None
    return (place[0], place[1] or 0) if given.checkpoint.store.stored(place[0]).nbytes else None


def _is_in_memory(step: Step, given: RenamedCheckpoint) -> bool:
    """Return whether one plain CPU tensor of a state dict holds the values of ``step`` without renaming steps."""
    checkpoint, name = given.checkpoint, step.sources[0].name
    if not isinstance(checkpoint, HeldCheckpoint) or not given.is_as_it_is(name):
        return False
    tensor = checkpoint.tensor(given.keys_of(name)[0])
    return type(tensor) in STOCK and tensor.device.type == "cpu"


def _holds(step: Step, given: RenamedCheckpoint) -> bool:
    """Return whether all values of ``step`` are in the plain range; each rank tests its own shard of a DTensor."""
    checkpoint, name = given.checkpoint, step.sources[0].name
    if isinstance(checkpoint, HeldCheckpoint) and given.is_as_it_is(name):
        return checkpoint.holds(given.keys_of(name)[0], _is_in_plain_range)
    return _is_in_plain_range(given.read_briefly(name))


def _is_in_plain_range(values: Tensor) -> bool:
    """Return whether all ``values`` are finite and within ``_PLAIN_RANGE``, in one pass over them."""
    if not values.numel() or not values.is_floating_point():
        return True
    low, high = torch.aminmax(values.float() if values.dtype.itemsize == 1 else values)  # nan if any value is nan
    return bool(low >= -_PLAIN_RANGE) and bool(high <= _PLAIN_RANGE)


def _memory(step: Step) -> Iterator[Tensor]:
    """Yield the plain tensors that ``step`` writes to."""
    for source in step.sources:
        held = step.component.members[source.member].tensor
        yield from (part.detach() for part in held.parts.values()) if isinstance(held, Weight) else (held.detach(),)


def _write(step: Step, source: Source, given: RenamedCheckpoint, batch: Batch) -> None:
    """Write the values of ``source`` now, or schedule it in ``batch``."""
    held = step.component.members[source.member].tensor
    if not isinstance(held, Weight) or held.scheme.transparent:
        plain, place = plain_values(held).detach(), given.rows_in(source.name)
        if place is None or len(step.sources) > 1:
            given.read_into(source.name, plain)
        else:
            given.checkpoint.store.read_later(place[0], plain, batch, place[1])
    elif step.is_given:
        held.copy_(given.read_weight(source.name).to(held.device))
    elif step.kept is not None:
        held.set_parts(encode_whole(step, given, no_tick).parts)
    else:
        _encode(step, held, given, batch)


def _encode(step: Step, held: Weight, given: RenamedCheckpoint, batch: Batch) -> None:
    """Encode the values of ``step`` into the parts of ``held``, as ``tt.quantize`` does, now or in ``batch``."""
    is_dense = held.spec.is_contiguous and all(part.is_contiguous() for part in held.parts.values())
    if is_dense and encode_rows_into(step, given, batch, held.parts) is not None:
        return
    values = given.read_briefly(step.sources[0].name).to(held.device)
    is_here = is_dense and held.device.type == "cpu" and _is_in_memory(step, given)
    if is_here and encode_values_into(step, given, values, batch, held.parts):
        return
    try:
        order = held.spec.order
        base = values.permute([order.index(dim) for dim in range(values.dim())])
        held.scheme.encode_into(base, cast("dict[str, Tensor]", held.parts))
    except SchemeError as error:
        raise error.named(step.name) from None
