"""The state of an optimizer as named tensors: stored by parameter name, sharded like the parameters."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from .._checks import describe
from ..errors import CheckpointError, LoadError, OptimizerError
from ..exchange.optimizer_state import Optimizers, check_belongs, optimizers_of
from ..files import OPTIMIZER, DcpFile, Store, is_dcp, is_folder
from ..geometry.shards import box_of, local_of
from ..geometry.views import View, contiguous_stride
from ..renaming.pieces import Range
from ..ties.names import named_tensors
from ..torch_private.modules import unwrapped_name
from .shadows import with_local

FOLDER = "optimizer"
"""Name of the optimizer's folder inside the folder of a checkpoint in safetensors files."""

_GROUPS = "groups"
_LIMIT = 2**26  # bytes of text
_OF_PARAMS = {"params", "param_names"}
"""Entries of a group in the order of its parameters, which may be another one in the optimizer that is loaded."""

_PLAIN = (bool, int, float, str, type(None))


def optimizer_tensors(model: nn.Module | Mapping[str, Tensor], optimizer: Optimizers) -> dict[str, Tensor]:
    """Return the tensors of ``optimizer``'s state by ``parameter.key``; all else is JSON in bytes, under ``groups``.

    A tied parameter has one entry, under its first name; several optimizers have their groups one after the other.
    Raises OptimizerError if an optimizer is another model's, or two hold one parameter, CheckpointError for a value
    that JSON cannot represent.
    """
    if not isinstance(model, nn.Module):
        what = f"its state can be saved only with a module, and the model is {describe(model)}"
        raise CheckpointError(what, name="optimizer", fix="Give the module.")
    optimizers = optimizers_of(optimizer)
    names = _names(model, optimizers)
    made: dict[str, Tensor] = {}
    groups, state = [], {}
    for i, (one, group) in enumerate(_groups(optimizers)):
        entry = {"params": [names[id(param)] for param in group["params"]]}
        for key, value in group.items():
            if key != "params":
                entry[key] = _jsonable(value, f"group {i}.{key}", made)
        groups.append(entry)
        for param in group["params"]:
            name = names[id(param)]
            held = one.state.get(param, {})
            state[name] = {key: _jsonable(value, f"{name}.{key}", made, param) for key, value in held.items()}
    text = json.dumps({"v": 1, "groups": groups, "state": state})
    made[_GROUPS] = as_bytes(text)
    return made


