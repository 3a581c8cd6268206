"""A reader of files by ``torch.save``: tensors by position, ties by shared storage; no code in the file is run."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, TetherError, TieError
from ..geometry.views import View, extent, overlaps_itself
from ..ties.components import Component, find_components, tie_of
from ..torch_private.tensors import checkpoint_offset_of
from ..weights.spec import Tie, WeightSpec
from ..weights.weight import Weight
from .header import Header, Stored
from .pickle_calls import load_to_meta
from .reader import TensorFile
from .record import HIDDEN, Record, layout_of, part_key

NESTED = ("state_dict", "model_state_dict", "model", "module")
"""Keys for the state dict of the model in training checkpoints of Lightning, PyTorch's tutorials and DeepSpeed."""

_ALONE = "Save model.state_dict() alone."


class PickledFile(TensorFile):
    """An open file by ``torch.save`` with a state dict, presented as a safetensors file with a torchtether record.

    The pickle is read with ``weights_only=True`` to ``meta``, which gives the positions of the storages; values are
    read from there as from any other file.  Memory that no tensor covers whole is a hidden storage of the record.
    A Weight is read by its parts, and stays a Weight.

    A dict in which one key of ``NESTED`` holds a dict is a training checkpoint: that dict is the state dict, and other
    entries (optimizer, epoch) are ignored.
    """

    names: frozenset[str]
    """The keys of the state dict, with aliases."""

    def _parse(self) -> Header:
        try:
            with os.fdopen(os.dup(self._descriptor), "rb") as file:
                if not zipfile.is_zipfile(file):
                    raise CheckpointError(
                        "it is not in the zip format of torch.save",
                        name=self.name,
                        fix="Load it with torch.load, and save it again.",
                    )
                found = load_to_meta(file, name=self.name)
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle can make torch raise any error
            words = " ".join(str(error).split())
            raise CheckpointError(f"torch.load cannot read it: {words[:200]}", name=self.name) from None
        named = _state(found, self.name)
        self.names = frozenset(named)
        return self._header(named)

    def _header(self, named: Mapping[str, Tensor]) -> Header:
        tensors: dict[str, Stored] = {}
        weights: dict[str, WeightSpec] = {}
        ties: list[Tie] = []
        for component in find_components(named):
            where = f"{self.name}: {component.names[0]}"
            try:
                tie = tie_of(component)
            except TieError as error:
                raise CheckpointError(error.what, name=where) from None
            key = tie.owner if tie else component.names[0]
            made, owner = {}, named[key]
            if isinstance(owner, Weight):
                weights[key] = owner.spec
                made = {part_key(key, n): _stored(p, _place(p, where), where) for n, p in owner.parts.items()}
            else:
                start = _place(owner, where) + component.start
                if _is_whole(owner, component):
                    made[key] = Stored(owner.dtype, tuple(owner.shape), start)
                else:
                    views: dict[str, View | None] = {
                        n: member.view for member in component.members for n in member.names
                    }
                    key, dtype = HIDDEN + key, component.dtype or torch.uint8
                    made[key] = Stored(dtype, (component.nbytes // dtype.itemsize,), start)
                    tie = Tie((key, *views), (None, *views.values()), (True, *(False for _ in views)))
            if tie is not None:
                ties.append(tie)
            for stored in made.values():
                if (stop := stored.start + stored.nbytes) > self._size:
                    raise CheckpointError(f"its values end at byte {stop}, the file has {self._size}", name=where)
            if not tensors.keys().isdisjoint(made):
                raise CheckpointError(
                    "a tensor and a part of a Weight have this name", name=f"{self.name}: {min(made)}"
                )
            tensors |= made
        return Header(tensors, Record(tuple(ties), weights).metadata())


def _stored(part: Tensor, start: int, where: str) -> Stored:
    if not part.is_contiguous():
        raise CheckpointError("a part of this Weight is not contiguous", name=where, fix="Save a copy of it.")
    return Stored(part.dtype, tuple(part.shape), start + int(part.storage_offset()) * part.element_size())


def _state(found: Any, name: str) -> dict[str, Tensor]:
    """Return the state dict in ``found``; raise CheckpointError unless the file holds all its values uncompressed."""
    if not isinstance(found, dict):
        raise CheckpointError(f"it holds a {type(found).__name__}, not a state dict", name=name, fix=_ALONE)
    nested = [key for key in NESTED if isinstance(found.get(key), dict)]
    if len(nested) > 1:
        raise CheckpointError(f"it holds several state dicts: {', '.join(nested)}", name=name, fix="Save one of them.")
    if nested:
        found, name = found[nested[0]], f"{name}: {nested[0]}"
    for key, tensor in found.items():
        where = f"{name}: {str(key)[:200]}"
        if not isinstance(key, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"it is a {type(tensor).__name__}, not a tensor of a state dict", name=where, fix=_ALONE
            )
        if key.startswith(HIDDEN):
            raise CheckpointError(f"names that begin with {HIDDEN} are reserved", name=where)
        if type(tensor) is not Weight:
            _check_plain(tensor, where)
            if tensor.numel() and overlaps_itself(tensor.shape, tensor.stride()):
                what = f"its elements share memory, with shape {tuple(tensor.shape)} and strides {tensor.stride()}"
                raise CheckpointError(what, name=where, fix="Save .contiguous() of it.")
    return _shared(found, name)


def _check_plain(tensor: Tensor, where: str) -> None:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(f"a {type(tensor).__name__} of layout {tensor.layout} cannot be read", name=where)
    if tensor.is_conj() or tensor.is_neg():
        raise CheckpointError(
            "it is a conjugated or negated view", name=where, fix="Save .resolve_conj().resolve_neg() of it."
        )
    reach = tensor.storage_offset() + extent(tensor.shape, tensor.stride())
    if tensor.numel() and reach * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise CheckpointError("it extends beyond its storage", name=where)


def _shared(named: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the tensors with one storage per position in the file.

    Torch makes a new storage on ``meta`` for every tensor.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    made: dict[int, Tensor] = {}

    def over_one(tensor: Tensor, where: str) -> Tensor:
        if not tensor.numel():
            return tensor.detach()
        storage = storages.setdefault(_place(tensor, where), tensor.untyped_storage())
        alias = torch.empty(0, dtype=tensor.dtype, device="meta")
        return alias.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload, no-any-return]

    for key, tensor in named.items():
        if id(tensor) in made:
            continue
        where = f"{name}: {key}"
        if isinstance(tensor, Weight):
            spec, parts = _checked(tensor, where)
            parts = {part: over_one(one, where) for part, one in parts.items()}
            made[id(tensor)] = parts["tensor"] if spec.scheme.transparent else Weight(parts, spec)
        else:
            made[id(tensor)] = over_one(tensor, where)
        if isinstance(tensor, nn.Parameter) and not isinstance(made[id(tensor)], Weight):
            made[id(tensor)] = nn.Parameter(made[id(tensor)], requires_grad=False)
    return {key: made[id(tensor)] for key, tensor in named.items()}


def _checked(weight: Weight, where: str) -> tuple[WeightSpec, dict[str, Tensor]]:
    """Return the spec and the parts of a Weight from a file; raise CheckpointError unless they agree.

    The check is needed because the file can set any attribute of it.
    """
    try:
        spec, parts = weight.spec.replace(tie=None), dict(weight.parts)
        for part in parts.values():
            _check_plain(part, where)
        found = {part: (one.dtype, tuple(one.shape)) for part, one in parts.items()}
        plain = spec.shaped(spec.shape) if spec.scheme.transparent else spec  # its tensor may have any strides
        if found != layout_of(plain):
            raise CheckpointError(f"its parts are {found}, {spec.scheme} needs {layout_of(plain)}", name=where)
    except TetherError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"it is not a valid Weight: {type(error).__name__}: {str(error)[:200]}", name=where
        ) from None
    return spec, parts


def _place(tensor: Tensor, where: str) -> int:
    """Return the byte of the file at which the storage of ``tensor`` begins."""
    if not tensor.numel():
        return 0
    place = checkpoint_offset_of(tensor.untyped_storage())
    if type(place) is not int or place < 0:
        raise CheckpointError("torch.load does not report its position in the file", name=where)
    return place


def _is_whole(tensor: Tensor, component: Component) -> bool:
    """Return whether the stored bytes of ``component`` are the values of ``tensor`` in row-major order."""
    return component.nbytes == 0 or (tensor.is_contiguous() and tensor.nbytes == component.nbytes)
