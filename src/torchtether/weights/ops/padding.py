"""Padding of a Weight's rows for FSDP2 and DTensor; only this module knows how it is recorded.

``new_zeros`` makes a *padded* Weight with as many rows as the fullest rank has, and its first rows are filled.  The
view of the filled rows may end within a block, because only padding follows.  It refers to the padded Weight, which is
gathered in its place, so that every rank sends the same number of bytes.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..dispatch import ATTACHED
from ..weight import Weight

_PADDING = "_padding"
ATTACHED.add(_PADDING)


class Padding(NamedTuple):
    """Mark a Weight as the filled rows of the padded Weight ``whole``, or with ``None`` as padded itself."""

    whole: Weight | None


_ITSELF = Padding(None)


def is_padded(weight: Weight) -> bool:
    """Return whether ``weight`` is padded: made to be filled with fewer rows than it has."""
    return weight.__dict__.get(_PADDING) is _ITSELF


def lacks_padding(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a Weight whose rows are not the filled rows of a padded one."""
    return isinstance(tensor, Weight) and whole_of(tensor) is tensor


def whole_of(weight: Weight) -> Weight:
    """Return the padded Weight of which ``weight`` is the filled rows; ``weight`` itself if there is none."""
    padding: Padding | None = weight.__dict__.get(_PADDING)
    return weight if padding is None or padding.whole is None else padding.whole


def mark_padded(made: Weight) -> Weight:
    """Return ``made``, marked as padded."""
    made.__dict__[_PADDING] = _ITSELF
    return made


def mark_rows(made: Weight, weight: Weight) -> Weight:
    """Return ``made``, the first rows of ``weight``, marked as its filled rows if ``weight`` is padded."""
    if is_padded(weight):
        made.__dict__[_PADDING] = Padding(weight)
    return made


def keep_padding(made: Weight, weight: Weight) -> Weight:
    """Return ``made``, another wrapper of the parts of ``weight``, with the mark of ``weight``."""
    if _PADDING in weight.__dict__:
        made.__dict__[_PADDING] = weight.__dict__[_PADDING]
    return made


def copy_padding(made: Weight, weight: Weight) -> Weight:
    """Return ``made``, a copy of ``weight``, marked as padded if ``weight`` is; filled rows lose their padding."""
    return mark_padded(made) if is_padded(weight) else made
