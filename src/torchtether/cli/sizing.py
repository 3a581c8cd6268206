"""Plan a scheme for each tensor, so that a checkpoint has a given size, without the model's code."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .._checks import as_size
from ..checkpoint.reader import Checkpoint
from ..conversion.sizing import CANDIDATES, QuantizePlan, allocate, options_of
from ..errors import SchemeError
from ..formats import Entry, Variant, Writable
from ..progress import Progress, ticking
from ..schemes import Scheme, int8
from ..weights.spec import WeightSpec

TO_PLAN = int8()
"""A placeholder, compared by identity, for a scheme that the plan will choose."""


def plan_for(
    checkpoint: Checkpoint, chosen: Mapping[str, Scheme], format: Writable, target_size: int | str, progress: Progress
) -> QuantizePlan:
    """Return a scheme for each tensor that ``chosen`` maps to ``TO_PLAN``, so that all take ``target_size`` bytes.

    Only schemes that ``format`` can store are considered. Tensors are read one by one. Raises ArgumentError for a size
    that is invalid or too small, and SchemeError if no scheme fits a tensor or values are not finite.
    """
    size = as_size(target_size, "target_size")
    planned = [name for name in checkpoint.entries if chosen.get(name) is TO_PLAN]
    others = 0
    for name, entry in checkpoint.entries.items():
        scheme = chosen.get(name)
        if scheme is None or scheme.transparent:
            others += checkpoint.nbytes(name)
        elif scheme is not TO_PLAN:
            others += scheme.nbytes(entry.shape, entry.dtype)
    options = {}
    with ticking(progress, sum(map(checkpoint.nbytes, planned)), "plan") as tick:
        for name in planned:
            known = _known(format, name, checkpoint.entries[name])
            options[name] = options_of(name, checkpoint.read_briefly(name), known)
            tick(checkpoint.nbytes(name))
    elements = {name: math.prod(checkpoint.entries[name].shape) for name in planned}
    return QuantizePlan(allocate(options, size - others, others), elements, others)


def _known(format: Writable, name: str, entry: Entry) -> list[Scheme | None]:
    """Return the candidate schemes that ``format`` can store, in its own variants."""
    known: list[Scheme | None] = []
    for scheme in CANDIDATES:
        if scheme is not None:
            scheme = format.variant_of(scheme) if isinstance(format, Variant) else scheme
            try:
                format.layout(name, WeightSpec.of(entry.shape, entry.dtype, scheme))
            except SchemeError:
                continue
        known.append(scheme)
    return known
