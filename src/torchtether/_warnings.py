"""Warnings that name the user's line, however many frames of torch and of this package lie between."""

from __future__ import annotations

import contextlib
import sys
import warnings
from os.path import dirname, join
from types import FrameType

import torch

_INSIDE = (join(dirname(torch.__file__), ""), join(dirname(__file__), ""), contextlib.__file__, "<frozen importlib")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the line of the innermost frame outside of torch and of this package; of the outermost if none is."""
    frame: FrameType = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_INSIDE) and frame.f_back is not None:
        frame = frame.f_back
    known = frame.f_globals
    registry = known.setdefault("__warningregistry__", {})
    place = frame.f_code.co_filename, frame.f_lineno, known.get("__name__")
    warnings.warn_explicit(message, category, *place, registry)
