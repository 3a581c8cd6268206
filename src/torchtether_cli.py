"""Entry point of the command ``torchtether``: it handles an interrupt even while the package is imported."""

import os
import signal
from typing import Any, NoReturn


def main() -> int:
    """Import the command line, run it and return its exit code: 130 after an interrupt at any moment."""
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:  # no work has begun, and half-imported modules cannot clean up
        signal.signal(signal.SIGINT, _end)
    from torchtether.cli.main import main as run

    try:
        if is_heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run()
    except KeyboardInterrupt:  # outside the part of ``run`` that handles it
        _end()


def _end(*_: Any) -> NoReturn:
    os.write(2, b"torchtether: interrupted\n")
    os._exit(130)


if __name__ == "__main__":  # python -m torchtether_cli
    raise SystemExit(main())
