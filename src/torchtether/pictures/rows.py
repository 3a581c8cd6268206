"""The rows of a storage map, for the terminal and for the picture: the text of each row, and the facts of its bar."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .._checks import check_int
from .drawing import describe_bytes
from .facts import Held, Lane, Storage, StorageGroup

_LANES = 24
"""The most names, lanes or storages of one group that are shown one by one."""


@dataclass(frozen=True, slots=True)
class MapRow:
    """Hold one row. Its bar covers the bytes ``start`` to ``stop`` of a storage of ``total`` bytes.

    ``nbytes`` are the bytes of a storage, on its first row. ``links`` are the numbers of the ties that the row belongs
    to; ``count`` is the number of similar groups that the row stands for.
    """

    label: str
    facts: str
    depth: int = 0
    colour: str = "tensor"
    nbytes: int | None = None
    device: str = ""
    total: int = 0
    start: int = 0
    stop: int = 0
    is_dense: bool = True
    is_frame: bool = False
    is_meta: bool = False
    is_first: bool = False
    links: tuple[int, ...] = ()
    count: int = 1
    note: str = ""


def rows_of(groups: Sequence[StorageGroup], limit: int | None) -> list[MapRow]:
    """Return the rows of at most ``limit`` of ``groups``, similar ones once with their count, the rest as a last row.

    Groups with ties are chosen before others, and large ones before small ones; they are shown in their own order.
    """
    alike: dict[object, list[StorageGroup]] = {}
    for group in groups:
        alike.setdefault(_pattern(group), []).append(group)
    found = list(alike.values())
    shown = set(range(len(found)))
    if limit is not None:
        check_int(limit, "limit")
    if limit is not None and len(found) > limit:
        ranked = sorted(shown, key=lambda i: (not found[i][0].ties, -found[i][0].nbytes * len(found[i]), i))
        shown = set(ranked[: max(limit, 1)])
    made: list[MapRow] = []
    tied = 0
    for i, like in enumerate(found):
        if i in shown:
            made += _group_rows(like, tied)
            tied += len(like[0].ties)
    rest = [group for i, like in enumerate(found) if i not in shown for group in like]
    if rest:
        names = sum(len(group.names) for group in rest)
        storages = sum(len(group.storages) for group in rest)
        size = describe_bytes(sum(group.nbytes for group in rest))
        made.append(
            MapRow(f"and {counted(names, 'name')} more", f"{size} in {counted(storages, 'storage')}", is_first=True)
        )
    return made


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, such as ``3 names``.

    >>> counted(1, "tie"), counted(2, "storage")
    ('1 tie', '2 storages')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def pattern_of(name: str) -> str:
    """Replace every number in a name by a star, so that names of similar layers become equal.

    >>> pattern_of("model.layers.31.q_proj.weight")
    'model.layers.*.q_proj.weight'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _pattern(group: StorageGroup) -> object:
    """Return the key by which groups are similar: all facts but numbers in names, identities and notes on places."""
    tensors = tuple(
        replace(held, names=tuple(map(pattern_of, held.names)), identity=0, nbytes=0) for held in group.tensors
    )
    storages = tuple((storage.nbytes, storage.device, storage.lanes) for storage in group.storages)
    return tensors, storages, tuple(tuple(map(pattern_of, tie.names)) for tie in group.ties)


