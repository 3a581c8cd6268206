"""Transfers to a device through a few pinned buffers; copies overlap with reads and with computation on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..geometry.views import Shape
from .readers import ReadableFile, Readers

SLOT = 16 * 2**20
"""The most bytes of one pinned buffer. Each costs some calls of the device's library."""

SLOTS = 4
"""The most pinned buffers: some are being read, the others copied. All of them may fit the cache."""

STAGED = 32 * 2**20
"""Bytes that the device encodes or converts at once."""

_AHEAD = 4
"""The number of such pieces on the device beyond which copies wait for a slow encoder."""


class Event(Protocol):
    """A point in the order of work on a device, such as a CUDA event."""

    def query(self) -> bool:
        """Return whether the device has reached the event."""

    def synchronize(self) -> None:
        """Wait until the device has reached the event."""


class Lane(Protocol):
    """Two queues of work on a device: copies into its memory, and computation.

    Each runs in order; between the two, only the methods here impose an order. All calls but ``synchronize`` return at
    once; ``copy`` and ``compute`` are called within ``entered``.
    """

    def begin(self) -> None:
        """Make copies wait for the computation queued so far, which may still use their target memory."""

    def entered(self) -> AbstractContextManager[object]:
        """Return a context in which the calling thread queues copies, however many."""

    def copy(self, out: Tensor, given: Tensor) -> None:
        """Queue a copy of ``given``, pinned, to ``out`` on the device; both are contiguous bytes."""

    def copied(self, used: Event | None = None) -> Event:
        """Return the event after all copies queued so far: ``used``, an earlier one of this lane, or a new one."""

    def allocate(self, nbytes: int) -> Tensor:
        """Return uninitialised bytes on the device, for use by computation."""

    def compute(self, use: Callable[[], object], after: Event) -> Event:
        """Queue the computation ``use`` after the event ``after``; return the event at its end."""

    def wait(self, event: Event) -> None:
        """Make further copies wait for ``event``."""

    def end(self) -> None:
        """Make further computation wait for all copies queued so far."""

    def synchronize(self) -> None:
        """Wait until the device has finished all queued copies and computation."""


