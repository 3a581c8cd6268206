"""Applying a unit plan by ``fully_shard``, so that ties hold at once, not only after the first forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from .._checks import Model, as_module, describe
from ..errors import ArgumentError, ConversionError, OptimizerError, TieError
from ..exchange.optimizer_state import Optimizers, optimizers_of
from ..geometry.blocks import blocks_of
from ..geometry.views import View
from ..schemes import Plain
from ..ties.edit import tie as tie_names
from ..ties.names import named_tensors
from ..ties.records import as_ties, find_ties
from ..torch_private.fsdp2 import follow_buffer, sharded_slots
from ..torch_private.tensors import local_or_itself
from ..weights.spec import Tie
from ..weights.weight import Weight
from .guards import guard
from .unit_plan import UnitPlan
from .views import ViewAlias, replace_by_views, restore_modules, view_aliases

_FIX_PLAN = "Call plan_units on this model again."


def shard(model: Model, plan: UnitPlan, *, optimizer: Optimizers = None, **fully_shard_kwargs: Any) -> Model:
    """Shard ``model`` by ``fully_shard`` in the units of ``plan``, keep its ties, and return it.

    Quantize before.  Parameters are new objects afterwards (DTensors): build the optimizer later, or give one that
    has not stepped yet as ``optimizer``, which then holds the new ones.  ``plan`` may come from another instance of
    the model, as long as names and shapes are equal.

    Tied names that tensor parallelism (``parallelize_module``) has made separate DTensors become one object again.
    Two parameters over one memory become one. A tied buffer follows its parameter: it is whole while that is gathered.

    A name that is a view of another parameter (its transpose, some of its rows) is computed from it in forward, and is
    not a parameter any more: the owner's gradient is the sum over both names, and the optimizer holds the owner.
    Training is then that of a module which takes the view in ``forward``.  It also equals training of two parameters
    over one memory, if the optimizer keeps no state.  ``tt.distributed.save`` and ``load`` know the name; the model's
    own ``state_dict()`` omits it.

    A tied group is gathered once and has one gradient.  A plan of two units over one shard ("dual leaf") would halve
    the peak of a large embedding in backward, but needs private fields of FSDP2, so it is not offered.

    Hooks guard stock calls from then on: see ``torchtether.distributed.guards``.

    Args:
        fully_shard_kwargs: ``mesh``, ``reshard_after_forward``, ``mp_policy``, ``offload_policy``, and so on.  With
            Weights ``reshard_after_forward`` must not be a number: torch 2.13 cannot gather tensors with all-gather
            hooks again from a smaller mesh (``FSDPParam.all_gather_inputs`` raises NotImplementedError), and a Weight
            needs those hooks.

    Raises:
        TieError: the plan has faults or is of another model, or names that it ties are not tied.
        ConversionError: the model is sharded already, is under DDP, or Weights do not support the arguments; or there
            is no process group.
        OptimizerError: ``optimizer`` has state, holds parameters of another model, or a view without its owner.
    """
    given, model = model, as_module(model)
    if not isinstance(plan, UnitPlan):
        raise ArgumentError(f"is {describe(plan)}, not a plan", name="plan", fix="Give what plan_units returned.")
    if plan.faults:
        raise TieError(
            f"the plan has {len(plan.faults)} faults: {' '.join(plan.faults)}",
            fix="Correct them, then call plan_units again.",
        )
    _check_model(model, plan)
    kwargs = {"mesh": plan.mesh, **fully_shard_kwargs}
    _check_kwargs(plan, kwargs)
    followers = _Followers(model, optimizer)
    restore_ties(model, plan.ties)
    _check_live(model, plan)
    buffers = _tied_buffers(model, plan)
    views = view_aliases(model, plan.ties)
    followers.check([alias for _, alias in views])
    modules = dict(model.named_modules(remove_duplicate=False))
    undo = replace_by_views(views)
    try:
        for unit in plan.units:
            chosen = [modules[path] for path in unit.modules]
            fully_shard(chosen[0] if len(chosen) == 1 else chosen, **kwargs)  # type: ignore[arg-type, call-overload]
    except BaseException:
        if not any(isinstance(module, FSDPModule) for module in model.modules()):
            restore_modules(undo)
        raise
    tensors = named_tensors(model)
    for module, name, owner, is_object in buffers:
        follow_buffer(model, tensors[owner], module, name, detached=not is_object)
    _verify(model, plan)
    followers.follow()
    guard(model, plan.ties)
    return given


# -- before -----------------------------------------------------------------------------------------------------------


def _check_model(model: nn.Module, plan: UnitPlan) -> None:
    """Raise unless the model has the planned parameters and is not under FSDP2 or DDP."""
    for path, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ConversionError(
                "fully_shard has been applied already", name=path, fix="Give a model that is not sharded."
            )
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ConversionError(
                "is wrapped in DistributedDataParallel", name=path, fix="Shard the module inside: FSDP2 replaces DDP."
            )
    tensors = {name: tensor for name, tensor in named_tensors(model).items() if isinstance(tensor, nn.Parameter)}
    planned = {name for parameter in plan.parameters for name in (*parameter.names, *parameter.views)}
    for name in tensors:
        if name not in planned:
            raise TieError("is in the model, but not in the plan", name=name, fix=_FIX_PLAN)
    for parameter in plan.parameters:
        name = parameter.name
        if name not in tensors:
            raise TieError("is in the plan, but not in the model", name=name, fix=_FIX_PLAN)
        held = tensors[name]
        scheme = _scheme(held)
        if tuple(held.shape) != parameter.shape or scheme != parameter.scheme:
            raise TieError(
                f"is {scheme} of shape {tuple(held.shape)}, the plan has {parameter.scheme} of {parameter.shape}",
                name=name,
                fix=_FIX_PLAN,
            )


def _scheme(tensor: Tensor) -> Any:
    """Return the scheme of ``tensor``, or of its local tensor."""
    local = local_or_itself(tensor)
    return local.scheme if isinstance(local, Weight) else Plain()


def _check_kwargs(plan: UnitPlan, kwargs: dict[str, Any]) -> None:
    """Raise unless the arguments of ``fully_shard`` fit the plan and its Weights."""
    mesh = kwargs["mesh"]
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ArgumentError(f"is {describe(mesh)}, not a DeviceMesh", name="mesh", fix="Call init_device_mesh.")
    if mesh is None and not torch.distributed.is_initialized():
        raise ConversionError("there is no process group", fix="Call torch.distributed.init_process_group first.")
    if mesh is None:
        size, replicas = torch.distributed.get_world_size(), 1
    else:
        size, replicas = mesh.size(mesh.ndim - 1), mesh.size(0) if mesh.ndim == 2 else 1
    if kwargs.get("dp_mesh_dims") is None and (size, replicas) != (plan.ranks, plan.replicas):
        raise TieError(
            f"the mesh has {size} ranks and {replicas} replicas, the plan is for {plan.ranks} and {plan.replicas}",
            fix=_FIX_PLAN,
        )
    quantized = [p.name for p in plan.parameters if not isinstance(p.scheme, Plain)]
    again = kwargs.get("reshard_after_forward")
    if quantized and type(again) is int:
        raise ConversionError(
            f"reshard_after_forward={again} makes FSDP2 gather again from {again} ranks, which torch cannot do for "
            "tensors with all-gather hooks (FSDPParam.all_gather_inputs), and a Weight needs its hooks",
            name=quantized[0],
            fix="Give True or False.",
        )
    if quantized and kwargs.get("shard_placement_fn") is not None:
        raise ConversionError(
            "shard_placement_fn may shard other dimensions than 0, and a Weight can be sharded by rows only",
            name=quantized[0],
            fix="Leave it out.",
        )


def restore_ties(model: nn.Module, ties: Iterable[Tie]) -> None:
    """Make every name of ``ties`` the object that its owner names.

    ``parallelize_module`` distributes each name by itself and silently makes tied names two DTensors; call this after
    it (``shard`` does).  Two parameters over one memory become one too.  Buffers and views are not changed.

    Raises:
        TieError: the model lacks a name, the names were placed differently, or hold other values by now.
    """
    model = as_module(model)
    tensors = named_tensors(model)
    for tie in as_ties(ties, "ties"):
        for name in tie.names:
            if name not in tensors:
                raise TieError(f"is not in the model, but in the tie {tie}", name=name, fix="Give ties of this model.")
        owner = tensors[tie.owner]
        for name, view in zip(tie.aliases, tie.views[1:], strict=True):
            held = tensors[name]
            if held is owner or view is not None or not isinstance(held, nn.Parameter):
                continue
            is_placed = isinstance(held, DTensor) and isinstance(owner, DTensor)
            if is_placed and (held.placements, held.device_mesh) != (owner.placements, owner.device_mesh):  # type: ignore[attr-defined]
                raise TieError(
                    f"has placements {held.placements}, {tie.owner} has {owner.placements}, so they cannot be tied",  # type: ignore[attr-defined]
                    name=name,
                    fix="Give both the same placement, e.g. RowwiseParallel for the embedding, Colwise for the head.",
                )
            one, two = local_or_itself(held), local_or_itself(owner)
            if not (_is_one_memory(one, two) or (is_placed and _is_same(one, two))):
                raise TieError(
                    f"is not tied to {tie.owner} and holds other values",
                    name=name,
                    fix=f"Call tt.tie(model, {tie.owner!r}, {name!r}) first.",
                )
            tie_names(model, tie.owner, name)


def _is_one_memory(one: Tensor, two: Tensor) -> bool:
    """Return whether the two tensors lie over the same memory."""
    blocks = blocks_of(one)
    return bool(blocks) and blocks == blocks_of(two)


def _is_same(one: Tensor, two: Tensor) -> bool:
    """Return whether the two tensors have equal shape, dtype and values; on ``meta`` there are no values to compare."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return one.is_meta or two.is_meta or torch.equal(one, two)


