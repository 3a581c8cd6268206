"""Components: the tensors of a model that share elements at present, by object identity and address; and their ties.

No dict here has tensors or weak references as keys. A data pointer of 0 means that the address is unknown.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._interruptions import uncollected
from ..errors import TieError
from ..geometry.blocks import STOCK, MemoryBlock, blocks_of, is_strided
from ..geometry.groups import DisjointSets, overlapping
from ..geometry.views import Shape, View, extent
from ..torch_private.modules import buffers_of, parameters_of
from ..torch_private.tensors import storage_id
from ..weights.spec import Tie
from ..weights.weight import Weight
from .names import Tensors, is_sharded, named_tensors


class Member(NamedTuple):
    """One tensor object of a component, with all its names, and its view over the component's memory."""

    names: tuple[str, ...]
    tensor: Tensor
    view: View
    as_bytes: bool = False
    """Whether ``span_tensor`` of the component is a tensor of bytes, because its members have several dtypes."""


class Component(NamedTuple):
    """Tensors that share memory, directly or through each other; most have one member.

    ``dtype`` is that of all members, ``None`` if they differ.  ``start`` is the first byte of the memory that the
    members cover, ``nbytes`` its length; both are 0 for tensors without strided memory of their own (sparse, empty,
    wrappers).
    """

    members: tuple[Member, ...]
    dtype: torch.dtype | None
    start: int
    nbytes: int

    @property
    def names(self) -> tuple[str, ...]:
        """Return every name of every member."""
        if len(self.members) == 1:
            return self.members[0].names
        return tuple(name for member in self.members for name in member.names)

    def member(self, name: str) -> Member:
        """Return the member that has this name. Raise KeyError."""
        for member in self.members:
            if name in member.names:
                return member
        raise KeyError(name)


def find_components(model: Tensors) -> tuple[Component, ...]:
    """Return the components of the model in module order: tensors that share an element are in one component.

    Slices of one storage that share no element are in different ones.  On ``meta``, where there are no addresses,
    storage objects are compared.
    """
    return _components(model, alone=True)


def shared_components(model: Tensors) -> tuple[Component, ...]:
    """Return the components of ``find_components`` that have two names or more; much faster."""
    return tuple(component for component in _components(model, alone=False) if len(component.names) > 1)


def split_shared(model: nn.Module, modules: Iterable[nn.Module]) -> tuple[list[Tensor], tuple[Component, ...]]:
    """Return the tensors of ``model`` that certainly share no element with another, and the components of all others.

    ``modules`` are all modules of the model. Both results together cover what ``find_components`` finds. A model in
    which every parameter has memory of its own takes a fraction of the time, because no names are collected.
    """
    with uncollected():
        tensors = distinct_tensors(modules)
        spans = _unshared_spans(tensors)
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


def _components(model: Tensors, *, alone: bool) -> tuple[Component, ...]:
    """Return every component; without ``alone`` components of one name may be missing."""
    with uncollected():
        objects: dict[int, tuple[Tensor, tuple[str, ...]]] = {}
        for name, tensor in named_tensors(model).items():
            known = objects.setdefault(id(tensor), (tensor, (name,)))
            if known[1][0] is not name:
                objects[id(tensor)] = tensor, (*known[1], name)
        found = list(objects.values())
        spans = _unshared_spans([tensor for tensor, _ in found])
        near = [i for i, span in enumerate(spans) if span is None]
        if alone and not near:
            return tuple(
                [_single_member(*one, span) for one, span in zip(found, spans, strict=True) if span is not None]
            )
        blocks = [blocks_of(found[i][0]) for i in near]
        made = {near[group[0]]: _component([(*found[near[i]], blocks[i]) for i in group]) for group in _groups(blocks)}
        for i, span in enumerate(spans):
            if span is not None and (alone or len(found[i][1]) > 1):
                made[i] = _single_member(*found[i], span)
        return tuple(made[i] for i in sorted(made))


