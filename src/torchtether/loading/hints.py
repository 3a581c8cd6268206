"""Faults that say which rule of ``rename=`` would make the names of a checkpoint those of the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ..geometry.views import Shape
from ..torch_private.modules import COMPILED
from .steps import Draft

_ORDER = ("q", "k", "v", "gate", "up")
"""How the names of pieces begin, in the order in which models join them; files have them in alphabetical order."""

_TRIED = 8
"""The most names of a checkpoint for which a prefix is searched, and the most parts of a name that may be one."""

_MOST = 64
"""The most prefixes that are tried, because a file may hold any names."""


def rename_hints(draft: Draft, strange: Sequence[str], known: set[str]) -> list[str]:
    """Return faults with a rule for names of the checkpoint, ``strange``, that are not ``known`` to the model.

    None if rules of a library have changed the names: a rule of the user would replace those.
    """
    given, rename = draft.given, draft.targets.options.rename
    if not strange or (rename is None and any(given.keys_of(name) != (name,) for name in strange)):
        return []
    advice = "Load with rename=[{}]" if rename is None else "Add {} at the end of rename="
    return (
        _of_compiled(strange, known, advice)
        or _of_prefix(strange, known, given.listed, advice)
        or _of_pieces(draft, strange, advice)
    )


def _of_compiled(strange: Sequence[str], known: set[str], advice: str) -> list[str]:
    """Return a fault if ``strange`` names are ``known``, but for what torch.compile puts into names.

    ``advice`` says what to do with a rule.
    """
    if all(name.replace(COMPILED, "") in known for name in strange):
        return [f"{COMPILED}*: torch.compile put this into names. {advice.format((re.escape(COMPILED), ''))}"]
    if {name.replace(COMPILED, "") for name in known if COMPILED in name}.issuperset(strange):
        what = "torch.compile has wrapped a module in the model, and put this into names"
        return [f"{COMPILED}*: {what}. Load first, or compile it in place: module.compile() keeps its names"]
    return []


def _of_prefix(strange: Sequence[str], known: set[str], listed: Iterable[str], advice: str) -> list[str]:
    """Return a fault if the names that a checkpoint has, ``strange``, fit those that are ``known`` but for a prefix."""
    if not known.isdisjoint(listed):
        return []
    places = {_parts_of(name)[0] for name in known}
    first = strange[0]
    for end in [i + 1 for i, letter in enumerate(first) if letter == "."][:_TRIED]:
        prefix = first[:end]
        cut = (name[end:] if name.startswith(prefix) else None for name in strange)
        if _fit(cut, known, places):
            rule = (f"^{re.escape(prefix)}", "")
            return [f"{prefix}*: the names of the model lack this prefix. {advice.format(rule)}"]
    ways = [{one.removesuffix(name) for one in known if one.endswith(f".{name}")} for name in strange[:_TRIED]]
    longer = min(filter(None, ways), key=len, default=set())  # those of the name that fits fewest
    fitting = (
        [one for one in longer if _fit((one + name for name in strange), known, places)] if len(longer) <= _MOST else []
    )
    if len(fitting) != 1:  # of several, such as those of all layers of a stack, none is meant more than another
        return []
    rule = ("^", fitting[0].replace("\\", r"\\"))
    return [f"{fitting[0]}*: the names of the checkpoint lack this prefix. {advice.format(rule)}"]


def _fit(names: Iterable[str | None], known: set[str], places: set[str]) -> bool:
    """Return whether ``names`` are ``known``: an eighth or more, and of the rest their ``places``, as of joined layers.

    The first name that does not fit ends it: files have many names, and each prefix that is tried would meet all.
    """
    found = count = 0
    for name in names:
        if name in known:
            found += 1
        elif name is None or _parts_of(name)[0] not in places:
            return False
        count += 1
    return found >= count / 8


def _of_pieces(draft: Draft, strange: Sequence[str], advice: str) -> list[str]:
    """Return a fault if layers are whole on one side and in pieces, with as many rows, on the other."""
    stored = {name: tuple(draft.given.spec(name).shape) for name in strange}
    shapes = {n: tuple(m.tensor.shape) for c in draft.targets.components for m in c.members for n in m.names}
    lacking = {name: shapes[name] for name in draft.missing if name in shapes}
    parts = {part for name in draft.given.listed for part in name.split(".")}
    names, said, rules = [], [], []
    for whole, leaves, sizes in _joined(stored, lacking)[:_TRIED]:
        names.append(f"*{whole}*")
        said.append(f"{whole}, where the model has {', '.join(leaves)}")
        options = f", sizes={sizes}" if len({*sizes}) > 1 else ""
        rules.append(f"tt.Split({_pattern(whole, parts)!r}, {leaves}{options})")
    for whole, leaves, _ in _joined(lacking, stored)[:_TRIED]:
        leaves = sorted(leaves, key=lambda leaf: [not leaf.startswith(first) for first in _ORDER])
        names.append(f"*{whole}*")
        said.append(f"{', '.join(leaves)}, where the model has {whole}")
        rules.append(f"tt.Concat({[_pattern(leaf, parts) for leaf in leaves]}, {whole!r})")
    if not rules:
        return []
    what = f"the checkpoint has {'; '.join(said)}. If they lie in this order"
    return [f"{', '.join(names)}: {what}: {advice.format(', '.join(rules))}"]


def _joined(wholes: Mapping[str, Shape], pieces: Mapping[str, Shape]) -> list[tuple[str, list[str], tuple[int, ...]]]:
    """Return the layers of ``wholes`` whose rows are those of all ``pieces`` beside them: name, pieces, their rows.

    Layers are left out if they differ in that, from one place in the model to another.
    """
    beside: dict[tuple[str, str], list[tuple[str, Shape]]] = {}
    for name, shape in pieces.items():
        place, leaf, last = _parts_of(name)
        beside.setdefault((place, last), []).append((leaf, shape))
    found: dict[str, set[tuple[tuple[str, ...], tuple[int, ...]]]] = {}
    for name, shape in wholes.items():
        place, leaf, last = _parts_of(name)
        some = beside.get((place, last), [])
        rows = tuple(one[0] for _, one in some if one and one[1:] == shape[1:])
        if shape and len(some) > 1 and len(rows) == len(some) and sum(rows) == shape[0]:
            found.setdefault(leaf, set()).add((tuple(one for one, _ in some), rows))
    return [(leaf, [*leaves], rows) for leaf, ways in found.items() if len(ways) == 1 for leaves, rows in ways]


def _parts_of(name: str) -> tuple[str, str, str]:
    """Return the place, the layer and the tensor in it of a name such as ``layers.0.q_proj.weight``."""
    layer, _, last = name.rpartition(".")
    place, _, leaf = layer.rpartition(".")
    return place, leaf, last


def _pattern(leaf: str, parts: set[str]) -> str:
    """Return a regex that finds ``leaf`` as a whole one of ``parts``, those of all names."""
    is_plain = all(leaf == part for part in parts if leaf in part)
    return re.escape(leaf) if is_plain else rf"\b{re.escape(leaf)}\b"
