"""The command ``torchtether``, from before its imports on, so that an interrupt of these is one line, too."""

import os
import signal
from typing import Any, NoReturn


def main() -> int:
    """Import the command line and run it; return its exit code, 130 after an interrupt at any moment."""
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:  # nothing is begun yet, and what is half imported cannot clean up
        signal.signal(signal.SIGINT, _end)
    from torchtether.cli.main import main as run

    try:
        if is_heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run()
    except KeyboardInterrupt:  # between the lines of ``run`` that say so themselves
        _end()


def _end(*_: Any) -> NoReturn:
    os.write(2, b"torchtether: interrupted\n")
    os._exit(130)
