"""bitsandbytes: nf4 and fp4 in flat blocks, doubly quantized or not, and int8 by rows.

    w                       uint8 (ceil(n / 2), 1), or the same bytes viewed as ``quant_storage``; high nibble first
    w.absmax                float32 (ceil(n / blocksize),), or uint8 if nested
    w.quant_map             float32 (16,), the value of each code
    w.nested_absmax         float32 (ceil(blocks / nested_blocksize),)
    w.nested_quant_map      float32 (256,), the 8-bit dynamic type
    w.quant_state.bitsandbytes__nf4   uint8, JSON: shape, dtype, blocksize, nested_blocksize, nested_offset

    m.weight                int8 (N, K)
    m.SCB                   float32 (N,), the largest magnitude of each row: w = q * SCB * (1 / 127)
    m.weight_format         uint8 (), 0: rows

The tensors determine which weights are quantized, whatever the config lists.
Source: bitsandbytes 0.50, ``functional.QuantState`` and ``nn.Linear8bitLt``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._dtypes import dtype_name
from ..errors import CheckpointError, SchemeError
from ..files import Stored
from ..files.strict_json import parse_object, short_repr
from ..geometry.views import Shape
from ..schemes import Affine, Codebook, Scheme, scheme_to_text
from ..schemes.tables import DYNAMIC, FP4, NF4
from ..weights.spec import WeightSpec
from ..weights.weight import Weight
from .entry import Contents, Entry, Evidence, Found, Wanted, check_dtype, expect, refuse_other, spec_of
from .heads import plain_heads
from .rows import Along, all_along

name = "bitsandbytes"
evidence = Evidence(methods=(name,), keys=(".quant_state.bitsandbytes__", ".SCB\n"))

STATE = ".quant_state.bitsandbytes__"
_INT8_CALL = "tt.Affine(narrow_range=True, unit=7.874015718698502e-3)"
INT8 = Affine(narrow_range=True, unit=7.874015718698502e-3)
"""int8 with the largest magnitude of each row as its scale; the unit is bitsandbytes' float for 1 / 127."""

_KINDS = {"nf4": NF4, "fp4": FP4}
_STORAGE = (torch.uint8, torch.int8, torch.bfloat16, torch.float16, torch.float32)
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SIDES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_STATE_WIDTH = 256  # bytes of JSON, padded with spaces: ``layout`` must know the size before the offset is computed
_NESTED = 256
_CHUNK = 1 << 22  # bytes whose nibbles are swapped at once


# -- reading ------------------------------------------------------------------------------------------------------


def recognise(contents: Contents) -> Found | None:
    """Return every weight with a quant_state, and every int8 weight with SCB; ``None`` if there are none."""
    tensors = contents.tensors
    states = {key.partition(STATE)[0]: key for key in tensors if STATE in key}
    rows = [key for key in tensors if key.endswith(".SCB")] if "SCB" in contents.leaves else []
    if not states and not rows and contents.method != "bitsandbytes":
        return None
    sides = tuple(f".{role}" for role in _SIDES)
    sided = [key for key in tensors if key.endswith(sides)]
    found = Found()
    for weight, state in states.items():
        keys = {"packed": weight, "state": state}
        keys |= {role: f"{weight}.{role}" for role in _SIDES if f"{weight}.{role}" in tensors}
        found.add(weight, keys, _entry_4bit, contents, weight, state.partition(STATE)[2], keys)
    for key in sided:
        weight = key.rpartition(".")[0]
        if weight not in states:
            found.fault(weight, f"it has {key}, but no quant_state", {"side": key, "packed": weight})
    for key in rows:
        module = key.removesuffix(".SCB")
        roles = {"qdata": f"{module}.weight", "scale": key, "format": f"{module}.weight_format"}
        keys = {role: key for role, key in roles.items() if key in tensors}
        found.add(f"{module}.weight", keys, _entry_int8, contents, keys)
    for key in tensors:
        module = key.removesuffix(".weight_format")
        if module != key and f"{module}.SCB" not in tensors:
            keys = {"format": key, "qdata": f"{module}.weight"}
            found.fault(f"{module}.weight", f"it has {key}, but no {module}.SCB", keys)
    return found


