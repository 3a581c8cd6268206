"""MLX: any shape, bits, group size and mode against a packer written here; overrides; faults by name."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchtether as tt
from tests.formats.folders import fault, opened, write

BITS = (1, 2, 3, 4, 5, 6, 8)
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def words(codes, bits):
    """The dense stream of ``codes`` in words of 32 bits, built bit by bit."""
    stream = ((codes.unsqueeze(-1).to(torch.int64) >> torch.arange(bits)) & 1).flatten(-2)
    return (stream.unflatten(-1, (-1, 32)) << torch.arange(32)).sum(-1).to(torch.uint32)


def affine(lead, groups, group_size, bits, dtype, seed):
    """Tensors of one module and what they decode to: a product and a sum, each rounded to ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (*lead, groups * group_size), generator=generator)
    scales, biases = (torch.randn(*lead, groups, generator=generator).to(dtype) for _ in range(2))
    wide = [t.repeat_interleave(group_size, -1).double() for t in (scales, biases)]
    values = ((codes * wide[0]).to(dtype).double() + wide[1]).to(dtype)
    return {"weight": words(codes, bits), "scales": scales, "biases": biases}, values


def named(module, tensors):
    return {f"{module}.{leaf}": tensor for leaf, tensor in tensors.items()}


def quantization(group_size=64, bits=4, **more):
    return {"quantization": {"group_size": group_size, "bits": bits, **more}}


@given(
    lead=st.lists(st.integers(1, 5), min_size=1, max_size=2),
    groups=st.integers(1, 4),
    group_size=st.sampled_from((32, 64, 128)),
    bits=st.sampled_from(BITS),
    dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float32)),
    seed=st.integers(0, 2**31 - 1),
)
def test_affine(lead, groups, group_size, bits, dtype, seed):
    tensors, values = affine(lead, groups, group_size, bits, dtype, seed)
    with opened(named("m", tensors), config=quantization(group_size, bits)) as checkpoint:
        assert checkpoint.format == "mlx"
        assert not checkpoint.faults
        weight = checkpoint["m.weight"]
        assert weight.dtype == dtype
        assert torch.equal(weight.dequantize(), values)
        assert torch.equal(weight.to(torch.float64).dequantize(), values.double())


