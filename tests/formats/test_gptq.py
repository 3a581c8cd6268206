"""GPTQ, against arithmetic written out with numpy; tests/peers has packages, tests/golden what they wrote."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchtether as tt
from tests.formats.linears import drawn, fault, gptq, less_one, opened, values, words, write
from torchtether.cli.main import main

WIDTHS = (2, 3, 4, 5, 6, 7, 8)
SAID = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": False}


def neighbours(columns, size):
    return np.arange(columns) // size


@given(
    bits=st.sampled_from(WIDTHS),
    rows=st.integers(1, 70),
    columns=st.integers(2, 150),
    size=st.sampled_from((8, 20, 32, 64, -1)),
    version=st.sampled_from((1, 2)),
    order=st.sampled_from(("none", "zeros", "neighbours", "shuffled")),
    dtype=st.sampled_from((torch.float16, torch.bfloat16, torch.float32)),
    seed=st.integers(0, 999),
)
def test_any_shape_width_version_and_order(bits, rows, columns, size, version, order, dtype, seed, tmp_path_factory):
    if order == "none":  # the tensors then say how many columns there are in whole words only
        columns = -(-columns // 32) * 32
    whole = columns if size == -1 else size
    groups = -(-columns // whole)
    codes, zeros, scales = drawn(rows, columns, groups, bits=bits, seed=seed, dtype=dtype)
    g_idx = neighbours(columns, whole)
    if order == "shuffled":
        g_idx = np.random.default_rng(seed).permutation(g_idx)
    listed = {"none": None, "zeros": np.zeros(columns, int)}.get(order, g_idx)
    tensors = gptq(codes, zeros, scales, bits=bits, version=version, g_idx=listed)
    label = {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    folder = write(tmp_path_factory.mktemp("gptq"), tensors, {**SAID, "bits": bits, "group_size": size, **label})
    found, spec = opened(folder, dtype=torch.float32)
    assert torch.equal(found, values(codes, zeros, scales, g_idx, torch.float32))
    assert spec.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float16)
    assert spec.scheme.act_order == (not np.array_equal(g_idx, neighbours(columns, whole)))


def test_values_are_rounded_once(tmp_path):
    codes, zeros, scales = drawn(64, 256, 2)
    folder = write(tmp_path, gptq(codes, zeros, scales), SAID)
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(opened(folder, dtype=dtype)[0], values(codes, zeros, scales, neighbours(256, 128), dtype))


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("stored", [1, 2])
@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
def test_labels_of_symmetric_weights_need_not_be_true(tmp_path, bits, stored, label):
    codes, zeros, scales = drawn(32, 256, 2, bits=bits)
    zeros[:] = 1 << (bits - 1)
    config = {**SAID, "bits": bits, "sym": True, "checkpoint_format": label}
    folder = write(tmp_path, gptq(codes, zeros, scales, bits=bits, version=stored), config)
    assert torch.equal(opened(folder)[0], values(codes, zeros, scales, neighbours(256, 128)))


def test_labels_of_asymmetric_weights_are_believed(tmp_path):
    codes, zeros, scales = drawn(32, 256, 2)
    zeros[:] = 8
    for version, label in ((1, "gptq"), (2, "gptq_v2")):
        tensors = gptq(codes, zeros, scales, version=2)
        folder = write(tmp_path / label, tensors, {**SAID, "checkpoint_format": label})
        wanted = values(codes, zeros + (version == 1), scales, neighbours(256, 128))
        assert torch.equal(opened(folder)[0], wanted)


def test_one_odd_zero_point_makes_a_symmetric_label_count(tmp_path):
    codes, zeros, scales = drawn(32, 256, 2)
    zeros[:] = 8
    zeros[3, 1] = 5
    tensors = gptq(codes, zeros, scales, version=2)
    folder = write(tmp_path, tensors, {**SAID, "sym": True, "checkpoint_format": "gptq_v2"})
    assert torch.equal(opened(folder)[0], values(codes, zeros, scales, neighbours(256, 128)))


def test_a_zero_point_of_zero_has_borrowed_from_its_neighbour(tmp_path):
    codes, zeros, scales = drawn(32, 256, 2)
    zeros[:] = 7
    zeros[4, 0] = 0
    stored = less_one(zeros.T, 4)
    assert [(int(stored[0, 0]) >> at) & 15 for at in range(0, 32, 4)] == [6, 6, 6, 6, 15, 5, 6, 6]
    folder = write(tmp_path, gptq(codes, zeros, scales), SAID)
    assert torch.equal(opened(folder)[0], values(codes, zeros, scales, neighbours(256, 128)))


# -- where the config is, and without one -------------------------------------------------------------------------


def test_config_of_autogptq_beside_the_file(tmp_path):
    codes, zeros, scales = drawn(32, 200, 3)
    side = {"bits": 4, "group_size": 80, "sym": False, "desc_act": False, "damp_percent": 0.01}
    g_idx = neighbours(200, 80)
    folder = write(tmp_path, gptq(codes, zeros, scales, g_idx=g_idx), quantize_config=side)
    assert torch.equal(opened(folder)[0], values(codes, zeros, scales, g_idx))
    marlin = write(
        tmp_path / "marlin", {"m.B": torch.zeros(2, 2, dtype=torch.int32)}, quantize_config={"is_marlin_format": True}
    )
    with pytest.raises(tt.errors.CheckpointError, match="marlin"):
        tt.open(marlin)


def test_config_beside_a_float_checkpoint_changes_nothing(tmp_path):
    with tt.open(write(tmp_path, {"m.weight": torch.ones(2, 2)}, quantize_config={"bits": 4})) as checkpoint:
        assert checkpoint.format == "safetensors"
    with tt.open(write(tmp_path / "named", {"m.weight": torch.ones(2, 2)}, SAID)) as checkpoint:
        assert not checkpoint.faults
        assert torch.equal(checkpoint["m.weight"], torch.ones(2, 2))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("order", ["none", "neighbours", "shuffled"])
def test_without_a_config_as_far_as_the_tensors_decide(tmp_path, bits, order):
    columns, size = (256, 64) if order == "none" else (224, 96)  # the last group shorter
    codes, zeros, scales = drawn(64, columns, -(-columns // size), bits=bits)
    g_idx = neighbours(columns, size)
    g_idx = np.random.default_rng(0).permutation(g_idx) if order == "shuffled" else g_idx
    listed = None if order == "none" else g_idx
    folder = write(tmp_path, gptq(codes, zeros, scales, bits=bits, g_idx=listed))
    found, spec = opened(folder)
    assert torch.equal(found, values(codes, zeros, scales, g_idx))
    assert (spec.scheme.bits, spec.scheme.block) == (bits, (1, size))


@pytest.mark.parametrize(("columns", "groups"), [(192, 2), (224, 3), (288, 3)])
def test_without_a_config_groups_of_any_size_are_not_guessed(tmp_path, columns, groups):
    text = fault(write(tmp_path, gptq(*drawn(64, columns, groups))))
    assert f"{groups} groups over {columns} columns" in text
    assert "Put the config" in text


def test_modules_with_options_of_their_own(tmp_path):
    plain, small, coarse = drawn(32, 256, 2), drawn(32, 256, 8, bits=8, seed=1), drawn(32, 256, 1, bits=3, seed=2)
    tensors = {
        **gptq(*plain, name="layers.0.up"),
        **gptq(*small, bits=8, name="layers.0.down"),
        **gptq(*coarse, bits=3, name="layers.10.down"),
        "lm_head.weight": torch.ones(4, 4),
    }
    dynamic = {
        r"+:.*\.0\.down": {"bits": 8, "group_size": 32},
        r".*down": {"bits": 3, "group_size": -1},
        r"-:lm_head": {},
        r"-:.*\.up": {"bits": 2},
    }
    folder = write(tmp_path, tensors, {**SAID, "dynamic": dynamic})
    for name, drawing, size in (("0.up", plain, 128), ("0.down", small, 32), ("10.down", coarse, 256)):
        found, _ = opened(folder, f"layers.{name}.weight")
        assert torch.equal(found, values(*drawing, neighbours(256, size)))


def test_loads_into_modules_and_keeps_biases(tmp_path):
    drawing = drawn(64, 256, 2)
    g_idx = np.random.default_rng(0).permutation(neighbours(256, 128))
    tensors = {**gptq(*drawing, g_idx=g_idx, name="0"), "0.bias": torch.arange(64.0)}
    model = torch.nn.Sequential(torch.nn.Linear(256, 64))
    report = tt.load(model, write(tmp_path, tensors, SAID))
    assert not report.missing_keys
    assert not report.unexpected_keys
    assert torch.equal(model[0].weight.detach().half().dequantize(), values(*drawing, g_idx))
    assert torch.equal(model[0].bias, tensors["0.bias"])
    x = torch.randn(3, 256)
    wanted = torch.nn.functional.linear(x, model[0].weight.detach().dequantize(), model[0].bias)
    torch.testing.assert_close(model(x), wanted)


def test_zeros_that_autogptq_stores_as_biases_are_no_tensors_of_a_model_without_them(tmp_path):
    """They load where the model has biases, are left out where it has none, and are said where they are not zeros."""
    tensors = gptq(*drawn(64, 256, 2))
    for last, is_left_out in ((0.0, True), (1e-6, False)):
        bias = torch.tensor([0.0] * 63 + [last]).half()
        path = write(tmp_path, {**tensors, "m.bias": bias}, SAID)
        for has_bias in (True, False):
            with tt.on_meta():
                model = torch.nn.ModuleDict({"m": torch.nn.Linear(256, 64, bias=has_bias)})
            if not has_bias and not is_left_out:
                with pytest.raises(tt.LoadError, match=r"m\.bias"):
                    tt.load(model, path)
                assert tt.plan_load(model, path, strict=False).unexpected_keys == ("m.bias",)
                continue
            assert tt.load(model, path).unexpected_keys == ()
            assert not has_bias or torch.equal(model["m"].bias, bias)


@pytest.mark.parametrize("format", ["native", "compressed-tensors"])
def test_convert_leaves_out_zeros_that_autogptq_stores_as_biases(tmp_path, capsys, format):
    drawing, zeros, ones = drawn(64, 256, 2), torch.zeros(64).half(), torch.ones(64).half()
    tensors = {**gptq(*drawing, name="a"), "a.bias": zeros, **gptq(*drawing, name="b"), "b.bias": ones}
    path, made = write(tmp_path, tensors | {"norm.bias": zeros}, SAID), tmp_path / "made"
    assert main(["convert", str(path), str(made), "--format", format]) == 0
    assert "left out, zeros that gptq adds to a model: a.bias\n" in capsys.readouterr().out
    assert main(["verify", str(made), "--against", str(path)]) == 0
    with tt.open(made) as checkpoint:
        assert set(checkpoint) == {"a.weight", "b.weight", "b.bias", "norm.bias"}
    with tt.on_meta():
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(256, 64, bias=False), "b": torch.nn.Linear(256, 64)})
        model["norm"] = torch.nn.LayerNorm(64)
        model["norm"].weight = None
    assert tt.load(model, made).unexpected_keys == ()


def test_a_module_without_a_name(tmp_path):
    drawing = drawn(32, 256, 2)
    tensors = {key.removeprefix("m."): tensor for key, tensor in gptq(*drawing).items()}
    assert torch.equal(opened(write(tmp_path, tensors, SAID), "weight")[0], values(*drawing, neighbours(256, 128)))


# -- what is wrong ------------------------------------------------------------------------------------------------


def spoilt(**changes):
    """The tensors of a good module, with some changed (``None``: left out)."""
    codes, zeros, scales = drawn(32, 256, 2)
    tensors = gptq(codes, zeros, scales, g_idx=neighbours(256, 128))
    for role, change in changes.items():
        key = f"m.{role}"
        if change is None:
            del tensors[key]
        else:
            tensors[key] = change(tensors.get(key))
    return tensors


FAULTS = {
    "no qweight": ({"qweight": None}, {}, "but no qweight"),
    "no scales": ({"scales": None}, {}, "but no scales"),
    "no qzeros": ({"qzeros": None}, {}, "but no qzeros"),
    "codes of int64": ({"qweight": lambda t: t.long()}, {}, "torch.int64, not torch.int32"),
    "codes of three dimensions": ({"qweight": lambda t: t[None]}, {}, "(1, 32, 32)"),
    "empty codes": ({"qweight": lambda t: t[:0]}, {}, "(0, 32)"),
    "zero points of floats": ({"qzeros": lambda t: t.float()}, {}, "torch.float32, not torch.int32"),
    "integer scales": ({"scales": lambda t: t.int()}, {}, "torch.int32, not"),
    "scales of other outputs": ({"scales": lambda t: t[:, 1:]}, {}, "(2, 31)"),
    "too few zero points": ({"qzeros": lambda t: t[:1]}, {}, "(1, 4)"),
    "other bits": ({}, {"bits": 8}, "fit 4 bits, and the config says 8"),
    "other groups": ({}, {"group_size": 64}, "2 groups, but group_size 64 over 256 columns gives 4"),
    "a group too high": ({"g_idx": lambda t: t + 1}, {}, "groups 1 to 2, but its scales are for 2"),
    "a group below 0": ({"g_idx": lambda t: t - 1}, {}, "groups -1 to 0, but its scales are for 2"),
    "a float g_idx": ({"g_idx": lambda t: t.float()}, {}, "g_idx is torch.float32"),
    "a short g_idx": ({"g_idx": lambda t: t[1:9]}, {}, "fit no number of bits"),
    "a g_idx of two dimensions": ({"g_idx": lambda t: t[None]}, {}, "fit no number of bits"),
    "a weight besides": ({"weight": lambda t: torch.ones(32, 256)}, {}, "stored twice, as m.weight"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faults(tmp_path, case):
    changes, said, text = FAULTS[case]
    assert text in fault(write(tmp_path, spoilt(**changes), {**SAID, **said}))


def test_faults_stop_a_load_before_it_begins(tmp_path):
    model = torch.nn.ModuleDict({"m": torch.nn.Linear(256, 32, bias=False)})
    before = model["m"].weight.detach().clone()
    with pytest.raises(tt.errors.LoadError, match="m.weight: its scales are for 2 groups"):
        tt.load(model, write(tmp_path, spoilt(), {**SAID, "group_size": 64}), strict=False)
    assert torch.equal(model["m"].weight, before)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"checkpoint_format": "marlin"}, "Marlin"),
        ({"checkpoint_format": "gptq_marlin"}, "Marlin"),
        ({"format": "marlin_24"}, "2:4"),
        ({"checkpoint_format": "gptq_p"}, "planes"),
        ({"checkpoint_format": "bitblas"}, "BitBLAS"),
        ({"checkpoint_format": "unheard-of"}, "unheard-of"),
        ({"pack_dtype": "int64"}, "int64"),
        ({"bits": "four"}, "'four'"),
        ({"bits": 4.0}, "4.0"),
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": [128]}, "[128]"),
        ({"sym": "yes"}, "'yes'"),
        ({"dynamic": ["a"]}, "dynamic is"),
        ({"dynamic": {"+:(": {}}}, "is invalid"),
        ({"dynamic": {"m": 4}}, "dynamic['m'] is 4"),
    ],
    ids=str,
)
def test_refused(tmp_path, said, text):
    with pytest.raises(tt.errors.CheckpointError, match="config.json") as caught:
        tt.open(write(tmp_path, spoilt(), {**SAID, **said}))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


json_values = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.just(10**40), st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(("gptq", "gptq_v2", "int32", "")), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(("m", "+:m", "-:m", "*", "bits")), st.integers(0, 9), max_size=2),
)  # fmt: skip


@given(
    said=st.dictionaries(
        st.sampled_from(("bits", "group_size", "sym", "checkpoint_format", "format", "pack_dtype", "dynamic", "meta")),
        json_values,
        max_size=4,
    )
)
def test_no_config_crashes_or_changes_values(said, tmp_path_factory):
    codes, zeros, scales = drawn(32, 256, 2)
    config = {"quant_method": "gptq", **said}
    version = 2 if "gptq_v2" in (said.get("checkpoint_format") or said.get("format"),) else 1
    tensors = gptq(codes, zeros, scales, version=version)
    folder = write(tmp_path_factory.mktemp("hostile"), tensors, config)
    try:
        checkpoint = tt.open(folder)
    except tt.errors.CheckpointError:
        return
    with checkpoint:
        if not checkpoint.faults:
            wanted = values(codes, zeros, scales, neighbours(256, 128))
            assert torch.equal(checkpoint["m.weight"].half().dequantize(), wanted)


def test_the_reference_packs_as_formats_say():
    assert words(np.array([[1, 2, 3, 4, 5, 6, 7, 8, 9]]), 4).tolist() == [[-2023406815, 9]]
    assert words(np.array([[7] * 11]), 3).tolist() == [[-1, 1]]