class StreamLane:
    """A lane of a device with streams: copies use a stream of their own, computation uses the caller's current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._work = self._copies = self._module.current_stream(device)
        self._kind = {"blocking": True} if device.type == "cuda" else {}  # a waiting thread sleeps, not spins

    def begin(self) -> None:
        self._work = self._module.current_stream(self._device)
        with self._module.device(self._device):
            self._copies = self._module.Stream()
        self._copies.wait_stream(self._work)

    def entered(self) -> AbstractContextManager[object]:
        return self._module.stream(self._copies)  # type: ignore[no-any-return]

    def copy(self, out: Tensor, given: Tensor) -> None:
        out.copy_(given, non_blocking=True)

    def copied(self, used: Event | None = None) -> Event:
        event: Any = self._module.Event(**self._kind) if used is None else used
        event.record(self._copies)
        return event  # type: ignore[no-any-return]

    def allocate(self, nbytes: int) -> Tensor:
        with self._module.stream(self._work):
            made = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self.wait(self._work.record_event())  # the allocator may return memory that queued computation still uses
        return made

    def compute(self, use: Callable[[], object], after: Event) -> Event:
        with self._module.stream(self._work):
            self._work.wait_event(after)
            use()
            return self._work.record_event()  # type: ignore[no-any-return]

    def wait(self, event: Event) -> None:
        self._copies.wait_event(event)

    def end(self) -> None:
        self._work.wait_stream(self._copies)

    def synchronize(self) -> None:
        self._copies.synchronize()
        self._work.synchronize()


def _has_streams(device: torch.device) -> bool:
    """Return whether the device has streams and pinned memory to copy from: CUDA, ROCm, XPU; not MPS, nor the CPU."""
    if device.type in ("cpu", "meta", "mps"):
        return False
    try:
        module = torch.get_device_module(device)
    except RuntimeError:
        return False
    names = ("Stream", "stream", "current_stream", "device", "is_available")
    return all(hasattr(module, name) for name in names) and bool(module.is_available())


class Slot:
    """A pinned buffer, and the event after which no copy reads it; ``lane`` made the event."""

    __slots__ = ("copied", "lane", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor = tensor
        self.copied: Event | None = None
        self.lane: Lane | None = None


class Ring:
    """A few pinned buffers, allocated on demand; each is reused as soon as the copies from it are done.

    One ring serves all devices of a load, from one thread at a time; the threads that read are its own.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        self._idle: deque[Slot] = deque()
        self._slots = self._left = slots
        self._used: dict[torch.device, Lane] = {}
        self.readers: Readers = Readers()

    def lane(self, device: torch.device) -> Lane | None:
        """Return a lane of ``device``; ``None`` if the device has no streams."""
        return StreamLane(device) if _has_streams(device) else None

    def pinned(self, nbytes: int) -> Tensor:
        """Return a pinned buffer, or a pageable one, with slower copies, if the system cannot pin more memory."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def take(self, nbytes: int, *, may_wait: bool) -> Slot | None:
        """Return a buffer of at least ``nbytes`` that no copy reads; pass it to ``give`` afterwards.

        Without ``may_wait`` return ``None`` rather than wait for a copy.
        """
        if self._idle:
            slot = self._idle[0]  # the one idle for the longest time
            is_free = slot.copied is None or slot.copied.query()
            if not is_free and not self._left:
                if not may_wait:
                    return None
                assert slot.copied is not None
                slot.copied.synchronize()
                is_free = True
            if is_free:
                self._idle.popleft()
                if slot.tensor.nbytes >= nbytes:
                    return slot
                self._left += 1
                del slot  # free a buffer that is too small before the new one is allocated
        if not self._left:
            return None
        made = Slot(self.pinned(nbytes))
        self._left -= 1
        return made

    def give(self, slot: Slot) -> None:
        """Take back a buffer, which copies read until the event ``slot.copied``."""
        self._idle.append(slot)

    def note(self, device: torch.device, lane: Lane) -> None:
        """Remember ``lane`` as in use, for ``drain``."""
        self._used[device] = lane

    def drain(self) -> None:
        """Wait until every device has finished the copies and computation of this ring."""
        for lane in self._used.values():
            lane.synchronize()
        self._used.clear()

    def close(self) -> None:
        """Finish all reads and all work, and free the buffers; new ones are allocated on the next use."""
        self.readers.close()
        self.drain()
        self._idle.clear()
        self._left = self._slots


class Passage:
    """The transfer of bytes to one device, during one run of a batch."""

    def __init__(self, ring: Ring, device: torch.device, lane: Lane) -> None:
        self._ring, self._device, self._lane = ring, device, lane
        self.size: int = SLOT
        self._idle: deque[tuple[Tensor, Event]] = deque()
        self._every: dict[int, Tensor] = {}  # by id, so that none is freed while a copy to it may be running

    def begin(self, most: int) -> None:
        """Begin a run that brings at most ``most`` bytes at once."""
        self.size = 1 << (most - 1).bit_length()  # a later run that brings a little more can use the same buffers
        self._ring.note(self._device, self._lane)
        self._lane.begin()

    def entered(self) -> AbstractContextManager[object]:
        """Return a context in which a thread uses the passage."""
        return self._lane.entered()

    def send(self, slot: Slot, targets: Sequence[Tensor]) -> None:
        """Queue copies of the first bytes of ``slot`` to ``targets``, uint8 on the device, one after the other."""
        lane, first = self._lane, 0
        for out in targets:
            last = first + out.nbytes
            lane.copy(out, slot.tensor[first:last])
            first = last
        slot.copied = lane.copied(slot.copied if slot.lane is lane else None)
        slot.lane = lane
        self._ring.give(slot)

    def take(self, nbytes: int) -> Tensor:
        """Return scratch on the device, which copies may fill; pass it to ``compute`` afterwards.

        Where there is a lot, copies wait for computation that uses it.
        """
        size = -(-nbytes // self.size) * self.size
        held = sum(scratch.nbytes for scratch in self._every.values())
        is_full = held + size > _AHEAD * STAGED
        for place, (scratch, free) in enumerate(self._idle):
            if scratch.nbytes >= nbytes and (is_full or free.query()):
                del self._idle[place]
                self._lane.wait(free)
                return scratch
        while is_full and self._idle:  # too small, and computation that uses them is queued, so they can be freed
            del self._every[id(self._idle.popleft()[0])]
        made = self._lane.allocate(size)
        self._every[id(made)] = made
        return made

    def compute(self, scratch: Tensor, use: Callable[[], object]) -> None:
        """Queue ``use()``, which reads ``scratch``, after all copies queued so far; then it may be filled again."""
        free = self._lane.compute(use, self._lane.copied())
        if scratch.nbytes > _AHEAD * STAGED:  # the computation is queued, so it can be freed
            del self._every[id(scratch)]
        else:
            self._idle.append((scratch, free))

    def end(self) -> None:
        """End a run that was not aborted."""
        self._lane.end()
        self._idle.clear()
        self._every.clear()


class Handing:
    """The transfer of one tensor in pieces. After the last, ``use`` gets it on the device; it must not keep it."""

    def __init__(self, passage: Passage, shape: Shape, dtype: torch.dtype, use: Callable[[Tensor], object]) -> None:
        self._passage, self._shape, self._dtype, self._use = passage, shape, dtype, use
        self.nbytes: int = torch.empty(shape, dtype=dtype, device="meta").nbytes
        self._scratch: Tensor | None = None
        self._left = self.nbytes

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield the first and the last byte of each piece, within the tensor."""
        for start in range(0, self.nbytes, SLOT):
            yield start, min(start + SLOT, self.nbytes)

    def place(self, start: int, stop: int) -> Tensor:
        """Return the memory for one piece; all pieces of one tensor come before those of the next one."""
        if self._scratch is None:
            self._scratch = self._passage.take(self.nbytes)
        return self._scratch[start:stop]

    def arrived(self, nbytes: int) -> None:
        """Compute if these bytes, whose copy is queued, are the last ones."""
        self._left -= nbytes
        if self._left == 0 and self._scratch is not None:
            scratch, self._scratch = self._scratch, None
            values = scratch[: self.nbytes].view(self._dtype).view(self._shape)
            self._passage.compute(scratch, lambda: self._use(values))


