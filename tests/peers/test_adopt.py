"""Live modules of quanto, torchao and bitsandbytes become Weights that decode to their very bits."""

import copy

import pytest
import torch
from torch import nn

import torchtether as tt

pytestmark = [
    pytest.mark.peers,
    pytest.mark.usefixtures("quanto_uncompiled"),
    pytest.mark.filterwarnings("ignore"),  # what the libraries warn about
]

DTYPES = [torch.float32, torch.bfloat16]


def built(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(128, 64, dtype=dtype), nn.LayerNorm(64, dtype=dtype), nn.Linear(64, 96, bias=False, dtype=dtype)
    ).eval()


def by_quanto(dtype, kind, **more):
    from optimum import quanto

    model = built(dtype)
    quanto.quantize(model, weights=getattr(quanto, kind), **more)
    quanto.freeze(model)
    return model


def by_torchao(dtype, config):
    from torchao.quantization import quantize_

    model = built(dtype)
    quantize_(model, config)
    return model


def by_bitsandbytes(dtype, make, **more):
    model = built(dtype)
    for i in (0, 2):
        plain = model[i]
        model[i] = make(plain.in_features, plain.out_features, bias=plain.bias is not None, **more)
        model[i].load_state_dict(plain.state_dict())
    return model.to(dtype).to("cpu").eval()


def decoded(weight):
    import bitsandbytes.functional as F

    if type(weight).__name__ == "Params4bit":
        return F.dequantize_4bit(weight.data, weight.quant_state)
    if type(weight).__name__ == "Int8Params":
        return F.int8_vectorwise_dequant(weight.data, weight.SCB)
    return weight.dequantize().detach()


def linears(kind):
    import bitsandbytes.nn as bnb

    return {
        "nf4": (bnb.Linear4bit, {"quant_type": "nf4", "compress_statistics": False}),
        "nested nf4": (bnb.Linear4bit, {"quant_type": "nf4"}),
        "fp4": (bnb.LinearFP4, {}),
        "wide storage": (bnb.Linear4bit, {"quant_type": "nf4", "quant_storage": torch.bfloat16}),
        "int8": (bnb.Linear8bitLt, {"has_fp16_weights": False}),
        "int8 threshold": (bnb.Linear8bitLt, {"has_fp16_weights": False, "threshold": 6.0}),
    }[kind]


def configs():
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8DynamicActivationIntxWeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
    )
    from torchao.quantization.granularity import PerGroup, PerTensor

    return {
        "int8": Int8WeightOnlyConfig(),
        "int8 tensor": Int8WeightOnlyConfig(granularity=PerTensor()),
        "int8 dynamic": Int8DynamicActivationInt8WeightConfig(),
        "int4": IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
        "int3": IntxWeightOnlyConfig(torch.int3, PerGroup(32)),
        "int8 asymmetric inputs": Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)),
        "float8": Float8WeightOnlyConfig(),
    }


KINDS = (
    [("quanto", kind) for kind in ("qint8", "qint4", "qint2", "qfloat8_e4m3fn", "qfloat8_e5m2")]
    + [("torchao", kind) for kind in ("int8", "int8 tensor", "int8 dynamic", "int4", "int3", "float8")]
    + [("bitsandbytes", kind) for kind in ("nf4", "nested nf4", "fp4", "wide storage", "int8")]
)


def made(library, kind, dtype):
    if library == "quanto":
        return by_quanto(dtype, kind)
    if library == "torchao":
        return by_torchao(dtype, configs()[kind])
    make, more = linears(kind)
    return by_bitsandbytes(dtype, make, **more)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("library", "kind"), KINDS)
def test_codes_objects_and_modules(library, kind, dtype):
    model = made(library, kind, dtype)
    wanted = [decoded(model[i].weight).clone() for i in (0, 2)]
    modules, parameters = list(model), dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters())
    fired = []
    model[0].register_forward_hook(lambda *_: fired.append(1))
    parameters["0.weight"].mine = "kept"
    states = {name: parameter.requires_grad for name, parameter in parameters.items()}
    assert tt.adopt(model, optimizer=optimizer) is model
    if library != "quanto":  # whose modules Python cannot give another class
        assert list(model) == modules
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    tt.check_optimizer(model, optimizer)
    for i, values in zip((0, 2), wanted, strict=True):
        weight = model[i].weight
        assert type(model[i]) is nn.Linear
        assert vars(model[i]).keys() == vars(nn.Linear(1, 1)).keys()
        assert not model[i]._buffers
        assert isinstance(weight, tt.Weight)
        assert isinstance(weight, nn.Parameter)
        assert weight.requires_grad == states[f"{i}.weight"]
        assert weight.dtype == dtype
        assert torch.equal(weight.dequantize().to(values.dtype), values.to(dtype).to(values.dtype))
    assert model[0].weight._attributes() == {"mine": "kept"}
    x = torch.randn(3, 128, dtype=dtype)
    for weight in (model[0].weight, model[2].weight):
        weight.requires_grad_(False)
    plain = tt.dequantize(copy.deepcopy(model))
    assert type(plain[0].weight) is nn.Parameter
    torch.testing.assert_close(model(x), plain(x), rtol=2e-2, atol=2e-2)
    assert fired


