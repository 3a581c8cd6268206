"""What products with quantized weights cost beside dense bfloat16, and beside other packages. Run by hand:

    python -m tests.benchmarks.bench_compute [--size small|full] [--rounds 5] [--groups NAME ...] [--json FILE]

Contenders take turns in one process; figures are medians with the lowest and highest, and ratios are medians of the
ratios within a round, to the first contender of a case. Machines are noisy: compare ratios, and only within a run.
Kernels are compiled before anything is timed.

    decode      one row of bfloat16 inputs               prefill    512 rows
    embedding   512 tokens, and one                      backward   a training step of inputs through a frozen weight
    dispatch    a tiny weight: microseconds by layer     compiled   one row through torch.compile (needs a C++ compiler)
    activations inputs rounded to 8 bits, 1 and 512 rows, and how far that moves a product

"limit" reads as many bytes as the parts of a weight have, with all threads and a compiled loop: a product cannot take
less, and where ours takes about as long, memory is what bounds it. torch's own dense product does not read at that rate
everywhere, so ratios to it can be below the ratio of bytes.

torchao and quanto run as users meet them, as a quantized ``nn.Linear``; "torch int8pack" and "torch int4pack" are
torch's own kernels, called with plain tensors that were packed before.
"""

import argparse
import copy
import ctypes
import importlib.util
import itertools
import json
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import torchtether as tt
from torchtether.torch_private.observers import is_observed
from torchtether.torch_private.tensors import empty_on_cpu
from torchtether.weights.dispatch import RULES
from torchtether.weights.products import build, choose, cpu

SHAPES = {"full": ((4096, 4096), (11008, 4096), (32000, 2048)), "small": ((64, 256),)}
"""Rows and columns of the weights."""

TRANSFORMERS = {"full": (1024, 8, 32000), "small": (64, 1, 96)}
"""Width, layers, vocabulary."""

SCHEMES = ("int8", "int4", "fp8", "nf4")
BATCHES = {"full": 512, "small": 8}
DENSE = "dense bf16"
SLICE = 0.02
"""Seconds for which one contender runs in a round, at least once."""


# -- contenders -------------------------------------------------------------------------------------------------------


def has(package):
    return importlib.util.find_spec(package) is not None


def peer_linears(values):
    """The peers that are installed, by name and bits, as functions of the inputs, around the weight ``values``."""
    made = {}

    def layer():
        one = nn.Linear(values.shape[1], values.shape[0], bias=False, dtype=values.dtype)
        one.weight = nn.Parameter(values.clone(), requires_grad=False)
        return nn.Sequential(one)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if has("torchao"):
            from torchao.quantization import Int8WeightOnlyConfig, quantize_

            module = layer()
            quantize_(module, Int8WeightOnlyConfig())
            made["torchao int8"] = module
        if has("optimum.quanto"):
            from optimum import quanto

            for scheme, kind in (("int8", quanto.qint8), ("int4", quanto.qint4), ("fp8", quanto.qfloat8)):
                module = layer()
                quanto.quantize(module, weights=kind)
                quanto.freeze(module)
                made[f"quanto {scheme}"] = module
        if has("bitsandbytes"):
            import bitsandbytes as bnb

            one = bnb.nn.Linear4bit(values.shape[1], values.shape[0], bias=False, quant_type="nf4")
            one.compute_dtype = torch.bfloat16
            one.weight = bnb.nn.Params4bit(values.clone(), requires_grad=False, quant_type="nf4", module=one)
            made["bitsandbytes nf4"] = one.to("cpu")
    rows, columns = values.shape
    if columns % 16 == 0:
        held = tt.Weight.encode(values, tt.int8())
        codes, scale = held.parts["qdata"], held.parts["scale"].view(-1).bfloat16()
        made["torch int8pack int8"] = lambda x: torch._weight_int8pack_mm(x, codes, scale)
    if rows % 16 == 0 and columns % 128 == 0:
        packed = torch._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, values.shape, dtype=torch.int32), 1)
        scales = torch.randn(columns // 128, rows, 2, dtype=torch.bfloat16)
        made["torch int4pack int4"] = lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 128, scales)
    return made


READING = """
extern "C" unsigned long long read_all(const unsigned long long* p, long long blocks) {
    unsigned long long found = 0;
#pragma omp parallel for schedule(static) reduction(^ : found)
    for (long long b = 0; b < blocks; b++) {
        const unsigned long long* q = p + b * 128;
        for (int i = 0; i < 128; i += 8) __builtin_prefetch(q + 256 + i);
        for (int i = 0; i < 128; i++) found ^= q[i];
    }
    return found;
}
"""


