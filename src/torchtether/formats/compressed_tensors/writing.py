"""Write Weights as the tensors and the ``quantization_config`` of compressed-tensors."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._dtypes import dtype_name
from ...errors import SchemeError
from ...geometry.views import Shape
from ...schemes import Affine, ScaledFloat, Scheme, bits, scheme_to_text
from ...weights.spec import WeightSpec
from ...weights.weight import Weight
from ..entry import FLOATS
from ..heads import plain_heads
from ..words import word_count
from .config import FLOAT, INT, MIXED, MXFP4, MXFP6, MXFP8, NVFP4, PACK

VERSION = "0.20.0"
"""The release of compressed-tensors whose layout is written and tested."""


@dataclass(frozen=True)
class Way:
    """Storage of a Weight: the format, and ``weights`` of its config group."""

    format: str
    weights: Mapping[str, Any]


def layout(name: str, spec: WeightSpec) -> dict[str, tuple[torch.dtype, Shape]]:
    """Return dtype and shape, by key, of each tensor that ``pack`` stores for a Weight of this spec."""
    way, module = _way(name, spec), _module(name)
    rows, columns = spec.shape
    parts = {
        part: (what.dtype or spec.dtype, tuple(what.shape)) for part, what in spec.scheme.layout(spec.shape).items()
    }
    scale_dtype, scale_shape = parts["scale"]
    tensors: dict[str, tuple[torch.dtype, Shape]] = {}
    if way.format == PACK:
        width = way.weights["num_bits"]
        tensors["weight_packed"] = (torch.int32, (rows, word_count(columns, width)))
        tensors["weight_shape"] = (torch.int64, (2,))
        if "zero_point" in parts:
            tensors["weight_zero_point"] = (torch.int32, (word_count(rows, width), scale_shape[1]))
    elif way.format == INT:
        tensors["weight"] = (torch.int8, (rows, columns))
        if "zero_point" in parts:
            tensors["weight_zero_point"] = (torch.int8, _scale_shape(way, scale_shape))
    elif way.format in (FLOAT, MXFP8):
        tensors["weight"] = parts["qdata"]
    else:
        tensors["weight_packed"] = parts["qdata"]
    if way.format == NVFP4:
        tensors["weight_global_scale"] = (torch.float32, (1,))
    tensors["weight_scale"] = (_scale_dtype(way, scale_dtype), _scale_shape(way, scale_shape))
    return {module + key: what for key, what in tensors.items()}


def pack(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return the tensors to store for the Weight ``weight``, by key: the inverse of ``recognise`` and ``unpack``.

    Raises SchemeError as ``layout`` does, and if a zero point does not fit its bits or the global scale of nvfp4, which
    multiplies in a Weight and divides here, has no exact reciprocal.

    >>> import torch, torchtether as tt
    >>> sorted(pack("m.weight", tt.Weight.encode(torch.eye(4), tt.int4(4))))
    ['m.weight_packed', 'm.weight_scale', 'm.weight_shape', 'm.weight_zero_point']
    """
    assert isinstance(weight, Weight)
    spec = weight.spec
    way, module = _way(name, spec), _module(name)
    parts = {part: tensor.detach() for part, tensor in weight.parts.items()}
    scale = parts["scale"]
    tensors: dict[str, Tensor] = {}
    if way.format == PACK:
        assert isinstance(spec.scheme, Affine)
        width = spec.scheme.bits
        tensors["weight_packed"] = _as_words(_unsigned(parts["qdata"]))
        tensors["weight_shape"] = torch.tensor(spec.shape, device=scale.device)
        if "zero_point" in parts:
            zeros = _zeros(name, parts["zero_point"], width, spec.scheme.signed)
            words = _as_words(bits.pack(zeros.t().contiguous(), width))
            tensors["weight_zero_point"] = words.t().contiguous()
    elif way.format == INT:
        tensors["weight"] = _signed(parts["qdata"])
        if "zero_point" in parts:
            tensors["weight_zero_point"] = _signed(parts["zero_point"]).reshape(_scale_shape(way, tuple(scale.shape)))
    else:
        tensors["weight" if way.format in (FLOAT, MXFP8) else "weight_packed"] = parts["qdata"]
    if way.format == NVFP4:
        tensors["weight_global_scale"] = _divisor(name, spec, parts).reshape(1)
    dtype = _scale_dtype(way, scale.dtype)
    scale = scale.view(dtype) if dtype == torch.uint8 else scale.to(dtype)
    tensors["weight_scale"] = scale.reshape(_scale_shape(way, tuple(scale.shape)))
    return {module + key: tensor for key, tensor in tensors.items()}