@pytest.mark.parametrize("kind", ["qint8", "qint4"])
def test_convolutions_of_quanto(kind):
    from optimum import quanto

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(32, 8, 1), nn.Conv2d(8, 8, 3)).eval()
    quanto.quantize(model, weights=getattr(quanto, kind))
    quanto.freeze(model)
    wanted = [one.weight.dequantize().detach().clone() for one in model]
    if kind == "qint4":  # one scale for the 72 codes of a filter; our blocks of packed codes lie within rows
        with pytest.raises(tt.ConversionError, match=r"^cannot adopt 2 of 4: 0.weight: its codes are torch.uint8 of"):
            tt.adopt(model)
        assert type(model[0]) is quanto.nn.QConv2d
        return
    tt.adopt(model)
    assert [type(one) for one in model] == [nn.Conv2d, nn.Conv2d]
    assert all(torch.equal(one.weight.dequantize(), values) for one, values in zip(model, wanted, strict=True))
    assert model(torch.randn(1, 32, 8, 8)).shape == (1, 8, 6, 6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["Embedding8bit", "Embedding4bit", "EmbeddingNF4"])
def test_embeddings_of_bitsandbytes_give_the_same_rows(kind, dtype):
    import bitsandbytes.nn as bnb

    torch.manual_seed(0)
    model = nn.Sequential(getattr(bnb, kind)(50, 64, dtype=dtype)).to("cpu")
    ids = torch.arange(50)
    wanted = model(ids)
    tt.adopt(model)
    assert type(model[0]) is nn.Embedding
    assert isinstance(model[0].weight, tt.Weight)
    assert torch.equal(model(ids), wanted)


def test_4_bits_that_were_packed_for_a_processor_are_read_as_they_decode_now():
    import bitsandbytes.functional as F

    model = by_bitsandbytes(torch.float32, *linears("nested nf4")[:1], **linears("nested nf4")[1])
    before = model[0].weight.data.clone()
    held = F.dequantize_4bit(before, model[0].weight.quant_state)
    model[0].weight.data, model[0].weight.quant_state = F._convert_weight_packed_for_cpu(
        model[0].weight.data, model[0].weight.quant_state
    )
    state = model[0].weight.quant_state
    absmax = state.absmax.T.reshape(-1).float()
    table = state.code[torch.stack([before.view(-1) >> 4, before.view(-1) & 15], 1).view(-1).long()]
    wanted = (table.view(-1, 64) * absmax[:, None]).view(64, 128)
    tt.adopt(model)
    assert torch.equal(model[0].weight.dequantize(), wanted)
    torch.testing.assert_close(wanted, held, rtol=1e-2, atol=1e-2)  # what packing rounded


def test_a_bias_in_the_dtype_that_the_library_computes_in_follows_its_weight():
    import bitsandbytes.nn as bnb

    model = by_bitsandbytes(torch.float32, bnb.Linear4bit, compute_dtype=torch.bfloat16)
    x = torch.randn(3, 128)
    with torch.no_grad():
        theirs = model(x)
    bias = model[0].bias
    assert bias.dtype == torch.bfloat16
    tt.adopt(model)
    assert model[0].bias is bias
    assert bias.dtype == torch.float32
    torch.testing.assert_close(model(x), theirs, rtol=5e-2, atol=5e-2)


def test_a_tied_parameter_is_adopted_once_and_stays_tied():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)

        def forward(self, ids):
            return self.head(self.emb(ids))

    model = Tied()
    quantize_(model, Int8WeightOnlyConfig())
    model.emb.weight = model.head.weight
    wanted = model.head.weight.dequantize()
    tt.adopt(model)
    assert model.emb.weight is model.head.weight
    assert model.head.weight.tie == tt.Tie(("emb.weight", "head.weight"))
    assert torch.equal(model.emb.weight.dequantize(), wanted)
    assert torch.allclose(model(torch.arange(4)), wanted[:4] @ wanted.T, atol=1e-5)


def test_two_parameters_over_the_same_codes_share_them_afterwards():
    import bitsandbytes.nn as bnb

    model = by_bitsandbytes(torch.float32, bnb.Linear4bit)
    twin = bnb.Linear4bit(128, 64, bias=False)
    twin.weight = bnb.Params4bit(
        model[0].weight.data, quant_state=model[0].weight.quant_state, bnb_quantized=True, module=twin
    )
    model.append(nn.Sequential(twin))
    tt.adopt(model)
    one, two = model[0].weight, model[3][0].weight
    assert one is not two
    assert one.parts["qdata"].data_ptr() == two.parts["qdata"].data_ptr()
    tt.check_ties(model)


INPUTS = {  # kind: the record that stays, and the words of the warning
    ("torchao", "int8 dynamic"): ("int8", None),
    ("torchao", "int8 asymmetric inputs"): (None, "int8_asym_per_token"),
    ("bitsandbytes", "int8"): ("int8", None),
    ("bitsandbytes", "int8 threshold"): (None, "but for columns beyond 6.0"),
    ("quanto", "activations"): (None, "to qint8 in fixed steps"),
}


