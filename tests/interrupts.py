"""Interrupts at chosen moments: the handler of SIGINT is called between two steps of a frame, as Python may do."""

import contextlib
import linecache
import os
import signal
import sys
import threading
from pathlib import Path

import torch

import torchtether
from torchtether.exchange import exchange

OURS = (str(Path(torchtether.__file__).parent), str(Path(torch.__file__).parent))


class Interrupt:
    """Run the handler of SIGINT before the ``at``-th step of frames of torch and of this package.

    Steps are calls, lines and, in files named in ``finely``, single bytecodes. ``steps`` counts them.
    """

    def __init__(self, at=None, finely=()):
        self.at, self.finely, self.steps = at, finely, 0
        self.entered = set()

    def trace(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if os.path.basename(frame.f_code.co_filename) in self.finely and not frame.f_trace_opcodes:
            frame.f_trace_opcodes = True
            sys.settrace(self.trace)  # Python 3.12 looks at the flag only then
        if event == "line" and self.ends_block(frame):
            return self.trace
        if event in ("call", "line", "opcode"):
            if self.steps == self.at:
                sys.settrace(None)
                self.steps += 1
                signal.getsignal(signal.SIGINT)(signal.SIGINT, frame)
                return None
            self.steps += 1
        return self.trace

    def ends_block(self, frame):
        """Return whether a ``with`` line is reached again for its ``__exit__``; Python runs no handler before that."""
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if not line.lstrip().startswith("with "):
            return False
        here = (id(frame), frame.f_lineno)
        if here in self.entered:
            self.entered.remove(here)
            return True
        self.entered.add(here)
        return False

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *args):
        sys.settrace(self.before)


def count_steps(function, finely=()):
    with Interrupt(None, finely) as counted:
        function()
    return counted.steps


def interrupted(function, at, finely=()):
    """Return whether ``function`` raised KeyboardInterrupt when it was interrupted at that step."""
    with Interrupt(at, finely):
        try:
            function()
        except KeyboardInterrupt:
            return True
    return False


@contextlib.contextmanager
def nothing_held():
    """Assert that the block restores signal handlers and torch's flags, and releases the lock of conversions."""
    handler, grad_mode, apply = signal.getsignal(signal.SIGINT), torch.is_grad_enabled(), torch.nn.Module._apply
    flag = torch.__future__.get_swap_module_params_on_conversion()
    yield
    assert signal.getsignal(signal.SIGINT) is handler
    assert torch.is_grad_enabled() is grad_mode
    assert torch.nn.Module._apply is apply
    assert torch.__future__.get_swap_module_params_on_conversion() == flag
    assert not torch.overrides._get_current_function_mode_stack()
    free = []

    def take():
        free.append(exchange.LOCK.acquire(timeout=5))
        if free[0]:
            exchange.LOCK.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    assert free == [True]
