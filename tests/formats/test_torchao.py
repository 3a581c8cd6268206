"""torchao's safetensors: every type of the table from descriptions made here; shards; faults by name."""

import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchtether as tt
from tests.formats.folders import fault, opened, write

E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def dtype_json(name):
    return {"_type": "torch.dtype", "_data": name}


def described(kind, data, components, name="m.weight", **changes):
    """Stored tensors and metadata of one tensor, as torchao flattens it."""
    module, leaf = name.rsplit(".", 1)
    record = {"_type": kind, "_data": data, "_tensor_data_names": sorted(components), **changes}
    metadata = {"tensor_names": json.dumps([name]), name: json.dumps(record)}
    return {f"{module}._{leaf}_{part}": tensor for part, tensor in components.items()}, metadata


def expanded(part, shape):
    for dim, size in enumerate(shape):
        part = part.repeat_interleave(size // part.shape[dim], dim)
    return part


@given(
    bits=st.integers(1, 8),
    lead=st.sampled_from(((), (3,))),
    rows=st.sampled_from((1, 2, 6)),
    columns=st.sampled_from((8, 24, 40)),
    cut=st.sampled_from(((1, 1), (1, 2), (2, 2), (1, 4), (6, 8))),
    scale=st.sampled_from((torch.float32, torch.bfloat16)),
    symmetric=st.booleans(),
    seed=st.integers(0, 2**31 - 1),
)
def test_integers(bits, lead, rows, columns, cut, scale, symmetric, seed):
    """Any block that divides the shape, codes over their whole range, zero points or none."""
    generator = torch.Generator().manual_seed(seed)
    shape, half = (*lead, rows, columns), 2 ** (bits - 1)
    counts = (*lead, min(cut[0], rows), cut[1])
    block = [n // count for n, count in zip(shape, counts, strict=True)]
    parts = {
        "qdata": torch.randint(-half, half, shape, generator=generator).to(torch.int8),
        "scale": torch.rand(counts, generator=generator).to(scale),
    }
    zero = torch.zeros(counts, dtype=torch.int8)
    if not symmetric or bits < 8:
        zero = parts["zero_point"] = torch.randint(-half, half, counts, generator=generator).to(torch.int8)
    data = {"block_size": block, "dtype": dtype_json("bfloat16")}
    kind = "Int8Tensor"
    if bits < 8:
        kind, data["target_dtype"] = "IntxUnpackedToInt8Tensor", dtype_json(f"int{bits}")
    values = (parts["qdata"].double() - expanded(zero, shape)) * expanded(parts["scale"].double(), shape)
    tensors, metadata = described(kind, data, parts)
    with opened(tensors, metadata) as checkpoint:
        assert checkpoint.format == "torchao"
        assert not checkpoint.faults
        assert list(checkpoint) == ["m.weight"]
        weight = checkpoint["m.weight"]
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight.to(torch.float32).dequantize(), values.float())
        assert torch.equal(weight.dequantize(), values.float().bfloat16())


@pytest.mark.parametrize("counts", [(1, 1), (6, 1), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8(dtype, counts):
    generator = torch.Generator().manual_seed(0)
    parts = {"qdata": torch.randn(6, 32, generator=generator).to(dtype), "scale": torch.rand(counts)}
    data = {"block_size": [6 // counts[0], 32 // counts[1]], "dtype": dtype_json("float32"), "mm_config": None}
    with opened(*described("Float8Tensor", data, parts)) as checkpoint:
        values = parts["qdata"].float() * expanded(parts["scale"], (6, 32))
        assert torch.equal(checkpoint["m.weight"].dequantize(), values)


@pytest.mark.parametrize("element", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2"])
def test_mx(element):
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(120, 135, (6, 2), generator=generator)
    if element == "float4_e2m1fn_x2":
        codes = torch.randint(0, 16, (6, 64), generator=generator)
        qdata, elements = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), E2M1[codes]
    else:
        qdata = torch.randn(6, 64, generator=generator).to(getattr(torch, element))
        elements = qdata.float()
    parts = {"qdata": qdata, "scale": exponents.to(torch.uint8).view(torch.float8_e8m0fnu)}
    data = {"block_size": 32, "orig_dtype": dtype_json("float32"), "elem_dtype": dtype_json(element)}
    with opened(*described("MXTensor", data, parts)) as checkpoint:
        values = elements * torch.ldexp(torch.ones(6, 2), exponents - 127).repeat_interleave(32, -1)
        assert torch.equal(checkpoint["m.weight"].dequantize(), values)


@pytest.mark.parametrize("per_tensor", [True, False])
def test_nvfp4(per_tensor):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (6, 64), generator=generator)
    scale = torch.rand(6, 4, generator=generator).to(torch.float8_e4m3fn)
    parts = {"qdata": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), "scale": scale}
    wide = scale.float()
    if per_tensor:
        parts |= {"per_tensor_scale": torch.tensor(0.3), "act_per_tensor_scale": torch.tensor(7.0)}
        wide = parts["per_tensor_scale"] * wide
    data = {"block_size": 16, "orig_dtype": dtype_json("float32"), "is_swizzled_scales": False}
    with opened(*described("NVFP4Tensor", data, parts)) as checkpoint:
        assert list(checkpoint) == ["m.weight"]
        assert torch.equal(checkpoint["m.weight"].dequantize(), E2M1[codes] * wide.repeat_interleave(16, -1))


INT8 = {"block_size": [1, 8], "dtype": dtype_json("bfloat16")}


def int8(rows, seed=0):
    qdata = torch.randint(-128, 128, (rows, 8), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    return {"qdata": qdata, "scale": torch.ones(rows, 1), "zero_point": torch.zeros(rows, 1, dtype=torch.int8)}


def test_shards_describe_their_own_tensors(tmp_path):
    """The key tensor_names is in every shard, with other names: it cannot be what is read."""
    for file, name in (("model-00001-of-00002.safetensors", "a.weight"), ("model-00002-of-00002.safetensors", "b.w")):
        tensors, metadata = described("Int8Tensor", INT8, int8(3), name)
        write(tmp_path, tensors, metadata, file)
    keys = {f"{name}_{part}": 1 for name in ("a._weight", "b._w") for part in int8(1)}
    index = {key: f"model-0000{1 if key[0] == 'a' else 2}-of-00002.safetensors" for key in keys}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    with tt.open(tmp_path) as checkpoint:
        assert list(checkpoint) == ["a.weight", "b.w"]
        assert torch.equal(checkpoint["b.w"].dequantize(), int8(3)["qdata"].bfloat16())


def test_rows_are_read_alone():
    with opened(*described("Int8Tensor", INT8, int8(9))) as checkpoint:
        some = checkpoint.get_slice("m.weight")[2:5]
        assert isinstance(some, tt.Weight)
        assert torch.equal(some.dequantize(), int8(9)["qdata"][2:5].bfloat16())


def changed(part, tensor):
    return {**int8(4), part: tensor}


@pytest.mark.parametrize(
    ("kind", "data", "components", "changes", "said"),
    [
        (
            "Int4TilePackedTo4dTensor",
            {},
            {"qdata": torch.ones(2, 2)},
            {},
            "its torchao type is 'Int4TilePackedTo4dTensor'",
        ),
        ("os.system", {}, {}, {}, "its torchao type is 'os.system', not one of the supported Int8Tensor"),
        (None, {}, {}, {}, "its torchao type is None"),
        (["Tensor"], {}, {}, {}, "its torchao type is"),
        ("Int8Tensor", None, int8(4), {}, "its _data is None, not an object"),
        ("Int8Tensor", INT8, int8(4), {"_tensor_data_names": "qdata"}, "its _tensor_data_names is 'qdata'"),
        ("Int8Tensor", INT8, int8(4), {"_tensor_data_names": [1]}, r"its _tensor_data_names is \[1\]"),
        ("Int8Tensor", INT8, int8(4), {"_tensor_data_names": ["qdata", "x"]}, r"its x \(m._weight_x\) is absent"),
        ("Int8Tensor", INT8, {"qdata": int8(4)["qdata"]}, {}, "its scale is absent"),
        ("Int8Tensor", INT8, {"scale": int8(4)["scale"]}, {}, "its qdata is absent"),
        ("Int8Tensor", {**INT8, "block_size": None}, int8(4), {}, "its block_size is None"),
        (
            "Int8Tensor",
            {**INT8, "block_size": [1]},
            int8(4),
            {},
            r"its block_size is \[1\], not a block of codes of shape",
        ),
        ("Int8Tensor", {**INT8, "block_size": [1, 0]}, int8(4), {}, r"its block_size is \[1, 0\]"),
        ("Int8Tensor", {**INT8, "block_size": [1, True]}, int8(4), {}, "its block_size is"),
        ("Int8Tensor", {**INT8, "block_size": [3, 8]}, int8(4), {}, "does not divide"),
        ("Int8Tensor", {**INT8, "block_size": [1, 4]}, int8(4), {}, r"its scale has shape \(4, 1\), not \(4, 2\)"),
        ("Int8Tensor", {**INT8, "dtype": {"_data": "int8"}}, int8(4), {}, "its dtype is 'int8', not one of"),
        ("Int8Tensor", {**INT8, "dtype": 3}, int8(4), {}, "its dtype is 3"),
        ("Int8Tensor", INT8, changed("qdata", torch.ones(4, 8)), {}, "its qdata is torch.float32, not torch.int8"),
        ("Int8Tensor", INT8, changed("qdata", torch.tensor(1).char()), {}, "its codes have no dimensions"),
        ("Int8Tensor", INT8, changed("scale", torch.ones(4, 1).int()), {}, "its scale is torch.int32"),
        ("Int8Tensor", INT8, changed("zero_point", torch.ones(4, 1)), {}, "its zero_point is torch.float32"),
        ("Int8Tensor", INT8, changed("zero_point", torch.ones(3, 1).char()), {}, r"its zero_point has shape \(3, 1\)"),
        ("Int8Tensor", INT8, changed("act_pre_scale", torch.ones(8)), {}, "act_pre_scale, which multiplies the inputs"),
        ("Int8Tensor", INT8, changed("other", torch.ones(8)), {}, "it has a other, which a Int8Tensor does not have"),
        ("IntxUnpackedToInt8Tensor", INT8, int8(4), {}, "its target_dtype is None"),
        (
            "IntxUnpackedToInt8Tensor",
            {**INT8, "target_dtype": {"_data": "int9"}},
            int8(4),
            {},
            "'int9', not one of int1 to",
        ),
        ("Float8Tensor", INT8, int8(4), {}, "its qdata is torch.int8, not torch.float8"),
        ("MXTensor", {**INT8, "elem_dtype": "fp6_e2m3"}, int8(4), {}, "its elem_dtype is 'fp6_e2m3'"),
        ("NVFP4Tensor", {**INT8, "is_swizzled_scales": True}, int8(4), {}, "its scales are swizzled"),
        ("NVFP4Tensor", {**INT8, "block_size": 16}, int8(4), {}, "its qdata is torch.int8, not torch.uint8"),
        ("NVFP4Tensor", {**INT8, "block_size": 5}, int8(4), {}, "its block_size is 5, not a divisor of"),
    ],
)
def test_what_is_wrong(kind, data, components, changes, said):
    assert re.search(said, fault(*described(kind, data, components, **changes)))


def test_a_description_that_is_no_json():
    metadata = described("Int8Tensor", INT8, int8(4))[1]
    metadata["m.weight"] = '{"_type": "Int8Tensor", "_data": {"_data": 1, "_data": 2}}'
    assert "twice" in fault({"other": torch.ones(1)}, metadata)


def test_codes_beyond_their_dtype_are_refused_when_read():
    data = {**INT8, "target_dtype": dtype_json("int4")}
    components = changed("qdata", torch.full((4, 8), 8, dtype=torch.int8))
    with (
        opened(*described("IntxUnpackedToInt8Tensor", data, components)) as checkpoint,
        pytest.raises(tt.CheckpointError, match="its codes are from 8 to 8, but int4 is from -8 to 7"),
    ):
        checkpoint["m.weight"]
