"""Saving from many ranks: one rank writes each file, and the files are those that one process would write."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._checks import check_callable, check_path
from ..checkpoint.saver import Aliases, HeldGroup, Masters, as_saved, check_values, config_of, plan_groups
from ..checkpoint.writer import FilePlan, ShardGroup, check_keys, check_target, plan_files, write_shard
from ..errors import CheckpointError
from ..exchange.optimizer_state import Optimizers
from ..files import FolderChange, beside, folder_for, put_in_place
from ..formats import Contained, Writable, writable
from ..geometry.shards import box_of, local_of
from ..progress import Progress, ticking
from .flat import save_dcp
from .optimizers import FOLDER, optimizer_tensors
from .ranks import Ranks
from .shadows import Shadowed
from .transfers import Item, Transfers


def save(
    model: nn.Module | Mapping[str, Tensor],
    path: Path | str,
    *,
    format: Literal["safetensors", "dcp"] | str = "safetensors",
    aliases: Aliases = "drop",
    masters: Masters = "keep",
    max_shard_size: int | str | None = None,
    optimizer: Optimizers = None,
    progress: Progress = None,
    process_group: Any = None,
) -> None:
    """Write the tensors of ``model``, sharded over ranks, to ``path``: the bytes that one process would write.

    The arguments are those of ``tt.save``, except ``metadata``; ``"safetensors"`` is its ``"native"``. Every rank of
    ``process_group`` (by default all) calls it with the same arguments, and sees the same file system. The files of a
    save in shards (``max_shard_size``) are written in parallel, each by one rank. The other ranks send it their rows,
    one tensor at a time. A tensor that is not sharded is written as the first rank holds it.

    With ``optimizer`` (one, or several) its state is stored too, in the folder ``optimizer`` beside the model's files,
    once for a tied parameter; ``tt.distributed.load(..., optimizer=)`` restores it, on any number of ranks.

    ``format="dcp"`` writes ``tt.distributed.state_dict`` to a new folder by ``torch.distributed.checkpoint``, each rank
    its own rows. ``tt.load`` and ``tt.open`` read it too.

    Each file is written beside its target. When all are on the disk, the first rank renames them, as ``tt.save`` does.
    If a rank fails or is killed before that, the old checkpoint stays whole, and every rank raises.

    Raises:
        CheckpointError: as ``tt.save``; the ranks hold different tensors; or another rank failed.
        TieError, SchemeError: as ``tt.save``.
        ConversionError: the model is under DDP or FSDP1.

    >>> import torch, torchtether as tt, tempfile
    >>> from torchtether import distributed
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     distributed.save(torch.nn.Linear(2, 3), folder)
    ...     print(list(tt.open(folder)))
    ['bias', 'weight']
    """
    ranks = Ranks(process_group)
    with ranks.all_or_none(CheckpointError):
        check_path(path)
        check_callable(progress, "progress", or_flag=True)
        path, works = Path(path), list[_Save]()
        if format != "dcp":
            works.append(_Save(ranks, model, path, format, aliases, masters, max_shard_size))
        elif max_shard_size is not None:
            what = "cannot be given with format='dcp', which writes one file per rank"
            raise CheckpointError(what, name="max_shard_size", fix="Leave it out.")
        if works and optimizer is not None:
            if not works[0].files.is_folder:
                what = "is a single file, and the state of an optimizer is saved in a folder"
                raise CheckpointError(what, name=str(path), fix="Give the path of a folder.")
            state = optimizer_tensors(as_saved(model), optimizer)
            works.insert(0, _Save(ranks, state, path / FOLDER, "native", "drop", "keep", max_shard_size))
    options = {"format": format, "aliases": aliases, "masters": masters, "max_shard_size": max_shard_size}
    arguments = {name: repr(value) for name, value in options.items()}
    arguments["optimizer"] = "not given" if optimizer is None else "given"
    if format != "dcp":  # all ranks write to the folder of the first
        arguments["path"] = str(path)
    ranks.check_same(arguments, CheckpointError)
    if format == "dcp":
        save_dcp(ranks, model, path, optimizer, aliases, masters)
        return
    for work in works:
        work.agree()
    with contextlib.ExitStack() as stack:
        for work in works:
            with ranks.all_or_none(CheckpointError):
                work.write(stack, progress)
        everything = ranks.gather({k: v for work in works for k, v in work.written.items()}, CheckpointError)
        written = {target: what for one in everything for target, what in one.items()}
        with ranks.all_or_none(CheckpointError):
            if ranks.rank == 0:
                put_in_place(*(work.change(written) for work in works))


class _Save:
    """Write the files of this rank; every rank plans all files."""

    def __init__(
        self,
        ranks: Ranks,
        model: nn.Module | Mapping[str, Tensor],
        path: Path,
        format: str,
        aliases: Aliases,
        masters: Masters,
        max_shard_size: int | str | None,
    ) -> None:
        target: Writable = writable("native" if format == "safetensors" else format)
        if isinstance(target, Contained):
            raise CheckpointError(
                f"{target.name!r} can only be written by one process", name="format", fix="Use tt.save."
            )
        found = Shadowed(model)
        self._ranks, self._found, self._sharded = ranks, found, found.sharded
        self._boxes = {name: _box(name, tensor) for name, tensor in found.sharded.items()}
        check_target(path, target, max_shard_size=max_shard_size)
        groups = plan_groups(found.shadow, target, aliases, masters)
        check_keys(groups)
        if ranks.is_alone:
            self._check_alone()
        self.files: FilePlan = plan_files(groups, path, target, max_shard_size, config=partial(config_of, model))
        self.written: dict[Path, tuple[Path, str]] = {}
        """By target, the temporary path of each file that this rank has written, and the digest of its header."""

    def _check_alone(self) -> None:
        """Raise CheckpointError unless this rank, the only one, holds the whole of each tensor."""
        for name, tensor in self._sharded.items():
            box = self._boxes[name]
            if any(box_ != (0, size) for box_, size in zip(box, tensor.shape, strict=True)):
                raise CheckpointError(
                    f"this process holds only {box} of shape {tuple(tensor.shape)}, and there are no other ranks",
                    name=name,
                )

    def agree(self) -> None:
        """Raise CheckpointError unless all ranks plan the same files; exchange what each of them holds."""
        layout = [(str(file), [(g.layout, g.ties, g.weights) for g in shard]) for file, shard in self._shards()]
        digest = hashlib.sha256(repr(layout).encode()).hexdigest()
        found = self._ranks.gather((digest, self._boxes), CheckpointError)
        for rank, (other, _) in enumerate(found):
            if other != found[0][0]:
                raise CheckpointError(
                    f"rank {rank} holds other tensors than rank 0, or other ties or schemes",
                    fix="Save the same model on all ranks.",
                )
        self._transfers = Transfers(self._ranks, self._sharded, [boxes for _, boxes in found])

    def _shards(self) -> list[tuple[Path, list[ShardGroup]]]:
        """Return the files to write, each with its groups."""
        return list(zip(self.files.targets, self.files.shards, strict=True))

    def write(self, stack: contextlib.ExitStack, progress: Progress) -> None:
        """Write this rank's files beside their targets; ``stack`` removes them when it is closed."""
        count, rank = self._ranks.count, self._ranks.rank
        mine = self._shards()[rank::count]
        total = sum(group.nbytes for _, shard in mine for group in shard)
        error: BaseException | None = None
        rounds = itertools.zip_longest(*(self._shards()[r::count] for r in range(count)))
        turns = [[() if one is None else tuple(self._items(one[1])) for one in wave] for wave in rounds]
        try:
            tick = stack.enter_context(ticking(progress, total, "save"))
            stack.enter_context(folder_for(self.files.folder))
            opened = stack.enter_context(beside(*(target for target, _ in mine)))
        except BaseException as first:
            error = first
        for i, turn in enumerate(turns):
            steps = self._transfers.run(turn)
            try:
                if error is None and i < len(mine):
                    target, shard = mine[i]
                    header = write_shard(shard, _packed(steps), opened.files[i], str(target), tick)
                    self.written[target] = opened.pairs[i][0], header
            except BaseException as first:
                error = first
            for _ in steps:  # other writers wait for this rank's rows, even if it failed
                pass
        error = error or self._transfers.error
        if error is not None:
            raise error
        opened.sync()

    def change(self, written: Mapping[Path, tuple[Path, str]]) -> FolderChange:
        """Return the change that renames the files of all ranks; ``written`` is the union of theirs."""
        pairs = [(written[target][0], target) for target in self.files.targets]
        return self.files.change(pairs, {target.name: written[target][1] for target in self.files.targets})

    def _items(self, shard: list[ShardGroup]) -> Iterator[Item]:
        """Yield the items of the groups of one file."""
        for group in shard:
            assert isinstance(group, HeldGroup)
            for key, tensor in group.stored.items():
                yield Item(key, tensor, self._found.name(tensor))
            for name, weight in group.packed.items():
                yield Item(name, weight, self._found.name(weight), group.format)


def _packed(steps: Iterator[tuple[Item, Tensor] | None]) -> Iterator[tuple[str, Tensor]]:
    """Yield the stored tensors of each item, with their keys."""
    for step in steps:
        if step is not None:
            item, tensor = step
            yield from item.format.pack(item.key, tensor).items() if item.format else ((item.key, tensor),)


def _box(name: str, tensor: DTensor) -> Any:
    """Return this rank's box of ``tensor``; raise CheckpointError if it holds none, or no values."""
    check_values(name, local_of(tensor))
    try:
        return box_of(tensor)
    except NotImplementedError as error:
        raise CheckpointError(str(error), name=name, fix="Redistribute it first.") from None
