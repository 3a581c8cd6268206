"""fp8 with scales beside it, against arithmetic written out here."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchtether as tt
from tests.formats.files import decoded, faults, random, write

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
SCALES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "e8m0": torch.float8_e8m0fnu}


def _codes(*shape, seed=0):
    return random(*shape, seed=seed).mul_(5000).clamp_(-448, 448).to(torch.float8_e4m3fn)


def _scales(*shape, dtype, seed=1):
    powers = torch.randint(-9, 3, shape, generator=torch.Generator().manual_seed(seed)).float().exp2()
    return powers.to(dtype) if dtype == torch.float8_e8m0fnu else (powers * 1.3).to(dtype)


def _by_block(codes, scales, rows, columns):
    wide = scales.float().repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return codes.float() * wide[..., : codes.shape[-2], : codes.shape[-1]]


@given(
    lead=st.sampled_from([(), (3,)]),
    shape=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    block=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    scale=st.sampled_from(sorted(SCALES)),
    seed=st.integers(0, 99),
)
def test_blocks_of_any_size(lead, shape, block, scale, seed, tmp_path_factory):
    rows, columns = block
    grid = (*lead, -(-shape[0] // rows), -(-shape[1] // columns))
    codes, scales = _codes(*lead, *shape, seed=seed), _scales(*grid, dtype=SCALES[scale], seed=seed)
    name = "experts.gate_up_proj" if lead else "m.weight"
    folder = write(
        tmp_path_factory.mktemp("fp8"),
        {name: codes, f"{name}_scale_inv": scales, "m.input_scale": torch.ones(1)},
        {**FP8, "weight_block_size": list(block)},
    )
    wanted = _by_block(codes, scales, rows, columns)
    assert torch.equal(decoded(folder, name, torch.float32), wanted)
    assert torch.equal(decoded(folder, name), wanted.to(torch.bfloat16))
    with tt.open(folder) as checkpoint:
        assert list(checkpoint) == [name]


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8"])
@pytest.mark.parametrize("shape", [(), (1,), (6,), (6, 1)])
@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
def test_one_scale_or_one_per_row(tmp_path, method, shape, suffix):
    codes, scales = _codes(6, 10), _scales(*shape, dtype=torch.float32)
    tensors = {
        "m.weight": codes,
        f"m.weight{suffix}": scales,
        "m.input_scale_ub": torch.ones(1),
        "m.bias": torch.ones(6),
    }
    folder = write(tmp_path, tensors, {"quant_method": method}, config={"dtype": "float16"})
    wanted = codes.float() * (scales.reshape(-1, 1) if len(shape) else scales)
    assert torch.equal(decoded(folder, "m.weight"), wanted.to(torch.float16))
    with tt.open(folder) as checkpoint:
        assert list(checkpoint) == ["m.bias", "m.weight"]


def test_scales_of_activations_and_of_a_kv_cache_are_spare(tmp_path):
    """AutoFP8 and Quark store ``kv_scale`` and ``output_scale``, transformers an ``activation_scale`` of experts."""
    names = ("attn.kv_scale", "attn.k_scale", "attn.q_scale", "m.output_scale", "m.input_scale")
    names = (*names, "experts.gate_up_proj_activation_scale", "experts.gate_up_proj_input_scale")
    tensors = {"m.weight": _codes(6, 10), "m.weight_scale": _scales(1, dtype=torch.float32)}
    tensors |= {name: torch.ones(1) for name in names}
    with tt.open(write(tmp_path, tensors, {"quant_method": "fp8"})) as checkpoint:
        assert list(checkpoint) == ["m.weight"]


def test_packed_experts_of_deepseek_v4(tmp_path):
    """int8 holds two E2M1 codes, the even one low; their scales are exponents and not byte values."""
    codes = torch.tensor([[0x21, -0x08] + [0] * 14], dtype=torch.int8)  # 0x21: 0.5, 1;  -8 = 0xF8: -0, -6
    scales = torch.tensor([[4.0]]).to(torch.float8_e8m0fnu)
    tensors = {"experts.0.w1.weight": codes, "experts.0.w1.scale": scales}
    tensors |= {"a.weight": _codes(130, 5), "a.scale": _scales(2, 1, dtype=torch.float8_e8m0fnu)}
    folder = write(tmp_path, tensors, {**FP8, "weight_block_size": [128, 128], "expert_dtype": "fp4"})
    assert decoded(folder, "experts.0.w1.weight")[0, :5].tolist() == [2.0, 4.0, -0.0, -24.0, 0.0]
    wanted = _by_block(tensors["a.weight"], tensors["a.scale"], 128, 128)
    assert torch.equal(decoded(folder, "a.weight", torch.float32), wanted)


def test_suffix_alone_names_the_format(tmp_path):
    tensors = {"m.weight": _codes(6, 10), "m.weight_scale_inv": torch.ones(6, 1)}
    with tt.open(write(tmp_path, tensors)) as checkpoint:
        assert checkpoint.format == "fp8"


BLOCKS = {**FP8, "weight_block_size": [4, 4]}


@pytest.mark.parametrize(
    ("tensors", "config", "text"),
    [
        ({"m.weight": _codes(8, 8)}, BLOCKS, "has no scale"),
        ({"m.weight_scale_inv": torch.ones(2, 2)}, BLOCKS, "no codes"),
        ({"m.weight": _codes(8, 8), "m.weight_scale_inv": torch.ones(2, 3)}, BLOCKS, "need"),
        ({"m.weight": _codes(8, 8), "m.weight_scale_inv": torch.ones(2, 2)}, FP8, "a block size in the config"),
        ({"m.weight": _codes(8, 8), "m.weight_scale_inv": torch.ones(2, 2).int()}, BLOCKS, "not torch.float16 or"),
        ({"m.weight": _codes(8), "m.weight_scale_inv": torch.ones(2)}, BLOCKS, "at least 2 dimensions"),
    ],
)
def test_faults(tmp_path, tensors, config, text):
    found = faults(write(tmp_path, tensors, config))
    assert list(found) == ["m.weight"]
    assert text in found["m.weight"]


@pytest.mark.parametrize("block", [128, [128], [0, 128], ["a", 1], [True, 1], {"a": 1}])
def test_block_size_that_is_none(tmp_path, block):
    folder = write(tmp_path, {"m.weight": _codes(8, 8)}, {**FP8, "weight_block_size": block})
    with pytest.raises(tt.CheckpointError, match="weight_block_size"):
        tt.open(folder)
