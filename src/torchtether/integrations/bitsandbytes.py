"""Readers of bitsandbytes' live modules and parameters, which it quantizes when they are moved to a device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConversionError
from ..formats import bitsandbytes
from ..schemes import Affine
from ..weights.spec import WeightSpec
from .foreign import KEY, Foreign, described

NAME = "bitsandbytes"

_OF_4BIT = (
    "blocksize", "compress_statistics", "quant_type", "quant_state", "quant_storage", "bnb_quantized", "module",
)  # fmt: skip
_OF_8BIT = ("CB", "SCB", "has_fp16_weights")
_OF_MODULE = {
    "Linear4bit": (
        "compute_dtype", "compute_type_is_set", "quant_state", "quant_storage", "support_avx512bf16_for_cpu",
    ),
    "Linear8bitLt": ("state", "index"),
    "Embedding4bit": ("dtype", "quant_state"),
    "Embedding8bit": ("dtype",),
}  # fmt: skip
_KINDS = {
    "Linear4bit": "Linear4bit", "LinearFP4": "Linear4bit", "LinearNF4": "Linear4bit", "Linear8bitLt": "Linear8bitLt",
    "Embedding4bit": "Embedding4bit", "EmbeddingFP4": "Embedding4bit", "EmbeddingNF4": "Embedding4bit",
    "Embedding8bit": "Embedding8bit",
}  # fmt: skip
_MOVE = "Move the model to its device first, which quantizes it."


def read_tensor(held: Any, module: nn.Module, dtype: torch.dtype) -> Foreign:
    """Return the Foreign of a parameter of bitsandbytes; int8, which stores no dtype, decodes to ``dtype``.

    Raises ConversionError for a class that is not known, and for a parameter that is not quantized yet.
    """
    kind = type(held).__name__
    if kind == "Params4bit":
        state = held.quant_state if held.quant_state is not None else getattr(module, "quant_state", None)
        if state is None:
            raise ConversionError("has no quant_state: it is not quantized yet", fix=_MOVE)
        shape = tuple(state.shape)
        spec, _ = described(bitsandbytes, _stored(held, state), shape=shape)
        # described again when the parts are read, so that only one CPU-packed tensor at a time is unpacked
        return Foreign(spec, lambda: described(bitsandbytes, _stored(held, state), shape=shape)[1](), _OF_4BIT)
    if kind != "Int8Params":
        raise ConversionError(f"is an unsupported {kind} of bitsandbytes", fix="Replace it first.")
    state = getattr(module, "state", None)
    scale = held.SCB if held.SCB is not None else getattr(state, "SCB", None)
    if held.dtype != torch.int8 or scale is None:
        raise ConversionError(f"is {held.dtype}: it is not quantized yet", fix=_MOVE)
    codes, scale = held.data.as_subclass(Tensor).detach(), scale.detach()
    if isinstance(module, nn.Embedding):
        return _of_embedding(codes, scale, getattr(module, "dtype", dtype))
    spec, parts = described(bitsandbytes, {KEY: codes, "m.SCB": scale}, shape=tuple(codes.shape))
    threshold = getattr(state, "threshold", 0.0)
    inputs = f"to int8, but for columns beyond {threshold}" if threshold else ""
    spec = spec.replace(dtype=dtype, activations=None if threshold else "int8")
    return Foreign(spec, parts, _OF_8BIT, inputs)


def plain_class(module: Any) -> tuple[type[nn.Module], tuple[str, ...], str]:
    """Return the plain class for ``module``, the attributes of its own class, and an empty description of inputs.

    Raises ConversionError for a class of bitsandbytes that is not known.
    """
    kind = type(module)
    known = _KINDS.get(kind.__name__) if kind.__module__.startswith(NAME) else None
    if known is None:
        raise ConversionError(f"is an unsupported {kind.__name__} based on bitsandbytes", fix="Replace it first.")
    if type(module.weight).__name__ not in ("Params4bit", "Int8Params"):
        raise ConversionError(
            f"has a {type(module.weight).__name__} as weight, not a parameter of bitsandbytes", fix=_MOVE
        )
    plain = nn.Linear if issubclass(kind, nn.Linear) else nn.Embedding
    return plain, (*_OF_MODULE[known], "source_cls"), ""


def _of_embedding(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Foreign:
    """Return int8 rows as Embedding8bit decodes them: it divides the scale by 127 before it multiplies."""
    spec = WeightSpec.of(tuple(codes.shape), dtype, Affine(narrow_range=True))
    return Foreign(spec, lambda: {"qdata": codes, "scale": (scale / 127.0).view(-1, 1)}, _OF_8BIT)


def _stored(held: Any, state: Any) -> dict[str, Tensor]:
    """Return the tensors in which bitsandbytes stores a 4-bit parameter; neither argument is changed."""
    codes = held.data.as_subclass(Tensor).detach()
    if getattr(state, "packing_format_for_cpu", False):
        from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse  # old versions do not pack

        state = copy.copy(state)
        state.original_nested = False  # absmax is decoded by now; encoding it again would round
        codes, state = _convert_weight_packed_for_cpu_inverse(codes, state)
        state.absmax = state.absmax.T.reshape(-1).float()
    sides = {f"{KEY}.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    return {KEY: codes, **sides}
