"""The state of random generators, whose layout torch does not document."""

from __future__ import annotations

import sys

import torch


def relabel(generator: torch.Generator, seed: int) -> None:
    """Give a generator of the CPU another initial seed; it goes on with the same numbers.

    The state of a ``torch.Generator`` begins with the seed, in 8 bytes (``CPUGeneratorImplStateLegacy``).
    """
    state = generator.get_state()
    state.numpy()[:8] = list(seed.to_bytes(8, sys.byteorder))
    generator.set_state(state)