def _group_rows(like: Sequence[StorageGroup], tied: int) -> Iterator[MapRow]:
    group, count = like[0], len(like)
    links = {name: (tied + i,) for i, tie in enumerate(group.ties) for name in tie.names}

    def label(name: str) -> str:
        return name if count == 1 else pattern_of(name)

    def names_of(held: Held, depth: int, first: MapRow) -> Iterator[MapRow]:
        yield first
        for i, name in enumerate(held.names[1:]):
            if i == _LANES:
                yield MapRow(f"= {counted(len(held.names) - 1 - i, 'name')} more", "", depth, links=first.links)
                return
            yield MapRow(f"= {label(name)}", "the same object", depth, first.colour, links=links.get(name, ()))

    if _is_simple(group):
        (held,), storage = group.tensors, group.storages[0] if group.storages else None
        name = held.names[0]
        bar = _bar(storage, storage.lanes[0], _colour(held)) if storage else {"device": held.device}
        note = storage.where if storage and count == 1 else ""
        row = MapRow(label(name), _facts(held), is_first=True, links=links.get(name, ()), count=count, note=note, **bar)  # type: ignore[arg-type]
        yield from names_of(held, 1, row)
        return
    is_first = True
    for held in group.tensors:
        if _is_wrapped(held, group):
            name = held.names[0]
            row = MapRow(label(name), _facts(held), colour=_colour(held), is_first=is_first,
                      links=links.get(name, ()), count=count if is_first else 1, device=held.device)  # fmt: skip
            yield from names_of(held, 1, row)
            is_first = False
    for i, storage in enumerate(group.storages):
        if i == _LANES:
            size = sum(one.nbytes for one in group.storages[i:])
            yield MapRow(f"{counted(len(group.storages) - i, 'storage')} more", describe_bytes(size), 1)
            return
        note = storage.where if count == 1 else ""
        is_framed = len(storage.lanes) > 1 or not _covers(storage.lanes[0], storage)
        if is_framed:
            used = "" if storage.reached == storage.nbytes else f", {describe_bytes(storage.reached)} of it reached"
            yield MapRow(
                "storage",
                f"{describe_bytes(storage.nbytes)}{used}",
                colour="rest",
                nbytes=storage.nbytes,
                is_frame=True,
                device=storage.device, total=storage.nbytes, stop=storage.nbytes, is_meta=storage.device == "meta",
                is_first=is_first, count=count if is_first else 1, note=note,
            )  # fmt: skip
            is_first = False
        for j, lane in enumerate(storage.lanes):
            if j == _LANES:
                yield MapRow(f"{counted(len(storage.lanes) - j, 'tensor')} more", "", 1)
                break
            held = group.tensors[lane.owner]
            colour = "part" if lane.part else _colour(held)
            bar = _bar(storage, lane, colour)
            if is_framed:
                bar |= {"nbytes": None, "device": ""}
            if lane.part:
                which = "" if len(group.tensors) == 1 else f" of {label(held.names[0])}"
                yield MapRow(f"{lane.part}{which}", _lane_facts(lane), 2 if is_framed else 1, note=note, **bar)  # type: ignore[arg-type]
            else:
                name = held.names[0]
                row = MapRow(label(name), _facts(held, lane), 1, links=links.get(name, ()), is_first=is_first, **bar)  # type: ignore[arg-type]
                yield from names_of(held, 2, row)
            is_first = False


def _is_wrapped(held: Held, group: StorageGroup) -> bool:
    """Return whether ``held`` has no lane of its own: a Weight or other wrapper, sparse, or without memory."""
    index = group.tensors.index(held)
    return all(lane.part for storage in group.storages for lane in storage.lanes if lane.owner == index)


def _is_simple(group: StorageGroup) -> bool:
    if len(group.tensors) != 1:
        return False
    if not group.storages:
        return True
    lanes = [lane for storage in group.storages for lane in storage.lanes]
    return len(lanes) == 1 and not lanes[0].part and _covers(lanes[0], group.storages[0])


def _covers(lane: Lane, storage: Storage) -> bool:
    return lane.is_dense and lane.start == 0 and lane.stop >= storage.nbytes


def _bar(storage: Storage, lane: Lane, colour: str) -> dict[str, object]:
    return {
        "nbytes": storage.nbytes,
        "device": storage.device,
        "total": storage.nbytes,
        "start": lane.start,
        "stop": lane.stop,
        "is_dense": lane.is_dense,
        "is_meta": storage.device == "meta",
        "colour": colour,
    }


def _colour(held: Held) -> str:
    return "part" if held.decoded else held.kind


def _facts(held: Held, lane: Lane | None = None) -> str:
    words = ["buffer"] if held.kind == "buffer" else []
    if held.kind == "parameter" and not held.requires_grad:
        words.append("frozen")
    words.append(f"{held.dtype} {list(held.shape)}")
    if held.layout not in ("contiguous", ""):
        words[-1] += f" {held.layout}" + (f" {list(held.stride)}" if held.stride else "")
    if lane is not None and lane.start:
        words.append(f"from byte {lane.start:,}")
    if held.decoded:
        words.append(f"{describe_bytes(held.nbytes)}, decoded {describe_bytes(held.decoded)}")
    if held.scheme:
        words.append(held.scheme)
    if held.note:
        words.append(held.note)
    return ", ".join(words)


def _lane_facts(lane: Lane) -> str:
    words = f"{lane.dtype} {list(lane.shape)}"
    if lane.layout not in ("contiguous", ""):
        words += f" {lane.layout} {list(lane.stride)}"
    return words + (f", from byte {lane.start:,}" if lane.start else "")