def unpack(entry: Entry, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts: nibbles in our order, or the int8 codes as they are."""
    if "packed" not in tensors:
        return {"qdata": tensors["qdata"], "scale": tensors["scale"].view(-1, 1)}
    count = math.prod(entry.shape)
    packed = tensors["packed"].reshape(-1).view(torch.uint8)[: (count + 1) // 2]
    parts = {"qdata": _swapped(packed, count), "absmax": tensors["absmax"].reshape(-1)}
    if "nested_absmax" in tensors:
        parts["nested_absmax"] = tensors["nested_absmax"].reshape(-1)
        parts["nested_offset"] = torch.tensor(entry.options["offset"], dtype=torch.float32, device=packed.device)
    return parts


def rows(entry: Entry, tensors: Mapping[str, Stored]) -> Mapping[str, Along] | None:
    """Return where rows lie: 4-bit codes and scales are flat streams over all rows; 8-bit codes have rows."""
    assert entry.spec is not None
    if "packed" not in entry.keys:
        return all_along(entry, tensors)
    layout, row = entry.spec.scheme.layout(entry.spec.base), math.prod(entry.spec.base[1:])
    spans = {role: layout["qdata" if role == "packed" else role].span for role in entry.keys}
    return {role: Along(0, row, span) for role, span in spans.items()}


def _swapped(packed: Tensor, count: int) -> Tensor:
    """Return ``packed`` with the nibbles of every byte swapped; a nibble beyond ``count`` codes is zero."""
    made = torch.empty_like(packed)
    for start in range(0, packed.shape[0], _CHUNK):
        piece = packed[start : start + _CHUNK]
        made[start : start + _CHUNK].copy_(piece << 4).bitwise_or_(piece >> 4)
    if count % 2:
        made[-1] &= 0x0F
    return made


def _entry_4bit(contents: Contents, weight: str, kind: str, keys: Mapping[str, str]) -> Entry:
    """Return the entry of a 4-bit weight, whose quant_state has the key of ``kind``."""
    state = _state(contents.read(keys["state"]))
    _check_4bit(contents, weight, state, kind, keys)
    table, known = tuple(contents.read(keys["quant_map"]).tolist()), _KINDS[kind]
    try:
        scheme = Codebook(
            known if table == known else table,
            state["blocksize"],
            nested="nested_offset" in state,
            nested_block_size=state.get("nested_blocksize", _NESTED),
        )
    except SchemeError as error:
        raise CheckpointError(f"its quant_map or quant_state is invalid: {error}") from None
    spec = spec_of(tuple(state["shape"]), _DTYPES[state["dtype"]], scheme, name=weight)
    read = {role: key for role, key in keys.items() if role in ("packed", "absmax", "nested_absmax")}
    return Entry.of(read, spec, offset=state.get("nested_offset"))


def _state(blob: Tensor) -> dict[str, Any]:
    """Return the JSON object of a quant_state. Raise CheckpointError if a field has a wrong type or value."""
    if blob.dtype != torch.uint8:
        raise CheckpointError(f"its quant_state is {blob.dtype}, not torch.uint8")
    state = parse_object(bytes(blob.reshape(-1).tolist()), name="", what="JSON in its quant_state", floats=True)

    def is_size(value: Any, least: int = 1) -> bool:
        return type(value) is int and least <= value < 2**48

    shape, offset = state.get("shape"), state.get("nested_offset", 0.0)
    sizes = [one for one in ("blocksize", "nested_blocksize") if one == "blocksize" or "nested_offset" in state]
    wrong = [one for one in sizes if not is_size(state.get(one))]
    if not isinstance(shape, list) or not 0 < len(shape) < 9 or not all(is_size(n, 0) for n in shape):
        wrong.append("shape")
    if not isinstance(state.get("dtype"), str) or state["dtype"] not in _DTYPES:
        wrong.append("dtype")
    if type(offset) not in (int, float) or not abs(offset) < 2**128:  # float32
        wrong.append("nested_offset")
    for field in wrong:
        raise CheckpointError(f"its quant_state is invalid: {field} is {short_repr(state.get(field))}")
    return state


def _check_4bit(contents: Contents, weight: str, state: dict[str, Any], kind: str, keys: Mapping[str, str]) -> None:
    """Raise CheckpointError if the tensors of one 4-bit weight contradict its state."""
    tensors = contents.tensors
    if kind not in _KINDS or state.get("quant_type", kind) != kind:
        held = short_repr(state.get("quant_type"))
        raise CheckpointError(f"its quant_type is {held}, but the key of its quant_state ends with {kind[:40]!r}")
    if weight not in tensors:
        raise CheckpointError("it has a quant_state, but no codes")
    stored, count = tensors[weight], math.prod(state["shape"])
    check_dtype("weight", stored.dtype, _STORAGE)
    if not (count + 1) // 2 <= stored.nbytes <= (count + 1) // 2 + 8:
        needed = f"shape {tuple(state['shape'])} needs {(count + 1) // 2}"
        raise CheckpointError(f"its codes take {stored.nbytes} bytes, but {needed}")
    blocks = -(-count // state["blocksize"])
    is_nested = "nested_offset" in state
    wanted: dict[str, Wanted] = {
        "quant_map": ((torch.float32,), (16,)),
        "absmax": ((torch.uint8 if is_nested else torch.float32,), (blocks,)),
    }
    if is_nested:
        nested = -(-blocks // state["nested_blocksize"])
        wanted |= {"nested_absmax": ((torch.float32,), (nested,)), "nested_quant_map": ((torch.float32,), (256,))}
    expect(tensors, keys, wanted)
    if is_nested:
        table = contents.read(keys["nested_quant_map"])
        # bitsandbytes computes it by torch, which rounds the last bit otherwise on processors without AVX2
        if not torch.allclose(table, table.new_tensor(DYNAMIC), rtol=2.0**-22, atol=0.0):
            raise CheckpointError("its nested_quant_map is not the 8-bit dynamic type")


def _entry_int8(contents: Contents, keys: Mapping[str, str]) -> Entry:
    """Return the entry of an int8 weight with a scale for each row."""
    if "format" in keys:
        stored = contents.tensors[keys["format"]]
        order = contents.read(keys["format"]).reshape(-1).tolist() if stored.nbytes == 1 else [stored.shape]
        if order != [0]:
            raise CheckpointError(f"its weight_format is {order[0]}, and only rows (0) are supported")
    if "qdata" not in keys:
        raise CheckpointError(f"it has {keys['scale']}, but no codes")
    shape = contents.tensors[keys["qdata"]].shape
    if len(shape) != 2:
        raise CheckpointError(f"its codes have shape {shape}, which is not a matrix")
    expect(contents.tensors, keys, {"qdata": ((torch.int8,), shape), "scale": ((torch.float32,), (shape[0],))})
    used = {role: keys[role] for role in ("qdata", "scale")}
    return Entry.of(used, spec_of(shape, contents.dtype, INT8, name=keys["qdata"]))


# -- writing ------------------------------------------------------------------------------------------------------


def layout(name: str, spec: WeightSpec) -> dict[str, tuple[torch.dtype, Shape]]:
    """Return what ``pack`` stores: 4-bit codes with their side tensors, or int8 rows with SCB."""
    shape, scheme = spec.base, spec.scheme
    if isinstance(scheme, Affine):
        _check_int8(name, spec)
        module = name.removesuffix(".weight")
        return {
            name: (torch.int8, shape),
            f"{module}.SCB": (torch.float32, (shape[0],)),
            f"{module}.weight_format": (torch.uint8, ()),
        }
    kind, count = _kind(name, spec), math.prod(shape)
    assert isinstance(scheme, Codebook)
    blocks = -(-count // scheme.block_size)
    made = {
        name: (torch.uint8, ((count + 1) // 2, 1)),
        f"{name}.absmax": (torch.uint8 if scheme.nested else torch.float32, (blocks,)),
        f"{name}.quant_map": (torch.float32, (16,)),
        f"{name}{STATE}{kind}": (torch.uint8, (_STATE_WIDTH,)),
    }
    if scheme.nested:
        made[f"{name}.nested_absmax"] = (torch.float32, (-(-blocks // scheme.nested_block_size),))
        made[f"{name}.nested_quant_map"] = (torch.float32, (256,))
    return made  # type: ignore[return-value]


def pack(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return the tensors to store for ``weight``, by key: the inverse of ``recognise`` and ``unpack``.

    >>> import torch, torchtether as tt
    >>> sorted(pack("m.weight", tt.Weight.encode(torch.eye(4), tt.nf4())))
    ['m.weight', 'm.weight.absmax', 'm.weight.quant_map', 'm.weight.quant_state.bitsandbytes__nf4']
    """
    assert isinstance(weight, Weight)
    parts, scheme, shape = weight.parts, weight.scheme, weight.spec.base
    if isinstance(scheme, Affine):
        _check_int8(name, weight.spec)
        module = name.removesuffix(".weight")
        order = torch.zeros((), dtype=torch.uint8, device="cpu")
        return {name: parts["qdata"], f"{module}.SCB": parts["scale"].reshape(-1), f"{module}.weight_format": order}
    kind = _kind(name, weight.spec)
    assert isinstance(scheme, Codebook)
    state: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": scheme.block_size,
        "dtype": dtype_name(weight.dtype),
        "shape": list(shape),
    }
    made = {
        name: _swapped(parts["qdata"], 0).view(-1, 1),
        f"{name}.absmax": parts["absmax"],
        f"{name}.quant_map": torch.tensor(scheme.table, dtype=torch.float32, device="cpu"),
    }
    if scheme.nested:
        state["nested_blocksize"] = scheme.nested_block_size
        state["nested_dtype"] = "float32"
        state["nested_offset"] = float(parts["nested_offset"])
        made[f"{name}.nested_absmax"] = parts["nested_absmax"]
        made[f"{name}.nested_quant_map"] = torch.tensor(DYNAMIC, dtype=torch.float32, device="cpu")
    text = json.dumps(state).encode().ljust(_STATE_WIDTH)
    if len(text) > _STATE_WIDTH:
        raise SchemeError(f"its quant_state takes {len(text)} bytes, but {_STATE_WIDTH} are the limit", name=name)
    made[f"{name}{STATE}{kind}"] = torch.tensor(list(text), dtype=torch.uint8, device="cpu")
    return {key: tensor.detach() for key, tensor in made.items()}


