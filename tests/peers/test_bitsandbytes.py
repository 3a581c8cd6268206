"""bitsandbytes: we decode its files to its values, and it decodes ours to our values."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchtether as tt
from tests.formats.files import decoded, packed, random, write
from torchtether.formats import bitsandbytes
from torchtether.schemes import fp4

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
bnb = pytest.importorskip("bitsandbytes")


@pytest.fixture(autouse=True, scope="module")
def _eager():
    """Where bitsandbytes has no kernel of its own it compiles one per shape, which takes seconds each."""
    with torch.compiler.set_stance("force_eager"):
        yield


shapes = st.tuples(st.integers(1, 9), st.integers(1, 200))
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def _dequantize(codes, state):
    """Their values, by their generic code where blocks cross rows.

    There the CPU kernel of 0.50.2 takes the absmax of another block (rows of 16 in blocks of 64: 5 x 16 is 30 % off).
    """
    if state.shape[-1] % state.blocksize == 0:
        return bnb.functional.dequantize_4bit(codes, state).reshape(state.shape)  # one row comes back transposed
    absmax = state.absmax
    if state.nested:
        absmax = bnb.functional.dequantize_blockwise(absmax, state.state2) + state.offset
    codes = codes.view(torch.uint8).reshape(-1)
    generic = bnb.backends.default.ops._dequantize_4bit_compute
    return generic(codes, absmax, state.code, state.blocksize, state.shape, state.dtype)


@given(
    shape=shapes,
    dtype=dtypes,
    kind=st.sampled_from(["nf4", "fp4"]),
    nested=st.booleans(),
    blocksize=st.sampled_from([64, 128, 256]),
    storage=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]),
    seed=st.integers(0, 999),
)
def test_they_write_we_read(shape, dtype, kind, nested, blocksize, storage, seed, tmp_path_factory):
    if storage != torch.uint8 and shape[0] * shape[1] % (2 * storage.itemsize):
        storage = torch.uint8
    values = random(*shape, dtype=dtype, seed=seed)
    codes, state = bnb.functional.quantize_4bit(
        values, blocksize=blocksize, compress_statistics=nested, quant_type=kind, quant_storage=storage
    )
    wanted = _dequantize(codes, state)
    tensors = {"m.weight": codes} | {f"m.weight.{k}": t for k, t in state.as_dict(packed=True).items()}
    folder = write(tmp_path_factory.mktemp("bnb"), tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert torch.equal(decoded(folder, "m.weight"), wanted)
    assert decoded(folder, "m.weight").dtype == dtype


@given(
    shape=shapes,
    dtype=dtypes,
    scheme=st.sampled_from([tt.nf4(), tt.nf4(True), tt.nf4(block_size=128), fp4(), fp4(True)]),
    seed=st.integers(0, 999),
)
def test_we_write_they_read(shape, dtype, scheme, seed):
    weight = tt.Weight.encode(random(*shape, dtype=dtype, seed=seed), scheme)
    tensors, _ = packed(bitsandbytes, {"m.weight": weight})
    stats = {key.removeprefix("m.weight."): tensor for key, tensor in tensors.items() if key != "m.weight"}
    theirs = bnb.nn.Params4bit.from_prequantized(tensors["m.weight"], stats, device="cpu")
    assert torch.equal(_dequantize(theirs.data, theirs.quant_state), weight.dequantize())


@given(shape=shapes, dtype=dtypes, seed=st.integers(0, 999))
def test_int8_rows(shape, dtype, seed, tmp_path_factory):
    codes, scales, _ = bnb.functional.int8_vectorwise_quant(random(*shape, seed=seed).half())
    tensors = {"m.weight": codes, "m.SCB": scales, "m.weight_format": torch.zeros((), dtype=torch.uint8)}
    folder = write(tmp_path_factory.mktemp("bnb"), tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    wanted = bnb.functional.int8_vectorwise_dequant(codes, scales).to(dtype)
    assert torch.equal(decoded(folder, "m.weight", dtype), wanted)


def _llama(transformers):
    return transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        dtype="bfloat16",
    )


@pytest.mark.parametrize("scheme", [tt.nf4(), tt.nf4(True), bitsandbytes.INT8], ids=["nf4", "nf4-nested", "int8"])
def test_a_llama_that_we_wrote_in_transformers(tmp_path, scheme):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = _llama(transformers)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path)
    tt.quantize(model, {"*layers*proj.weight": scheme})
    tensors, said = packed(
        bitsandbytes,
        {n: p for n, p in model.named_parameters() if isinstance(p, tt.Weight)},
        {n: p.detach() for n, p in model.named_parameters() if not isinstance(p, tt.Weight)},
    )
    (tmp_path / "model.safetensors").unlink()
    write(tmp_path, tensors, config={**json.loads((tmp_path / "config.json").read_text()), **said["config.json"]})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ids = torch.arange(12).view(1, -1)
    ours = model(ids).logits
    if scheme == bitsandbytes.INT8:  # there the activations are rounded too
        cosine = torch.nn.functional.cosine_similarity(ours.flatten(), theirs(ids).logits.float().flatten(), 0)
        assert cosine > 0.99
        for name, parameter in model.named_parameters():
            if isinstance(parameter, tt.Weight):
                layer = theirs.get_submodule(name.removesuffix(".weight"))
                assert torch.equal(layer.weight.data, parameter.parts["qdata"])
        return
    for name, parameter in model.named_parameters():
        if isinstance(parameter, tt.Weight):
            layer = theirs.get_submodule(name.removesuffix(".weight")).weight
            assert torch.equal(bnb.functional.dequantize_4bit(layer.data, layer.quant_state), parameter.dequantize())
    assert torch.allclose(ours, theirs(ids).logits, atol=2e-2)


@pytest.mark.parametrize("options", [{"load_in_4bit": True}, {"load_in_8bit": True}], ids=["4bit", "8bit"])
def test_a_llama_that_transformers_wrote(tmp_path, options):
    transformers = pytest.importorskip("transformers")
    config = _llama(transformers)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "float")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "float", dtype=torch.bfloat16, quantization_config=transformers.BitsAndBytesConfig(**options)
    )
    theirs.save_pretrained(tmp_path / "quantized")
    with torch.device("meta"):
        ours = transformers.LlamaForCausalLM(config)
    with tt.open(tmp_path / "quantized") as checkpoint:
        assert checkpoint.format == "bitsandbytes"
    report = tt.load(ours, tmp_path / "quantized", strict=False)
    assert not report.missing_keys
    assert len(report.quantized) == 14
    for name in report.quantized:
        layer = theirs.get_submodule(name.removesuffix(".weight"))
        if "load_in_4bit" in options:
            wanted = _dequantize(layer.weight.data, layer.weight.quant_state)
        else:
            wanted = bnb.functional.int8_vectorwise_dequant(layer.weight.data, layer.state.SCB or layer.weight.SCB)
        assert torch.equal(ours.get_parameter(name).dequantize(), wanted.to(torch.bfloat16))
