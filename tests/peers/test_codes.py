"""The same codes and scales as compressed-tensors, torchao, bitsandbytes and optimum-quanto compute.

They are equal, not close, on 1024 x 1024 Gaussian weights and on small shapes of every kind.  Where a peer computes in
another order, the few codes that round to the other neighbour are counted and bounded.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import examples
from torchtether.schemes import Affine, ScaledFloat, fp4, fp8, int4, int8, mxfp4, mxfp8, nf4, nvfp4
from torchtether.schemes.bits import unpack
from torchtether.schemes.tables import DYNAMIC, FP4, NF4

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # what peers warn about when imported

seeds = st.integers(0, 2**31 - 1)
sizes = examples(20)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def codes(parts, scheme, columns):
    """Signed codes of an Affine, one int8 each."""
    if scheme.bits == 8:
        return parts["qdata"]
    return (unpack(parts["qdata"], scheme.bits, columns).int() - (1 << (scheme.bits - 1))).to(torch.int8)


def nibbles(parts, columns):
    return unpack(parts["qdata"], 4, columns)


# -- compressed-tensors --------------------------------------------------------------------------------------------


def ct_args(**fields):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    return quantization.QuantizationArgs(**fields)


def ct_quantize(w, args, lows, highs, global_scale=None):
    """(scale, zero point, quantized values) by compressed-tensors' own functions."""
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    scale, zero = helpers.calculate_qparams(lows, highs, args, global_scale=global_scale)
    return scale, zero, forward.quantize(w, scale, zero, args, global_scale=global_scale)


def groups_of(w, size):
    grouped = w.unflatten(-1, (-1, size))
    return grouped.amin(-1), grouped.amax(-1)


def assert_affine_as_compressed_tensors(scheme, w, args, lows, highs):
    scale, zero, quantized = ct_quantize(w, args, lows, highs)
    parts = scheme.encode(w)
    assert torch.equal(parts["scale"], scale)
    assert torch.equal(codes(parts, scheme, w.shape[1]), quantized.to(torch.int8))
    if not scheme.symmetric:
        assert torch.equal(parts["zero_point"], zero.to(torch.int8))


@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_compressed_tensors_integers(bits, symmetric):
    w = gaussian(1024, 1024)
    args = ct_args(num_bits=bits, symmetric=symmetric, strategy="channel")
    lows, highs = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    assert_affine_as_compressed_tensors(Affine(bits=bits, symmetric=symmetric), w, args, lows, highs)
    args = ct_args(num_bits=bits, symmetric=symmetric, strategy="group", group_size=128)
    scheme = Affine(bits=bits, symmetric=symmetric, block=(1, 128))
    assert_affine_as_compressed_tensors(scheme, w, args, *groups_of(w, 128))


@sizes
@given(
    rows=st.integers(1, 9), groups=st.integers(1, 5), size=st.sampled_from((8, 16, 40)), seed=seeds, sym=st.booleans()
)
def test_compressed_tensors_integers_of_small_shapes(rows, groups, size, seed, sym):
    w = gaussian(rows, groups * size, seed=seed)
    args = ct_args(num_bits=4, symmetric=sym, strategy="group", group_size=size)
    scheme = Affine(bits=4, symmetric=sym, block=(1, size))
    assert_affine_as_compressed_tensors(scheme, w, args, *groups_of(w, size))
    args = ct_args(num_bits=8, symmetric=sym, strategy="channel")
    lows, highs = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    assert_affine_as_compressed_tensors(Affine(symmetric=sym), w, args, lows, highs)


@pytest.mark.parametrize("granularity", ["row", "tensor", "block"])
@sizes
@given(rows=st.integers(1, 300), columns=st.integers(1, 300), seed=seeds)
def test_compressed_tensors_fp8_ragged_blocks_too(granularity, rows, columns, seed):
    w = gaussian(rows, columns, seed=seed)
    amax = w.abs()
    if granularity == "row":
        args, amax = ct_args(num_bits=8, type="float", strategy="channel"), amax.amax(1, keepdim=True)
    elif granularity == "tensor":
        args, amax = ct_args(num_bits=8, type="float", strategy="tensor"), amax.amax()
    else:
        args = ct_args(num_bits=8, type="float", strategy="block", block_structure=[128, 128])
        amax = torch.stack([torch.stack([p.max() for p in r.split(128, 1)]) for r in amax.split(128, 0)])
    scale, _, quantized = ct_quantize(w, args, -amax, amax)
    parts = fp8(granularity).encode(w)
    assert torch.equal(parts["scale"].view(-1), scale.view(-1))
    assert torch.equal(parts["qdata"].float(), quantized.float())


def test_compressed_tensors_mxfp4():
    w = gaussian(256, 1024)
    args = ct_args(
        num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8, zp_dtype=torch.uint8
    )
    scale, _, quantized = ct_quantize(w, args, *groups_of(w, 32))
    parts = mxfp4().encode(w)
    assert torch.equal(parts["scale"].float(), scale.float())
    assert torch.equal(
        mxfp4().decode({**parts, "scale": parts["scale"].float() * 0 + 1}, (256, 1024), torch.float32), quantized
    )


