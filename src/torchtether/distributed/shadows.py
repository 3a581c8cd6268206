"""Shadows of a sharded model: stand-ins with whole tensors without memory, or with this rank's local tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ..checkpoint.saver import as_saved
from ..conversion.attributes import ORIGIN
from ..errors import CheckpointError, ConversionError
from ..geometry.blocks import STOCK, is_strided
from ..geometry.shards import local_of
from ..geometry.views import Shape
from ..ties.names import named_tensors
from ..torch_private.modules import set_tables, tables_of
from ..torch_private.tensors import storage_id
from ..weights.ops.padding import mark_shard
from ..weights.ops.rows import shared_by_rows
from ..weights.weight import Weight
from .views import has_views, register_views, spread, viewed_owners


def sharded_tensors(model: nn.Module | Mapping[str, Tensor]) -> dict[str, DTensor]:
    """Return every DTensor of ``model`` under every name that it has."""
    return {name: tensor for name, tensor in named_tensors(model).items() if isinstance(tensor, DTensor)}


def check_unwrapped(model: nn.Module, verb: str) -> None:
    """Raise ConversionError if a module of ``model`` is DistributedDataParallel or FSDP1."""
    for path, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ConversionError(
                f"cannot {verb} under DistributedDataParallel, which adds 'module.' to all names",
                name=path,
                fix="Give the module inside it.",
            )
        if isinstance(module, FullyShardedDataParallel):
            raise ConversionError(
                f"cannot {verb} under FullyShardedDataParallel (FSDP1), whose flat parameters own the memory",
                name=path,
                fix="Use fully_shard in its place, on the plain module.",
            )


def reshard(model: nn.Module) -> None:
    """Reshard every FSDP2 module; the root's parameters, for one, stay gathered between forward and backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device on which this rank of ``mesh`` computes; of several devices of a type the current one."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    index = torch.get_device_module(mesh.device_type).current_device()
    return torch.device(mesh.device_type, index)


def with_local(tensor: DTensor, local: Tensor) -> Tensor:
    """Return a DTensor like ``tensor`` with the local tensor ``local``, of any dtype and device."""
    if isinstance(local, Weight) and local.shape != tensor.shape:
        mark_shard(local, shared_by_rows(local))
    with torch.no_grad():
        return DTensor.from_local(
            local,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )


# -- stand-ins --------------------------------------------------------------------------------------------------------


def whole_shadow(tensor: Tensor) -> Tensor:
    """Return a tensor with the global shape, dtype and device of a DTensor, without memory; any other tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    local, shape = local_of(tensor), tuple(tensor.shape)
    if isinstance(local, Weight):
        layout = local.scheme.layout(shape)
        parts = {name: _spread(p.shape, p.dtype or local.dtype, local.device) for name, p in layout.items()}
        made: Tensor = Weight(parts, local.spec.shaped(shape, tie=local.tie))
    else:
        made = _spread(shape, local.dtype, local.device)
    return _as_held(made, tensor)


def local_shadow(tensor: Tensor) -> Tensor:
    """Return another object over the memory that this rank holds of ``tensor``."""
    if is_lazy(tensor):
        return tensor
    held = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    if isinstance(held, Weight):
        # a new Weight without the link to FSDP2's padded one: filling it needs no padding
        made: Tensor = Weight({name: part.detach() for name, part in held.parts.items()}, held.spec)
    else:
        made = held.detach()
    made = _as_held(made, tensor)
    if type(tensor) in STOCK:
        made.__dict__.update(tensor.__dict__)  # the recipe of ``tt.on_meta``
    return made


def stand_in(model: nn.Module, shadow: Callable[[Tensor], Tensor], *, views: bool = False) -> nn.Module:
    """Return a copy of ``model`` in which each tensor is replaced by its shadow; tied objects have one shadow.

    With ``views`` the copy also registers names that are views of sharded parameters, as views of their shadows.

    The copy is for questions about names, shapes and schemes. Its modules have the classes from before
    ``fully_shard``, dictionaries (such as those of hooks) of their own, and share everything else with ``model``.
    """
    modules: dict[int, nn.Module] = {}
    tensors: dict[int, Tensor] = {}
    viewed = viewed_owners(model) if views else set()

    def of_tensor(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in tensors:
            made = shadow(tensor)
            tensors[id(tensor)] = spread(made) if id(tensor) in viewed else made
        return tensors[id(tensor)]

    def of_module(module: nn.Module | None) -> nn.Module | None:
        if module is None:
            return None
        if id(module) not in modules:
            made = modules[id(module)] = object.__new__(_plain_class(module))
            for key, value in vars(module).items():  # copies, so that a hook added to one is not added to the other
                made.__dict__[key] = value.copy() if isinstance(value, dict) else value
            made.__dict__[ORIGIN] = module
            tables = tables_of(module)
            set_tables(
                made,
                {name: of_tensor(held) for name, held in tables.parameters.items()},
                {name: of_tensor(held) for name, held in tables.buffers.items()},
                {name: of_module(child) for name, child in tables.modules.items()},
            )
        return modules[id(module)]

    made = of_module(model)
    assert made is not None
    if viewed:
        register_views(model, modules)
    return made


def _plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that ``module`` had before ``fully_shard`` and ``replace_by_views``."""
    kinds: tuple[Any, ...] = type(module).__mro__
    found: type[nn.Module] = next(kind for kind in kinds if not issubclass(kind, FSDPModule) and not has_views(kind))
    return found


