"""GGUF files in parts, ``NAME-00001-of-00003.gguf``: the first has the pairs, each has some of the tensors.

Each part says its number from 0 (``split.no``), how many there are (``split.count``), and the number of the tensors of
all (``split.tensors.count``). Names of five digits are what llama.cpp and gguf-py write and look for.
Source: ``gguf-split`` of llama.cpp; the ``gguf`` package.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import CheckpointError
from .gguf import GgufFile
from .index import GGUF_SUFFIX
from .reader import TensorFile

_PART = re.compile(r"(?P<before>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL | re.ASCII)


def names_of_parts(name: str) -> list[str]:
    """Return the names of all parts of the file that has the part ``name``; only ``name`` if it is not that of a part.

    >>> names_of_parts("a-00002-of-00002.gguf"), names_of_parts("b.gguf")
    (['a-00001-of-00002.gguf', 'a-00002-of-00002.gguf'], ['b.gguf'])
    """
    found = _part(name)
    if found is None:
        return [name]
    return [f"{found['before']}-{i:05d}-of-{found['count']}{GGUF_SUFFIX}" for i in range(1, int(found["count"]) + 1)]


def _part(name: str) -> re.Match[str] | None:
    """Return the match of ``name`` if it is that of a part, with a number that is not more than the count."""
    found = _PART.fullmatch(name)
    return found if found is not None and 1 <= int(found["number"]) <= int(found["count"]) else None


def first_parts(names: Iterable[str]) -> list[str]:
    """Return the name of the first part of each GGUF file of which ``names`` has a part."""
    found = ((name, _part(name)) for name in names)
    return sorted({f"{one['before']}-00001-of-{one['count']}{GGUF_SUFFIX}" if one else name for name, one in found})


def paths_of_parts(path: Path) -> tuple[Path, ...]:
    """Return all parts of the file at ``path``, by its name. Raise CheckpointError if one does not exist."""
    paths = tuple(map(path.with_name, names_of_parts(path.name)))
    for other in paths:
        if len(paths) > 1 and not other.is_file():
            raise CheckpointError(f"the part {other.name} does not exist", name=str(path), fix="Fetch every part.")
    return paths


def check_parts(files: Sequence[TensorFile]) -> None:
    """Raise CheckpointError unless ``files`` are the parts of one GGUF file, in order, or no parts."""
    found = sum(len(one.header.tensors) for one in files)
    for number, file in enumerate(files):
        part = file.part if isinstance(file, GgufFile) else None
        if part is None and len(files) == 1:
            return
        if part is None:
            if isinstance(file, GgufFile):
                what = f"its name says that it is one of {len(files)} parts, and it says nothing of parts"
                raise CheckpointError(what, name=file.name, fix="Give it the name of a whole file.")
            continue
        if (part.number, part.count) != (number, len(files)):
            raise CheckpointError(
                f"it says that it is part {part.number + 1} of {part.count}, here it is {number + 1} of {len(files)}",
                name=file.name,
                fix=f"Call the parts NAME-00001-of-{part.count:05d}{GGUF_SUFFIX} and so on, in one folder.",
            )
        if part.tensors not in (None, found):
            what = f"it says that all parts have {part.tensors} tensors, and they have {found}"
            raise CheckpointError(what, name=file.name, fix="Fetch all parts of one file.")
