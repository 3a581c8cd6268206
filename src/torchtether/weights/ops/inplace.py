"""In-place ops: the op runs on the decoded values, and the result is encoded into the same storage."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._warnings import warn
from ...errors import SchemeError, TrainingWarning
from ...schemes import same_bits
from ...torch_private.dispatching import schema_of, tree_map_only, written_by
from ...torch_private.tensors import is_fake, storage_id
from ..contents import decodes_to
from ..dispatch import FOREIGN_WRITES, rule
from ..products import decoding
from ..spec import to_base
from ..weight import Weight
from .create import is_unfilled, mark_filled
from .padding import is_shard, mark_shard, whole_of
from .values import overloads

aten = torch.ops.aten

UPDATES = """
    add_ sub_ mul_ div_ addcmul_ addcdiv_ lerp_ addmm_ addmv_ addr_ baddbmm_ addbmm_ index_add_ scatter_add_
    _foreach_add_ _foreach_sub_ _foreach_mul_ _foreach_div_ _foreach_addcmul_ _foreach_addcdiv_ _foreach_lerp_
    _fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_
""".split()
"""Ops by which optimizers update a parameter: on a trained Weight the result is rounded stochastically."""

WRITES = """
    pow_ fmod_ remainder_ neg_
    abs_ sign_ square_ sqrt_ rsqrt_ reciprocal_ exp_ log_ sin_ cos_ tanh_ sigmoid_ erf_ erfinv_ relu_ round_
    trunc_ floor_ ceil_ frac_ clamp_ clamp_min_ clamp_max_ nan_to_num_ hardtanh_ copysign_ xlogy_ zero_ fill_
    masked_fill_ masked_scatter_ index_fill_ index_copy_ index_put_ scatter_ tril_ triu_
    fill_diagonal_ eye_ normal_ uniform_ bernoulli_ exponential_ random_ cauchy_ log_normal_ geometric_ renorm_
    _foreach_neg_ _foreach_abs_ _foreach_sqrt_ _foreach_zero_ _foreach_maximum_ _foreach_minimum_
    _foreach_clamp_min_ _foreach_clamp_max_ _foreach_pow_ _foreach_reciprocal_ _foreach_exp_ _foreach_sign_
    _foreach_copy_ embedding_renorm_
""".split()
"""Ops that set values: the result is rounded to nearest."""


_CONSTANTS = {f"aten::{name}" for name in ("zero_", "fill_", "_foreach_zero_")}
"""Ops by which optimizers begin their state."""


@rule(*overloads(WRITES, writes=True), kind="re-encoded")
def write(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``op`` on decoded values, then encode those that it wrote; all are encoded before one is stored."""
    written = written_by(op, args, kwargs, Weight)
    if schema_of(op).name not in _CONSTANTS:
        for weight in written:
            mark_filled(weight)
    if any(_master(weight) is not None for weight in written):
        return _write_in_float32(op, args, kwargs, is_update=False)
    decoded: dict[int, Tensor] = {}
    first = _first_of_parts(written)

    def values(weight: Weight) -> Tensor:
        if id(weight) not in decoded:
            one = first.get(id(weight), weight)
            decoded[id(weight)] = weight.values_of() if one is weight else _turned(values(one), one, weight)
        return decoded[id(weight)]

    plain_args, plain_kwargs = tree_map_only(Weight, values, (args, kwargs))
    op(*plain_args, **plain_kwargs)
    _store([(one, encode_like(one, decoded[id(one)])) for one in written if id(one) not in first])
    _count_versions(op, written)
    return args[0] if schema_of(op).returns else None


def _first_of_parts(written: Sequence[Weight]) -> dict[int, Weight]:
    """Return, by the id of each Weight over the parts of an earlier one (a transposed tie), that earlier one.

    Decoded apart, each would have the updates of its own name only, and the one stored last would win.
    """
    if len(written) < 2 or torch.compiler.is_compiling():
        return {}
    found: dict[object, Weight] = {}
    later: dict[int, Weight] = {}
    for weight in written:
        spec, parts = weight.spec, weight.parts.values()
        if spec.scheme.transparent or any(is_fake(part) for part in parts):
            continue
        places = [(storage_id(part), part.storage_offset()) for part in parts]
        one = found.setdefault((*places, spec.base, spec.dtype), weight)
        if one is not weight:
            later[id(weight)] = one
    return later


def _turned(values: Tensor, one: Weight, other: Weight) -> Tensor:
    """Return ``values``, which are those of ``one``, in the order of dimensions of ``other`` over the same parts."""
    return to_base(one.spec, values).permute(other.spec.order)


