"""The cost of products with quantized weights, compared with dense bfloat16 and other packages. Run by hand:

    python -m tests.benchmarks.bench_compute [--size small|quick|full | --quick] [--rounds 5] [--groups NAME ...]
                                             [--threads N] [--json FILE]

Contenders take turns in one process; figures are medians with the lowest and highest, and ratios are medians of the
ratios within a round, to the first contender of a case. Machines are noisy: compare ratios, and only within a run.
Kernels are compiled before anything is timed, but for the group ``first``. ``quick`` takes the first shape alone.

    decode      one row of bfloat16 inputs, peers too    batches    8, 16 and 64 rows
    prefill     512 rows                                 schemes    one row, whatever else formats can hold
    float32     one row of float32, small layers too     first      a process's first product against a later one
    activations inputs rounded to 8 bits, 1 to 512 rows, and how far that moves a product
    autocast    float32 inputs under autocast, beside products without it
    embedding   512 tokens, and one                      backward   a training step of inputs through a frozen weight
    dispatch    a tiny weight: microseconds by layer     compiled   one row through torch.compile (needs a C++ compiler)

A table at the end has one line a bar: what is bounded, the bar for this processor, the figure of every case, and
whether all hold. Bars for AVX-512 are in force where torch uses it; ``ATEN_CPU_CAPABILITY=avx2`` plays an older one.

"limit" reads as many bytes as the parts of a weight have, with all threads and a compiled loop: a product cannot take
less, and where ours takes about as long, memory is what bounds it. torch's own dense product does not read at that rate
everywhere, so ratios to it can be below the ratio of bytes.

torchao and quanto run as users meet them, as a quantized ``nn.Linear``; "torch int8pack" and "torch int4pack" are
torch's own kernels, called with plain tensors that were packed before.
"""

import argparse
import copy
import json
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import torchtether as tt
from tests.benchmarks import products
from tests.benchmarks.contenders import DENSE, SCHEMES, SHAPES, applied, called, peer_linears, random_values, weight_of
from tests.benchmarks.measuring import above, measure, processor, ratio, waited
from torchtether.torch_private.observers import is_observed
from torchtether.torch_private.tensors import empty_on_cpu
from torchtether.weights.dispatch import RULES
from torchtether.weights.products import cpu

TRANSFORMERS = {"full": (1024, 8, 32000), "quick": (512, 2, 8000), "small": (64, 1, 96)}
"""Width, layers, vocabulary."""

BATCHES = {"full": 512, "quick": 512, "small": 8}


# -- groups: each yields (title, contenders, bars); a bar is (what, ours, others, limit) -------------------------------


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
    for rows, columns in [(1024, 1024)] if size != "small" else SHAPES[size]:
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
    """Parts of the way from ``F.linear`` to the kernel."""
    rule = RULES[F.linear]
    return {
        f"{scheme}: rule, without the shortcut": lambda: rule(F.linear, x, weight),
        f"{scheme}: shortcut": lambda: cpu.shortcut_linear((x, weight), None),
    }


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
        bars.append((f"{scheme}: microseconds above its kernel", f"ours {scheme}", (direct,), 3.0))
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
    **products.GROUPS,
    "embedding": embedding,
    "backward": backward,
    "dispatch": dispatch,
    "compiled": compiled,
}


# -- measuring --------------------------------------------------------------------------------------------------------


FIGURES = {"dispatch": above, "first": waited}
"""What bars of a group are of, if not the ratio to the fastest of the others."""


def groups(names=tuple(GROUPS), size="full", rounds=5, show=print):
    """The rows and bars of the named groups, as dictionaries; every line is shown as soon as it is known."""
    rows, bars = [], []
    for group in names:
        grad = torch.enable_grad() if group == "backward" else torch.no_grad()
        with grad:
            for title, contenders, wanted in GROUPS[group](size):
                found = contenders(rounds) if callable(contenders) else measure(contenders, rounds)
                first = next(iter(found))
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
                    figure = FIGURES[group](found, ours, *others) if group in FIGURES else ratio(found, ours, others)
                    state = "held" if figure <= most else "missed"
                    bar = {"group": group, "case": title, "bar": what, "figure": figure, "limit": most}
                    bars.append(bar | {"state": state})
                    show(f"{title:26} {state:7} {what}: {figure:.2f}, at most {most:.2f}")
    return {"rows": rows, "bars": bars}


def table(bars):
    """The lines of the table of bars: one for each, with the figure of every case."""
    by_bar = {}
    for bar in bars:
        by_bar.setdefault((bar["group"], bar["bar"], bar["limit"]), []).append(bar)
    for (group, what, most), some in by_bar.items():
        state = "missed" if any(bar["state"] == "missed" for bar in some) else "held"
        yield f"{state:7} {group:12} {what:52} at most {most:6.2f}: " + " ".join(
            f"{bar['figure']:7.2f}" for bar in some
        )


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=("full", "quick", "small"), default="full")
    parser.add_argument("--quick", dest="size", action="store_const", const="quick")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        facts = " ".join(f"{key} {value}," for key, value in processor().items())
        print(f"{facts} torch {torch.__version__}, {torch.get_num_threads()} threads")
        found = groups(options.groups, options.size, options.rounds, lambda line: print(line, flush=True))
    finally:
        torch.set_num_threads(threads)
    print("\nstate   group        what is bounded, the bar, the figure of every case")
    print(*table(found["bars"]), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
