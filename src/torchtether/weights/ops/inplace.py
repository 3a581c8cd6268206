"""In-place ops: the op runs on the decoded values, and the result is encoded into the same storage."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ...schemes import same_bits
from ...torch_private.dispatching import schema_of, tree_map_only
from ..dispatch import rule
from ..weight import Weight
from .values import overloads

aten = torch.ops.aten

WRITES = """
    add_ sub_ mul_ div_ pow_ fmod_ remainder_ addcmul_ addcdiv_ lerp_ addmm_ addmv_ addr_ baddbmm_ addbmm_ neg_
    abs_ sign_ square_ sqrt_ rsqrt_ reciprocal_ exp_ log_ sin_ cos_ tanh_ sigmoid_ erf_ erfinv_ relu_ round_
    trunc_ floor_ ceil_ frac_ clamp_ clamp_min_ clamp_max_ nan_to_num_ hardtanh_ copysign_ xlogy_ zero_ fill_
    masked_fill_ masked_scatter_ index_fill_ index_add_ index_copy_ index_put_ scatter_ scatter_add_ tril_ triu_
    fill_diagonal_ eye_ normal_ uniform_ bernoulli_ exponential_ random_ cauchy_ log_normal_ geometric_ renorm_
    _foreach_add_ _foreach_sub_ _foreach_mul_ _foreach_div_ _foreach_addcmul_ _foreach_addcdiv_ _foreach_lerp_
    _foreach_neg_ _foreach_abs_ _foreach_sqrt_ _foreach_zero_ _foreach_maximum_ _foreach_minimum_
    _foreach_clamp_min_ _foreach_clamp_max_ _foreach_pow_ _foreach_reciprocal_ _foreach_exp_ _foreach_sign_
    _foreach_copy_ _fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_ embedding_renorm_
""".split()


@rule(*overloads(WRITES, writes=True), kind="re-encoded")
def write(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``op`` on the values of every Weight, then encode those that it wrote; all are encoded before one is."""
    decoded: dict[int, tuple[Weight, Tensor]] = {}

    def values(weight: Weight) -> Tensor:
        return decoded.setdefault(id(weight), (weight, weight.values_of()))[1]

    plain_args, plain_kwargs = tree_map_only(Weight, values, (args, kwargs))
    op(*plain_args, **plain_kwargs)
    written: dict[int, Weight] = {}
    for argument, value in zip(schema_of(op).arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, Weight):
                    written[id(item)] = item
    encoded = [(weight, encode_like(weight, decoded[key][1])) for key, weight in written.items()]
    for weight, parts in encoded:
        if parts is not None:
            weight.set_parts(parts)
    return args[0] if schema_of(op).returns else None


def encode_like(weight: Weight, values: Tensor) -> dict[str, Tensor] | None:
    """Encode ``values`` in the Weight's scheme and order; return ``None`` if they are its storage already.

    Scales that still suit stay, or each step of an optimizer would wear the values down, also with zero gradients.
    """
    if weight.scheme.transparent:
        return None
    spec = weight.spec
    base = values if spec.is_contiguous else values.permute([spec.order.index(d) for d in range(values.dim())])
    return _beside(weight, base, weight.scheme.reencode(base, weight.parts))


def _beside(weight: Weight, values: Tensor, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``parts`` of ``values``, or those under the held scales if only they spare the parts of other rows.

    That is where the held scales hold the values exactly, as they do zeros: ``nn.Embedding`` clears its padding row.
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
    """Write the values of ``given`` to ``held``, which keeps its scheme; equal schemes copy part by part."""
    if not isinstance(held, Weight):
        op(held, given.values_of() if isinstance(given, Weight) else given, non_blocking)
        return held
    if held.scheme.transparent:
        op(held.values_of(), given.values_of() if isinstance(given, Weight) else given, non_blocking)
        return held
    if isinstance(given, Weight) and _same_geometry(given, held):
        held.set_parts(given.parts)
        return held
    values = given.values_of() if isinstance(given, Weight) else given
    if held.device.type == "meta":
        return held  # as torch does: nothing to write to
    spec = held.spec
    base = values.expand(held.shape).permute([spec.order.index(d) for d in range(held.dim())])
    held.set_parts(_beside(held, base, spec.scheme.encode(base)))  # afresh: the same parts, whatever was held before
    return held


def _same_geometry(given: Weight, held: Weight) -> bool:
    a, b = given.spec, held.spec
    return a.scheme == b.scheme and a.base == b.base and a.order == b.order
