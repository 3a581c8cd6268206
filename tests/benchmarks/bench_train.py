"""The cost of a training step of adapters on experts, compared with PEFT's own and bitsandbytes. Run by hand:

    python -m tests.benchmarks.bench_train [--size small|quick|full | --quick] [--rounds 3] [--threads N]
                                           [--dtype bfloat16|float32] [--only NAME ...] [--json FILE]

A Qwen3-MoE of random values (full 2 layers of 64 experts, 2048 x 768, 64 of them in use), adapters of rank
8 on attention and on every expert in float32 as PEFT makes them, AdamW, gradients without checkpointing.

    dense         PEFT's target_parameters on fused experts in DTYPE; without AVX-512 compare in float32, too: there
                  torch's products in bfloat16 take many times as long
    dense linear  PEFT's lora.Linear on every expert's three nn.Linear, as before transformers fused them
    parametrized  PEFT's target_parameters on experts that are Weights, nf4: PEFT alone
    torchtether   the same, with torchtether.integrations.peft
    bitsandbytes  lora.Linear4bit on every expert's three bnb.nn.Linear4bit, nf4

Each run is a process of its own, which makes the model, takes one step, and then times and weighs the next ones.

    memory    resident at the peak of those steps, above what the process had with everything imported
    step      forward, backward, and the optimizer's step; the fastest of a process

Contenders take turns; figures are medians over rounds, ratios medians of the ratios within a round to ``dense``.
"""

import argparse
import ctypes
import gc
import json
import statistics
import time
import warnings
from importlib import import_module
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import torchtether as tt
from tests.benchmarks.measuring import cores_of_others, in_fresh_process, peak_memory, processor

SIZES = {
    "full": {"hidden": 2048, "inner": 768, "experts": 64, "layers": 2, "tokens": 512, "steps": 3},
    "quick": {"hidden": 1024, "inner": 768, "experts": 32, "layers": 2, "tokens": 256, "steps": 3},
    "small": {"hidden": 128, "inner": 64, "experts": 4, "layers": 1, "tokens": 16, "steps": 1},
}
DENSE, OURS = "dense", "torchtether"
CONTENDERS = (DENSE, "dense linear", "parametrized", OURS, "bitsandbytes")
BARS = {"memory": 0.35, "step": 1.3}
"""At most so many times what dense adapters on fused experts take."""


class LinearExperts(nn.Module):
    """The experts of Qwen3-MoE as they were before they were fused: three layers each."""

    def __init__(self, config, linear):
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        names = {"w1": (hidden, inner), "w3": (hidden, inner), "w2": (inner, hidden)}  # PEFT renames others
        self.experts = nn.ModuleList(
            nn.ModuleDict({name: linear(*shape) for name, shape in names.items()}) for _ in range(config.num_experts)
        )

    def forward(self, hidden_states, top_k_index, top_k_weights):
        made = torch.zeros_like(hidden_states)
        for number in top_k_index.unique().tolist():
            token, place = torch.where(top_k_index == number)
            x, expert = hidden_states[token], self.experts[number]
            x = expert["w2"](F.silu(expert["w1"](x)) * expert["w3"](x))
            made.index_add_(0, token, (x * top_k_weights[token, place, None]).to(made.dtype))
        return made


def random_values(shape, dtype):
    return torch.empty(shape).uniform_(-0.03, 0.03).to(dtype)


def linear_of(name, dtype):
    """What makes one layer of an expert."""
    if name != "bitsandbytes":
        return lambda *shape: nn.Linear(*shape, bias=False, dtype=dtype).requires_grad_(False)
    import bitsandbytes as bnb

    def quantized(columns, rows):
        made = bnb.nn.Linear4bit(columns, rows, bias=False, compute_dtype=dtype, quant_type="nf4")
        values = random_values((rows, columns), dtype)
        made.weight = bnb.nn.Params4bit(values, requires_grad=False, quant_type="nf4", module=made)
        return made.to("cpu")

    return quantized


