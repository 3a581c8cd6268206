"""The stored tensors of one module, by role, with checks of dtype and shape."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...files import Stored
from ...geometry.views import Shape
from ..entry import Contents, check_dtype

ROLES = ("weight", "packed", "scale", "zero_point", "shape", "g_idx", "global_scale")
SUFFIX = {role: "weight" if role == "weight" else f"weight_{role}" for role in ROLES}
"""The last component of the key of each role."""


class Module:
    """The keys of one module by role, with the contents of the checkpoint."""

    def __init__(self, name: str, keys: Mapping[str, str], contents: Contents, version: tuple[int, ...]) -> None:
        self.name, self.keys, self.contents, self.version = name, keys, contents, version
        self.weight_name = f"{name}.weight" if name else "weight"

    def __contains__(self, role: str) -> bool:
        return role in self.keys

    def stored(self, role: str) -> Stored:
        """Return the header of a tensor. Raise CheckpointError if it is absent."""
        if role not in self.keys:
            raise CheckpointError(f"its {SUFFIX[role]} is absent")
        return self.contents.tensors[self.keys[role]]

    def checked(self, role: str, dtypes: tuple[torch.dtype, ...], shape: Shape, why: str) -> Stored:
        """Return the header of a tensor. Raise CheckpointError if its dtype, or its shape except for 1s, is wrong."""
        stored = self.stored(role)
        check_dtype(SUFFIX[role], stored.dtype, dtypes)
        if [n for n in stored.shape if n != 1] != [n for n in shape if n != 1]:
            raise CheckpointError(f"its {SUFFIX[role]} has shape {stored.shape}, but {why} needs {shape}")
        return stored

    def read(self, role: str) -> Tensor:
        """Return the values of a small tensor."""
        return self.contents.read(self.keys[role])
