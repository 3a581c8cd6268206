"""PEFT's own code over Weights: adapters of many kinds, merged, unmerged, saved; ties; longer embeddings."""

import copy
import subprocess
import sys
import warnings
from importlib import import_module

import pytest
import torch
from torch import nn

import torchtether as tt

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
import torchtether.integrations.peft  # noqa: E402 - it needs both

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # what PEFT warns about

IDS = torch.arange(12).view(2, 6)
SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "head_dim": 16, "num_experts": 4}
RULES = {"*_proj.weight": "int8", "*embed*": "int8", "lm_head*": "int8"}


def built(*, tied=False, rules=RULES, moe=False):
    torch.manual_seed(0)
    kind = transformers.Qwen3MoeConfig if moe else transformers.LlamaConfig
    config = kind(**SMALL, **(MOE if moe else {}), tie_word_embeddings=tied)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return tt.quantize(model, rules)


def logits_of(model):
    with torch.no_grad():
        return model(IDS).logits


def adapted(model, config, name="default"):
    """With an adapter that does something."""
    torch.manual_seed(1)
    if isinstance(model, peft.PeftModel):
        model.add_adapter(name, config)
    else:
        model = peft.get_peft_model(model, config, adapter_name=name)
    for key, parameter in model.named_parameters():
        if name in key and not isinstance(parameter, tt.Weight):
            parameter.data += torch.randn_like(parameter) * 0.05
    return model.eval()


def codes_of(model):
    return {
        f"{name} {part}": tensor.clone()
        for name, weight in model.named_parameters()
        if isinstance(weight, tt.Weight)
        for part, tensor in weight.parts.items()
    }


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def lora(**more):
    return peft.LoraConfig(**{"target_modules": ["q_proj", "v_proj"], **more})


ADAPTERS = {
    "lora": lora,
    "rslora, bias": lambda: lora(use_rslora=True, r=4),
    "dora": lambda: lora(use_dora=True),
    "pissa": lambda: lora(init_lora_weights="pissa"),
    "olora": lambda: lora(init_lora_weights="olora"),
    "embedding and head": lambda: lora(target_modules=["embed_tokens", "lm_head"]),
    "trainable tokens": lambda: lora(trainable_token_indices=[1, 2]),
    "ia3": lambda: peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": lambda: peft.LoHaConfig(target_modules=["q_proj"]),
    "lokr": lambda: peft.LoKrConfig(target_modules=["q_proj"]),
    "oft": lambda: peft.OFTConfig(target_modules=["q_proj"]),
    "vera": lambda: peft.VeraConfig(target_modules=["q_proj"]),
    "shira": lambda: peft.ShiraConfig(target_modules=["q_proj"], r=4, random_seed=0),
    "miss": lambda: peft.MissConfig(target_modules=["q_proj"], r=4),
    "miss of blocks": lambda: peft.MissConfig(target_modules=["q_proj"], r=4, init_weights="bat"),
}