def _spread(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return one element expanded to ``shape``, to save memory; on ``meta`` a contiguous tensor."""
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty((), dtype=dtype, device=device).expand(shape)


def _as_held(made: Tensor, tensor: Tensor) -> Tensor:
    """Return ``made``, as a Parameter if ``tensor`` is one."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


class Shadowed:
    """Hold a model (or a mapping) and its ``shadow`` of whole tensors; find the real tensor of each shadow."""

    def __init__(self, model: nn.Module | Mapping[str, Tensor]) -> None:
        self.model = model = as_saved(model)
        self.shadow: nn.Module | Mapping[str, Tensor]
        if isinstance(model, nn.Module):
            check_unwrapped(model, "save")
            reshard(model)
            self.shadow = stand_in(model, whole_shadow, views=True)
        else:
            keys = {name: _local_memory(tensor) for name, tensor in model.items() if isinstance(tensor, DTensor)}
            made = {key: whole_shadow(model[name]) for name, key in keys.items()}
            self.shadow = {name: made[keys[name]] if name in keys else tensor for name, tensor in model.items()}
        self.sharded = sharded_tensors(model)
        """Every DTensor of the model, under each of its names."""
        seen = named_tensors(self.shadow)
        self._names: dict[int, str] = {}
        for name in self.sharded:
            self._names.setdefault(_memory_of(seen[name]), name)

    def name(self, tensor: Tensor) -> str | None:
        """Return the first name of the sharded tensor of which ``tensor`` is the shadow; ``None`` for any other.

        Raises CheckpointError for a view of it.
        """
        name = self._names.get(_memory_of(tensor))
        if name is not None and tuple(tensor.shape) != tuple(self.sharded[name].shape):
            raise CheckpointError(
                f"a view of it (size {list(tensor.shape)}) would be stored as a copy, and no rank has all its rows",
                name=name,
                fix="Save with aliases='drop'.",
            )
        return name

    def real(self, tensor: Tensor) -> Tensor:
        """Return the tensor of which ``tensor`` is the shadow, or ``tensor`` itself. Raises what ``name`` does."""
        name = self.name(tensor)
        return tensor if name is None else self.sharded[name]


def _local_memory(tensor: DTensor) -> Hashable:
    """Return a key that DTensors over one local memory share: ``state_dict()`` makes a DTensor for each tied name.

    Storage objects are compared, not addresses: a rank without rows, too, must see the tie.
    """
    local = local_of(tensor)
    parts = tuple(local.parts.values()) if isinstance(local, Weight) else (local,)
    if not all(map(is_strided, parts)):
        return id(tensor)
    places = tuple((storage_id(part), part.storage_offset(), part.shape, part.stride()) for part in parts)
    return tensor.device_mesh, tensor.placements, tensor.shape, places


def _memory_of(tensor: Tensor) -> int:
    """Return the id of the storage under a shadow; 0 if it has none."""
    first = next(iter(tensor.parts.values())) if isinstance(tensor, Weight) else tensor
    return storage_id(first) if is_strided(first) else 0
