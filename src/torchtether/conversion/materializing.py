"""Materializing models on ``meta`` with the values that their constructors computed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._checks import Model, as_device, as_module, check_callable, describe_some
from .._warnings import warn
from ..errors import ConversionError
from ..exchange.exchange import Exchange
from ..exchange.optimizer_state import Optimizers, check_belongs, optimizers_of
from ..geometry.blocks import is_strided
from ..ties.components import Component, find_components, tie_of
from ..ties.names import is_sharded, named_tensors
from ..ties.spans import member_view, plain_values, span_tensor
from ..torch_private.observers import not_followed
from ..torch_private.tensors import base_of, local_or_itself
from ..weights.module_load import encoded_as
from ..weights.weight import Weight
from .attributes import unregistered
from .building import RECIPE, RECIPES
from .converting import converted
from .programs import Copy, Recipe
from .replaying import Replay


@not_followed
def materialize(
    model: Model,
    device: torch.device | str | int = "cpu",
    *,
    init: Callable[[nn.Module], Any] | None = None,
    optimizer: Optimizers = None,
) -> Model:
    """Give every tensor of ``model`` that is on ``meta`` memory and values on ``device``; it stays the same object.

    Tensors built inside ``on_meta`` get the values that their constructors computed: parameters by the same random
    initialisation, buffers exactly.  Other tensors are initialised by ``reset_parameters`` of their module.  If
    ``init`` is given, ``init(module)`` is called instead of that, after recorded values are in place, for every module
    with a new tensor in or below it, children first, as ``Module.apply`` does.  Each tensor is initialised once, by the
    module of its owner; ties and views hold.  Tensors with memory are not touched.  Of a recorded tensor that is
    sharded each rank computes all and keeps its part; replicas get that of their first rank, so all ranks must make
    this call.  State that ``optimizer`` (one or several) has on ``meta`` has no values; the next step makes it again.
    After any error but that of a tensor that was not set, out of memory and Ctrl-C included, all are on ``meta`` again,
    unless something that the error holds, a view in a frame, forbids it: a note of the error says so.

    Raises:
        OptimizerError: the optimizer belongs to another model; nothing has changed.
        ConversionError: a tensor has neither record nor ``reset_parameters`` nor ``init``, or something holds it;
            nothing has changed.  Or ``reset_parameters`` did not set a tensor, which the error names.

    >>> import torch, torchtether as tt
    >>> with torch.device("meta"):
    ...     layer = torch.nn.Linear(2, 2)
    >>> before = layer.weight; tt.materialize(layer).weight is before, before.device.type
    (True, 'cpu')
    """
    given, model = model, as_module(model)
    check_callable(init, "init", is_of_module=True)
    place = as_device(device)
    if place.type == "meta":
        raise ConversionError("cannot materialize on meta", fix="Name a real device.")
    modules = dict(model.named_modules())
    work = [component for component in find_components(model) if any(m.tensor.is_meta for m in component.members)]
    work.sort(key=lambda component: all(base_of(m.tensor) is None for m in component.members))  # views go first
    loose, hidden = unregistered(model)
    plain = _plain_recipes(model, loose)
    if not work and not plain:
        check_belongs(model, optimizers_of(optimizer))
        _warn_of_unregistered(loose)
        forget_recipes(model, hidden.values())
        return given
    recipes = {id(component): recipes_of(component, modules) for component in work}
    recorded = [component for component in work if recipes[id(component)]]
    others = [component for component in work if not recipes[id(component)]]
    _check_init(others, modules, init)
    initialised = work if init is not None else others
    try:
        with Exchange(model, optimizer=optimizer, verb="materialize") as exchange:
            _check_held(exchange, work)
            exchange.check(loose[name] for name in plain)
            wanted = [recipe for made in recipes.values() for recipe in made.values()]
            replay = Replay([*wanted, *plain.values()], place)
            for name, recipe in plain.items():  # first: they may be views, and hold buffers
                exchange.put(loose[name], replay.tensor(recipe))
                del loose[name].__dict__[RECIPE]
            for component in recorded:
                exchange.safe_point()
                _put(exchange, _replayed(component, recipes[id(component)], replay, place))
            for component in others:
                exchange.safe_point()
                _put(exchange, _reserved(component, place))
        _initialise(initialised, modules, init)
    except BaseException as error:
        try:
            _return_to_meta(model, work, optimizer)  # else the next call would take their memory for values
        except ConversionError as refused:
            error.add_note(f"Tensors have memory and no values, build the model again: {refused}")
        raise
    _warn_of_unregistered(name for name in loose if name not in plain)
    forget_recipes(model, hidden.values())
    unset = [c.names[0] for c in initialised if any(_is_unset(m.tensor) for m in c.members)]
    if unset:
        who = "reset_parameters" if init is None else "init"
        raise ConversionError(
            f"{describe_some(unset, 8)}: on {place} now, but {who} did not set it",
            fix="Build the model inside tt.on_meta(), or set it in init=.",
        )
    filled = {path for component in work for path in _paths(component)}
    tell_filled(model, [name for name in named_tensors(model) if name.rpartition(".")[0] not in filled])
    return given


FILLED: dict[str, Callable[[nn.Module, Collection[str]], None]] = {}
"""Functions to call for a model that got values, by the module name of another library: only if that is imported.

