"""compressed-tensors: written files are read to the same bits, and faults are reported, never guessed around."""

import dataclasses
import json
import re

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors.torch import save_file

import torchtether as tt
from tests.strategies import examples, filled
from torchtether.errors import CheckpointError, SchemeError
from torchtether.files import Record, Stored
from torchtether.formats import Contents, compressed_tensors
from torchtether.schemes import Affine, ScaledFloat, mxfp4, mxfp8, nvfp4, same_bits

E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
NVFP4 = dataclasses.replace(nvfp4(), global_divides=True)
MXFP6 = ScaledFloat("e2m3", block=(1, 32), scale_dtype=E8M0)


def contents(tensors, quantization=None, **beside):
    config = {} if quantization is None else {"quantization_config": quantization}
    return Contents(
        {key: Stored(tensor.dtype, tuple(tensor.shape), 0) for key, tensor in tensors.items()},
        {},
        Record(),
        {"config.json": {**config, **beside}},
        lambda key: torch.empty(tensors[key].shape, dtype=tensors[key].dtype).copy_(tensors[key]),
    )


def config(weights=None, format=None, *, targets=("Linear",), **more):
    group = {"targets": list(targets), "weights": weights}
    named = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}
    return {**named, **more}


def ints(bits, strategy="channel", group_size=None, **more):
    return {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group_size, **more}


def floats(bits, strategy="channel", group_size=None, **more):
    return {**ints(bits, strategy, group_size), "type": "float", **more}


def read(what, name="m.weight"):
    """The Weight ``name``; a fault is an error."""
    found = compressed_tensors.recognise(what)
    assert not found.faults, found.faults
    entry = found.weights[name]
    parts = compressed_tensors.unpack(entry, {role: what.read(key) for role, key in entry.keys.items()})
    layout = entry.spec.scheme.layout(entry.spec.base)
    assert {n: (p.dtype, tuple(p.shape)) for n, p in parts.items()} == {n: p[1::-1] for n, p in layout.items()}
    assert list(parts) == list(layout)
    return tt.Weight(parts, entry.spec)


def fault(what, name="m.weight"):
    found = compressed_tensors.recognise(what)
    assert name not in found.weights
    assert set(what.tensors) == found.spare | {key for e in found.weights.values() for key in e.keys.values()}
    text = found.faults[name]
    assert "\n" not in text
    return text


def same_values(one, other):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert same_bits(one.to(dtype).dequantize(), other.to(dtype).dequantize())


# -- written and read ---------------------------------------------------------------------------------------------


@st.composite
def writable(draw):
    """A scheme that the format has words for, and a shape that suits it."""
    rows, group = draw(st.integers(1, 40)), draw(st.sampled_from((4, 8, 16, 32, 48)))
    columns = group * draw(st.integers(1, 5))
    scale = draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
    kind = draw(st.sampled_from(("int", "int", "int", "int8", "fp8", "ue8m0", "micro", "nvfp4")))
    if kind == "int":
        bits, signed, symmetric = (
            draw(st.sampled_from((4, 8, 1, 2, 3, 5, 6, 7))),
            draw(st.booleans()),
            draw(st.booleans()),
        )
        block = (1, draw(st.sampled_from((None, group))))
        return Affine(bits, signed=signed, symmetric=symmetric, block=block, scale_dtype=scale), (rows, columns)
    if kind == "int8":
        block = draw(st.sampled_from(((None, None), (4, 16), (128, 128))))
        signed, symmetric = draw(st.booleans()), draw(st.booleans())
        return Affine(8, signed=signed, symmetric=symmetric, block=block, scale_dtype=scale), (rows, columns + 3)
    if kind == "fp8":
        block = draw(st.sampled_from(((None, None), (1, None), (1, group), (4, 16), (128, 128))))
        return ScaledFloat("e4m3", block, scale), (rows, columns)
    if kind == "ue8m0":
        return ScaledFloat("e4m3", (8, 16), E8M0), (rows, columns)
    if kind == "micro":
        return draw(st.sampled_from((mxfp4(), mxfp8(), MXFP6))), (rows, 32 * draw(st.integers(1, 4)))
    return draw(st.sampled_from((NVFP4, ScaledFloat("e2m1", (1, 16), E4M3)))), (rows, 16 * draw(st.integers(1, 6)))


