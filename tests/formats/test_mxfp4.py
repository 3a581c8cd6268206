"""The experts of gpt-oss."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchtether as tt
from tests.formats.files import decoded, faults, write

CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
VALUES = torch.cat([E2M1, -E2M1])


def _sample(experts, rows, groups, seed=0):
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (experts, rows, groups), generator=generator, dtype=torch.uint8)
    return blocks, scales


@given(experts=st.integers(1, 3), rows=st.integers(1, 9), groups=st.integers(1, 4), seed=st.integers(0, 99))
def test_transposed_parameter(experts, rows, groups, seed, tmp_path_factory):
    blocks, scales = _sample(experts, rows, groups, seed)
    pairs = torch.stack([VALUES[(blocks & 15).long()], VALUES[(blocks >> 4).long()]], -1).flatten(-2)
    wanted = (pairs * torch.exp2(scales.float() - 127).unsqueeze(-1)).flatten(-2).transpose(1, 2)
    tensors = {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}
    folder = write(tmp_path_factory.mktemp("oss"), tensors | {"experts.down_proj_bias": torch.ones(2)}, CONFIG)
    assert torch.equal(decoded(folder, "experts.down_proj"), wanted.to(torch.bfloat16))
    model = torch.nn.Module()
    model.experts = torch.nn.Module()
    model.experts.down_proj = torch.nn.Parameter(torch.empty(experts, groups * 32, rows, device="meta"))
    tt.load(model, folder, strict=False)
    assert torch.equal(model.experts.down_proj.dequantize(), wanted.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop("p_scales"), "but no scales"),
        (lambda t: t.pop("p_blocks"), "but no blocks"),
        (lambda t: t.update(p_blocks=t["p_blocks"].int()), "both must be torch.uint8"),
        (lambda t: t.update(p_blocks=t["p_blocks"][..., :8]), "have shape"),
        (lambda t: t.update(p_scales=t["p_scales"][:, :-1]), "have shape"),
    ],
)
def test_faults(tmp_path, change, text):
    blocks, scales = _sample(2, 4, 3)
    tensors = {"p_blocks": blocks, "p_scales": scales}
    change(tensors)
    found = faults(write(tmp_path, tensors, CONFIG))
    assert list(found) == ["p"]
    assert text in found["p"]
