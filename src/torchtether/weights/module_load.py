"""The rule for ``load_state_dict``: one table says which tensor replaces that of the module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import SchemeError, TieError
from ..geometry.blocks import STOCK
from .contents import decodes_to
from .dispatch import rule
from .spec import to_base
from .weight import Weight


@rule(Tensor.module_load)
def module_load(op: Any, held: Tensor, given: Tensor, assign: bool = False) -> Tensor:
    """Return the tensor that the Parameter ``held`` becomes when the state dict gives ``given``.

    ========  =====================  ============================================  ==================================
    held      given                  assign=False                                  assign=True
    ========  =====================  ============================================  ==================================
    Weight    plain                  encoded in the held scheme, into the held     encoded in the held scheme, on the
                                     storage                                       given device and dtype
    Weight    Weight, same scheme    parts copied into the held storage            the given parts
    Weight    Weight, other scheme   re-encoded in the held scheme, into the       the given parts and scheme
                                     held storage
    plain     Weight                 decoded into the held storage                 becomes a Weight
    plain     plain                  as torch does                                 as torch does
    ========  =====================  ============================================  ==================================

    In every row the Parameter object, its tie record, ``activations`` and ``requires_grad`` stay those of the module:
    torch swaps the result into the object, which keeps ``requires_grad``, and this function carries the records over.

    Where other tensors share the parts (a transposed alias), ``assign=True`` writes into the held storage too,
    because only such a write reaches them.

    Raises:
        SchemeError: the shapes differ, or the given values cannot be encoded in the held scheme.
        TieError: other tensors share the parts, and the given device or dtype is not the held one.
    """
    if held.shape != given.shape:
        raise SchemeError(f"the state dict gives shape {tuple(given.shape)}, the module holds {tuple(held.shape)}")
    if assign and isinstance(held, Weight) and is_written_in_place(held, given):
        assign = False
    if not assign:
        with torch.no_grad():
            held.copy_(as_loaded(held, given))
        return held.detach()
    if isinstance(given, Weight):
        if not isinstance(held, Weight):
            return given.map(Tensor.detach, given.spec.replace(tie=None))
        return given.map(Tensor.detach, given.spec.replace(tie=held.tie, activations=held.spec.activations))
    if not isinstance(held, Weight):
        return given.detach()
    if not given.is_floating_point():
        raise SchemeError(f"the state dict gives {given.dtype}, the module holds {held.scheme}", fix="Give floats.")
    return encoded_as(held, given)


def is_written_in_place(held: Weight, given: Tensor) -> bool:
    """Return whether other tensors share the parts of ``held``: only a write into its storage reaches them.

    Raises TieError if ``given`` has another shape, dtype or device and so cannot be written there.
    """
    tie = held.tie
    if tie is None or all(tie.objects):
        return False
    facts = [(one.dtype, one.device, tuple(one.shape)) for one in (held, given)]
    if held.is_meta or facts[0] != facts[1]:
        (dtype, device, shape), (new_dtype, new_device, new_shape) = facts
        to = "" if shape == new_shape else f" of shape {new_shape}"
        raise TieError(
            f"is {dtype} on {device} and shares memory ({tie}), which assigning {new_dtype} on {new_device}{to} "
            "would break",
            fix="Use tt.load, or materialize or convert the model first.",
        )
    return True


def as_loaded(held: Tensor, given: Tensor) -> Tensor:
    """Return what to copy into ``held`` so that it gets the codes of ``given``, whatever its values and scales are now.

    ``Tensor.copy_`` keeps scales of a Weight if the values are near to its own, since it may be a step of training.
    """
    if not isinstance(held, Weight) or held.is_meta or held.scheme.transparent or held._cut:
        return given
    if type(given) not in STOCK or not given.is_floating_point() or given.shape != held.shape:
        return given
    has_master = held.scheme.master(held.parts, held.spec.base) is not None  # it may have moved from the codes' values
    return given if not has_master and decodes_to(held, to_base(held.spec, given)) else encoded_as(held, given)


def encoded_as(held: Weight, given: Tensor) -> Weight:
    """Return ``given``, on its own device and in its own dtype, encoded in the scheme, order and tie of ``held``."""
    if held.scheme.transparent:  # the given tensor itself, whatever its strides
        return Weight.encode(given, held.scheme, tie=held.spec.tie)
    is_alike = given.dim() == held.dim()
    made = Weight.encode(to_base(held.spec, given) if is_alike else given, held.scheme)
    order = held.spec.order if is_alike else tuple(range(given.dim()))
    return made.map(Tensor.detach, made.spec.permute(order).replace(tie=held.tie, activations=held.spec.activations))
