"""ComfyUI's quantized safetensors: a JSON object for each layer names its format; older files have a marker.

    m.comfy_quant              uint8, JSON: ``{"format": "nvfp4", ...}``; the settings of ``m.weight``
    _quantization_metadata     in the metadata of the file, JSON: the settings of all layers, by name; takes precedence
    scaled_fp8                 a marker tensor in older files, whose float8 weights have ``m.scale_weight``

    float8_e4m3fn, float8_e5m2 weight (*lead, N, K), weight_scale () or (*lead, N, 1) or one for each of lead: q * scale
    int8_tensorwise            the same with int8
    int8_blockwise             weight_scale (*lead, ceil(N / g), ceil(K / g)), where g is the group_size or 128
    mxfp8                      weight e4m3; weight_scale e8m0, one for 32 columns, tiled
    nvfp4                      weight uint8 (*lead, N, K / 2), high nibble first; weight_scale e4m3, one for 16 columns,
                               tiled; weight_scale_2 (), multiplied

Tiled scales are in tiles of 128 rows and 4 columns, padded to whole tiles: row r and column c of a tile are its entry
``r % 32 * 16 + r // 32 * 4 + c``. float8 and e8m0 may be stored as bytes.

Rows and columns are padded with zeros to multiples of 16 (nvfp4) or 32 (mxfp8), and the file does not record the
original shape. Only the model knows it, so ``fit`` cuts a weight to that shape. An exponent of 0 means 2**-127, as in
e8m0 and on GPUs, and not the value 0.
Source: ComfyUI's QUANTIZATION.md, comfy/ops.py and comfy/utils.py; comfy-kitchen 0.2.40.
"""

from ..entry import Evidence
from .reading import MARKER, METADATA, OLD_SCALE, SETTINGS, fit, recognise, rows, unpack
from .writing import announce, announce_others, layout, pack, variant_of

name = "comfy"
holds_embeddings = False
evidence = Evidence(metadata=(METADATA,), keys=(f"{SETTINGS[1:]}\n", f"{MARKER}\n", f"{OLD_SCALE}\n"))

__all__ = [
    "announce", "announce_others", "evidence", "fit", "holds_embeddings", "layout", "name", "pack", "recognise",
    "rows", "unpack", "variant_of",
]  # fmt: skip