@pytest.mark.parametrize(("library", "kind"), INPUTS)
def test_what_becomes_of_rounded_inputs(library, kind):
    from optimum import quanto

    if library == "quanto":
        model = by_quanto(torch.float32, "qint8", activations=quanto.qint8)
    else:
        model = made(library, kind, torch.float32)
    activations, words = INPUTS[library, kind]
    if words is None:
        x = torch.randn(5, 128)
        theirs = model(x)
        tt.adopt(model)
        torch.testing.assert_close(model(x), theirs, rtol=2e-2, atol=2e-2)
    else:
        with pytest.warns(UserWarning, match=rf"^0.*: the library rounded inputs .*{words}") as said:
            tt.adopt(model)
        assert len(said) == 1
        assert "\n" not in str(said[0].message)
    assert {model[i].weight.spec.activations for i in (0, 2)} == {activations}


def test_faults_come_before_the_first_change_and_are_one_line():
    import bitsandbytes.nn as bnb
    from optimum import quanto

    class Own(bnb.Linear4bit):
        pass

    model = by_bitsandbytes(torch.float32, bnb.Linear4bit)
    good = model[0].weight
    model.append(Own(64, 64).to("cpu"))
    model.append(bnb.Linear8bitLt(64, 64, has_fp16_weights=False))
    model.append(quanto.QLinear(64, 64, weights=quanto.qint8))
    with pytest.raises(tt.ConversionError, match=r"^cannot adopt 3 of \d+: ") as refused:
        tt.adopt(model)
    text = str(refused.value)
    assert "\n" not in text
    for words in ("3: is an unsupported Own", "4.weight: is torch.float32: it is not", "5: is not frozen yet"):
        assert words in text
    assert type(good).__name__ == "Params4bit"
    assert type(model[0]) is bnb.Linear4bit
    with pytest.raises(tt.RuleError, match="^the model has no module or parameter of quanto, torchao or bitsandbytes"):
        tt.adopt(built())


def test_a_kind_that_is_not_known_is_named():
    from torchao.quantization.quantize_.workflows import Int4PlainInt32Tensor

    model = built()
    packed = Int4PlainInt32Tensor(
        torch.zeros(64, 16, dtype=torch.int32), torch.ones(4, 64), torch.zeros(4, 64), [1, 32], torch.Size([64, 128])
    )
    model[0].weight = nn.Parameter(packed, requires_grad=False)
    with pytest.raises(tt.ConversionError, match="^0.weight: its torchao type is 'Int4PlainInt32Tensor', not one of"):
        tt.adopt(model)


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("library", ["quanto", "bitsandbytes"])
def test_a_failure_takes_everything_back_under_atomic_full(library, monkeypatch):
    from torchtether.integrations import adopting

    model = made(library, {"quanto": "qint8", "bitsandbytes": "nf4"}[library], torch.float32)
    model.register_buffer("kept", torch.ones(1))
    before = [*model], [type(one) for one in model], [type(p) for p in model.parameters()]
    keys = [*model.state_dict()]
    with torch.no_grad():
        wanted = model(torch.ones(2, 128))
    done, become = [], adopting._become_plain

    def fails_at_the_second(*given):
        if done:
            raise MemoryError("no more")
        done.append(become(*given))

    monkeypatch.setattr(adopting, "_become_plain", fails_at_the_second)
    with pytest.raises(MemoryError):
        tt.adopt(model, atomic="full")
    assert ([*model], [type(one) for one in model], [type(p) for p in model.parameters()]) == before
    assert [*model.state_dict()] == keys
    assert torch.equal(model(torch.ones(2, 128)), wanted)


@pytest.mark.usefixtures("unpacked")
def test_a_model_of_transformers_trains_and_saves_as_a_plain_one_afterwards(tmp_path):
    transformers = pytest.importorskip("transformers")
    from torchtether.integrations.transformers import attach

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    asked = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=asked, dtype=torch.float32, device_map="cpu"
    ).eval()
    ids = torch.arange(8)[None]
    wanted = {name: decoded(p) for name, p in model.named_parameters() if type(p).__name__ == "Params4bit"}
    assert wanted
    with torch.no_grad():
        theirs = model(ids).logits
    tt.adopt(model)
    for name, values in wanted.items():
        assert torch.equal(model.get_parameter(name).dequantize(), values)
    torch.testing.assert_close(model(ids).logits, theirs, rtol=1e-3, atol=1e-3)
    attach(model)
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert model.bfloat16().dtype == torch.bfloat16


def test_peft_layers_that_know_bitsandbytes_alone_are_refused():
    peft = pytest.importorskip("peft")
    import bitsandbytes.nn as bnb

    model = by_bitsandbytes(torch.float32, bnb.Linear4bit)
    model.is_loaded_in_4bit = True
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"]))
    with pytest.raises(tt.ConversionError, match="is a Linear4bit of PEFT, which takes tensors of that library"):
        tt.adopt(adapted)