def _check_live(model: nn.Module, plan: UnitPlan) -> None:
    """Raise unless the ties of the plan hold now, and there are no others."""
    tensors = named_tensors(model)
    for tie in plan.ties:
        for name, view in zip(tie.aliases, tie.views[1:], strict=True):
            is_one = view is not None or tensors[name] is tensors[tie.owner]
            if isinstance(tensors[name], nn.Parameter) and not is_one:
                raise TieError(
                    f"is not tied to {tie.owner}, but the plan ties it",
                    name=name,
                    fix=f"Call tt.tie(model, {tie.owner!r}, {name!r}) before you shard.",
                )
    planned = {frozenset(tie.names) for tie in plan.ties}
    live: dict[str, tuple[str, View | None]] = {}
    for tie in find_ties(model):
        live.update((name, (tie.owner, view)) for name, view in zip(tie.names, tie.views, strict=True))
        if not any(set(tie.names) <= names for names in planned):
            raise TieError(f"is tied to {tie.owner}, but not in the plan", name=tie.aliases[0], fix=_FIX_PLAN)
    for tie in plan.ties:
        for name, view in zip(tie.aliases, tie.views[1:], strict=True):
            if view is not None and not _is_like(live.get(name), (tie.owner, view)):
                raise TieError(f"is not the view of {tie.owner} that the plan has", name=name, fix=_FIX_PLAN)