@examples(60, suppress_health_check=[HealthCheck.too_slow])
@given(case=writable(), seed=st.integers(0, 2**31), pattern=st.sampled_from(("normal", "zeros", "positive", "spike")))
def test_what_is_written_is_read(case, seed, pattern):
    scheme, shape = case
    weight = tt.Weight.encode(filled(shape, torch.float32, pattern, seed), scheme)
    stored = compressed_tensors.pack("m.weight", weight)
    assert compressed_tensors.layout("m.weight", weight.spec) == {
        key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in stored.items()
    }
    assert all(tensor.is_contiguous() for tensor in stored.values())
    (said,) = compressed_tensors.announce({"m.weight": weight.spec}, ()).values()
    what = contents(stored, json.loads(json.dumps(said["quantization_config"])))
    same_values(read(what), weight)
    again = compressed_tensors.pack("m.weight", read(what))
    assert stored.keys() == again.keys()
    assert all(same_bits(stored[key], again[key]) for key in stored)


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("columns", [4, 16])
@pytest.mark.parametrize("bits", [4, 8])
def test_dimensions_of_one_have_strides_like_any_other(rows, columns, bits):
    """torch calls a (1, n) tensor contiguous whatever its first stride is, and then refuses to view it as words."""
    scheme = Affine(bits, symmetric=False)
    weight = tt.Weight.encode(filled((rows, columns), torch.float32, "normal", 0), scheme)
    (said,) = compressed_tensors.announce({"m.weight": weight.spec}, ()).values()
    stored = compressed_tensors.pack("m.weight", weight)
    same_values(read(contents(stored, said["quantization_config"])), weight)


def _whole_words(codes, bits):
    """Codes as releases before 0.18 packed them: as many to a word as fit, by row."""
    fit = 32 // bits
    lines = [
        [sum(code << (bits * i) for i, code in enumerate(row[at : at + fit])) for at in range(0, len(row), fit)]
        for row in codes
    ]
    return torch.tensor([[word - 2**32 if word >= 2**31 else word for word in row] for row in lines], dtype=torch.int32)


