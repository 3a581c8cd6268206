"""What stands in the way of an exchange: found before the first change, named, with what to do."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import ConversionError
from ..geometry.blocks import STOCK
from ..ties.names import named_tensors
from ..torch_private.fsdp2 import fsdp2_state, is_forwarded
from ..torch_private.modules import is_parametrization_cached
from .holders import find_holders

_SHOWN = 8


def check_place(modules: Iterable[nn.Module], verb: str) -> None:
    """Check that nothing around the tensors forbids an exchange: no inference mode, no distributed wrapper."""
    if torch.is_inference_mode_enabled():
        raise ConversionError(
            f"cannot {verb} inside torch.inference_mode: the parameters could not be trained afterwards",
            fix="Leave the block first, or use torch.no_grad.",
        )
    if is_parametrization_cached():
        raise ConversionError(
            f"cannot {verb} inside parametrize.cached(), which holds old values", fix="Leave the block first."
        )
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


@lru_cache(maxsize=1024)
def is_distributed(kind: type[nn.Module]) -> bool:
    names = {one.__name__ for one in kind.__mro__}
    return not names.isdisjoint({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})


def check_held(tensors: list[Tensor], model: nn.Module, verb: str, refs: set[int]) -> None:
    """Check that each of ``tensors`` can be exchanged now; ``refs`` are ids of weak references that may stay."""
    faults: dict[int, tuple[str, str]] = {}
    for tensor in tensors:
        if type(tensor) not in STOCK and is_lazy(tensor):
            faults[id(tensor)] = "is lazy and has no shape yet", f"Run one forward before you {verb}."
        elif not tensor.is_leaf:
            faults[id(tensor)] = f"is the result of {type(tensor.grad_fn).__name__}, not a leaf", "Detach it first."
    whole = [tensor for tensor in tensors if id(tensor) not in faults] if faults else tensors
    holders = find_holders(whole, refs)
    for key, holder in holders.items():
        faults[key] = f"held by {holder}", _advice(holder, verb)
    if not faults:
        return
    names = names_of(model)
    refused = [(format_names(names.get(id(t), ())), *faults[id(t)]) for t in tensors if id(t) in faults]
    fixes = " ".join(dict.fromkeys(fix for _, _, fix in refused))
    if len(refused) == 1:
        raise ConversionError(refused[0][1], name=refused[0][0], fix=fixes)
    more = f"; and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
    text = "; ".join(f"{name}: {what}" for name, what, _ in refused[:_SHOWN])
    raise ConversionError(f"cannot {verb} {len(refused)} of {len(tensors)} tensors: {text}{more}", fix=fixes)


def _advice(holder: str, verb: str) -> str:
    if "weak reference" in holder or "weakref" in holder.lower():
        return f"Drop the reference, {verb}, then make it again."
    if "graph" in holder and "node" not in holder:
        return "Run backward first, or delete what keeps the graph."
    if holder.startswith("a view"):
        return f"Delete the view, or take it from .detach() after you {verb}."
    return f"Let go of it before you {verb}."


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
