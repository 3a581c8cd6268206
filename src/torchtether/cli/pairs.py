"""The key-value pairs of a file that has its own type, GGUF."""

from __future__ import annotations

import json

from ..checkpoint.reader import Checkpoint
from ..files import PAIRS, GgufFile, Pairs
from ..formats import Contained


def pairs_of(checkpoint: Checkpoint, format: Contained) -> Pairs:
    """Return the key-value pairs of a target file with its own type, made from ``config.json`` of the source.

    A source of the same type overrides them with its own pairs, byte by byte: readers check their types, too.
    """
    config, file = checkpoint.store.beside().get("config.json", {}), checkpoint.store.files[0]
    if checkpoint.format != format.name or not isinstance(file, GgufFile):
        return format.pairs(config)
    pairs = {**format.pairs(config, json.loads(file.header.metadata[PAIRS])), **file.raw_pairs()}
    pairs.pop("general.alignment", None)  # ours
    return pairs
