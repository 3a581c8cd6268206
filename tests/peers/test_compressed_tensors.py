"""compressed-tensors and transformers read our files, and we read theirs, to the same bits."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import torchtether as tt
from tests.formats.test_compressed_tensors import MXFP6, NVFP4, contents, read
from tests.strategies import examples, filled
from torchtether.formats import compressed_tensors
from torchtether.formats.compressed_tensors.config import PRESETS as KNOWN_PRESETS
from torchtether.schemes import Affine, ScaledFloat, mxfp4, mxfp8, same_bits

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # what peers warn about when imported

ct = pytest.importorskip("compressed_tensors")
some = examples(25, suppress_health_check=[HealthCheck.too_slow])
FLOATS = st.sampled_from((torch.bfloat16, torch.float16, torch.float32))


def scheme_of(args, **activations):
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args), **activations)


def compressor_of(format):
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(format)


def parameters(weight, args):
    """Scale, zero point and global scale by the package's own functions."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    size, block = args.group_size, args.block_structure
    if args.strategy in ("group", "tensor_group"):
        grouped = weight.unflatten(-1, (-1, size))
        low, high = grouped.amin(-1), grouped.amax(-1)
    elif args.strategy == "channel":
        low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    elif args.strategy == "block":
        rows, columns = (-(-n // b) for n, b in zip(weight.shape, block, strict=True))
        padded = torch.nn.functional.pad(
            weight, (0, columns * block[1] - weight.shape[1], 0, rows * block[0] - weight.shape[0])
        )
        cut = padded.view(rows, block[0], columns, block[1])
        low, high = cut.amin((1, 3)), cut.amax((1, 3))
    else:
        low, high = weight.amin().reshape(1), weight.amax().reshape(1)
    unit = generate_gparam(weight.amin(), weight.amax()) if args.strategy == "tensor_group" else None
    scale, zero = calculate_qparams(low, high, args, global_scale=unit)
    return scale, zero, unit


def written_by_them(weight, scheme, format):
    """The tensors of a module ``m`` that holds ``weight``, and what the package decodes them to."""
    scale, zero, unit = parameters(weight, scheme.weights)
    state = {"weight": weight, "weight_scale": scale}
    if not scheme.weights.symmetric:
        state["weight_zero_point"] = zero
    if unit is not None:
        state["weight_global_scale"] = unit.reshape(1)
    compressor = compressor_of(format)
    stored = compressor.compress(state, scheme)
    return {f"m.{key}": value.data.clone() for key, value in stored.items()}, compressor.decompress(stored, scheme)[
        "weight"
    ]


@st.composite
def theirs(draw):
    """The settings of weights, the format, and columns that suit them."""
    kind = draw(st.sampled_from(("pack", "pack", "int", "float", "nvfp4", "mxfp4", "mxfp6", "mxfp8")))
    size = draw(st.sampled_from((8, 16, 32)))
    columns = size * draw(st.integers(1, 6))
    if kind in ("pack", "int"):
        strategy = draw(st.sampled_from(("tensor", "channel", "group")))
        args = {
            "num_bits": draw(st.integers(1, 8)) if kind == "pack" else 8,
            "type": "int",
            "symmetric": draw(st.booleans()),
            "strategy": strategy,
            "group_size": size if strategy == "group" else None,
        }
        if args["num_bits"] == 1:
            args["symmetric"] = True
        return args, f"{kind}-quantized", columns
    if kind == "float":
        args = {"num_bits": 8, "type": "float", "strategy": draw(st.sampled_from(("tensor", "channel", "block")))}
        if args["strategy"] == "block":
            args["block_structure"] = [draw(st.sampled_from((4, 128))), size]
            columns += draw(st.integers(0, 5))
        return args, "float-quantized", columns
    if kind == "nvfp4":
        args = {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": "torch.float8_e4m3fn",
        }
        return args, "nvfp4-pack-quantized", 16 * draw(st.integers(1, 6))
    bits = int(kind[-1])
    args = {"num_bits": bits, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    return args, f"{kind}-quantized" if bits == 8 else f"{kind}-pack-quantized", 32 * draw(st.integers(1, 4))


@some
@given(case=theirs(), rows=st.integers(1, 33), seed=st.integers(0, 2**31), dtype=FLOATS)
def test_what_the_package_writes_we_read(case, rows, seed, dtype):
    args, format, columns = case
    scheme = scheme_of(args)
    stored, expected = written_by_them(filled((rows, columns), dtype, "normal", seed), scheme, format)
    group = json.loads(scheme.model_dump_json())
    told = {
        "quant_method": "compressed-tensors",
        "format": format,
        "version": ct.__version__,
        "config_groups": {"g": group},
    }
    weight = read(contents(stored, told))
    assert same_bits(weight.to(expected.dtype).dequantize(), expected)
    assert format[:4] in ("mxfp", "nvfp") or dtype == torch.float32 or weight.dtype == dtype


@st.composite
def ours(draw):
    scale = draw(FLOATS)
    size = draw(st.sampled_from((8, 16, 32)))
    rows, columns = draw(st.integers(1, 33)), size * draw(st.integers(1, 6))
    integers = Affine(
        draw(st.integers(1, 8)),
        signed=draw(st.booleans()),
        symmetric=draw(st.booleans()),
        block=(1, draw(st.sampled_from((None, size)))),
        scale_dtype=scale,
    )
    wide = Affine(
        8, symmetric=draw(st.booleans()), block=draw(st.sampled_from(((None, None), (4, 8)))), scale_dtype=scale
    )
    block = draw(st.sampled_from(((None, None), (1, None), (1, size), (4, 8), (128, 128))))
    scheme = draw(
        st.sampled_from((integers, integers, wide, ScaledFloat("e4m3", block, scale), mxfp4(), mxfp8(), MXFP6, NVFP4))
    )
    return scheme, (rows, 32 * draw(st.integers(1, 4)) if scheme in (mxfp4(), mxfp8(), MXFP6, NVFP4) else columns)


def read_by_them(stored, told):
    """What the package decodes the tensors of a module ``m`` to, by the group that the config has."""
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig.model_validate(told)
    (scheme,) = config.config_groups.values()
    state = {key.removeprefix("m."): tensor for key, tensor in stored.items()}
    return compressor_of(scheme.format).decompress(state, scheme)["weight"]


@some
@given(case=ours(), seed=st.integers(0, 2**31))
def test_what_we_write_the_package_reads(case, seed):
    scheme, shape = case
    weight = tt.Weight.encode(filled(shape, torch.float32, "normal", seed), scheme)
    stored = compressed_tensors.pack("m.weight", weight)
    told = compressed_tensors.announce({"m.weight": weight.spec}, [])["config.json"]["quantization_config"]
    expected = read_by_them(stored, json.loads(json.dumps(told)))
    assert same_bits(expected, weight.to(expected.dtype).dequantize())


def test_presets_are_those_of_the_package():
    from compressed_tensors.quantization import quant_scheme

    assert set(KNOWN_PRESETS) == set(quant_scheme.PRESET_SCHEMES)
    for name, ours in KNOWN_PRESETS.items():
        theirs = quant_scheme.PRESET_SCHEMES[name].get("weights")
        assert (ours is None) == (theirs is None)
        for field, value in (ours or {}).items():
            assert getattr(theirs, field) == value, (name, field)


# -- transformers -------------------------------------------------------------------------------------------------


def llama(tied=False):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def write(model, folder):
    """``model`` as a compressed-tensors checkpoint."""
    state = model.state_dict(keep_vars=True)
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    stored, specs, plain = {}, {}, []
    for name, tensor in state.items():
        if isinstance(tensor, tt.Weight):
            stored.update(compressed_tensors.pack(name, tensor))
            specs[name] = tensor.spec
        else:
            stored[name] = tensor.detach().clone()
            plain.append(name)
    folder.mkdir(exist_ok=True)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    told = compressed_tensors.announce(specs, plain)["config.json"]
    (folder / "config.json").write_text(json.dumps({**model.config.to_dict(), **told}))


SYMMETRIC = {
    "int4": tt.int4(16, symmetric=True),
    "int8": tt.int8(),
    "int8-tensor": Affine(8, block=(None, None)),
    "fp8": tt.fp8(),
    "fp8-tensor": tt.fp8("tensor"),
    "fp8-block": tt.fp8("block"),
    "mxfp4": tt.mxfp4(),
    "mxfp8": mxfp8(),
    "nvfp4": NVFP4,
}
ASYMMETRIC = {
    "int4-asym": tt.int4(32),
    "int8-asym": tt.int8(symmetric=False),
    "uint4-asym": Affine(4, signed=False, symmetric=False, block=(1, 32)),
}
SEVERAL = {
    "tied": {"*_proj.weight": SYMMETRIC["int4"]},
    "head": dict.fromkeys(("*_proj.weight", "lm_head.weight", "model.embed_tokens.weight"), SYMMETRIC["int4"]),
    "mixed": {
        "*.q_proj.weight": tt.int4(32, symmetric=True),
        "*.k_proj.weight": tt.int8(),
        "*.layers.0.mlp.*.weight": tt.fp8(),
        "*.layers.1.mlp.*.weight": tt.fp8("block"),
        "lm_head.weight": tt.int8(),
    },
}
RULES = {**{way: {"*_proj.weight": scheme} for way, scheme in {**SYMMETRIC, **ASYMMETRIC}.items()}, **SEVERAL}
LOADS = [
    # left compressed until the first forward: there transformers 5.23 has no room for packed zero points, of any
    # writer, and cannot build a quantized embedding
    *[(way, False) for way in (*SYMMETRIC, "tied", "mixed")],
    # dequantized while loading: there transformers 5.23 knows one group
    *[(way, True) for way in (*SYMMETRIC, *ASYMMETRIC, "tied", "head")],
]


@pytest.mark.parametrize(("way", "dequantize"), LOADS)
def test_transformers_loads_what_we_write(way, dequantize, tmp_path):
    transformers = pytest.importorskip("transformers")
    # compressed-tensors decodes small floats to bfloat16
    dtype = torch.bfloat16 if way in ("mxfp4", "mxfp8", "nvfp4") else torch.float32
    model = llama(tied=way == "tied").to(dtype)
    tt.quantize(model, RULES[way])
    write(model, tmp_path)
    more = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if dequantize else {}
    loaded, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True, **more)
    assert not any(info.values()), info
    tokens = torch.arange(12).view(1, 12)
    with torch.no_grad():
        theirs, ours = loaded.eval()(tokens).logits, model(tokens).logits
    torch.testing.assert_close(theirs, ours, **({"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}))
    count = 0
    with tt.open(tmp_path) as checkpoint:
        assert checkpoint.format == "compressed-tensors"
        assert not checkpoint.faults
        for name, tensor in model.state_dict(keep_vars=True).items():
            if isinstance(tensor, tt.Weight):
                values = tensor.detach().dequantize()
                assert same_bits(loaded.get_parameter(name).detach(), values), name
                assert same_bits(checkpoint[name].to(dtype).dequantize(), values), name
                count += 1
    assert count >= 9


PRESETS = ("W4A16", "W4A16_ASYM", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4A16", "MXFP8A16")


@pytest.mark.parametrize("preset", PRESETS)
def test_what_transformers_saves_we_load(preset, tmp_path):
    """A model that the package quantized and compressed, and that transformers saved."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    model = llama()
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if scheme.weights.group_size == 128:
        scheme.weights.group_size = 32
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"g": scheme}, ignore=["lm_head"]), show_progress=False
    )
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            scale, zero, unit = parameters(module.weight.data, module.quantization_scheme.weights)
            module.weight_scale.data = scale
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data = zero
            if unit is not None:
                module.weight_global_scale.data = unit.reshape(1)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert any(key.endswith("_proj.weight_scale") for key in stored)
    ours = llama()
    report = tt.load(ours, tmp_path)
    assert not report.unexpected_keys
    assert isinstance(ours.model.layers[0].mlp.up_proj.weight, tt.Weight)
    assert not isinstance(ours.lm_head.weight, tt.Weight)
    for name, module in model.named_modules():
        if getattr(module, "quantization_scheme", None) is not None:
            state = {key: tensor for key, tensor in module.state_dict().items() if key != "bias"}
            theirs = compressor_of(module.quantization_scheme.format).decompress(state, module.quantization_scheme)[
                "weight"
            ]
            held = ours.get_submodule(name).weight
            assert same_bits(held.detach().to(theirs.dtype).dequantize(), theirs), name