@pytest.mark.parametrize(("mode", "group_size", "bits"), [("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)])
def test_small_floats(mode, group_size, bits):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 2**bits, (6, 96), generator=generator)
    codes[(codes & 127) == 127] = 0  # no NaN among the e4m3
    if mode == "nvfp4":
        scales = torch.rand(6, 6, generator=generator).to(torch.float8_e4m3fn)
        wide = scales.float()
    else:
        scales = torch.randint(120, 135, (6, 3), generator=generator).to(torch.uint8)
        wide = torch.ldexp(torch.ones(6, 3), scales.int() - 127)
    elements = E2M1[codes] if bits == 4 else codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    tensors = {"m.weight": words(codes, bits), "m.scales": scales.view(torch.uint8)}
    config = {**quantization(group_size, bits, mode=mode), "dtype": "float32"}
    with opened(tensors, config=config) as checkpoint:
        weight = checkpoint["m.weight"]
        assert weight.dtype == torch.float32
        assert torch.equal(weight.dequantize(), elements * wide.repeat_interleave(group_size, -1))


def test_modules_have_options_of_their_own():
    """An object starts from MLX's defaults, not from the shared values; what is left out has none of them."""
    own = {"a": {"bits": 8}, "b": {"group_size": 32, "bits": 3}, "c": True, "d": False, "e": {"mode": "mxfp4"}}
    expected, tensors = {}, {}
    for module, (group_size, bits) in {"a": (64, 8), "b": (32, 3), "c": (128, 2), "f": (128, 2)}.items():
        made, expected[f"{module}.weight"] = affine((3,), 2, group_size, bits, torch.float16, 0)
        tensors.update(named(module, made))
    tensors["d.weight"] = torch.ones(2, 2)
    tensors.update({"e.weight": torch.zeros(2, 4, dtype=torch.uint32), "e.scales": torch.zeros(2, 1).byte()})
    expected["e.weight"] = torch.zeros(2, 32)
    with opened(tensors, config=quantization(128, 2, **own)) as checkpoint:
        assert not checkpoint.faults
        assert sorted(checkpoint) == ["a.weight", "b.weight", "c.weight", "d.weight", "e.weight", "f.weight"]
        assert type(checkpoint["d.weight"]) is torch.Tensor
        for name, values in expected.items():
            assert torch.equal(checkpoint[name].dequantize(), values.to(checkpoint[name].dtype))


def test_a_tied_head_without_tensors_is_the_quantized_embedding(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(6, 64, device="meta")
            self.head = nn.Linear(64, 6, bias=False, device="meta")
            self.head.weight = self.embed.weight

    tensors, values = affine((6,), 1, 64, 4, torch.bfloat16, 0)
    write(tmp_path, named("embed", tensors), config=quantization())
    model = Tied()
    report = tt.load(model, tmp_path)
    assert not report.missing_keys
    assert model.head.weight is model.embed.weight
    index = torch.tensor([5, 0, 5])
    assert torch.equal(model.embed(index), values[index])


GOOD = named("m", affine((4,), 2, 64, 4, torch.bfloat16, 0)[0])


def without(leaf):
    return {key: tensor for key, tensor in GOOD.items() if key != f"m.{leaf}"}


def with_(**tensors):
    return {**GOOD, **{f"m.{leaf}": tensor for leaf, tensor in tensors.items()}}


@pytest.mark.parametrize(
    ("tensors", "config", "said"),
    [
        (without("scales"), {}, "m.weight: it is torch.uint32 and has no scales"),
        (without("biases"), {}, "m.weight: its mode is affine, but its biases are absent"),
        (without("weight"), {}, "m.weight: it has .*, but no codes"),
        ({"m.weight": GOOD["m.weight"]}, {}, "m.weight: it is torch.uint32 and has no scales"),
        (with_(scales=torch.ones(4, 3)), {}, r"its scales have shape \(4, 3\), but 4 bits .* need \(4, 2\)"),
        (with_(scales=torch.ones(())), {}, r"its scales have shape \(\)"),
        (with_(scales=torch.ones(4, 2).int()), {}, "its scales is torch.int32, not torch.float16 or"),
        (with_(biases=torch.ones(4, 2)), {}, "its biases is torch.float32, not torch.bfloat16"),
        (with_(biases=torch.ones(4, 1).bfloat16()), {}, r"its biases has shape \(4, 1\), not \(4, 2\)"),
        (with_(weight=torch.ones(4, 16)), {}, r"its codes are torch.float32 of shape \(4, 16\)"),
        (with_(weight=torch.tensor(3).to(torch.uint32)), {}, r"its codes are torch.uint32 of shape \(\)"),
        (GOOD, {"bits": 8}, r"bits \* group_size is 256 here, 512 in config.json"),
        (GOOD, {"bits": 3}, "rows of 16 words are not whole groups of 64 codes of 3 bits"),
        (GOOD, {"bits": 7}, "its bits is 7, but affine allows 1, 2, 3, 4, 5, 6, 8"),
        (GOOD, {"bits": True}, "its bits is True"),
        (GOOD, {"bits": [4]}, "its bits is"),
        (GOOD, {"group_size": 10**30}, "its group_size is 1000"),
        (GOOD, {"mode": "fp6"}, "its mode is 'fp6', not one of affine, mxfp4"),
        (GOOD, {"mode": {}}, "its mode is {}"),
        (GOOD, {"mode": "mxfp4", "group_size": 32}, "its mode is mxfp4, but it has biases"),
        (without("biases"), {"mode": "nvfp4", "group_size": 16}, r"its scales have shape \(4, 2\)"),
        (GOOD, {"m": False}, "it is quantized, but config.json says that it is not"),
        (GOOD, {"m": None}, "its quantization in config.json is None, not an object"),
        (GOOD, {"m": [4]}, "not an object"),
    ],
)
def test_what_is_wrong(tensors, config, said):
    assert re.search(said, fault(tensors, config=quantization(**config)))


def test_without_its_config_it_is_refused():
    """64 groups of 4 bits take the words and scales of 32 groups of 8."""
    with pytest.raises(tt.CheckpointError, match="m.weight: .*no config.json in the same folder has a 'quantization'"):
        opened(GOOD).__enter__()


@pytest.mark.parametrize("config", [{"quantization": None}, {"quantization": [4]}, {"quantization": "4bit"}, {}])
def test_other_configs_are_not_taken_for_it(config):
    with opened({"m.weight": torch.ones(2, 2)}, config=config) as checkpoint:
        assert checkpoint.format == "safetensors"