def as_bytes(text: str) -> Tensor:
    """Return ``text`` in UTF-8, as a tensor of bytes."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _jsonable(value: Any, key: str, made: dict[str, Tensor], param: Tensor | None = None) -> Any:
    """Return ``value`` as a JSON value; a tensor is put into ``made`` under ``key`` and becomes a reference to it.

    The reference to a DTensor says whether its rows are sharded with those of ``param``, or it is whole on each rank.
    """
    if isinstance(value, Tensor):
        made[key] = value
        dims = {getattr(p, "dim", p) for p in value.placements} if isinstance(value, DTensor) else {None}
        dims -= {Replicate()}
        if not dims:
            return {"tensor": key, "rows": False}
        is_by_rows = dims == {0} and param is not None and value.shape[0] == param.shape[0]
        return {"tensor": key, "rows": True} if is_by_rows else {"tensor": key}
    items = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(item, _PLAIN) for item in items):
        what = f"is {describe(value)}, which the state of an optimizer cannot store"
        raise CheckpointError(what, name=key, fix="Remove it from the optimizer first.")
    return {"value": list(value), "tuple": isinstance(value, tuple)} if items is value else {"value": value}


class OptimizerLoad:
    """Load an optimizer's state from a checkpoint: the constructor checks, ``read`` reads, ``finish`` assigns."""

    def __init__(self, model: nn.Module, optimizer: Optimizers, source: DcpFile | Store) -> None:
        self._model, self._optimizers, self._source = model, optimizers_of(optimizer), source
        try:
            self._tensors = source.header.tensors
            self._groups, self._state = self._described()
            self._check()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def find(model: nn.Module, optimizer: Optimizers, path: Path) -> OptimizerLoad | None:
        """Return the load of the state stored with the checkpoint at ``path``; ``None`` if it has none."""
        if not optimizers_of(optimizer):
            return None
        if is_dcp(path):
            stored = DcpFile(path, OPTIMIZER)
            if _GROUPS not in stored.header.tensors:
                stored.close()
                return None
            return OptimizerLoad(model, optimizer, stored)
        folder = path / FOLDER
        return OptimizerLoad(model, optimizer, Store(folder)) if is_folder(folder) else None

    def close(self) -> None:
        """Close the files."""
        self._source.close()

    def _described(self) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
        """Return the groups and the state that the checkpoint describes; raise CheckpointError if it is damaged."""
        try:
            if self._tensors[_GROUPS].nbytes > _LIMIT:
                raise ValueError(f"{self._tensors[_GROUPS].nbytes} bytes")
            found = json.loads(self._source.read(_GROUPS).numpy().tobytes())
            groups, state = found["groups"], found["state"]
            wanted = [name for group in groups for name in group["params"]]
            if not (
                found["v"] == 1
                and all(isinstance(name, str) for name in wanted)
                and state.keys() <= set(wanted)
                and all(isinstance(entries, dict) for entries in state.values())
            ):  # no assert: they are gone under python -O
                raise ValueError("not what a save writes")
        except Exception as error:
            raise CheckpointError(
                f"its parameter groups cannot be read: {type(error).__name__}: {str(error)[:100]}",
                name=self._name,
            ) from None
        return groups, state

    @property
    def _name(self) -> str:
        """Return the name of the source for error messages."""
        return f"{self._source.name}: optimizer"

    def _check(self) -> None:
        """Raise LoadError unless the groups have the optimizer's parameters, CheckpointError if a tensor is absent."""
        names, here = _names(self._model, self._optimizers), [group for _, group in _groups(self._optimizers)]
        stored = [sorted(group["params"]) for group in self._groups]
        held = [sorted(names[id(param)] for param in group["params"]) for group in here]
        if stored != held:
            odd = sorted({n for g in stored for n in g} ^ {n for g in held for n in g})[:4]
            what = f"only one of the two has {', '.join(odd)}" if odd else "the same parameters are grouped differently"
            raise LoadError(
                f"the checkpoint has {len(stored)} groups of {sum(map(len, stored))} parameters, the optimizer has "
                f"{len(held)} of {sum(map(len, held))}: {what}",
                name=self._name,
                fix="Build the optimizer with the groups that were saved, or load without it.",
            )
        for key in self._keys():
            if key not in self._tensors:
                raise CheckpointError(
                    "is not stored", name=f"{self._name}: {key}", fix="Check that no file is missing."
                )

    def _keys(self) -> Iterator[str]:
        """Yield the key of every tensor of groups and state."""
        for entries in (*self._groups, *self._state.values()):
            for value in entries.values():
                if isinstance(value, dict) and "tensor" in value:
                    yield value["tensor"]

    def read(self) -> int:
        """Read all values into memory, sharded like the parameters; return the number of bytes."""
        self._nbytes = 0
        tensors = {unwrapped_name(name): tensor for name, tensor in named_tensors(self._model).items()}
        self._made = {
            name: {key: self._value(value, tensors.get(name), self._group_of(name)) for key, value in entries.items()}
            for name, entries in self._state.items()
        }
        self._options = [
            {key: self._value(value, None, group) for key, value in group.items() if key not in _OF_PARAMS}
            for group in self._groups
        ]
        return self._nbytes

    def _group_of(self, name: str) -> Mapping[str, Any]:
        """Return the group that holds the parameter ``name``."""
        return next((group for group in self._groups if name in group["params"]), {})

    def _value(self, entry: Any, param: Tensor | None, group: Mapping[str, Any]) -> Any:
        """Return the value of ``entry``.

        A tensor of the shape of ``param`` is sharded like it, and on its device; any other tensor is read whole, or by
        the rows of ``param`` if it was sharded by them.
        """
        if "tensor" not in entry:
            return tuple(entry["value"]) if entry.get("tuple") else entry["value"]
        key = entry["tensor"]
        stored = self._tensors[key]
        is_like = param is not None and stored.shape == tuple(param.shape) and len(stored.shape) > 0
        if isinstance(param, DTensor) and not is_like and type(entry.get("rows")) is bool:
            return self._placed(key, param, by_rows=entry["rows"])
        if not is_like or param is None:
            self._nbytes += stored.nbytes
            on_device = any((group.get(flag) or {}).get("value") for flag in ("capturable", "fused"))
            value = self._source.read(key)
            return value.to(param.device) if on_device and param is not None else value
        local = self._read(key, box_of(param) if isinstance(param, DTensor) else [(0, size) for size in stored.shape])
        if isinstance(param, DTensor):
            return with_local(param, local.to(local_of(param).device))
        return local.to(param.device)

    def _placed(self, key: str, param: DTensor, *, by_rows: bool) -> Tensor:
        """Return ``key`` on the mesh of ``param``: sharded ``by_rows`` like it, or whole on each rank."""
        shape = self._tensors[key].shape
        box = [(0, size) for size in shape]
        by_rows = by_rows and shape[:1] == tuple(param.shape[:1])
        if by_rows:
            box[0] = box_of(param)[0]
        local = self._read(key, box).to(local_of(param).device)
        placements = [p if by_rows and getattr(p, "dim", None) == 0 else Replicate() for p in param.placements]
        return DTensor.from_local(
            local,
            param.device_mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=contiguous_stride(shape),
        )

    def _read(self, key: str, box: Sequence[Range]) -> Tensor:
        """Return the elements ``box`` of the stored tensor ``key``; count their bytes."""
        stored = self._tensors[key]
        stride = contiguous_stride(stored.shape)
        offset = sum(start * step for (start, _), step in zip(box, stride, strict=True))
        size = tuple(stop - start for start, stop in box)
        local = self._source.read_view(key, View(stored.dtype, size, stride, offset))
        self._nbytes += local.nbytes
        return local

    def finish(self) -> None:
        """Give the optimizer the state and the options of the checkpoint."""
        names = _names(self._model, self._optimizers)
        for (one, group), options in zip(_groups(self._optimizers), self._options, strict=True):
            group.update(options)
            for param in group["params"]:
                entries = self._made.get(names[id(param)])
                if entries:
                    one.state[param] = entries
                elif entries is not None:
                    one.state.pop(param, None)


