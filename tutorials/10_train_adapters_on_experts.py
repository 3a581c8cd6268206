"""Train adapters on fused experts that stay in 4 bits: a Qwen3-MoE in nf4, a gpt-oss in its published mxfp4.

You will build both on meta, load them, put adapters on attention and on every expert, train with Trainer and with a
loop, save, merge, and serve the merged models. The models are tiny and random; nothing else differs from large ones.
Needs: `pip install transformers peft accelerate`. Takes: seconds.
"""

# %% Two models in their published formats: each expert of Qwen3 under its own name, gpt-oss as blocks and scales.
import json
import tempfile
import warnings
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import torchtether as tt
import torchtether.integrations.transformers  # from_pretrained reads what torchtether has quantized

warnings.simplefilter("ignore", FutureWarning)  # of transformers, about names of its own
transformers.logging.disable_progress_bar()
torch.manual_seed(0)
folder = Path(tempfile.mkdtemp())
sizes = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_experts_per_tok": 2, "initializer_range": 0.1,
}  # fmt: skip
qwen = transformers.Qwen3MoeConfig(**sizes, moe_intermediate_size=64, num_experts=8)
oss = transformers.GptOssConfig(**sizes, intermediate_size=64, num_local_experts=8)
for name, config in {"qwen": qwen, "oss": oss}.items():
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
published = load_file(folder / "oss/model.safetensors")
for key in [key for key in published if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
    parts = tt.Weight.encode(published.pop(key).mT, tt.mxfp4()).parts
    published[f"{key}_blocks"] = parts["qdata"].unflatten(-1, (-1, 16))
    published[f"{key}_scales"] = parts["scale"].view(torch.uint8)
save_file(published, folder / "oss/model.safetensors", {"format": "pt"})
written = json.loads((folder / "oss/config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
(folder / "oss/config.json").write_text(json.dumps(written))
IDS = torch.randint(64, (8, 12))


# %% Load them: Qwen's experts are fused and quantized at load, those of gpt-oss stay bit for bit as they are.
def loaded(name):
    with tt.on_meta():
        model = AutoModelForCausalLM.from_config(qwen if name == "qwen" else oss)
    tt.load(model, folder / name, quantize={"*.experts.*_proj": "nf4"} if name == "qwen" else None)
    return model.requires_grad_(False)


def logits_of(model):
    model.eval()
    with torch.no_grad():
        return model(IDS).logits


def distance(one, other):
    return float((one - other).norm() / other.norm())


base = {name: loaded(name) for name in ("qwen", "oss")}
start = {name: logits_of(model) for name, model in base.items()}
for name, model in base.items():
    experts = model.model.layers[0].mlp.experts
    print(f"{name}: {experts.gate_up_proj.spec.scheme}, {tuple(experts.gate_up_proj.shape)}")
    assert isinstance(experts.gate_up_proj, tt.Weight)
blocks = base["oss"].model.layers[0].mlp.experts.down_proj.parts["qdata"]
assert torch.equal(blocks, published["model.layers.0.mlp.experts.down_proj_blocks"].flatten(-2))

# %% Adapters, configured as in PEFT. Each expert of a layer has its own two matrices.
options = peft.LoraConfig(
    target_modules=["q_proj", "v_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], r=4,
)  # fmt: skip
transformers.set_seed(0)
adapted = {name: peft.get_peft_model(model, options) for name, model in base.items()}

# %% What a step keeps for backward: without us, silently, PEFT adds the adapters to all experts of a layer, dense.
kept = {}


def count(tensor):
    if not isinstance(tensor, tt.Weight):  # parameters are in memory anyway
        kept[tensor.untyped_storage()] = tensor.untyped_storage().nbytes()
    return tensor


for name, model in adapted.items():
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        model(IDS[:1], labels=IDS[:1]).loss.backward()
    model.zero_grad()
    experts = [one for one in model.parameters() if isinstance(one, tt.Weight)]
    print(f"{name}: {sum(kept.values())} bytes kept, {sum(4 * one.numel() for one in experts)} are the dense experts")
    assert max(kept.values()) < min(4 * one.numel() for one in experts) / 2

# %% Train: Qwen by Trainer, gpt-oss by a loop. The codes of the experts are the same afterwards.
codes = {name: [one.parts["qdata"].clone() for one in model.parameters() if isinstance(one, tt.Weight)]
         for name, model in adapted.items()}  # fmt: skip
arguments = transformers.TrainingArguments(
    str(folder / "runs"), max_steps=20, per_device_train_batch_size=8, learning_rate=2e-2, use_cpu=True, report_to=[],
    logging_steps=1, disable_tqdm=True, save_strategy="no",
)  # fmt: skip
lessons = [{"input_ids": ids, "labels": ids} for ids in IDS]
trainer = transformers.Trainer(adapted["qwen"], arguments, train_dataset=lessons)
trainer.train()
losses = {"qwen": [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry], "oss": []}
optimizer = torch.optim.AdamW([one for one in adapted["oss"].parameters() if one.requires_grad], lr=2e-2)
for _ in range(20):
    loss = adapted["oss"](IDS, labels=IDS).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses["oss"].append(float(loss.detach()))
for name, model in adapted.items():
    print(f"{name}: loss {losses[name][0]:.2f} -> {losses[name][-1]:.2f}")
    assert losses[name][-1] < 0.8 * losses[name][0]
    held = [one.parts["qdata"] for one in model.parameters() if isinstance(one, tt.Weight)]
    assert all(torch.equal(*pair) for pair in zip(held, codes[name], strict=True))
trained = {name: logits_of(model) for name, model in adapted.items()}

# %% Save the adapters: a file that PEFT reads, over quantized experts and over dense ones, with us and without.
for name, model in adapted.items():
    model.save_pretrained(folder / f"{name}-adapter")
    again = peft.PeftModel.from_pretrained(loaded(name), folder / f"{name}-adapter")
    assert torch.equal(logits_of(again), trained[name])
    dense = peft.PeftModel.from_pretrained(tt.dequantize(loaded(name)), folder / f"{name}-adapter")
    assert distance(logits_of(dense), trained[name]) < 1e-4

# %% Merge: 4 bits would round the adapters away. Qwen's experts become 8-bit first, those of gpt-oss dense.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a warning reports the rounding error of the merge
    tt.quantize(adapted["qwen"], {"*.experts.*_proj": "int8"})
    tt.dequantize(adapted["oss"])
    merged = {name: model.merge_and_unload() for name, model in adapted.items()}
for name, model in merged.items():
    moved, lost = distance(start[name], trained[name]), distance(logits_of(model), trained[name])
    print(f"{name}: the adapters move the logits by {moved:.3f}; merged, they differ by {lost:.4f}")
    assert lost < moved / 10

# %% Serve them: Qwen as 8-bit Weights, gpt-oss as floats, which need us no longer.
for name, model in merged.items():
    model.save_pretrained(folder / f"{name}-merged")
    last = AutoModelForCausalLM.from_pretrained(folder / f"{name}-merged")
    assert torch.equal(logits_of(last), logits_of(model))
    assert isinstance(last.model.layers[0].mlp.experts.down_proj, tt.Weight) == (name == "qwen")
    reloaded, original = (one.generate(IDS[:1, :4], max_new_tokens=8, do_sample=False) for one in (last, model))
    assert torch.equal(reloaded, original)
assert "quantization_config" not in AutoConfig.from_pretrained(folder / "oss-merged").to_dict()

# %% Now break it: leave out the tt.quantize before the merge, and compare `lost` with `moved`.
