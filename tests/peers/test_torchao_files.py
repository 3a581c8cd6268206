"""We read what torchao flattens into safetensors to the values that torchao dequantizes."""

import pytest
import torch
from torch import nn

from tests.formats.folders import opened

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


def _configs():
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerAxis,
        PerGroup,
    )
    from torchao.quantization.granularity import PerRow, PerTensor

    yield "int8", Int8WeightOnlyConfig(version=2)
    yield "int8 tensor", Int8WeightOnlyConfig(version=2, granularity=PerTensor())
    yield "int8 group", Int8WeightOnlyConfig(version=2, granularity=PerGroup(32))
    yield "int8 dynamic", Int8DynamicActivationInt8WeightConfig(version=2, granularity=PerRow())
    for bits in range(1, 9):
        granularity = PerGroup(32) if bits % 2 else PerAxis(0)
        yield f"int{bits}x", IntxWeightOnlyConfig(getattr(torch, f"int{bits}"), granularity)
    yield "float8", Float8WeightOnlyConfig()


def _small_floats(dtype):
    """As torchao makes them where it has a GPU to serve them."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    w = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    for element in (torch.float4_e2m1fn_x2, torch.float8_e4m3fn, torch.float8_e5m2):
        yield MXTensor.to_mx(w, element, 32)
    yield NVFP4Tensor.to_nvfp4(w)
    yield NVFP4Tensor.to_nvfp4(w, per_tensor_scale=per_tensor_amax_to_scale(w.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_read_as_torchao_dequantizes(dtype):
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import quantize_

    done, refused = [], {}
    for name, config in _configs():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(96, 64, dtype=dtype), nn.Linear(64, 32, bias=False, dtype=dtype))
        try:
            quantize_(model, config)
            tensors, metadata = flatten_tensor_state_dict(model.state_dict())
        except Exception as error:  # kinds that torchao has no CPU for, or cannot write
            refused[name] = str(error)
            continue
        with opened(tensors, metadata) as checkpoint:
            assert not checkpoint.faults, name
            assert checkpoint.keys() == model.state_dict().keys()
            for key in ("0.weight", "1.weight"):
                wanted = model.state_dict()[key].dequantize()
                assert torch.equal(checkpoint[key].to(wanted.dtype).dequantize(), wanted), (name, key)
        done.append(name)
    assert len(done) == 13, refused


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_small_floats_read_as_torchao_dequantizes(dtype):
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    for made in _small_floats(dtype):
        with opened(*flatten_tensor_state_dict({"m.weight": made})) as checkpoint:
            weight = checkpoint["m.weight"]
            assert weight.dtype == dtype
            assert torch.equal(weight.dequantize(), made.dequantize())
