"""The laws of tensor subclasses, by topic, in the order in which they are reported."""

from . import copies, loads, modules, processes, steps
from .subject import Subject

LAWS = (*copies.LAWS, *loads.LAWS, *modules.LAWS, *steps.LAWS, *processes.LAWS)
"""All of them, optional ones included."""

__all__ = ["LAWS", "Subject"]
