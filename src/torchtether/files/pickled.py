"""Reading what ``torch.save`` wrote: tensors by position, ties by shared storage; nothing in the file is run."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, TieError
from ..spec import Tie, View
from ..ties import Component, find_components, tie_of
from .header import Header, Stored
from .reader import TensorFile
from .record import HIDDEN, Record

PICKLED = (".pt", ".pth", ".bin")
"""How the names of such files end."""


class PickledFile(TensorFile):
    """An open file by ``torch.save`` that holds a state dict, as if it were a safetensors file with our record.

    The pickle is read with ``weights_only=True`` and on ``meta``, which gives the places of the storages; values are
    read from there as from any other file.  Memory that no tensor covers whole is a hidden storage of the record.
    """

    def _parse(self) -> Header:
        try:
            with os.fdopen(os.dup(self._descriptor), "rb") as file:
                if not zipfile.is_zipfile(file):
                    raise CheckpointError(
                        "it is not in the zip format of torch.save",
                        name=self.name,
                        fix="Load it with torch.load, and save it again.",
                    )
                with zipfile.ZipFile(file) as archive:
                    if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                        raise CheckpointError("its entries are compressed, torch.save does not do that", name=self.name)
                file.seek(0)
                found = torch.load(file, map_location="meta", weights_only=True)
        except CheckpointError:
            raise
        except Exception as error:  # whatever a damaged pickle makes torch raise
            words = " ".join(str(error).split())
            raise CheckpointError(f"torch.load cannot read it: {words[:200]}", name=self.name) from None
        return self._header(_state(found, self.name))

    def _header(self, named: Mapping[str, Tensor]) -> Header:
        size = os.fstat(self._descriptor).st_size
        tensors: dict[str, Stored] = {}
        ties: list[Tie] = []
        for component in find_components(named):
            where = f"{self.name}: {component.names[0]}"
            try:
                tie = tie_of(component)
            except TieError as error:
                raise CheckpointError(error.what, name=where) from None
            key = tie.owner if tie else component.names[0]
            start = _place(named[key], where) + component.start
            if _is_whole(named[key], component):
                tensors[key] = Stored(named[key].dtype, tuple(named[key].shape), start)
            else:
                views: dict[str, View | None] = {n: member.view for member in component.members for n in member.names}
                key, dtype = HIDDEN + key, component.dtype or torch.uint8
                tensors[key] = Stored(dtype, (component.nbytes // dtype.itemsize,), start)
                tie = Tie((key, *views), (None, *views.values()), (True, *(False for _ in views)))
            if tie is not None:
                ties.append(tie)
            if start + tensors[key].nbytes > size:
                raise CheckpointError(f"it reaches byte {start + tensors[key].nbytes}, the file has {size}", name=where)
        return Header(tensors, Record(tuple(ties)).metadata())


def _state(found: Any, name: str) -> dict[str, Tensor]:
    """``found`` if it is a state dict of tensors whose values lie in the file as they are."""
    if not isinstance(found, dict):
        raise CheckpointError(
            f"it holds a {type(found).__name__}, not a state dict", name=name, fix="Save model.state_dict() alone."
        )
    for key, tensor in found.items():
        where = f"{name}: {key}"
        if not isinstance(key, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"it is a {type(tensor).__name__}, not a tensor of a state dict",
                name=where,
                fix="Save model.state_dict() alone.",
            )
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
            raise CheckpointError(f"a {type(tensor).__name__} of layout {tensor.layout} cannot be read", name=where)
        if tensor.is_conj() or tensor.is_neg():
            raise CheckpointError("it is a lazy conjugate or negative", name=where, fix="Resolve it before saving.")
        if key.startswith(HIDDEN):
            raise CheckpointError(f"names that begin with {HIDDEN} are taken", name=where)
        extent = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        if (
            tensor.numel()
            and (tensor.storage_offset() + extent) * tensor.element_size() > tensor.untyped_storage().nbytes()
        ):
            raise CheckpointError("it reaches past its storage", name=where)
    return _shared(found, name)


def _shared(named: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors over one storage for each place in the file; torch makes a new one on ``meta`` for every tensor."""
    storages: dict[int, torch.UntypedStorage] = {}
    made: dict[int, Tensor] = {}
    for key, tensor in named.items():
        if id(tensor) not in made and tensor.numel():
            storage = storages.setdefault(_place(tensor, f"{name}: {key}"), tensor.untyped_storage())
            alias = torch.empty(0, dtype=tensor.dtype, device="meta")
            alias.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(alias, requires_grad=False) if is_parameter else alias
    return {key: made.get(id(tensor), tensor) for key, tensor in named.items()}


def _place(tensor: Tensor, where: str) -> int:
    """Where in the file the storage of ``tensor`` begins; torch notes it on storages that it loads to ``meta``."""
    if not tensor.numel():
        return 0
    place = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if type(place) is not int or place < 0:
        raise CheckpointError("torch does not say where it is in the file", name=where)
    return place


def _is_whole(tensor: Tensor, component: Component) -> bool:
    """Whether the stored bytes of ``component`` are the values of ``tensor`` in row-major order."""
    return component.nbytes == 0 or (tensor.is_contiguous() and tensor.nbytes == component.nbytes)