def announce(specs: Mapping[str, WeightSpec], plain: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """Return the ``quantization_config`` that transformers reads: 4 or 8 bits, and the modules to skip."""
    schemes = [spec.scheme for spec in specs.values()]
    books = [scheme for scheme in schemes if isinstance(scheme, Codebook)]
    if books and len(books) < len(schemes):
        raise SchemeError(
            "some weights are 4-bit and others int8, but the config of bitsandbytes describes only one of the two",
            name="format",
            fix="Quantize all weights in the same way.",
        )
    if len({(book.table, book.nested, book.block_size) for book in books}) > 1:
        raise SchemeError(
            "the 4-bit weights differ in kind or block size", name="format", fix="Use one scheme for all."
        )
    for name, spec in specs.items():
        layout(name, spec)  # raises SchemeError if it cannot be expressed
    compute = next(iter(specs.values())).dtype if specs else torch.float32
    modules = {key.removesuffix(".weight") for key in plain if key.endswith(".weight")}
    quantized = {name.removesuffix(".weight") for name in specs}
    modules.update(plain_heads(quantized))
    config: dict[str, Any] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": bool(books),
        "load_in_8bit": not books,
        "_load_in_4bit": bool(books),
        "_load_in_8bit": not books,
        "llm_int8_threshold": 6.0,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_skip_modules": sorted(modules) or None,
        "bnb_4bit_quant_type": "fp4" if books and books[0].table == FP4 else "nf4",
        "bnb_4bit_use_double_quant": bool(books) and books[0].nested,
        "bnb_4bit_compute_dtype": dtype_name(compute),
        "bnb_4bit_quant_storage": "uint8",
    }
    return {"config.json": {"quantization_config": config}}