Each takes the model and the names of tensors that got none.
"""


def tell_filled(model: nn.Module, left: Collection[str]) -> None:
    """Call ``FILLED`` for ``model``, whose tensors got values, except those named ``left`` and those on ``meta``."""
    for library, tell in FILLED.items():
        if library in sys.modules:
            tell(model, left)


def forget_recipes(model: nn.Module, others: Iterable[nn.Module] = ()) -> None:
    """Remove the recipes of all tensors and modules of ``model``, and of the modules ``others``."""
    for tensor in named_tensors(model).values():
        tensor.__dict__.pop(RECIPE, None)
    for module in chain(model.modules(), others):
        module.__dict__.pop(RECIPES, None)


def _check_held(exchange: Exchange, components: Iterable[Component]) -> None:
    """Check that all tensors but bases of views can be exchanged.

    ``_put`` exchanges a view first, and then nothing holds its base.
    """
    tensors = [member.tensor for component in components for member in component.members]
    bases = {id(base_of(tensor)) for tensor in tensors}
    exchange.check([tensor for tensor in tensors if id(tensor) not in bases])


def _put(exchange: Exchange, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for held, new in sorted(pairs, key=lambda pair: base_of(pair[0]) is None):
        exchange.put(held, new)


# -- recorded tensors -------------------------------------------------------------------------------------------------


def recipes_of(component: Component, modules: dict[str, nn.Module]) -> dict[int, Recipe]:
    """Return the recipes of members by their index; empty unless the owner, whose memory all members share, has one."""
    tie = tie_of(component)
    owner = component.names[0] if tie is None else tie.owner
    found = {}
    for i, member in enumerate(component.members):
        recipe = getattr(member.tensor, RECIPE, None)
        for name in member.names if recipe is None and len(component.members) == 1 else ():
            path, _, leaf = name.rpartition(".")
            named = vars(modules[path]).get(RECIPES, {}).get(leaf) if path in modules else None
            # another tensor than the recorded one: it was copied, or untied
            recipe = recipe or (named if named is None else replace(named, copy=Copy()))
        has_codes = is_sharded(member.tensor) and isinstance(local_or_itself(member.tensor), Weight)
        if isinstance(recipe, Recipe) and recipe.ref.size == tuple(member.tensor.shape) and not has_codes:
            found[i] = recipe
    has_owner = any(owner in component.members[i].names for i in found)
    return found if has_owner else {}


def _plain_recipes(model: nn.Module, loose: dict[str, Tensor]) -> dict[str, Recipe]:
    """Return the recipes of the tensors ``loose``, except of views of tensors that have other values by now."""
    recipes = {name: getattr(tensor, RECIPE, None) for name, tensor in loose.items()}
    found = {name: recipe for name, recipe in recipes.items() if recipe is not None and _matches(loose[name], recipe)}
    real = (getattr(t, RECIPE, None) for t in named_tensors(model).values() if not t.is_meta) if found else ()
    loaded = {_memory_of(recipe) for recipe in real if recipe is not None}
    return {name: recipe for name, recipe in found.items() if _memory_of(recipe) not in loaded}


def _memory_of(recipe: Recipe) -> tuple[int, int, Copy]:
    return id(recipe.program), recipe.ref.memory, recipe.copy


def _warn_of_unregistered(loose: Iterable[str]) -> None:
    """Warn that the tensors named ``loose``, which the model does not register, stay on ``meta``."""
    if names := describe_some(list(loose)):
        fix = "Build the model inside tt.on_meta(), and register views of parameters as buffers, with persistent=False."
        warn(f"{names}: neither a parameter nor a buffer of the model, so it stays on meta. {fix}")


def _replayed(
    component: Component, recipes: dict[int, Recipe], replay: Replay, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each member with its new contents, all over one memory: the recorded one, or a new one."""
    members = component.members
    memories = {_memory_of(recipe) for recipe in recipes.values()}
    as_recorded = len(recipes) == len(members) and all(_matches(members[i].tensor, r) for i, r in recipes.items())
    if len(memories) == 1 and as_recorded:
        for i, member in enumerate(members):
            yield member.tensor, replay.tensor(recipes[i])
        return
    tie = tie_of(component)
    owner = next(i for i in recipes if tie is None or tie.owner in members[i].names)
    value = replay.tensor(recipes[owner])
    held = members[owner].tensor
    if is_sharded(held):
        from .sharding import shard_like

        yield held, shard_like(held, value)
        return
    if isinstance(held, Weight) and not held.scheme.transparent:
        span: Tensor = encoded_as(held, value.to(held.dtype))
        for member in members:
            yield member.tensor, member_view(span, member)
        return
    span = torch.zeros_like(span_tensor(component), device=device)
    if not isinstance(span, Weight) and component.nbytes:
        target = member_view(span, members[owner])
        plain_values(target).copy_(value)
    for member in members:
        yield member.tensor, member_view(span, member)


