"""The checks before an exchange: they find what forbids it before the first change, and say what to do."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import ConversionError
from ..geometry.blocks import STOCK
from ..ties.names import named_tensors
from ..torch_private.fsdp2 import fsdp2_state, is_forwarded
from ..torch_private.modules import is_parametrization_cached
from ..torch_private.tensors import as_plain, base_of, find_cpp_weakly_held, use_count, use_counts
from .holders import Survey, weak_holder

_SHOWN = 3

_DESCRIBED = 8
"""The number of tensors whose holders are searched by name; each search walks the whole process."""


def check_scripted(model: nn.Module) -> None:
    """Raise ConversionError for a module of TorchScript, which holds its tensors and takes no hooks for loads."""
    if isinstance(model, torch.jit.ScriptModule):
        raise ConversionError(
            f"is a {type(model).__name__}, and TorchScript holds its tensors",
            name="model",
            fix="Change the module before torch.jit.script or torch.jit.trace.",
        )


def check_place(modules: Iterable[nn.Module], verb: str) -> None:
    """Raise ConversionError if the surroundings forbid an exchange: inference mode, a wrapper, or offloading."""
    if torch.is_inference_mode_enabled():
        raise ConversionError(
            f"cannot {verb} inside torch.inference_mode: the parameters could not be trained afterwards",
            fix="Leave the block first, or use torch.no_grad.",
        )
    if is_parametrization_cached():
        raise ConversionError(
            f"cannot {verb} inside parametrize.cached(), whose cache holds old values", fix="Leave the block first."
        )
    modules = list(modules)
    if any(map(_is_offloaded, modules)):
        raise ConversionError(
            f"cannot {verb} under accelerate's offloading: every forward would take the old values again",
            fix=f"Call accelerate.hooks.remove_hook_from_submodules(model), {verb}, then offload again.",
        )
    if is_on_disk(modules) or any(group.stream is not None for group in _offloaded_groups(modules)):
        refuse_groups(verb)
    for module in [module for module in modules if is_distributed(type(module))]:  # type: ignore[arg-type]
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ConversionError(
                f"cannot {verb} under DistributedDataParallel: its reducer would stop synchronising gradients",
                fix=f"Call {verb} on the plain module, then wrap it.",
            )
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            raise ConversionError(
                f"cannot {verb} under FullyShardedDataParallel (FSDP1), whose flat parameters own the memory",
                fix=f"Call {verb} on the plain module, then wrap it, or use fully_shard.",
            )
        state = fsdp2_state(module)
        if state is not None and is_forwarded(state):
            raise ConversionError(
                f"cannot {verb} a fully_shard module (FSDP2) after its first forward: it has buffers of the old dtype",
                fix=f"Call {verb} before the first forward.",
            )


def _is_offloaded(module: nn.Module) -> bool:
    """Return whether a hook of accelerate keeps the values of ``module``, and puts them back before each forward."""
    hooks = [vars(module).get("_hf_hook")]
    for hook in hooks:
        hooks += getattr(hook, "hooks", ())  # of a SequentialHook, which may hold others
    return any(getattr(hook, "offload", False) is True for hook in hooks)


def _offloaded_groups(modules: Iterable[nn.Module]) -> list[Any]:
    """Return diffusers' groups of offloaded tensors (``ModuleGroup``) to which ``modules`` belong."""
    registries = [vars(module).get("_diffusers_hook") for module in modules]
    hooks = [hook for registry in registries for hook in getattr(registry, "hooks", {}).values()]
    groups = [getattr(hook, "group", None) for hook in hooks]
    return [group for group in groups if hasattr(group, "offload_to_disk_path")]


ON_DISK = "diffusers' group offloading keeps its values in files, and its memory has none"
"""What is wrong with a model of which ``is_on_disk`` is true."""


def is_on_disk(modules: Iterable[nn.Module]) -> bool:
    """Return whether diffusers keeps values of ``modules`` in files, outside of forward."""
    return any(group.offload_to_disk_path is not None for group in _offloaded_groups(modules))


def refuse_groups(verb: str) -> NoReturn:
    """Raise ConversionError for a model with groups that keep the old values."""
    raise ConversionError(
        f"cannot {verb} under diffusers' group offloading to a disk or with a stream: every forward would take the old "
        "values again",
        fix=f"{verb.capitalize()} first, then offload.",
    )


@lru_cache(maxsize=1024)
def is_distributed(kind: type[nn.Module]) -> bool:
    names = {one.__name__ for one in kind.__mro__}
    return not names.isdisjoint({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})