def build(name, size, dtype):
    """The model with its adapters, its values made one parameter after the other."""
    import peft
    import transformers

    own = peft.tuners.lora.ParamWrapper._activate_lora, peft.tuners.lora.ParamWrapper.forward
    import_module("torchtether.integrations.peft")
    if name == "parametrized":
        peft.tuners.lora.ParamWrapper._activate_lora, peft.tuners.lora.ParamWrapper.forward = own
    config = transformers.Qwen3MoeConfig(
        vocab_size=512, hidden_size=size["hidden"], moe_intermediate_size=size["inner"], num_experts=size["experts"],
        num_experts_per_tok=min(8, size["experts"] // 2), num_hidden_layers=size["layers"], num_attention_heads=4,
        num_key_value_heads=2, head_dim=size["hidden"] // 8, dtype=dtype,
    )  # fmt: skip
    with tt.on_meta():
        model = transformers.AutoModelForCausalLM.from_config(config)
    is_linear = name in ("dense linear", "bitsandbytes")
    for path, module in list(model.named_modules()):
        if is_linear and path.endswith("mlp.experts"):
            model.set_submodule(path, LinearExperts(config, linear_of(name, dtype)))
            continue
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            made = torch.ones_like(parameter, device="cpu") if "norm" in path else random_values(parameter.shape, dtype)
            if "experts" in path and name in ("parametrized", OURS):
                made = tt.Weight.encode(made, tt.nf4())
            setattr(module, leaf, nn.Parameter(made, requires_grad=False))
    tt.materialize(model)
    model.is_loaded_in_4bit = name == "bitsandbytes"  # for PEFT
    fused = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    targets = ["w1", "w2", "w3"] if is_linear else []
    options = peft.LoraConfig(
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", *targets], r=8, init_lora_weights=False,
        target_parameters=None if is_linear else fused,
    )  # fmt: skip
    return peft.get_peft_model(model, options).train()


def run(name, size, dtype, threads):
    """The figures of one process, in bytes and seconds."""
    import peft  # noqa: F401 - not weighed
    import transformers  # noqa: F401

    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if name == "bitsandbytes":
        import bitsandbytes  # noqa: F401
    before = resident()
    model = build(name, size, dtype)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-4)
    ids = torch.randint(512, (1, size["tokens"]), generator=torch.Generator().manual_seed(0))

    def step():
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    step()
    forget_peak()
    seconds = []
    for _ in range(size["steps"]):
        start = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - start)
    return {"memory": peak_memory() - before, "step": min(seconds), "loss": loss}


def resident():
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def forget_peak():
    """Let the peak be what is resident now, after what malloc keeps has gone back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="quick")
    parser.add_argument("--quick", dest="size", action="store_const", const="quick")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    print(" ".join(f"{key} {value}" for key, value in processor().items()))
    dtype = getattr(torch, options.dtype)
    runs = {name: [] for name in CONTENDERS if name in (DENSE, OURS, *options.only)}
    for _ in range(options.rounds):
        for name in [*runs]:
            try:
                with cores_of_others() as others:
                    found = in_fresh_process(run, name, SIZES[options.size], dtype, options.threads)
            except Exception as error:
                print(f"{name:14} does not run: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
                del runs[name]
                continue
            runs[name].append(found | {"others": others()})
    rows, bars = figures_of(runs)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "bars": bars}, indent=1))


def figures_of(runs):
    """The rows and the bars, which are printed too."""
    rows = []
    for name, some in runs.items():
        row = {"name": name} | {key: statistics.median(one[key] for one in some) for key in some[0]}
        pairs = list(zip(some, runs[DENSE], strict=True))
        ratios = {key: statistics.median(one[key] / dense[key] for one, dense in pairs) for key in BARS}
        rows.append(row | {"ratios": ratios, "runs": some})
        print(
            f"{name:14} {row['memory'] / 2**20:7.0f} MiB {ratios['memory']:5.2f} x   {row['step']:7.2f} s "
            f"{ratios['step']:5.2f} x   loss {row['loss']:.3f}   others {row['others']:.2f}", flush=True
        )  # fmt: skip
    ours = next(row for row in rows if row["name"] == OURS)
    bars = [
        {"case": "adapters on experts, nf4", "bar": f"{what} against dense", "figure": ours["ratios"][what],
         "limit": limit, "state": "held" if ours["ratios"][what] <= limit else "missed"}
        for what, limit in BARS.items()
    ]  # fmt: skip
    for bar in bars:
        print(f"{bar['state']}: {bar['bar']} {bar['figure']:.2f}, at most {bar['limit']:.2f}")
    return rows, bars


if __name__ == "__main__":
    main()