def _matches(tensor: Tensor, recipe: Recipe) -> bool:
    ref, is_whole = recipe.ref, not isinstance(tensor, Weight) and not is_sharded(tensor)
    return is_whole and (tensor.dtype, tuple(tensor.stride())) == (ref.dtype, ref.stride)


# -- tensors that modules initialise ----------------------------------------------------------------------------------


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    """Return ``module.reset_parameters``, which ``nn.MultiheadAttention`` spells with an underscore, or ``None``."""
    found = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found if callable(found) else None


def _check_init(components: Collection[Component], modules: dict[str, nn.Module], init: Any) -> None:
    layouts = {c.names[0]: c.members[0].tensor.layout for c in components}
    if sparse := [name for name, layout in layouts.items() if layout is not torch.strided]:
        raise ConversionError(
            f"{describe_some(sparse, 8)}: on meta, and tt.on_meta() does not record {layouts[sparse[0]]} tensors",
            fix="Assign a real tensor to each first.",
        )
    if init is not None:
        return
    lost = [
        component.names[0]
        for component in components
        if not any(_reset_of(modules[p]) for p in _paths(component) if p in modules)
        and not is_lazy(component.members[0].tensor)
        and component.members[0].tensor.numel()
    ]
    if lost:
        names = describe_some(lost, 8)
        raise ConversionError(
            f"{names}: on meta, without a record of values by tt.on_meta() and without reset_parameters",
            fix="Build the model inside tt.on_meta(). Where its constructor sets no values, load them, or pass init=.",
        )


def _paths(component: Component) -> list[str]:
    """Return the paths of the modules that hold the component, that of the owner first."""
    tie = tie_of(component)
    return list(dict.fromkeys(name.rpartition(".")[0] for name in (component.names if tie is None else tie.names)))


