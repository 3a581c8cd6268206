"""The ranks of a process group: gathering values from all, and raising on all if one fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from .._checks import describe, first_line
from ..errors import ArgumentError, LoadError, TetherError


class Ranks:
    """Hold the ranks of ``group`` (by default all); a process without a process group is alone, and never waits.

    >>> Ranks().gather("here")
    ['here']
    """

    def __init__(self, group: Any = None) -> None:
        if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
            fix = "Give one of torch.distributed, or None for all ranks."
            raise ArgumentError(f"is {describe(group)}, not a process group", name="process_group", fix=fix)
        is_up = dist.is_available() and dist.is_initialized()
        self.is_fake = is_up and dist.get_backend(group) == "fake"
        """Whether the backend is torch's ``fake``, which simulates a world size and has no other ranks."""
        self.is_alone = not is_up or self.is_fake or dist.get_world_size(group) == 1
        self.group = group
        self.rank = 0 if self.is_alone else dist.get_rank(group)
        self.count = 1 if self.is_alone else dist.get_world_size(group)

    def gather(self, value: Any, kind: type[TetherError] = LoadError) -> list[Any]:
        """Return the values of all ranks, by rank; every rank must call it. Raise ``kind`` if a rank is gone."""
        if self.is_alone:
            return [value]
        found: list[Any] = [None] * self.count
        try:
            dist.all_gather_object(found, value, group=self.group)
        except RuntimeError as error:
            raise kind(f"another rank has stopped or cannot be reached: {first_line(error)}") from error
        return found

    def check_same(self, arguments: Mapping[str, str], kind: type[TetherError]) -> None:
        """Raise ``kind`` on every rank, naming the argument, if ranks give different texts for one."""
        for rank, others in enumerate(everyone := self.gather(dict(arguments), kind)):
            for name, text in others.items():
                if text != everyone[0][name]:
                    what = f"is {everyone[0][name]} on rank 0 and {text} on rank {rank}"
                    raise kind(what, name=name, fix="Give all ranks the same arguments.")

    @contextlib.contextmanager
    def all_or_none(self, kind: type[TetherError], fix: str = "Nothing was done on the other ranks.") -> Iterator[None]:
        """Raise on every rank if the block raises on one: there its own error, elsewhere one of ``kind``, with ``fix``.

        No rank may leave the block early otherwise, or wait inside it for a rank that may have failed.
        """
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(Exception):  # the first error matters, not that other ranks are gone
                self.gather(_describe_error(error))
            raise
        for rank, message in enumerate(self.gather("", kind)):
            if message:
                raise kind(f"rank {rank} failed: {message}", fix=fix)


def _describe_error(error: BaseException) -> str:
    """Return the text of ``error``; if it is not one of ours, its type and first line."""
    if isinstance(error, TetherError):
        return str(error)
    kind = type(error).__name__
    return f"{kind}: {first_line(error)}" if str(error) else kind
