"""compressed-tensors: the format that llm-compressor writes, and vLLM, SGLang and transformers read.

A module ``m`` holds, instead of or beside ``m.weight``:

    pack-quantized        weight_packed int32 (N, ceil(K * bits / 32)): a dense stream of q + 2**(bits - 1);
                          weight_shape int64 (2,)
    int-quantized         weight int8 (N, K)
    float-quantized       weight float8_e4m3fn (N, K)
    nvfp4-pack-quantized  weight_packed uint8 (N, K / 2), weight_scale e4m3, weight_global_scale (1,) that divides
    mxfp4-, mxfp6-pack-   weight_packed uint8 (N, K / 2), (N, 3 * K / 4), weight_scale uint8: powers of two
    mxfp8-quantized       weight float8_e4m3fn (N, K), weight_scale uint8

    weight_scale          (1,) tensor, (N, 1) channel, (N, K / group) group, (ceil(N / rows), ceil(K / columns)) block
    weight_zero_point     like weight_scale, int8; with pack-quantized int32, packed along dim 0
    weight_g_idx          int32 (K,): the group of each column; all -1 where it was never set

Before version 0.18, codes whose width does not divide 32 were packed as whole codes to each word.
Source: https://github.com/vllm-project/compressed-tensors, checked against 0.20.0.
"""

from ..entry import Evidence
from .reading import METHODS, recognise
from .unpacking import rows, unpack
from .writing import announce, announce_others, layout, pack, variant_of

name = "compressed-tensors"
holds_embeddings = True
evidence = Evidence(methods=METHODS, config=("compression_config",), keys=("weight_packed\n",))

__all__ = [
    "announce", "announce_others", "evidence", "holds_embeddings", "layout", "name", "pack", "recognise", "rows",
    "unpack", "variant_of",
]  # fmt: skip