def reader():
    """A compiled function that reads blocks of 1024 bytes, with the threads of torch; None without a compiler."""
    if not build.is_possible() or not shutil.which("g++"):
        return None
    with tempfile.TemporaryDirectory() as folder:
        flags = ["g++", "-O3", "-march=native", "-fPIC", "-fopenmp", "-x", "c++", "-c", "-", "-o", f"{folder}/read.o"]
        subprocess.run(flags, input=READING.encode(), check=True)
        subprocess.run(["g++", "-shared", f"{folder}/read.o", "-o", f"{folder}/read.so"], check=True)
        read = ctypes.CDLL(f"{folder}/read.so").read_all  # finds the OpenMP that torch has loaded
    read.argtypes, read.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_uint64
    return read


def limit(read, weight):
    """Reads as many bytes as the parts of the weight have."""
    blocks = sum(part.nbytes for part in weight.parts.values()) // 1024
    held = torch.ones(blocks * 1024, dtype=torch.uint8)
    return lambda: read(held.data_ptr(), blocks)


def weight_of(values, scheme):
    return nn.Parameter(tt.Weight.encode(values, getattr(tt, scheme)()), requires_grad=False)


def random_values(rows, columns):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16()


def applied(weight, x):
    return lambda: F.linear(x, weight)


def called(module, *inputs):
    return lambda: module(*inputs)


# -- groups: each yields (title, contenders, bars); a bar is (what, ours, others, limit) -------------------------------


def products(size, batch, limits, peers):
    read = reader() if batch == 1 else None
    for rows, columns in SHAPES[size]:
        values, x = random_values(rows, columns), torch.randn(batch, columns).bfloat16()
        contenders, bars = {DENSE: applied(values, x)}, []
        others = {name: module for name, module in peer_linears(values).items()} if peers else {}
        contenders |= {name: called(module, x) for name, module in others.items()}
        for scheme in SCHEMES:
            weight = weight_of(values, scheme)
            name = f"ours {scheme}"
            contenders[name] = applied(weight, x)
            if read is not None:
                contenders[f"limit {scheme}"] = limit(read, weight)
            kernel = choose(weight.kernel_layout, x.dtype, batch)
            bars.append((f"{scheme} ({kernel}) against dense", name, (DENSE,), limits[scheme]))
            same = tuple(other for other in others if other.endswith(f" {scheme}"))
            if same:
                bars.append((f"{scheme} against the fastest peer", name, same, 1.0))
        yield f"{rows}x{columns}, {batch} rows", contenders, bars


def decode(size):
    """Batch 1."""
    yield from products(size, 1, {"int8": 0.5, "int4": 0.25, "fp8": 1.0, "nf4": 1.0}, peers=True)


def prefill(size):
    """512 rows."""
    yield from products(size, BATCHES[size], dict.fromkeys(SCHEMES, 1.15), peers=False)


def activations(size):
    """Beside products of inputs as they are; the title says by how much of its norm rounding moves a product."""
    for (rows, columns), batch in itertools.product(SHAPES[size], (1, BATCHES[size])):
        values, x = random_values(rows, columns), torch.randn(batch, columns).bfloat16()
        contenders, bars, moved = {DENSE: applied(values, x)}, [], []
        for scheme in ("int8", "int4"):
            weight, rounding = weight_of(values, scheme), weight_of(values, scheme)
            rounding.set_activations("int8")
            contenders |= {f"ours {scheme}": applied(weight, x), f"ours {scheme}, rounding": applied(rounding, x)}
            limit = {"int8": 0.5, "int4": 0.25}[scheme] if batch == 1 else 0.6
            bars.append((f"{scheme}, rounding, against dense", f"ours {scheme}, rounding", (DENSE,), limit))
            exact = F.linear(x, weight).float()
            moved.append(f"{scheme} {float((F.linear(x, rounding).float() - exact).norm() / exact.norm()):.2%}")
        yield f"{rows}x{columns}, {batch} rows of int8 (moves products by: {', '.join(moved)})", contenders, bars


def embedding(size):
    for rows, columns in SHAPES[size][-1:]:
        values = random_values(rows, columns)
        for count in (BATCHES[size], 1):
            tokens = torch.randint(rows, (count,))
            contenders = {"F.embedding": lambda tokens=tokens, values=values: F.embedding(tokens, values)}
            bars = []
            for scheme in SCHEMES:
                weight = weight_of(values, scheme)
                contenders[f"ours {scheme}"] = lambda tokens=tokens, weight=weight: F.embedding(tokens, weight)
                bars.append((f"embedding {scheme}", f"ours {scheme}", ("F.embedding",), 2.0))
            yield f"{rows}x{columns}, {count} tokens", contenders, bars


