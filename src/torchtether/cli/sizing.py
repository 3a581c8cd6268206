"""Plan a scheme for each tensor, so that a checkpoint has a given size, without the model's code."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import torch

from .._checks import as_size
from ..checkpoint.reader import Checkpoint
from ..checkpoint.writer import ShardGroup
from ..conversion.sizing import CANDIDATES, Option, QuantizePlan, allocate, options_of
from ..errors import ArgumentError, SchemeError, TetherError
from ..formats import Entry, Variant, Writable
from ..progress import Progress, ticking
from ..schemes import Scheme, fp8, int8, nvfp4, sinq
from ..weights.spec import WeightSpec

TO_PLAN = int8()
"""A placeholder, compared by identity, for a scheme that the plan will choose."""


_OTHERS = (*(sinq(bits) for bits in (8, 6, 5, 4, 3, 2)), fp8("tensor"), nvfp4())
"""More candidates for a format that stores at most one of the others."""


_INSTEAD: Mapping[Scheme, Sequence[Scheme]] = {int8(): (int8(32, scale_dtype=torch.float16),)}
"""What is tried if a format cannot store a candidate: GGUF has 8 bits in blocks of 32 only, as Q8_0."""


def plan_for(
    checkpoint: Checkpoint,
    chosen: Mapping[str, Scheme],
    format: Writable,
    target_size: int | str,
    progress: Progress,
    check: Callable[[QuantizePlan], object],
) -> QuantizePlan:
    """Return a scheme for each tensor that ``chosen`` maps to ``TO_PLAN``, so that all take ``target_size`` bytes.

    Only schemes that ``format`` can store are considered. If it cannot store them side by side, so that ``check``
    raises SchemeError for the plan, it is the best plan in which all quantized tensors have the same scheme. Tensors
    are read one by one. Raises ArgumentError for a size that is invalid or too small, and SchemeError if no scheme fits
    a tensor or values are not finite.
    """
    size = as_size(target_size, "target_size")
    planned = [name for name in checkpoint.entries if chosen.get(name) is TO_PLAN]
    others = 0
    for name, entry in checkpoint.entries.items():
        scheme = chosen.get(name)
        if scheme is None or scheme.transparent:
            others += checkpoint.nbytes(name)
        elif scheme is not TO_PLAN:
            others += _stored_nbytes(format, name, entry, scheme)
    options: dict[str, list[Option]] = {}
    with ticking(progress, sum(map(checkpoint.nbytes, planned)), "plan") as tick:
        for name in planned:
            known = _known(format, name, checkpoint.entries[name])
            found = options_of(name, checkpoint.read_briefly(name), list(known))
            options[name] = [option._replace(nbytes=known[option.scheme]) for option in found]
            tick(checkpoint.nbytes(name))
    elements = {name: math.prod(checkpoint.entries[name].shape) for name in planned}

    def plan_in(schemes: Collection[Scheme | None]) -> QuantizePlan:
        some = {n: [one for one in ones if one.scheme in (None, *schemes)] for n, ones in options.items()}
        made = QuantizePlan(allocate(some, size - others, others, "target_size"), elements, others)
        check(made)
        return made

    every = {one.scheme for ones in options.values() for one in ones} - {None}
    if not every:
        raise SchemeError("it can store no scheme that a plan chooses from", name=format.name, fix="Give --scheme.")
    try:
        return plan_in(every)
    except SchemeError as error:
        refusals: list[TetherError] = [error]
    plans: list[QuantizePlan] = []
    for scheme in every:
        try:
            plans.append(plan_in([scheme]))
        except (SchemeError, ArgumentError) as error:
            refusals.append(error)
    if not plans:
        raise min(refusals, key=lambda one: (isinstance(one, SchemeError), str(one)))
    return min(plans, key=lambda plan: (plan.error, str(plan)))


def _known(format: Writable, name: str, entry: Entry) -> dict[Scheme | None, int]:
    """Return the candidate schemes that ``format`` can store, in its own variants, with the bytes that they take."""
    known: dict[Scheme | None, int] = {}
    for candidates in (CANDIDATES, _OTHERS):
        for scheme in candidates if len(known) < 3 else ():
            if scheme is None:
                known[None] = entry.dtype.itemsize * math.prod(entry.shape)
                continue
            for one in (scheme, *_INSTEAD.get(scheme, ())):
                one = format.variant_of(one) if isinstance(format, Variant) else one
                with suppress(SchemeError):
                    known[one] = _stored_nbytes(format, name, entry, one)
                    break
    return known


def _stored_nbytes(format: Writable, name: str, entry: Entry, scheme: Scheme) -> int:
    """Return the bytes of the tensors that ``format`` stores for ``name`` in ``scheme``. Raise its SchemeError."""
    group = ShardGroup(format)
    group.put_weight(name, WeightSpec.of(entry.shape, entry.dtype, scheme))
    return group.nbytes
