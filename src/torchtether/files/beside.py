"""The JSON files beside the tensors, in which published formats keep what the tensors do not say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .opening import read_file

SINQ_SETTINGS = "model.safetensors.index.json.meta.json"

BESIDE = (
    *("config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json", "quanto_qmap.json"),
    SINQ_SETTINGS,
)
"""Their names; all but the first speak of nothing else."""

_LIMIT = 64 * 2**20  # bytes


def read_beside(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Return the objects in those of ``BESIDE`` that are in ``folder``, by file name.

    Raises CheckpointError for one that cannot be read or is no JSON.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for name in BESIDE:
        path = folder / name
        try:
            content = json.loads(read_file(path, _LIMIT))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"cannot be read: {error}", name=str(path)) from None
        if isinstance(content, dict):
            found[name] = content
    return found
