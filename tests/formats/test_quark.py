"""AMD Quark: each kind of weight from tensors made here, decoded here in float64; faults by name.

How they are laid out is derived from amd-quark 0.13: ``create_pack_method`` (torch/utils/pack.py) for the codes,
``StaticScaledRealQuantizer`` (torch/export/nn/modules/realquantizer.py) for what is transposed and packed on export
and undone on import, ``get_layer_quant_config`` (torch/export/main_export/quant_config_parser.py) for which settings a
layer has; tests/golden has what that package wrote and decoded.
"""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchtether as tt
from tests.formats.folders import fault, opened

E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
E2M3 = torch.tensor([i / 8 for i in range(8)] + [2**e * (1 + m / 8) for e in range(3) for m in range(8)])
E2M3 = torch.cat([E2M3, -E2M3]).double()
ORDERS = {"reorder": (0, 2, 4, 6, 1, 3, 5, 7), "order": (0, 1, 2, 3, 4, 5, 6, 7)}
FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
INTEGERS = {"int8": (-128, 128), "uint8": (0, 256), "int4": (-8, 8), "uint4": (0, 16)}
SCHEMES = ("per_tensor", "per_channel", "per_group")
BF16 = torch.bfloat16


def words(codes, order):
    """``codes`` (rows, n) as int32 (rows, ceil(n / 8)): nibble i of a word is of element ``order[i]`` of its 8."""
    rows, count = codes.shape
    padded = torch.zeros(rows, -(-count // 8) * 8, dtype=torch.int64)
    padded[:, :count] = codes & 15
    made = sum(padded[:, element::8] << 4 * nibble for nibble, element in enumerate(order))
    return torch.where(made >= 2**31, made - 2**32, made).to(torch.int32)


def stream(codes, bits):
    """``codes`` (rows, n) as bytes (rows, n * bits / 8), the first in the lowest bits."""
    total = codes.shape[1] * bits
    spread = (codes[..., None] >> torch.arange(bits) & 1).reshape(codes.shape[0], total // 8, 8)
    return (spread << torch.arange(8)).sum(-1).to(torch.uint8)


def integers(dtype, qscheme, rows, columns, order="reorder", symmetric=False, size=16, scale_dtype=BF16, seed=0):
    """Tensors of a layer of integers, its settings, and what it decodes to."""
    draw = torch.Generator().manual_seed(seed)
    low, high = INTEGERS[dtype]
    codes = torch.randint(low, high, (rows, columns), generator=draw)
    count = {"per_tensor": (1, 1), "per_channel": (rows, 1), "per_group": (rows, columns // size)}[qscheme]
    scale = torch.rand(count, generator=draw).to(scale_dtype)
    zero = torch.zeros(count, dtype=torch.int64) if symmetric else torch.randint(low, high, count, generator=draw)
    wide = [one.repeat_interleave(columns // one.shape[1], 1).double() for one in (scale, zero)]
    values = (codes - wide[1]) * wide[0]
    held, kept = codes, zero
    if qscheme == "per_group":
        held, kept, scale = codes.t(), zero.t(), scale.t()
    elif qscheme == "per_channel":
        kept, scale = zero.reshape(1, -1), scale.reshape(-1)
    container = {"int8": torch.int8, "uint8": torch.uint8}.get(dtype)
    held, kept = ((one.to(container) if container else words(one, ORDERS[order])) for one in (held, kept))
    kept = kept.reshape(-1) if qscheme == "per_channel" else kept
    if qscheme == "per_tensor":
        scale, kept = scale.reshape(()), zero.reshape(()).to(container or torch.int32)
    axis = {"per_tensor": None, "per_channel": 0, "per_group": 1}[qscheme]
    said = {"dtype": dtype, "qscheme": qscheme, "ch_axis": axis, "symmetric": symmetric}
    said["group_size"] = size if qscheme == "per_group" else None
    return {"weight": held, "weight_scale": scale, "weight_zero_point": kept}, said, values


def floats(dtype, rows, columns, kind="per_channel", lead=(), seed=0):
    """The same with small floats: ``kind`` of float8 is its qscheme, of others what their scales are."""
    draw = torch.Generator().manual_seed(seed)
    said = {"dtype": dtype, "qscheme": kind, "ch_axis": {"per_channel": 0}.get(kind), "symmetric": True}
    if dtype in FLOAT8:
        codes = torch.randn(rows, columns, generator=draw).to(FLOAT8[dtype])
        count = {"per_tensor": (1, 1), "per_channel": (rows, 1), "per_block": (-(-rows // 16), -(-columns // 32))}[kind]
        scale = torch.rand(count, generator=draw)
        said["block_size"] = [16, 32] if kind == "per_block" else None
        wide = (
            scale.repeat_interleave(16, 0).repeat_interleave(32, 1)[:rows, :columns] if kind == "per_block" else scale
        )
        held = scale if kind == "per_block" else scale.reshape(-1) if kind == "per_channel" else scale.reshape(())
        return {"weight": codes, "weight_scale": held}, said, codes.double() * wide.double()
    table, bits, size = (E2M1, 4, 16) if dtype == "fp4" else (E2M3, 6, 32)
    count = (*lead, rows, columns // size)
    codes = torch.randint(0, len(table), (*lead, rows, columns), generator=draw)
    tensors = {"weight": stream(codes.reshape(-1, columns), bits).reshape(*lead, rows, -1)}
    said |= {"qscheme": "per_group", "ch_axis": -1, "group_size": size, "symmetric": None, "scale_format": "float32"}
    if kind == "e8m0":
        exponents = torch.randint(110, 140, count, generator=draw)
        tensors["weight_scale"], said["scale_format"] = exponents.to(torch.uint8), "e8m0"
        wide = torch.ldexp(torch.ones(count, dtype=torch.float64), exponents - 127)
    elif kind == "stages":
        tensors["weight_scale"] = torch.rand(count, generator=draw).to(torch.float8_e4m3fn)
        tensors["weight_scale_2"] = torch.rand((), generator=draw).to(BF16)
        wide = (tensors["weight_scale"].float() * tensors["weight_scale_2"].float()).double()  # exact in float32
        said = [said, {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_scale_quant": True}]
    else:
        tensors["weight_scale"] = torch.rand(count, generator=draw).to(BF16)
        wide = tensors["weight_scale"].double()
    return tensors, said, table[codes] * wide.repeat_interleave(size, -1)


def config(said, layers=None, order="reorder", **more):
    layers = {pattern: {"weight": one} for pattern, one in (layers or {}).items()}
    quark = {"quant_method": "quark", "global_quant_config": {"weight": said}, "layer_quant_config": layers}
    return {"quantization_config": quark | {"export": {"pack_method": order}, **more}}


def named(tensors, layer="m"):
    return {f"{layer}.{leaf}": tensor for leaf, tensor in tensors.items()}


def is_that(weight, values):
    """Whether it decodes to ``values``, rounded once to float32."""
    return torch.equal(weight.to(torch.float32).dequantize(), values.float())


def check(tensors, said, values, order="reorder"):
    with opened({**named(tensors), "m.bias": torch.ones(values.shape[-2])}, config=config(said, order=order)) as found:
        assert found.format == "quark"
        assert not found.faults
        assert list(found) == ["m.bias", "m.weight"]
        assert is_that(found["m.weight"], values)
        assert found.spec("m.weight").shape == tuple(values.shape)
        parts, layout = found["m.weight"].parts, found.spec("m.weight").scheme.layout(tuple(values.shape))
        assert {role: part.dtype for role, part in parts.items()} == {role: one.dtype for role, one in layout.items()}
        if isinstance(said, dict) and said["qscheme"] == "per_block":  # of which a row has no scale of its own
            return
        start, count = values.shape[0] * 2 // 3, values.shape[0]
        given = found.read_rows("m.weight", tuple(values.shape), start, start + 1)
        if count > 16:
            nbytes = found.rows_nbytes("m.weight", tuple(values.shape), start, start + 1)
            assert nbytes is None or nbytes < found.nbytes("m.weight") * 3 // 4  # None: its parts are stored
        for role, part in parts.items():
            wanted = part[start : start + 1] if part.dim() and part.shape[0] == count else part
            assert torch.equal(given[role].float(), wanted.float()), role


@given(
    dtype=st.sampled_from(sorted(INTEGERS)),
    qscheme=st.sampled_from(SCHEMES),
    rows=st.sampled_from((1, 7, 8, 21, 40)),
    columns=st.sampled_from((16, 48, 160)),
    order=st.sampled_from(sorted(ORDERS)),
    symmetric=st.booleans(),
    scale_dtype=st.sampled_from((BF16, torch.float32, torch.float16)),
    seed=st.integers(0, 999),
)
def test_integers(dtype, qscheme, rows, columns, order, symmetric, scale_dtype, seed):
    check(*integers(dtype, qscheme, rows, columns, order, symmetric, 16, scale_dtype, seed), order)


@given(
    case=st.sampled_from(
        [(dtype, kind) for dtype in FLOAT8 for kind in ("per_tensor", "per_channel", "per_block")]
        + [(dtype, kind) for dtype in ("fp4", "fp6_e2m3") for kind in ("e8m0", "float32")]
        + [("fp4", "stages")]
    ),
    rows=st.sampled_from((1, 7, 33)),
    columns=st.sampled_from((32, 96)),
    seed=st.integers(0, 999),
)
def test_floats(case, rows, columns, seed):
    check(*floats(case[0], rows, columns, case[1], seed=seed))


def test_banks_of_experts():
    check(*floats("fp4", 6, 32, "e8m0", lead=(3,)))


def test_an_odd_number_of_columns_leaves_no_bit_beyond_them():
    tensors, said, values = integers("int4", "per_group", 16, 15, size=15)
    with opened(named(tensors), config=config(said)) as found:
        assert is_that(found["m.weight"], values)
        assert not (found["m.weight"].parts["qdata"][:, -1] & 0xF0).any()


def test_a_layer_has_the_settings_of_the_first_pattern_that_is_its_own():
    a, b, c, d = (integers(dtype, "per_channel", 8, 16) for dtype in ("int8", "uint8", "int4", "uint4"))
    layers = {"x.exact": a[1], "x.?": b[1], "x.*": c[1], "x.a": a[1], "[!x].a": a[1]}
    tensors = {**named(a[0], "x.exact"), **named(b[0], "x.a"), **named(c[0], "x.ab"), **named(d[0], "y")}
    with opened(tensors, config=config(d[1], layers)) as found:
        assert not found.faults
        assert all(
            is_that(found[f"{name}.weight"], one[2])
            for name, one in zip(("x.exact", "x.a", "x.ab", "y"), (a, b, c, d), strict=True)
        )
    by_type = {"layer_type_quant_config": {"Linear": {"weight": d[1]}}}
    with opened(named(d[0]), config=config(a[1], **by_type)) as found:
        assert is_that(found["m.weight"], d[2])


def test_scales_of_activations_caches_and_rounded_floats_are_no_tensors_of_the_model():
    side = ("input_scale", "output_scale", "input_zero_point", "output_scale_2", "k_scale", "v_scale", "weight_scale")
    tensors = {**dict.fromkeys((f"m.{leaf}" for leaf in side), torch.ones(())), "m.weight": torch.ones(4, 4)}
    with opened(tensors, config=config(None, export={"weight_format": "fake_quantized"})) as found:
        assert list(found) == ["m.weight"]
        assert type(found["m.weight"]) is torch.Tensor


def test_loaded_into_plain_modules():
    tensors, said, values = integers("uint4", "per_group", 24, 64)
    model = nn.ModuleDict({"m": nn.Linear(64, 24, bias=False, device="meta")})
    with opened(named(tensors), config=config(said)) as found:
        tt.load(model, found.path)
    assert is_that(model["m"].weight, values)


GROUPED, SAID, _ = integers("int4", "per_group", 16, 32, symmetric=True)
BYTES, OF_BYTES, _ = integers("uint8", "per_channel", 16, 32)
NV, OF_NV, _ = floats("fp4", 16, 32, "stages")
FP8, OF_FP8, _ = floats("fp8_e4m3", 16, 32)


def changed(tensors, **changes):
    return {key: one for key, one in {**tensors, **changes}.items() if one is not None}


def stage(**more):
    return [OF_NV[0], {**OF_NV[1], **more}]


@pytest.mark.parametrize(
    ("tensors", "said", "words"),
    [
        (GROUPED, None, "m.weight: it is stored as codes, but its settings are None"),
        (GROUPED, [], r"but its settings are \[\]"),
        (GROUPED, {**SAID, "dtype": "int3"}, "its dtype is 'int3', not one of int8, uint8, int4, uint4, fp8_e4m3"),
        (GROUPED, {**SAID, "dtype": ["int4"]}, r"its dtype is \['int4'\], not one of"),
        (GROUPED, {**SAID, "ch_axis": 0}, "its ch_axis is 0, which is not supported with the qscheme per_group"),
        (BYTES, {**OF_BYTES, "ch_axis": [1]}, r"its ch_axis is \[1\]"),
        (GROUPED, {**SAID, "qscheme": "per_block"}, "its qscheme is 'per_block' and its scale has shape"),
        (GROUPED, {**SAID, "group_size": 32}, "its scales are for 2 groups, but group_size 32 over 32 columns gives 1"),
        (GROUPED, {**SAID, "group_size": 1.5}, "its group_size is 1.5, not a positive integer"),
        (GROUPED, {**SAID, "dtype": "int8"}, "its qdata is torch.int32, not torch.int8"),
        (changed(GROUPED, weight_scale=None), SAID, "m.weight and m.weight_zero_point, but no scale"),
        (changed(GROUPED, weight=None), SAID, "m.weight_scale and m.weight_zero_point, but no qdata"),
        (changed(GROUPED, weight_scale=torch.ones(2, 17)), SAID, r"its qdata has shape \(32, 2\), not \(32, 3\)"),
        (changed(GROUPED, weight_scale=torch.ones(16)), SAID, "its qscheme is 'per_group' and its scale has shape"),
        (changed(GROUPED, weight_scale_2=torch.ones(())), SAID, "its dtype is int4, which has no m.weight_scale_2"),
        (changed(GROUPED, weight=torch.ones(32).int()), SAID, r"its codes have shape \(32,\), which is not a matrix"),
        (changed(BYTES, weight_zero_point=None), OF_BYTES, "its zero_point is absent"),
        (changed(BYTES, weight_scale=torch.ones(16).int()), OF_BYTES, "its scale is torch.int32, not torch.float16"),
        (NV, OF_NV[0], "its dtype is fp4, which has no m.weight_scale_2"),
        (NV, stage(dtype="fp8_e5m2"), "it is quantized in the stages 'fp4' and 'fp8_e5m2', not fp4 with scales in"),
        (NV, stage(is_scale_quant=False), "it is quantized in the stages"),
        (NV, [{**OF_NV[0], "scale_format": "e5m3"}, OF_NV[1]], "its scale_format 'e5m3', but only per_group with e8m0"),
        (changed(NV, weight_scale=torch.ones(16, 2)), OF_NV, "its scale is torch.float32, not torch.float8_e4m3fn"),
        (changed(NV, weight_zero_point=torch.ones(16, 2)), OF_NV, "its dtype is fp4, which has no m.weight_zero_point"),
        (FP8, {**OF_FP8, "qscheme": "per_group", "ch_axis": -1}, "its dtype is fp8_e4m3, its qscheme is 'per_group'"),
        (FP8, {**OF_FP8, "qscheme": "per_block", "block_size": [8]}, r"and its block_size \[8\]"),
        (FP8, {**OF_FP8, "dtype": "fp8_e5m2"}, "its qdata is torch.float8_e4m3fn, not torch.float8_e5m2"),
        (changed(FP8, weight_scale=torch.ones(17)), OF_FP8, r"its scale has shape \(17,\), not \(16, 1\)"),
        (changed(FP8, bias=torch.ones(16).char(), bias_scale=torch.ones(())), OF_FP8, "m.bias: it is quantized, and"),
    ],
)
def test_what_is_wrong(tensors, said, words):
    got = fault(named(tensors), config=config(said))
    assert re.search(words, got), got


def test_zero_points_that_the_settings_deny():
    tensors, _, _ = integers("int4", "per_group", 16, 32)
    with (
        opened(named(tensors), config=config(SAID)) as found,
        pytest.raises(tt.CheckpointError, match="but its settings say that it is symmetric"),
    ):
        found["m.weight"]


@pytest.mark.parametrize(
    ("tensors", "more", "words"),
    [
        ({}, {"export": {"pack_method": "rows"}}, "config.json: the pack_method is 'rows', not one of reorder, order"),
        ({}, {"export": [1]}, "the pack_method is None"),
        ({}, {"layer_quant_config": [1]}, r"layer_quant_config is \[1\], not an object"),
        ({}, {"layer_quant_config": {"*" * 3000: {}}}, "layer_quant_config has 1 patterns"),
        ({"m.input_rotation": torch.ones(2, 2)}, {}, "m.input_rotation: it rotates or scales the inputs of its layer"),
        ({"shared_input_rotation_32": torch.ones(2, 2)}, {}, "it rotates or scales the inputs of its layer"),
        ({"m.smooth_factor": torch.ones(2)}, {}, "it rotates or scales the inputs of its layer"),
    ],
)
def test_what_is_wrong_with_all(tensors, more, words):
    with (
        pytest.raises(tt.CheckpointError, match=words),
        opened({**named(GROUPED), **tensors}, config=config(SAID, **more)),
    ):
        pass


def test_settings_that_are_no_object():
    said = config(SAID)
    said["quantization_config"]["global_quant_config"] = 7
    assert fault(named(GROUPED), config=said) == "m.weight: its settings are 7, not an object"


def test_quark_writes_awq_in_another_order_too():
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    tensors = {"m.qweight": torch.ones(32, 2).int(), "m.qzeros": torch.ones(1, 2).int(), "m.scales": torch.ones(1, 16)}
    with opened(tensors, config={"quantization_config": {**config, "pack_method": "reorder"}}) as found:
        assert not found.faults
    with pytest.raises(tt.CheckpointError, match="AWQ with the pack_method 'order' is not supported"):
        fault(tensors, config={"quantization_config": {**config, "pack_method": "order"}})
