"""The state of an optimizer as named tensors: stored by parameter name, sharded like the parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._checks import describe
from ..errors import ArgumentError, CheckpointError, LoadError, OptimizerError
from ..exchange.optimizer_state import Optimizers, check_belongs, optimizers_of
from ..files import OPTIMIZER, DcpFile, Store, is_dcp, is_folder
from ..geometry.views import View, contiguous_stride
from ..ties.names import named_tensors
from .shadows import box_of, local_of, with_local

FOLDER = "optimizer"
"""Name of the optimizer's folder inside the folder of a checkpoint in safetensors files."""

_GROUPS = "groups"
_LIMIT = 2**26  # bytes of text
_PLAIN = (bool, int, float, str, type(None))


def optimizer_tensors(model: nn.Module | Mapping[str, Tensor], optimizer: Any) -> dict[str, Tensor]:
    """Return the tensors of ``optimizer``'s state by ``parameter.key``; all else is JSON in bytes, under ``groups``.

    A tied parameter has one entry, under its first name. Raises OptimizerError if the optimizer is another model's,
    CheckpointError for a value that JSON cannot represent.
    """
    if not isinstance(model, nn.Module):
        what = f"its state can be saved only with a module, and the model is {describe(model)}"
        raise CheckpointError(what, name="optimizer", fix="Give the module.")
    optimizer = _only(optimizer)
    names = _names(model, optimizer)
    made: dict[str, Tensor] = {}
    groups, state = [], {}
    for i, group in enumerate(optimizer.param_groups):
        entry = {"params": [names[id(param)] for param in group["params"]]}
        for key, value in group.items():
            if key != "params":
                entry[key] = _jsonable(value, f"group {i}.{key}", made)
        groups.append(entry)
        for param in group["params"]:
            name = names[id(param)]
            held = optimizer.state.get(param, {})
            state[name] = {key: _jsonable(value, f"{name}.{key}", made) for key, value in held.items()}
    text = json.dumps({"v": 1, "groups": groups, "state": state})
    made[_GROUPS] = as_bytes(text)
    return made


def as_bytes(text: str) -> Tensor:
    """Return ``text`` in UTF-8, as a tensor of bytes."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _jsonable(value: Any, key: str, made: dict[str, Tensor]) -> Any:
    """Return ``value`` as a JSON value; a tensor is put into ``made`` under ``key`` and becomes a reference to it."""
    if isinstance(value, Tensor):
        made[key] = value
        return {"tensor": key}
    items = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(item, _PLAIN) for item in items):
        what = f"is {describe(value)}, which the state of an optimizer cannot store"
        raise CheckpointError(what, name=key, fix="Remove it from the optimizer first.")
    return {"value": list(value), "tuple": isinstance(value, tuple)} if items is value else {"value": value}


class OptimizerLoad:
    """Load an optimizer's state from a checkpoint: the constructor checks, ``read`` reads, ``finish`` assigns."""

    def __init__(self, model: nn.Module, optimizer: Any, source: DcpFile | Store) -> None:
        self._model, self._source = model, source
        try:
            self._optimizer = _only(optimizer)
            self._tensors = source.header.tensors
            self._groups, self._state = self._described()
            self._check()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def find(model: nn.Module, optimizer: Any, path: Path) -> OptimizerLoad | None:
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
            assert found["v"] == 1
            assert all(isinstance(name, str) for name in wanted)
            assert all(isinstance(entries, dict) for entries in state.values())
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
        names, here = _names(self._model, self._optimizer), self._optimizer.param_groups
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
        tensors = named_tensors(self._model)
        self._made = {
            name: {key: self._value(value, tensors.get(name), self._group_of(name)) for key, value in entries.items()}
            for name, entries in self._state.items()
        }
        self._options = [
            {key: self._value(value, None, group) for key, value in group.items() if key != "params"}
            for group in self._groups
        ]
        return self._nbytes

    def _group_of(self, name: str) -> Mapping[str, Any]:
        """Return the group that holds the parameter ``name``."""
        return next((group for group in self._groups if name in group["params"]), {})

    def _value(self, entry: Any, param: Tensor | None, group: Mapping[str, Any]) -> Any:
        """Return the value of ``entry``.

        A tensor of the shape of ``param`` is sharded like it, and on its device; any other tensor is read whole.
        """
        if "tensor" not in entry:
            return tuple(entry["value"]) if entry.get("tuple") else entry["value"]
        key = entry["tensor"]
        stored = self._tensors[key]
        is_like = param is not None and stored.shape == tuple(param.shape) and len(stored.shape) > 0
        if not is_like or param is None:
            self._nbytes += stored.nbytes
            on_device = any((group.get(flag) or {}).get("value") for flag in ("capturable", "fused"))
            value = self._source.read(key)
            return value.to(param.device) if on_device and param is not None else value
        box = box_of(param) if isinstance(param, DTensor) else tuple((0, size) for size in stored.shape)
        stride = contiguous_stride(stored.shape)
        offset = sum(start * step for (start, _), step in zip(box, stride, strict=True))
        size = tuple(stop - start for start, stop in box)
        local = self._source.read_view(key, View(stored.dtype, size, stride, offset))
        self._nbytes += local.nbytes
        if isinstance(param, DTensor):
            return with_local(param, local.to(local_of(param).device))
        return local.to(param.device)

    def finish(self) -> None:
        """Give the optimizer the state and the options of the checkpoint."""
        tensors = named_tensors(self._model)
        for name, entries in self._made.items():
            self._optimizer.state[tensors[name]] = entries
            if not entries:
                del self._optimizer.state[tensors[name]]
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            group.update(options)


def _only(optimizer: Optimizers) -> Any:
    """Return the one optimizer that is given. Raise ArgumentError if there are several."""
    found = optimizers_of(optimizer)
    if len(found) != 1:
        what = f"there are {len(found)}, and a checkpoint has the state of one"
        raise ArgumentError(what, name="optimizer", fix="Give one torch.optim.Optimizer.")
    return found[0]


def _names(model: nn.Module, optimizer: Any) -> dict[int, str]:
    """Return the first name of each tensor by ``id``; raise OptimizerError if the optimizer holds other tensors."""
    names: dict[int, str] = {}
    for name, tensor in named_tensors(model).items():
        names.setdefault(id(tensor), name)
    check_belongs(model, [optimizer])
    strangers = [param for group in optimizer.param_groups for param in group["params"] if id(param) not in names]
    if strangers:
        shapes = ", ".join(str(tuple(param.shape)) for param in strangers[:4])
        raise OptimizerError(
            f"holds {len(strangers)} parameters that the model does not have, of shape {shapes}",
            name="optimizer",
            fix="Build the optimizer from model.parameters().",
        )
    return names
