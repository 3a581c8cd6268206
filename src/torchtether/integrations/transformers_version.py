"""The versions of transformers in which quantizers can read Weights, and in which we know the conversions of names."""

from __future__ import annotations

import transformers

from ..torch_private.versions import minor_of

READS_WEIGHTS = "5.23"
"""Before 5.21 ``from_pretrained`` leaves what it should rebuild from parts random; before 5.23 it checks no shapes."""

CONVERTS_NAMES = "5.9"
"""Before it, the operations that convert names take other arguments."""


def is_before(version: str) -> bool:
    """Return whether this transformers is older than ``version``."""
    return minor_of(transformers.__version__) < minor_of(version)


def check_version() -> None:
    """Raise ImportError if ``from_pretrained`` of this transformers cannot quantize, or cannot read Weights."""
    if is_before(READS_WEIGHTS):
        raise ImportError(
            f"transformers: this is {transformers.__version__}, and from_pretrained with torchtether needs "
            f"{READS_WEIGHTS} or newer. Update transformers, or use tt.quantize, tt.load and tt.save."
        )
