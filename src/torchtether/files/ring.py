"""Transfers to a device through a few pinned buffers; copies overlap with reads and with computation on the device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from ..geometry.views import Shape
from .memory import memory_of

SLOT = 8 * 2**20
"""The most bytes of one pinned buffer, which one thread reads at once. Each costs some calls under Python's lock."""

SLOTS = 16
"""The most pinned buffers: as many as threads that read; the others are being copied."""

STAGED = 32 * 2**20
"""Bytes that the device encodes or converts at once."""

_AHEAD = 4
"""The number of such pieces on the device beyond which threads wait for a slow encoder before they read more."""


class Event(Protocol):
    """A point in the order of work on a device, such as a CUDA event."""

    def query(self) -> bool:
        """Return whether the device has reached the event."""

    def synchronize(self) -> None:
        """Wait until the device has reached the event."""


class Lane(Protocol):
    """Two queues of work on a device: copies into its memory, and computation.

    Each runs in order; between the two, only the methods here impose an order. All calls but ``synchronize`` return at
    once, and may come from any thread, ``copy`` only from one that has entered ``entered``.
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
        self._turn = threading.Lock()
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


class Slot:
    """A pinned buffer, its bytes, and the event after which no copy reads it; ``lane`` made the event."""

    __slots__ = ("copied", "lane", "memory", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor = tensor
        self.memory: memoryview = memory_of(tensor)
        self.copied: Event | None = None
        self.lane: Lane | None = None


class Ring:
    """A few pinned buffers, allocated on demand; each is reused as soon as the copies from it are done.

    One ring serves all devices of a load, and all threads.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        self._idle: deque[Slot] = deque()
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

    def take(self, nbytes: int) -> Slot:
        """Return a buffer of at least ``nbytes`` that no copy reads; pass it to ``give`` afterwards."""
        with self._changed:
            while not self._idle and not self._left:
                self._changed.wait()
            slot = self._idle.popleft() if self._idle else None  # the one idle for the longest time
            if slot is None:
                self._left -= 1
        try:  # without the lock, because calls to the device let other threads run
            event = None if slot is None else slot.copied
            if slot is not None and event is not None and not event.query():
                with self._changed:
                    if is_new := self._left > 0:
                        self._left -= 1
                        self._idle.appendleft(slot)
                        self._changed.notify()
                if is_new:
                    slot = None
                else:
                    event.synchronize()
            if slot is not None and slot.tensor.nbytes >= nbytes:
                return slot
            slot = None  # free a buffer that is too small before the new one is allocated
            return Slot(self.pinned(nbytes))
        except BaseException:
            self.lose()
            raise

    def give(self, slot: Slot) -> None:
        """Take back a buffer, which copies read until the event ``slot.copied``."""
        with self._changed:
            self._idle.append(slot)
            self._changed.notify()

    def lose(self) -> None:
        """Allow another buffer in place of one that is not given back."""
        with self._changed:
            self._left += 1
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
        self._size = SLOT
        self._changed = threading.Condition()
        self._computing = 0
        self._idle: deque[tuple[Tensor, Event]] = deque()
        self._every: dict[int, Tensor] = {}  # by id, so that none is freed while a copy to it may be running

    def begin(self, most: int) -> None:
        """Begin a run that brings at most ``most`` bytes at once."""
        self._size = 1 << (most - 1).bit_length()  # a later run that brings a little more can use the same buffers
        self._ring.note(self._device, self._lane)
        self._lane.begin()

    def entered(self) -> AbstractContextManager[object]:
        """Return a context in which the calling thread uses the passage."""
        return self._lane.entered()

    def bring(self, read: Fill, parts: Sequence[tuple[str, Tensor, int, int]], at: int) -> None:
        """Read up to ``SLOT`` bytes of a file from ``at`` on into (key, tensor, start, stop) ranges on the device."""
        ring, lane = self._ring, self._lane
        slot = ring.take(self._size)
        try:
            memory, buffers, first = slot.memory, [], 0
            for key, _, start, stop in parts:
                last = first + stop - start
                buffers.append((key, memory[first:last]))
                first = last
            read(buffers, at)
            tensor, first = slot.tensor, 0
            for _, out, start, stop in parts:
                last = first + stop - start
                lane.copy(out[start:stop], tensor[first:last])
                first = last
        finally:
            try:
                slot.copied = lane.copied(slot.copied if slot.lane is lane else None)
            except BaseException:
                ring.lose()
                raise
            slot.lane = lane
            ring.give(slot)

    def take(self, nbytes: int) -> Tensor:
        """Return scratch on the device, which copies may fill; pass it to ``compute`` afterwards.

        Wait while there is a lot and threads compute, because they give theirs back.
        """
        size = -(-nbytes // self._size) * self._size
        with self._changed:
            while True:
                for place, (scratch, free) in enumerate(self._idle):
                    if scratch.nbytes >= nbytes:
                        del self._idle[place]
                        self._lane.wait(free)
                        return scratch
                while self._idle:  # all are too small, and computation that uses them is queued, so they can be freed
                    del self._every[id(self._idle.popleft()[0])]
                held = sum(scratch.nbytes for scratch in self._every.values())
                if not self._computing or held + size <= _AHEAD * STAGED:
                    made = self._lane.allocate(size)
                    self._every[id(made)] = made
                    return made
                self._changed.wait()

    def compute(self, scratch: Tensor, use: Callable[[], object]) -> None:
        """Queue ``use()``, which reads ``scratch``, after all copies queued so far; then it may be filled again."""
        with self._changed:
            self._computing += 1
        free = None
        try:
            free = self._lane.compute(use, self._lane.copied())
        finally:
            with self._changed:
                self._computing -= 1
                if free is not None:
                    self._idle.append((scratch, free))
                self._changed.notify_all()

    def end(self, *, is_whole: bool) -> None:
        """End a run; if it was aborted, wait for queued work."""
        if is_whole:
            self._lane.end()
        else:
            self._lane.synchronize()
        self._idle.clear()
        self._every.clear()


class Handing:
    """The transfer of one tensor, from byte ``at`` of a file, in pieces that threads read side by side.

    After the last piece, ``use`` is called with the tensor to compute on the device; it must not keep it.
    """

    def __init__(
        self,
        passage: Passage,
        read: Fill,
        key: str,
        at: int,
        shape: Shape,
        dtype: torch.dtype,
        use: Callable[[Tensor], object],
    ) -> None:
        self._passage, self._read, self._key, self._at, self._use = passage, read, key, at, use
        self._shape, self._dtype = shape, dtype
        self._nbytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
        self._lock = threading.Lock()
        self._scratch: Tensor | None = None
        self._left = self._nbytes

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield the first and the last byte of each piece, within the tensor."""
        for start in range(0, self._nbytes, SLOT):
            yield start, min(start + SLOT, self._nbytes)

    def bring(self, start: int, stop: int) -> None:
        """Read one piece; start the pieces of one tensor before those of the next one, so that scratch is bounded."""
        with self._lock:
            if self._scratch is None:
                self._scratch = self._passage.take(self._nbytes)
            scratch = self._scratch
        self._passage.bring(self._read, [(self._key, scratch, start, stop)], self._at + start)
        with self._lock:
            self._left -= stop - start
            is_last = not self._left
        if is_last:
            self._scratch = None
            values = scratch[: self._nbytes].view(self._dtype).view(self._shape)
            self._passage.compute(scratch, lambda: self._use(values))