def check_held(
    tensors: list[Tensor],
    model: nn.Module,
    verb: str,
    *,
    swapped: Sequence[Tensor],
    by_torch: Sequence[Tensor] = (),
    refs: AbstractSet[int] = frozenset(),
) -> None:
    """Raise ConversionError unless each of ``tensors`` can be exchanged now.

    ``swapped`` and ``by_torch`` are subsets, as ``find_holders`` takes them; ``refs`` are ids of weak references that
    may stay.
    """
    faults: dict[int, _Fault] = {}
    for tensor in tensors:
        if type(tensor) not in STOCK and is_lazy(tensor):
            faults[id(tensor)] = _Fault("is", "lazy, without a shape yet", f"Run one forward before you {verb}.")
        elif not tensor.is_leaf:
            what = f"the result of {type(tensor.grad_fn).__name__}, not a leaf"
            faults[id(tensor)] = _Fault("is", what, "Detach it first.")
    whole, swapped, by_torch = ([t for t in some if id(t) not in faults] for some in (tensors, swapped, by_torch))
    for key, holder in find_holders(whole, swapped=swapped, by_torch=by_torch, allowed=refs).items():
        faults[key] = _Fault("held by", holder, _advice(holder, verb))
    if not faults:
        return
    names = names_of(model)
    refused = [(format_names(names.get(id(t), ())), faults[id(t)]) for t in tensors if id(t) in faults]
    fixes = " ".join(dict.fromkeys(fault.fix for _, fault in refused))
    if len(refused) == 1:
        ((name, fault),) = refused
        raise ConversionError(f"{fault.how} {fault.what}", name=name, fix=fixes)
    groups: dict[str, list[tuple[str, _Fault]]] = {}
    for name, fault in refused:
        groups.setdefault(fault.cause, []).append((name, fault))
    if len(groups) == 1:
        raise ConversionError(_describe_group(f"{len(refused)} of {len(tensors)} tensors", refused), fix=fixes)
    text = "; ".join(_describe_group(str(len(group)), group) for group in groups.values())
    raise ConversionError(f"cannot {verb} {len(refused)} of {len(tensors)} tensors: {text}", fix=fixes)


def find_holders(
    tensors: Sequence[Tensor],
    *,
    swapped: Sequence[Tensor],
    by_torch: Sequence[Tensor] = (),
    allowed: AbstractSet[int] = frozenset(),
) -> dict[int, str]:
    """Return, by ``id``, a description of the holder of each tensor that cannot be exchanged now.

    Tensors of ``swapped`` get another implementation, which weak references in C++ forbid. Tensors of ``by_torch`` are
    exchanged by ``torch.utils.swap_tensors``, which also refuses weak references of Python, except those whose ids are
    in ``allowed``.

    A graph that backward has freed does not count, although a ``loss`` variable keeps it alive; nor do views that are
    among ``tensors`` themselves, nor what only garbage holds.
    """
    found = _search(tensors, swapped, by_torch, allowed)
    if found:
        held = [tensor for tensor in tensors if id(tensor) in found]
        before = _reference_counts(held)
        gc.collect()  # reference cycles, such as those of a caught error's traceback, are not freed at once
        if _reference_counts(held) != before:
            return _search(tensors, swapped, by_torch, allowed)
    return found


def _reference_counts(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    weakly_held = [id(tensor) for tensor in find_cpp_weakly_held(tensors)]
    return [*use_counts(tensors)], [*map(weakref.getweakrefcount, tensors)], weakly_held


def _search(
    tensors: Sequence[Tensor], swapped: Sequence[Tensor], by_torch: Sequence[Tensor], allowed: AbstractSet[int]
) -> dict[int, str]:
    found: dict[int, str] = {}
    for tensor in find_cpp_weakly_held(swapped):
        found[id(tensor)] = "a weak reference in C++ (an autocast cache, a CUDA graph)"
    count_refs = weakref.getweakrefcount
    for tensor in [tensor for tensor in by_torch if count_refs(tensor)]:
        refs = [ref for ref in weakref.getweakrefs(tensor) if id(ref) not in allowed]
        if refs:
            found[id(tensor)] = weak_holder(refs) if len(found) < _DESCRIBED else "a weak reference to it"
    shared = [tensor for tensor, count in zip(tensors, use_counts(tensors), strict=True) if count > 1]
    if not shared:
        return found
    with as_plain():
        inner = Counter(id(base) for tensor in tensors if (base := base_of(tensor)) is not None)
    counted = [t for t in shared if id(t) not in found and use_count(t) - inner[id(t)] > 1]
    if counted:
        survey = Survey({id(tensor) for tensor in counted}, {id(tensor) for tensor in tensors}, inner)
        for tensor in counted:
            holder = survey.holder(tensor, detail=len(found) < _DESCRIBED)
            if holder:
                found[id(tensor)] = holder
    return found


class _Fault(NamedTuple):
    how: str
    what: str
    fix: str

    @property
    def cause(self) -> str:
        """Return the fault without the details in parentheses, which differ between tensors."""
        return f"{self.how} {self.what.partition(' (')[0]}"


def _describe_group(count: str, group: Sequence[tuple[str, _Fault]]) -> str:
    """Describe the tensors that one cause stops: their number, the fault of the first, and some names."""
    names = [name for name, _ in group]
    more = [f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    _, fault = group[0]
    verb = "is" if len(names) == 1 else "are"
    how = fault.how.removeprefix("is").strip()
    return f"{count} {verb} {how + ' ' if how else ''}{fault.what}: {', '.join([*names[:_SHOWN], *more])}"


def _advice(holder: str, verb: str) -> str:
    if "weak reference" in holder or "weakref" in holder.lower():
        return f"Delete the reference, {verb}, then create it again."
    if "graph" in holder and "node" not in holder:
        return "Run backward first, or delete the tensors that keep the graph alive."
    if holder.startswith("a view"):
        return f"Delete the view, or take it from .detach() after you {verb}."
    return f"Release it before you {verb}."


def names_of(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """Return every name of every tensor object, by ``id``."""
    names: dict[int, tuple[str, ...]] = {}
    for name, tensor in named_tensors(model).items():
        names[id(tensor)] = (*names.get(id(tensor), ()), name)
    return names


def format_names(names: tuple[str, ...]) -> str:
    """Return a name with its aliases: ``a.weight (= b.weight)``."""
    if not names:
        return "a tensor outside the model"
    return names[0] + (f" (= {', '.join(names[1:])})" if len(names) > 1 else "")
