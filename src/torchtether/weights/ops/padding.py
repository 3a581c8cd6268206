"""Padding of a Weight's rows for FSDP2 and DTensor, and the mark of a shard; only this module knows how both are kept.

``new_zeros`` makes a *padded* Weight with as many rows as the fullest rank has, and its first rows are filled.  The
view of the filled rows may end within a block, because only padding follows.  It refers to the padded Weight, which is
gathered in its place, so that every rank sends the same number of bytes.

A *shard* is one rank's rows of a Weight, with a copy of each part that all rows share.  No rank may change its copy
alone: the codes of the other ranks would decode to other values.  Shards of another Weight may be copied into it.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..dispatch import ATTACHED
from ..weight import Weight

_PADDING, _SHARD = "_padding", "_shard"
ATTACHED.update((_PADDING, _SHARD))


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
    return keep_shard(made, weight)


def keep_padding(made: Weight, weight: Weight) -> Weight:
    """Return ``made``, another wrapper of the parts of ``weight``, with the marks of ``weight``."""
    if _PADDING in weight.__dict__:
        made.__dict__[_PADDING] = weight.__dict__[_PADDING]
    return keep_shard(made, weight)


def copy_padding(made: Weight, weight: Weight) -> Weight:
    """Return ``made``, a copy of ``weight``, marked as padded if ``weight`` is; filled rows lose their padding."""
    return keep_shard(mark_padded(made) if is_padded(weight) else made, weight)


def is_shard(weight: Weight) -> bool:
    """Return whether ``weight`` is one rank's rows of a Weight."""
    return _SHARD in weight.__dict__


def mark_shard(made: Weight, shared: tuple[str, ...]) -> Weight:
    """Return ``made``, marked as one rank's rows of a Weight whose rows share the parts ``shared``."""
    if shared:
        made.__dict__[_SHARD] = True
        made._cut = shared
    return made


def keep_shard(made: Weight, weight: Weight) -> Weight:
    """Return ``made``, rows of ``weight`` or a copy of it, marked as a shard if ``weight`` is."""
    return mark_shard(made, weight._cut) if is_shard(weight) else made