def _reserved(component: Component, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each member with memory that holds the mark which ``_is_unset`` looks for."""
    held = component.members[0].tensor
    if isinstance(held, Weight) and not held.scheme.transparent:
        zeros = torch.zeros((), dtype=held.dtype, device=device).expand(held.shape)
        span: Tensor = encoded_as(held, zeros)
    else:
        span = torch.empty_like(span_tensor(component), device=device)
    for piece in _pieces(span):
        piece.fill_(_mark(piece.dtype))
    for member in component.members:
        yield member.tensor, member_view(span, member)


def _pieces(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that hold the mark until the first write: of a Weight, its parts of floats.

    A bool has no spare value for a mark, so whether it was set is not known.
    """
    if isinstance(tensor, Weight):
        own = [part for part in tensor.parts.values() if tensor.scheme.transparent or part.is_floating_point()]
        return [piece for part in own for piece in _pieces(part)]
    return [] if tensor.dtype == torch.bool or tensor.numel() == 0 or not is_strided(tensor) else [tensor]


def _mark(dtype: torch.dtype) -> float | int:
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def _is_unset(tensor: Tensor) -> bool:
    """Return whether ``tensor`` was not written to since ``_reserved``."""
    pieces = _pieces(tensor)
    return bool(pieces) and all(map(_is_marked, pieces))


def _is_marked(piece: Tensor) -> bool:
    first = piece[(0,) * piece.dim()]  # most tensors are set, which their first element shows
    for part in (first, piece):
        wide = part.float() if part.dtype.is_floating_point and part.dtype.itemsize == 1 else part
        if not bool(
            (wide != wide if wide.is_floating_point() or wide.is_complex() else wide == _mark(wide.dtype)).all()
        ):
            return False
    return True


def _initialise(components: list[Component], modules: dict[str, nn.Module], init: Any) -> None:
    """Initialise each of ``components`` once: if the module of an alias sets it again, restore the owner's values."""
    holders: dict[str, list[Component]] = {}
    for component in components:
        for path in _paths(component):
            holders.setdefault(path, []).append(component)
    owners = {id(component): _paths(component)[0] for component in components}
    done: set[int] = set()
    for path in _in_order(modules, holders, owners) if init is None else _children_first(modules, holders):
        module, own = modules[path], holders.get(path, [])
        call = _reset_of(module) if init is None else partial(init, module)
        if call is None or (own and all(id(c) in done and owners[id(c)] != path for c in own)):
            continue
        safe = [c.members[0].tensor for c in own if id(c) in done and owners[id(c)] != path]
        kept = [(tensor, tensor.detach().clone()) for tensor in safe]
        call()
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)
        done.update(id(c) for c in own)
    torch.clear_autocast_cache()  # may hold casts of the values before initialisation


def _return_to_meta(model: nn.Module, components: Iterable[Component], optimizer: Optimizers) -> None:
    """Take the memory of ``components`` away again. Raise ConversionError if something holds their tensors."""
    names = {name for component in components for name in component.names}
    found = [component for component in find_components(model) if not names.isdisjoint(component.names)]
    real = [component for component in found if not component.members[0].tensor.is_meta]
    if not real:
        return
    with Exchange(model, optimizer=optimizer, verb="materialize") as exchange:
        exchange.check(member.tensor for component in real for member in component.members)
        for component in real:
            span = converted(span_tensor(component), None, torch.device("meta"))
            exchange.put_together((member.tensor, member_view(span, member)) for member in component.members)


def _in_order(modules: Iterable[str], holders: dict[str, Any], owners: dict[int, str]) -> list[str]:
    """Return the modules with new tensors of their own: those of owners before those that hold only aliases."""
    own = [path for path in modules if path in holders]
    first = set(owners.values())
    return [path for path in own if path in first] + [path for path in own if path not in first]


def _children_first(modules: Iterable[str], holders: Iterable[str]) -> list[str]:
    """Return the modules with new tensors in or below them, children first, the order of ``Module.apply``.

    ``modules`` are in the order of ``named_modules``, parents first. A seeded ``init`` draws the same numbers in both.
    """
    above = {path[:end] for path in holders for end in (0, len(path), *(i for i, c in enumerate(path) if c == "."))}
    ordered: list[str] = []
    parents: list[str] = []
    for path in modules:
        while parents and parents[-1] and not path.startswith(f"{parents[-1]}."):
            ordered.append(parents.pop())
        parents.append(path)
    return [path for path in (*ordered, *reversed(parents)) if path in above]