def _one_stream(codes, bits):
    """Codes as one number by row, cut into words."""
    words = -(-len(codes[0]) * bits // 32)
    numbers = [sum(code << (bits * i) for i, code in enumerate(row)) for row in codes]
    lines = [[(number >> (32 * j)) & 0xFFFFFFFF for j in range(words)] for number in numbers]
    return torch.tensor([[word - 2**32 if word >= 2**31 else word for word in row] for row in lines], dtype=torch.int32)


@examples(50)
@given(
    bits=st.integers(1, 8),
    rows=st.integers(1, 30),
    columns=st.integers(1, 70),
    groups=st.sampled_from((None, 8, 16, 20)),
    dense=st.booleans(),
    zeros=st.sampled_from(("none", "packed", "plain")),
    order=st.sampled_from(("none", "unset", "moved")),
    seed=st.integers(0, 2**31),
)
def test_packed_codes_of_every_width(bits, rows, columns, groups, dense, zeros, order, seed):
    """Both packings, ragged last groups, and columns in any group, against sums over Python integers."""
    g = torch.Generator().manual_seed(seed)
    count = 1 if groups is None else -(-columns // groups)
    codes = torch.randint(0, 2**bits, (rows, columns), generator=g)
    zero = torch.randint(0, 2**bits, (rows, count), generator=g)
    scale = (torch.rand((rows, count), generator=g) + 0.1).to(torch.bfloat16)
    index = torch.arange(columns) // (groups or columns)
    if order == "moved" and groups:
        index = index[torch.randperm(columns, generator=g)]
    offset = 1 << (bits - 1)
    packing = _one_stream if dense else _whole_words
    tensors = {
        "m.weight_packed": packing(codes.tolist(), bits),
        "m.weight_scale": scale,
        "m.weight_shape": torch.tensor([rows, columns]),
        "m.bias": torch.zeros(rows),
    }
    if zeros == "packed":
        tensors["m.weight_zero_point"] = packing(zero.t().tolist(), bits).t().contiguous()
    elif zeros == "plain":
        tensors["m.weight_zero_point"] = (zero - offset).to(torch.int8)
    if order != "none":
        is_set = order == "moved" and groups
        tensors["m.weight_g_idx"] = (index if is_set else torch.full((columns,), -1)).to(torch.int32)
    args = ints(bits, "group" if groups else "channel", groups, symmetric=zeros == "none")
    what = contents(tensors, config(args, "pack-quantized", version="0.20.0" if dense else "0.17.1"))
    weight = read(what)
    wanted = (codes - (zero[:, index] if zeros != "none" else offset)).float() * scale.float()[:, index]
    assert weight.dtype == torch.bfloat16
    assert same_bits(weight.to(torch.float32).dequantize(), wanted)
    assert same_bits(weight.dequantize(), wanted.bfloat16())
    assert "m.bias" not in compressed_tensors.recognise(what).spare
    moved = bool((index != torch.arange(columns) // (groups or columns)).any())
    assert weight.scheme.act_order == moved


def test_experts_of_three_dimensions():
    codes = torch.randint(0, 16, (3, 6, 40))
    zero = torch.randint(0, 16, (3, 6, 5))
    scale = torch.rand(3, 6, 5)
    tensors = {
        "m.weight_packed": torch.stack([_one_stream(one.tolist(), 4) for one in codes]),
        "m.weight_zero_point": torch.stack([_one_stream(one.t().tolist(), 4).t() for one in zero]),
        "m.weight_scale": scale,
        "m.weight_shape": torch.tensor([3, 6, 40]),
    }
    weight = read(contents(tensors, config(ints(4, "group", 8, symmetric=False))))
    index = torch.arange(40) // 8
    wanted = (codes - zero[..., index]).float() * scale[..., index]
    assert same_bits(weight.to(torch.float32).dequantize(), wanted)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_unsigned_integers_of_others_become_signed_ones(bits):
    """As GPTQ and AWQ have them; a zero point beyond the codes has no place."""
    scheme = Affine(bits, signed=False, symmetric=False, block=(1, 8))
    parts = dict(tt.Weight.encode(filled((6, 24), torch.float32, "normal", 0), scheme).parts)
    parts["zero_point"] = torch.randint(0, 2**bits, (6, 3), dtype=torch.uint8)
    weight = tt.Weight(parts, tt.WeightSpec.of((6, 24), torch.float32, scheme))
    stored = compressed_tensors.pack("m.weight", weight)
    (said,) = compressed_tensors.announce({"m.weight": weight.spec}, ()).values()
    again = read(contents(stored, said["quantization_config"]))
    assert again.scheme.signed
    same_values(again, weight)
    if bits < 8:
        parts["zero_point"][4, 1] = 2**bits
        with pytest.raises(SchemeError, match=f"m.weight: .* {bits} bits, got {2**bits}"):
            compressed_tensors.pack("m.weight", weight)


def test_a_global_scale_that_multiplies_is_turned_around_exactly_or_not_at_all():
    turned = 0
    for seed in range(60):
        weight = tt.Weight.encode(filled((4, 32), torch.float32, "normal", seed), nvfp4())
        if seed % 2:
            parts = {**weight.parts, "global_scale": torch.tensor(2.0 ** -(seed % 20))}
            weight = tt.Weight(parts, weight.spec)
        try:
            stored = compressed_tensors.pack("m.weight", weight)
        except SchemeError as error:
            assert seed % 2 == 0
            assert "no exact reciprocal" in str(error)
            continue
        turned += 1
        (said,) = compressed_tensors.announce({"m.weight": weight.spec}, ()).values()
        again = read(contents(stored, said["quantization_config"]))
        assert again.scheme.global_divides
        same_values(again, weight)
    assert turned >= 30


@pytest.mark.parametrize(
    ("scheme", "shape", "said"),
    [
        (Affine(4, block=(1, 8), act_order=True), (4, 16), "act_order"),
        (Affine(4, block=(1, 128)), (4, 192), "groups of 128 for 192"),
        (Affine(4, block=(None, None)), (4, 16), "by row or group"),
        (Affine(8, block=(None, 16)), (4, 32), r"cannot store block \(None, 16\)"),
        (mxfp4(), (4, 48), "groups of 32 for 48"),
        (ScaledFloat("e5m2"), (4, 16), "e5m2"),
        (ScaledFloat("e2m1", (1, 16)), (4, 16), "cannot store ScaledFloat"),
        (ScaledFloat("e4m3", (1, 16), E4M3, global_scale=True), (4, 16), "cannot store ScaledFloat"),
        (tt.nf4(), (4, 16), "cannot store nf4"),
        (tt.int8(), (4, 4, 4), r"shape \(4, 4, 4\)"),
    ],
    ids=str,
)
def test_what_has_no_words_is_refused_with_what_to_do(scheme, shape, said):
    spec = tt.WeightSpec.of(shape, torch.float32, scheme)
    for call in (
        lambda: compressed_tensors.layout("m.weight", spec),
        lambda: compressed_tensors.announce({"m.weight": spec}, ()),
        lambda: compressed_tensors.pack("m.weight", tt.Weight(scheme.empty(shape, torch.float32, "cpu"), spec)),
    ):
        with pytest.raises(SchemeError, match=f"m.weight: compressed-tensors .*{said}") as error:
            call()
        assert error.value.fix


def test_transposed_and_nameless_weights_are_refused():
    weight = tt.Weight.encode(torch.randn(4, 8), tt.int8())
    with pytest.raises(SchemeError, match="contiguous"):
        compressed_tensors.layout("m.weight", weight.t().spec)
    with pytest.raises(SchemeError, match=r"only tensors with the name"):
        compressed_tensors.layout("experts.up", weight.spec)
    assert set(compressed_tensors.layout("weight", weight.spec)) == {"weight_packed", "weight_shape", "weight_scale"}


# -- the config that is written -----------------------------------------------------------------------------------


def spec(scheme, shape=(8, 64)):
    return tt.WeightSpec.of(shape, torch.bfloat16, scheme)


def test_one_way_is_one_group_and_names_what_is_left_out():
    specs = {f"model.layers.{i}.mlp.up.weight": spec(tt.int4(32)) for i in range(3)}
    said = compressed_tensors.announce(specs, ["model.norm.weight", "model.embed.weight", "a.bias"])
    told = said["config.json"]["quantization_config"]
    assert told["format"] == "pack-quantized"
    assert told["quantization_status"] == "compressed"
    assert [group["targets"] for group in told["config_groups"].values()] == [["Linear"]]
    *others, heads = told["ignore"]
    assert others == ["model.embed", "model.norm"]
    assert heads.startswith("re:(.*\\.)?(")
    for head in ("lm_head", "model.lm_head", "proj_out", "cls.predictions.decoder", "lm_head.decoder"):
        assert re.match(heads.removeprefix("re:"), head), head
    assert not re.match(heads.removeprefix("re:"), "lm_head.dense")
    specs["lm_head.weight"] = spec(tt.int4(32))
    told = compressed_tensors.announce(specs, ["block.proj_out.weight"])["config.json"]["quantization_config"]
    assert told["config_groups"]["group_0"]["targets"] == ["Linear", "lm_head"]
    name, trees, heads = told["ignore"]
    assert name == "block.proj_out"
    assert not re.match(heads.removeprefix("re:"), "lm_head")
    assert all(re.match(trees.removeprefix("re:"), one) for one in (name, f"model.{name}", "block.0.up"))
    assert not any(re.match(trees.removeprefix("re:"), one) for one in ("my_block.up", "block", "model.layers.0.up"))
    assert compressed_tensors.announce({}, ["a.weight"]) == {}


def test_several_ways_are_groups_that_name_their_modules():
    weights = {
        "a.weight": tt.Weight.encode(torch.randn(8, 64), tt.int4(32)),
        "b.weight": tt.Weight.encode(torch.randn(8, 64), tt.int8()),
        "c.weight": tt.Weight.encode(torch.randn(8, 64), tt.fp8()),
        "d.weight": tt.Weight.encode(torch.randn(8, 64), tt.mxfp4()),
        "e.weight": tt.Weight.encode(torch.randn(8, 64), tt.int4(32)),
    }
    stored = {key: t for name, w in weights.items() for key, t in compressed_tensors.pack(name, w).items()}
    said = compressed_tensors.announce({name: w.spec for name, w in weights.items()}, ["norm.weight"])
    told = said["config.json"]["quantization_config"]
    assert told["format"] == "mixed-precision"
    targets = [group["targets"] for group in told["config_groups"].values()]
    assert targets == [["a", "e"], ["b"], ["c"], ["d"]]
    assert told["ignore"][0] == "norm"
    what = contents({**stored, "norm.weight": torch.ones(8)}, told)
    for name, weight in weights.items():
        same_values(read(what, name), weight)
    two = compressed_tensors.announce({name: weights[name].spec for name in ("a.weight", "b.weight")}, [])
    assert two["config.json"]["quantization_config"]["format"] == "pack-quantized"


def test_a_group_as_long_as_a_row_is_in_the_config_group_of_the_others():  # transformers decodes only one at load
    shapes = {"a.weight": (8, 64), "b.weight": (8, 32)}
    weights = {name: tt.Weight.encode(torch.randn(shape), tt.int4(32)) for name, shape in shapes.items()}
    stored = {key: t for name, w in weights.items() for key, t in compressed_tensors.pack(name, w).items()}
    said = compressed_tensors.announce({name: w.spec for name, w in weights.items()}, [])
    told = said["config.json"]["quantization_config"]
    assert len(told["config_groups"]) == 1
    assert told["dequantize"] is True
    for name, weight in weights.items():
        again = read(contents(stored, told), name)
        assert again.scheme == weight.scheme
        same_values(again, weight)


# -- what the config says -----------------------------------------------------------------------------------------


def packed(bits=4, rows=4, columns=32, groups=1, name="m"):
    codes = torch.randint(0, 2**bits, (rows, columns), generator=torch.Generator().manual_seed(0))
    return {
        f"{name}.weight_packed": _one_stream(codes.tolist(), bits),
        f"{name}.weight_scale": torch.rand(rows, groups) + 0.5,
        f"{name}.weight_shape": torch.tensor([rows, columns]),
    }


def test_targets_by_name_then_by_pattern_then_by_class():
    groups = {
        "classes": {"targets": ["Linear"], "weights": ints(4, "group", 8)},
        "pattern": {"targets": ["re:.*up$", "re:.*deep"], "weights": ints(4, "group", 16)},
        "name": {"targets": ["a.up"], "weights": ints(4, "channel")},
    }
    tensors = {
        **packed(groups=1, name="a.up"),
        **packed(groups=2, name="b.up"),
        **packed(groups=4, name="down"),
        **packed(groups=2, name="deep.down"),
    }
    what = contents(tensors, {"quant_method": "compressed-tensors", "config_groups": groups})
    found = compressed_tensors.recognise(what)
    assert not found.faults
    assert {name: entry.spec.scheme.block[1] for name, entry in found.weights.items()} == {
        "a.up.weight": None,
        "b.up.weight": 16,
        "down.weight": 8,
        "deep.down.weight": 16,
    }


def test_classes_that_names_do_not_tell_are_tried_by_their_fit():
    groups = {
        "heads": {"targets": ["Embedding"], "weights": ints(8, "channel")},
        "rest": {"targets": ["Linear"], "weights": ints(4, "group", 8)},
    }
    tensors = {**packed(8, name="emb"), **packed(4, groups=4, name="m")}
    found = compressed_tensors.recognise(
        contents(tensors, {"quant_method": "compressed-tensors", "config_groups": groups})
    )
    assert {name: entry.spec.scheme.bits for name, entry in found.weights.items()} == {"emb.weight": 8, "m.weight": 4}
    groups["heads"]["weights"] = ints(4, "group", 8, symmetric=True)
    groups["rest"]["weights"] = ints(4, "group", 8)
    found = compressed_tensors.recognise(
        contents(packed(groups=4), {"quant_method": "compressed-tensors", "config_groups": groups})
    )
    assert not found.faults  # both fit, and say the same
    groups["rest"]["weights"] = ints(4, "group", 10)
    assert "fit it, but they contradict each other" in fault(
        contents(packed(groups=4), {"quant_method": "compressed-tensors", "config_groups": groups})
    )


@pytest.mark.parametrize(
    ("preset", "tensors"),
    [
        ("W4A16", packed(4, columns=256, groups=2)),
        ("w8a16", packed(8, columns=256, groups=2)),
        ("FP8_DYNAMIC", {"m.weight": torch.zeros(4, 8).to(E4M3), "m.weight_scale": torch.ones(4, 1)}),
        ("FP8_BLOCK", {"m.weight": torch.zeros(4, 200).to(E4M3), "m.weight_scale": torch.ones(1, 2)}),
        ("W8A8", {"m.weight": torch.zeros(4, 8, dtype=torch.int8), "m.weight_scale": torch.ones(4, 1)}),
    ],
)
def test_groups_that_are_the_name_of_a_preset(preset, tensors):
    read(contents(tensors, {"quant_method": "compressed-tensors", "config_groups": {preset: ["Linear"]}}))


def test_the_compute_dtype_is_that_of_the_scales_or_of_the_model():
    half = {**packed(), "m.weight_scale": torch.ones(4, 1, dtype=torch.float16)}
    assert read(contents(half, config(ints(4)))).dtype == torch.float16
    assert read(contents(packed(), config(ints(4)))).dtype == torch.bfloat16
    assert read(contents(packed(), config(ints(4)), dtype="float16")).dtype == torch.float16


def test_what_belongs_to_activations_is_spare():
    tensors = {
        **packed(),
        "m.input_scale": torch.ones(1),
        "m.input_zero_point": torch.zeros(1),
        "attn.k_scale": torch.ones(1),
        "m.bias": torch.ones(4),
    }
    found = compressed_tensors.recognise(contents(tensors, config(ints(4))))
    used = set(found.weights["m.weight"].keys.values())
    assert found.spare - used == {"m.input_scale", "m.input_zero_point", "attn.k_scale", "m.weight_shape"}


def test_older_files_keep_the_config_elsewhere():
    settings_ = config(ints(4))
    for beside in ({"compression_config": settings_}, {"compression_config": {"quantization_config": settings_}}):
        read(contents(packed(), None, **beside))
    read(contents(packed(), None, text_config={"quantization_config": settings_}))


def test_floats_of_old_releases_have_zero_points_of_zero():
    tensors = {
        "m.weight": torch.zeros(4, 8).to(E4M3),
        "m.weight_scale": torch.ones(1),
        "m.weight_zero_point": torch.zeros(1).to(E4M3),
    }
    read(contents(tensors, config(floats(8, "tensor"))))
    tensors["m.weight_zero_point"] = torch.ones(1).to(E4M3)
    assert "no zero point" in fault(contents(tensors, config(floats(8, "tensor"))))


# -- without a config ---------------------------------------------------------------------------------------------


def test_packed_tensors_speak_for_themselves_where_they_can():
    assert read(contents(packed(4, columns=128, groups=4))).scheme.block == (1, 32)
    assert read(contents(packed(3, columns=128))).scheme.bits == 3
    for scheme in (mxfp4(), MXFP6, NVFP4):
        weight = tt.Weight.encode(filled((4, 128), torch.float32, "normal", 0), scheme)
        same_values(read(contents(compressed_tensors.pack("m.weight", weight))), weight)


def test_what_tensors_leave_open_is_a_fault_that_says_what_is_missing():
    assert "config.json has no num_bits" in fault(contents(packed(4, columns=8)))
    assert "config.json has no num_bits" in fault(contents(packed(8)))  # or 7 bits in whole words
    assert "config.json has no group_size" in fault(contents(packed(4, columns=128, groups=3)))
    wide = {**packed(3, columns=15), "m.weight_shape": torch.tensor([4, 15])}
    assert "config.json has no version" in fault(contents(wide, config(ints(3))))


def test_other_checkpoints_are_left_to_others():
    plain = {"m.weight": torch.ones(2, 2)}
    assert compressed_tensors.recognise(contents(plain)) is None
    assert compressed_tensors.recognise(contents(packed(), {"quant_method": "gptq"})) is None


# -- faults -------------------------------------------------------------------------------------------------------

FP8 = {"m.weight": torch.zeros(4, 8).to(E4M3), "m.weight_scale": torch.ones(4, 1)}
INT8 = {"m.weight": torch.zeros(4, 8, dtype=torch.int8), "m.weight_scale": torch.ones(4, 1)}
MX = {
    "m.weight_packed": torch.zeros(4, 32, dtype=torch.uint8),
    "m.weight_scale": torch.full((4, 2), 127, dtype=torch.uint8),
}
NV = {
    "m.weight_packed": torch.zeros(4, 16, dtype=torch.uint8),
    "m.weight_scale": torch.ones(4, 2).to(E4M3),
    "m.weight_global_scale": torch.ones(1),
}
ORDERED = {**packed(groups=4), "m.weight_g_idx": torch.arange(32, dtype=torch.int32) % 4}


def but(tensors, **changes):
    """``tensors`` with some replaced, or (None) left out."""
    changed = {**tensors, **{f"m.{key}": value for key, value in changes.items()}}
    return {key: value for key, value in changed.items() if value is not None}


@pytest.mark.parametrize(
    ("tensors", "args", "format", "said"),
    [
        (but(packed(), weight_scale=None), ints(4), None, "weight_scale is absent"),
        (but(packed(), weight_shape=None), ints(4), None, "weight_shape is absent"),
        (but(packed(), weight_packed=None), ints(4), None, "it has a weight_scale, but no codes"),
        (but(packed(), weight=torch.ones(4, 32)), ints(4), None, "stored twice"),
        (but(packed(), weight_shape=torch.tensor([5, 32])), ints(4), None, r"weight_shape is \(5, 32\), .* \(4, 4\)"),
        (but(packed(), weight_shape=torch.tensor([4, -32])), ints(4), None, r"weight_shape is \(4, -32\)"),
        (but(packed(), weight_shape=torch.tensor([4, 2**60])), ints(4), None, "4 words a row"),
        (but(packed(), weight_shape=torch.ones(3, dtype=torch.int64)), ints(4), None, r"weight_shape is .*\(3,\)"),
        (but(packed(), weight_shape=torch.ones(2)), ints(4), None, "weight_shape is torch.float32"),
        (packed(), ints(5), None, r"4 words a row, .* \(4, 32\) in 1 groups; 5 bits need 5 words"),
        (packed(), ints(4, "group", 8), None, r"has shape \(4, 1\), but group .* needs \(4, 4\)"),
        (packed(groups=4), ints(4), None, r"has shape \(4, 4\), but channel .* needs \(4, 1\)"),
        (but(packed(), weight_scale=torch.ones(4, 1, dtype=torch.float64)), ints(4), None, "float64, not"),
        (packed(), ints(4, symmetric=False), None, "weight_zero_point is absent"),
        (
            but(packed(), weight_zero_point=torch.zeros(2, 1, dtype=torch.int32)),
            ints(4),
            None,
            r"zero points of shape \(2, 1\)",
        ),
        (but(packed(), weight_zero_point=torch.zeros(3, 1, dtype=torch.int8)), ints(4), None, "weight_zero_point has"),
        (but(packed(), weight_zero_point=torch.zeros(4, 1)), ints(4), None, "weight_zero_point is torch.float32"),
        (
            but(ORDERED, weight_g_idx=torch.full((32,), 4, dtype=torch.int32)),
            ints(4, "group", 8),
            None,
            "groups 4 to 4",
        ),
        (but(ORDERED, weight_g_idx=torch.arange(32, dtype=torch.int32) % 4 - 1), ints(4, "group", 8), None, "-1 to 2"),
        (but(ORDERED, weight_g_idx=torch.zeros(31, dtype=torch.int32)), ints(4, "group", 8), None, "weight_g_idx has"),
        (but(ORDERED, weight_g_idx=torch.zeros(32)), ints(4, "group", 8), None, "weight_g_idx is torch.float32"),
        (packed(), floats(4, "group", 16), None, "stored as pack-quantized, but config.json says float4"),
        (packed(), ints(4), "int-quantized", "stored as pack-quantized, but config.json says int-quantized"),
        (packed(), ints(4), "dense", "stored as pack-quantized, but config.json says dense"),
        (but(FP8, weight_scale=None), floats(8), None, "float8_e4m3fn and has no weight_scale"),
        (but(INT8, weight_scale=None), ints(8), None, "int8 and has no weight_scale"),
        (but(INT8, weight=None), ints(8), None, "no codes"),
        (but(FP8, weight_scale=torch.ones(5, 1)), floats(8), None, r"\(5, 1\), but channel .* needs \(4, 1\)"),
        (FP8, floats(8, "block", block_structure=[2, 4]), None, r"needs \(2, 2\)"),
        (FP8, floats(8, symmetric=False), None, "no zero point"),
        (FP8, ints(8), None, "stored as float-quantized, but config.json says int8"),
        (INT8, floats(8), None, "stored as int-quantized, but config.json says float8"),
        (but(INT8, weight=torch.ones(4, 8)), ints(8), None, "quantized at run time"),
        (
            but(INT8, weight=torch.ones(4, 8, dtype=torch.uint8)),
            ints(8),
            None,
            "uint8 with a weight_scale, not torch.int8",
        ),
        (but(INT8, weight_zero_point=torch.zeros(4, 1, dtype=torch.int32)), ints(8), None, "int32, not torch.int8"),
        (but(FP8, weight_scale=torch.ones(4, 2, dtype=torch.uint8)), floats(8, "group", 32), None, "mxfp8|by 32"),
        (MX, floats(4, "group", 16), None, "2 scales a row, which is not float4 in groups of 16"),
        (MX, floats(4, "channel"), None, "a scale for each group"),
        (MX, floats(6, "group", 32), None, "32 bytes and 2 scales a row"),
        (but(MX, weight_packed=torch.zeros(4, 32)), floats(4, "group", 32), None, "float32 .* not rows of torch.int32"),
        (but(MX, weight_scale=None), floats(4, "group", 32), None, "weight_scale is absent"),
        (but(NV, weight_global_scale=None), floats(4, "tensor_group", 16), None, "weight_global_scale is absent"),
        (but(NV, weight_global_scale=torch.ones(2)), floats(4, "tensor_group", 16), None, r"shape \(2,\)"),
        (
            but(NV, weight_scale=torch.ones(4, 2)),
            floats(4, "tensor_group", 16),
            None,
            "float32, not torch.float8_e4m3fn",
        ),
        (NV, floats(4, "tensor_group", 8), None, r"needs \(4, 4\)"),
        (NV, floats(4, "tensor_group", 16), "mxfp4-pack-quantized", "says mxfp4-pack-quantized"),
    ],
)
def test_faults_say_both_sides(tensors, args, format, said):
    text = fault(contents(tensors, config(args, format)))
    assert re.search(said, text), text


def test_modules_that_the_config_leaves_out_and_the_file_quantizes():
    assert "ignores its module" in fault(contents(packed(), config(ints(4), ignore=["m"])))
    assert "ignores its module" in fault(contents(packed(), config(ints(4), ignore=["re:m"])))
    assert "no config group" in fault(contents(packed(), config(ints(4), targets=["other"])))
    assert "no config group" in fault(contents(packed(), config(None)))
    assert "no config group" in fault(contents(packed(), {"quant_method": "compressed-tensors"}))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("marlin-24", {"format": "marlin-24"}),
        ("marlin-24", {"format": "marlin_24"}),
        ("sparse-24-bitmask", {"sparsity_config": {"format": "sparse-24-bitmask"}}),
        ("sparse-bitmask", {"sparsity_config": {"format": "sparse-bitmask"}}),
        ("transform_config", {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}),
        ("unknown format 'zip'", {"format": "zip"}),
        ("format is 7", {"format": 7}),
        ("num_bits 9", {"config_groups": {"g": {"targets": ["Linear"], "weights": ints(9)}}}),
        ("num_bits True", {"config_groups": {"g": {"targets": ["Linear"], "weights": ints(True)}}}),
        ("group_size", {"config_groups": {"g": {"targets": ["Linear"], "weights": ints(4, "group", 0)}}}),
        ("group_size None", {"config_groups": {"g": {"targets": ["Linear"], "weights": ints(4, "group")}}}),
        ("block_structure", {"config_groups": {"g": {"targets": ["Linear"], "weights": floats(8, "block")}}}),
        ("strategy", {"config_groups": {"g": {"targets": ["Linear"], "weights": ints(4, "token")}}}),
        ("preset", {"config_groups": {"W99": ["Linear"]}}),
        ("not a list of names", {"config_groups": {"g": {"targets": "Linear", "weights": ints(4)}}}),
        ("not a list of names", {"ignore": "lm_head"}),
        ("regular expression", {"ignore": ["re:("]}),
    ],
)
def test_what_is_known_and_not_read_is_refused_by_name(said, told):
    with pytest.raises(CheckpointError, match=f"config.json: .*{said}"):
        compressed_tensors.recognise(contents(packed(), {**config(ints(4)), **told}))


def test_fields_of_other_releases_are_no_obstacle():
    told = config(
        ints(4, observer="minmax", observer_kwargs={}, actorder="group", zp_dtype=None, novel=3),
        sparsity_config={},
        transform_config={},
        kv_cache_scheme={"num_bits": 8},
        novel=[1],
    )
    read(contents(packed(), told))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)
TOP = ("config_groups", "ignore", "format", "version", "sparsity_config", "transform_config", "quantization_status")
FIELDS = ("num_bits", "type", "strategy", "group_size", "block_structure", "symmetric", "actorder", "dynamic")


@examples(60)
@given(data=st.data())
def test_no_config_crashes(data):
    """Only refusals and faults, whatever a field holds."""
    args, group = ints(4, "group", 8), {"targets": ["Linear"]}
    told = config(args, "pack-quantized")
    for where, names in ((args, FIELDS), (group, ("targets", "weights", "format")), (told, TOP)):
        for field in data.draw(st.lists(st.sampled_from(names), max_size=2, unique=True)):
            where[field] = data.draw(JUNK)
    if "weights" not in group:
        group["weights"] = args
    if isinstance(told["config_groups"], dict) and "group_0" in told["config_groups"]:
        told["config_groups"]["group_0"] = group
    for tensors in (packed(groups=4), FP8, INT8, MX, NV, ORDERED):
        try:
            found = compressed_tensors.recognise(contents(tensors, told))
        except CheckpointError as error:
            assert "\n" not in str(error)
            continue
        assert (found is None) or (len(found.weights) + len(found.faults) == 1)


# -- from files ---------------------------------------------------------------------------------------------------


def test_rows_of_what_is_stored_as_we_keep_it_are_read_alone(tmp_path):
    weight = tt.Weight.encode(filled((8, 32), torch.float32, "normal", 0), Affine(8, block=(4, 16)))
    save_file(compressed_tensors.pack("m.weight", weight), tmp_path / "model.safetensors")
    told = compressed_tensors.announce({"m.weight": weight.spec}, [])["config.json"]
    (tmp_path / "config.json").write_text(json.dumps(told))
    with tt.open(tmp_path) as checkpoint:
        assert checkpoint.format == "compressed-tensors"
        rows = checkpoint.get_slice("m.weight")[4:8]
        assert isinstance(rows, tt.Weight)
        assert same_bits(rows.to(torch.float32).dequantize(), weight.dequantize()[4:8])