def _single_member(tensor: Tensor, names: tuple[str, ...], span: tuple[int, int]) -> Component:
    dtype, new = tensor.dtype, tuple.__new__  # makes each in a third of the time
    view = _whole(dtype, tensor.shape, tensor.stride())
    return new(Component, ((new(Member, (names, tensor, view, False)),), dtype, *span))


@lru_cache(maxsize=4096)
def _whole(dtype: torch.dtype, size: Shape, stride: Shape) -> View:
    """Return the view of a whole tensor; cached, because thousands of tensors have a few shapes."""
    return View(dtype, tuple(size), stride)


def _groups(blocks: Sequence[Sequence[MemoryBlock]]) -> list[list[int]]:
    """Return the indices of ``blocks``, grouped by overlap, in order of their first index."""
    groups = DisjointSets(len(blocks))
    spaces: dict[object, list[tuple[int, MemoryBlock]]] = {}
    for i, own in enumerate(blocks):
        for block in own:
            spaces.setdefault(block.space, []).append((i, block))
    for entries in spaces.values():
        for one, other in overlapping([(block.start, block.stop) for _, block in entries]):
            (i, block), (j, near) = entries[one], entries[other]
            if groups.root(i) != groups.root(j) and block.overlaps(near):
                groups.join(i, j)
    return groups.lists()


def _component(found: Sequence[tuple[Tensor, Sequence[str], tuple[MemoryBlock, ...]]]) -> Component:
    dtypes = {tensor.dtype for tensor, _, _ in found}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    if any(not has_own_memory(tensor) or not blocks for tensor, _, blocks in found):
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


def has_own_memory(tensor: Tensor) -> bool:
    return is_strided(tensor) or (isinstance(tensor, Weight) and tensor.scheme.transparent)


def _own_view(tensor: Tensor) -> View:
    if is_lazy(tensor):
        return View(tensor.dtype, (0,), (1,))
    stride = tuple(tensor.stride()) if tensor.layout == torch.strided and not tensor.is_nested else ()
    return View(tensor.dtype, () if tensor.is_nested else tuple(tensor.shape), stride)


def _aligned(spans: Sequence[MemoryBlock]) -> int:
    """Return the largest address at or below every span from which each span's offset is a multiple of its itemsize."""
    first = min(span.start for span in spans)
    for start in range(first, first - 16, -1):
        if all((span.start - start) % span.itemsize == 0 for span in spans):
            return start
    raise TieError("two tensors overlap at addresses that their element sizes do not divide", fix="Clone one of them.")


