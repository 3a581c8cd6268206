"""Planning a sharded model: which modules are units, what each rank holds, and when each unit is gathered."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from .._checks import as_module, describe, first_line
from ..errors import ArgumentError, RuleError, TetherError, TieError
from ..geometry.groups import DisjointSets
from ..schemes import Plain
from ..ties.names import named_tensors, nearest
from ..ties.records import as_ties, find_ties, recorded_ties
from ..torch_private.tensors import local_or_itself
from ..weights.ops.sharding import cut_block, rows_per_rank
from ..weights.spec import Tie
from ..weights.weight import Weight
from .grouping import ROOT, Grouping, Key, Policy, TiedNames
from .memory import UnitParameter
from .shadows import check_unwrapped
from .unit_plan import Unit, UnitPlan
from .uses import Use, find_uses
from .views import view_faults

UnitTypes = type | str | Iterable[type | str]
Mesh = DeviceMesh | int | tuple[int, ...] | None

_PLAIN = Plain()


def plan_units(
    model: nn.Module,
    unit_types: UnitTypes,
    *,
    mesh: Mesh = None,
    policy: Policy = "group",
    inputs: Any = None,
    ties: Iterable[Tie] = (),
) -> UnitPlan:
    """Plan a sharding in which each module of ``unit_types`` is a unit, and every tied group lies in one unit.

    Nothing is changed, and no process group is needed: the model may be on ``meta``, for any number of ranks.

    Args:
        unit_types: classes of modules, or globs over their paths such as ``"layers.*"``; parameters of other modules
            belong to the root.
        mesh: the mesh, or its size: 8 ranks, or (2, 4) for 2 replicas over 4 ranks each. ``None``: the process group.
        policy: for tied groups whose names lie in several units.  ``"group"`` makes one unit of the modules that own
            them; ``"root"`` moves them to the unit that encloses all of them.
        inputs: arguments of a forward, as a tuple or a mapping of keywords.  The forward runs on ``meta``, to find tied
            weights that are used outside of the modules that own them (``F.linear(h, self.emb.weight)``).
        ties: ties that will hold when the model is sharded, but do not now.

    Raises:
        RuleError: ``unit_types`` match no module, or the mesh has no size.
        ArgumentError: ``unit_types``, ``inputs`` or ``ties`` are something else.
        ConversionError: the model is under DDP or FSDP1.

    >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10, bias=False))
    >>> model[2].weight = model[0].weight
    >>> [unit.label for unit in plan_units(model, nn.Linear, mesh=4).units]
    ['[0, 2]', '1', 'root']
    """
    model, ties = as_module(model), as_ties(ties, "ties")
    if inputs is not None and not isinstance(inputs, (tuple, list, Mapping)):
        fix = "Give the arguments of one forward, such as (tokens,)."
        raise ArgumentError(f"is {describe(inputs)}, not a tuple or a mapping", name="inputs", fix=fix)
    if policy not in ("group", "root"):
        raise RuleError(f"policy={policy!r} is neither 'group' nor 'root'")
    check_unwrapped(model, "plan")
    ranks, replicas = _sizes(mesh)
    wanted = _wanted(model, unit_types)
    tensors = named_tensors(model)
    faults: list[str] = []
    warnings: list[str] = []
    found = _live_ties(model, faults)
    declared = (*recorded_ties(model), *ties)
    groups = [tie.names for tie in found]
    for tie in declared:
        missing = [name for name in tie.names if name not in tensors]
        if missing:
            faults.append(f"{missing[0]}: is not in the model, but in a tie record: {tie}.")
        else:
            groups.append(tie.names)
    uses = _traced(model, inputs, warnings)
    grouping = Grouping(model, wanted, policy)
    rooted = Grouping(model, wanted, "root")
    together = _with_uses(_merged_groups(groups), uses or (), model, tensors)
    grouping.settle(together)
    rooted.settle(together)
    units = _units(grouping, tensors, uses, (*found, *declared))
    for tie in found:
        faults += view_faults(model, tie, tensors)
    for unit in units:
        _check_unit(unit, ranks, faults, warnings)
    for module in wanted:
        if type(module).forward is nn.Module.forward and "forward" not in vars(module):  # torch.compile sets it there
            path = next(path for path, other in model.named_modules() if other is module)
            faults.append(
                f"{path}: a {type(module).__name__} has no forward, so FSDP2 never gathers it. Name its children."
            )
    views = {name for tie in found for name, view in zip(tie.names, tie.views, strict=True) if view is not None}
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter) and name not in views:
            faults += _parameter_faults(name, tensor, ranks)
    buffers = {id(buffer): buffer for buffer in model.buffers() if not isinstance(buffer, nn.Parameter)}
    single = [path for key in rooted.order() for path in rooted.paths(key) if len(key) == 1]
    return UnitPlan(
        units=units,
        ties=(*found, *(tie for tie in declared if tie.names not in {other.names for other in found})),
        ranks=ranks,
        replicas=replicas,
        policy=policy,
        faults=tuple(dict.fromkeys(faults)),
        warnings=tuple(dict.fromkeys(warnings)),
        notes=tuple(dict.fromkeys(grouping.notes)),
        buffer_bytes=sum(buffer.nbytes for buffer in buffers.values() if not is_lazy(buffer)),
        is_traced=uses is not None,
        device=_device_type(mesh, tensors),
        mesh=mesh if isinstance(mesh, DeviceMesh) else None,
        _model=weakref.ref(model),
        _single=tuple(single),
    )


# -- arguments --------------------------------------------------------------------------------------------------------


def _sizes(mesh: Mesh) -> tuple[int, int]:
    """Return the numbers of ranks that share rows, and of replicas."""
    if mesh is None:
        is_up = torch.distributed.is_available() and torch.distributed.is_initialized()
        return (torch.distributed.get_world_size() if is_up else 1), 1
    shape = mesh.shape if isinstance(mesh, DeviceMesh) else mesh if isinstance(mesh, (tuple, list)) else (mesh,)
    if not 1 <= len(shape) <= 2 or not all(type(size) is int and size > 0 for size in shape):
        raise RuleError(f"mesh {mesh!r} is neither a number of ranks nor (replicas, ranks)")
    return shape[-1], shape[0] if len(shape) == 2 else 1


def _device_type(mesh: Mesh, tensors: dict[str, Tensor]) -> str:
    """Return the type of device on which the model will be sharded; of one on meta, that of this machine."""
    if isinstance(mesh, DeviceMesh):
        return mesh.device_type
    types = {tensor.device.type for tensor in tensors.values()} - {"meta"}
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return min(types, key=lambda kind: kind == "cpu", default=accelerator.type if accelerator is not None else "cpu")


def _wanted(model: nn.Module, unit_types: UnitTypes) -> list[nn.Module]:
    """Return the modules that ``unit_types`` match; raise RuleError for a type that matches none."""
    is_several = isinstance(unit_types, Iterable) and not isinstance(unit_types, (type, str))
    kinds: Any = unit_types if is_several else [unit_types]
    found: dict[int, nn.Module] = {}
    for kind in kinds:
        if not isinstance(kind, (type, str)):
            fix = "Give classes of modules, or globs over their paths."
            raise ArgumentError(f"holds {describe(kind)}, not a class or a glob", name="unit_types", fix=fix)
        matches = [
            module
            for path, module in model.named_modules(remove_duplicate=False)
            if (isinstance(kind, type) and isinstance(module, kind)) or (isinstance(kind, str) and _fits(path, kind))
        ]
        if not matches:
            names = dict.fromkeys(path for path, _ in model.named_modules() if path)
            wanted = kind.__name__ if isinstance(kind, type) else repr(kind)
            near = nearest(kind, names) if isinstance(kind, str) else ""
            raise RuleError(
                f"unit_types: {wanted} matches no module of {type(model).__name__}",
                fix=f"The nearest is {near!r}." if near else "Give classes of its modules, or globs over their paths.",
            )
        found.update((id(module), module) for module in matches)
    return list(found.values())


def _fits(path: str, glob: str) -> bool:
    """Return whether ``path`` matches ``glob``, in which a star matches one part: ``layers.*`` are the layers alone."""
    steps, parts = path.split("."), glob.split(".")
    return len(steps) == len(parts) and all(fnmatchcase(step, part) for step, part in zip(steps, parts, strict=True))


# -- groups -----------------------------------------------------------------------------------------------------------


def _live_ties(model: nn.Module, faults: list[str]) -> tuple[Tie, ...]:
    """Return the ties of ``model``; append the fault if they cannot be found."""
    try:
        return find_ties(model)
    except TieError as error:
        faults.append(str(error))
        return ()


def _merged_groups(groups: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the groups; those that share a name are merged."""
    sets, first = DisjointSets(len(groups)), dict[str, int]()
    for i, names in enumerate(groups):
        for name in names:
            sets.join(first.setdefault(name, i), i)
    return [tuple(dict.fromkeys(name for i in joined for name in groups[i])) for joined in sets.lists()]