@pytest.mark.parametrize("divides", [False, True])
def test_compressed_tensors_nvfp4(divides):
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    w = gaussian(1024, 1024)
    args = ct_args(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn,
        zp_dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    unit = helpers.generate_gparam(w.min(), w.max())
    scale, _, quantized = ct_quantize(w, args, *groups_of(w, 16), global_scale=unit)
    scheme = ScaledFloat(
        "e2m1", block=(1, 16), scale_dtype=torch.float8_e4m3fn, global_scale=True, global_divides=divides
    )
    parts = scheme.encode(w)
    assert torch.equal(parts["scale"].float(), scale.float())
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    assert torch.equal(table[nibbles(parts, 1024).long()], quantized.float() + 0.0)
    if divides:
        assert parts["global_scale"].item() == unit.item()


# -- torchao -------------------------------------------------------------------------------------------------------


def test_torchao_int8():
    workflow = pytest.importorskip("torchao.quantization.quantize_.workflows.int8.int8_tensor")
    granularity = pytest.importorskip("torchao.quantization.granularity")
    w = gaussian(1024, 1024)
    theirs = workflow.Int8Tensor.from_hp(w, granularity.PerRow())
    parts = Affine(reciprocal=True).encode(w)
    assert torch.equal(parts["scale"], theirs.scale)
    assert torch.equal(parts["qdata"], theirs.qdata)
    divided = int8().encode(w)["qdata"].int() - theirs.qdata.int()
    assert int((divided != 0).sum()) < 200  # ties: w * (1 / s) is not w / s
    assert int(divided.abs().max()) <= 1


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_torchao_intx(bits, symmetric):
    quantization = pytest.importorskip("torchao.quantization")
    primitives = pytest.importorskip("torchao.quantization.quant_primitives")
    w = gaussian(1024, 1024)
    theirs = quantization.IntxUnpackedToInt8Tensor.from_hp(
        w, (1, 128), getattr(torch, f"int{bits}"),
        mapping_type=getattr(primitives.MappingType, "SYMMETRIC" if symmetric else "ASYMMETRIC"),
    )  # fmt: skip
    scheme = Affine(bits=bits, symmetric=symmetric, block=(1, 128), reciprocal=True)
    parts = scheme.encode(w)
    assert torch.equal(parts["scale"], theirs.scale)
    assert torch.equal(codes(parts, scheme, 1024), theirs.qdata)
    if not symmetric:
        assert torch.equal(parts["zero_point"], theirs.zero_point)


@sizes
@given(rows=st.integers(1, 40), columns=st.integers(2, 40), seed=seeds)
def test_torchao_fp8_rows(rows, columns, seed):
    workflow = pytest.importorskip("torchao.quantization.quantize_.workflows.float8.float8_tensor")
    granularity = pytest.importorskip("torchao.quantization.granularity")
    w = gaussian(rows, columns, seed=seed)
    theirs = workflow.Float8Tensor.from_hp(w, granularity=granularity.PerRow())
    parts = fp8().encode(w)
    assert torch.equal(parts["scale"], theirs.scale)
    assert torch.equal(parts["qdata"].float(), theirs.qdata.float())


@pytest.mark.parametrize("rounding", ["floor", "even", "rceil"])
@pytest.mark.parametrize("element", ["e2m1", "e4m3", "e5m2"])
@sizes
@given(rows=st.integers(1, 40), groups=st.integers(1, 8), seed=seeds, power=st.integers(-20, 20))
def test_torchao_microscaling(element, rounding, rows, groups, seed, power):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    dtype = {"e2m1": torch.float4_e2m1fn_x2, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[element]
    w = gaussian(rows, groups * 32, seed=seed) * 2.0**power
    mode = getattr(mx.ScaleCalculationMode, rounding.upper())
    scale, data = mx.to_mx(w, dtype, 32, scaling_mode=mode)
    scheme = mxfp4(scale_rounding=rounding) if element == "e2m1" else mxfp8(element, scale_rounding=rounding)
    parts = scheme.encode(w)
    assert torch.equal(parts["scale"].view(torch.uint8), scale.view(torch.uint8).view(parts["scale"].shape))
    assert torch.equal(parts["qdata"].view(torch.uint8), data.view(torch.uint8).view(parts["qdata"].shape))


@sizes
@given(rows=st.integers(1, 40), groups=st.integers(1, 8), seed=seeds, power=st.integers(-20, 20))
def test_torchao_nvfp4(rows, groups, seed, power):
    theirs = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    w = gaussian(rows, groups * 16, seed=seed) * 2.0**power
    unit = theirs.per_tensor_amax_to_scale(w.abs().max())
    scale, data = theirs.nvfp4_quantize(w, per_tensor_scale=unit)
    parts = nvfp4().encode(w)
    assert parts["global_scale"].item() == unit.item()
    assert torch.equal(parts["scale"].float(), scale.float().view(parts["scale"].shape))
    assert torch.equal(parts["qdata"], data.view(torch.uint8).view(parts["qdata"].shape))


# -- optimum-quanto ------------------------------------------------------------------------------------------------


@sizes
@given(rows=st.integers(1, 40), columns=st.integers(1, 40), seed=seeds)
def test_quanto_int8(rows, columns, seed):
    quanto = pytest.importorskip("optimum.quanto")
    w = gaussian(rows, columns, seed=seed)
    scale = quanto.AbsmaxOptimizer()(w, quanto.qint8, axis=0)
    theirs = quanto.quantize_weight(w, quanto.qint8, axis=0, scale=scale, activation_qtype=None)
    parts = Affine(narrow_range=True).encode(w)
    assert torch.equal(parts["scale"].view(-1), theirs._scale.view(-1))
    assert torch.equal(parts["qdata"], theirs._data)


# -- bitsandbytes --------------------------------------------------------------------------------------------------


def swapped(packed):
    """bitsandbytes puts the first code of a byte in the high nibble."""
    return (packed << 4) | (packed >> 4)


def test_bitsandbytes_tables():
    functional = pytest.importorskip("bitsandbytes.functional")
    assert torch.tensor(NF4).tolist() == functional.get_4bit_type("nf4", device="cpu").tolist()
    assert torch.equal(torch.tensor(FP4), functional.get_4bit_type("fp4", device="cpu"))
    assert torch.equal(torch.tensor(DYNAMIC), functional.create_dynamic_map())


@pytest.mark.parametrize("shape", [(1024, 1024), (64, 3), (10, 100), (7, 64)], ids=str)
def test_bitsandbytes_nf4(shape):
    functional = pytest.importorskip("bitsandbytes.functional")
    w = gaussian(*shape)
    data, state = functional.quantize_4bit(w, quant_type="nf4", blocksize=64)
    parts = nf4().encode(w)
    assert torch.equal(parts["absmax"], state.absmax)
    assert torch.equal(parts["qdata"], swapped(data.view(-1)))
    decoded = nf4().decode(parts, shape, torch.float32)
    assert torch.equal(decoded, functional.dequantize_4bit(data, state))


@sizes
@given(rows=st.integers(1, 40), columns=st.integers(1, 100), seed=seeds, size=st.sampled_from((64, 128, 256)))
def test_bitsandbytes_nf4_of_small_shapes(rows, columns, seed, size):
    functional = pytest.importorskip("bitsandbytes.functional")
    w = gaussian(rows, columns, seed=seed)
    data, state = functional.quantize_4bit(w, quant_type="nf4", blocksize=size)
    parts, n = nf4(block_size=size).encode(w), w.numel()
    assert torch.equal(parts["absmax"], state.absmax)
    assert torch.equal(unpack(parts["qdata"], 4, n), unpack(swapped(data.view(-1)), 4, n))


def test_bitsandbytes_fp4():
    """Zeros and ties apart, where it has a code for minus zero of its own, the same values."""
    functional = pytest.importorskip("bitsandbytes.functional")
    w = gaussian(1024, 1024)
    data, state = functional.quantize_4bit(w, quant_type="fp4", blocksize=64)
    parts = fp4().encode(w)
    assert torch.equal(parts["absmax"], state.absmax)
    differ = fp4().decode(parts, (1024, 1024), torch.float32) != functional.dequantize_4bit(data, state)
    assert int(differ.sum()) == 0


def test_bitsandbytes_nf4_double_quantization():
    functional = pytest.importorskip("bitsandbytes.functional")
    w = gaussian(1024, 1024)
    data, state = functional.quantize_4bit(w, quant_type="nf4", blocksize=64, compress_statistics=True)
    parts = nf4(double_quant=True).encode(w)
    assert torch.equal(parts["qdata"], swapped(data.view(-1)))
    assert torch.equal(parts["nested_absmax"], state.state2.absmax)
    assert parts["nested_offset"].item() == state.offset.item()
    moved = parts["absmax"].int() - state.absmax.int()
    assert int((moved != 0).sum()) <= 40  # its native rounding of ties
    assert int(moved.abs().max()) <= 2
    theirs = {**parts, "absmax": state.absmax}
    decoded = nf4(double_quant=True).decode(theirs, (1024, 1024), torch.float32)
    assert torch.equal(decoded, functional.dequantize_4bit(data, state))


def test_bitsandbytes_int8():
    functional = pytest.importorskip("bitsandbytes.functional")
    w = gaussian(1024, 1024).half()
    data, absmax, _ = functional.int8_vectorwise_quant(w)
    parts = Affine(narrow_range=True).encode(w)
    moved = parts["qdata"].int() - data.int()
    assert int(moved.abs().max()) <= 1
    assert int((moved != 0).sum()) < 200  # ties of float16 values: it multiplies by 127 / absmax, we divide
    torch.testing.assert_close(parts["scale"].view(-1) * 127, absmax, rtol=1e-6, atol=0)


def test_int4_default_is_the_asymmetric_group_of_64():
    assert int4() == Affine(bits=4, symmetric=False, block=(1, 64))