def announce(specs: Mapping[str, WeightSpec], plain: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """Return ``quantization_config`` for ``config.json``.

    If all weights are stored in one way, there is one group with the target ``Linear``; otherwise each group names its
    modules. ``ignore`` names every other module with a ``weight``, because names do not tell which of them are linear.
    It also has a pattern for heads, which may be tied and have no tensor, and one for the parts of a model without a
    quantized weight, such as ``visual``, which transformers may call ``model.visual``. Names in ``plain`` may be
    aliases.

    ``dequantize`` makes transformers decode weights that it cannot keep (``_is_decoded``) while it loads them.
    """
    groups: dict[str, tuple[Way, list[str]]] = {}
    for name, spec in sorted(specs.items()):
        way = _way(name, spec)
        key = json.dumps([way.format, way.weights], sort_keys=True)
        groups.setdefault(key, (way, []))[1].append(_module(name).removesuffix("."))
    if not groups:
        return {}
    formats = {way.format for way, _ in groups.values()}
    config_groups = {
        f"group_{i}": {
            "targets": modules if len(groups) > 1 else ["Linear", *filter(_is_single, modules)],
            "weights": way.weights,
            "input_activations": None,
            "output_activations": None,
            "format": way.format,
        }
        for i, (way, modules) in enumerate(groups.values())
    }
    quantized = {module for _, modules in groups.values() for module in modules}
    others = {name.removesuffix(".weight") for name in plain if name.endswith(".weight")} - quantized
    heads = "|".join(map(re.escape, plain_heads(quantized)))
    trees = "|".join(map(re.escape, _plain_trees(quantized, others)))
    config = {
        "quant_method": "compressed-tensors",
        "version": VERSION,
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "config_groups": config_groups,
        "ignore": [
            *sorted(others),
            *([rf"re:(.*\.)?({trees})\..*"] if trees else []),
            *([rf"re:(.*\.)?({heads})$"] if heads else []),
        ],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    announced: dict[str, Mapping[str, Any]] = {"config.json": {"quantization_config": config}}
    is_decoded = len(groups) == 1 and any(_is_decoded(_way(name, spec), spec) for name, spec in specs.items())
    return _decoded(announced) if is_decoded else announced


def _plain_trees(quantized: Collection[str], others: Iterable[str]) -> list[str]:
    """Return the outermost modules, outside numbered layers, that hold some of ``others``, and none of ``quantized``.

    >>> _plain_trees({"model.layers.0.proj"}, ["visual.blocks.0.attn.qkv", "model.norm", "lm_head"])
    ['visual']
    """
    trees: set[str] = set()
    names = "\n".join(f".{name}." for name in quantized)
    for outer in {(*itertools.takewhile(lambda part: not part.isdecimal(), name.split(".")[:-1]),) for name in others}:
        paths = itertools.accumulate(outer, lambda path, part: f"{path}.{part}")
        trees.update(itertools.islice((path for path in paths if f".{path}." not in names), 1))
    return sorted(trees)


def _is_decoded(way: Way, spec: WeightSpec) -> bool:
    """Return whether transformers can read the weight only by decoding it at load, which it does for one group.

    Version 5.23 expects another shape of packed zero points than compressed-tensors, and decodes microscaled floats to
    bfloat16 whatever the dtype of the model is.
    """
    if way.format == PACK:
        return not way.weights["symmetric"]
    return way.format in (NVFP4, MXFP4, MXFP6, MXFP8) and spec.dtype != torch.bfloat16


def _decoded(announced: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    config = {**announced["config.json"]["quantization_config"], "dequantize": True}
    return {"config.json": {"quantization_config": config}}


def announce_others(announced: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Return ``announced`` with ``dequantize``, because transformers builds quantized modules for ``nn.Linear`` alone.

    Raise SchemeError if there are several config groups: transformers decodes at load only if there is one.
    """
    if len(announced["config.json"]["quantization_config"]["config_groups"]) > 1:
        _refuse(
            names[0],
            "in a module that is not nn.Linear (but an embedding or Conv1D, for example) is read by transformers "
            "only if all weights are quantized in the same way",
            f"Decode it with tt.quantize(model, {{{names[0]!r}: tt.Plain()}}), or save as 'native'.",
        )
    return _decoded(announced)


def variant_of(scheme: Scheme) -> Scheme:
    """Return ``scheme``, or for a scheme with a global scale that multiplies the same with one that divides.

    >>> import torchtether as tt
    >>> variant_of(tt.nvfp4()) == tt.nvfp4(global_divides=True)
    True
    """
    is_nv = isinstance(scheme, ScaledFloat) and scheme.global_scale
    return replace(scheme, global_divides=True) if is_nv else scheme  # type: ignore[call-arg,type-var]


def _is_single(module: str) -> bool:
    """Return whether ``module`` lies outside numbered layers, such as an embedding, which is no ``Linear``."""
    return bool(module) and not any(part.isdecimal() for part in module.split("."))


# -- which format --------------------------------------------------------------------------------------------------


def _way(name: str, spec: WeightSpec) -> Way:
    """Return how a Weight of this spec is stored. Raise SchemeError if the format cannot express it."""
    scheme = spec.scheme
    if len(spec.shape) != 2 or not spec.is_contiguous:
        _refuse(
            name,
            f"stores only contiguous matrices, got shape {spec.shape} and stride {spec.stride}",
            "Dequantize it.",
        )
    if isinstance(scheme, Affine):
        return _integers(name, scheme, spec.shape)
    if isinstance(scheme, ScaledFloat):
        return _floats(name, scheme, spec.shape)
    _refuse(
        name,
        f"cannot store {scheme_to_text(scheme)}",
        "Use tt.int8(), tt.int4(), tt.fp8(), tt.mxfp4(), tt.nvfp4() or 'mxfp8'.",
    )


def _integers(name: str, scheme: Affine, shape: Shape) -> Way:
    if scheme.act_order:
        _refuse(name, "cannot store act_order since 0.19", "Save it in the native format, or dequantize it.")
    if scheme.unit != 1:  # multiplying it into the scale would round again and change values
        _refuse(name, f"cannot store a unit beside the scale, got {scheme.unit!r}", "Quantize with tt.int8().")
    strategy = _strategy(name, scheme.block, shape)
    by_rows = strategy["strategy"] in ("channel", "group")
    if not by_rows and scheme.bits < 8:
        _refuse(name, f"packs integers by row or group, got block {scheme.block}", "Use block=(1, None) or (1, 128).")
    return Way(PACK if by_rows else INT, _weights("int", scheme.bits, strategy, symmetric=scheme.symmetric))


def _floats(name: str, scheme: ScaledFloat, shape: Shape) -> Way:
    bits_ = {"e2m1": 4, "e2m3": 6, "e4m3": 8}.get(scheme.element)
    if bits_ is None:
        _refuse(name, f"cannot store {scheme.element}", 'Use ScaledFloat("e4m3").')
    is_micro = scheme.scale_dtype == torch.float8_e8m0fnu and scheme.block == (1, 32)
    if bits_ == 8 and not is_micro:
        if scheme.scale_dtype == torch.float8_e4m3fn:
            _refuse(name, f"cannot store {scheme_to_text(scheme)}", "Use tt.fp8().")
        return Way(FLOAT, _weights("float", 8, _strategy(name, scheme.block, shape)))
    is_nv = bits_ == 4 and scheme.scale_dtype == torch.float8_e4m3fn and scheme.block == (1, 16)
    if not is_micro and not is_nv:
        _refuse(name, f"cannot store {scheme_to_text(scheme)}", "Use tt.mxfp4() or tt.nvfp4().")
    strategy = _strategy(name, scheme.block, shape, always=True)
    if is_nv:
        strategy["strategy"] = "tensor_group"
    scale = dtype_name(torch.float8_e4m3fn if is_nv else torch.uint8)
    format = NVFP4 if is_nv else {4: MXFP4, 6: MXFP6, 8: MXFP8}[bits_]
    return Way(format, _weights("float", bits_, strategy, scale_dtype=f"torch.{scale}"))


def _strategy(name: str, block: tuple[int | None, int | None], shape: Shape, *, always: bool = False) -> dict[str, Any]:
    """Return ``strategy`` and its size; ``always`` means a group even if it covers the row, as in microscaling."""
    rows, columns = block
    if block == (None, None):
        return {"strategy": "tensor", "group_size": None}
    if rows == 1 and not always and (columns is None or columns > shape[1]):
        return {"strategy": "channel", "group_size": None}
    if rows == 1 and columns is not None:
        if shape[1] % columns:
            _refuse(
                name,
                f"needs groups that divide the columns, got groups of {columns} for {shape[1]}",
                "Choose a group_size that divides them, or leave it unquantized.",
            )
        return {"strategy": "group", "group_size": columns}
    if rows is None or columns is None:
        _refuse(name, f"cannot store block {block}", "Use (None, None), (1, None), (1, 128) or (128, 128).")
    return {"strategy": "block", "group_size": None, "block_structure": [rows, columns]}


def _weights(kind: str, width: int, strategy: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": kind, "num_bits": width, "symmetric": True, "dynamic": False, **strategy, **more}


def _module(name: str) -> str:
    if name != "weight" and not name.endswith(".weight"):
        _refuse(name, "stores only tensors with the name '*.weight'", "Leave it unquantized.")
    return name.removesuffix("weight")


def _refuse(name: str, what: str, fix: str) -> NoReturn:
    raise SchemeError(f"compressed-tensors {what}", name=name, fix=fix)


# -- tensors ------------------------------------------------------------------------------------------------------


def _scale_dtype(way: Way, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of stored scales: e8m0 is stored as bytes in microscaling formats, else as float32."""
    if way.format in (MXFP4, MXFP6, MXFP8):
        return torch.uint8
    return dtype if way.format == NVFP4 or dtype in FLOATS else torch.float32


def _scale_shape(way: Way, shape: Shape) -> Shape:
    return (1,) if way.weights["strategy"] == "tensor" else shape


def _as_words(stream: Tensor) -> Tensor:
    """Return rows of bytes as int32 words; the last word of a row is padded with zeros."""
    padded = F.pad(stream, (0, -stream.shape[-1] % 4))
    # flat first: a dimension of size 1 may have any stride, and view(dtype) needs multiples of 4
    return padded.reshape(-1).view(torch.int32).view(*padded.shape[:-1], padded.shape[-1] // 4)


def _unsigned(codes: Tensor) -> Tensor:
    """Return codes with the offset of packed codes: int8 lacks it, a stream has it."""
    return codes.view(torch.uint8).bitwise_xor(0x80) if codes.dtype == torch.int8 else codes


def _signed(codes: Tensor) -> Tensor:
    """Return codes or zero points as int8: those of an unsigned scheme are 128 higher."""
    return codes if codes.dtype == torch.int8 else codes.bitwise_xor(0x80).view(torch.int8)


def _zeros(name: str, zeros: Tensor, width: int, is_signed: bool) -> Tensor:
    """Return zero points with the offset of packed codes, uint8. Raise SchemeError if one exceeds ``width`` bits."""
    wide = zeros.to(torch.int16) + ((1 << (width - 1)) if is_signed else 0)
    if bool(((wide < 0) | (wide >= 1 << width)).any()):
        outside = int(wide.min()) if bool((wide < 0).any()) else int(wide.max())
        _refuse(name, f"stores zero points in {width} bits, got {outside}", "Quantize the values again.")
    return wide.to(torch.uint8)


def _divisor(name: str, spec: WeightSpec, parts: Mapping[str, Tensor]) -> Tensor:
    """Return a divisor that gives the same product with every block scale as the global scale.

    Raise SchemeError if there is none.
    """
    scheme = spec.scheme
    assert isinstance(scheme, ScaledFloat)
    if not scheme.global_scale:
        return torch.ones((), device=parts["scale"].device)
    unit = parts["global_scale"]
    if scheme.global_divides:
        return unit
    scales = torch.unique(parts["scale"].float())
    near = unit.reciprocal()
    for end in (torch.inf, -torch.inf):  # the nearest float need not be exact, but a neighbour may be
        guess = near
        for _ in range(4):
            if torch.equal(scales / guess, scales * unit):
                return guess
            guess = torch.nextafter(guess, torch.full_like(guess, end))
    _refuse(
        name,
        f"divides by the global scale, but {float(unit)!r}, which multiplies, has no exact reciprocal",
        "Quantize with tt.nvfp4(global_divides=True).",
    )
