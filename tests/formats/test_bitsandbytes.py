"""bitsandbytes' layouts, against arithmetic written out here; tests/peers has the package itself."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchtether as tt
from tests.formats.files import decoded, faults, packed, random, write
from torchtether.formats import bitsandbytes
from torchtether.schemes import fp4

SCHEMES = {
    "nf4": tt.nf4(),
    "nf4-nested": tt.nf4(double_quant=True),
    "nf4-128": tt.nf4(block_size=128),
    "fp4": fp4(),
    "fp4-nested": fp4(True),
    "int8": bitsandbytes.INT8,
}
shapes = st.tuples(st.integers(1, 9), st.integers(1, 150))


@given(scheme=st.sampled_from(sorted(SCHEMES)), shape=shapes, seed=st.integers(0, 99))
def test_unpack_inverts_pack(scheme, shape, seed, tmp_path_factory):
    weight = tt.Weight.encode(random(*shape, dtype=torch.bfloat16, seed=seed), SCHEMES[scheme])
    tensors, said = packed(bitsandbytes, {"m.weight": weight})
    folder = write(tmp_path_factory.mktemp("bnb"), tensors, config={**said["config.json"], "dtype": "bfloat16"})
    with tt.open(folder) as checkpoint:
        assert checkpoint.format == "bitsandbytes"
        assert list(checkpoint) == ["m.weight"]
        back = checkpoint["m.weight"]
    assert back.spec == weight.spec
    assert all(torch.equal(back.parts[part], weight.parts[part]) for part in weight.parts)


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float16, torch.float32])
def test_quant_storage_is_only_a_view(tmp_path, storage):
    weight = tt.Weight.encode(random(8, 64), tt.nf4())
    tensors, said = packed(bitsandbytes, {"m.weight": weight})
    tensors["m.weight"] = tensors["m.weight"].view(-1).view(storage).view(-1, 1)
    assert torch.equal(decoded(write(tmp_path, tensors, config=said["config.json"]), "m.weight"), weight.dequantize())


def test_the_first_code_is_the_high_nibble(tmp_path):
    tensors, said = packed(bitsandbytes, {"m.weight": tt.Weight.encode(torch.tensor([[1.0, -1.0, 0.0]]), tt.nf4())})
    assert tensors["m.weight"].view(-1).tolist() == [0xF0, 0x70]  # 1 is code 15, -1 code 0, 0 code 7
    assert decoded(write(tmp_path, tensors, config=said["config.json"]), "m.weight").tolist() == [[1.0, -1.0, 0.0]]


def test_the_stored_map_is_used(tmp_path):
    tensors, said = packed(bitsandbytes, {"m.weight": tt.Weight.encode(random(4, 64), tt.nf4())})
    tensors["m.weight.quant_map"] = tensors["m.weight.quant_map"] / 2
    wanted = tt.Weight.encode(random(4, 64), tt.nf4()).dequantize() / 2
    assert torch.equal(decoded(write(tmp_path, tensors, config=said["config.json"]), "m.weight"), wanted)


def test_int8_is_scaled_by_row_maxima(tmp_path):
    codes = torch.tensor([[127, -127, 1], [0, 64, 3]], dtype=torch.int8)
    tensors = {
        "m.weight": codes,
        "m.SCB": torch.tensor([0.3, 7.0]),
        "m.weight_format": torch.zeros((), dtype=torch.uint8),
    }
    wanted = codes * torch.tensor([[0.3], [7.0]]) * 7.874015718698502e-3
    folder = write(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    assert torch.equal(decoded(folder, "m.weight", torch.float32), wanted)


def test_config_does_not_decide(tmp_path):
    """Repositories leave layers in bfloat16 that their config does not name."""
    tensors, said = packed(bitsandbytes, {"a.weight": tt.Weight.encode(random(4, 64), tt.nf4())})
    tensors["b.weight"] = random(4, 64)
    with tt.open(write(tmp_path, tensors, config=said["config.json"])) as checkpoint:
        assert isinstance(checkpoint["a.weight"], tt.Weight)
        assert not isinstance(checkpoint["b.weight"], tt.Weight)


def _state(**changes):
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [4, 64]} | changes
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


KEY = "m.weight.quant_state.bitsandbytes__nf4"


def test_a_nested_map_whose_last_bits_are_rounded_otherwise_is_read(tmp_path):
    weight = tt.Weight.encode(random(64, 64), tt.nf4(double_quant=True))
    tensors, said = packed(bitsandbytes, {"m.weight": weight})
    table = tensors["m.weight.nested_quant_map"]
    tensors["m.weight.nested_quant_map"] = table * (1 + 2.0**-23)  # as processors without AVX2 write it
    read = decoded(write(tmp_path, tensors, config=said["config.json"]), "m.weight")
    assert torch.equal(read, weight.dequantize())
    tensors["m.weight.nested_quant_map"] = table * 0.9
    with pytest.raises(tt.CheckpointError, match="nested_quant_map is not the 8-bit dynamic type"):
        decoded(write(tmp_path, tensors, config=said["config.json"]), "m.weight")


DAMAGE = {
    "no codes": lambda t: t.pop("m.weight"),
    "no absmax": lambda t: t.pop("m.weight.absmax"),
    "no map": lambda t: t.pop("m.weight.quant_map"),
    "no state": lambda t: t.pop(KEY),
    "short codes": lambda t: t.update({"m.weight": t["m.weight"][:-1]}),
    "short absmax": lambda t: t.update({"m.weight.absmax": t["m.weight.absmax"][:-1]}),
    "absmax of another dtype": lambda t: t.update({"m.weight.absmax": t["m.weight.absmax"].half()}),
    "long map": lambda t: t.update({"m.weight.quant_map": torch.zeros(17)}),
    "map beyond one": lambda t: t.update({"m.weight.quant_map": torch.full((16,), 2.0)}),
    "map of NaN": lambda t: t.update({"m.weight.quant_map": torch.full((16,), torch.nan)}),
    "int codes": lambda t: t.update({"m.weight": t["m.weight"].to(torch.int32)}),
    "state is no JSON": lambda t: t.update({KEY: torch.full((9,), 200, dtype=torch.uint8)}),
    "state is a list": lambda t: t.update({KEY: torch.tensor(list(b"[1]"), dtype=torch.uint8)}),
    "state is floats": lambda t: t.update({KEY: torch.zeros(9)}),
    "blocksize 0": lambda t: t.update({KEY: _state(blocksize=0)}),
    "blocksize true": lambda t: t.update({KEY: _state(blocksize=True)}),
    "blocksize of another": lambda t: t.update({KEY: _state(blocksize=128)}),
    "shape absent": lambda t: t.update({KEY: _state(shape=None)}),
    "shape negative": lambda t: t.update({KEY: _state(shape=[-4, -64])}),
    "shape huge": lambda t: t.update({KEY: _state(shape=[2**60, 2**60])}),
    "shape of another": lambda t: t.update({KEY: _state(shape=[4, 65])}),
    "dtype unknown": lambda t: t.update({KEY: _state(dtype="int8")}),
    "kind of another": lambda t: t.update({KEY: _state(quant_type="fp4")}),
    "nested, not nested": lambda t: t.update({KEY: _state(nested_offset=0.1, nested_blocksize=256)}),
    "offset NaN": lambda t: t.update({KEY: _state(nested_offset=float("nan"), nested_blocksize=256)}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_faults(tmp_path, damage):
    tensors, said = packed(bitsandbytes, {"m.weight": tt.Weight.encode(random(4, 64), tt.nf4())})
    DAMAGE[damage](tensors)
    tensors["other"] = torch.ones(2)
    folder = write(tmp_path, tensors, config=said["config.json"])
    assert list(faults(folder)) == ["m.weight"]
    model = torch.nn.ModuleDict({"m": torch.nn.Linear(64, 4, bias=False)})
    with pytest.raises(tt.LoadError, match=r"m\.weight: "):
        tt.load(model, folder, strict=False)


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: t.pop("m.SCB"),
        lambda t: t.pop("m.weight"),
        lambda t: t.update({"m.SCB": torch.ones(3)}),
        lambda t: t.update({"m.SCB": torch.ones(4).half()}),
        lambda t: t.update({"m.weight": torch.ones(4, 64)}),
        lambda t: t.update({"m.weight": torch.ones(4).char()}),
        lambda t: t.update({"m.weight_format": torch.tensor(2, dtype=torch.uint8)}),
        lambda t: t.update({"m.weight_format": torch.zeros(3, dtype=torch.uint8)}),
    ],
)
def test_int8_faults(tmp_path, damage):
    tensors, said = packed(bitsandbytes, {"m.weight": tt.Weight.encode(random(4, 64), bitsandbytes.INT8)})
    damage(tensors)
    assert list(faults(write(tmp_path, tensors, config=said["config.json"]))) == ["m.weight"]


@pytest.mark.parametrize(
    "scheme", [tt.int8(), tt.int4(), tt.fp8(), replace(tt.nf4(), flat=False), tt.Codebook((-1.0, 0.0, 1.0))]
)
def test_what_it_has_no_words_for(scheme):
    weight = tt.Weight.encode(random(4, 64), scheme)
    for write_it in (
        lambda: bitsandbytes.pack("m.weight", weight),
        lambda: bitsandbytes.layout("m.weight", weight.spec),
    ):
        with pytest.raises(tt.SchemeError, match=r"m\.weight: bitsandbytes cannot store"):
            write_it()


def test_a_refusal_says_whether_the_name_or_the_dtype_is_wrong():
    weight = tt.Weight.encode(random(4, 64), tt.nf4())
    with pytest.raises(tt.SchemeError, match=r"^experts\.up: bitsandbytes .* whose name ends with 'weight'\. Deq"):
        bitsandbytes.pack("experts.up", weight)
    with pytest.raises(tt.SchemeError, match=r"^m\.weight: it is torch\.float64, .* only bfloat16, .*\. Call tt\.conv"):
        bitsandbytes.pack("m.weight", weight.double())


def test_one_config_cannot_say_two_kinds():
    specs = {"a": tt.Weight.encode(random(4, 64), tt.nf4()).spec, "b": tt.Weight.encode(random(4, 64), fp4()).spec}
    with pytest.raises(tt.SchemeError, match="differ in kind"):
        bitsandbytes.announce(specs, [])
    specs["b"] = specs["b"].replace(scheme=bitsandbytes.INT8)
    with pytest.raises(tt.SchemeError, match="4-bit and others int8"):
        bitsandbytes.announce(specs, [])


def test_the_nibble_behind_the_last_code_is_nobodys(tmp_path):
    weight = tt.Weight.encode(random(3, 5), tt.nf4())
    tensors, said = packed(bitsandbytes, {"m.weight": weight})
    tensors["m.weight"][-1] |= 0x0B
    with tt.open(write(tmp_path, tensors, config=said["config.json"])) as checkpoint:
        assert torch.equal(checkpoint["m.weight"].parts["qdata"], weight.parts["qdata"])
