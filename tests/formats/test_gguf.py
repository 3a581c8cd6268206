"""GGUF: types and their faults, written files, and the names of llama.cpp."""

import json
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchtether as tt
from tests.formats.files import faults
from tests.formats.ggufs import gguf, value
from tests.strategies import examples
from torchtether.cli.main import main
from torchtether.cli.transform import quantize_checkpoint
from torchtether.files import PACKINGS, PAIRS, GgufFile
from torchtether.formats.gguf_blocks import CODECS


def raw(packing, shape, seed=0):
    """Random blocks whose float16 numbers are numbers."""
    count = shape[-1] // PACKINGS[packing].elements
    for size in shape[:-1]:
        count *= size
    made = torch.randint(
        0, 256, (count, PACKINGS[packing].nbytes), generator=torch.Generator().manual_seed(seed)
    ).byte()
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}
    for at in places.get(packing, (0, 2) if packing in ("Q4_K", "Q5_K") else (0,)):
        made[:, at + 1] = 0x2C + made[:, at + 1] % 16  # between 1/16 and 1/4
    if packing == "MXFP4":
        made[:, 0] = 120 + made[:, 0] % 8
    return made


def written(folder, packing, shape, seed=0, name="w", pairs=None):
    blocks = raw(packing, shape, seed)
    data = gguf([(name, shape, PACKINGS[packing].number, blocks.numpy().tobytes())], pairs)
    (folder / "x.gguf").write_bytes(data)
    return folder / "x.gguf"


@pytest.mark.parametrize("packing", CODECS)
@examples(15)
@given(lead=st.lists(st.integers(1, 3), max_size=2), count=st.integers(1, 3), seed=st.integers(0, 99))
def test_any_rank_gives_the_values_of_its_blocks(packing, lead, count, seed, tmp_path_factory):
    """A block alone, and the same block among others, decode to the same values."""
    shape = (*lead, count * PACKINGS[packing].elements)
    folder = tmp_path_factory.mktemp("ranks")
    with tt.open(written(folder, packing, shape, seed)) as checkpoint:
        weight = checkpoint["w"]
        assert weight.scheme == CODECS[packing].scheme
        assert tuple(weight.shape) == shape
        assert weight.dtype == torch.bfloat16
        values = weight.to(torch.float32).dequantize().reshape(-1, PACKINGS[packing].elements)
        if lead:
            assert torch.equal(checkpoint.get_slice("w")[1:].dequantize(), weight[1:].dequantize())
    flat = written(folder, packing, (values.numel(),), seed)
    with tt.open(flat) as checkpoint:
        assert torch.equal(checkpoint["w"].to(torch.float32).dequantize().view(values.shape), values)
    assert bool(values.isfinite().all())


@pytest.mark.parametrize("packing", CODECS)
def test_unpacking_in_pieces_changes_no_bit(packing, tmp_path, monkeypatch):
    shape = (5, 3 * PACKINGS[packing].elements)
    path = written(tmp_path, packing, shape)
    with tt.open(path) as checkpoint:
        whole = checkpoint["w"]
    monkeypatch.setattr("torchtether.formats.gguf.PIECE", 2 * PACKINGS[packing].elements)
    with tt.open(path) as checkpoint:
        for name, part in checkpoint["w"].parts.items():
            assert torch.equal(part.view(torch.uint8), whole.parts[name].view(torch.uint8))


@pytest.mark.parametrize("packing", sorted(n for n, p in PACKINGS.items() if p.dtype is None and n not in CODECS))
def test_other_types_are_faults_by_name(packing, tmp_path):
    found = faults(written(tmp_path, packing, (2, PACKINGS[packing].elements)))
    assert f"its type is {packing}, not one of" in found["w"]


def test_writing_back_what_was_read_keeps_the_values(tmp_path):
    for packing in CODECS:
        with tt.open(written(tmp_path, packing, (4, 512), 3)) as checkpoint:
            weight = checkpoint["w"].to(torch.float32)
        before = weight.dequantize()
        weight.mul_(1.0)
        assert torch.equal(weight.dequantize(), before), packing


def _number(raw, at):
    return float(raw[at : at + 2].clone().view(torch.float16))