def backward(size):
    """64 rows: without AVX-512 torch's own gradient in bfloat16 takes seconds for much more."""
    for rows, columns in [(1024, 1024)] if size == "full" else SHAPES[size]:
        values = random_values(rows, columns)
        x = torch.randn(64, columns).bfloat16().requires_grad_()
        up = torch.randn(64, rows).bfloat16()

        def step(weight, x=x, up=up):
            def run():
                x.grad = None
                F.linear(x, weight).backward(up)

            return run

        contenders = {DENSE: step(values)}
        contenders |= {f"ours {scheme}": step(weight_of(values, scheme)) for scheme in SCHEMES}
        bars = [(f"step through frozen {scheme}", f"ours {scheme}", (DENSE,), 1.2) for scheme in SCHEMES]
        yield f"{rows}x{columns}, 64 rows, step", contenders, bars


class Hop(torch.Tensor):
    """A subclass that answers every function at once: what torch's own turn through Python costs."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return None


def layers(scheme, weight, x):
    """Parts of the way from ``F.linear`` to the kernel, from the outside to the inside: the inner lie in the outer."""
    found, rule = weight.kernel_layout, RULES[F.linear]
    parts, wrong = found.pick_from(weight), torch.ones(3, dtype=x.dtype)
    made = {
        f"{scheme}: rule, without the shortcut": lambda: rule(F.linear, x, weight),
        f"{scheme}: shortcut": lambda: cpu.shortcut_linear((x, weight), None),
    }
    kernels = build.load(found.kind)
    if kernels is not None:
        enter, address = kernels.linear, found.address
        made[f"{scheme}: entry, result, kernel"] = lambda: enter(address, x, None, *parts)
        made[f"{scheme}: entry, refused at the end"] = lambda: enter(address, x, wrong, *parts)
    return made


def dispatch(size):
    """The layers of the path, on a weight that costs nothing to multiply with."""
    values, x = random_values(64, 256), torch.randn(1, 256).bfloat16()  # quanto hangs on 16x128
    contenders, bars, hop = {"plain F.linear": applied(values, x)}, [], values.as_subclass(Hop)
    contenders |= {name: called(module, x) for name, module in peer_linears(values).items()}
    contenders["hop: a subclass that does nothing"] = lambda: F.linear(x, hop)
    contenders["who looks on"] = is_observed
    contenders["a new result"] = lambda: empty_on_cpu((1, 64), (64, 1), torch.bfloat16)
    for scheme in ("int8", "int4"):
        weight = weight_of(values, scheme)
        layout = weight.kernel_layout
        parts = layout.pick_from(weight)
        direct = f"{scheme}: kernel, plain tensors"
        contenders[f"ours {scheme}"] = applied(weight, x)
        contenders[direct] = lambda layout=layout, parts=parts: cpu.linear(layout, parts, x, None)
        with torch.no_grad():
            F.linear(x, weight)  # from now on its kernel is known
        contenders |= layers(scheme, weight, x)
        bars.append((f"{scheme}: microseconds above its kernel", f"ours {scheme}", (direct,), 2.0))
    yield "dispatch, 64x256", contenders, bars


def compiled(size):
    """Sixteen layers: the call of a graph costs torch itself 100 to 200 microseconds, however much is in it."""
    for _, columns in SHAPES[size][:1]:
        values, x = random_values(columns, columns), torch.randn(1, columns).bfloat16()
        plain, bars = nn.Sequential(*(dense(values) for _ in range(16))), []
        contenders = {DENSE: called(plain, x), f"compiled {DENSE}": called(torch.compile(plain, fullgraph=True), x)}
        for scheme in SCHEMES:
            layers = nn.Sequential(*(dense(values) for _ in range(16)))
            for layer in layers:
                layer.weight = weight_of(values, scheme)
            run = torch.compile(layers, fullgraph=True)
            contenders[f"ours {scheme}"], contenders[f"compiled {scheme}"] = called(layers, x), called(run, x)
            bars.append((f"compiled {scheme} against eager", f"compiled {scheme}", (f"ours {scheme}",), 1.05))
        yield f"{columns}x{columns}, 16 layers", contenders, bars
    width, layers, vocabulary = TRANSFORMERS[size]
    plain, bars = Decoder(width, layers, vocabulary).bfloat16().requires_grad_(False), []
    inputs = torch.tensor([[1]]), torch.randn(1, 8, 64, width // 8).bfloat16()
    contenders = {DENSE: called(plain, *inputs), f"compiled {DENSE}": called(torch.compile(plain), *inputs)}
    for scheme in SCHEMES:
        model = tt.quantize(copy.deepcopy(plain), {"*norm*": None, "*": scheme}).requires_grad_(False)
        run = torch.compile(model, fullgraph=True)
        contenders[f"ours {scheme}"], contenders[f"compiled {scheme}"] = called(model, *inputs), called(run, *inputs)
        bars.append((f"compiled {scheme} against eager", f"compiled {scheme}", (f"ours {scheme}",), 1.0))
    yield f"tied transformer, {layers} layers of {width}, one token", contenders, bars


class Layer(nn.Module):
    """A layer of a Llama, of 8 heads and without positions, that attends to given keys and values and its own."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x, past):
        y = self.norm1(x)
        query, key, value = (f(y).view(*x.shape[:2], 8, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        keys, values = torch.cat((past, key), 2), torch.cat((past, value), 2)
        x = x + self.out(F.scaled_dot_product_attention(query, keys, values).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Such layers between an embedding and the head that is tied to it."""

    def __init__(self, width, layers, vocabulary):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.layers, self.norm = nn.ModuleList(Layer(width) for _ in range(layers)), nn.RMSNorm(width)

    def forward(self, tokens, past):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, past)
        return self.head(self.norm(x))


def dense(values):
    layer = nn.Linear(values.shape[1], values.shape[0], bias=False, dtype=values.dtype)
    layer.weight = nn.Parameter(values.clone(), requires_grad=False)
    return layer


GROUPS = {
    "decode": decode,
    "prefill": prefill,
    "activations": activations,
    "embedding": embedding,
    "backward": backward,
    "dispatch": dispatch,
    "compiled": compiled,
}


# -- measuring --------------------------------------------------------------------------------------------------------


def measure(contenders, rounds):
    """Seconds per call of every round, by contender; all take turns."""
    repeats = {}
    for name, run in contenders.items():
        run()
        start = time.perf_counter()
        run()
        repeats[name] = max(1, min(2000, int(SLICE / max(time.perf_counter() - start, 1e-7))))
    found = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                run()
            found[name].append((time.perf_counter() - start) / repeats[name])
    return found


def ratio(found, ours, others):
    """The median over the rounds of our time over that of the fastest of the others."""
    return statistics.median(value / min(found[other][i] for other in others) for i, value in enumerate(found[ours]))


def above(found, ours, other):
    """The median over the rounds of the difference, in microseconds."""
    return statistics.median(1e6 * (a - b) for a, b in zip(found[ours], found[other], strict=True))


def groups(names=tuple(GROUPS), size="full", rounds=5, show=print):
    """The rows and bars of the named groups, as dictionaries; every line is shown as soon as it is known."""
    rows, bars = [], []
    for group in names:
        grad = torch.enable_grad() if group == "backward" else torch.no_grad()
        with grad:
            for title, contenders, wanted in GROUPS[group](size):
                found = measure(contenders, rounds)
                first = next(iter(contenders))
                for name, values in found.items():
                    values, relative = sorted(values), ratio(found, name, (first,))
                    row = {"group": group, "case": title, "name": name, "seconds": statistics.median(values)}
                    rows.append(row | {"low": values[0], "high": values[-1], "ratio": relative})
                    show(
                        f"{title:26} {name:32} {statistics.median(values) * 1e6:12.2f} us "
                        f"[{values[0] * 1e6:.2f} .. {values[-1] * 1e6:.2f}] {relative:7.2f} x"
                    )
                for name in found:
                    bound = name.replace("ours", "limit")
                    if name.startswith("ours ") and bound in found:
                        relative = ratio(found, name, (bound,))
                        rows.append({"group": group, "case": title, "name": f"{name} over {bound}", "ratio": relative})
                        show(f"{title:26} {name} over what reading its bytes takes: {relative:.2f}")
                for what, ours, others, most in wanted:
                    figure = above(found, ours, *others) if group == "dispatch" else ratio(found, ours, others)
                    state = "held" if figure <= most else "missed"
                    bar = {"group": group, "case": title, "bar": what, "figure": figure, "limit": most}
                    bars.append(bar | {"state": state})
                    show(f"{title:26} {state:7} {what}: {figure:.2f}, at most {most:.2f}")
    return {"rows": rows, "bars": bars}


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads")
    found = groups(options.groups, options.size, options.rounds, lambda line: print(line, flush=True))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
