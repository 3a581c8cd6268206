"""Which names of a model share memory, and how: found live, compared with the record, made and undone.

Object identity and shared storage are the live tie.  The record (``spec.tie`` of a Weight) is what survives files,
processes and ``meta``.  Nothing here is keyed by tensor or weak reference, and a data pointer of 0 means unknown.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._checks import check_flag, check_module, check_name, said
from .._gc import uncollected
from ..errors import ArgumentError, TieError
from ..schemes import Shape
from ..torch_private.fsdp2 import fsdp2_state
from ..weights.spec import Tie, View
from ..weights.weight import Weight
from .storage import STOCK, Block, blocks_of, is_strided, lone_spans

Tensors = nn.Module | Mapping[str, Tensor]
"""What has named tensors: a module, or a state dict of live tensors."""


def named_tensors(model: Tensors) -> dict[str, Tensor]:
    """Every parameter, then every other tensor, under every name that it has, in module order."""
    if isinstance(model, nn.Module):
        parameters: dict[str, Tensor] = {}
        buffers: dict[str, Tensor] = {}
        for path, module in model.named_modules(remove_duplicate=False):  # one walk for both, on thousands of modules
            before = f"{path}." if path else ""
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    parameters[before + leaf] = parameter
            for leaf, buffer in module._buffers.items():
                if buffer is not None:
                    buffers[before + leaf] = buffer
        return parameters | buffers
    if not isinstance(model, Mapping):
        fix = "Give a torch.nn.Module."
        raise ArgumentError(f"is {said(model)}, not a module", name="model", fix=fix)
    for name, tensor in model.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ArgumentError(
                f"maps {name!r:.40} to {said(tensor)}, not a name to a tensor", name="model", fix="Leave it out."
            )
    return dict(sorted(model.items(), key=lambda item: not isinstance(item[1], nn.Parameter)))


# -- what shares memory -----------------------------------------------------------------------------------------------


class Member(NamedTuple):
    """One tensor object of a component, with all its names, and its geometry from the component's first byte."""

    names: tuple[str, ...]
    tensor: Tensor
    view: View
    as_bytes: bool = False
    """Whether the span of the component is bytes, because its members have several dtypes."""


class Component(NamedTuple):
    """Tensors that share memory, directly or through each other; most have one member.

    ``dtype`` is that of all members, ``None`` if they differ.  ``start`` is where the memory begins, in bytes, and
    ``nbytes`` how much of it the members reach; both are 0 where there is no such memory (sparse, empty, wrappers).
    """

    members: tuple[Member, ...]
    dtype: torch.dtype | None
    start: int
    nbytes: int

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of every member."""
        if len(self.members) == 1:
            return self.members[0].names
        return tuple(name for member in self.members for name in member.names)

    def member(self, name: str) -> Member:
        """The one that has this name. Raises KeyError."""
        for member in self.members:
            if name in member.names:
                return member
        raise KeyError(name)


def find_components(model: Tensors) -> tuple[Component, ...]:
    """The model's tensors, grouped so that two are together if and only if they share an element, in module order.

    Slices of one storage that share no element are apart.  Also on ``meta``, where only the memory object tells.
    """
    return _components(model, alone=True)


def shared_components(model: Tensors) -> tuple[Component, ...]:
    """Those of ``find_components`` that have two names or more, in a small part of the time."""
    return tuple(component for component in _components(model, alone=False) if len(component.names) > 1)


def parted(model: nn.Module, modules: Iterable[nn.Module]) -> tuple[list[Tensor], tuple[Component, ...]]:
    """The tensors of ``model`` that surely share no element with another, and the components of all the rest.

    ``modules`` are all of the model's. Together they are what ``find_components`` finds; a model of nothing but
    parameters in memory of their own is through in a fraction of the time, because nobody asks for names.
    """
    with uncollected():
        tensors = distinct_tensors(modules)
        spans = lone_spans(tensors)
        rest = {id(tensor) for tensor, span in zip(tensors, spans, strict=True) if span is None}
        if not rest:
            return tensors, ()
        found: dict[int, tuple[Tensor, list[str]]] = {}
        for name, tensor in named_tensors(model).items():
            if id(tensor) in rest:
                found.setdefault(id(tensor), (tensor, []))[1].append(name)
        shared = list(found.values())
        blocks = [blocks_of(tensor) for tensor, _ in shared]
        made = tuple(_component([(*shared[i], blocks[i]) for i in group]) for group in _groups(blocks))
        return [tensor for tensor in tensors if id(tensor) not in rest], made


def distinct_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Every parameter and buffer of ``modules`` once."""
    found: dict[int, Tensor] = {}
    for module in modules:
        for tensor in module._parameters.values():
            if tensor is not None:
                found[id(tensor)] = tensor
        for buffer in module._buffers.values():
            if buffer is not None:
                found[id(buffer)] = buffer
    return list(found.values())


