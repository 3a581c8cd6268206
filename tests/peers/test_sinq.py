"""The package sinq reads our files, and decodes them to our values."""

import pytest
import torch

import torchtether as tt

patch_model = pytest.importorskip("sinq.patch_model", reason="sinq is not installed")
sinqlinear = pytest.importorskip("sinq.sinqlinear", reason="sinq is not installed")
pytestmark = pytest.mark.peers

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def decoded(folder, dtype):
    """What it reads and decodes, by module."""
    found = patch_model.BaseSINQHFModel.load_weights_safetensors(str(folder))
    made = {}
    for module, state in found.items():
        if "W_q" in state:
            linear = sinqlinear.SINQLinear(linear_layer=None, quant_config=None, compute_dtype=dtype, device="cpu")
            linear.load_state_dict(state)
            linear.meta.setdefault("packing", "8bit_u8")  # which it takes out where codes fill bytes, and needs
            made[module] = linear.dequantize()
    return made


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_what_we_write_is_what_it_decodes(tmp_path, bits, symmetric, dtype):
    schemes = [tt.sinq(bits, 32, symmetric), tt.sinq(bits, None, symmetric, scale_dtype=torch.float16)]
    schemes += [tt.ColumnScaled(tt.Biased(bits, (1, 32), dtype, dtype, bias_first=True))]
    state = {}
    for n, scheme in enumerate(schemes):
        values = torch.randn((20, 96), generator=torch.Generator().manual_seed(n)).to(dtype)
        state[f"layers.{n}.weight"] = tt.Weight.encode(values, scheme)
    tt.save({**state, "norm.weight": torch.ones(8)}, tmp_path, format="sinq")
    found = decoded(tmp_path, dtype)
    assert found.keys() == {name.removesuffix(".weight") for name in state}
    for name, weight in state.items():
        assert torch.equal(found[name.removesuffix(".weight")].to(dtype), weight.dequantize()), name
