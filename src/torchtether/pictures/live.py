"""The facts of a storage map of live tensors, in a module or state dict. Reads no values and keeps no tensor alive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._dtypes import dtype_name
from ..errors import TieError
from ..geometry.blocks import is_strided
from ..geometry.groups import DisjointSets
from ..geometry.views import Shape, extent
from ..schemes import scheme_to_text
from ..ties.components import find_components, tie_of
from ..ties.names import Tensors, named_tensors
from ..torch_private.modules import transient_names
from ..torch_private.tensors import storage_id
from ..weights.spec import Tie
from ..weights.weight import Weight
from .facts import Held, Lane, Storage, StorageGroup, layout_of

_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def groups_of(model: Tensors) -> tuple[StorageGroup, ...]:
    """Return every tensor of ``model`` with its storages, in module order."""
    objects: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in named_tensors(model).items():
        objects.setdefault(id(tensor), (tensor, []))[1].append(name)
    transient = _not_persistent(model)
    found = [_described(tensor, tuple(names), transient) for tensor, names in objects.values()]
    memory = _memory([piece for _, pieces in found for piece in pieces])
    first: dict[int, int] = {}
    groups = DisjointSets(len(found))
    for i, (_, pieces) in enumerate(found):
        for piece in pieces:
            groups.join(first.setdefault(memory[piece][0], i), i)
    ties = _ties_of(model)
    return tuple(_group([found[i] for i in group], memory, ties) for group in groups.lists())


_Piece = tuple[str, int, int, int, str, Lane]
"""A plain tensor: its device, its storage's identity, address and size, its part name, and its lane in the storage."""


def _group(
    found: list[tuple[Held, tuple[_Piece, ...]]], memory: dict[_Piece, tuple[int, int, int]], ties: dict[str, Tie]
) -> StorageGroup:
    storages: dict[int, list[tuple[_Piece, Lane]]] = {}
    for owner, (_, pieces) in enumerate(found):
        for piece in pieces:
            key, shift, _ = memory[piece]
            lane = piece[-1]
            placed = replace(lane, owner=owner, start=lane.start + shift, stop=lane.stop + shift)
            storages.setdefault(key, []).append((piece, placed))
    made = []
    for placed_ones in storages.values():
        first = placed_ones[0][0]
        lanes = tuple(lane for _, lane in placed_ones)
        made.append(Storage(memory[first][2], first[0], lanes, identity=memory[first][0]))
    tensors = tuple(held for held, _ in found)
    own = dict.fromkeys(ties[name] for held in tensors for name in held.names if name in ties)
    return StorageGroup(tensors, tuple(made), tuple(own))


def _memory(pieces: list[_Piece]) -> dict[_Piece, tuple[int, int, int]]:
    """Return, for each piece, the identity of its memory, the offset of its storage in that, and the memory's size.

    Storages with overlapping addresses, such as two over one numpy array, are one memory.
    """
    made: dict[_Piece, tuple[int, int, int]] = {}
    spans: dict[tuple[str, int, int, int], list[_Piece]] = {}
    for piece in pieces:
        spans.setdefault((piece[0], piece[2], piece[3], piece[1]), []).append(piece)
    known = sorted(span for span in spans if span[1] and span[2])
    open_: list[tuple[str, int, int, int]] = []
    stop = 0

    def close() -> None:
        if open_:
            start = open_[0][1]
            for span in open_:
                made.update((piece, (open_[0][3], span[1] - start, stop - start)) for piece in spans[span])
            open_.clear()

    for span in known:
        if not open_ or span[0] != open_[0][0] or span[1] >= stop:
            close()
            stop = 0
        open_.append(span)
        stop = max(stop, span[1] + span[2])
    close()
    for span, own in spans.items():
        if not (span[1] and span[2]):  # meta, freed or empty: there is no address, so each storage is one memory
            made.update((piece, (span[3], 0, span[2])) for piece in own)
    return made