def _components(model: Tensors, *, alone: bool) -> tuple[Component, ...]:
    """Every component; without ``alone`` those of one name may be missing."""
    with uncollected():
        objects: dict[int, tuple[Tensor, tuple[str, ...]]] = {}
        for name, tensor in named_tensors(model).items():
            known = objects.setdefault(id(tensor), (tensor, (name,)))
            if known[1][0] is not name:
                objects[id(tensor)] = tensor, (*known[1], name)
        found = list(objects.values())
        spans = lone_spans([tensor for tensor, _ in found])
        near = [i for i, span in enumerate(spans) if span is None]
        if alone and not near:
            return tuple([_lone(*one, span) for one, span in zip(found, spans, strict=True) if span is not None])
        blocks = [blocks_of(found[i][0]) for i in near]
        made = {near[group[0]]: _component([(*found[near[i]], blocks[i]) for i in group]) for group in _groups(blocks)}
        for i, span in enumerate(spans):
            if span is not None and (alone or len(found[i][1]) > 1):
                made[i] = _lone(*found[i], span)
        return tuple(made[i] for i in sorted(made))


def _lone(tensor: Tensor, names: tuple[str, ...], span: tuple[int, int]) -> Component:
    dtype, new = tensor.dtype, tuple.__new__  # makes each in a third of the time
    view = _whole(dtype, tensor.shape, tensor.stride())
    return new(Component, ((new(Member, (names, tensor, view, False)),), dtype, *span))


@lru_cache(maxsize=4096)
def _whole(dtype: torch.dtype, size: Shape, stride: Shape) -> View:
    """Thousands of tensors have a few shapes, and share what describes them."""
    return View(dtype, tuple(size), stride)


