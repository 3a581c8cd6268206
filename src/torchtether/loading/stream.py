"""The execution of steps: first the tensors that get new memory, where an error does no harm, then those in place."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import describe_some
from .._interruptions import Deferred
from ..errors import LoadError, TetherError
from ..exchange.exchange import Exchange
from ..exchange.refusals import is_on_disk, refuse_groups
from ..files import Batch
from ..geometry.views import Shape
from ..progress import Tick
from ..renaming.renamed_checkpoint import RenamedCheckpoint
from ..ties.components import find_components
from ..ties.spans import member_view, span_tensor
from .contents import encode_whole, fill, mapped_contents, new_contents
from .steps import Step, names_of_weights

_CPU = torch.device("cpu")


def stream(
    model: nn.Module,
    given: RenamedCheckpoint,
    steps: Sequence[Step],
    mapped: Collection[int],
    optimizer: Any,
    done: set[str],
    tick: Tick,
    computed: Sequence[tuple[Tensor, Tensor]] = (),
) -> None:
    """Execute ``steps``, and add the names of each finished step to ``done``; steps with ids in ``mapped`` map files.

    ``computed`` has tensors on ``meta`` without a step, each with its new contents.

    The values of real tensors are encoded once before anything changes, to find those that a scheme cannot hold.
    """
    plain: list[Step] = []
    stored: list[tuple[str, Shape]] = []
    new: list[Step] = []
    renewed: list[Step] = []
    filled: list[Step] = []
    store = given.checkpoint.store
    for step in steps:
        is_meta = step.held.is_meta
        entry = given.stored(step.name) if step.is_as_stored and is_meta and step.device == _CPU else None
        if entry is not None and id(step) not in mapped:
            plain.append(step)
            stored.append((entry.keys["tensor"], entry.stride))
            continue
        (filled if step.in_place else new if is_meta else renewed).append(step)
        if not is_meta and step.is_encoded:
            encode_whole(step, given, tick)
    if filled and is_on_disk(model.modules()):
        refuse_groups("load")
    if filled or renewed:
        store.check_sizes()
    if plain or new or renewed or computed:
        with Exchange(model, optimizer=optimizer, verb="load") as exchange:
            held = [step.held for step in plain] + [m.tensor for step in new for m in step.component.members]
            held += [tensor for tensor, _ in computed]
            exchange.check(held + [member.tensor for step in renewed for member in step.component.members])
            is_away = any(step.device != _CPU for step in new)
            batch = Batch(store.ring if is_away else None)
            made = store.make_later(stored, batch)
            for step in new:
                exchange.safe_point()
                made += (
                    mapped_contents(step, given, tick) if id(step) in mapped else new_contents(step, given, tick, batch)
                )
            exchange.during(batch.run, tick)
            if is_away:
                exchange.during(store.ring.drain)
            made += [value for _, value in computed]
            exchange.put_each(held, made, is_own=True)
            exchange.know_weights(names_of_weights(new))
            done.update([step.name for step in plain])
            done.update(name for step in new for name in step.component.names)
            for step in renewed:
                exchange.safe_point()
                members = (member.tensor for member in step.component.members)
                exchange.put_together(zip(members, new_contents(step, given, tick), strict=True))
                exchange.know_weights(names_of_weights([step]))
                done.update(step.component.names)
    if filled:
        _fill(given, steps, filled, done, tick)
    store.release()  # so that every CUDA stream sees the values from now on


def move_buffers(model: nn.Module, places: Mapping[str, torch.device], optimizer: Any) -> None:
    """Move the buffers named in ``places``, and tensors that share their memory, to the devices given there."""
    components = [component for component in find_components(model) if component.names[0] in places]
    if not components:
        return
    with Exchange(model, optimizer=optimizer, verb="load") as exchange:
        exchange.check([member.tensor for component in components for member in component.members])
        for component in components:
            span = span_tensor(component).to(places[component.names[0]])
            exchange.put_together((member.tensor, member_view(span, member)) for member in component.members)


def set_extra_states(model: nn.Module, given: RenamedCheckpoint, names: Iterable[str]) -> None:
    """Pass each tensor ``names`` of ``given`` to ``set_extra_state`` of its module."""
    for name in names:
        model.get_submodule(name.rpartition(".")[0]).set_extra_state(given.read_briefly(name))


def _fill(given: RenamedCheckpoint, steps: Sequence[Step], filled: Sequence[Step], done: set[str], tick: Tick) -> None:
    """Fill the tensors of ``filled`` in place, one after the other; the other ``steps`` are done before.

    If an error comes after some, not all, of ``steps`` are done, it is raised again as one that names finished and
    unfinished tensors, of its own class if that is a TetherError, else as LoadError.
    """
    try:
        with Deferred() as signals:
            for step in filled:
                signals.deliver()
                fill(step, given, tick)
                done.update(step.component.names)
    except Exception as error:
        finished = [step.name for step in steps if done.issuperset(step.component.names)]
        left = [step.name for step in steps if not done.issuperset(step.component.names)]
        if not finished or not left:  # no tensor has been filled, or all have
            raise
        kind = type(error) if isinstance(error, TetherError) else LoadError
        raise kind(
            f"the load stopped after {len(finished)} of {len(steps)} tensors ({describe_some(finished)} done, "
            f"{describe_some(left)} not): {type(error).__name__}: {error}",
            fix="Load again from a whole checkpoint: the first tensor that is not done may have old and new values.",
        ) from error
    finally:
        torch.clear_autocast_cache()  # holds casts of the old values, which nothing else invalidates
