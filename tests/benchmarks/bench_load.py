"""The cost of loading and saving, compared with plain reads and other loaders. Run by hand:

    python -m tests.benchmarks.bench_load [--size small|full] [--rounds 5] [--groups NAME ...] [--folder DIR]
                                          [--json FILE]

The full checkpoint is a tied 1.24 B-parameter Llama with random values, bf16, 2.5 GB; it is written to a temporary
folder (in DIR, or where TMPDIR says; 5 GB must fit) and removed afterwards. Every run is a process of its own on a warm
page cache: before its time begins every byte of the files has been read, and twice as much memory has been touched and
freed. Virtual machines hand free memory back to their host (virtio-balloon with free page reporting), and the first
touch of a page that the host must find again takes 20 times as long as of any other: whoever ran first, or after a
pause, would pay for it. The host takes pages every few seconds, in the middle of a run, too: the groups that compare
with plain reads take the fastest of three tries in one process. Contenders take turns, and another is first in every
round; figures are medians with the lowest and highest, and ratios are medians of the ratios within a round. Machines
are noisy: compare ratios, and only within a run. Time begins when a tiny checkpoint has been loaded in the same way, so
that imports are done, and the model is on meta; transformers builds its model within its time, because it offers
nothing else.

    read      a plain read of the same bytes: two threads, positioned reads, into fresh memory (4 KB or huge pages)
    anon      anonymous memory at its peak, above what there was before, and above the final model
              a peer that stays far below the final model has left the bytes in the file, to be read at first use
    mapped    resident pages of mapped files afterwards, above what there was before
    cold      the group of that name has dropped the files from the page cache before each run, and says how much of
              them stayed there; what the host of a virtual machine keeps of its disk is out of reach
"""

import argparse
import ctypes
import gc
import importlib.util
import json
import mmap
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from operator import itemgetter
from pathlib import Path

import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

import torchtether as tt
from torchtether.progress import Meter
from torchtether.schemes import resolve

MIB = 2**20
PIECE = 4 * MIB
SIZES = {
    "full": {"hidden": 2048, "inner": 8192, "layers": 16, "heads": 32, "kv_heads": 8, "vocab": 128256},
    "half": {"hidden": 2048, "inner": 8192, "layers": 4, "heads": 32, "kv_heads": 8, "vocab": 32000},
    "small": {"hidden": 256, "inner": 512, "layers": 2, "heads": 8, "kv_heads": 2, "vocab": 2048},
    "tiny": {"hidden": 128, "inner": 128, "layers": 1, "heads": 4, "kv_heads": 2, "vocab": 128},
}
TRIES, LONG = 3, 3.0  # seconds; what takes longer is tried once
SMALL_TENSORS = {"full": 20_000, "small": 200, "tiny": 2}
PLANNED_SHARDS = {"full": 1000, "small": 8, "tiny": 4}
PER_SHARD = 200


# -- models and checkpoints -------------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class Attention(nn.Module):
    def __init__(self, hidden, kv):
        super().__init__()
        for name, width in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            self.add_module(f"{name}_proj", nn.Linear(hidden, width, bias=False))


class Mlp(nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)


class Layer(nn.Module):
    def __init__(self, hidden, inner, kv):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden), Norm(hidden)
        self.self_attn, self.mlp = Attention(hidden, kv), Mlp(hidden, inner)