def _q5_k(raw, e):
    """One element, as ggml's ``dequantize_row_q5_K`` has it."""
    b, j, i = raw[4:16].tolist(), e // 32, e % 32
    scale, low = (b[j] & 63, b[4 + j] & 63) if j < 4 else (0, 0)
    if j >= 4:
        scale, low = (b[4 + j] & 15) | (b[j - 4] >> 6) << 4, (b[4 + j] >> 4) | (b[j] >> 6) << 4
    code = (int(raw[48 + 32 * (j // 2) + i]) >> (4 * (j % 2))) & 15 | ((int(raw[16 + i]) >> j) & 1) << 4
    return _number(raw, 0) * scale, code, _number(raw, 2) * low


def _q6_k(raw, e):
    half, quarter, i = e // 128, e % 128 // 32, e % 32
    code = (int(raw[64 * half + i + 32 * (quarter % 2)]) >> (4 * (quarter // 2))) & 15
    code |= ((int(raw[128 + 32 * half + i]) >> (2 * quarter)) & 3) << 4
    scale = int(raw[192 + e // 16].view(torch.int8))
    return _number(raw, 208) * scale, code - 32, 0.0


def _mxfp4(raw, e):
    code = (int(raw[1 + e % 16]) >> (4 * (e // 16))) & 15
    doubled = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)[code]
    return 2.0 ** (int(raw[0]) - 128), doubled, 0.0


@pytest.mark.parametrize(("packing", "element"), [("Q5_K", _q5_k), ("Q6_K", _q6_k), ("MXFP4", _mxfp4)])
def test_elements_by_hand(packing, element, tmp_path):
    """Types of which no sample shows every bit; products of two float32 are exact in Python's floats."""
    count = PACKINGS[packing].elements
    blocks = raw(packing, (2, 2 * count))
    with tt.open(written(tmp_path, packing, (2, 2 * count))) as checkpoint:
        values = checkpoint["w"].to(torch.float32).dequantize().view(4, count)
    for block, row in zip(blocks, values, strict=True):
        scale, code, low = (torch.tensor(each) for each in zip(*(element(block, e) for e in range(count)), strict=True))
        expected = scale * code - low
        assert torch.equal(row.view(torch.int32), expected.view(torch.int32))


# -- written ----------------------------------------------------------------------------------------------------------

FITTING = {
    "Q8_0": tt.int8(32, scale_dtype=torch.float16),
    "Q4_0": tt.int4(32, symmetric=True, scale_dtype=torch.float16),
    **{name: codec.scheme for name, codec in CODECS.items() if name not in ("Q8_0", "Q4_0")},
}


@pytest.mark.parametrize("packing", CODECS)
@examples(15)
@given(lead=st.lists(st.integers(1, 3), max_size=2), count=st.integers(1, 3), seed=st.integers(0, 99))
def test_blocks_are_written_as_they_were_read(packing, lead, count, seed, tmp_path_factory):
    shape, folder = (*lead, count * PACKINGS[packing].elements), tmp_path_factory.mktemp("again")
    source = written(folder, packing, shape, seed)
    with tt.open(source) as checkpoint:
        tt.save({"w": checkpoint["w"]}, folder / "y.gguf", format="gguf")
        tt.save({"w": checkpoint["w"]}, folder / "z.gguf", format="gguf")
        stored = checkpoint.store.read("w")
        values = checkpoint["w"].dequantize()
    with tt.open(folder / "y.gguf") as checkpoint:
        assert checkpoint.store.stored("w").packing == packing
        assert torch.equal(checkpoint["w"].dequantize(), values)
        if packing != "MXFP4":  # whose -0 became 0
            assert torch.equal(checkpoint.store.read("w"), stored)
    assert (folder / "y.gguf").read_bytes() == (folder / "z.gguf").read_bytes()


@pytest.mark.parametrize("packing", FITTING)
def test_what_we_encode_is_written_without_loss(packing, tmp_path, monkeypatch):
    weight = tt.Weight.encode(torch.randn(5, 512, generator=torch.Generator().manual_seed(0)), FITTING[packing])
    monkeypatch.setattr("torchtether.formats.gguf.PIECE", 3 * PACKINGS[packing].elements)
    plain = {"m": torch.ones(3), "h": torch.ones(2, 2).half(), "b": torch.ones(1).bfloat16(), "z": torch.arange(3)}
    pairs = {"general.architecture": "mine", "n": 3}
    tt.save({"w": weight, **plain}, tmp_path / "x.gguf", format="gguf", metadata=pairs)
    assert (tmp_path / "x.gguf").stat().st_size % 32 == 0  # also behind the last tensor
    with tt.open(tmp_path / "x.gguf") as checkpoint:
        assert checkpoint.store.stored("w").packing == packing
        again = checkpoint["w"]
        kept = json.loads(checkpoint.store.header.metadata[PAIRS])
        for name, part in weight.parts.items():
            if packing != "MXFP4":
                assert torch.equal(part.view(torch.uint8), again.parts[name].view(torch.uint8))
        assert torch.equal(again.to(torch.float32).dequantize(), weight.dequantize())
        assert all(torch.equal(checkpoint[name], tensor) for name, tensor in plain.items())
        assert all(checkpoint[name].dtype == tensor.dtype for name, tensor in plain.items())
    assert kept == {"general.architecture": "mine", "general.quantization_version": 2, "n": 3}


@pytest.mark.parametrize(
    ("tensors", "kwargs", "said"),
    [
        ({"w": tt.Weight.encode(torch.ones(2, 64), tt.int8())}, {}, "w: GGUF has no type for int8."),
        ({"w": tt.Weight.encode(torch.ones(2, 40), FITTING["Q8_0"])}, {}, "w: Q8_0 needs rows of whole blocks of 32"),
        ({"w": tt.Weight.encode(torch.ones(2, 64), FITTING["Q8_0"]).t()}, {}, "w: gguf cannot store"),
        ({"w": torch.ones(2, dtype=torch.bool)}, {}, "w: GGUF has no type for torch.bool"),
        ({"w": torch.ones(1, 1, 1, 1, 1)}, {}, "w: it has 5 dimensions, GGUF allows 4"),
        ({"w": torch.ones(2)}, {"max_shard_size": 10}, "gguf has no shards"),
        ({"w": torch.ones(2)}, {"metadata": {"a": None}}, "a: GGUF has no type for a NoneType"),
        ({"w": torch.ones(2)}, {"metadata": {"a": ["x", 1]}}, "a: GGUF has no type for the values ['x', 1]"),
        ({"w": torch.ones(2)}, {"metadata": {"a": 2**64}}, "GGUF has no type for the values"),
        ({"w": torch.ones(2)}, {"metadata": {"a": 1e300}}, "GGUF has no type for the values"),
        ({"w": torch.ones(2)}, {"metadata": {"general.alignment": 64}}, "it must be 32"),
        ({"w": torch.ones(2)}, {"metadata": {1: "x", "a": "y"}}, "1: a key of the metadata must be text"),
        ({"w": torch.ones(2)}, {"metadata": {"k" * 70_000: 1}}, "the name has 70000 bytes, more than 65536"),
        ({"w" * 70_000: torch.ones(2)}, {}, "the name has 70000 bytes, more than 65536"),
    ],
)
def test_what_cannot_be_written_is_said_and_leaves_nothing(tensors, kwargs, said, tmp_path):
    with pytest.raises((tt.SchemeError, tt.CheckpointError)) as caught:
        tt.save(tensors, tmp_path / "x.gguf", format="gguf", **kwargs)
    assert said in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_one_file_of_its_own(tmp_path):
    one = {"w": torch.ones(2)}
    with pytest.raises(tt.CheckpointError, match="one file, whose name ends in .gguf"):
        tt.save(one, tmp_path / "folder", format="gguf")
    with pytest.raises(tt.CheckpointError, match="native does not write GGUF files"):
        tt.save(one, tmp_path / "x.gguf")
    with pytest.raises(tt.CheckpointError, match="native cannot store it"):
        tt.save(one, tmp_path / "x.safetensors", metadata={"a": 1})


def test_tied_names_are_stored_once_or_all_and_stay_tied(tmp_path):
    w = torch.randn(2, 32)
    tt.save({"emb": w, "head": w}, tmp_path / "x.gguf", format="gguf")
    tt.save({"emb": w, "head": w}, tmp_path / "y.gguf", format="gguf", aliases="copy")
    with tt.open(tmp_path / "x.gguf") as once, tt.open(tmp_path / "y.gguf") as both:
        assert (list(once.store.header.tensors), list(both.store.header.tensors)) == (["emb"], ["emb", "head"])
        for checkpoint in (once, both):
            assert [tie.names for tie in checkpoint.ties] == [("emb", "head")]
            assert torch.equal(checkpoint["head"], w)
            assert checkpoint["emb"].data_ptr() == checkpoint["head"].data_ptr()
    with pytest.raises(tt.TieError, match="cannot store views"):
        tt.save({"emb": w, "head": w[1:]}, tmp_path / "z.gguf", format="gguf")


def test_convert_and_quantize_to_gguf_and_back(tmp_path):
    source = tmp_path / "source"
    w = torch.randn(64, 64)
    tt.save({"a.weight": w, "norm.weight": torch.ones(64)}, source)
    config = {"model_type": "llama", "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000}
    (source / "config.json").write_text(json.dumps(config))
    quantize_checkpoint(source, tmp_path / "x.gguf", FITTING["Q8_0"], format="gguf")
    with tt.open(tmp_path / "x.gguf") as checkpoint:
        kept = json.loads(checkpoint.store.header.metadata[PAIRS])
        values = checkpoint["a.weight"].to(torch.float32).dequantize()
        assert checkpoint["norm.weight"].dtype == torch.float32
    assert kept["llama.block_count"] == 1
    assert kept["llama.rope.freq_base"] == 10000.0
    assert kept["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert torch.equal(values, tt.Weight.encode(w, FITTING["Q8_0"]).dequantize())
    assert main(["convert", str(tmp_path / "x.gguf"), str(tmp_path / "back"), "--format", "native"]) == 0
    assert main(["convert", str(tmp_path / "back"), str(tmp_path / "z.gguf"), "--format", "gguf"]) == 0
    assert main(["convert", str(tmp_path / "x.gguf"), str(tmp_path / "v.gguf"), "--format", "gguf"]) == 0
    assert (tmp_path / "v.gguf").read_bytes() == (tmp_path / "x.gguf").read_bytes()
    for path in ("back", "z.gguf"):
        with tt.open(tmp_path / path) as checkpoint:
            assert torch.equal(checkpoint["a.weight"].to(torch.float32).dequantize(), values)
    with pytest.raises(tt.CheckpointError, match="it is there already"):
        quantize_checkpoint(source, tmp_path / "x.gguf", FITTING["Q8_0"], format="gguf")


def test_pairs_of_a_file_are_copied_byte_by_byte(tmp_path):
    """Without the vocabulary llama.cpp cannot load the copy, and it refuses a number of another type."""
    pairs = {
        "general.architecture": "llama",
        "general.alignment": 64,
        "llama.block_count": (10, struct.pack("<Q", 1)),
        "llama.attention.head_count_kv": [2, 1],
        "tokenizer.ggml.tokens": ["<s>", "\u2581a", ""],
        "tokenizer.ggml.scores": [0.0, -1.5],
        "tokenizer.ggml.add_bos_token": True,
    }
    data = torch.ones(2, 32).numpy().tobytes()
    (tmp_path / "x.gguf").write_bytes(gguf([("a.weight", (2, 32), "F32", data)], pairs, alignment=64))
    assert main(["convert", str(tmp_path / "x.gguf"), str(tmp_path / "y.gguf"), "--format", "gguf"]) == 0
    scheme = "int8(32, scale_dtype=torch.float16)"
    command = ["quantize", str(tmp_path / "x.gguf"), str(tmp_path / "z.gguf"), "--format", "gguf", "--scheme", scheme]
    assert main([*command, "--include", "*"]) == 0
    for copy in ("y.gguf", "z.gguf"):
        with GgufFile(tmp_path / copy) as file:
            held = file.raw_pairs()
        assert held.pop("general.quantization_version") == value(2)
        assert held == {key: value(one) for key, one in pairs.items() if key != "general.alignment"}, copy


# -- names ------------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, SIZE = 4, 2, 64


def llama(folder, *, tied=False, family="llama", heads=HEADS, kv_heads=KV_HEADS, extra=()):
    """A file with one layer, quantized where it has matrices; its blocks by name."""
    shapes = {"token_embd": (16, SIZE), "blk.0.attn_q": (SIZE, SIZE), "blk.0.attn_k": (SIZE // 2, SIZE)}
    shapes |= {"blk.0.attn_v": (SIZE // 2, SIZE), "blk.0.attn_output": (SIZE, SIZE), "blk.0.ffn_gate": (96, SIZE)}
    shapes |= {"blk.0.ffn_up": (96, SIZE), "blk.0.ffn_down": (SIZE, 96)} | ({} if tied else {"output": (16, SIZE)})
    blocks = {f"{n}.weight": (shape, raw("Q8_0", shape, i)) for i, (n, shape) in enumerate(shapes.items())}
    tensors = [(n, shape, "Q8_0", b.numpy().tobytes()) for n, (shape, b) in blocks.items()]
    for i, norm in enumerate(("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")):
        tensors.append((f"{norm}.weight", (SIZE,), "F32", torch.full((SIZE,), i + 1.0).numpy().tobytes()))
    tensors.append(("rope_freqs.weight", (8,), "F32", bytes(32)))
    pairs = {"general.architecture": family, **dict(extra)}
    counts = {f"{family}.attention.head_count": heads, f"{family}.attention.head_count_kv": kv_heads}
    pairs |= {key: count for key, count in counts.items() if count is not None}
    (folder / "x.gguf").write_bytes(gguf(tensors, pairs))
    return folder / "x.gguf"


def transformer(*, tied=False):
    """A module with the names that transformers gives a llama."""
    linear, norm = torch.nn.Linear, lambda: torch.nn.RMSNorm(SIZE)
    with torch.device("meta"):
        attention = {"q_proj": SIZE, "k_proj": SIZE // 2, "v_proj": SIZE // 2, "o_proj": SIZE}
        layer = torch.nn.ModuleDict(
            {
                "self_attn": torch.nn.ModuleDict({n: linear(SIZE, rows, bias=False) for n, rows in attention.items()}),
                "mlp": torch.nn.ModuleDict(
                    {
                        "gate_proj": linear(SIZE, 96, bias=False),
                        "up_proj": linear(SIZE, 96, bias=False),
                        "down_proj": linear(96, SIZE, bias=False),
                    }
                ),
                "input_layernorm": norm(),
                "post_attention_layernorm": norm(),
            }
        )
        model = torch.nn.ModuleDict(
            {
                "model": torch.nn.ModuleDict(
                    {
                        "embed_tokens": torch.nn.Embedding(16, SIZE),
                        "layers": torch.nn.ModuleList([layer]),
                        "norm": norm(),
                    }
                ),
                "lm_head": linear(SIZE, 16, bias=False),
            }
        )
    if tied:
        model["lm_head"].weight = model["model"]["embed_tokens"].weight
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_names_and_order_of_rows(tied, family, tmp_path):
    path, model = llama(tmp_path, tied=tied, family=family), transformer(tied=tied)
    report = tt.load(model, path, rename=tt.gguf_names(path))
    assert not report.missing_keys
    assert not report.unexpected_keys
    layer = model["model"]["layers"][0]
    with tt.open(path) as checkpoint:
        for ours, theirs, heads in (
            ("q_proj", "attn_q", HEADS),
            ("k_proj", "attn_k", KV_HEADS),
            ("v_proj", "attn_v", 0),
        ):
            stored = checkpoint[f"blk.0.{theirs}.weight"].dequantize()
            held = layer["self_attn"][ours].weight
            assert isinstance(held, tt.Weight)
            wanted = held.dequantize()
            if heads and family == "llama":  # as llama.cpp's converter permutes
                wanted = wanted.reshape(heads, 2, -1, SIZE).swapaxes(1, 2).reshape(stored.shape)
            assert torch.equal(stored, wanted), ours
        down = checkpoint["blk.0.ffn_down.weight"].dequantize()
        assert torch.equal(layer["mlp"]["down_proj"].weight.dequantize(), down)
    assert layer["input_layernorm"].weight[0] == 1
    assert layer["post_attention_layernorm"].weight[0] == 2
    assert model["model"]["norm"].weight[0] == 3
    assert (model["lm_head"].weight is model["model"]["embed_tokens"].weight) is tied


def test_names_need_a_known_architecture_and_its_heads(tmp_path):
    with pytest.raises(tt.RuleError, match="no rename rules for the architecture 'gemma', only for llama"):
        tt.gguf_names(llama(tmp_path, family="gemma"))
    with pytest.raises(tt.CheckpointError, match="llama.attention.head_count: its value is None, not a number"):
        tt.gguf_names(llama(tmp_path, heads=None))
    with pytest.raises(tt.CheckpointError, match="its value is 'four', not a number"):
        tt.gguf_names(llama(tmp_path, heads="four"))
    tt.save({"w": torch.ones(2)}, tmp_path / "y.safetensors")
    with pytest.raises(tt.CheckpointError, match="it is safetensors, not a GGUF file"):
        tt.gguf_names(tmp_path / "y.safetensors")


@pytest.mark.parametrize("kv_heads", [None, KV_HEADS * 2])
def test_rows_are_not_reordered_among_other_heads(kv_heads, tmp_path):
    path = llama(tmp_path, kv_heads=kv_heads)
    with pytest.raises(tt.CheckpointError, match=r"blk\.0\.attn_k\.weight: it has 32 rows .* not \d and 4 equal heads"):
        tt.gguf_names(path)


def test_opening_renames_nothing(tmp_path):
    with tt.open(llama(tmp_path)) as checkpoint:
        assert "blk.0.attn_q.weight" in checkpoint
        assert "rope_freqs.weight" in checkpoint
