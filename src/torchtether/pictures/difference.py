"""The difference of two storage maps, name by name: the changes by a load, a conversion or a quantization."""

from __future__ import annotations

from collections.abc import Sequence

from .drawing import clean, describe_bytes
from .facts import Held, StorageGroup
from .rows import counted, pattern_of

Known = tuple[Held, StorageGroup]


def changes_between(before: Sequence[StorageGroup], after: Sequence[StorageGroup]) -> tuple[tuple[str, str], ...]:
    """Return (name, change) for every name that changed, in the order of ``after``; then the names that are gone.

    Another object or other memory is reported only if it is certain.
    """
    old, new = _by_name(before), _by_name(after)
    partners, now_partners = _partners(before), _partners(after)
    made: list[tuple[str, str]] = []
    for name, known in new.items():
        words = ["is new"] if name not in old else _changed(old[name], known)
        words += _tie_words(name, partners.get(name, set()), now_partners.get(name, set()), old, new)
        if words:
            made.append((name, "; ".join(words)))
    made += [(name, "is gone") for name in old if name not in new]
    return tuple(made)


def grouped(changes: Sequence[tuple[str, str]]) -> list[str]:
    """Return the changes as lines; names that differ only in numbers and have the same change share a line."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, what in changes:
        alike.setdefault((pattern_of(name), pattern_of(what)), []).append(name)
    lines, change_of = [], dict(changes)
    for (pattern, _), names in alike.items():
        what = change_of[names[0]]
        lines.append(clean(f"{names[0]}: {what}" if len(names) == 1 else f"{pattern} x{len(names):,}: {what}"))
    return lines


def _by_name(groups: Sequence[StorageGroup]) -> dict[str, Known]:
    return {name: (held, group) for group in groups for held in group.tensors for name in held.names}


def _partners(groups: Sequence[StorageGroup]) -> dict[str, set[str]]:
    return {name: set(tie.names) - {name} for group in groups for tie in group.ties for name in tie.names}


def _changed(old: Known, new: Known) -> list[str]:
    (one, was), (two, now) = old, new
    words = []
    for what in ("shape", "dtype", "layout", "device", "kind"):
        before, after = getattr(one, what), getattr(two, what)
        if before != after and not (what == "kind" and "tensor" in (before, after)):
            shown = (list(before), list(after)) if what == "shape" else (before, after)
            words.append(f"{shown[0]} -> {shown[1]}")
    if one.scheme != two.scheme:
        words.append(f"{one.scheme or 'plain'} -> {two.scheme or 'plain'}")
    if one.nbytes != two.nbytes:
        words.append(f"{describe_bytes(one.nbytes)} -> {describe_bytes(two.nbytes)}")
    if one.requires_grad != two.requires_grad and "tensor" not in (one.kind, two.kind):
        words.append("requires grad" if two.requires_grad else "frozen")
    if one.identity and two.identity and one.identity != two.identity:
        words.append("another object")
    elif not words and not _memory_of(one, was).intersection(_memory_of(two, now)) and one.identity and two.nbytes:
        words.append("in other memory")
    return words


def _memory_of(held: Held, group: StorageGroup) -> set[int]:
    index = group.tensors.index(held)
    return {one.identity for one in group.storages if any(lane.owner == index for lane in one.lanes)}


def _tie_words(name: str, old: set[str], new: set[str], before: dict[str, Known], after: dict[str, Known]) -> list[str]:
    """Return descriptions of ties that ``name`` gained or lost; only names that both maps have are counted."""
    lost = sorted(other for other in old - new if other in after)
    made = sorted(other for other in new - old if other in before and name in before)
    words = [f"no longer tied to {_some(lost)}"] if lost and name in after else []
    return words + ([f"tied to {_some(made)}"] if made else [])


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {counted(len(names) - 3, 'name')} more" if len(names) > 3 else "")
