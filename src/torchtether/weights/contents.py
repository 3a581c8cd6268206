"""Replacing the contents of a Weight inside the object, so that all references to it, weak ones too, stay valid."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConversionError
from ..torch_private.tensors import is_fake, is_same_kind, set_data
from .dispatch import ATTACHED
from .products import decoding
from .spec import WeightSpec
from .weight import Weight


def can_put(held: Tensor, made: Tensor) -> bool:
    """Return whether ``put_contents`` accepts the pair: two Weights, both on ``meta`` or neither."""
    return isinstance(held, Weight) and isinstance(made, Weight) and is_same_kind(held, made)


def contents_of(weight: Weight, spec: WeightSpec | None = None) -> Weight:
    """Return a new Weight with the part objects and ``ATTACHED`` attributes of ``weight``, under ``spec`` if given."""
    made = weight.map(lambda part: part, spec)
    made.__dict__.update({name: weight.__dict__[name] for name in ATTACHED if name in weight.__dict__})
    return made


def decodes_to(held: Weight, values: Tensor) -> bool:
    """Return whether ``held`` decodes to exactly ``values``, of its base shape; False if that cannot be seen."""
    if torch.compiler.is_compiling() or is_fake(values) or not values.is_floating_point() or not values.numel():
        return False
    scheme, base = held.scheme, held.spec.base
    first = values[(0,) * (len(base) - 1)].to(held.device)
    own = first.new_empty(1, base[-1])  # values that differ mostly do so in the first row: no need to decode all
    scheme.decode_into(held.parts, base, 0, 1, own)
    if not torch.equal(own[0], first):
        return False
    return torch.equal(decoding.values(scheme, held.parts, base, values.dtype), values.to(held.device))


def put_contents(held: Weight, made: Weight) -> None:
    """Give the object ``held`` the parts, spec, dtype and device of ``made``; the part objects are shared.

    ``held`` keeps its attributes, hooks, ``requires_grad``, version and grad, and stays a Parameter if it is one.  An
    error leaves it unchanged.  Raises ConversionError if ``can_put`` is false, RuntimeError if ``held`` requires grad
    and ``made`` is not floating point.
    """
    if not can_put(held, made):
        raise ConversionError(
            f"the data of a Weight on {held.device} cannot be replaced by data on {made.device}, as for plain tensors",
            fix="Use tt.convert or tt.materialize, or set a new nn.Parameter on the module.",
        )
    before, fields_before = contents_of(held), held.__dict__
    fields: dict[str, Any] = {**held._attributes(), **contents_of(made).__dict__}
    if isinstance(held, nn.Parameter):
        fields["_is_param"] = True
    try:
        set_data(held, made)
        held.__dict__ = fields
    except BaseException:
        set_data(held, before)
        held.__dict__ = fields_before
        raise
