"""Bytes on their way to a device: through a few pinned buffers, copied beside the reads and beside what it computes."""

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
"""Bytes of one pinned buffer: what one thread reads at once."""

SLOTS = 16
"""Pinned buffers at most. Four threads fill as many; the others are on their way."""

STAGED = 16 * 2**20
"""Bytes that are encoded, or converted, at once on the device; each reading thread has such a scratch there."""


class Event(Protocol):
    """A place in the order of what a device does."""

    def query(self) -> bool:
        """Return whether the device has come there."""

    def synchronize(self) -> None:
        """Wait until the device has come there."""


class Lane(Protocol):
    """Two orders in which a device works: that of copies into its memory, and that of what it computes.

    Each is kept; between the two nothing is promised but what is asked for here. All calls return at once, but for
    ``synchronize``, and may come from any thread.
    """

    def begin(self) -> None:
        """Have copies wait for what the device computes so far: their memory may have been in use there."""

    def copy(self, out: Tensor, given: Tensor) -> None:
        """Have ``given``, pinned, copied to ``out``, on the device, both contiguous bytes."""

    def copied(self) -> Event:
        """Return the event after all copies so far."""

    def allocate(self, nbytes: int) -> Tensor:
        """Return uninitialised bytes of the device, for the use of what it computes."""

    def compute(self, use: Callable[[], object], after: Event) -> Event:
        """Have ``use`` computed when the device has come to ``after``; return the event after it."""

    def wait(self, event: Event) -> None:
        """Have further copies wait for ``event``."""

    def end(self) -> None:
        """Have what is computed from now on wait for all copies so far."""

    def synchronize(self) -> None:
        """Wait until the device has copied and computed all that it was given here."""


class StreamLane:
    """A lane of a device that has streams: copies have one of their own, and the caller's computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._work = self._copies = self._module.current_stream(device)
        self._turn = threading.Lock()
        self._kind = {"blocking": True} if device.type == "cuda" else {}  # so that who waits leaves its core to others

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
            self.wait(self._work.record_event())  # the allocator may have it from what is still being computed
        return made

    def compute(self, use: Callable[[], object], after: Event) -> Event:
        with self._turn, self._module.stream(self._work):  # one at a time, so that there is the scratch of one
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
    """A few pinned buffers, made when they are needed; each is used again as soon as the copies out of it are done.

    One serves all devices of a load, and all threads.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        self._idle: deque[tuple[Tensor, Event]] = deque()
        self._left = slots
        self._changed = threading.Condition()
        self._used: dict[torch.device, Lane] = {}

    def lane(self, device: torch.device) -> Lane | None:
        """Return a lane of ``device``; ``None`` if its memory is filled without one."""
        return StreamLane(device) if _has_streams(device) else None

    def pinned(self, nbytes: int) -> Tensor:
        """Return a pinned buffer; one that is not where the system has no more to pin: copies are slower then."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def take(self) -> Tensor:
        """Return a buffer that no copy reads from, to be given back."""
        with self._changed:
            while not self._idle and not self._left:
                self._changed.wait()
            if self._idle and (not self._left or self._idle[0][1].query()):
                slot, event = self._idle.popleft()  # the one that has waited longest
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
        """Take back a buffer, in use until ``copied``."""
        with self._changed:
            self._idle.append((slot, copied))
            self._changed.notify()

    def note(self, device: torch.device, lane: Lane) -> None:
        """Remember that ``lane`` is in use, for ``drain``."""
        self._used[device] = lane

    def drain(self) -> None:
        """Wait until every device has copied and computed all that came through here."""
        for lane in self._used.values():
            lane.synchronize()
        self._used.clear()

    def close(self) -> None:
        """Let the buffers go, when nothing is under way any more; new ones are made if they are needed again."""
        self.drain()
        with self._changed:
            self._left += len(self._idle)
            self._idle.clear()


Fill = Callable[[Sequence[tuple[str, memoryview]], int], None]
"""Fills buffers, each with the key that an error names, with what a file has from a byte on."""


class Passage:
    """The way of bytes to one device, during one run of a batch."""

    def __init__(self, ring: Ring, device: torch.device, lane: Lane) -> None:
        self._ring, self._device, self._lane = ring, device, lane
        self._idle: deque[tuple[Tensor, Event | None]] = deque()
        self._every: list[Tensor] = []  # so that none is freed while a copy to it may be under way

    def begin(self) -> None:
        """Begin a run."""
        self._ring.note(self._device, self._lane)
        self._lane.begin()

    def bring(self, read: Fill, parts: Sequence[tuple[str, Tensor, int, int]], at: int) -> None:
        """Read what a file has from byte ``at``, at most ``SLOT``, for ranges of bytes of tensors on the device."""
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
        """Read a tensor, of which a file has the bytes from ``at``, and have the device ``use`` it, not keep it."""
        nbytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
        scratch, free = self._scratch(nbytes)
        if free is not None:
            self._lane.wait(free)
        for start in range(0, nbytes, SLOT):
            self.bring(read, [(key, scratch, start, min(start + SLOT, nbytes))], at + start)
        values = scratch[:nbytes].view(dtype).view(shape)
        self._idle.append((scratch, self._lane.compute(lambda: use(values), self._lane.copied())))

    def _scratch(self, nbytes: int) -> tuple[Tensor, Event | None]:
        """Return bytes of the device, and the event from which on they may be written."""
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
        """End a run; where it was broken off, wait for what is under way."""
        if is_whole:
            self._lane.end()
        else:
            self._lane.synchronize()
        self._idle.clear()
        self._every.clear()