def _groups(blocks: Sequence[Sequence[Block]]) -> list[list[int]]:
    """The indices of ``blocks``, grouped by overlap, in order of their first index."""
    parent = list(range(len(blocks)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    spaces: dict[object, list[tuple[int, Block]]] = {}
    for i, own in enumerate(blocks):
        for block in own:
            spaces.setdefault(block.space, []).append((i, block))
    for entries in spaces.values():
        open_: list[tuple[int, Block]] = []  # those that reach past the start of the next one
        for i, block in sorted(entries, key=lambda entry: (entry[1].start, -entry[1].stop)):
            open_ = [(j, other) for j, other in open_ if other.stop > block.start]
            for j, other in open_:
                if root(i) != root(j) and block.overlaps(other):
                    parent[max(root(i), root(j))] = min(root(i), root(j))
            open_.append((i, block))
    groups: dict[int, list[int]] = {}
    for i in range(len(blocks)):
        groups.setdefault(root(i), []).append(i)
    return list(groups.values())


def _component(found: Sequence[tuple[Tensor, Sequence[str], tuple[Block, ...]]]) -> Component:
    dtypes = {tensor.dtype for tensor, _, _ in found}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    if any(not _has_own_memory(tensor) or not blocks for tensor, _, blocks in found):
        members = tuple(Member(tuple(names), tensor, _own_view(tensor)) for tensor, names, _ in found)
        return Component(members, dtype, 0, 0)
    spans = [blocks[0] for _, _, blocks in found]
    start = _aligned(spans) if len(spans) > 1 else spans[0].start
    members = tuple(
        Member(
            tuple(names),
            tensor,
            View(tensor.dtype, span.size, span.stride, (span.start - start) // span.itemsize),
            dtype is None,
        )
        for (tensor, names, _), span in zip(found, spans, strict=True)
    )
    return Component(members, dtype, start, max(span.stop for span in spans) - start)


def _has_own_memory(tensor: Tensor) -> bool:
    return is_strided(tensor) or (isinstance(tensor, Weight) and tensor.scheme.transparent)


def _own_view(tensor: Tensor) -> View:
    if is_lazy(tensor):
        return View(tensor.dtype, (0,), (1,))
    stride = tuple(tensor.stride()) if tensor.layout == torch.strided and not tensor.is_nested else ()
    return View(tensor.dtype, () if tensor.is_nested else tuple(tensor.shape), stride)


def _aligned(spans: Sequence[Block]) -> int:
    """The last byte at or before the first of ``spans`` from which each of them is a whole number of its elements."""
    first = min(span.start for span in spans)
    for start in range(first, first - 16, -1):
        if all((span.start - start) % span.itemsize == 0 for span in spans):
            return start
    raise TieError("two tensors overlap at addresses that no common element size divides", fix="Clone one of them.")


# -- one memory for a component ---------------------------------------------------------------------------------------


def span_tensor(component: Component) -> Tensor:
    """All the memory of ``component`` as one 1-D tensor, in the common dtype, or in bytes where the dtypes differ.

    A component without memory of its own (a sparse tensor, Weights over the same parts) gives its first tensor,
    detached; ``member_view`` takes either.  Raises TieError for Weights that share some of their parts only.
    """
    first = component.members[0].tensor
    if component.nbytes == 0:
        _check_same_parts(component)
        return first if is_lazy(first) else first.detach()
    dtype = component.dtype or torch.uint8
    for member in component.members:
        tensor = _memory(member.tensor)
        offset = component.start - (blocks_of(tensor)[0].start - tensor.storage_offset() * tensor.element_size())
        storage = tensor.untyped_storage()
        if offset >= 0 and offset + component.nbytes <= storage.nbytes() and offset % dtype.itemsize == 0:
            count = component.nbytes // dtype.itemsize
            with torch.no_grad():
                made = torch.empty(0, dtype=dtype, device=tensor.device)
                return made.set_(storage, offset // dtype.itemsize, (count,), (1,))
    raise TieError(
        "no storage holds all of these overlapping tensors", name=", ".join(component.names), fix="Clone one of them."
    )


def member_view(span: Tensor, member: Member) -> Tensor:
    """The tensor of ``member`` over ``span``, which is ``span_tensor`` of its component or a conversion of it."""
    tensor, view = member.tensor, member.view
    if isinstance(tensor, Weight) and not tensor.scheme.transparent and isinstance(span, Weight):
        return span.map(Tensor.detach, span.spec.replace(shape=view.size, stride=view.stride, tie=tensor.tie))
    if not _has_own_memory(tensor) or tensor.numel() == 0:
        return span if is_lazy(span) else span.detach()
    if member.as_bytes and span.dtype == torch.uint8 != view.dtype:
        start = span.storage_offset() + view.offset * view.dtype.itemsize
        with torch.no_grad():
            made = torch.empty(0, dtype=view.dtype, device=span.device)
            made.set_(span.untyped_storage(), start // view.dtype.itemsize, view.size, view.stride)
    else:
        made = span.detach().as_strided(view.size, view.stride, span.storage_offset() + view.offset)
    if tensor.is_conj():
        made = made.conj()
    return tensor.around(made) if isinstance(tensor, Weight) else made


def _memory(tensor: Tensor) -> Tensor:
    return tensor.values_of() if isinstance(tensor, Weight) else tensor


def _check_same_parts(component: Component) -> None:
    first, *others = component.members
    for other in others:
        if not _same_parts(first.tensor, other.tensor):
            raise TieError(
                f"shares only a part of its memory with {first.names[0]}, so they cannot be converted together",
                name=other.names[0],
                fix="Call tt.untie on it first.",
            )


def _same_parts(one: Tensor, two: Tensor) -> bool:
    if is_sharded(one) and is_sharded(two):
        return one._spec == two._spec and blocks_of(one) == blocks_of(two)  # type: ignore[attr-defined,no-any-return]
    return (
        isinstance(one, Weight)
        and isinstance(two, Weight)
        and one.scheme == two.scheme
        and one.spec.base == two.spec.base
        and blocks_of(one) == blocks_of(two)
    )


# -- ties -------------------------------------------------------------------------------------------------------------


def find_ties(model: nn.Module) -> tuple[Tie, ...]:
    """Every group of names that share memory, in module order: one object, one storage, views, Weights over one part.

    The owner is the tensor that covers the others: contiguous first, then a Parameter before a buffer, the larger
    element, the higher rank, module order.  Where none covers all, it is the first in memory, and views reach past it.

    Raises TieError where memory is shared in a way that a tie cannot say: see ``tt.map``, which shows it.

    >>> import torch, torchtether as tt
    >>> model = torch.nn.ModuleDict({"emb": torch.nn.Embedding(5, 2), "head": torch.nn.Linear(2, 5, bias=False)})
    >>> model["head"].weight = model["emb"].weight
    >>> str(*tt.find_ties(model))
    'emb.weight = head.weight'
    """
    made = (tie_of(component) for component in shared_components(model))
    return tuple(tie for tie in made if tie is not None)


def tie_of(component: Component, owner: str | None = None) -> Tie | None:
    """The tie of one component, ``None`` if it has one name; ``owner`` forces the choice of its owner."""
    if len(component.names) < 2:
        return None
    for member in component.members:
        if len(component.members) > 1 and (member.tensor.is_conj() or member.tensor.is_neg()):
            raise TieError(
                "is a lazy conjugate or negative of memory that others share, which a tie cannot say",
                name=member.names[0],
                fix="Call .resolve_conj().resolve_neg() on it, or tt.untie.",
            )
    chosen = min(component.members, key=lambda member: _rank(component, member, owner))
    names, views, objects = [*_owner_first(chosen.names, owner)], [None] * len(chosen.names), [True] * len(chosen.names)
    for member in component.members:
        if member is not chosen:
            view = _relative(component, member, chosen)
            names += member.names
            views += [view] * len(member.names)  # type: ignore[list-item]
            objects += [False] * len(member.names)
    return Tie(tuple(names), tuple(views), tuple(objects))


def _owner_first(names: tuple[str, ...], owner: str | None) -> tuple[str, ...]:
    return (owner, *(name for name in names if name != owner)) if owner in names else names  # type: ignore[return-value]


def _rank(component: Component, member: Member, owner: str | None) -> tuple[object, ...]:
    tensor, view = member.tensor, member.view
    blocks = blocks_of(tensor)
    covers = component.nbytes == 0 or (blocks[0].start == component.start and blocks[0].nbytes == component.nbytes)
    dense = component.nbytes == 0 or blocks[0].is_dense
    return (
        owner not in member.names,
        not (covers and dense and tensor.is_contiguous()),
        not (covers and dense),
        view.offset != 0,
        -sum(block.nbytes for block in blocks),
        not isinstance(tensor, nn.Parameter),
        -tensor.element_size(),
        -tensor.dim(),
    )


def _relative(component: Component, member: Member, owner: Member) -> View | None:
    """The geometry of ``member`` from the first byte of ``owner``; ``None`` where it is that of the owner."""
    view, base = member.view, owner.view
    if component.nbytes == 0:
        return _relative_weight(member, owner)
    bytes_in = view.offset * view.dtype.itemsize - base.offset * base.dtype.itemsize
    if bytes_in < 0 or bytes_in % view.dtype.itemsize:
        raise TieError(
            f"begins {bytes_in} bytes from {owner.names[0]}, which a tie cannot say",
            name=member.names[0],
            fix="Register the tensor that covers both, or call tt.untie.",
        )
    view = replace(view, offset=bytes_in // view.dtype.itemsize)
    return None if view == replace(base, offset=0) else view


def _relative_weight(member: Member, owner: Member) -> View | None:
    one, two = owner.tensor, member.tensor
    if _same_parts(one, two):
        return None if one.stride() == two.stride() and one.dtype == two.dtype else member.view
    if isinstance(one, Weight) and isinstance(two, Weight) and one.scheme == two.scheme:
        for name, part in one.scheme.layout(one.spec.base).items():
            held, cut = blocks_of(one.parts[name]), blocks_of(two.parts[name])
            if part.span and held and cut and held[0].start <= cut[0].start and cut[0].stop <= held[0].stop:
                entry = held[0].stride[0] * held[0].itemsize
                return replace(member.view, offset=(cut[0].start - held[0].start) // entry * part.span)
    raise TieError(
        f"shares memory with {owner.names[0]} in a way that a tie cannot say", name=member.names[0], fix="Clone one."
    )


# -- the record -------------------------------------------------------------------------------------------------------


def recorded_ties(model: nn.Module) -> tuple[Tie, ...]:
    """The ties that the model's Weights carry, each once, in module order."""
    tensors = (getattr(t, "_local_tensor", t) for t in named_tensors(model).values())  # rows carry the record, too
    carried = (tensor.tie for tensor in tensors if isinstance(tensor, Weight))
    return tuple(dict.fromkeys(tie for tie in carried if tie is not None))


def record_ties(model: nn.Module, names: Iterable[str] | None = None) -> None:
    """The Weights among ``names`` (all, if ``None``) carry the tie that is live now, and no other."""
    wanted = None if names is None else set(names)
    for component in find_components(model):
        if wanted is None or not wanted.isdisjoint(component.names):
            for member in component.members:
                if isinstance(member.tensor, Weight):
                    member.tensor._spec = member.tensor.spec.replace(tie=tie_of(component))


def check_ties(model: nn.Module, expected: Iterable[Tie] | None = None) -> None:
    """Returns if the live ties are those of ``expected``, or of the records that the model's Weights carry.

    With ``expected`` a tie that it does not name is an error; records speak for the names in them only.

    Raises:
        TieError: naming the first tensor whose tie is gone, new, or has another geometry.

    >>> import torch, torchtether as tt
    >>> tt.check_ties(torch.nn.Linear(2, 2), expected=[tt.Tie(("weight", "bias"))])
    Traceback (most recent call last):
    torchtether.errors.TieError: bias: is not tied to weight, as the record says. Call tt.tie(model, 'weight', 'bias').
    """
    check_module(model)
    try:
        records = recorded_ties(model) if expected is None else tuple(expected)
        wrong = next((one for one in records if not isinstance(one, Tie)), None)
    except TypeError:
        records, wrong = (), expected  # type: ignore[assignment]
    if wrong is not None:
        raise ArgumentError(f"holds {said(wrong)}, not ties", name="expected", fix="Give what tt.find_ties returned.")
    components: dict[str, Component | None] = dict.fromkeys(named_tensors(model))
    components.update((name, component) for component in shared_components(model) for name in component.names)
    claimed: dict[str, Tie] = {}
    for tie in records:
        for name in tie.names:
            if name in claimed and not _equivalent(claimed[name], tie):
                raise TieError(f"two records disagree: {claimed[name]}, and {tie}", name=name, fix="Call tt.tie again.")
            claimed[name] = tie
        _check_one(tie, components)
    if expected is not None:
        for component in components.values():
            live = None if component is None else tie_of(component)
            if live is not None and live.owner not in claimed:
                alias = live.aliases[0]
                raise TieError(f"is tied to {live.owner}, no record says so", name=alias, fix=_untie(alias))


def _check_one(tie: Tie, components: Mapping[str, Component | None]) -> None:
    """Raises TieError unless ``tie`` is live; ``components`` has every name of the model, ``None`` for those alone."""
    for name in tie.names:
        if name not in components:
            fix = f"The nearest name is {nearest(name, components)!r}." if nearest(name, components) else ""
            raise TieError(f"is not in the model, the record ties it: {tie}", name=name, fix=fix)
    component = components[tie.owner]
    for name in tie.aliases:
        if component is None or components[name] is not component:
            raise TieError(f"is not tied to {tie.owner}, as the record says", name=name, fix=_tie(tie.owner, name))
    live = None if component is None else tie_of(component, tie.owner)
    assert live is not None  # a tie has two names, and all of them are in this component
    for name in live.names:
        if name not in tie.names:
            raise TieError(f"is tied to {tie.owner}, the record says {tie}", name=name, fix=_untie(name))
        now, then = _how(live, name), _how(tie, name)
        if not _agree(live, tie, name):
            fix = _tie(tie.owner, name) if then == _SAME else "Call tt.tie again."
            raise TieError(f"is {now} of {tie.owner}, the record says {then}", name=name, fix=fix)


def _agree(live: Tie, record: Tie, name: str) -> bool:
    """Dtypes are compared only where they differ inside the live tie: a record is older than the last conversion."""
    i, j = live.names.index(name), record.names.index(name)
    now, then = live.views[i], record.views[j]
    if now is not None and then is not None:
        return (now.size, now.stride, now.offset) == (then.size, then.stride, then.offset)
    return now is then and live.objects[i] == record.objects[j]


def _equivalent(one: Tie, two: Tie) -> bool:
    return one.owner == two.owner and set(one.names) == set(two.names) and all(_agree(one, two, n) for n in one.names)


_SAME = "the very object"


def _how(tie: Tie, name: str) -> str:
    view = tie.views[tie.names.index(name)]
    if view is not None:
        return f"a view (size {view.size}, stride {view.stride}, offset {view.offset})"
    return _SAME if tie.objects[tie.names.index(name)] else "another tensor over the storage"


def _tie(owner: str, alias: str) -> str:
    return f"Call tt.tie(model, {owner!r}, {alias!r})."


def _untie(name: str) -> str:
    return f"Call tt.untie(model, {name!r})."


def nearest(name: str, names: Iterable[str]) -> str:
    """The one of ``names`` that looks most like ``name``; empty if there are none."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=0.0)), "")


# -- making and undoing -----------------------------------------------------------------------------------------------


def tie(model: nn.Module, owner: str, alias: str, *, transpose: bool = False, rows: slice | None = None) -> None:
    """``alias`` is the very object that ``owner`` names, or with ``transpose`` or ``rows`` a view over its memory.

    The values that ``alias`` had are gone.  An optimizer that was built before still holds the old parameter:
    tie first.  The tie records of the Weights concerned say what is true afterwards.

    Raises:
        TieError: there is no such name, shape, dtype or device differ, or a parameter would become a buffer.

    >>> import torch, torchtether as tt
    >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 2), torch.nn.Linear(2, 5, bias=False))
    >>> tt.tie(model, "0.weight", "1.weight"); model[0].weight is model[1].weight
    True
    """
    check_module(model)
    check_flag(transpose, "transpose")
    if rows is not None and not isinstance(rows, slice):
        raise ArgumentError(f"is {said(rows)}, not a slice", name="rows", fix="Give slice(start, stop).")
    check_name(owner, "owner")
    check_name(alias, "alias")
    tensors = named_tensors(model)
    for name in (owner, alias):
        _check_known(name, tensors)
        _check_unmanaged(model, name, tensors[name])
    held, given = tensors[alias], tensors[owner]
    if owner == alias or (held is given and not transpose and rows is None):
        return
    if isinstance(held, nn.Parameter) and not isinstance(given, nn.Parameter):
        raise TieError(f"is a parameter, {owner} is a buffer", name=alias, fix=_tie(alias, owner))
    made = given
    if transpose or rows is not None:
        view = _view_for(owner, given.detach(), transpose, rows)
        made = nn.Parameter(view, requires_grad=held.requires_grad) if isinstance(held, nn.Parameter) else view
    for what in ("shape", "dtype", "device"):
        old, new = getattr(held, what), getattr(made, what)
        if old != new:
            old, new = (tuple(old), tuple(new)) if what == "shape" else (old, new)
            raise TieError(
                f"has {what} {old}, what {owner} gives has {new}", name=alias, fix="Make them equal before tying."
            )
    before = _component_names(model, alias)
    _register(model, alias, made)
    record_ties(model, {*before, owner, alias})


def _view_for(owner: str, given: Tensor, transpose: bool, rows: slice | None) -> Tensor:
    """The rows of ``given``, turned if wanted. Raises TieError where it has none, or is no matrix to turn."""
    if rows is not None and (given.dim() == 0 or (rows.step is not None and rows.step < 1)):
        what = f"has shape {tuple(given.shape)}, of which rows={rows} is no view"
        raise TieError(what, name=owner, fix="Give a slice with a positive step, of a tensor that has rows.")
    view = given if rows is None else given[rows]
    if transpose and view.dim() > 2:
        raise TieError(f"has {view.dim()} dimensions, transpose= turns two", name=owner, fix="Tie it as it is.")
    return view.t() if transpose else view


def untie(model: nn.Module, name: str) -> None:
    """``name`` is a tensor of its own, with equal values; what it was tied to stays as it was.

    An optimizer that was built before does not hold the new parameter: untie first.  A name that is not tied is left.

    Raises:
        TieError: there is no such name, or its module itself is registered twice.

    >>> import torch, torchtether as tt
    >>> layer = torch.nn.Linear(2, 2); layer.register_parameter("again", layer.weight)
    >>> tt.untie(layer, "again"); tt.find_ties(layer)
    ()
    """
    check_module(model)
    check_name(name, "name")
    tensors = named_tensors(model)
    _check_known(name, tensors)
    before = _component_names(model, name)
    if len(before) == 1:
        return
    held = tensors[name]
    _check_unmanaged(model, name, held)
    with torch.no_grad():
        made = held.detach().clone()
    if isinstance(held, nn.Parameter):
        made = nn.Parameter(made, requires_grad=held.requires_grad)
    else:
        made.requires_grad_(held.requires_grad)
    _register(model, name, made)
    record_ties(model, before)


def _component_names(model: nn.Module, name: str) -> tuple[str, ...]:
    return next(component.names for component in find_components(model) if name in component.names)


def _check_known(name: str, tensors: Iterable[str]) -> None:
    known = list(tensors)
    if name not in known:
        near = nearest(name, known)
        raise TieError("is not in the model", name=name, fix=f"The nearest name is {near!r}." if near else "")


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor: this process has a part of it, or a copy that others have too."""
    return type(tensor) not in STOCK and hasattr(tensor, "_local_tensor")


def _check_unmanaged(model: nn.Module, name: str, tensor: Tensor) -> None:
    """FSDP2 puts its own parameters back at every forward, so what it manages is tied before, or not at all."""
    if is_sharded(tensor) and any(fsdp2_state(module) is not None for module in model.modules()):
        raise TieError("is under FSDP2, which would undo it", name=name, fix="Tie or untie before fully_shard.")


def _register(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Puts ``tensor`` under ``name``. The module is looked up in the model's own table, never by getattr on text."""
    modules = dict(model.named_modules(remove_duplicate=False))
    path, _, leaf = name.rpartition(".")
    module = modules[path]
    twin = next((other for other, m in modules.items() if m is module and other != path), None)
    if twin is not None:
        raise TieError(
            f"its module is registered as {twin!r} too, so both names would change",
            name=name,
            fix="Deepcopy one module.",
        )
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
    elif isinstance(module, nn.RNNBase):
        setattr(module, leaf, tensor)  # keeps its flat list of weights in step
    else:
        module._parameters[leaf] = tensor  # type: ignore[assignment]