def _with_uses(
    groups: Sequence[tuple[str, ...]], uses: Sequence[Use], model: nn.Module, tensors: dict[str, Tensor]
) -> list[TiedNames]:
    """Return each group with the stacks of modules that run at its uses; each other used parameter is a group too."""
    ids = {path: id(module) for path, module in model.named_modules(remove_duplicate=False)}
    stacks: dict[str, dict[tuple[int, ...], None]] = {}
    for use in uses:
        stack = tuple(ids[path] for path in use.running if path)
        stacks.setdefault(use.name, {}).setdefault(stack)
    made = []
    grouped = {name for names in groups for name in names}
    for names in [*groups, *((name,) for name in stacks if name not in grouped)]:
        made.append(TiedNames(names, tuple(dict.fromkeys(s for name in names for s in stacks.get(name, ())))))
    return made


def _traced(model: nn.Module, inputs: Any, warnings: list[str]) -> tuple[Use, ...] | None:
    """Return the uses of parameters in a forward on ``meta``; ``None``, and a warning, if the forward raises."""
    if inputs is None:
        return None
    try:
        return find_uses(model, inputs)
    except Exception as error:  # the model's code may raise anything
        warnings.append(
            f"the forward on meta raised {type(error).__name__}: {first_line(error)}. So weights that are used "
            "outside of their modules are not known"
        )
        return None