def _groups(optimizers: Iterable[Optimizer]) -> Iterator[tuple[Optimizer, dict[str, Any]]]:
    """Yield every group of parameters with its optimizer."""
    return ((one, group) for one in optimizers for group in one.param_groups)


def _names(model: nn.Module, optimizers: tuple[Optimizer, ...]) -> dict[int, str]:
    """Return the first name of each tensor by ``id``, as ``state_dict()`` spells it.

    Raises OptimizerError if the optimizers hold other tensors, or two of them hold one.
    """
    names: dict[int, str] = {}
    for name, tensor in named_tensors(model).items():
        names.setdefault(id(tensor), unwrapped_name(name))
    check_belongs(model, optimizers)
    held = [param for _, group in _groups(optimizers) for param in group["params"]]
    for key, count in Counter(map(id, held)).items():
        if count > 1 and key in names:
            raise OptimizerError("is in two optimizers", name=names[key], fix="Save the state of one of them.")
    strangers = [param for param in held if id(param) not in names]
    if strangers:
        shapes = ", ".join(str(tuple(param.shape)) for param in strangers[:4])
        raise OptimizerError(
            f"holds {len(strangers)} parameters that the model does not have, of shape {shapes}",
            name="optimizer",
            fix="Build the optimizer from model.parameters().",
        )
    return names
