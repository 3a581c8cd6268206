"""Quantizing and dequantizing a model in place, under its optimizer, with its ties."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._checks import Model, as_module, check_callable
from ..errors import ConversionError, SchemeError
from ..exchange.exchange import Atomic, Exchange
from ..exchange.optimizer_state import Optimizers
from ..progress import Progress, ticking
from ..schemes import Mastered, Scheme
from ..schemes.looking import is_true
from ..ties.components import Component, Member, find_components, tie_of
from ..ties.names import is_sharded
from ..ties.spans import member_view, plain_values, span_tensor
from ..torch_private.observers import not_followed
from ..torch_private.tensors import local_or_itself
from ..weights.spec import Tie, order_of
from ..weights.weight import Weight
from .selection import Rules, schemes_for

_CHUNK = 2**20
"""Elements converted to float32 at once by the check for values that a scheme cannot hold."""

_LARGE = 200.0
"""Values up to this need no trial encoding: their scales fit every dtype of scales, the smallest of which reaches 448.
"""


@not_followed
def quantize(
    model: Model,
    rules: Rules,
    *,
    master: torch.dtype | None = None,
    optimizer: Optimizers = None,
    atomic: Atomic = "checked",
    progress: Progress = None,
) -> Model:
    """Make the parameters that ``rules`` choose Weights; each stays the same Parameter object.

    ``rules``: ``None``; a scheme or its name, for the weight of every ``nn.Linear``, of transformers' ``Conv1D``, and
    of experts stored as one tensor of 3 dimensions; or globs over parameter names, each with a scheme or ``None``, of
    which the first match wins.  A tied group is quantized once and stays tied.  A Weight that has the wanted scheme is
    not changed, one of another scheme is encoded again, and a tensor on ``meta`` becomes a Weight on ``meta``.
    Afterwards stock ``load_state_dict`` keeps the schemes and the objects of Weights, with or without ``assign=True``,
    which outside ``tt.swapping`` makes plain parameters new objects, as in torch.
    The state of ``optimizer`` (one or several) follows its parameters; ``atomic`` is as in ``tt.convert``.
    ``progress`` is ``True`` for a bar, or a function of (bytes done, bytes in all) of the tensors that are encoded.

    Weights that required grad still do, and can be trained: an optimizer's update is computed in float32 and rounded
    stochastically, so that its mean is exact (``torch.manual_seed`` makes it reproducible).  With a ``master`` dtype,
    such as ``torch.float32``, every Weight is ``tt.Mastered``: updates go to a tensor of that dtype beside the codes.

    Raises:
        RuleError, SchemeError: the rules or the values do not fit; nothing has changed.
        ConversionError: something holds a parameter; nothing has changed.
        OptimizerError: the optimizer belongs to another model; nothing has changed.

    >>> import torch, torchtether as tt
    >>> layer = torch.nn.Linear(8, 8); before = layer.weight
    >>> tt.quantize(layer, "int8").weight is before, isinstance(before, tt.Weight)
    (True, True)
    """
    given, model = model, as_module(model)
    check_callable(progress, "progress", or_flag=True)
    components = find_components(model)
    ties = {id(component): tie_of(component) for component in components}
    schemes = schemes_for(model, rules, [tie for tie in ties.values() if tie is not None])
    if master is not None:
        schemes = {n: one if one is None or one.transparent else Mastered(one, master) for n, one in schemes.items()}
    plan = []
    for component in components:
        tie = ties[id(component)]
        scheme = schemes.get(component.names[0] if tie is None else tie.owner)
        if scheme is not None and not _is_held_in(component, scheme):
            plan.append((component, tie, scheme))
    sizes = [_owner(component, tie).tensor.nbytes for component, tie, _ in plan]
    with (
        ticking(progress, sum(sizes), "quantize") as tick,
        Exchange(model, optimizer=optimizer, atomic=atomic, verb="quantize") as exchange,
    ):
        exchange.check([m.tensor for component, _, _ in plan for m in component.members], stay_weights=True)
        for component, tie, scheme in plan:  # here, because memory that the place forbids to change may hold no values
            exchange.during(_check_values, component, tie, scheme)
        for (component, tie, scheme), size in zip(plan, sizes, strict=True):
            exchange.safe_point()
            held = (member.tensor for member in component.members)
            exchange.put_together(zip(held, _encoded(component, tie, scheme), strict=True))
            exchange.know_weights(component.names)
            tick(size)
    return given


@not_followed
def dequantize(model: Model, *, optimizer: Optimizers = None, atomic: Atomic = "checked") -> Model:
    """Make every Weight of the model a plain tensor of its values; each stays the same Parameter object.

    Ties hold.  Afterwards stock ``load_state_dict`` keeps the Parameter objects when it is given a Weight.  The state
    of ``optimizer`` follows its parameters; ``atomic`` is as in ``tt.convert``.

    Raises:
        ConversionError: something holds a parameter; nothing has changed.
        TieError: two Weights share only some of their parts; nothing has changed.
        OptimizerError: the optimizer belongs to another model; nothing has changed.

    >>> import torch, torchtether as tt
    >>> layer = tt.quantize(torch.nn.Linear(8, 8), "int8"); before = layer.weight
    >>> tt.dequantize(layer).weight is before, isinstance(before, tt.Weight)
    (True, False)
    """
    given, model = model, as_module(model)
    components = find_components(model)
    for member in (member for component in components for member in component.members):
        if is_sharded(member.tensor) and isinstance(local_or_itself(member.tensor), Weight):
            raise ConversionError(
                "is a sharded Weight, which cannot be dequantized in place",
                name=member.names[0],
                fix="Dequantize the plain model, then shard it.",
            )
    plan = [c for c in components if any(isinstance(m.tensor, Weight) for m in c.members)]
    spans = [span_tensor(component) for component in plan]
    with Exchange(model, optimizer=optimizer, atomic=atomic, verb="dequantize") as exchange:
        weights = [[m for m in component.members if isinstance(m.tensor, Weight)] for component in plan]
        exchange.check([member.tensor for members in weights for member in members])
        for component, members, span in zip(plan, weights, spans, strict=True):
            exchange.safe_point()
            exchange.put_together(zip((member.tensor for member in members), _decoded(span, members), strict=True))
            exchange.keep_loading(component.names)
    return given


def _is_held_in(component: Component, scheme: Scheme) -> bool:
    return all(isinstance(m.tensor, Weight) and m.tensor.scheme == scheme for m in component.members)


def _decoded(span: Tensor, members: Sequence[Member]) -> list[Tensor]:
    """Return one plain tensor for each member, all over the same memory."""
    if isinstance(span, Weight):
        values = span.dequantize()
        return [values.as_strided(member.view.size, member.view.stride) for member in members]
    return [plain_values(member_view(span, member)).detach() for member in members]


def _encoded(component: Component, tie: Tie | None, scheme: Scheme) -> list[Weight]:
    """Return one Weight for each member, all over the same parts."""
    owner = _owner(component, tie)
    is_memory = not isinstance(owner.tensor, Weight) or owner.tensor.scheme.transparent  # else it has to be decoded
    if scheme.transparent and is_memory:
        return [Weight.encode(plain_values(m.tensor).detach(), scheme, tie=tie) for m in component.members]
    try:
        weight = Weight.encode(owner.tensor, scheme, tie=tie)
    except SchemeError as error:
        raise error.named(component.names[0]) from None
    made: list[Weight] = []
    for member in component.members:
        view = None if tie is None else tie.views[tie.names.index(member.names[0])]
        order = None if view is None else order_of(view, owner.tensor)
        made.append(weight.detach() if order is None else weight.permute(order))  # type: ignore[arg-type]
    return made


def _owner(component: Component, tie: Tie | None) -> Member:
    return next(m for m in component.members if tie is None or tie.owner in m.names)


def _check_values(component: Component, tie: Tie | None, scheme: Scheme) -> None:
    """Raise SchemeError if ``scheme`` cannot hold the values; encoding would raise after earlier tensors changed."""
    tensor = _owner(component, tie).tensor.detach()
    if scheme.transparent or tensor.is_meta:
        return
    values = plain_values(tensor)
    rows = values.view(1) if values.dim() == 0 else values
    if rows.numel() == 0:
        return
    chunks = rows.split(max(_CHUNK * rows.shape[0] // rows.numel(), 1))
    largest = torch.stack([chunk.float().abs().amax() for chunk in chunks]).amax()
    if is_true(largest <= _LARGE, unseen=True):  # one synchronisation with a GPU for each tensor
        return
    if not torch.isfinite(largest):
        bad = next(count for chunk in chunks if (count := int((~torch.isfinite(chunk.float())).sum())))
        raise SchemeError(
            f"{bad} or more of its {values.numel()} values are not finite in float32, so {scheme} cannot hold it",
            name=component.names[0],
            fix="Repair the values, or exclude it with a rule of None.",
        )
    try:
        scheme.encode(values)
    except SchemeError as error:
        raise error.named(component.names[0]) from None
