"""Guards over a model that ``shard`` made: what torch would break without a word is mended, or refused in time.

load_state_dict(assign=True) after the first forward      with tied names, FSDP2 goes on gathering what was there
                                                          before: every shard is looked up again.  Without torch's
                                                          swap flag it would replace the parameters under the
                                                          optimizer: ConversionError, before anything changes
a state dict with an alias only                           the owner, which FSDP2 reads, gets it too
a state dict with a view of a parameter that it has too   the parameter is loaded, and the view shows it
.to(dtype) after the first forward                        ConversionError at the next forward: FSDP2's buffers have
                                                          the old dtype, and going back is possible until then
a parameter that was replaced behind FSDP2's back         its shard is looked up again at the next forward
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..errors import ConversionError
from ..torch_private.fsdp2 import (
    changed_dtypes,
    fsdp2_state,
    is_forwarded,
    name_of_parameter,
    renew_shards,
    reseat_slots,
    stale_shards,
)
from ..weights.ops.padding import lacks_padding
from ..weights.spec import Tie

_ASSIGN = "assign_to_params_buffers"  # how torch tells hooks that it was given


def guard(model: nn.Module, ties: Iterable[Tie]) -> None:
    """Watch the loads and each forward of ``model``, which FSDP2 shards, from now on."""
    model.register_load_state_dict_pre_hook(_before_load(tuple(ties)))
    model.register_load_state_dict_post_hook(lambda module, keys: resync(module))
    model.register_forward_pre_hook(lambda module, args: check_shards(module), prepend=True)


def resync(model: nn.Module) -> None:
    """Have FSDP2 gather the tensors that the parameters of ``model`` are now, and make tied names one object again.

    For after changes that FSDP2 was not told of.  Torch itself tells it of one name of a tied parameter only.
    """
    with torch.no_grad():
        for module in model.modules():
            state = fsdp2_state(module)
            if state is not None:
                renew_shards(state)
                reseat_slots(state)


def check_shards(model: nn.Module) -> None:
    """Return if FSDP2 and the parameters agree; look up memory again that it has not seen.

    Raises:
        ConversionError: parameters have another dtype than at the first forward.
    """
    for module in model.modules():
        state = fsdp2_state(module)
        if state is None:
            continue
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
        if metadata.get(_ASSIGN) and not torch.__future__.get_swap_module_params_on_conversion():
            forwarded = any(is_forwarded(state) for state in map(fsdp2_state, module.modules()) if state is not None)
            if forwarded:
                raise ConversionError(
                    "load_state_dict(assign=True) after the first forward would replace the parameters that the "
                    "optimizer holds",
                    fix="Use tt.distributed.load, or assign=False.",
                )
        for tie in ties:
            names = [name for name, view in zip(tie.names, tie.views, strict=True) if view is None]
            given = next((prefix + name for name in names if prefix + name in state_dict), None)
            if given is not None:
                for name in set(tie.names) - set(names):  # views have no memory to load into
                    state_dict.pop(prefix + name, None)
            if given is not None and prefix + tie.owner not in state_dict:
                state_dict[prefix + tie.owner] = state_dict[given]

    return hook
