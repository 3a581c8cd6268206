"""FSDP2's own records of the parameters that it shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn


def fsdp2_state(module: nn.Module) -> Any:
    """Return FSDP2's state of a module that ``fully_shard`` was applied to, ``None`` for any other module."""
    get = getattr(module, "_get_fsdp_state", None)
    return get() if get is not None else None


def fsdp2_states(model: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's state of each module of ``model`` that ``fully_shard`` was applied to."""
    return (state for module in model.modules() if (state := fsdp2_state(module)) is not None)


def is_forwarded(state: Any) -> bool:
    """Return whether FSDP2 has run a forward, after which it holds buffers in the old dtype and on the old device."""
    return getattr(state, "_is_root", None) is not None


def renew_shards(state: Any) -> None:
    """Make FSDP2 gather from the memory of the parameters that the module has now."""
    for param in _fsdp2_params(state):
        local = getattr(param._module_info.module, param._module_info.param_name)._local_tensor
        if type(local) is not Tensor and type(param._sharded_param_data) is Tensor:
            param._sharded_param_data = local.view(-1)  # torch would compare addresses, which a wrapper has not
        param.reset_sharded_param()


def offloaded_parameters(state: Any) -> list[Tensor]:
    """Return the sharded parameters that FSDP2 keeps on the CPU, whatever device it computes on."""
    return [param.sharded_param for param in _fsdp2_params(state) if param.offload_to_cpu]


@lru_cache(maxsize=1)
def frees_before_copy() -> bool:
    """Return whether FSDP2 frees the buffer of the previous all-gather before it copies the next one out.

    Torch 2.15 frees it before, torch 2.13 after. Nothing public tells, so the method that frees it is looked up.
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext
    except ImportError:
        return False
    return hasattr(FSDPCommContext, "release_all_gather_state_for_comm_reuse")


def _fsdp2_params(state: Any) -> Iterator[Any]:
    for group in state._fsdp_param_groups:
        yield from group.fsdp_params


def reseat_slots(state: Any) -> None:
    """Set each sharded parameter on every module that shares it: an assignment may have replaced it on one of them."""
    for param in _fsdp2_params(state):
        if param.sharded_state.name == "SHARDED":
            param._setattr_on_modules(param.sharded_param)


def sharded_slots(model: nn.Module) -> dict[int, Any]:
    """Return FSDP2's record of each sharded parameter of ``model``, by the id of the parameter."""
    found: dict[int, Any] = {}
    for state in fsdp2_states(model):
        found.update((id(param.sharded_param), param) for param in _fsdp2_params(state))
    return found


def follow_buffer(model: nn.Module, parameter: Tensor, module: nn.Module, name: str, *, detached: bool) -> None:
    """Keep the buffer ``name`` of ``module`` equal to ``parameter`` as FSDP2 has it: sharded or gathered.

    FSDP2 sets an attribute on every module that shares a parameter; it does not know of buffers.
    """
    record = sharded_slots(model)[id(parameter)]
    slot = _BufferSlot(module, detached)
    record._module_info.shared_modules.append(slot)
    record._module_info.shared_param_names.append(name)
    setattr(slot, name, parameter)


class _BufferSlot:
    """Stand in for a module among those that share a parameter: setting an attribute sets the module's buffer."""

    _module: nn.Module
    _detached: bool

    def __init__(self, module: nn.Module, detached: bool) -> None:
        self.__dict__.update(_module=module, _detached=detached)

    def __setattr__(self, name: str, tensor: Tensor) -> None:
        self._module._buffers[name] = tensor.detach() if self._detached else tensor


def stale_shards(state: Any, lacks_padding: Callable[[Tensor], bool]) -> list[Any]:
    """Return FSDP2's records of parameters that were replaced, or given other memory, without FSDP2's knowledge.

    ``lacks_padding`` returns whether a tensor subclass has not been padded as FSDP2 pads its shards.
    """
    found = []
    for param in _fsdp2_params(state):
        info = param._module_info
        held = info.module._parameters.get(info.param_name)
        if param.sharded_state.name != "SHARDED":
            continue
        local, flat = getattr(held, "_local_tensor", None), param._sharded_param_data
        if held is not param.sharded_param or local is None:
            found.append(param)
        elif type(local) is Tensor and not local.is_meta and local.numel():
            if local.untyped_storage()._cdata != flat.untyped_storage()._cdata:
                found.append(param)
        elif local.shape != param.padded_sharded_param_size and lacks_padding(local):
            found.append(param)
    return found


def changed_dtypes(state: Any) -> list[tuple[Any, torch.dtype]]:
    """Return FSDP2's records whose parameter has another dtype than at the first forward, and that dtype."""
    found = []
    for param in _fsdp2_params(state):
        before = getattr(param, "orig_dtype", None)
        if before is not None and param.sharded_param.dtype != before:
            found.append((param, before))
    return found


def name_of_parameter(param: Any) -> str:
    """Return the name that FSDP2's record ``param`` has for its parameter, for error messages."""
    return param._param_fqn or param._module_info.param_name  # type: ignore[no-any-return]


def local_shape_and_offset(shape: tuple[int, ...], mesh: Any, placements: Any) -> tuple[Any, Any]:
    """Return shape and offset of this rank's part of a DTensor; torch has no public name for strided shards' order."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(shape, mesh, placements)