class Transfer(NamedTuple):
    """A range of a file, from byte ``at`` on, and where on a device its bytes go: up to ``SLOT``."""

    passage: Passage
    file: ReadableFile
    at: int
    parts: Sequence[tuple[str, int]]
    """Keys, and how many bytes of each, in order."""
    targets: Callable[[], Sequence[Tensor]]
    """What returns uint8 tensors on the device, one for each of the parts; called when the bytes have been read."""
    arrived: Callable[[int], object] | None = None
    """What is called with the number of bytes when their copies have been queued."""


class Transfers:
    """Transfers in order, by one thread: reads go ahead, as far as there are buffers; copies follow."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._under_way: deque[tuple[Transfer, Slot, Callable[[], None]]] = deque()

    def add(self, transfer: Transfer) -> int:
        """Begin to read for ``transfer``; return the number of bytes whose copies were queued meanwhile."""
        done = 0
        while (slot := self._ring.take(transfer.passage.size, may_wait=not self._under_way)) is None:
            done += self._finish()
        wait = self._ring.readers.start(transfer.file, slot.tensor, transfer.parts, transfer.at)
        self._under_way.append((transfer, slot, wait))
        return done

    def end(self) -> int:
        """Queue all copies that are left; return their number of bytes."""
        done = 0
        while self._under_way:
            done += self._finish()
        return done

    def _finish(self) -> int:
        transfer, slot, wait = self._under_way.popleft()
        wait()
        transfer.passage.send(slot, transfer.targets())
        nbytes = sum(count for _, count in transfer.parts)
        if transfer.arrived is not None:
            transfer.arrived(nbytes)
        return nbytes
