"""We read what ModelOpt quantizes to the values that ModelOpt dequantizes."""

import pytest
import torch

from tests.formats.folders import opened

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

SHAPES = ((6, 64), (33, 96), (3, 5, 32))


def read(tensors, algorithm, dtype):
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm}}
    with opened({f"m.{key}": tensor for key, tensor in tensors.items()}, config=config) as checkpoint:
        return checkpoint["m.weight"].to(dtype).dequantize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nvfp4(shape, dtype):
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    made, scale, second = NVFP4QTensor.quantize(w, 16)
    wanted = made.dequantize(dtype, scale=scale, double_scale=second, block_sizes={-1: 16})
    tensors = {"weight": made._quantized_data, "weight_scale": scale, "weight_scale_2": second}
    assert torch.equal(read(tensors, "NVFP4", dtype), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mxfp8(shape, dtype):
    from modelopt.torch.quantization.qtensor import MXFP8QTensor

    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    made, scale = MXFP8QTensor.quantize(w)
    wanted = made.dequantize(dtype, scale=scale)
    assert torch.equal(read({"weight": made._quantized_data, "weight_scale": scale}, "MXFP8", dtype), wanted)


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8(dtype, axis):
    """The same in float32; elsewhere ModelOpt rounds the scale first, which is a unit in the last place at most."""
    from modelopt.torch.quantization.qtensor import FP8QTensor

    w = torch.randn(33, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    scale = w.float().abs().amax(1 if axis == 0 else None, keepdim=axis == 0) / 448
    made, scale = FP8QTensor.quantize(w, scale)
    wanted = made.dequantize(dtype, scale=scale)
    values = read({"weight": made._quantized_data, "weight_scale": scale}, "FP8", dtype)
    if dtype == torch.float32:
        assert torch.equal(values, wanted)
    ulp = torch.finfo(dtype).eps * wanted.float().abs()
    assert bool(((values.float() - wanted.float()).abs() <= ulp).all())
