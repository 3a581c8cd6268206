"""The gguf package: we decode the files that it quantizes, and random bytes, to its values bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchtether as tt
from tests.strategies import examples
from torchtether.cli.main import main
from torchtether.formats.gguf_blocks import CODECS

pytestmark = pytest.mark.peers
gguf = pytest.importorskip("gguf")

QUANTIZED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "BF16", "F16", "F32")


def write(path, tensors):
    """A file by GGUFWriter; ``tensors``: bytes and type by name."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_token_list(["a", "b"])
    for name, (raw, kind) in tensors.items():
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def values(path, name):
    with tt.open(path) as checkpoint:
        tensor = checkpoint[name].to(torch.float32)
    return tensor.dequantize() if isinstance(tensor, tt.Weight) else tensor


def same(ours, theirs):
    theirs = torch.from_numpy(np.array(theirs))
    return ours.shape == theirs.shape and torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


def random(shape, pattern, seed):
    made = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    if pattern == "zero rows":
        made[..., ::2, :] = 0
    return made * {"small": 1e-5, "large": 300.0}.get(pattern, 1.0)


patterns = st.sampled_from(("normal", "zero rows", "small", "large"))
leads = st.lists(st.integers(1, 4), min_size=0, max_size=2)


@pytest.mark.parametrize("kind", QUANTIZED)
@given(lead=leads, blocks=st.integers(1, 5), pattern=patterns, seed=st.integers(0, 2**31))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # their division by an empty scale
def test_what_it_quantizes(kind, lead, blocks, pattern, seed, tmp_path_factory):
    source = random((*lead, 3, blocks * 32), pattern, seed)
    with np.errstate(all="ignore"):
        raw = gguf.quantize(source, gguf.GGMLQuantizationType[kind])
    path = write(tmp_path_factory.mktemp("gguf") / "x.gguf", {"w": (raw, kind)})
    (read,) = gguf.GGUFReader(str(path)).tensors
    assert same(values(path, "w"), gguf.dequantize(read.data, read.tensor_type))


def _with_scales(kind, raw, seed):
    """Random blocks whose float16 numbers are numbers."""
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    both = {"Q4_1": (0, 2), "Q5_1": (0, 2)}
    scales = np.random.default_rng(seed).standard_normal((*raw.shape[:-1], 2)).astype(np.float16)
    scales[..., 0] *= np.float16(0.01)
    for i, at in enumerate((places | both).get(kind, (0,))):
        raw[..., at : at + 2] = scales[..., i : i + 1].view(np.uint8)
    return raw


@pytest.mark.parametrize("kind", CODECS)
@given(rows=st.integers(1, 5), blocks=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_any_bytes(kind, rows, blocks, seed, tmp_path_factory):
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = np.random.default_rng(seed).integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    if kind == "MXFP4":
        raw[..., 0] %= 255  # NaN by the standard, 2**128 by ggml
    else:
        raw = _with_scales(kind, raw, seed)
    raw = raw.reshape(rows, -1)
    path = write(tmp_path_factory.mktemp("gguf") / "x.gguf", {"w": (raw, kind)})
    assert same(values(path, "w"), gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", CODECS)
@examples(15)
@given(lead=leads, blocks=st.integers(1, 3), pattern=patterns, seed=st.integers(0, 2**31))
def test_it_reads_what_we_write(kind, lead, blocks, pattern, seed, tmp_path_factory):
    size, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    source = torch.from_numpy(random((*lead, 3, blocks * size), pattern, seed))
    weight = tt.Weight.encode(source, CODECS[kind].scheme)
    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    pairs = {"general.architecture": "llama", "llama.block_count": 1, "eps": 0.5, "tokens": ["a", "\u00e9"], "on": True}
    plain = {"f": source, "h": source.half(), "b": source.bfloat16()}
    tt.save({"w": weight, **plain}, path, format="gguf", metadata=pairs)
    reader = gguf.GGUFReader(str(path))
    read = {tensor.name: tensor for tensor in reader.tensors}
    assert read["w"].tensor_type.name == kind
    theirs = torch.from_numpy(np.array(gguf.dequantize(read["w"].data, read["w"].tensor_type)))
    assert torch.equal(theirs, weight.dequantize())  # MXFP4 has no -0 there
    for name, tensor in plain.items():
        assert same(tensor.float(), gguf.dequantize(read[name].data, read[name].tensor_type))
    assert {key: reader.get_field(key).contents() for key in pairs} == pairs


@pytest.mark.parametrize("split", [{"split_max_tensors": 2}, {"split_max_size": 2000}], ids=str)
def test_what_it_splits(tmp_path, split):
    made = {f"{kind}.{i}": (np.random.default_rng(i).standard_normal((4, 64)).astype(np.float32), kind)
            for kind in ("F32", "Q8_0", "Q4_0") for i in range(2)}  # fmt: skip
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama", **split)
    writer.add_block_count(1)
    writer.add_token_list(["a", "b"])
    for name, (source, kind) in made.items():
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(source, number), raw_dtype=number)
    writer.write_header_to_file(tmp_path / "x.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    paths = sorted(tmp_path.iterdir())
    assert len(paths) > 1
    read = {tensor.name: tensor for path in paths for tensor in gguf.GGUFReader(str(path)).tensors}
    assert read.keys() == made.keys()
    for name, tensor in read.items():
        assert same(values(paths[0], name), gguf.dequantize(tensor.data, tensor.tensor_type))

    assert main(["convert", str(paths[-1]), str(tmp_path / "joined.gguf"), "--format", "gguf"]) == 0
    joined = gguf.GGUFReader(str(tmp_path / "joined.gguf"))
    assert not [key for key in joined.fields if key.startswith("split.")]
    assert joined.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert {one.name: one.data.tobytes() for one in joined.tensors} == {n: t.data.tobytes() for n, t in read.items()}