def _units(
    grouping: Grouping, tensors: dict[str, Tensor], uses: tuple[Use, ...] | None, ties: Sequence[Tie]
) -> tuple[Unit, ...]:
    """Return the units with their parameters, in the order of ``grouping``."""
    one: dict[int, int] = {}  # parameters over one memory, which will be one: id to the owner's id
    views: dict[str, list[str]] = {}  # names that are views, by owner
    for tie in ties:
        for name, view in zip(tie.names, tie.views, strict=True):
            if view is not None and isinstance(tensors.get(tie.owner), nn.Parameter):
                views.setdefault(tie.owner, []).append(name)
            elif all(n in tensors and isinstance(tensors[n], nn.Parameter) for n in (tie.owner, name)):
                one.setdefault(id(tensors[name]), id(tensors[tie.owner]))
    hidden = {name for some in views.values() for name in some}
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if name not in hidden:
            names.setdefault(one.get(id(tensor), id(tensor)), []).append(name)
    counts: dict[str, set[str]] = {}
    for use in uses or ():
        counts.setdefault(use.name, set()).add(use.running[-1])
    homes = grouping.homes(tensors)
    held: dict[Key, list[UnitParameter]] = {key: [] for key in (*grouping.order(), ROOT)}
    for known in names.values():
        tensor = tensors[known[0]]
        if isinstance(tensor, nn.Parameter) and not is_lazy(tensor):
            taken = tuple(view for name in known for view in views.get(name, ()))
            used = {module for name in (*known, *taken) for module in counts.get(name, ())}
            count = len(used) if uses is not None else len(known) + len(taken)
            held[homes[known[0]]].append(_parameter(tuple(known), taken, tensor, max(1, count)))
    return tuple(Unit(grouping.paths(key), tuple(found)) for key, found in held.items())


