"""Ties: the names of a component, owner first; live ties are found, and compared with the records in Weights.

A live tie is object identity or shared storage.  A record (``spec.tie`` of a Weight) survives files, processes and
``meta``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from .._checks import as_module, describe
from ..errors import ArgumentError, TieError
from ..torch_private.tensors import local_or_itself
from ..weights.spec import Tie, tie_among
from ..weights.weight import Weight
from .components import Component, find_components, shared_components, tie_of
from .names import named_tensors, nearest


def find_ties(model: nn.Module) -> tuple[Tie, ...]:
    """Return every group of names that share memory, in module order.

    Names of a group share one object, one storage, overlapping views, or parts of Weights.

    The owner is the tensor that covers the others. Among several it is a contiguous one, then a Parameter before a
    buffer, the larger element, more dimensions, module order.  If none covers all, the owner is the first in memory,
    and views reach past it.

    Raises TieError where a ``Tie`` cannot express how memory is shared; ``tt.storage_map`` shows it.

    >>> import torch, torchtether as tt
    >>> model = torch.nn.ModuleDict({"emb": torch.nn.Embedding(5, 2), "head": torch.nn.Linear(2, 5, bias=False)})
    >>> model["head"].weight = model["emb"].weight
    >>> str(*tt.find_ties(model))
    'emb.weight = head.weight'
    """
    made = (tie_of(component) for component in shared_components(as_module(model)))
    return tuple(tie for tie in made if tie is not None)


def recorded_ties(model: nn.Module) -> tuple[Tie, ...]:
    """Return the ties that the model's Weights carry, each once, in module order.

    A record that has other names, those of a module around this one or inside it, or of before a layer was deleted, is
    left out while its tie is live: the Weights that carry it are one live tie of as many names.
    """
    tensors, carried = named_tensors(model), dict[Tie, list[str]]()
    for name, tensor in tensors.items():
        held = local_or_itself(tensor)  # a shard carries the record, too
        if isinstance(held, Weight) and held.tie is not None:
            carried.setdefault(held.tie, []).append(name)
    renamed = [tie for tie, names in carried.items() if set(names) != set(tie.names)]
    live = {frozenset(component.names) for component in shared_components(model)} if renamed else set()
    for tie in renamed:
        if len(carried[tie]) == len(tie.names) and frozenset(carried[tie]) in live:
            del carried[tie]
    return tuple(carried)


def as_ties(ties: object, name: str) -> tuple[Tie, ...]:
    """Return ``ties`` as a tuple. Raise ArgumentError unless all of them are ties."""
    found = tuple(ties) if isinstance(ties, Iterable) else (ties,)
    for one in found:
        if not isinstance(one, Tie):
            raise ArgumentError(f"holds {describe(one)}, not ties", name=name, fix="Give what tt.find_ties returned.")
    return found


def record_ties(model: nn.Module, names: Iterable[str] | None = None) -> None:
    """Set the record of each Weight among ``names`` (all, if ``None``) to the tie that is live now, or to none."""
    wanted = None if names is None else set(names)
    for component in find_components(model):
        if wanted is None or not wanted.isdisjoint(component.names):
            for member in component.members:
                if isinstance(member.tensor, Weight):
                    member.tensor._spec = member.tensor.spec.replace(tie=tie_of(component))


def forget_ties(model: nn.Module, name: str) -> None:
    """Remove ``name`` from the records of all Weights that are not tied to it: it was replaced since.

    Records in which a Weight has another name than here are left alone, because their ``name`` is another tensor.
    """
    for component in find_components(model):
        for names, held, *_ in component.members if name not in component.names else ():
            if not isinstance(held, Weight) or held.tie is None:
                continue
            recorded = set(held.tie.names)
            if name in recorded and not recorded.isdisjoint(names):
                rest = tie_among(held.tie, recorded - {name})
                held._spec = held.spec.replace(tie=rest or tie_of(component))


def check_ties(model: nn.Module, expected: Iterable[Tie] | None = None) -> None:
    """Raise TieError unless the live ties are those of ``expected``, or of the records that Weights carry.

    With ``expected`` every other live tie is an error. Without it only names in records are checked. If a record
    has names that its Weights no longer have, as after a layer was deleted, it is enough that these are tied.

    Raises:
        TieError: the tie of a tensor, the first of which it names, is gone, new, or has another geometry.

    >>> import torch, torchtether as tt
    >>> tt.check_ties(torch.nn.Linear(2, 2), expected=[tt.Tie(("weight", "bias"))])
    Traceback (most recent call last):
    torchtether.errors.TieError: bias: is not tied to weight, but recorded as tied. Call tt.tie(model, 'weight', ...
    """
    model = as_module(model)
    records = recorded_ties(model) if expected is None else as_ties(expected, "expected")
    components: dict[str, Component | None] = dict.fromkeys(named_tensors(model))
    components.update((name, component) for component in shared_components(model) for name in component.names)
    claimed: dict[str, Tie] = {}
    for tie in records:
        for name in tie.names:
            if name in claimed and not _equivalent(claimed[name], tie):
                raise TieError(f"two records disagree: {claimed[name]}, and {tie}", name=name, fix="Call tt.tie again.")
            claimed[name] = tie
        _check_one(tie, components, is_record=expected is None)
    if expected is not None:
        for component in components.values():
            live = None if component is None else tie_of(component)
            if live is not None and live.owner not in claimed:
                alias = live.aliases[0]
                raise TieError(
                    f"is tied to {live.owner}, but no record has this tie", name=alias, fix=how_to_untie(alias)
                )


def _check_one(tie: Tie, components: Mapping[str, Component | None], *, is_record: bool) -> None:
    """Raise TieError unless ``tie``, which Weights record if ``is_record``, is live.

    ``components`` maps every name of the model to its component, or to ``None`` if it shares memory with no other.
    """
    for name in tie.names:
        if name not in components:
            fix = f"The nearest name is {nearest(name, components)!r}." if nearest(name, components) else ""
            raise TieError(f"is not in the model, but in a tie record: {tie}", name=name, fix=fix)
    component = components[tie.owner]
    for name in tie.aliases:
        if component is None or components[name] is not component:
            forget = f" To forget the record, call tt.untie(model, {name!r})." if is_record else ""
            fix = how_to_tie(tie.owner, name) + forget
            raise TieError(f"is not tied to {tie.owner}, but recorded as tied", name=name, fix=fix)
    live = None if component is None else tie_of(component, tie.owner)
    assert live is not None  # a tie has two names, and all of them are in this component
    for name in live.names:
        if name not in tie.names:
            raise TieError(f"is tied to {tie.owner}, but the record has {tie}", name=name, fix=how_to_untie(name))
        now, then = _describe_alias(live, name), _describe_alias(tie, name)
        if not _agree(live, tie, name):
            is_object = tie.objects[tie.names.index(name)]
            fix = how_to_tie(tie.owner, name) if is_object else "Call tt.tie again."
            raise TieError(f"is {now}, but recorded as {then}", name=name, fix=fix)


def _agree(live: Tie, record: Tie, name: str) -> bool:
    """Return whether both ties give ``name`` the same view; its dtype may differ, since a record may be older."""
    i, j = live.names.index(name), record.names.index(name)
    now, then = live.views[i], record.views[j]
    if now is not None and then is not None:
        return (now.size, now.stride, now.offset) == (then.size, then.stride, then.offset)
    return now is then and live.objects[i] == record.objects[j]


def _equivalent(one: Tie, two: Tie) -> bool:
    return one.owner == two.owner and set(one.names) == set(two.names) and all(_agree(one, two, n) for n in one.names)


def _describe_alias(tie: Tie, name: str) -> str:
    view = tie.views[tie.names.index(name)]
    if view is not None:
        return f"a view (size {view.size}, stride {view.stride}, offset {view.offset}) of {tie.owner}"
    is_object = tie.objects[tie.names.index(name)]
    return f"the same object as {tie.owner}" if is_object else f"another tensor over the storage of {tie.owner}"


def how_to_tie(owner: str, alias: str) -> str:
    return f"Call tt.tie(model, {owner!r}, {alias!r})."


def how_to_untie(name: str) -> str:
    return f"Call tt.untie(model, {name!r})."
