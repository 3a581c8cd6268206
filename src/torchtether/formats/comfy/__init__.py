"""ComfyUI's quantized safetensors: JSON for each layer says how its weight is stored; older files have a marker.

    m.comfy_quant              uint8, JSON: ``{"format": "nvfp4", ...}``; how ``m.weight`` is stored
    _quantization_metadata     in the metadata of the file, JSON: the same for all layers, by name; it has precedence
    scaled_fp8                 older: this tensor is there, and float8 weights have ``m.scale_weight``

    float8_e4m3fn, float8_e5m2 weight (*lead, N, K), weight_scale () or (*lead, N, 1) or one for each of lead: q * scale
    int8_tensorwise            the same with int8
    int8_blockwise             weight_scale (*lead, ceil(N / g), ceil(K / g)), g the group_size or 128
    mxfp8                      weight e4m3, weight_scale e8m0 of 32 columns, tiled
    nvfp4                      weight uint8 (*lead, N, K / 2), high nibble first; weight_scale e4m3 of 16 columns,
                               tiled; weight_scale_2 (), multiplied

Tiled scales are in tiles of 128 rows and 4 columns, padded to whole ones: row r and column c of a tile are its entry
``r % 32 * 16 + r // 32 * 4 + c``. float8 and e8m0 may be stored as bytes.

nvfp4 is padded with zeros to multiples of 16 rows and columns, mxfp8 of 32, and the file does not say from what: only
the model does, so ``fit`` cuts a weight to its shape. Exponents of 0 are 2**-127, as in e8m0 and on GPUs, and not 0.
Source: ComfyUI's QUANTIZATION.md, comfy/ops.py and comfy/utils.py; comfy-kitchen 0.2.40.
"""

from ..entry import Evidence
from .reading import MARKER, METADATA, OLD_SCALE, SETTINGS, fit, recognise, rows, unpack
from .writing import announce, announce_embeddings, layout, pack, variant_of

name = "comfy"
holds_embeddings = False
evidence = Evidence(metadata=(METADATA,), keys=(f"{SETTINGS[1:]}\n", f"{MARKER}\n", f"{OLD_SCALE}\n"))

__all__ = [
    "announce", "announce_embeddings", "evidence", "fit", "holds_embeddings", "layout", "name", "pack", "recognise",
    "rows", "unpack", "variant_of",
]  # fmt: skip
