"""Padding of a Weight's rows, as FSDP2 and DTensor ask for it; nothing else knows how it is noted.

A *padded* Weight is made by ``new_zeros`` with as many rows as the fullest rank has, and its first rows are filled.  A
cut of those may go through a block, because only padding lies behind.  They know the padded Weight, which is gathered
in their place, so that every rank gives equally many bytes.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..dispatch import ATTACHED
from ..weight import Weight

_PADDING = "_padding"
ATTACHED.add(_PADDING)


class Padding(NamedTuple):
    """Hold the padded Weight whose filled rows a Weight has; ``None`` where that Weight itself is padded."""

    whole: Weight | None


_ITSELF = Padding(None)


def is_padded(weight: Weight) -> bool:
    """Return whether ``weight`` was made to be filled with fewer rows than it has."""
    return weight.__dict__.get(_PADDING) is _ITSELF


def lacks_padding(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a Weight whose rows are not the filled rows of a padded one."""
    return isinstance(tensor, Weight) and whole_of(tensor) is tensor


def whole_of(weight: Weight) -> Weight:
    """Return the padded Weight whose filled rows ``weight`` has; ``weight`` itself if there is none."""
    padding: Padding | None = weight.__dict__.get(_PADDING)
    return weight if padding is None or padding.whole is None else padding.whole


def mark_padded(made: Weight) -> Weight:
    """Return ``made``, noted as padded."""
    made.__dict__[_PADDING] = _ITSELF
    return made


def mark_rows(made: Weight, weight: Weight) -> Weight:
    """Return ``made``, the first rows of ``weight``, noted as the filled rows if that is padded."""
    if is_padded(weight):
        made.__dict__[_PADDING] = Padding(weight)
    return made


def keep_padding(made: Weight, weight: Weight) -> Weight:
    """Return ``made``, another wrapper of the parts of ``weight``, padded as that is."""
    if _PADDING in weight.__dict__:
        made.__dict__[_PADDING] = weight.__dict__[_PADDING]
    return made


def copy_padding(made: Weight, weight: Weight) -> Weight:
    """Return ``made``, a copy of ``weight``, noted as padded if that is; filled rows lose their padding."""
    return mark_padded(made) if is_padded(weight) else made
