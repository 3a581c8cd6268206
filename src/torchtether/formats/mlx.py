"""MLX: ``quantization`` in ``config.json``, and ``scales`` (and ``biases``) for each uint32 ``weight``.

    m.weight   uint32 (*lead, K * bits / 32): the dense stream of codes, row by row
    m.scales   (*lead, K / group_size): floats; bytes of e8m0 with mxfp4 and mxfp8, bytes of e4m3 with nvfp4
    m.biases   like scales, with affine only

``affine`` decodes in the dtype of its scales and rounds twice: ``round(round(q * scale) + bias)``. ``quantization``
holds the options of all modules. Under the path of a module it holds the options of that module instead: ``false``, or
an object whose missing fields are MLX's defaults, not those of all modules. A file does not record ties: a tied head
has no tensors.
Source: mlx.core.quantize and mlx.nn.quantize 0.32; mlx-lm's ``config.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..files.strict_json import short_repr
from ..schemes import ScaledFloat, Scheme
from ..schemes.biased import Biased
from .entry import FLOATS, Contents, Entry, Evidence, Found, expect, spec_of
from .rows import all_along

name = "mlx"
evidence = Evidence(config=("quantization",), dtypes=(torch.uint32,))
rows = all_along


class Mode(NamedTuple):
    """The group sizes and numbers of bits that a mode of MLX allows, the defaults first."""

    group_sizes: tuple[int, ...]
    bits: tuple[int, ...]


MODES = {
    "affine": Mode((64, 32, 128), (4, 1, 2, 3, 5, 6, 8)),
    "mxfp4": Mode((32,), (4,)),
    "mxfp8": Mode((32,), (8,)),
    "nvfp4": Mode((16,), (4,)),
}


def recognise(contents: Contents) -> Found | None:
    """Return every uint32 weight with its scales; either without the other is a fault."""
    shared = contents.config.get("quantization")
    if contents.method:
        return None
    if not isinstance(shared, Mapping) or not {"group_size", "bits", "mode"} & shared.keys():
        _refuse_without_config(contents)
        return None
    found = Found()
    tensors = contents.tensors
    for key, stored in tensors.items():
        module, _, leaf = key.rpartition(".")
        if leaf in ("scales", "biases") and f"{module}.weight" not in tensors:
            found.fault(f"{module}.weight", f"it has {leaf}, but no codes", {leaf: key})
        if leaf != "weight":
            continue
        keys = {role: f"{module}.{role}" for role in ("weight", "scales", "biases") if f"{module}.{role}" in tensors}
        if stored.dtype != torch.uint32 and keys.keys() == {"weight"}:
            continue
        found.add(key, keys, _entry, contents, shared, module, keys)
    return found


def unpack(entry: Entry, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts: words viewed as bytes, and bytes of small floats viewed in their dtype."""
    assert entry.spec is not None
    scheme = entry.spec.scheme
    codes = tensors["packed"].view(torch.uint8)
    if isinstance(scheme, Biased):
        return {"qdata": codes, "scale": tensors["scale"], "bias": tensors["bias"]}
    assert isinstance(scheme, ScaledFloat)
    codes = codes.view(torch.float8_e4m3fn) if scheme.element == "e4m3" else codes
    return {"qdata": codes, "scale": tensors["scales"].view(scheme.scale_dtype)}


def _refuse_without_config(contents: Contents) -> None:
    """Raise CheckpointError for tensors of MLX whose ``config.json`` is absent: group size and bits are ambiguous."""
    if torch.uint32 not in contents.dtypes:
        return
    for key, stored in contents.tensors.items():
        module = key.removesuffix(".weight")
        if stored.dtype == torch.uint32 and {f"{module}.scales", f"{module}.biases"} <= contents.tensors.keys():
            raise CheckpointError(
                "it is quantized by MLX, and no config.json in the same folder has a 'quantization'",
                name=key,
                fix="Put the config.json of the model, which has group_size and bits, into the folder.",
            )


def _entry(contents: Contents, shared: Mapping[str, Any], module: str, keys: Mapping[str, str]) -> Entry:
    """Return the entry of one module. Raise CheckpointError if its tensors cannot be read."""
    own = shared.get(module, shared)
    if own is False:
        raise CheckpointError("it is quantized, but config.json says that it is not")
    mode, group_size, bits = _options(shared if own is True else own)
    if "scales" not in keys:
        raise CheckpointError("it is torch.uint32 and has no scales")
    if (mode == "affine") != ("biases" in keys):
        held = "its biases are absent" if mode == "affine" else "it has biases"
        raise CheckpointError(f"its mode is {mode}, but {held}")
    codes, scales = (contents.tensors[keys[role]] for role in ("weight", "scales"))
    if codes.dtype != torch.uint32 or not codes.shape:
        raise CheckpointError(f"its codes are {codes.dtype} of shape {codes.shape}, not rows of torch.uint32")
    *lead, words = codes.shape
    if words * 32 % bits or words * 32 // bits % group_size:
        raise CheckpointError(
            f"its rows of {words} words are not whole groups of {group_size} codes of {bits} bits, as config.json says"
        )
    columns = words * 32 // bits
    wanted = (*lead, columns // group_size)
    if scales.shape != wanted:
        groups = scales.shape[-1] if scales.shape else 1
        raise CheckpointError(
            f"its scales have shape {scales.shape}, but {bits} bits in groups of {group_size} need {wanted}"
            f" (bits * group_size is {words * 32 / max(groups, 1):g} here, {bits * group_size} in config.json)"
        )
    expect(contents.tensors, keys, {"scales": (FLOATS if mode == "affine" else (torch.uint8,), wanted)})
    scheme: Scheme
    if mode == "affine":
        expect(contents.tensors, keys, {"biases": ((scales.dtype,), wanted)})
        scheme = Biased(bits, (1, group_size), scales.dtype, scales.dtype)
        roles, dtype = {"weight": "packed", "scales": "scale", "biases": "bias"}, scales.dtype
    else:
        kind = torch.float8_e4m3fn if mode == "nvfp4" else torch.float8_e8m0fnu
        scheme = ScaledFloat("e4m3" if bits == 8 else "e2m1", (1, group_size), kind)
        roles, dtype = {"weight": "packed", "scales": "scales"}, contents.dtype
    spec = spec_of((*lead, columns), dtype, scheme, name=keys["weight"])
    return Entry.of({roles[role]: key for role, key in keys.items()}, spec)


def _options(own: Any) -> tuple[str, int, int]:
    """Return mode, group size and bits in an object of the config."""
    if not isinstance(own, Mapping):
        raise CheckpointError(f"its quantization in config.json is {short_repr(own)}, not an object")
    mode = "affine" if own.get("mode") is None else own["mode"]
    if not isinstance(mode, str) or mode not in MODES:
        raise CheckpointError(f"its mode is {short_repr(mode)}, not one of {', '.join(MODES)}")
    chosen = []
    for field, known in zip(("group_size", "bits"), MODES[mode], strict=True):
        value = known[0] if own.get(field) is None else own[field]
        if type(value) is not int or value not in known:
            allowed = ", ".join(map(str, sorted(known)))
            raise CheckpointError(f"its {field} is {short_repr(value)}, but {mode} allows {allowed}")
        chosen.append(value)
    return mode, chosen[0], chosen[1]
