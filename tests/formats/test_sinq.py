"""SINQ: every packing that is read, from tensors made here, and faults by name.

How they are laid out is derived from sinq 0.2.0: ``Quantizer`` (quantizer.py) and ``BitPack`` (bitpack.py) for the
tensors, ``save_weights_safetensors`` (patch_model.py) for names and settings; tests/golden has what that package wrote.
"""

import json
import re
import tempfile

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file

import torchtether as tt
from tests.formats.folders import fault, opened
from torchtether.files.opening import SINQ_SETTINGS

BESIDE = SINQ_SETTINGS.removesuffix(".json")

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
PACKINGS = {8: ("8bit_u8", 1), 6: ("6bit_32", 5), 5: ("5bit_32", 6), 4: ("4bit_u8", 2), 3: ("3bit_32", 10)}
PACKINGS |= {2: ("2bit_u8", 4), 1: ("1bit_u8", 8)}
CONFIG = {"quantization_config": {"quant_method": "sinq"}}


def rounded(values, dtype):
    """What a step in ``dtype`` gives; its operands are exact in float64, and so is it before it is rounded."""
    return values.to(dtype).double()


def made(rows, columns, group_size, bits, dtype=BF16, own=F16, coded=True, seed=0):
    """Tensors and settings of one module, and what they decode to: a difference and two products, each rounded."""
    draw = torch.Generator().manual_seed(seed)
    groups, (packing, count) = rows * columns // group_size, PACKINGS[bits]
    codes = torch.randint(0, 2**bits, (groups, group_size), generator=draw)
    steps = -(-groups // count)
    words = torch.zeros(steps, group_size, dtype=torch.int64)
    for group in range(groups):
        words[group % steps] |= codes[group] << bits * (count - 1 - group // steps)
    tensors = {"W_q": words.to(torch.uint8 if packing.endswith("u8") else torch.int32)}
    tensors["meta.scale2"] = torch.rand(1, columns, generator=draw).add(0.5).to(own)
    meta = {"shape": [rows, columns], "packing": packing, "compute_dtype": str(dtype), "method": "sinq"}
    numbers = {}
    for role, tile in (("scale", 32), ("zero", groups)):
        if not coded:
            numbers[role] = tensors[f"meta.{role}"] = torch.rand(groups, 1, generator=draw).add(0.1).to(own)
            continue
        x = torch.randint(0, 256, (tile, groups // tile), generator=draw, dtype=torch.uint8)
        s, m = (torch.rand(1, groups // tile, generator=draw).add(0.1).to(own) for _ in range(2))
        numbers[role] = rounded(rounded(x.double() * s.double(), own) + m.double(), own).view(-1, 1)
        tensors |= {f"meta.{role}.x": x, f"meta.{role}.s": s, f"meta.{role}.m": m}
        meta[f"{role}.shape"] = [groups, 1]
    wide = torch.promote_types(dtype, own)
    values = rounded(codes - numbers["zero"].double(), wide)
    values = rounded(values * numbers["scale"].double(), wide).view(rows, columns)
    values = rounded(rounded(values * tensors["meta.scale2"].double(), wide), dtype).to(dtype)
    return {f"m.{key}": tensor for key, tensor in tensors.items()}, {"m": {"meta": meta}}, values


@example(2, 20, 5, BF16, F16, True, 0)  # groups that end within a byte
@given(
    per_row=st.integers(1, 3),
    group_size=st.sampled_from((8, 20, 64)),
    bits=st.sampled_from(list(PACKINGS)),
    dtype=st.sampled_from((BF16, F16, F32)),
    own=st.sampled_from((F16, F32)),
    coded=st.booleans(),
    seed=st.integers(0, 2**31 - 1),
)
def test_every_packing(per_row, group_size, bits, dtype, own, coded, seed):
    tensors, said, values = made(32, per_row * group_size, group_size, bits, dtype, own, coded, seed)
    with opened({**tensors, "m.bias": torch.ones(32)}, config=CONFIG, **{BESIDE: said}) as checkpoint:
        assert checkpoint.format == "sinq"
        assert not checkpoint.faults
        assert list(checkpoint) == ["m.bias", "m.weight"]
        weight = checkpoint["m.weight"]
        assert weight.dtype == dtype
        assert torch.equal(weight.dequantize(), values)


def test_without_config_its_keys_are_enough():
    tensors, said, values = made(32, 64, 32, 4)
    with opened(tensors, **{BESIDE: said}) as checkpoint:
        assert torch.equal(checkpoint["m.weight"].dequantize(), values)


def test_dimensions_of_1_may_lie_anywhere():
    tensors, said, values = made(32, 64, 32, 4)
    turned = {key: tensor.t().contiguous() if 1 in tensor.shape else tensor for key, tensor in tensors.items()}
    with opened(turned, config=CONFIG, **{BESIDE: said}) as checkpoint:
        assert torch.equal(checkpoint["m.weight"].dequantize(), values)


GOOD, SAID, _ = made(32, 64, 32, 4)


def changed(**tensors):
    both = {**GOOD, **{f"m.{key.replace('__', '.')}": tensor for key, tensor in tensors.items()}}
    return {key: tensor for key, tensor in both.items() if tensor is not None}


def meta(**settings):
    settings = {key.replace("__", "."): value for key, value in settings.items()}
    return {"m": {"meta": {**SAID["m"]["meta"], **settings}}}


@pytest.mark.parametrize(
    ("tensors", "said", "words"),
    [
        (GOOD, {}, f"its settings are absent from {SINQ_SETTINGS}"),
        (GOOD, {"m": 3}, "its settings are absent"),
        (GOOD, meta(packing="4bit_u4"), "its packing is '4bit_u4', not one of 8bit_u8"),
        (GOOD, meta(packing=["4bit_u8"]), r"its packing is \['4bit_u8'\]"),
        (GOOD, meta(compute_dtype="torch.load"), "its compute_dtype is 'torch.load'"),
        (GOOD, meta(method="sinq_nf4"), "its method is 'sinq_nf4', but table codes"),
        (GOOD, meta(shape=[32]), r"its shape is \[32\], not two positive integers"),
        (GOOD, meta(shape=[32, -64]), "not two positive integers"),
        (GOOD, meta(shape=[32, 2.0]), "not two positive integers"),
        (GOOD, meta(shape=[32, 65]), r"whose columns do not divide those of \(32, 65\)"),
        (GOOD, meta(shape=[64, 64], scale__shape=[128, 1], zero__shape=[128, 1]), r"its packed has shape \(32, 32\)"),
        (GOOD, meta(packing="3bit_32"), "its packed is torch.uint8, not torch.int32"),
        (GOOD, meta(scale__shape=[2, 32, 1]), "not two positive integers"),
        (GOOD, meta(scale__shape=[32, 2]), r"its scale has shape \[32, 2\], not \(64, 1\)"),
        (changed(meta__scale2=None), SAID, "its scale2 is absent"),
        (changed(meta__zero__m=None), SAID, "its zero.m is absent"),
        (changed(meta__zero__m=torch.ones(1, 1)), SAID, "its scales and zeros are torch.float16"),
        (changed(meta__scale__x=torch.ones(32, 2)), SAID, "its scale.x is torch.float32, not torch.uint8"),
        (changed(meta__scale2=torch.ones(1, 63)), SAID, r"its scale2 has shape \(1, 63\), not \(1, 64\)"),
    ],
)
def test_what_is_wrong(tensors, said, words):
    got = fault(tensors, config=CONFIG, **{BESIDE: said})
    assert re.search(words, got), got


# -- writing ------------------------------------------------------------------------------------------------------


@given(
    rows=st.integers(1, 9),
    per_row=st.integers(1, 3),
    group_size=st.sampled_from((8, 20, None)),
    bits=st.sampled_from(list(PACKINGS)),
    kind=st.sampled_from(("affine", "unsigned", "symmetric", "offset", "biased")),
    dtype=st.sampled_from((BF16, F16, F32)),
    own=st.sampled_from((F16, F32, BF16)),
    seed=st.integers(0, 2**31 - 1),
)
def test_written_and_read_again(rows, per_row, group_size, bits, kind, dtype, own, seed):
    """The same values, whatever dtypes scales and model have; words have room for whole groups alone."""
    more = {"signed": kind in ("affine", "symmetric"), "symmetric": kind in ("symmetric", "offset")}
    block, wide = (1, group_size), torch.promote_types(dtype, own)
    inner = tt.Affine(bits=bits, block=block, scale_dtype=own, **more)
    if kind == "biased":
        inner = tt.Biased(bits, block, own, wide, bias_first=True)
    values = torch.randn((rows, per_row * (group_size or 24)), generator=torch.Generator().manual_seed(seed))
    weight = tt.Weight.encode(values.to(dtype), tt.ColumnScaled(inner))
    with tempfile.TemporaryDirectory() as folder:
        tt.save({"m.weight": weight, "n.weight": torch.ones(2, 2)}, folder, format="sinq")
        with tt.open(folder) as checkpoint:
            assert (checkpoint.format, sorted(checkpoint)) == ("sinq", ["m.weight", "n.weight"])
            assert torch.equal(checkpoint["m.weight"].dequantize(), weight.dequantize())


@pytest.mark.parametrize("max_shard_size", [None, 3000])
def test_every_file_is_in_an_index(tmp_path, max_shard_size):
    """Which is how the package finds them; and what was saved there before is gone."""
    tt.save({"old.weight": torch.ones(2)}, tmp_path)
    state = {f"{n}.weight": tt.Weight.encode(torch.randn(32, 64), tt.sinq()) for n in "ab"}
    tt.save({**state, "c.weight": torch.ones(2)}, tmp_path, format="sinq", max_shard_size=max_shard_size)
    found = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    stored = {key: path.name for path in tmp_path.glob("*.safetensors") for key in load_file(path)}
    assert found == stored
    assert len(set(found.values())) == (1 if max_shard_size is None else 2)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["nbits"], config["modules_to_not_convert"]) == ("sinq", 4, ["c"])
    tt.save({"new.weight": torch.ones(2)}, tmp_path)
    assert not (tmp_path / "model.safetensors.index.json").exists()


@pytest.mark.parametrize(
    ("scheme", "dtype", "shape"),
    [
        (tt.int4(), F32, (32, 64)),
        (tt.nvfp4(), BF16, (32, 64)),
        (tt.ColumnScaled(tt.nvfp4()), BF16, (32, 64)),
        (tt.sinq(7), F32, (32, 64)),
        (tt.sinq(4, 48), F32, (32, 64)),
        (tt.sinq(), torch.float64, (32, 64)),
        (tt.sinq(), F32, (2, 32, 64)),
        (tt.ColumnScaled(tt.Affine(bits=4, block=(32, 32))), F32, (32, 64)),
        (tt.ColumnScaled(tt.Biased(4, (1, 32))), F32, (32, 64)),
        (tt.ColumnScaled(tt.Biased(4, (1, 32), F16, F16, bias_first=True)), F32, (32, 64)),
        (tt.ColumnScaled(tt.Affine(bits=4, block=(1, 32), unit=0.5)), F32, (32, 64)),
    ],
)
def test_there_are_no_words_for_others(tmp_path, scheme, dtype, shape):
    weight = tt.Weight.encode(torch.randn(shape).to(dtype), scheme)
    with pytest.raises(tt.SchemeError, match=r"m\.weight: SINQ cannot store "):
        tt.save({"m.weight": weight}, tmp_path / "x", format="sinq")
    assert not (tmp_path / "x").exists()