def _is_like(one: tuple[str, View | None] | None, two: tuple[str, View]) -> bool:
    """Return whether owner and view are equal, whatever the dtypes of the views."""
    if one is None or one[1] is None:
        return False
    return one[0] == two[0] and one[1] == dataclasses.replace(two[1], dtype=one[1].dtype)


def _tied_buffers(model: nn.Module, plan: UnitPlan) -> list[tuple[nn.Module, str, str, bool]]:
    """Return (module, name, owner, is the same object) of every buffer that is tied to the parameter ``owner``."""
    modules, found = dict(model.named_modules(remove_duplicate=False)), []
    tensors = named_tensors(model)
    for tie in plan.ties:
        owner = next((name for name in tie.names if isinstance(tensors[name], nn.Parameter)), None)
        if owner is None:
            continue
        for name, view in zip(tie.names, tie.views, strict=True):
            path, _, leaf = name.rpartition(".")
            if view is None and leaf in modules[path]._buffers:
                found.append((modules[path], leaf, owner, tensors[name] is tensors[owner]))
    return found


class _Followers:
    """Hold optimizers that were built over the unsharded parameters, and give them the sharded ones."""

    def __init__(self, model: nn.Module, optimizer: Optimizers) -> None:
        self._model, self._optimizers = model, optimizers_of(optimizer)
        names = {id(p): name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
        self._groups = []
        for one in self._optimizers:
            if one.state:
                raise OptimizerError(
                    f"the optimizer has state of {len(one.state)} parameters, which would have to be sharded",
                    fix="Shard the model first, then load the optimizer's state with tt.distributed.load.",
                )
            for group in one.param_groups:
                unknown = [tuple(p.shape) for p in group["params"] if id(p) not in names]
                if unknown:
                    raise OptimizerError(
                        f"the optimizer holds {len(unknown)} parameters that the model does not have, the first of "
                        f"shape {unknown[0]}",
                        fix="Build the optimizer from model.parameters().",
                    )
                self._groups.append((group, [names[id(p)] for p in group["params"]]))

    def check(self, views: Iterable[ViewAlias]) -> None:
        """Raise OptimizerError if the optimizers hold a view and not its owner."""
        held = {name for _, names in self._groups for name in names}
        self._views = {alias.name for alias in views}
        for alias in views:
            if alias.name in held and alias.owner not in held:
                raise OptimizerError(
                    f"is a view of {alias.owner}, and the optimizer holds the view without {alias.owner}",
                    name=alias.name,
                    fix="Build the optimizer from model.parameters().",
                )

    def follow(self) -> None:
        """Replace the parameters of each group by the sharded ones, without views."""
        tensors = named_tensors(self._model)
        for group, names in self._groups:
            group["params"] = [tensors[name] for name in names if name not in self._views]


# -- afterwards -------------------------------------------------------------------------------------------------------


def _verify(model: nn.Module, plan: UnitPlan) -> None:
    """Raise unless every tie is one object, and FSDP2 manages every DTensor, each with memory of its own.

    Objects are compared, then blocks of memory; never ``data_ptr()``, which is 0 for every DTensor.
    """
    tensors = named_tensors(model)
    for parameter in plan.parameters:
        held = [tensors[name] for name in parameter.names if isinstance(tensors[name], nn.Parameter)]
        for name, tensor in zip(parameter.names, held, strict=False):
            if tensor is not held[0]:
                raise TieError(f"is no longer tied to {parameter.name} after fully_shard", name=name, fix=_FIX_PLAN)
    slots = sharded_slots(model)
    seen: dict[object, str] = {}
    for parameter in plan.parameters:
        managed = slots.get(id(tensors[parameter.name]))
        if managed is None:
            if isinstance(tensors[parameter.name], DTensor):
                raise TieError("is in no unit of FSDP2 after fully_shard", name=parameter.name, fix=_FIX_PLAN)
            continue  # among ignored_params
        for block in blocks_of(local_or_itself(tensors[parameter.name])):
            key = (block.space, block.start, block.stop)
            if key in seen and seen[key] != parameter.name:
                raise TieError(
                    f"shares memory with another parameter, {seen[key]}, after fully_shard", name=parameter.name
                )
            seen[key] = parameter.name
