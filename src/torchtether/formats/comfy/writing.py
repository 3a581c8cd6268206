"""Write Weights as the tensors of ComfyUI's files, with the settings of each layer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import SchemeError
from ...geometry.views import Shape
from ...schemes import Affine, ScaledFloat, Scheme, scheme_to_text
from ...weights.products.scaled_mm import swizzled
from ...weights.spec import WeightSpec
from ...weights.weight import Weight
from ..entry import FLOAT8, FLOATS, refuse_other
from .reading import FLOAT8_KINDS, SETTINGS, TILED, WIDTH, swapped

_KIND_OF = {FLOAT8[dtype]: kind for kind, dtype in FLOAT8_KINDS.items()}
_DECODING = ("element", "block", "scale_dtype", "global_scale")


def layout(name: str, spec: WeightSpec) -> dict[str, tuple[torch.dtype, Shape]]:
    """Return what ``pack`` stores: codes, their scales, and the settings of the layer."""
    kind, module = _kind(name, spec), name.removesuffix("weight")
    (rows, columns), scheme = spec.shape, spec.scheme
    parts = {role: (part.dtype or spec.dtype, tuple(part.shape)) for role, part in scheme.layout(spec.shape).items()}
    tensors: dict[str, tuple[torch.dtype, Shape]] = {name: parts["qdata"]}
    tensors[f"{module[:-1]}{SETTINGS}"] = (torch.uint8, (len(_text(kind)),))
    if kind in TILED:
        tiles = -(-rows // 128) * 128, -(-columns // WIDTH[kind] // 4) * 4
        tensors[f"{name}_scale"] = (parts["scale"][0], tiles)
    else:
        is_by_row = isinstance(scheme, Affine) and scheme.block == (1, None)
        tensors[f"{name}_scale"] = (torch.float32, parts["scale"][1] if is_by_row else ())
    if kind == "nvfp4":
        tensors[f"{name}_scale_2"] = parts["global_scale"]
    return tensors


def pack(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return the tensors to store for ``weight``, by key: the inverse of ``recognise`` and ``unpack``.

    >>> import torch, torchtether as tt
    >>> sorted(pack("m.weight", tt.Weight.encode(torch.eye(32), tt.mxfp8())))
    ['m.comfy_quant', 'm.weight', 'm.weight_scale']
    """
    assert isinstance(weight, Weight)
    kind, parts = _kind(name, weight.spec), {role: part.detach() for role, part in weight.parts.items()}
    scale = parts["scale"]
    made = layout(name, weight.spec)
    tensors = {name: parts["qdata"]}
    if kind == "nvfp4":
        tensors = {name: swapped(parts["qdata"], parts["qdata"].shape, weight.shape[1])}
        tensors[f"{name}_scale_2"] = parts["global_scale"]
    tensors[f"{name.removesuffix('.weight')}{SETTINGS}"] = torch.tensor(
        list(_text(kind)), dtype=torch.uint8, device="cpu"
    )
    shape = made[f"{name}_scale"][1]
    tensors[f"{name}_scale"] = swizzled(scale).view(shape) if kind in TILED else scale.float().reshape(shape)
    return tensors


def announce(specs: Mapping[str, WeightSpec], plain: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """Return nothing, because ``pack`` stores the settings. Raise SchemeError for a spec that cannot be expressed."""
    for name, spec in specs.items():
        _kind(name, spec)
    return {}


def announce_others(announced: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Raise SchemeError: ComfyUI reads quantized embeddings only in some of its formats."""
    refuse_other(names[0], "ComfyUI reads quantized embeddings only in some of its formats")


def variant_of(scheme: Scheme) -> Scheme:
    """Return ``scheme``, or for float8 with a scale per row the same with one scale for all.

    >>> import torchtether as tt
    >>> variant_of(tt.fp8()) == tt.fp8("tensor")
    True
    """
    is_by_row = isinstance(scheme, ScaledFloat) and scheme.element in FLOAT8.values() and scheme.block == (1, None)
    return replace(scheme, block=(None, None)) if is_by_row else scheme  # type: ignore[type-var]


def _kind(name: str, spec: WeightSpec) -> str:
    """Return ComfyUI's format for a weight of this spec. Raise SchemeError if there is none."""
    scheme, shape, made = spec.scheme, spec.shape, ""
    if isinstance(scheme, ScaledFloat):
        if scheme.scale_dtype in FLOATS and scheme.block == (None, None):
            made = _KIND_OF.get(scheme.element, "")
        for kind, tiled in TILED.items():
            same = (getattr(scheme, field) == getattr(tiled, field) for field in _DECODING)
            made = kind if all(same) and not scheme.global_divides else made
    elif isinstance(scheme, Affine) and scheme.bits == 8 and scheme.signed and scheme.symmetric:
        is_plain = scheme.unit == 1 and not scheme.act_order and scheme.block in ((None, None), (1, None))
        made = "int8_tensorwise" if is_plain else ""
    if not made or len(shape) != 2 or not spec.is_contiguous or not name.endswith(".weight"):
        raise SchemeError(
            f"ComfyUI cannot store {scheme_to_text(scheme)} of shape {tuple(shape)}",
            name=name,
            fix='Quantize matrices with tt.fp8("tensor"), tt.int8(), tt.mxfp8() or tt.nvfp4().',
        )
    if any(n % WIDTH.get(made, 1) for n in shape):
        raise SchemeError(
            f"ComfyUI stores {made} only in multiples of {WIDTH[made]} rows and columns, got shape {tuple(shape)}",
            name=name,
            fix="Leave it unquantized, or quantize it with tt.int8().",
        )
    return made


def _text(kind: str) -> bytes:
    return json.dumps({"format": kind}).encode()
