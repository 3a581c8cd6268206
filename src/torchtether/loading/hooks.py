"""A warning about code of a model that ``load_state_dict`` calls, and ``tt.load`` does not."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from .._warnings import warn
from ..conversion.overrides import foreign
from ..torch_private.modules import code_of_load

_KNOWN = ("torch", "torchtether", "transformers")
"""Packages whose hooks a load need not run: it does what they are for, or they only rename what it renames."""


def warn_of_hooks(modules: Mapping[str, nn.Module]) -> None:
    """Warn if a module, given by name, has hooks of ``load_state_dict``, or such a method, from outside of torch."""
    if found := foreign(modules, code_of_load, _KNOWN):
        fix = "with tt.swapping(model): model.load_state_dict(dict(tt.open(path)), assign=True)"
        warn(f"{found}: load_state_dict calls this, tt.load does not. If it changes or uses values, load by: {fix}")