@rule(*overloads(UPDATES, writes=True), kind="re-encoded")
def update(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``op`` as ``write`` does; the results on trained Weights are rounded stochastically."""
    written = written_by(op, args, kwargs, Weight)
    _warn_of_state(written)
    if any(weight.is_trained and not weight.scheme.transparent for weight in written):
        return _write_in_float32(op, args, kwargs, is_update=True)
    return write(op, *args, **kwargs)


FOREIGN_WRITES.append(update)


def _warn_of_state(written: Sequence[Weight]) -> None:
    """Warn once of a Weight that is summed up, although no values were copied into it: state of an optimizer."""
    unfilled = filter(is_unfilled, written)
    found = next((one for one in unfilled if not one.scheme.transparent and _master(one) is None), None)
    if found is not None and is_unfilled not in _warned:
        _warned.add(is_unfilled)
        warn(
            f"{found.scheme} rounds what is added to a Weight that torch.empty_like or new_zeros made; "
            "if it is optimizer state, the optimizer must make it by torch.zeros_like, or it trains badly",
            TrainingWarning,
        )


def _write_in_float32(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_update: bool) -> Any:
    """Run ``op`` in float32, on the masters of Weights that have one, and encode the results.

    In 16 bits a small step would be lost before stochastic rounding.  Other 16-bit tensors take part in float32, too,
    and are rounded once.
    """
    wide: dict[int, tuple[Tensor, Tensor]] = {}
    written = {id(tensor): tensor for tensor in written_by(op, args, kwargs, Tensor)}
    weights = [tensor for tensor in written.values() if isinstance(tensor, Weight)]
    first = _first_of_parts(weights)

    def widened(tensor: Tensor) -> Tensor:
        if id(tensor) in wide:
            return wide[id(tensor)][1]
        made, one = tensor, first.get(id(tensor))
        if isinstance(tensor, Weight) and one is not None:
            made = _turned(widened(one), one, tensor)
        elif isinstance(tensor, Weight) and not tensor.scheme.transparent:
            spec, master = tensor.spec, _master(tensor) if id(tensor) in written else None
            dtype = torch.promote_types(spec.dtype, torch.float32)  # that of grads and state, as fused ops need
            dtype = dtype if master is None else torch.promote_types(dtype, master.dtype)
            decoded = decoding.values(tensor.scheme, tensor.parts, spec.base, dtype) if master is None else master
            made = decoded.to(dtype, copy=decoded is master).permute(spec.order)
        else:
            made = tensor.values_of() if isinstance(tensor, Weight) else tensor
            if made.is_floating_point() and made.itemsize == 2:
                made = made.float()
        wide[id(tensor)] = tensor, made
        return made

    plain_args, plain_kwargs = tree_map_only(Tensor, widened, (args, kwargs))
    op(*plain_args, **plain_kwargs)
    encode = _encode_update if is_update else encode_like
    _store([(one, encode(one, wide[id(one)][1])) for one in weights if id(one) not in first])
    _count_versions(op, weights)
    for key, tensor in written.items():
        held = tensor.values_of() if isinstance(tensor, Weight) and tensor.scheme.transparent else tensor
        if wide[key][1] is not held and not isinstance(held, Weight):
            held.copy_(wide[key][1])
    return args[0] if schema_of(op).returns else None


def _master(weight: Weight) -> Tensor | None:
    return None if weight.scheme.transparent else weight.scheme.master(weight.parts, weight.spec.base)


def _count_versions(op: Any, written: Sequence[Weight]) -> None:
    """Raise the version counters of ``written``, by which autograd finds that a tensor it has saved was changed.

    torch does so itself except for ``_foreach_*``, which count in the plain ops that they call.
    """
    if op.__name__.startswith("_foreach") and not torch.compiler.is_compiling():
        for weight in written:
            if not weight.is_inference():
                torch.autograd.graph.increment_version(weight)


def _store(encoded: list[tuple[Weight, dict[str, Tensor] | None]]) -> None:
    for weight, parts in encoded:
        if parts is not None:
            weight.set_parts(parts)


def _encode_update(weight: Weight, values: Tensor) -> dict[str, Tensor] | None:
    try:
        return _update(weight, values)
    except SchemeError as error:
        raise SchemeError(
            f"an in-place op on a Weight of shape {tuple(weight.shape)}: {error.what}",
            name=error.name,
            fix="If it is an optimizer's step, skip steps whose grads are not finite (before them "
            "torch.nn.utils.clip_grad_norm_ with error_if_nonfinite=True raises), and restore the optimizer's state, "
            "which has such values now.",
        ) from None


def _update(weight: Weight, values: Tensor) -> dict[str, Tensor] | None:
    """Return ``values`` encoded by ``Scheme.update`` if the Weight is trained, else rounded to nearest."""
    scheme = weight.scheme
    if scheme.transparent or not weight.is_trained or _master(weight) is not None:
        return encode_like(weight, values)
    base = to_base(weight.spec, values)
    parts = scheme.update(base, weight.parts, shrink=not weight._cut)
    if parts is not None:
        return parts
    if type(scheme) not in _warned:
        _warned.add(type(scheme))
        warn(
            f"{scheme} rounds updates to the nearest, so small ones have no effect; freeze it by requires_grad_(False)",
            TrainingWarning,
        )
    return _keeping_shared(weight, base, scheme.reencode(base, weight.parts))


_warned: set[Any] = set()


def encode_like(weight: Weight, values: Tensor) -> dict[str, Tensor] | None:
    """Return ``values`` encoded in the Weight's scheme and order; ``None`` if they are its storage (transparent).

    Scales that still fit are kept: with new scales every optimizer step would degrade the values, even at zero
    gradients.
    """
    if weight.scheme.transparent:
        return None
    base = to_base(weight.spec, values)
    return _keeping_shared(weight, base, weight.scheme.reencode(base, weight.parts))


def _keeping_shared(weight: Weight, values: Tensor, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``parts``, the encoding of ``values``, or one with the held scales if ``parts`` would change other rows.

    Only where that one is exact, as of zeros: ``nn.Embedding`` clears its padding row.
    """
    held = weight.parts
    if all(held[name].is_meta or same_bits(held[name], parts[name]) for name in weight._cut):
        return parts
    if "like" not in inspect.signature(weight.scheme.encode).parameters:
        return parts
    again = weight.scheme.encode(values, like=held)  # type: ignore[call-arg]
    is_exact = torch.equal(weight.scheme.decode(again, tuple(values.shape), values.dtype), values)
    return {**again, **{name: held[name] for name in weight._cut}} if is_exact else parts


@rule(aten.copy_.default)
def copy_(op: Any, held: Tensor, given: Tensor, non_blocking: bool = False) -> Tensor:
    """Write the values of ``given`` to ``held``, which keeps its scheme; parts of an equal scheme are copied.

    Values that ``held`` has already change nothing.
    """
    if not isinstance(held, Weight):
        op(held, given.values_of() if isinstance(given, Weight) else given, non_blocking)
        return held
    mark_filled(held)
    if held.scheme.transparent:
        op(held.values_of(), given.values_of() if isinstance(given, Weight) else given, non_blocking)
        return held
    if isinstance(given, Weight) and _same_geometry(given, held):
        target = held
        if given._cut and (is_shard(held) or whole_of(held) is not held):  # each rank takes its rows of one Weight
            mark_shard(whole_of(held), given._cut)
            target = held.map(lambda part: part, cut=())
        target.set_parts(given.parts)
        return held
    if isinstance(given, Weight) and given.spec.base == held.spec.base and given.spec.order == held.spec.order:
        adopted = held.scheme.adopt(given.scheme, given.parts, held.spec.base)
        if adopted is not None:
            held.set_parts(adopted)
            return held
    values = given.values_of() if isinstance(given, Weight) else given
    if held.device.type == "meta":
        return held  # as torch does: nothing to write to
    # moved first, as they meet held values and scales; not by ``non_blocking``, since a CPU would read them too early
    base = to_base(held.spec, values.to(held.device).expand(held.shape))
    if decodes_to(held, base):
        return held  # DDP writes back what it has read, and new scales would change it
    # Training or averaging makes many small changes, and with new scales each time a Weight of a symmetric scheme would
    # grow without end.  After any other write the result must not depend on the scales that were held before.
    is_step = not isinstance(given, Weight) and _is_step(held, base)
    parts = held.scheme.reencode(base, held.parts) if is_step else held.scheme.encode(base)
    held.set_parts(_keeping_shared(held, base, parts))
    return held


def _is_step(held: Weight, values: Tensor) -> bool:
    """Return whether ``values`` are so near to those of ``held`` that they may be those after a step of training.

    False if that cannot be seen, as in compiled code.
    """
    if not values.numel() or torch.compiler.is_compiling() or is_fake(values):
        return False
    rows = values.reshape(-1, values.shape[-1])
    count, squares = max(_PIECE // rows.shape[1], 1), rows.new_zeros(2, dtype=torch.float32)
    for start in range(0, rows.shape[0], count):
        some = rows[start : start + count].float()
        own = torch.empty_like(some)
        held.scheme.decode_into(held.parts, held.spec.base, start, start + some.shape[0], own)
        squares += torch.stack(((some - own).square().sum(), own.square().sum()))
    return bool(4 * squares[0] <= squares[1])


_PIECE = 2**22
"""Elements that are decoded at once to be compared."""


def _same_geometry(given: Weight, held: Weight) -> bool:
    a, b = given.spec, held.spec
    return a.scheme == b.scheme and a.base == b.base and a.order == b.order
