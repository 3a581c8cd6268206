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

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..geometry.views import Shape
from ..schemes import ScaledFloat
from .entry import FLOAT8, FLOATS, Contents, Entry, Evidence, Found, check_rows, expect, float8_scheme, spec_of
from .rows import all_along

name = "fp8"

METHODS = ("fp8", "fbgemm_fp8")
evidence = Evidence(methods=METHODS, keys=("_scale_inv\n",))
rows = all_along
_SCALES = (*FLOATS, torch.float8_e8m0fnu)
_SPARE = (
    *("input_scale", "input_scale_ub", "input_scale_inv", "activation_scale"),  # of experts: gate_up_proj_input_scale
    *(".output_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale"),
)


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
        if stored.dtype not in FLOAT8 and not packed:
            continue
        if scale is None:
            found.fault(key, f"it is {stored.dtype} and has no scale ({key}_scale_inv)", {"tensor": key})
            continue
        scales.add(scale)
        keys = {"qdata": key, "scale": scale}
        found.add(key, keys, _entry, contents, keys, None if scale.endswith("_scale") else block)
    for key in contents.tensors:
        if key.endswith(("weight_scale_inv", "weight_scale")) and key not in scales:
            owner = key.removesuffix("_inv").removesuffix("_scale")
            held = f"its codes are {contents.tensors[owner].dtype}" if owner in contents.tensors else "no codes"
            found.fault(owner, f"it has a scale ({key}), but {held}", {"scale": key})
    return found


def unpack(entry: Entry, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts: codes and scales as they are stored."""
    assert entry.spec is not None
    layout = entry.spec.scheme.layout(entry.spec.base)
    codes = tensors["qdata"]
    codes = codes.view(torch.uint8) if codes.dtype == torch.int8 else codes
    return {"qdata": codes, "scale": tensors["scale"].reshape(layout["scale"].shape)}


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


def _entry(contents: Contents, keys: Mapping[str, str], block: tuple[int, int] | None) -> Entry:
    codes, scale = (contents.tensors[keys[role]] for role in ("qdata", "scale"))
    check_rows(codes.shape)
    if codes.dtype == torch.int8:
        shape: Shape = (*codes.shape[:-1], codes.shape[-1] * 2)
        scheme = ScaledFloat("e2m1", (1, 32), torch.float8_e8m0fnu)
    else:
        shape, scheme = codes.shape, float8_scheme(codes.dtype, scale, codes.shape, block, _SCALES)
    spec = spec_of(shape, contents.dtype, scheme, name=keys["qdata"])
    expect(contents.tensors, keys, {"scale": ((scheme.scale_dtype,), scheme.layout(shape)["scale"].shape)})
    return Entry.of(keys, spec)
