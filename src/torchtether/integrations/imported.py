"""Libraries that the user has imported, and that must know of Weights before they see one."""

from __future__ import annotations

import sys
from contextlib import suppress


def tell_peft() -> None:
    """Let the layers of PEFT merge into Weights, if the user has imported PEFT."""
    if "peft" in sys.modules:
        with suppress(ImportError):  # one of another version
            from . import peft  # noqa: F401 - does so
