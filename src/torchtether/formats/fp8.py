"""fp8 with scales: one for each block (DeepSeek, ``weight_scale_inv``), for each row (FBGEMM), or for all.

    k             float8 (*lead, N, K)
    k_scale_inv   (*lead, ceil(N / rows), ceil(K / columns)): one per block, multiplied despite its name
    k_scale       () or (1,): one for all; (N,) or (N, 1): one per row
    m.scale       the scale of ``m.weight`` in DeepSeek-V4; routed experts are then int8 (N, K / 2), two E2M1 codes to a
                  byte, low nibble first, under e8m0 scales (N, K / 32)

``weight_block_size`` in ``config.json`` gives the block size: the quotients of the shapes do not, because the last
blocks may be smaller.
Source: DeepSeek-V3 and Qwen3 model repositories, transformers' ``fp8`` and ``fbgemm_fp8``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..files import Stored
from ..geometry.views import Shape
from ..schemes import ScaledFloat
from .entry import Contents, Entry, Evidence, Found, expect, spec_of
from .rows import Along, all_along

name = "fp8"

METHODS = ("fp8", "fbgemm_fp8")
evidence = Evidence(methods=METHODS, keys=("_scale_inv\n",))
ELEMENTS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
_SPARE = (".input_scale", ".activation_scale", ".input_scale_ub", ".input_scale_inv", ".k_scale", ".v_scale")


def recognise(contents: Contents) -> Found | None:
    """Return every float8 tensor with its scale; codes or scales without the other are a fault."""
    named = contents.method in METHODS
    if not named and (contents.method or not any(leaf.endswith("_scale_inv") for leaf in contents.leaves)):
        return None
    block = _block_size(contents)
    found = Found()
    scales: set[str] = set()
    for key, stored in contents.tensors.items():
        if key.endswith(_SPARE) and named:
            found.spare.add(key)
            continue
        scale = next((k for k in _scale_keys(key) if k in contents.tensors), None)
        packed = stored.dtype == torch.int8 and scale == key.removesuffix("weight") + "scale"
        if stored.dtype not in ELEMENTS and not packed:
            continue
        if scale is None:
            found.fault(key, f"it is {stored.dtype} and has no scale ({key}_scale_inv)", {"tensor": key})
            continue
        scales.add(scale)
        keys = {"qdata": key, "scale": scale}
        if packed:
            shape = (*stored.shape[:-1], stored.shape[-1] * 2)
            _add(found, contents, key, keys, ScaledFloat("e2m1", (1, 32), SCALES[-1]), shape)
            continue
        scheme = _scheme(stored, contents.tensors[scale], None if scale.endswith("_scale") else block)
        if isinstance(scheme, str):
            found.fault(key, scheme, keys)
        else:
            _add(found, contents, key, keys, scheme, stored.shape)
    for key in contents.tensors:
        if key.endswith(("weight_scale_inv", "weight_scale")) and key not in scales:
            owner = key.removesuffix("_inv").removesuffix("_scale")
            held = f"are {contents.tensors[owner].dtype}" if owner in contents.tensors else "are not"
            found.fault(owner, f"its scale {key} is there, its codes {held}", {"scale": key})
    return found


def unpack(entry: Entry, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts: codes and scales as they are stored."""
    assert entry.spec is not None
    layout = entry.spec.scheme.layout(entry.spec.base)
    codes = tensors["qdata"]
    codes = codes.view(torch.uint8) if codes.dtype == torch.int8 else codes
    return {"qdata": codes, "scale": tensors["scale"].reshape(layout["scale"].shape)}


def rows(entry: Entry, tensors: Mapping[str, Stored]) -> Mapping[str, Along] | None:
    """Return where rows lie: every tensor has them as its rows."""
    return all_along(entry, tensors)


def _block_size(contents: Contents) -> tuple[int, int] | None:
    block = contents.quantization.get("weight_block_size")
    if block is None:
        return None
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise CheckpointError(f"weight_block_size is {str(block)[:80]}, not [rows, columns]", name="config.json")
    return block[0], block[1]


def _scale_keys(key: str) -> tuple[str, ...]:
    beside = (f"{key.removesuffix('weight')}scale",) if key.endswith(".weight") else ()
    return (f"{key}_scale_inv", f"{key}_scale", *beside)


def _scheme(codes: Stored, scale: Stored, block: tuple[int, int] | None) -> ScaledFloat | str:
    """Return the scheme that the shape of the scale implies, or what is wrong with it."""
    if scale.dtype not in SCALES:
        return f"its scale is {scale.dtype}, not a float"
    element = ELEMENTS[codes.dtype]
    if len(codes.shape) < 2:
        return f"its codes have shape {codes.shape}, which has no rows"
    *lead, rows, columns = codes.shape
    if block is not None:
        wanted = (*lead, -(-rows // block[0]), -(-columns // block[1]))
        if scale.shape != wanted:
            return f"its scale has shape {scale.shape}, blocks of {block} over {codes.shape} need {wanted}"
        return ScaledFloat(element, block, scale.dtype)
    if math.prod(scale.shape) == 1:
        return ScaledFloat(element, (None, None), scale.dtype)
    if scale.shape in ((*lead, rows), (*lead, rows, 1)):
        return ScaledFloat(element, (1, None), scale.dtype)
    return (
        f"its scale has shape {scale.shape}, which is neither one for all nor one per row of {codes.shape}, "
        "and config.json names no weight_block_size"
    )


def _add(
    found: Found, contents: Contents, key: str, keys: Mapping[str, str], scheme: ScaledFloat, shape: Shape
) -> None:
    spec = spec_of(shape, contents.dtype, scheme, name=key)
    part = scheme.layout(shape)["scale"].shape
    stored = contents.tensors[keys["scale"]]
    wrong = expect(contents.tensors, keys, {"scale": ((stored.dtype,), part)})
    wrong = wrong or ("" if stored.dtype == scheme.scale_dtype else f"its scale is {stored.dtype}")
    if wrong:
        found.fault(key, wrong, keys)
    else:
        found.weights[key] = Entry.of(keys, spec)
