"""A simulated device that runs everything as late as possible: copies and computations run when they are waited for.

Its memory is that of the CPU. A buffer that is reused too early, or a tensor that is read before its event, has wrong
values here every time; on a GPU only sometimes.
"""

import threading
import weakref
from contextlib import nullcontext

import torch

from torchtether.files import Ring


class Order:
    """A queue of functions, like a CUDA stream: each runs when its event, or a later one, is waited for."""

    def __init__(self, lock):
        self._lock, self._todo, self._added, self._done = lock, [], 0, 0

    def add(self, function):
        """Append ``function``; return its event."""
        with self._lock:
            self._todo.append(function)
            self._added += 1
            return SimulatedEvent(self, self._added)

    def run(self, until):
        with self._lock:
            while self._done < until:
                self._done += 1
                self._todo[self._done - 1]()
                self._todo[self._done - 1] = None

    def is_done(self, until):
        return self._done >= until


class SimulatedEvent:
    def __init__(self, order, place):
        self._order, self._place = order, place

    def query(self):
        return self._order.is_done(self._place)

    def synchronize(self):
        self._order.run(self._place)


class SimulatedLane:
    def __init__(self, ring):
        self._lock, self._ring = threading.RLock(), ring
        self.copies, self.work = Order(self._lock), Order(self._lock)

    def begin(self):
        self.wait(self.work.add(lambda: None))

    def copy(self, out, given):
        assert out.dtype == given.dtype == torch.uint8
        assert out.is_contiguous()
        self.copies.add(lambda: out.copy_(given))

    def entered(self):
        return nullcontext()

    def copied(self, used=None):
        return self.copies.add(lambda: None)

    def allocate(self, nbytes):
        made = torch.empty(nbytes, dtype=torch.uint8)
        self.wait(self.work.add(lambda: made.fill_(0xA5)))  # values of its last owner
        self._ring.scratch.append(made.nbytes)
        return made

    def compute(self, use, after):
        def late():
            after.synchronize()
            with torch.no_grad():
                use()

        return self.work.add(late)

    def wait(self, event):
        self.copies.add(event.synchronize)

    def end(self):
        self.work.add(self.copied().synchronize)

    def synchronize(self):
        self.copied().synchronize()
        self.work.add(lambda: None).synchronize()


class SimulatedRing(Ring):
    """A ring to the simulated device, which records the buffers on both sides."""

    lanes_are = SimulatedLane

    def __init__(self, *args):
        super().__init__(*args)
        self.buffers, self.scratch, self.lanes = [], [], []
        self.pinned_now = self.pinned_most = 0

    def lane(self, device):
        self.lanes.append(self.lanes_are(self))
        return self.lanes[-1]

    def pinned(self, nbytes):
        self.buffers.append(nbytes)
        self.pinned_now += nbytes
        self.pinned_most = max(self.pinned_most, self.pinned_now)
        made = torch.full((nbytes,), 0x5A, dtype=torch.uint8)
        weakref.finalize(made, self._freed, nbytes)
        return made

    def _freed(self, nbytes):
        self.pinned_now -= nbytes