class Body(nn.Module):
    def __init__(self, hidden, inner, layers, heads, kv_heads, vocab):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Layer(hidden, inner, hidden // heads * kv_heads) for _ in range(layers))
        self.norm = Norm(hidden)


class Llama(nn.Module):
    """The parameters of a Llama with a tied head, under the names that published checkpoints use."""

    def __init__(self, **size):
        super().__init__()
        self.model = Body(**size)
        self.lm_head = nn.Linear(size["hidden"], size["vocab"], bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight


class Many(nn.Module):
    """``count`` parameters of 64 elements, 100 in each module."""

    def __init__(self, count):
        super().__init__()
        for i in range(count):
            if i % 100 == 0:
                part = nn.Module()
                self.add_module(f"part{i // 100}", part)
            part.register_parameter(f"weight{i % 100}", nn.Parameter(torch.ones(64)))


def on_meta(size, dtype=torch.bfloat16, many=0):
    with torch.device("meta"):
        return Many(many).to(dtype) if many else Llama(**SIZES[size]).to(dtype)


def write_checkpoint(folder, model, shards):
    """A checkpoint of ``model`` with random values, as transformers would publish it; drawn from a small pool."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    pools = {dtype: torch.randn(4 * MIB).to(dtype) for dtype in {tensor.dtype for tensor in model.parameters()}}
    named = dict(model.named_parameters())
    total = sum(tensor.nbytes for tensor in named.values())
    limit, groups, filled = -(-total // shards), [[]], 0
    for name, tensor in named.items():
        if filled >= limit * len(groups) and len(groups) < shards:
            groups.append([])
        groups[-1].append(name)
        filled += tensor.nbytes
    weight_map = {}
    for i, names in enumerate(groups, 1):
        file = "model.safetensors" if len(groups) == 1 else f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        values = {}
        for name in names:
            made = values[name] = torch.empty_like(named[name], device="cpu", requires_grad=False)
            for piece in made.view(-1).split(4 * MIB):
                piece.copy_(pools[made.dtype][: len(piece)])
            weight_map[name] = file
        safetensors.torch.save_file(values, folder / file, metadata={"format": "pt"})
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def lengthen_header(path, behind):
    """The first tensor of the file begins ``behind`` bytes before a page ends: copies are slow from there (Zen 4)."""
    with open(path, "rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        header += b" " * (-(8 + len(header) + behind) % mmap.PAGESIZE)
        with open(path.with_suffix(".new"), "wb") as out:
            out.write(len(header).to_bytes(8, "little") + header)
            shutil.copyfileobj(file, out, PIECE)
    os.replace(path.with_suffix(".new"), path)


def write_headers(folder, shards):
    """A checkpoint of ``Many`` in ``shards`` files of ``PER_SHARD`` tensors: headers are written, values are holes."""
    folder.mkdir(parents=True)
    with torch.device("meta"):
        names = [name for name, _ in Many(shards * PER_SHARD).named_parameters()]
    weight_map = {}
    for i in range(shards):
        file, some = f"model-{i + 1:05d}-of-{shards:05d}.safetensors", names[i * PER_SHARD :][:PER_SHARD]
        header = {
            name: {"dtype": "BF16", "shape": [64], "data_offsets": [at * 128, at * 128 + 128]}
            for at, name in enumerate(some)
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / file, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + 128 * len(some))
        weight_map |= dict.fromkeys(some, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_config(folder, size, dtype):
    s = SIZES[size]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": s["hidden"],
        "intermediate_size": s["inner"],
        "num_hidden_layers": s["layers"],
        "num_attention_heads": s["heads"],
        "num_key_value_heads": s["kv_heads"],
        "head_dim": s["hidden"] // s["heads"],
        "vocab_size": s["vocab"],
        "tie_word_embeddings": True,
        "dtype": dtype,
    }
    (folder / "config.json").write_text(json.dumps(config))


def files_of(folder):
    return sorted(folder.glob("*.safetensors"))


# -- contenders: each makes ready, and returns what is timed; that returns what must stay alive -----------------------


def plain_read(folder, options, huge=True):
    """Every byte in fresh memory: two threads, one mapping per file, positioned reads."""

    def run():
        jobs, kept = [], []
        for path in files_of(folder):
            size, descriptor = path.stat().st_size, os.open(path, os.O_RDONLY)
            room = mmap.mmap(-1, size + 2 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                room.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
            start = -ctypes.addressof(ctypes.c_char.from_buffer(room)) % (2 * MIB)
            memory = memoryview(room)[start : start + size]
            jobs += [(descriptor, memory[at : at + PIECE], at) for at in range(0, size, PIECE)]
            kept.append((memory, descriptor))
        _two_threads(iter(jobs), lambda job: os.preadv(job[0], [job[1]], job[2]))
        return kept

    return run


def sequential_read(folder, options):
    """Every byte of one file after the other, as the system reads ahead, by one thread into one piece of memory."""

    def run():
        piece = bytearray(PIECE)
        for path in files_of(folder):
            with open(path, "rb", buffering=0) as file:
                while file.readinto(piece):
                    pass

    return run


def _two_threads(jobs, work):
    lock = threading.Lock()

    def loop():
        while True:
            with lock:
                job = next(jobs, None)
            if job is None:
                return
            work(job)

    other = threading.Thread(target=loop)
    other.start()
    loop()
    other.join()


def encode_alone(folder, options):
    """What two threads of our own encoder take for the quantized bytes, from a piece that is in the cache."""
    scheme, model = resolve(options["quantize"]), on_meta(options["size"])
    linears = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Linear)}.values()
    jobs = []
    for weight in linears:
        rows = max(1, 2 * MIB // weight.shape[1])
        jobs += [(rows, weight.shape[1])] * max(1, weight.shape[0] // rows)
    values = {shape: torch.randn(shape, dtype=torch.bfloat16) for shape in set(jobs)}
    local = threading.local()

    def work(shape):
        parts = local.__dict__.setdefault("parts", {})
        if shape not in parts:
            parts[shape] = scheme.encode(values[shape])
        scheme.encode_into(values[shape], parts[shape])

    return lambda: _two_threads(iter(jobs), work)


def torchtether_ops(folder, options):
    """Without the compiled kernels."""
    os.environ["TORCHTETHER_COMPILE"] = "0"
    return torchtether(folder, options)


def torchao_after(folder, options):
    """safetensors, then torchao."""
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    config = {
        "int8": lambda: Int8WeightOnlyConfig(),
        "int4": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(64)),
        "fp8": lambda: Float8WeightOnlyConfig(),
    }[options["quantize"]]()
    load = safetensors_assign(folder, options, own=False)

    def run():
        model = load()
        quantize_(model, config)
        return model

    return run


def quanto_after(folder, options):
    """safetensors, then quanto."""
    from optimum import quanto

    kind = {"int8": quanto.qint8, "int4": quanto.qint4, "fp8": quanto.qfloat8}[options["quantize"]]
    load = safetensors_assign(folder, options, own=False)

    def run():
        model = load()
        quanto.quantize(model, weights=kind)
        quanto.freeze(model)
        return model

    return run


def bitsandbytes_after(folder, options):
    """safetensors, then bitsandbytes' nf4, layer by layer."""
    import bitsandbytes.functional as functional

    load = safetensors_assign(folder, options, own=False)

    def run():
        model, kept = load(), []
        for module in model.modules():
            if isinstance(module, nn.Linear):
                kept.append(functional.quantize_4bit(module.weight.detach(), blocksize=64, quant_type="nf4"))
                module.weight = None
        return kept

    return run


def torchtether(folder, options, mmap=False):
    model = on_meta(options["size"], many=options.get("many", 0))
    wanted = {name: options[name] for name in ("quantize", "dtype") if name in options}

    def run():
        tt.load(model, folder, mmap=mmap, **wanted)
        return model

    return run


def plan(folder, options, part=""):
    folder = folder / part
    model = on_meta(options["size"], many=PER_SHARD * len(files_of(folder)))
    return lambda: tt.plan_load(model, folder)


def safetensors_headers(folder, options):
    """What anybody does to know dtypes and shapes: every file opened, every tensor asked for both."""

    def run():
        for path in files_of(folder):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    part = file.get_slice(name)
                    part.get_dtype(), part.get_shape()

    return run


def safetensors_assign(folder, options, own=True):
    """load_file and assign; ``own``: and a clone (a conversion, if one is asked for), so that no map is kept."""
    model, dtype = on_meta(options["size"], many=options.get("many", 0)), options.get("dtype")

    def run():
        for path in files_of(folder):
            values = safetensors.torch.load_file(path)
            for name in values if own else ():
                values[name] = values[name].to(dtype) if dtype else values[name].clone()
            model.load_state_dict(values, assign=True, strict=False)
        if not options.get("many"):
            model.lm_head.weight = model.model.embed_tokens.weight
        return model

    return run


def safetensors_loop(folder, options):
    """safetensors' own loop over the tensors of the file, with nobody to hold them but a dict."""

    def run():
        made = {}
        for path in files_of(folder):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    made[name] = file.get_tensor(name)
        return made

    return run


def transformers_load(folder, options):
    import transformers

    transformers.logging.disable_progress_bar()
    more = {}
    if "quantize" in options:
        from torchao.quantization import Int8WeightOnlyConfig

        more["quantization_config"] = transformers.TorchAoConfig(Int8WeightOnlyConfig())

    def run():
        return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **more)

    return run


def accelerate_load(folder, options):
    import accelerate

    model, dtype = on_meta(options["size"], many=options.get("many", 0)), options.get("dtype")

    def run():
        accelerate.load_checkpoint_in_model(model, folder, device_map={"": "cpu"}, dtype=dtype)
        return model

    return run


def refit(folder, options, source):
    """A model that is quantized already takes the same values again: from memory, as pieces, or from the files."""
    model, trainer = on_meta(options["size"]), on_meta(options["size"])
    tt.load(model, folder, quantize=options["quantize"])
    if source != "path":
        tt.load(trainer, folder)
    state = trainer.state_dict()
    return lambda: tt.refit(model, {"path": folder, "state dict": state, "pieces": state.items()}[source])


def _loaded(folder, options):
    model = on_meta(options["size"])
    tt.load(model, folder)
    return model, folder.parent / f"saved-{os.getpid()}"


def torchtether_save(folder, options):
    model, target = _loaded(folder, options)
    return lambda: tt.save(model, target)


def safetensors_save(folder, options):
    model, target = _loaded(folder, options)
    target.mkdir()
    return lambda: safetensors.torch.save_model(model, str(target / "model.safetensors"))


def plain_write(folder, options, sync=True):
    """The same bytes by write(), in pieces, to a new file, which is then synchronised as ours is."""
    model, target = _loaded(folder, options)
    target.mkdir()

    def run():
        with open(target / "all", "wb", buffering=0) as file:
            for tensor in model.parameters():
                memory = memoryview(tensor.detach().view(torch.uint8).reshape(-1).numpy())
                for at in range(0, len(memory), PIECE):
                    file.write(memory[at : at + PIECE])
            if sync:
                os.fsync(file.fileno())

    return run


READ, READ_4K = "read, huge pages", "read, 4 KB pages"
SEQUENTIAL = "read, one thread"
CONTENDERS = {
    READ: plain_read,
    READ_4K: lambda folder, options: plain_read(folder, options, huge=False),
    SEQUENTIAL: sequential_read,
    "encode alone": encode_alone,
    "torchtether": torchtether,
    "torchtether ops": torchtether_ops,
    "torchao after": torchao_after,
    "quanto after": quanto_after,
    "bitsandbytes after": bitsandbytes_after,
    "torchtether mapped": lambda folder, options: torchtether(folder, options, mmap=True),
    "safetensors mapped": lambda folder, options: safetensors_assign(folder, options, own=False),
    "safetensors own": safetensors_assign,
    "safetensors loop": safetensors_loop,
    "safetensors headers": safetensors_headers,
    "torchtether plan": plan,
    "torchtether plan, a quarter": lambda folder, options: plan(folder, options, "quarter"),
    "transformers": transformers_load,
    "accelerate": accelerate_load,
    "write, synced": plain_write,
    "write, not synced": lambda folder, options: plain_write(folder, options, sync=False),
    "torchtether save": torchtether_save,
    "safetensors save": safetensors_save,
}
REFITS = {f"refit, {source}": source for source in ("state dict", "pieces", "path")}
CONTENDERS |= {name: partial(refit, source=source) for name, source in REFITS.items()}
PEERS = ("safetensors own", "transformers", "accelerate")
QUANTIZING = {
    "torchao after": ("torchao", ("int8", "int4", "fp8")),
    "quanto after": ("optimum", ("int8", "int4", "fp8")),
    "bitsandbytes after": ("bitsandbytes", ("nf4",)),
}
"""Peers that quantize what another loader has loaded: the package, and the schemes that it has."""
PRELOADED = (
    "torchtether",
    "safetensors.torch",
    "accelerate",
    "torchao",
    "torchao.quantization",
    "transformers.models.llama.modeling_llama",
)


def mapped_pages():
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("RssFile:")), 0)


