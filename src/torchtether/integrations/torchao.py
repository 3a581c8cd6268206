"""Readers of torchao's live tensors, which its ``quantize_`` puts into plain modules."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from .._dtypes import dtype_name
from ..errors import ConversionError
from ..formats import torchao
from .foreign import KEY, Foreign, described

_OPTIONAL = ("tensor_data_names", "optional_tensor_data_names")


def read_tensor(held: Any, module: nn.Module, dtype: Any) -> Foreign:
    """Return the Foreign of a tensor of torchao. Raise ConversionError for a class that is not known."""
    kind = type(held).__name__
    if not hasattr(held, "tensor_attribute_names"):
        raise ConversionError(f"is an unsupported {kind} of torchao", fix="Dequantize it with torchao first.")
    inner = [name for names in _OPTIONAL for name in getattr(held, names, ())]
    names = [name for name in inner if getattr(held, name, None) is not None]
    attributes = [*held.tensor_attribute_names, *getattr(held, "optional_tensor_attribute_names", ())]
    facts = {name: getattr(held, name, None) for name in attributes}
    record = {"_type": kind, "_data": {name: _json(fact) for name, fact in facts.items()}, "_tensor_data_names": names}
    stored = {f"m._weight_{name}": getattr(held, name) for name in names}
    spec, parts = described(
        torchao, stored, shape=tuple(held.shape), metadata={"tensor_names": "", KEY: json.dumps(record)}
    )
    activations, inputs = _inputs(held)
    return Foreign(spec.replace(activations=activations), parts, (*inner, *attributes), inputs)


def plain_class(module: nn.Module) -> tuple[type[nn.Module], tuple[str, ...], str]:
    """Raise ConversionError: torchao keeps modules plain, and its own module classes are not linear layers."""
    raise ConversionError(f"is an unsupported {type(module).__name__} of torchao", fix="Replace it first.")


def _json(fact: Any) -> Any:
    if isinstance(fact, torch.dtype):
        return {"_type": "torch.dtype", "_data": dtype_name(fact)}
    return list(fact) if isinstance(fact, (list, tuple)) else fact if isinstance(fact, (bool, int, str)) else str(fact)


def _inputs(held: Any) -> tuple[str | None, str]:
    """Return the ``activations`` of a Weight that rounds inputs as ``held`` does; else ``None`` and a description."""
    asked = getattr(held, "act_quant_kwargs", None)
    by_name = getattr(held, "activation_quantization", None)
    fixed = getattr(held, "act_quant_scale", None) is not None
    if asked is None and not by_name and not fixed:
        return None, ""
    if by_name:
        return None, f"by {by_name}"
    granularity = type(getattr(asked, "granularity", None)).__name__
    mapping = getattr(getattr(asked, "mapping_type", None), "name", "SYMMETRIC")
    rounding = {"QuantizeTensorToInt8Kwargs": "int8", "QuantizeTensorToFloat8Kwargs": "float8"}.get(
        type(asked).__name__
    )
    is_ours = granularity == "PerRow" and mapping == "SYMMETRIC" and not fixed and len(held.shape) == 2
    if rounding == "float8":
        is_ours = is_ours and getattr(asked, "float8_dtype", None) == torch.float8_e4m3fn
    if rounding and is_ours:
        return rounding, ""
    return None, f"by {type(asked).__name__} ({granularity}, {mapping}{', a fixed scale' if fixed else ''})"
