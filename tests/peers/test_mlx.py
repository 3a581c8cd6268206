"""We read what mlx quantizes to the values that mlx dequantizes."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.formats.folders import opened

mx = pytest.importorskip("mlx.core")

pytestmark = pytest.mark.peers

DTYPES = {torch.bfloat16: mx.bfloat16, torch.float16: mx.float16, torch.float32: mx.float32}
MODES = [
    *[("affine", group_size, bits) for group_size in (32, 64, 128) for bits in (1, 2, 3, 4, 5, 6, 8)],
    ("mxfp4", 32, 4),
    ("mxfp8", 32, 8),
    ("nvfp4", 16, 4),
]


def to_torch(array, dtype=None):
    """The same bits, or the same values in a float ``dtype`` of the array."""
    if dtype is None:
        kind = {mx.uint32: torch.uint32, mx.uint8: torch.uint8}[array.dtype]
        return torch.tensor(array.tolist(), dtype=torch.int64).to(kind)
    return torch.tensor(array.astype(mx.float32).tolist(), dtype=torch.float32).reshape(array.shape).to(dtype)


@given(
    mode=st.sampled_from(MODES),
    dtype=st.sampled_from(list(DTYPES)),
    lead=st.sampled_from(((1,), (7,), (3, 5))),
    groups=st.integers(1, 3),
    spread=st.sampled_from((1.0, 1e-3, 50.0)),
    seed=st.integers(0, 2**31 - 1),
)
def test_read_as_mlx_dequantizes(mode, dtype, lead, groups, spread, seed):
    mode, group_size, bits = mode
    assume(groups * group_size % 32 == 0)  # mlx refuses other columns
    w = torch.randn(*lead, groups * group_size, generator=torch.Generator().manual_seed(seed)) * spread
    made = mx.quantize(mx.array(w.tolist()).astype(DTYPES[dtype]), group_size=group_size, bits=bits, mode=mode)
    values = mx.dequantize(*made, group_size=group_size, bits=bits, mode=mode, dtype=DTYPES[dtype])
    tensors = {"m.weight": to_torch(made[0])}
    for role, array in zip(("scales", "biases"), made[1:], strict=False):
        tensors[f"m.{role}"] = to_torch(array, None if array.dtype == mx.uint8 else dtype)
    config = {"quantization": {"group_size": group_size, "bits": bits, "mode": mode}}
    with opened(tensors, config=config) as checkpoint:
        weight = checkpoint["m.weight"].to(dtype)
    assert torch.equal(weight.dequantize(), to_torch(values, dtype))
