"""Storage maps: making, printing, drawing and comparing them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from torch import Tensor, nn

from .._checks import check_int, check_path, describe
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..errors import ArgumentError
from ..files import replacing
from ..torch_private.modules import uncompiled
from ..weights.spec import Tie
from .difference import changes_between, grouped
from .drawing import describe_bytes
from .facts import StorageGroup
from .live import groups_of
from .picture import bullets, draw, page, table, wide
from .rows import counted
from .stored import groups_of_checkpoint
from .terminal import lines_of

Mapped = nn.Module | Mapping[str, Tensor] | Checkpoint | str | PathLike[str]
"""The arguments of ``storage_map``: a module, a state dict, an open checkpoint or the path of one."""


def storage_map(model: Mapped) -> StorageMap:
    """Map the current storages of ``model``, and the parameters and buffers that share them.

    ``model`` is a module, a mapping from names to tensors, or a checkpoint or its path (``str`` or path object), of
    which only headers are read.  Tensors on ``meta``, Weights and other wrappers, sparse, complex and empty tensors are
    mapped too.  The map keeps no tensor alive; no value of the model is read or changed.

    Raises:
        ArgumentError: ``model`` is none of these, or the mapping holds something that is not a tensor.
        CheckpointError: the path cannot be read.

    >>> import torch, torchtether as tt
    >>> model = torch.nn.ModuleDict({"emb": torch.nn.Embedding(50, 8), "head": torch.nn.Linear(8, 50, bias=False)})
    >>> model["head"].weight = model["emb"].weight
    >>> print(tt.storage_map(model))
    1 storage of 1.6 kB: 1 tensor under 2 names, 1 tie; without ties it would be 3.2 kB
      1.6 kB  cpu  ████████████████████  emb.weight       float32 [50, 8]
                                           = head.weight  the same object
    """
    if isinstance(model, Checkpoint):
        return StorageMap(groups_of_checkpoint(model), str(model.path))
    if isinstance(model, (str, PathLike)):
        with open_checkpoint(model if isinstance(model, str) else Path(model)) as checkpoint:
            return storage_map(checkpoint)
    if isinstance(model, nn.Module):
        model = uncompiled(model)
        return StorageMap(groups_of(model), type(model).__name__)
    if not isinstance(model, Mapping):
        what = f"is {describe(model)}, not a module, a mapping of tensors, a checkpoint or its path"
        raise ArgumentError(what, name="model", fix="Give one of these.")
    return StorageMap(groups_of(model), type(model).__name__)


@dataclass(frozen=True)
class StorageMap:
    """Hold the storages of a model and their tensors, as ``groups``, at the time when the map was made.

    ``print(map)`` shows it; ``to_svg`` and ``to_html`` draw it; ``diff`` compares it with an earlier map.

    >>> import torch, torchtether as tt
    >>> both = torch.arange(6.0)
    >>> print(tt.storage_map({"all": both, "last": both[4:], "other": torch.zeros(2)}))
    2 storages of 32 B: 3 tensors under 3 names, 1 tie; without ties it would be 40 B
        24 B  cpu  ░░░░░░░░░░░░░░░░░░░░  storage  24 B
                   ████████████████████    all    float32 [6]
                                ███████    last   float32 [2], from byte 16
         8 B  cpu  ███████               other    float32 [2]
    """

    groups: tuple[StorageGroup, ...]
    title: str = field(default="", compare=False)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all storages, each counted once."""
        return sum(group.nbytes for group in self.groups)

    @property
    def names(self) -> tuple[str, ...]:
        """Return every name of every tensor."""
        return tuple(name for group in self.groups for name in group.names)

    @property
    def ties(self) -> tuple[Tie, ...]:
        """Return the ties, as ``tt.find_ties`` does."""
        return tuple(tie for group in self.groups for tie in group.ties)

    @property
    def summary(self) -> str:
        """Return the totals on one line."""
        storages, tensors = (sum(len(getattr(g, what)) for g in self.groups) for what in ("storages", "tensors"))
        words = f"{counted(storages, 'storage')} of {describe_bytes(self.nbytes)}: {counted(tensors, 'tensor')} under "
        words += counted(len(self.names), "name")
        lost = sum(s.nbytes - s.reached for group in self.groups for s in group.storages)
        sizes = {name: held.nbytes for group in self.groups for held in group.tensors for name in held.names}
        single = self.nbytes + sum(sizes.get(alias, 0) for tie in self.ties for alias in tie.aliases)
        decoded = sum(held.decoded - held.nbytes for group in self.groups for held in group.tensors if held.decoded)
        if self.ties:
            words += f", {counted(len(self.ties), 'tie')}; without ties it would be {describe_bytes(single)}"
        if decoded:
            words += f"; decoded, {describe_bytes(self.nbytes + decoded)}"
        return words + (f"; {describe_bytes(lost)} that no tensor reaches" if lost else "")

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return f"<StorageMap: {self.summary}>"

    def _repr_html_(self) -> str:
        return wide(draw(self.groups, self._heading()))

    def _heading(self) -> str:
        return f"{self.title}: {self.summary}" if self.title else self.summary

    def to_text(self, *, limit: int | None = 40, width: int = 120) -> str:
        """Return the map in ``width`` columns of text; similar groups share a line, and at most ``limit`` are shown.

        The length of a bar is proportional to the size of its storage, or logarithmic if sizes differ much.
        """
        check_int(width, "width")
        return "\n".join([self.summary, *lines_of(self.groups, limit, max(width, 60))])

    def to_svg(self, path: str | PathLike[str] | None = None, *, limit: int | None = 300) -> str:
        """Return the map as a self-contained SVG document; write it to ``path`` too, if given.

        Raises CheckpointError if ``path`` cannot be written.
        """
        return written(draw(self.groups, self._heading(), limit), path)

    def to_html(self, path: str | PathLike[str] | None = None, *, limit: int | None = 300) -> str:
        """Return the map as a self-contained HTML page with a table of all names; write it to ``path`` too, if given.

        Raises CheckpointError if ``path`` cannot be written.
        """
        sections = [("", wide(draw(self.groups, self.title, limit))), ("", table(self.groups))]
        return written(page(f"Storage map of {self.title}", self.summary, sections), path)

    def diff(self, earlier: StorageMap) -> StorageDiff:
        """Return the changes from the map ``earlier`` to this one, name by name.

        >>> import torch, torchtether as tt
        >>> model = torch.nn.Linear(4, 4, bias=False)
        >>> before = tt.storage_map(model)
        >>> _ = model.bfloat16()
        >>> print(tt.storage_map(model).diff(before))
        64 B in 1 storage -> 32 B in 1 storage, 0 ties -> 0 ties
        weight: float32 -> bfloat16; 64 B -> 32 B
        """
        if not isinstance(earlier, StorageMap):
            fix = "Give what tt.storage_map returned before."
            raise ArgumentError(f"is {describe(earlier)}, not a storage map", name="earlier", fix=fix)
        return StorageDiff(earlier, self)


