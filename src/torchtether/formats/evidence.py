"""What a checkpoint must show before a format is asked, so that a plain one passes none of them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .entry import Contents, Format


class Evidence(NamedTuple):
    """Say, as data, what a format needs to see: it recognises nothing in a checkpoint that shows none of this.

    methods   ``quant_method`` of ``config.json``, in lower case
    files     names of JSON files beside the tensors
    config    keys of ``config.json``
    metadata  keys of the metadata in the files
    keys      text in the keys of tensors, each of which ends with a newline: ``".qweight\\n"``
    dtypes    dtypes of stored tensors
    packings  whether tensors in blocks of GGUF are evidence
    record    whether Weights in our own record are
    """

    methods: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    config: tuple[str, ...] = ()
    metadata: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    packings: bool = False
    record: bool = False

    def is_in(self, contents: Contents) -> bool:
        """Return whether ``contents`` show any of it."""
        return (
            contents.method in self.methods
            or any(name in contents.beside for name in self.files)
            or any(key in contents.config for key in self.config)
            or any(key in contents.metadata for key in self.metadata)
            or any(text in contents.key_text for text in self.keys)
            or not contents.dtypes.isdisjoint(self.dtypes)
            or (self.packings and contents.is_packed)
            or (self.record and bool(contents.record.weights))
        )


def may_recognise(format: Format, contents: Contents) -> bool:
    """Return whether ``format`` is to be asked: its ``evidence`` is there, or it does not say what that is."""
    evidence = getattr(format, "evidence", None)
    return not isinstance(evidence, Evidence) or evidence.is_in(contents)