def _described(
    tensor: Tensor, names: tuple[str, ...], transient: frozenset[str] | None
) -> tuple[Held, tuple[_Piece, ...]]:
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "tensor" if transient is None else "buffer"
    shape, stride = _geometry(tensor)
    pieces = tuple(_pieces(tensor))
    is_plain = is_strided(tensor) and not is_lazy(tensor)
    is_wrapped = not is_plain and bool(pieces)
    is_decoded = is_wrapped and not (isinstance(tensor, Weight) and tensor.scheme.transparent)
    held = Held(
        names,
        kind,
        dtype_name(tensor.dtype),
        shape,
        stride,
        _layout(tensor, shape, stride),
        str(tensor.device),
        sum(piece[-1].stop - piece[-1].start for piece in pieces) if is_wrapped else _own_bytes(tensor),
        _scheme(tensor, is_plain),
        _own_bytes(tensor) if is_decoded else 0,
        tensor.requires_grad,
        "not persistent" if transient is not None and transient.issuperset(names) else "",
        id(tensor),
    )
    return held, pieces


def _not_persistent(model: Tensors) -> frozenset[str] | None:
    return frozenset(transient_names(model)) if isinstance(model, nn.Module) else None


def _geometry(tensor: Tensor) -> tuple[Shape, Shape]:
    if is_lazy(tensor) or tensor.is_nested:
        return (), ()
    shape = tuple(int(size) for size in tensor.shape)
    return shape, tuple(int(jump) for jump in tensor.stride()) if tensor.layout == torch.strided else ()


def _layout(tensor: Tensor, shape: Shape, stride: Shape) -> str:
    if is_lazy(tensor):
        return "not initialized"
    if tensor.is_nested:
        return "nested"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    word = layout_of(shape, stride)
    if word == "permuted" and tensor.dim() in (4, 5):
        last = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
        word = "channels last" if tensor.is_contiguous(memory_format=last) else word
    return f"{word}, conjugated" if tensor.is_conj() else f"{word}, negated" if tensor.is_neg() else word


def _own_bytes(tensor: Tensor) -> int:
    return 0 if is_lazy(tensor) or tensor.is_nested else tensor.numel() * tensor.element_size()


def _scheme(tensor: Tensor, is_plain: bool) -> str:
    if isinstance(tensor, Weight):
        return scheme_to_text(tensor.scheme)
    return type(tensor).__name__ if not is_plain and not is_lazy(tensor) and _is_wrapper(tensor) else ""


def _is_wrapper(tensor: Tensor) -> bool:
    return hasattr(tensor, "__tensor_flatten__")


def _pieces(tensor: Tensor, part: str = "") -> Iterator[_Piece]:
    """Yield the plain tensors that ``tensor`` is made of; none if it has no memory, or its class hides it."""
    if is_lazy(tensor):
        return
    if isinstance(tensor, Weight):
        for name, inner in tensor.parts.items():
            yield from _pieces(inner, _path(part, name))
    elif _is_wrapper(tensor):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):  # a DTensor lists its mesh, too
                yield from _pieces(inner, _path(part, name))
    elif tensor.layout in _SPARSE:
        for name in _SPARSE[tensor.layout]:
            yield from _pieces(getattr(tensor.detach(), name)(), _path(part, name.strip("_")))
    elif is_strided(tensor):
        yield _piece(tensor, part)


def _path(part: str, name: str) -> str:
    return f"{part}.{name}" if part else name


def _piece(tensor: Tensor, part: str) -> _Piece:
    shape, stride = _geometry(tensor)
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    stop = start + extent(shape, stride) * size
    layout = _layout(tensor, shape, stride)
    is_dense = stop - start == tensor.numel() * size and "overlapping" not in layout
    lane = Lane(0, part, dtype_name(tensor.dtype), shape, stride, layout, start, stop, is_dense)
    device, storage = str(tensor.device), tensor.untyped_storage()
    address = 0
    if storage.device.type != "meta" and storage.nbytes():
        with suppress(RuntimeError):  # a subclass that hides its memory
            address = int(storage.data_ptr())
    return device, storage_id(tensor), address, int(storage.nbytes()), part, lane


def _ties_of(model: Tensors) -> dict[str, Tie]:
    """Return the tie of each name that has one; sharing that a Tie cannot express is omitted."""
    made: dict[str, Tie] = {}
    for component in find_components(model):
        try:
            tie = tie_of(component)
        except TieError:
            continue
        if tie is not None:
            made.update(dict.fromkeys(tie.names, tie))
    return made
