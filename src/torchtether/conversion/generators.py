"""Random generators while ops on ``meta`` are recorded: which numbers a seed in a constructor determines.

An op on ``meta`` draws no numbers, so the state of a generator does not tell whether it was seeded again: with the same
seed it is the same state. Its initial seed tells, because it is replaced by a label here. A state that is saved and set
again (``torch.random.fork_rng``) brings its label along.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ..torch_private.dispatching import tree_leaves
from ..torch_private.generators import relabel
from .programs import Program, Recipe, Ref
from .replaying import Replay

_CPU = torch.device("cpu")

_LABELS = count(0xB7E1_5162_8AED_2A6A)  # digits of e: nobody's seeds

_CALLER = next(_LABELS)
"""The label of the default generator as the caller has left it: what it gives is drawn when the record is replayed."""


class _Blocks:
    """The number of blocks in which the default generator has the caller's label, in all threads, and its own seed."""

    lock = threading.Lock()
    count = 0
    seed = 0


@contextmanager
def labelled() -> Iterator[None]:
    """Label the default generator as the caller's inside the block. Its numbers stay the same."""
    generator = torch.default_generator
    with _Blocks.lock:
        if _Blocks.count == 0:
            _Blocks.seed = generator.initial_seed()
            relabel(generator, _CALLER)
        _Blocks.count += 1
    try:
        yield
    finally:
        with _Blocks.lock:
            _Blocks.count -= 1
            if _Blocks.count == 0 and generator.initial_seed() == _CALLER:
                relabel(generator, _Blocks.seed)


class Generators:
    """Find the state from which an op would draw, and record it once for each seed as a memory of ``program``."""

    def __init__(self, program: Program, record: Callable[[Tensor], Ref]) -> None:
        self._program, self._record = program, record
        self._found: dict[int, tuple[torch.Generator, int, Ref]] = {}
        """By label: the generator, its own seed, and the memory that holds its state."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.release()

    def state_for(self, *arguments: Any) -> Ref | None:
        """Return the memory with the state of the generator that an op with ``arguments`` draws from.

        Return ``None`` for the numbers of the caller's default generator, and for generators of other devices.
        """
        given = [x for x in tree_leaves(arguments) if isinstance(x, torch.Generator)]
        generator = given[0] if given else torch.default_generator
        if generator.device != _CPU or generator.initial_seed() == _CALLER:
            return None
        if generator.initial_seed() not in self._found:
            seed, state = generator.initial_seed(), self._record(generator.get_state())
            label = next(_LABELS)
            relabel(generator, label)
            self._found[label] = generator, seed, state
        return self._found[generator.initial_seed()][-1]

    def release(self) -> None:
        """Give the generators their own seeds again. Those that were arguments go on as if ops had drawn from them."""
        for label, (generator, seed, state) in self._found.items():
            if generator.initial_seed() != label:
                continue
            relabel(generator, seed)
            if generator is not torch.default_generator and self._program.knows(state.memory):
                with suppress(Exception):  # materialize tells of an op that fails on real tensors
                    recipe = Recipe(self._program, state)
                    generator.set_state(Replay([recipe], _CPU).tensor(recipe))
        self._found.clear()
