"""Hooks on a sharded model that repair, or refuse in time, changes that torch would break silently.

load_state_dict(assign=True) after the first forward      with tied names FSDP2 would go on gathering the old
                                                          tensors: every shard is looked up again.  Without torch's
                                                          swap flag it would replace the parameters under the
                                                          optimizer: ConversionError, before anything changes
a state dict that has an alias and not its owner          the owner, which FSDP2 gathers, is loaded from the alias
a state dict with a parameter and a view of it            the parameter is loaded, and the view shows its values
.to(dtype) after the first forward                        ConversionError at the next forward, because FSDP2's
                                                          buffers have the old dtype; converting back is possible
a parameter that was replaced without FSDP2's knowledge   its shard is looked up again at the next forward
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from .._checks import as_module
from ..errors import ConversionError
from ..torch_private.fsdp2 import (
    changed_dtypes,
    fsdp2_states,
    is_forwarded,
    name_of_parameter,
    renew_shards,
    reseat_slots,
    stale_shards,
)
from ..torch_private.observers import not_followed
from ..weights.ops.padding import lacks_padding
from ..weights.spec import Tie

_ASSIGN = "assign_to_params_buffers"  # the key under which torch tells load hooks of ``assign=True``


def guard(model: nn.Module, ties: Iterable[Tie]) -> None:
    """Register hooks on the loads and the forward of ``model``, which FSDP2 shards."""
    model.register_load_state_dict_pre_hook(_before_load(tuple(ties)))
    model.register_load_state_dict_post_hook(lambda module, keys: resync(module))
    model.register_forward_pre_hook(lambda module, args: check_shards(module), prepend=True)


def resync(model: nn.Module) -> None:
    """Make FSDP2 gather the current parameters of ``model``, and make tied names one object again.

    Call it after changes that FSDP2 does not know of.  Torch itself informs it of one name of a tied parameter only.
    """
    with torch.no_grad():
        for state in fsdp2_states(as_module(model)):
            renew_shards(state)
            reseat_slots(state)


@not_followed  # FSDP2's own hooks are not compiled, either
def check_shards(model: nn.Module) -> None:
    """Check that FSDP2 and the parameters agree in dtype; look up replaced shards again.

    Raises:
        ConversionError: parameters have another dtype than at the first forward.
    """
    for state in fsdp2_states(model):
        changed = changed_dtypes(state)
        if changed:
            param, before = changed[0]
            raise ConversionError(
                f"was {before} at the first forward and is {param.sharded_param.dtype} now: FSDP2 holds buffers of the "
                "old dtype",
                name=name_of_parameter(param),
                fix=f"Convert before the first forward, or give fully_shard an mp_policy; .to({before}) goes back.",
            )
        if stale_shards(state, lacks_padding):
            renew_shards(state)
            reseat_slots(state)


def _before_load(ties: tuple[Tie, ...]) -> Callable[..., None]:
    """Return the hook that refuses or mends ``load_state_dict(assign=True)`` on a model with ``ties``."""

    def hook(
        module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *others: Any
    ) -> None:
        is_replaced = metadata.get(_ASSIGN) and not torch.__future__.get_swap_module_params_on_conversion()
        if is_replaced and any(map(is_forwarded, fsdp2_states(module))):
            raise ConversionError(
                "load_state_dict(assign=True) after the first forward would replace the parameters that the optimizer "
                "holds",
                fix="Use tt.distributed.load, or assign=False.",
            )
        for tie in ties:
            names = [name for name, view in zip(tie.names, tie.views, strict=True) if view is None]
            given = next((prefix + name for name in names if prefix + name in state_dict), None)
            if given is not None:
                for name in set(tie.names) - set(names):  # a view has no memory of its own to load into
                    state_dict.pop(prefix + name, None)
            if given is not None and prefix + tie.owner not in state_dict:
                state_dict[prefix + tie.owner] = state_dict[given]

    return hook