@dataclass(frozen=True)
class StorageDiff:
    """Hold the changes from the map ``before`` to the map ``after``; ``print(diff)`` shows, ``to_html`` draws.

    ``changes`` are pairs of a name and a description of its change.  "another object" and "in other memory" are
    reported only if they are certain.

    >>> import torch, torchtether as tt
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    >>> before = tt.storage_map(model)
    >>> _ = tt.quantize(model, "int8")
    >>> print(tt.storage_map(model).diff(before))
    512 B in 2 storages -> 192 B in 4 storages, 0 ties -> 0 ties
    *.weight x2: plain -> int8; 256 B -> 96 B
    """

    before: StorageMap
    after: StorageMap

    @property
    def changes(self) -> tuple[tuple[str, str], ...]:
        """Return (name, change) for each name, in the order of the later map; then the names that are gone."""
        return changes_between(self.before.groups, self.after.groups)

    @property
    def summary(self) -> str:
        """Return bytes, storages and ties of both maps, on one line."""
        return ", ".join(f"{one} -> {two}" for one, two in zip(_size(self.before), _size(self.after), strict=True))

    def __str__(self) -> str:
        return "\n".join([self.summary, *(grouped(self.changes) or ["nothing has changed (values are not compared)"])])

    def __repr__(self) -> str:
        return f"<StorageDiff: {self.summary}; {counted(len(self.changes), 'name')} changed>"

    def __bool__(self) -> bool:
        """Return whether anything has changed."""
        return bool(self.changes)

    def to_html(self, path: str | PathLike[str] | None = None, *, limit: int | None = 300) -> str:
        """Return the changes and both maps as a self-contained HTML page; write it to ``path`` too, if given.

        Raises CheckpointError if ``path`` cannot be written.
        """
        sections = [("What changed", bullets(grouped(self.changes)))]
        for when, one in (("Before", self.before), ("After", self.after)):
            sections.append((when, wide(draw(one.groups, one._heading(), limit))))
        return written(page(f"{self.after.title}: before and after", self.summary, sections), path)


def _size(one: StorageMap) -> tuple[str, str]:
    storages = counted(sum(len(group.storages) for group in one.groups), "storage")
    return f"{describe_bytes(one.nbytes)} in {storages}", counted(len(one.ties), "tie")


def written(text: str, path: str | PathLike[str] | None) -> str:
    """Return ``text``; write it to ``path`` too, if given."""
    if path is not None:
        check_path(path)
        with replacing(Path(path)) as [file]:
            file.write(text.encode())
    return text