def distinct_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return every parameter and buffer of ``modules`` once."""
    found: dict[int, Tensor] = {}
    for module in modules:
        for tensor in parameters_of(module).values():
            if tensor is not None:
                found[id(tensor)] = tensor
        for buffer in buffers_of(module).values():
            if buffer is not None:
                found[id(buffer)] = buffer
    return list(found.values())


# -- what surely stands alone ------------------------------------------------------------------------------------------


def _unshared_spans(tensors: Sequence[Tensor]) -> list[tuple[int, int] | None]:
    """Return (start, nbytes) of each tensor that certainly shares no element with another, ``None`` for all others.

    Fast, because it compares addresses alone. The result is ``None`` for a tensor whose span overlaps another's, that
    is not a plain tensor, or that is empty: compare the blocks of those.
    """
    spans: list[tuple[int, int] | None] = [None] * len(tensors)
    places: list[tuple[int, int, int]] = []  # start, stop, and index of the tensor; -1 if it is not plain
    memories: dict[Hashable, tuple[int, int]] = {}  # of storages without address: index and bytes of their one tensor
    for i, tensor in enumerate(tensors):
        address = nbytes = 0
        if type(tensor) in STOCK and tensor.layout is torch.strided and not tensor.is_nested:
            address, nbytes = 0 if tensor.is_meta else tensor.data_ptr(), tensor.nbytes
        if address and nbytes:
            if not tensor.is_contiguous():
                nbytes = extent(tensor.shape, tensor.stride()) * tensor.element_size()
            places.append((address, address + nbytes, i))
        elif nbytes and tensor.is_contiguous():
            memory = storage_id(tensor)
            memories[memory] = (-1, 0) if memory in memories else (i, nbytes)
        else:
            for block in blocks_of(tensor):
                if isinstance(block.space, torch.device):
                    places.append((block.start, block.stop, -1))
                else:
                    memories[block.space] = -1, 0
    for i, nbytes in memories.values():
        if i >= 0:
            offset = int(tensors[i].storage_offset())
            spans[i] = offset * tensors[i].element_size() if offset else 0, nbytes
    places.sort()
    reached = 0
    for at, (start, stop, i) in enumerate(places):
        follows = places[at + 1][0] if at + 1 < len(places) else stop
        if i >= 0 and start >= reached and follows >= stop:
            spans[i] = start, stop - start
        if stop > reached:
            reached = stop
    return spans


# -- the tie of a component --------------------------------------------------------------------------------------------


def tie_of(component: Component, owner: str | None = None) -> Tie | None:
    """Return the tie of a component, ``None`` if it has one name; ``owner`` overrides the choice of the owner."""
    if len(component.names) < 2:
        return None
    members = component.members
    for member in members if len(members) > 1 else ():
        if member.tensor.is_conj() or member.tensor.is_neg():
            raise TieError(
                "is a lazy conjugate or negative of shared memory, which a tie cannot express",
                name=member.names[0],
                fix="Call .resolve_conj().resolve_neg() on it, or tt.untie.",
            )
    chosen = members[0] if len(members) == 1 else min(members, key=lambda member: _rank(component, member, owner))
    names, views, objects = [*_owner_first(chosen.names, owner)], [None] * len(chosen.names), [True] * len(chosen.names)
    for member in members:
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
    """Return the view of ``member``, relative to the first byte of ``owner``; ``None`` if it equals the owner's."""
    view, base = member.view, owner.view
    if component.nbytes == 0:
        return _relative_weight(member, owner)
    bytes_in = view.offset * view.dtype.itemsize - base.offset * base.dtype.itemsize
    if bytes_in < 0 or bytes_in % view.dtype.itemsize:
        raise TieError(
            f"begins {bytes_in} bytes after {owner.names[0]} begins, which a tie cannot express",
            name=member.names[0],
            fix="Register the tensor that covers both, or call tt.untie.",
        )
    view = replace(view, offset=bytes_in // view.dtype.itemsize)
    return None if view == replace(base, offset=0) else view


def _relative_weight(member: Member, owner: Member) -> View | None:
    one, two = owner.tensor, member.tensor
    if same_parts(one, two):
        return None if one.stride() == two.stride() and one.dtype == two.dtype else member.view
    if isinstance(one, Weight) and isinstance(two, Weight) and one.scheme == two.scheme:
        for name, part in one.scheme.layout(one.spec.base).items():
            held, cut = blocks_of(one.parts[name]), blocks_of(two.parts[name])
            if part.span and held and cut and held[0].start <= cut[0].start and cut[0].stop <= held[0].stop:
                entry = held[0].stride[0] * held[0].itemsize
                return replace(member.view, offset=(cut[0].start - held[0].start) // entry * part.span)
    raise TieError(
        f"shares memory with {owner.names[0]} in a way that a tie cannot express",
        name=member.names[0],
        fix="Clone one.",
    )


def same_parts(one: Tensor, two: Tensor) -> bool:
    """Return whether two Weights, or two DTensors, consist of the same tensors in memory."""
    if is_sharded(one) and is_sharded(two):
        return one._spec == two._spec and blocks_of(one) == blocks_of(two)  # type: ignore[attr-defined,no-any-return]
    return (
        isinstance(one, Weight)
        and isinstance(two, Weight)
        and one.scheme == two.scheme
        and one.spec.base == two.spec.base
        and blocks_of(one) == blocks_of(two)
    )