@pytest.mark.parametrize("scheme", ["int8", "nf4"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_is_trained_merged_unmerged_and_unloaded(kind, scheme):
    model = built(rules=dict.fromkeys(RULES, scheme))
    adapter = adapted(model, ADAPTERS[kind]())
    adapter(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in adapter.parameters() if p.requires_grad)
    before, codes = logits_of(adapter), codes_of(adapter)
    with pytest.warns(UserWarning, match=r"merging encoded \d+ Weights again, with .*unmerge restores") as said:
        adapter.merge_adapter()
    (ours,) = (one for one in said if "merging encoded" in str(one.message))
    assert "\n" not in str(ours.message)
    assert ours.filename == __file__
    assert not equal(codes_of(adapter), codes)
    tolerance = {"int8": 0.05, "nf4": 0.5}[scheme]
    assert (logits_of(adapter) - before).norm() < tolerance * before.norm()
    adapter.unmerge_adapter()
    assert equal(codes_of(adapter), codes)
    assert torch.equal(logits_of(adapter), before)
    adapter.merge_adapter()
    merged = logits_of(adapter)
    count = sum(isinstance(p, tt.Weight) for p in adapter.parameters())
    plain = adapter.merge_and_unload()
    assert torch.equal(logits_of(plain), merged)
    assert sum(isinstance(p, tt.Weight) for p in plain.parameters()) == count
    assert not any(hasattr(module, "_tether_kept") for module in plain.modules())


@pytest.mark.parametrize("kind", sorted(ADAPTERS.keys() - {"pissa", "olora"}))  # these change the base, with a rounding
def test_an_adapter_learns_what_it_learns_over_plain_values(kind):
    learned, said = [], []
    for is_plain in (False, True):
        model = built()
        adapter = adapted(tt.dequantize(model) if is_plain else model, ADAPTERS[kind]())
        trained = [parameter for parameter in adapter.parameters() if parameter.requires_grad]
        before = [parameter.detach().clone() for parameter in trained]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            adapter(IDS, labels=IDS).loss.backward()
            optimizer.step()
        learned.append([one.detach() - old for one, old in zip(trained, before, strict=True)])
        said.append(logits_of(adapter))
    assert (said[0] - said[1]).norm() <= 1e-4 * said[1].norm()
    for ours, plain in zip(*learned, strict=True):
        assert (ours - plain).norm() <= 0.01 * plain.norm()
        assert plain.norm() > 0


def test_merging_is_as_exact_as_encoding_the_plain_merge_is():
    model, plain = built(), tt.dequantize(built())
    merged, wanted = (adapted(one, lora()).merge_and_unload() for one in (model, plain))
    for name, weight in merged.named_parameters():
        if isinstance(weight, tt.Weight):
            again = tt.Weight.encode(wanted.get_parameter(name).data, weight.scheme).dequantize()
            errors = [(one - wanted.get_parameter(name)).norm() for one in (weight.dequantize(), again)]
            assert errors[0] <= 1.05 * errors[1]


def test_an_adapter_that_changes_nothing_keeps_every_code_and_warns_of_nothing():
    adapter = peft.get_peft_model(built(), lora())
    codes = codes_of(adapter)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="merging encoded")
        adapter.merge_adapter()
        assert equal(codes_of(adapter), codes)
        plain = adapter.merge_and_unload()
    assert equal({key.replace(".base_layer", ""): one for key, one in codes.items()}, {
        f"base_model.model.{key}": one for key, one in codes_of(plain).items()
    })  # fmt: skip


def test_two_adapters_merged_in_any_order_with_saves_in_between(tmp_path):
    adapter = adapted(adapted(built(), lora(), "a"), lora(target_modules=["q_proj", "up_proj"], use_dora=True), "b")
    codes = codes_of(adapter)
    outputs = {}
    for name in ("a", "b"):
        adapter.set_adapter(name)
        outputs[name] = logits_of(adapter)
    for order in (["a"], ["b"], ["a", "b"], ["b", "a"]):
        adapter.merge_adapter(order)
        assert not equal(codes_of(adapter), codes)
        adapter.save_pretrained(tmp_path / "adapter")
        adapter.unmerge_adapter()
        assert equal(codes_of(adapter), codes), order
    for first, second in (["a", "b"], ["b", "a"]):
        adapter.merge_adapter([first])
        merged = logits_of(adapter)
        assert (merged - outputs[first]).norm() < 0.1 * merged.norm()
        tt.save(adapter.get_base_model(), tmp_path / "merged.safetensors")
        assert torch.equal(
            tt.open(tmp_path / "merged.safetensors")["model.layers.0.self_attn.q_proj.base_layer.weight"].dequantize(),
            adapter.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.dequantize(),
        )
        adapter.merge_adapter([second])
        copied = copy.deepcopy(adapter)
        for one in (adapter, copied):
            one.unmerge_adapter()
            assert equal(codes_of(one), codes), (first, second)
    adapter.set_adapter("a")
    assert torch.equal(logits_of(adapter), outputs["a"])


def test_disabling_a_merged_adapter_gives_the_base():
    model = built()
    wanted = logits_of(model)
    adapter = adapted(model, lora())
    adapter.merge_adapter()
    with adapter.disable_adapter():
        assert torch.equal(logits_of(adapter), wanted)


def test_conversions_between_merge_and_unmerge():
    adapter = adapted(built(), lora())
    codes = codes_of(adapter)
    adapter.merge_adapter()
    adapter.bfloat16()
    adapter.unmerge_adapter()
    weight = adapter.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
    assert weight.dtype == torch.bfloat16
    assert equal(codes_of(adapter), codes)


def test_a_base_that_was_changed_while_merged_is_not_overwritten():
    adapter = adapted(built(), lora())
    adapter.merge_adapter()
    layer = adapter.get_base_model().model.layers[0].self_attn.q_proj
    weight, base = layer.base_layer.weight, built().model.layers[0].self_attn.q_proj.weight.dequantize()
    with torch.no_grad():
        weight.mul_(2.0)
    with pytest.warns(UserWarning, match="the base of weight was not kept, or the merged values changed, so it is"):
        adapter.unmerge_adapter()
    wanted = 2.0 * base + layer.get_delta_weight("default")  # what was merged, twice, and taken off once
    assert (weight.dequantize() - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_base_that_was_dequantized_while_merged(dtype):
    adapter = adapted(tt.convert(built(), dtype=dtype), lora())
    layer = adapter.get_base_model().model.layers[0].self_attn.q_proj
    weight = layer.base_layer.weight
    base = weight.dequantize().detach().clone()
    adapter.merge_adapter()
    tt.dequantize(adapter)
    adapter.unmerge_adapter()
    assert torch.equal(weight, base)
    with torch.no_grad():
        weight.mul_(2.0)
    adapter.merge_adapter()
    adapter.unmerge_adapter()  # PEFT's own subtraction: what was kept belongs to the first merge
    assert (weight - 2.0 * base).norm() < 0.01 * weight.norm()


def test_a_base_that_was_dequantized_and_changed_while_merged_is_not_overwritten():
    adapter = adapted(built(), lora())
    layer = adapter.get_base_model().model.layers[0].self_attn.q_proj
    adapter.merge_adapter()
    tt.dequantize(adapter)
    with torch.no_grad():
        layer.base_layer.weight.mul_(2.0)
    wanted = layer.base_layer.weight - layer.get_delta_weight("default")
    adapter.unmerge_adapter()
    assert torch.equal(layer.base_layer.weight, wanted)


def test_a_merge_that_fails_leaves_its_layer_as_it_was():
    adapter = adapted(adapted(built(), lora(), "a"), lora(), "b")
    layer = adapter.get_base_model().model.layers[0].self_attn.q_proj
    codes = codes_of(adapter)
    layer.lora_B["b"].weight.data.fill_(torch.nan)
    for safe in (True, False):
        with pytest.raises(ValueError, match=r"NaNs detected|not finite"):
            layer.merge(safe_merge=safe, adapter_names=["a", "b"])
        assert layer.merged_adapters == []
        assert isinstance(layer.base_layer.weight, tt.Weight)
        assert equal(codes_of(adapter), codes)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_merging_into_a_tied_weight_is_refused_before_anything_changes(target):
    adapter = adapted(built(tied=True), lora(target_modules=["q_proj", target]))
    before, codes = logits_of(adapter), codes_of(adapter)
    for merge in (adapter.merge_adapter, adapter.merge_and_unload):
        with pytest.raises(
            tt.TieError, match=rf"{target}: its base weight is tied to .*Untie it first: tt.untie\("
        ) as refused:
            merge()
        assert "\n" not in str(refused.value)
        assert equal(codes_of(adapter), codes)
        assert torch.equal(logits_of(adapter), before)
    (layer,) = (m for n, m in adapter.named_modules() if n.endswith(target) and hasattr(m, "merge"))
    with pytest.raises(tt.TieError, match="its base weight is tied to"):
        layer.merge()


def test_a_head_that_is_untied_when_asked_merges_alone_and_stays_two(tmp_path):
    adapter = adapted(built(tied=True), lora(target_modules=["lm_head"]))
    before = logits_of(adapter)
    embedding = adapter.get_base_model().get_input_embeddings().weight.dequantize()
    tt.untie(adapter.get_base_model(), "lm_head.base_layer.weight")
    plain = adapter.merge_and_unload()
    head = plain.get_output_embeddings().weight
    assert isinstance(head, tt.Weight)
    assert torch.equal(plain.get_input_embeddings().weight.dequantize(), embedding)
    assert (logits_of(plain) - before).norm() < 0.05 * before.norm()
    assert plain.config.tie_word_embeddings is False
    tt.save(plain, tmp_path / "merged.safetensors")
    again = transformers.AutoModelForCausalLM.from_config(plain.config).eval()
    tt.load(again, tmp_path / "merged.safetensors")
    assert torch.equal(logits_of(again), logits_of(plain))


@pytest.mark.parametrize(
    "config", [lora(trainable_token_indices=[1, 2]), peft.TrainableTokensConfig(token_indices=[3])]
)
def test_trainable_tokens_of_a_tied_embedding_merge_on_both_sides_and_unmerge(config):
    adapter = adapted(built(tied=True), config)
    before, codes = logits_of(adapter), codes_of(adapter)
    adapter.merge_adapter()
    assert (logits_of(adapter) - before).norm() < 0.05 * before.norm()
    assert not equal(codes_of(adapter), codes)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*was not kept")
        adapter.unmerge_adapter()
    assert equal(codes_of(adapter), codes)
    plain = adapter.merge_and_unload()
    assert plain.get_input_embeddings().weight is plain.get_output_embeddings().weight
    assert (logits_of(plain) - before).norm() < 0.05 * before.norm()


@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_target_parameters_of_fused_experts(scheme):
    model = built(moe=True, rules={"*experts*_proj": scheme})
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapter = adapted(model, peft.LoraConfig(target_modules=[], target_parameters=names, r=4))
    adapter(IDS, labels=IDS).loss.backward()
    grads = [p.grad for n, p in adapter.named_parameters() if "lora" in n]
    assert len(grads) == 8
    assert all(grad is not None for grad in grads)
    before, codes = logits_of(adapter), codes_of(adapter)
    adapter.merge_adapter()
    assert (logits_of(adapter) - before).norm() < {"int8": 0.05, "nf4": 0.5}[scheme] * before.norm()
    adapter.unmerge_adapter()
    assert equal(codes_of(adapter), codes)
    plain = adapter.merge_and_unload()
    assert isinstance(plain.model.layers[0].mlp.experts.gate_up_proj, tt.Weight)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("count", [70, 60])
@pytest.mark.parametrize("scheme", ["int8", "int4", "nf4"])
def test_embeddings_are_resized_with_the_codes_of_their_rows(scheme, count, tied):
    scheme = tt.int4(32) if scheme == "int4" else scheme
    model = built(tied=tied, rules={"*embed*": scheme})
    weight = model.get_input_embeddings().weight
    values = weight.dequantize().detach()
    model.resize_token_embeddings(count)
    assert model.get_input_embeddings().weight.shape == (count, 64)
    assert isinstance(model.get_input_embeddings().weight, tt.Weight)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    rows = min(count, 64)
    assert torch.equal(model.get_input_embeddings().weight.dequantize()[:rows], values[:rows])
    assert logits_of(model).shape == (2, 6, count)
    adapter = adapted(model, lora())  # and the adapters of a longer model work
    assert logits_of(adapter).shape == (2, 6, count)


def test_a_head_of_its_own_is_resized_and_stays_the_weight_that_the_optimizer_holds():
    import_module("torchtether.integrations.transformers")  # which keeps heads
    model = built(rules={"lm_head*": "int8"})
    head = model.get_output_embeddings().weight
    values = head.dequantize().detach()
    model.resize_token_embeddings(70)
    assert model.get_output_embeddings().weight is head
    assert isinstance(head, tt.Weight)
    assert torch.equal(head.dequantize()[:64], values)
    assert logits_of(model).shape == (2, 6, 70)


STORED = {
    "head": lambda: lora(target_modules=["q_proj", "lm_head"]),
    "embedding": lambda: lora(target_modules=["embed_tokens"], use_dora=True),
    "both": lambda: lora(target_modules=["embed_tokens"], ensure_weight_tying=True),
    "copy of the head": lambda: lora(modules_to_save=["lm_head"]),
    "copy of the embedding": lambda: lora(modules_to_save=["embed_tokens"]),
    "copies of both": lambda: lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", STORED)
def test_files_with_base_layers_or_copies_of_modules_have_their_values(tmp_path, kind, tied):
    from safetensors.torch import load_file

    plain = transformers.AutoModelForCausalLM.from_config(built(tied=tied, rules={}).config)
    peft.get_peft_model(plain, STORED[kind]()).save_pretrained(tmp_path / "plain")
    keys = load_file(tmp_path / "plain" / "adapter_model.safetensors").keys()

    adapter = adapted(built(tied=tied), STORED[kind]())
    with torch.no_grad():
        for parameter in adapter.parameters():
            if isinstance(parameter, tt.Weight) and parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.05)
    adapter.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert stored.keys() == keys
    state = {name.replace(".modules_to_save.default", ""): one for name, one in adapter.state_dict().items()}
    weights = {name: state[name] for name in stored.keys() & state.keys() if isinstance(state[name], tt.Weight)}
    assert weights
    assert all(torch.equal(stored[name], weight.dequantize()) for name, weight in weights.items())

    again = peft.PeftModel.from_pretrained(built(tied=tied), tmp_path).eval()
    assert {name: type(one) for name, one in again.named_parameters()} == {
        name: type(one) for name, one in adapter.named_parameters()
    }
    if "cop" not in kind:
        assert equal(codes_of(again), codes_of(adapter))
        assert torch.equal(logits_of(again), logits_of(adapter))
    else:  # the values are rounded once more
        assert (logits_of(again) - logits_of(adapter)).norm() < 0.02 * logits_of(adapter).norm()


def test_transformers_writes_the_same_files(tmp_path):
    from safetensors.torch import load_file

    model = built()
    model.add_adapter(STORED["copy of the head"]())
    model.save_pretrained(tmp_path)
    copy = model.lm_head.modules_to_save["default"].weight
    assert isinstance(copy, tt.Weight)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert torch.equal(stored["base_model.model.lm_head.weight"], copy.dequantize())
    assert all("lora" in name for name in stored.keys() - {"base_model.model.lm_head.weight"})


def test_attention_that_peft_merges_at_every_forward_is_refused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(64, 4)

        def forward(self, x):
            return self.attn(x, x, x)[0]

    adapter = peft.get_peft_model(tt.quantize(Model(), {"attn.in_proj_weight": "int8"}), lora(target_modules=["attn"]))
    with pytest.raises(tt.UnsupportedOpError, match="PEFT merges adapters of nn.MultiheadAttention at every forward"):
        adapter(torch.randn(3, 1, 64))


def test_convolutions():
    torch.manual_seed(0)
    adapter = adapted(tt.quantize(nn.Sequential(nn.Conv2d(3, 8, 3)), {"0.weight": "int8"}), lora(target_modules=["0"]))
    codes, x = codes_of(adapter), torch.randn(1, 3, 8, 8)
    before = adapter(x)
    adapter.merge_adapter()
    assert (adapter(x) - before).norm() < 0.05 * before.norm()
    adapter.unmerge_adapter()
    assert equal(codes_of(adapter), codes)


def test_layers_without_weights_merge_as_peft_alone_does():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8))
    adapter = adapted(plain, lora(target_modules=["0"]))
    delta = adapter.get_base_model()[0].get_delta_weight("default")
    before = adapter.get_base_model()[0].base_layer.weight.detach().clone()
    adapter.merge_adapter()
    assert torch.equal(adapter.get_base_model()[0].base_layer.weight, before + delta)
    adapter.unmerge_adapter()
    assert torch.equal(adapter.get_base_model()[0].base_layer.weight, before + delta - delta)


