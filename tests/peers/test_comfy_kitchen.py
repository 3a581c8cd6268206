"""ComfyUI's kernels, comfy-kitchen, decode our files to the values that we decode."""

import json

import pytest
import torch
from safetensors.torch import load_file

import torchtether as tt

comfy_kitchen = pytest.importorskip("comfy_kitchen.tensor", reason="comfy-kitchen is not installed")
pytestmark = pytest.mark.peers

LAYOUTS = {
    "float8_e4m3fn": "TensorCoreFP8Layout",
    "float8_e5m2": "TensorCoreFP8Layout",
    "int8_tensorwise": "TensorWiseINT8Layout",
    "mxfp8": "TensorCoreMXFP8Layout",
    "nvfp4": "TensorCoreNVFP4Layout",
}


def decoded(tensors, layer, shape):
    """What comfy-kitchen makes of a layer in float32, given to it as ComfyUI's comfy/ops.py does."""
    kind = json.loads(bytes(tensors[f"{layer}.comfy_quant"].tolist()))["format"]
    layout = getattr(comfy_kitchen, LAYOUTS[kind])
    scale, second = tensors[f"{layer}.weight_scale"], tensors.get(f"{layer}.weight_scale_2")
    given = {"scale": scale} if second is None else {"scale": second, "block_scale": scale}
    params = layout.Params(**given, orig_dtype=torch.float32, orig_shape=shape)
    return layout.dequantize(tensors[f"{layer}.weight"], params)


@pytest.mark.parametrize("shape", [(32, 64), (160, 96), (288, 416)])
@pytest.mark.parametrize(
    "scheme",
    [
        tt.fp8("tensor"),
        tt.ScaledFloat("e5m2", (None, None)),
        tt.int8(),
        tt.Affine(block=(None, None), scale_dtype=torch.bfloat16),
        tt.mxfp8(),
        tt.nvfp4(),
    ],
    ids=str,
)
def test_what_we_write_is_what_it_decodes(tmp_path, scheme, shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight = tt.Weight.encode(values, scheme)
    tt.save({"m.weight": weight}, tmp_path / "x.safetensors", format="comfy")
    assert torch.equal(decoded(load_file(tmp_path / "x.safetensors"), "m", shape), weight.dequantize())
