"""What modules compute from their parameters and keep: put away before an exchange, and computed again after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..torch_private.modules import (
    flat_weight_refs,
    forget_flat_weights,
    forward_hooks_of,
    pruned_name_of,
    renew_flat_weights,
)


class Caches:
    """Put away what modules compute from their parameters and keep, before an exchange, and make it again after it.

    These are the weights that old-style ``weight_norm``, ``spectral_norm`` and ``prune`` compute, and the flat lists of
    RNNs. A computed weight is a plain attribute at the end of a graph, and the graph holds the parameters.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._rnns = [module for module in modules if isinstance(module, nn.RNNBase)]
        self._computed = [
            (module, *found)
            for module in modules
            for hook in forward_hooks_of(module).values()
            if (found := _reader(hook))
        ]
        self._parked: list[tuple[nn.Module, str, Callable[[nn.Module], Tensor], str]] = []

    @property
    def refs(self) -> set[int]:
        """Return the ids of weak references that need not stop an exchange: RNNs keep them to their own weights."""
        return flat_weight_refs(self._rnns)

    def park(self, *, refs: bool = False) -> None:
        """Put away what modules computed from parameters and keep; with ``refs`` also the weak references of RNNs."""
        for module, attribute, compute, source in self._computed:
            cached = module.__dict__.get(attribute)
            if isinstance(cached, Tensor) and cached.grad_fn is not None:
                self._parked.append((module, attribute, compute, source))
                del module.__dict__[attribute]
                cached = None
        if refs:
            for module in self._rnns:
                forget_flat_weights(module)

    def renew(self, *, changed: bool = True, is_partial: bool = False) -> None:
        """Compute everything again that was put away, from the parameters as they are now.

        With ``is_partial`` they may be of two dtypes, and what cannot be computed then is left to the next forward.
        """
        for module, attribute, compute, _ in self._parked:  # not forgotten: a rollback may ask once more
            with torch.enable_grad(), suppress(RuntimeError) if is_partial else nullcontext():
                module.__dict__[attribute] = compute(module)
        for module, attribute, compute, source in self._computed:
            cached, held = module.__dict__.get(attribute), getattr(module, source, None)
            if isinstance(cached, Tensor) and isinstance(held, Tensor) and cached.grad_fn is None:
                has_values = held.is_meta or not cached.is_meta
                made = cached.to(held.device, held.dtype) if has_values else compute(module).detach()
                module.__dict__[attribute] = made
        if changed:
            for rnn in self._rnns:
                renew_flat_weights(rnn)


def _reader(hook: object) -> tuple[str, Callable[[nn.Module], Tensor], str] | None:
    """Return, for a hook that computes a weight, the attribute it sets, how, and the parameter from which."""
    if isinstance(hook, WeightNorm):
        return hook.name, hook.compute_weight, f"{hook.name}_v"
    if isinstance(hook, SpectralNorm):
        return hook.name, lambda module: hook.compute_weight(module, do_power_iteration=False), f"{hook.name}_orig"
    if isinstance(hook, BasePruningMethod):
        name = pruned_name_of(hook)
        return name, hook.apply_mask, f"{name}_orig"
    return None
