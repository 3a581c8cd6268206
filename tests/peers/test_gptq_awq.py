"""GPTQ, AWQ and AutoRound: AutoRound packs, and we decode to the values of AutoRound and compressed-tensors."""

import importlib
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchtether as tt
from tests.formats.linears import drawn, gemm, gptq, opened, write
from tests.strategies import examples

pytestmark = pytest.mark.peers

seeds = st.integers(0, 2**31 - 1)
sizes = examples(10)


def imported(name):
    """A module of a peer, whose warnings at import are its own affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(name.partition(".")[0])
        return importlib.import_module(name)


def grid(rows, columns, size, bits, symmetric, seed):
    """Values on a grid that float16 scales and zero points make: ``Linear``, scales and zero points (rows, groups)."""
    codes, zeros, scales = drawn(rows, columns, -(-columns // size), bits=bits, seed=seed)
    scales = scales.abs().clamp_min(2.0**-10)
    zeros = torch.from_numpy(zeros).clamp_min(1)  # AutoRound stores a zero point of 0 as 1 in version 1
    if symmetric:
        zeros = torch.full_like(zeros, 1 << (bits - 1))
    spread = torch.arange(columns) // size
    linear = torch.nn.Linear(columns, rows, bias=False)
    linear.weight.data = (torch.from_numpy(codes) - zeros[:, spread]).float() * scales.float()[:, spread]
    return linear, scales, zeros


def state(module, name="m"):
    return {f"{name}.{key}": tensor for key, tensor in module.state_dict().items()}


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize(("module", "packing"), [("qlinear_torch_zp", "auto_gptq"), ("qlinear_torch", "gptqmodel")])
@examples(4)
@given(rows=st.integers(1, 3), groups=st.integers(1, 4), size=st.sampled_from((32, 64, 128)), seed=seeds)
def test_what_autoround_packs_as_gptq(module, packing, bits, symmetric, rows, groups, size, seed, tmp_path_factory):
    """The identity goes through its layer as the weights; bits are equal, because it multiplies once, in float16."""
    layers = imported(f"auto_round_extension.torch.{module}")
    rows, columns = 32 * rows, size * groups
    linear, scales, zeros = grid(rows, columns, size, bits, symmetric, seed)
    layer = layers.QuantLinear(bits, size, columns, rows, bias=False)
    layer.device = "cpu"
    layer.pack(linear, scales, int(zeros[0, 0]) if symmetric else zeros, None, device="cpu")
    wanted = layer(torch.eye(columns, dtype=torch.float16)).t()
    said = {"quant_method": "auto-round", "bits": bits, "group_size": size, "sym": symmetric}
    tensors = state(layer)
    folder = write(tmp_path_factory.mktemp("auto"), tensors, {**said, "packing_format": f"auto_round:{packing}"})
    assert torch.equal(opened(folder)[0], wanted)
    assert torch.equal(wanted.float(), linear.weight.half().float())
    if packing == "auto_gptq":  # the same file under the name of GPTQ
        folder = write(tmp_path_factory.mktemp("gptq"), tensors, {**said, "quant_method": "gptq"})
        assert torch.equal(opened(folder)[0], wanted)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@sizes
@given(rows=st.integers(1, 3), groups=st.integers(1, 4), seed=seeds)
def test_what_we_lay_out_autoround_reads(bits, rows, groups, seed, tmp_path_factory):
    """The layout that tests/formats hold our reader against, in its layer; it knows no zero point of 0 in version 1."""
    layers = imported("auto_round_extension.torch.qlinear_torch_zp")
    codes, zeros, scales = drawn(32 * rows, 64 * groups, groups, bits=bits, seed=seed)
    tensors = gptq(codes, zeros.clip(1), scales, bits=bits)
    layer = layers.QuantLinear(bits, 64, 64 * groups, 32 * rows, bias=False)
    layer.load_state_dict({key.removeprefix("m."): tensor for key, tensor in tensors.items()})
    said = {"quant_method": "gptq", "bits": bits, "group_size": 64, "sym": False}
    found, _ = opened(write(tmp_path_factory.mktemp("gptq"), tensors, said))
    assert torch.equal(found, layer(torch.eye(64 * groups, dtype=torch.float16)).t())


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@sizes
@given(rows=st.integers(1, 12), groups=st.integers(1, 4), size=st.sampled_from((32, 64, 128)), seed=seeds)
def test_what_autoround_packs_as_awq(symmetric, rows, groups, size, seed, tmp_path_factory):
    utils = imported("auto_round.export.export_to_awq.utils")
    rows, columns = 8 * rows, size * groups
    linear, scales, zeros = grid(rows, columns, size, 4, symmetric, seed)
    layer = utils.WQLinear_GEMM.from_linear(
        linear, 4, size, scales=scales.t().contiguous(), zeros=zeros.t().contiguous(), device="cpu"
    )
    wanted = utils.dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, size).t()
    said = {"bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    for name, config in {
        "awq": {"quant_method": "awq", **said},
        "auto": {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", **said},
    }.items():
        assert torch.equal(opened(write(tmp_path_factory.mktemp(name), state(layer), config))[0], wanted)
    assert torch.equal(wanted, linear.weight.half())


@pytest.mark.parametrize("zero_point", [True, False])
@sizes
@given(words=st.integers(1, 12), groups=st.integers(1, 4), size=st.sampled_from((32, 128)), seed=seeds)
def test_awq_as_compressed_tensors_converts_it(zero_point, words, groups, size, seed, tmp_path_factory):
    converters = imported("compressed_tensors.entrypoints.convert.converters")
    pack = imported("compressed_tensors.compressors.pack_quantized.helpers")
    rows, columns = 8 * words, size * groups
    codes, zeros, scales = drawn(rows, columns, groups, seed=seed)
    tensors = gemm(codes, zeros if zero_point else None, scales)
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": zero_point, "version": "gemm"}
    converted = converters.AutoAWQConverter.from_autoawq_config(config).process(dict(tensors))
    theirs = pack.unpack_from_int32(converted["m.weight_packed"], 4, torch.Size((rows, columns))).float()
    if zero_point:
        packed = converted["m.weight_zero_point"]
        theirs -= (
            pack.unpack_from_int32(packed, 4, torch.Size((rows, groups)), packed_dim=0)
            .float()
            .repeat_interleave(size, 1)
        )
    wanted = (theirs * converted["m.weight_scale"].float().repeat_interleave(size, 1)).half()
    assert torch.equal(opened(write(tmp_path_factory.mktemp("awq"), tensors, config))[0], wanted)


def test_loads_what_autoround_saves_of_a_model(tmp_path):
    """A model whose linears it has packed, beside plain ones, into modules of torch."""
    layers = imported("auto_round_extension.torch.qlinear_torch_zp")
    linear, scales, zeros = grid(64, 128, 32, 4, False, 5)
    layer = layers.QuantLinear(4, 32, 128, 64, bias=False)
    layer.pack(linear, scales, zeros, None, device="cpu")
    tensors = {**state(layer, "0"), "1.weight": torch.ones(8, 64), "1.bias": torch.zeros(8)}
    said = {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 32,
        "sym": False,
        "extra_config": {"1": {"bits": 16}},
    }
    model = torch.nn.Sequential(torch.nn.Linear(128, 64, bias=False), torch.nn.Linear(64, 8))
    tt.load(model, write(tmp_path, tensors, said))
    x = torch.randn(3, 128)
    torch.testing.assert_close(model(x), linear(x).sum(1, keepdim=True).expand(3, 8))
