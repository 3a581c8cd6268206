"""Readers of optimum-quanto's live modules, and of the tensors that its ``freeze`` makes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..errors import ConversionError
from ..formats import quanto
from .foreign import KEY, Foreign, described

NAME = "optimum.quanto"

_OF_TENSOR = ("_qtype", "_axis", "_data", "_scale", "_shift", "_group_size", "activation_qtype")
_OF_MODULE = (
    "weight_qtype", "weight_group_size", "activation_qtype", "_quantize_hooks", "optimizer", "name",
    "input_scale", "output_scale",
)  # fmt: skip


def read_tensor(held: Any, module: nn.Module, dtype: Any) -> Foreign:
    """Return the Foreign of a tensor of quanto. Raise ConversionError for a class that is not known."""
    if type(held).__name__ not in ("WeightQBytesTensor", "WeightQBitsTensor") and not hasattr(held, "_qtype"):
        raise ConversionError(f"is an unsupported {type(held).__name__} of quanto", fix="Dequantize it first.")
    stored: dict[str, Tensor] = {}
    held.save_to_state_dict(stored, f"{KEY}.", False)
    qmap = {"quanto_qmap.json": {"m": {"weights": held._qtype.name}}}
    return Foreign(*described(quanto, stored, shape=tuple(held.shape), beside=qmap), _OF_TENSOR)


def plain_class(module: Any) -> tuple[type[nn.Module], tuple[str, ...], str]:
    """Return the plain class for ``module``, the attributes of its own class, and a description of input rounding.

    Raises ConversionError for a class of quanto that is not known, and for a module that is not frozen.
    """
    kind = type(module)
    if not (kind.__module__.startswith(NAME) and hasattr(module, "qweight")):
        raise ConversionError(f"is an unsupported {kind.__name__} based on quanto", fix="Replace it first.")
    if module.weight_qtype is not None and not module.frozen:
        raise ConversionError("is not frozen yet", fix="Call optimum.quanto.freeze(model) first.")
    rounding = module.activation_qtype
    inputs = "" if rounding is None else f"to {rounding.name} in fixed steps, and its results"
    plain = next(one for one in kind.__mro__ if issubclass(one, nn.Module) and not one.__module__.startswith(NAME))
    return plain, _OF_MODULE, inputs