holds_embeddings = False


def announce_others(announced: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Raise SchemeError: transformers builds bitsandbytes modules for linear layers alone."""
    refuse_other(names[0], "transformers reads no other quantized weights of bitsandbytes")


def variant_of(scheme: Scheme) -> Scheme:
    """Return ``scheme``, or for ``tt.int8()`` bitsandbytes' int8, which keeps the largest value of a row exactly."""
    return INT8 if scheme == Affine() else scheme


def _kind(name: str, spec: WeightSpec) -> str:
    scheme = spec.scheme
    kinds = {table: kind for kind, table in _KINDS.items()}
    if not (isinstance(scheme, Codebook) and scheme.flat and scheme.table in kinds):
        raise SchemeError(
            f"bitsandbytes cannot store {scheme_to_text(scheme)}",
            name=name,
            fix=f"Quantize with tt.nf4() or 'fp4', or for int8 with {_INT8_CALL}.",
        )
    if not name.endswith("weight"):
        raise SchemeError(
            "bitsandbytes stores only tensors whose name ends with 'weight'",
            name=name,
            fix="Dequantize it, or save in our own format.",
        )
    if spec.dtype not in _DTYPES.values():
        dtypes = ", ".join(_DTYPES)
        fix = "Call tt.convert(model, dtype=torch.bfloat16) first."
        raise SchemeError(f"it is {spec.dtype}, but bitsandbytes stores only {dtypes}", name=name, fix=fix)
    return kinds[scheme.table]


def _check_int8(name: str, spec: WeightSpec) -> None:
    if spec.scheme != INT8 or len(spec.base) != 2 or not name.endswith(".weight"):
        raise SchemeError(
            f"bitsandbytes cannot store {scheme_to_text(spec.scheme)} of shape {tuple(spec.base)}",
            name=name,
            fix=f"Quantize matrices with {_INT8_CALL}, the int8 of bitsandbytes, or with tt.nf4().",
        )