def warm(folder):
    """The files are in the page cache, and the system has touched memory at hand, twice as much as they are long."""
    piece, total = bytearray(PIECE), 0
    for path in folder.rglob("*.safetensors"):
        total += path.stat().st_size
        with open(path, "rb", buffering=0) as file:
            while file.readinto(piece):
                pass
    nbytes = min(2 * total, free_memory() // 2) // MIB * MIB
    if nbytes:
        with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room:
            if hasattr(mmap, "MADV_HUGEPAGE"):
                room.madvise(mmap.MADV_HUGEPAGE)
            ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(room)), 1, nbytes)


def free_memory():
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("MemAvailable:")), 0)


def chill(folder):
    """The files have been dropped from the page cache, where the system takes that advice; the share that stayed."""
    paths = files_of(folder)
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # what is not written yet cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return sum(resident(path) for path in paths) / max(1, sum(path.stat().st_size for path in paths))


def resident(path):
    """Bytes of the file that are in the page cache."""
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as pages:
        flags = ctypes.create_string_buffer(-(-len(pages) // mmap.PAGESIZE))
        if mincore(ctypes.addressof(ctypes.c_char.from_buffer(pages)), len(pages), flags):
            return 0
        return sum(flag & 1 for flag in flags.raw) * mmap.PAGESIZE


def measure(name, folder, options):
    """The figures of one run, with the time of the fastest of several; call it in a process of its own."""
    gc.freeze()  # collections need not walk over the modules of all libraries
    tries = [measure_once(name, folder, options, first=True)]
    while len(tries) < options.get("tries", 1) and tries[-1]["wall"] < LONG:
        tries.append(measure_once(name, folder, options, first=False))
    fastest = min(tries, key=itemgetter("wall"))
    return tries[0] | {"wall": fastest["wall"], "cpu": fastest["cpu"]}


def measure_once(name, folder, options, first):
    tiny = {**options, "size": "tiny"} | ({"many": SMALL_TENSORS["tiny"]} if "many" in options else {})
    if first:
        CONTENDERS[name](folder.parent / "tiny" / folder.name.partition("-")[0], tiny)()
        remove_saved(folder.parent / "tiny")
    run = CONTENDERS[name](folder, options)
    gc.collect()
    if not first and hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)  # what the last try has freed is fresh memory again
    warm(folder)
    stayed = chill(folder) if options.get("cold") else 1.0
    mapped, cpu = mapped_pages(), time.process_time()
    with Meter() as meter:
        kept = run()
    cpu = time.process_time() - cpu
    final = 0
    if isinstance(kept, nn.Module):
        final = sum(parameter.nbytes for parameter in kept.parameters())
    found = {
        "wall": meter.seconds,
        "cpu": cpu,
        "anon": meter.peak or 0,
        "final": final,
        "mapped": mapped_pages() - mapped,
        "stayed": stayed,
    }
    remove_saved(folder.parent)
    return found


def remove_saved(folder):
    shutil.rmtree(folder / f"saved-{os.getpid()}", ignore_errors=True)


# -- groups -----------------------------------------------------------------------------------------------------------


def groups_of(size, folder):
    """(title, folder, options, contenders, largest tensor as stored) of everything that is measured, by group."""
    bf16, s, half = {"size": size}, SIZES[size], "half" if size == "full" else size
    tried = {"tries": TRIES}
    largest = s["vocab"] * s["hidden"] * 2
    many = {"size": size, "many": SMALL_TENSORS[size]}
    peers = [name for name in PEERS if importlib.util.find_spec(name.split()[0])]
    found = {
        "bf16": [
            (
                "bf16, 4 shards",
                "bf16-4",
                bf16 | tried,
                [READ, READ_4K, "torchtether", "safetensors mapped", *peers],
                largest,
            )
        ],
        "mapped": [
            (
                "bf16, mapped",
                "bf16-4",
                bf16,
                ["safetensors mapped", "torchtether mapped", *(name for name in peers if name != "safetensors own")],
                largest,
            )
        ],
        "shards": [
            (f"bf16, {count} shards", f"bf16-{count}", bf16 | tried, [READ, "torchtether", "safetensors own"], largest)
            for count in (1, 32)
        ]
        + [("bf16, odd header", "odd-1", bf16 | tried, [READ, "torchtether", "safetensors own"], largest)],
        "cold": [
            ("bf16, cold cache", "bf16-4", bf16 | {"cold": True}, [SEQUENTIAL, READ, "torchtether"], largest),
            (
                "int8, cold cache",
                "bf16-4",
                bf16 | {"cold": True, "quantize": "int8"},
                [SEQUENTIAL, READ, "torchtether"],
                largest,
            ),
        ],
        "convert": [
            (
                "fp32 to bf16",
                "fp32",
                {"size": half, "dtype": torch.bfloat16} | tried,
                [READ, "torchtether", *peers],
                SIZES[half]["vocab"] * SIZES[half]["hidden"] * 4,
            )
        ],
        "quantize": [
            (
                scheme,
                "bf16-4",
                bf16 | {"quantize": scheme} | tried,
                [READ, "encode alone", "torchtether", "torchtether ops"]
                + [n for n, (p, known) in QUANTIZING.items() if scheme in known and importlib.util.find_spec(p)],
                largest,
            )
            for scheme in ("int8", "int4", "fp8", "nf4")
        ],
        "refit": [
            (f"refit, {scheme}", "bf16-4", bf16 | {"quantize": scheme} | tried, ["torchtether", *REFITS], largest)
            for scheme in ("int8", "nf4")
        ],
        "small": [
            (
                f"{many['many']} small tensors",
                "many",
                many,
                ["safetensors loop", "torchtether", *(name for name in peers if name != "transformers")],
                128,
            )
        ],
        "plan": [
            (
                f"{PLANNED_SHARDS[size]} shards, {PLANNED_SHARDS[size] * PER_SHARD} tensors",
                "headers",
                {"size": size},
                ["safetensors headers", "torchtether plan", "torchtether plan, a quarter"],
                128,
            )
        ],
        "save": [
            (
                "save",
                "bf16-4",
                bf16,
                ["write, synced", "write, not synced", "torchtether save", "safetensors save"],
                largest,
            )
        ],
    }
    if importlib.util.find_spec("torchao") and "transformers" in peers:
        found["quantize"][0][3].append("transformers")
    return {group: [(case[0], folder / case[1], *case[2:]) for case in cases] for group, cases in found.items()}


def write_for(folder, size):
    """The checkpoint that the runs in ``folder`` need, and a tiny one of its kind; both are there afterwards."""
    kind, _, shards = folder.name.partition("-")
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    for path, at in ((folder, size), (folder.parent / "tiny" / kind, "tiny")):
        if not path.exists() and kind == "headers":
            write_headers(path, PLANNED_SHARDS[at])
            write_headers(path / "quarter", PLANNED_SHARDS[at] // 4)
        elif not path.exists():
            many = {"many": SMALL_TENSORS[at]} if kind == "many" else {}
            write_checkpoint(path, on_meta(at, dtype, **many), int(shards or (1 if many else 4)))
            write_config(path, at, str(dtype).removeprefix("torch."))
            for file in files_of(path) if kind == "odd" else ():
                lengthen_header(file, 8)


def bars(group, title, runs, largest):
    """(what, figure, limit) for each bar of a case; figures are medians over the rounds."""

    def ratio(name, *others):
        return statistics.median(
            ours["wall"] / min(runs[other][i]["wall"] for other in others) for i, ours in enumerate(runs[name])
        )

    if group == "save":
        yield "save against a plain write", ratio("torchtether save", "write, synced"), 1.2
        return
    if group == "mapped":
        yield "mapped against safetensors mapped", ratio("torchtether mapped", "safetensors mapped"), 1.2
        return
    if group == "plan":
        yield "against four times a quarter of it", ratio("torchtether plan", "torchtether plan, a quarter") / 4, 1.3
        return
    if group == "cold":
        yield "against a plain sequential read", ratio("torchtether", SEQUENTIAL), 1.1
        return
    if group == "refit":
        for name in REFITS:
            yield f"{name} against a quantizing load", ratio(name, "torchtether"), 1.3
            yield f"{name}, scratch, MiB", max(run["anon"] for run in runs[name]) / MIB, largest / MIB + 64
        return
    if group == "quantize":
        yield from quantize_bars(title, runs, largest, ratio)
        return
    scratch = max(run["anon"] - run["final"] for run in runs["torchtether"])
    yield "scratch, MiB", scratch / MIB, largest / MIB + 64
    yield "mapped pages kept, MiB", max(run["mapped"] for run in runs["torchtether"]) / MIB, 16
    final = runs["torchtether"][0]["final"]
    own = {n: statistics.median(run["anon"] for run in runs[n]) > final / 2 for n in PEERS if n in runs}
    peers, mapping = [n for n in own if own[n]], [n for n in own if not own[n]]
    if peers:
        yield "against the fastest peer that holds the bytes itself", ratio("torchtether", *peers), 1.3
    if mapping:
        yield "against the fastest peer that leaves them in the file", ratio("torchtether", *mapping), 1.3
    if group in ("bf16", "shards"):
        yield "against a plain read", ratio("torchtether", READ), 1.25
    if group in ("bf16", "shards") and peers:
        yield "the same, 2.5 times faster", ratio("torchtether", *peers), 1 / 2.5
    if group == "convert":
        yield "against a plain read, converting", ratio("torchtether", READ), 1.3
    if group == "small":
        yield "against safetensors' own loop", ratio("torchtether", "safetensors loop"), 2.0


def quantize_bars(title, runs, largest, ratio):
    ours, ops = "torchtether", "torchtether ops"
    peak = max(run["anon"] + run["mapped"] - run["final"] for run in runs[ours])
    yield "above the final size, mapped pages included, MiB", peak / MIB, largest / MIB + 64
    for name in (ours, ops):
        slower = statistics.median(
            run["wall"] / max(runs[READ][i]["wall"], runs["encode alone"][i]["wall"])
            for i, run in enumerate(runs[name])
        )
        yield f"{name}, against the slower of read and encoder alone", slower, 1.3
    peers = [name for name in (*QUANTIZING, "transformers") if name in runs]
    if title == "int8":
        yield "against a plain read", ratio(ours, READ), 2.0
    if peers:
        yield "compiled, against the fastest peer", ratio(ours, *peers), 1 / 5 if title == "int8" else 1.0
        yield "torch ops, against the fastest peer", ratio(ops, *peers), 1 / 2.2 if title == "int8" else 1.0


def said(runs):
    values = sorted(run["wall"] for run in runs)
    return f"{statistics.median(values):8.3f} s [{values[0]:.3f} .. {values[-1]:.3f}]"


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--rounds", type=int, default=5)
    groups = list(groups_of("small", Path()))
    parser.add_argument("--groups", nargs="+", choices=groups, default=groups)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.folder is not None and not options.folder.is_dir():
        parser.error(f"--folder {options.folder}: no folder")
    rows, held = [], []
    server = multiprocessing.get_context("forkserver")  # imports once, and every run still has a process of its own
    server.set_forkserver_preload([name for name in PRELOADED if importlib.util.find_spec(name.split(".")[0])])
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        ProcessPoolExecutor(1, mp_context=server, max_tasks_per_child=1) as pool,
    ):
        folder = Path(folder)
        for group in options.groups:
            for title, path, wanted, contenders, largest in groups_of(options.size, folder)[group]:
                for old in folder.iterdir():
                    if old not in (path, folder / "tiny"):
                        shutil.rmtree(old)
                write_for(path, wanted["size"])
                runs = {name: [] for name in contenders}
                pool.submit(measure, contenders[0], path, wanted).result()  # the pages are in the cache
                for i in range(options.rounds):
                    turn = i % len(contenders)
                    for name in contenders[turn:] + contenders[:turn]:
                        runs[name].append(pool.submit(measure, name, path, wanted).result())
                first = runs[contenders[0]]
                for name in contenders:
                    row = {key: statistics.median(run[key] for run in runs[name]) for key in runs[name][0]}
                    ratio = statistics.median(
                        run["wall"] / base["wall"] for run, base in zip(runs[name], first, strict=True)
                    )
                    rows.append({"case": title, "name": name, "ratio": ratio, **row, "runs": runs[name]})
                    print(
                        f"{title:20} {name:20} {said(runs[name])} cpu {row['cpu']:7.3f} s {ratio:7.2f} x "
                        f"anon {row['anon'] / MIB:7.0f} MiB, above {(row['anon'] - row['final']) / MIB:6.0f}, "
                        f"mapped {row['mapped'] / MIB:6.0f} MiB"
                        + (f", {row['stayed']:.0%} of the files were in the page cache" if wanted.get("cold") else ""),
                        flush=True,
                    )
                for what, figure, limit in bars(group, title, runs, largest):
                    state = "held" if figure <= limit else "missed"
                    held.append({"case": title, "bar": what, "figure": figure, "limit": limit, "state": state})
                    print(f"{title:20} {state:7} {what}: {figure:.2f}, at most {limit:.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "bars": held}, indent=1))


if __name__ == "__main__":
    main()
