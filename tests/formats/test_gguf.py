"""GGUF: types and their faults, and the names of llama.cpp."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchtether as tt
from tests.formats.files import faults
from tests.formats.ggufs import gguf
from torchtether.files import PACKINGS
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
@settings(max_examples=15)
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
    monkeypatch.setattr("torchtether.formats.gguf._PIECE", 2 * PACKINGS[packing].elements)
    with tt.open(path) as checkpoint:
        for name, part in checkpoint["w"].parts.items():
            assert torch.equal(part.view(torch.uint8), whole.parts[name].view(torch.uint8))


@pytest.mark.parametrize("packing", sorted(n for n, p in PACKINGS.items() if p.dtype is None and n not in CODECS))
def test_other_types_are_faults_by_name(packing, tmp_path):
    found = faults(written(tmp_path, packing, (2, PACKINGS[packing].elements)))
    assert f"it is {packing}, which is not read" in found["w"]


def test_writing_back_what_was_read_keeps_the_values(tmp_path):
    for packing in CODECS:
        with tt.open(written(tmp_path, packing, (4, 512), 3)) as checkpoint:
            weight = checkpoint["w"].to(torch.float32)
        before = weight.dequantize()
        weight.mul_(1.0)
        assert torch.equal(weight.dequantize(), before), packing


# -- names ------------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, SIZE = 4, 2, 64


def llama(folder, *, tied=False, family="llama", heads=HEADS, extra=()):
    """A file with one layer, quantized where it has matrices; its blocks by name."""
    shapes = {"token_embd": (16, SIZE), "blk.0.attn_q": (SIZE, SIZE), "blk.0.attn_k": (SIZE // 2, SIZE)}
    shapes |= {"blk.0.attn_v": (SIZE // 2, SIZE), "blk.0.attn_output": (SIZE, SIZE), "blk.0.ffn_gate": (96, SIZE)}
    shapes |= {"blk.0.ffn_up": (96, SIZE), "blk.0.ffn_down": (SIZE, 96)} | ({} if tied else {"output": (16, SIZE)})
    blocks = {f"{n}.weight": (shape, raw("Q8_0", shape, i)) for i, (n, shape) in enumerate(shapes.items())}
    tensors = [(n, shape, "Q8_0", b.numpy().tobytes()) for n, (shape, b) in blocks.items()]
    for i, norm in enumerate(("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")):
        tensors.append((f"{norm}.weight", (SIZE,), "F32", torch.full((SIZE,), i + 1.0).numpy().tobytes()))
    tensors.append(("rope_freqs.weight", (8,), "F32", bytes(32)))
    pairs = {"general.architecture": family, f"{family}.attention.head_count_kv": KV_HEADS, **dict(extra)}
    if heads is not None:
        pairs[f"{family}.attention.head_count"] = heads
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
    with pytest.raises(tt.RuleError, match="no names for the architecture 'gemma', known are llama"):
        tt.gguf_names(llama(tmp_path, family="gemma"))
    with pytest.raises(tt.CheckpointError, match="llama.attention.head_count: it is None, not a number of heads"):
        tt.gguf_names(llama(tmp_path, heads=None))
    with pytest.raises(tt.CheckpointError, match="it is 'four', not a number"):
        tt.gguf_names(llama(tmp_path, heads="four"))
    tt.save({"w": torch.ones(2)}, tmp_path / "y.safetensors")
    with pytest.raises(tt.CheckpointError, match="it is safetensors, not a GGUF file"):
        tt.gguf_names(tmp_path / "y.safetensors")


def test_opening_renames_nothing(tmp_path):
    with tt.open(llama(tmp_path)) as checkpoint:
        assert "blk.0.attn_q.weight" in checkpoint
        assert "rope_freqs.weight" in checkpoint