def _parameter(names: tuple[str, ...], views: tuple[str, ...], tensor: Tensor, uses: int) -> UnitParameter:
    """Return the description of the parameter ``tensor``."""
    local = local_or_itself(tensor)
    scheme = local.scheme if isinstance(local, Weight) else _PLAIN
    return UnitParameter(names, tuple(tensor.shape), tensor.dtype, scheme, tensor.requires_grad, uses, views)


# -- faults and warnings ----------------------------------------------------------------------------------------------


def _parameter_faults(name: str, parameter: nn.Parameter, ranks: int) -> list[str]:
    """Return a line for each reason why ``parameter`` cannot be sharded over ``ranks``."""
    if is_lazy(parameter):
        return [f"{name}: is lazy and has no shape yet. Run one forward first."]
    if parameter.dim() == 0:
        return [f"{name}: has no rows to shard. Give it shape (1,)."]
    if not parameter.is_contiguous():
        stride = tuple(parameter.stride())
        return [f"{name}: has stride {stride}, and fully_shard takes contiguous parameters only. Make it contiguous."]
    local = local_or_itself(parameter)
    if not isinstance(local, Weight) or local.scheme.transparent:
        return []
    shape, scheme = tuple(local.shape), local.scheme
    if len(shape) == 1 and ranks > 1:
        return [
            f"{name}: {scheme} of shape {shape} is one row, which {ranks} ranks cannot share. Leave it unquantized."
        ]
    try:
        layout = scheme.layout(shape)
        cut = cut_block(layout, shape, ranks)
    except TetherError as error:
        return [f"{name}: {error}"]
    one = next((role for role, part in layout.items() if part.span == 0 and math.prod(part.shape) == 1), None)
    if one is not None and parameter.requires_grad and ranks > 1:
        return [
            f"{name}: {scheme} has one {one!r} for all rows, which {ranks} ranks cannot train, each with its own rows. "
            "Freeze it, or quantize it with a scale per row."
        ]
    if cut is None:
        return []
    part, multiple = cut
    each = rows_per_rank(shape[0], ranks)
    return [
        f"{name}: {scheme} of shape {shape} cannot be split over {ranks} ranks: {each} rows would cut a block of "
        f"{part!r}. Shard over ranks that get a multiple of {multiple} rows each, or quantize it with a scale per row."
    ]


def _check_unit(unit: Unit, ranks: int, faults: list[str], warnings: list[str]) -> None:
    """Append a fault for mixed dtypes, which FSDP2 refuses in a unit, and a warning for each uneven shard."""
    dtypes = {parameter.dtype for parameter in unit.parameters if parameter.requires_grad}
    if len(dtypes) > 1:
        listed = ", ".join(sorted(map(str, dtypes)))
        faults.append(
            f"{unit.label}: trainable parameters of one unit have several dtypes ({listed}), which FSDP2 refuses. "
            "Convert them to one dtype, or freeze some."
        )
    for parameter in unit.parameters:
        if not parameter.shape or parameter.shape[0] % ranks == 0:
            continue
        each, rows = rows_per_rank(parameter.shape[0], ranks), parameter.shape[0]
        last = parameter.rows(ranks - 1, ranks)
        empty = ranks - -(-rows // each)
        if empty:
            which = "the last rank holds" if empty == 1 else f"the last {empty} ranks hold"
            warnings.append(f"{parameter.name}: {rows} rows over {ranks} ranks are {each} each, so {which} none")
        else:
            warnings.append(
                f"{parameter.name}: {rows} rows over {ranks} ranks are {each} each, and {last[1] - last[0]} on the last"
            )