@pytest.mark.parametrize("how", ["quantize", "from_pretrained"])
def test_peft_that_is_imported_first_knows_weights_by_itself(tmp_path, how):
    """In a process of its own, which never imports ``torchtether.integrations.peft``."""
    code = f"""
import peft, transformers
import torchtether as tt
config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                                  num_attention_heads=4, tie_word_embeddings=True)
model = transformers.AutoModelForCausalLM.from_config(config)
if {how!r} == "quantize":
    tt.quantize(model, "int8")
else:
    from torchtether.integrations.transformers import TetherConfig
    model.save_pretrained({str(tmp_path)!r})
    asked = TetherConfig("int8")
    model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, quantization_config=asked)
adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"]))
before = model.model.embed_tokens.weight.dequantize()
try:
    adapted.merge_adapter()
except tt.TieError:
    assert (model.model.embed_tokens.weight.dequantize() == before).all()
else:
    raise AssertionError("merged")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("library", ["transformers.modeling_utils", "peft"])
def test_a_call_while_another_thread_imports_the_library(library):
    code = f"""
import importlib, sys, threading, warnings
import torch, torchtether as tt
from torch import nn
warnings.simplefilter("ignore")
thread = threading.Thread(target=lambda: importlib.import_module("{library}") and done.append(True))
done = []
thread.start()
while thread.is_alive():
    with tt.on_meta():
        model = nn.Linear(64, 64)
    tt.quantize(tt.materialize(model), "int8")
assert done == [True], done
"""
    subprocess.run([sys.executable, "-c", code], check=True)
