"""We read what hqq quantizes to the values that hqq dequantizes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.formats.folders import opened

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


@given(
    bits=st.sampled_from((8, 6, 5, 4, 2, 1)),
    group_size=st.sampled_from((16, 64)),
    dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float32)),
    as_float=st.booleans(),
    seed=st.integers(0, 2**31 - 1),
)
def test_read_as_hqq_dequantizes(bits, group_size, dtype, as_float, seed):
    quantize = pytest.importorskip("hqq.core.quantize").Quantizer
    from hqq.core.utils import encode_safetensor_type

    w = torch.randn(24, 128, generator=torch.Generator().manual_seed(seed)).to(dtype)
    options = {"nbits": bits, "group_size": group_size, "axis": 1, "optimize": False, "device": "cpu"}
    codes, meta = quantize.quantize(w, **options, compute_dtype=dtype, view_as_float=as_float)
    meta |= {"compute_dtype": dtype, "quant_scale": False, "quant_zero": False}
    meta |= {"scale": meta["scale"].to(dtype), "zero": meta["zero"].to(dtype)}
    wanted = quantize.dequantize(codes, meta)
    tensors = {"m.W_q": codes, **{f"m.{key}": encode_safetensor_type(value) for key, value in meta.items()}}
    with opened(tensors, config={"quantization_config": {"quant_method": "hqq"}}) as checkpoint:
        assert not checkpoint.faults
        assert torch.equal(checkpoint["m.weight"].dequantize(), wanted)
