"""The distance of a GGUF file's logits from exact ones: ours, and llama.cpp's.

Exact is transformers' own reader of GGUF, in float32: every weight decoded by the package gguf, nothing rounded after.
Distances are norms of differences over the norm of the exact logits, at the first positions of a prompt.
"""

import subprocess
import tempfile
from pathlib import Path

import torch

import torchtether as tt
from tests.benchmarks.generate_llama_cpp import tokens_of

POSITIONS = 48
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def distances(file, threads, llama_python=None):
    """Return the distances of ours by the dtype of inputs and, if its Python is given, that of llama.cpp."""
    from transformers import LlamaForCausalLM

    torch.set_num_threads(threads)
    exact = logits_of(LlamaForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32))
    found = {}
    for name, dtype in DTYPES.items():
        model = model_on_meta(file)
        tt.load(model, file, rename=tt.gguf_names(file), dtype=dtype)
        found[name] = distance(logits_of(model), exact)
    if llama_python:
        found["llama.cpp"] = distance(logits_of_llama(llama_python, file, threads).view_as(exact), exact)
    return found


def model_on_meta(file, attention="sdpa"):
    from transformers import AutoConfig, LlamaForCausalLM

    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, attn_implementation=attention)
    with tt.on_meta():
        return LlamaForCausalLM(config)


@torch.no_grad()
def logits_of(model):
    ids = torch.tensor([tokens_of(model.config.vocab_size, POSITIONS)])
    return model.eval()(input_ids=ids).logits[0].float()


def logits_of_llama(python, file, threads):
    script = Path(__file__).with_name("generate_llama_cpp.py")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "logits")
        command = [python, script, file, str(threads), "0", "0", out, str(POSITIONS)]
        subprocess.run(command, check=True, capture_output=True)
        return torch.frombuffer(bytearray(out.read_bytes()), dtype=torch.float32)


def distance(given, exact):
    return float((given - exact).norm() / exact.norm())
