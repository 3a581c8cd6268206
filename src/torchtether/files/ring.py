"""Transfers to a device through a few pinned buffers; copies overlap with reads and with computation on the device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..geometry.views import Shape
from .memory import memory_of

SLOT = 4 * 2**20
"""Bytes of one pinned buffer, which one thread reads at once."""

SLOTS = 16
"""The most pinned buffers. Four threads fill four of them; the others are being copied."""

STAGED = 16 * 2**20
"""Bytes that the device encodes or converts at once; each reading thread has a scratch of this size there."""


class Event(Protocol):
    """A point in the order of work on a device, such as a CUDA event."""

    def query(self) -> bool:
        """Return whether the device has reached the event."""

    def synchronize(self) -> None:
        """Wait until the device has reached the event."""


class Lane(Protocol):
    """Two queues of work on a device: copies into its memory, and computation.

    Each runs in order; between the two, only the methods here impose an order. All calls but ``synchronize`` return at
    once, and may come from any thread.
    """

    def begin(self) -> None:
        """Make copies wait for the computation queued so far, which may still use their target memory."""

    def copy(self, out: Tensor, given: Tensor) -> None:
        """Queue a copy of ``given``, pinned, to ``out`` on the device; both are contiguous bytes."""

    def copied(self) -> Event:
        """Return the event after all copies queued so far."""

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
        self._turn = threading.Lock()
        self._kind = {"blocking": True} if device.type == "cuda" else {}  # a waiting thread sleeps, not spins

    def begin(self) -> None:
        self._work = self._module.current_stream(self._device)
        with self._module.device(self._device):
            self._copies = self._module.Stream()
        self._copies.wait_stream(self._work)

    def copy(self, out: Tensor, given: Tensor) -> None:
        with self._module.stream(self._copies):
            out.copy_(given, non_blocking=True)

    def copied(self) -> Event:
        return self._copies.record_event(self._module.Event(**self._kind))  # type: ignore[no-any-return]

    def allocate(self, nbytes: int) -> Tensor:
        with self._module.stream(self._work):
            made = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self.wait(self._work.record_event())  # the allocator may return memory that queued computation still uses
        return made

    def compute(self, use: Callable[[], object], after: Event) -> Event:
        with self._turn, self._module.stream(self._work):  # one at a time, so that only one needs scratch
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


class Ring:
    """A few pinned buffers, allocated on demand; each is reused as soon as the copies from it are done.

    One ring serves all devices of a load, and all threads.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        self._idle: deque[tuple[Tensor, Event]] = deque()
        self._left = slots
        self._changed = threading.Condition()
        self._used: dict[torch.device, Lane] = {}

    def lane(self, device: torch.device) -> Lane | None:
        """Return a lane of ``device``; ``None`` if the device has no streams."""
        return StreamLane(device) if _has_streams(device) else None

    def pinned(self, nbytes: int) -> Tensor:
        """Return a pinned buffer, or a pageable one, with slower copies, if the system cannot pin more memory."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def take(self) -> Tensor:
        """Return a buffer that no copy reads; pass it to ``give`` afterwards."""
        with self._changed:
            while not self._idle and not self._left:
                self._changed.wait()
            if self._idle and (not self._left or self._idle[0][1].query()):
                slot, event = self._idle.popleft()  # the one idle for the longest time
            else:
                self._left -= 1
                slot = None
        try:
            if slot is None:
                return self.pinned(SLOT)
            event.synchronize()
        except BaseException:
            with self._changed:
                self._left += 1
                self._changed.notify()
            raise
        return slot

    def give(self, slot: Tensor, copied: Event) -> None:
        """Take back a buffer, which copies read until the event ``copied``."""
        with self._changed:
            self._idle.append((slot, copied))
            self._changed.notify()

    def note(self, device: torch.device, lane: Lane) -> None:
        """Remember ``lane`` as in use, for ``drain``."""
        self._used[device] = lane

    def drain(self) -> None:
        """Wait until every device has finished the copies and computation of this ring."""
        for lane in self._used.values():
            lane.synchronize()
        self._used.clear()

    def close(self) -> None:
        """Finish all work and free the buffers; new ones are allocated on the next use."""
        self.drain()
        with self._changed:
            self._left += len(self._idle)
            self._idle.clear()


Fill = Callable[[Sequence[tuple[str, memoryview]], int], None]
"""A function that fills (key, buffer) pairs with the bytes of a file from an offset on; errors name the key."""


class Passage:
    """The transfer of bytes to one device, during one run of a batch."""

    def __init__(self, ring: Ring, device: torch.device, lane: Lane) -> None:
        self._ring, self._device, self._lane = ring, device, lane
        self._idle: deque[tuple[Tensor, Event | None]] = deque()
        self._every: list[Tensor] = []  # so that none is freed while a copy to it may be running

    def begin(self) -> None:
        """Begin a run."""
        self._ring.note(self._device, self._lane)
        self._lane.begin()

    def bring(self, read: Fill, parts: Sequence[tuple[str, Tensor, int, int]], at: int) -> None:
        """Read up to ``SLOT`` bytes of a file from ``at`` on into (key, tensor, start, stop) ranges on the device."""
        slot = self._ring.take()
        try:
            memory, places, first = memory_of(slot), [], 0
            for key, out, start, stop in parts:
                places.append((key, out[start:stop], first, first + stop - start))
                first += stop - start
            read([(key, memory[a:b]) for key, _, a, b in places], at)
            for _, out, a, b in places:
                self._lane.copy(out, slot[a:b])
        finally:
            self._ring.give(slot, self._lane.copied())

    def hand(
        self, read: Fill, key: str, at: int, shape: Shape, dtype: torch.dtype, use: Callable[[Tensor], Any]
    ) -> None:
        """Read a tensor from byte ``at`` of a file, and queue ``use(tensor)`` on the device; it must not keep it."""
        nbytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
        scratch, free = self._scratch(nbytes)
        if free is not None:
            self._lane.wait(free)
        for start in range(0, nbytes, SLOT):
            self.bring(read, [(key, scratch, start, min(start + SLOT, nbytes))], at + start)
        values = scratch[:nbytes].view(dtype).view(shape)
        self._idle.append((scratch, self._lane.compute(lambda: use(values), self._lane.copied())))

    def _scratch(self, nbytes: int) -> tuple[Tensor, Event | None]:
        """Return scratch on the device, and the event after which it may be written, ``None`` for at once."""
        try:
            scratch, free = self._idle.popleft()
        except IndexError:
            pass
        else:
            if scratch.nbytes >= nbytes:
                return scratch, free
        made = self._lane.allocate(max(nbytes, STAGED))
        self._every.append(made)
        return made, None

    def end(self, *, is_whole: bool) -> None:
        """End a run; if it was aborted, wait for queued work."""
        if is_whole:
            self._lane.end()
        else:
            self._lane.synchronize()
        self._idle.clear()
        self._every.clear()
