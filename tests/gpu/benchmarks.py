"""The cost of products, encoders and loads on the device, compared with dense products, its bandwidth, and peers.

Contenders take turns within a round; a figure is the median over the rounds of a ratio within one. Each call of a
product takes another copy of its weight, so that none is found in the cache of the device. Products are timed in CUDA
graphs, as compiled models run them, and called from Python.
"""

import importlib.util
import itertools
import math
import statistics
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import torchtether as tt
from torchtether.gpu import decoding
from torchtether.schemes.looking import unchecked

BF16 = torch.bfloat16
SCHEMES = {
    "int8": tt.int8(),
    "int4": tt.int4(),
    "nf4": tt.nf4(),
    "fp8": tt.fp8(),
    "mxfp8": tt.mxfp8(),
    "mxfp4": tt.mxfp4(),
    "nvfp4": tt.nvfp4(),
}
SIZES = {  # shapes (N, K) of products, bytes beyond the cache, elements to encode, layers and width to load
    "full": (((4096, 4096), (28672, 8192)), 2**28, (8192, 16384), (64, 4096)),
    "small": (((64, 128),), 2**16, (64, 256), (4, 64)),
}
EXPERTS = {"full": (64, (1536, 4096)), "small": (4, (64, 128))}
BARS = {("int8", 1): 0.6, ("int4", 1): 0.4, ("nf4", 1): 0.4, ("fp8, rounded inputs", 4096): 0.65}
"""The most of a dense product's time; of other schemes 1.0 up to 16 rows, and 1.15 with 4096."""
ROUNDED = {"int8": "int8", "fp8": "float8", "mxfp8": "mxfp8", "mxfp4": "mxfp4", "nvfp4": "nvfp4"}
"""What inputs are rounded to beside weights of a scheme."""
PEERS = ("bitsandbytes", "torchao", "gemlite")


def seconds(run, device, repeats):
    """Seconds of one of ``repeats`` calls, or of one of those in a graph."""
    calls = repeats * getattr(run, "calls", 1)
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - start) / calls
    module = torch.get_device_module(device)
    first, last = (module.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(repeats):
        run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / calls


def measure(contenders, device, rounds, slice=0.02):
    """Seconds of every round, by contender, and why those that failed did."""
    repeats, failed = {}, {}
    for name, run in contenders.items():
        try:
            run()
            seconds(run, device, 3)
            took = seconds(run, device, 3) * getattr(run, "calls", 1)
            repeats[name] = max(3, min(500, int(slice / max(took, 1e-7))))
        except Exception as error:
            failed[name] = reason(error)
    found = {name: [] for name in repeats}
    for _ in range(rounds):
        for name, repeat in repeats.items():
            found[name].append(seconds(contenders[name], device, repeat))
    return found, failed


def rows_of(group, case, found, failed, base, bars=None):
    """A row for each contender, with the ratio to ``base``."""
    for name, times in found.items():
        ratio = statistics.median(a / b for a, b in zip(times, found[base], strict=True)) if base in found else None
        row = {"group": group, "case": case, "contender": name, "seconds": statistics.median(times), "ratio": ratio}
        bar = (bars or {}).get(name)
        if bar is not None and ratio is not None:
            row |= {"bar": bar, "held": ratio <= bar}
        yield row
    yield from ({"group": group, "case": case, "contender": name, "failed": why} for name, why in failed.items())


def copied(weight):
    """What makes products with copies of ``weight``."""
    return lambda: partial(_linear, weight.clone())


def _linear(weight, x):
    return F.linear(x, weight)


def turning(make, x, nbytes, limit):
    """A call that multiplies by the next of some copies of one weight."""
    return Turning([make() for _ in range(max(1, min(16, math.ceil(limit / nbytes))))], x)


class Turning:
    def __init__(self, copies, x):
        self.copies, self.x, self.turns = copies, x, itertools.cycle(copies)

    def __call__(self):
        return next(self.turns)(self.x)


class Replay:
    """The replay of a CUDA graph that holds a call with each copy."""

    def __init__(self, turning, device):
        self.turning = turning  # whose weights the graph reads
        side, here = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(3):
                turning()
        here.wait_stream(side)
        self.graph, self.calls = torch.cuda.CUDAGraph(), len(turning.copies)
        with torch.cuda.graph(self.graph):
            for copy in turning.copies:
                copy(turning.x)

    def __call__(self):
        self.graph.replay()


def replays(contenders, device):
    """The contenders in CUDA graphs, and why some cannot be captured."""
    captured, failed = {}, {}
    for name, run in contenders.items():
        try:
            captured[name] = Replay(run, device)
        except Exception as error:
            failed[name] = reason(error)
            torch.cuda.synchronize(device)
    return captured, failed


def reason(error):
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def peer_modules(shape, device):
    """By name, what makes a linear module of a peer."""
    n, k = shape

    def dense():
        return nn.Linear(k, n, bias=False, device=device, dtype=BF16)

    found = {}
    if importlib.util.find_spec("bitsandbytes"):
        import bitsandbytes as bnb

        def four():
            made = bnb.nn.Linear4bit(k, n, bias=False, compute_dtype=BF16, quant_type="nf4")
            made.load_state_dict(dense().state_dict())
            return made.to(device)

        found["bitsandbytes nf4"] = four
    if importlib.util.find_spec("torchao"):
        from torchao.quantization import (
            Float8DynamicActivationFloat8WeightConfig,
            Int4WeightOnlyConfig,
            Int8WeightOnlyConfig,
            quantize_,
        )

        def converted(config):
            made = nn.Sequential(dense())
            quantize_(made, config)
            return made

        found["torchao int8"] = lambda: converted(Int8WeightOnlyConfig())
        found["torchao int4"] = lambda: converted(Int4WeightOnlyConfig(group_size=64))
        found["torchao fp8"] = lambda: converted(Float8DynamicActivationFloat8WeightConfig())
    if importlib.util.find_spec("gemlite"):
        from gemlite.helper import A16W4_HQQ_INT4, A16W8_INT8

        found["gemlite int8"] = lambda: A16W8_INT8(device=str(device)).from_linear(dense())
        found["gemlite int4"] = lambda: A16W4_HQQ_INT4(device=str(device)).from_linear(dense())
    return found


def products(device, size, rounds):
    shapes, limit, *_ = SIZES[size]
    for shape, rows in itertools.product(shapes, (1, 16, 4096)):
        x, values = (
            torch.randn(rows, shape[1], device=device, dtype=BF16),
            torch.randn(shape, device=device, dtype=BF16),
        )
        contenders = {"dense": turning(copied(values), x, values.nbytes, limit)}
        bars = {}
        weights = {name: tt.Weight.encode(values, scheme) for name, scheme in SCHEMES.items()}
        for name, kind in ROUNDED.items() if rows > 16 else ():
            weight = weights[f"{name}, rounded inputs"] = weights[name].clone()
            weight.set_activations(kind)
        for name, weight in weights.items():
            contenders[f"ours {name}"] = turning(copied(weight), x, weight.nbytes, limit)
            if name in SCHEMES or (name, rows) in BARS:
                bars[f"ours {name}"] = BARS.get((name, rows), 1.0 if rows <= 16 else 1.15)
        broken = {}
        for name, make in peer_modules(shape, device).items():
            try:
                contenders[name] = turning(make, x, values.nbytes / 2, limit)
            except Exception as error:
                broken[name] = reason(error)
        case = f"{shape[0]}x{shape[1]}, {rows} rows"
        with torch.no_grad():
            if device.type == "cuda":  # bars are for graphs: calls can take Python longer than the GPU
                yield from rows_of("eager", case, *measure(contenders, device, rounds), "dense")
                contenders, failed = replays(contenders, device)
                broken |= failed
            found, failed = measure(contenders, device, rounds)
        yield from rows_of("products", case, found, failed | broken, "dense", bars)


TILES = {  # rows of inputs: the setting of ``gpu.decoding``, and what to try: rows, columns and warps of a tile
    1: ("ONE_ROW", list(itertools.product((1, 2, 4, 8), (1, 2, 4, 8)))),
    16: ("FEW_ROWS", list(itertools.product((16, 32), (128, 256, 512, 1024), (2, 4, 8)))),
}


def tiles(device, size, rounds):
    """The products of our kernels with other tiles, beside those that are set; the fastest five, by scheme and rows."""
    shapes, limit, *_ = SIZES[size]
    for shape, (rows, (setting, tried)), name in itertools.product(shapes, TILES.items(), SCHEMES):
        x = torch.randn(rows, shape[1], device=device, dtype=BF16)
        weight = tt.Weight.encode(torch.randn(shape, device=device, dtype=BF16), SCHEMES[name])
        product, contenders = turning(copied(weight), x, weight.nbytes, limit), {}
        for tile in (None, *(tried if size == "full" else tried[:2])):
            contenders["set" if tile is None else " x ".join(map(str, tile))] = _in_tiles(
                product, setting, tile, device
            )
        with torch.no_grad():
            found, failed = measure(contenders, device, rounds, slice=0.003)
        best = sorted(found, key=lambda one: statistics.median(found[one]))[:5]
        kept = {one: found[one] for one in dict.fromkeys(["set", *best]) if one in found}
        yield from rows_of("tiles", f"{shape[0]}x{shape[1]} {name}, {rows} rows", kept, failed, "set")


def _in_tiles(product, setting, tile, device):
    """The product with the tile ``tile``, which is kept in a graph; on a CPU without."""
    before = getattr(decoding, setting)
    choices = before if tile is None else dict.fromkeys(before, tile)
    with mock.patch.object(decoding, setting, choices), torch.no_grad():
        _forget_tiles()
        made = product if device.type == "cpu" else Replay(product, device)
    _forget_tiles()
    return made


def _forget_tiles():
    decoding.tile_of_one.cache_clear()
    decoding.tile_of_few.cache_clear()


def experts(device, size, rounds):
    """Rows that go to some of many matrices each, as ``F.grouped_mm`` multiplies them."""
    groups, shape = EXPERTS[size]
    values = torch.randn(groups, *shape, device=device, dtype=BF16)
    weights = {name: tt.Weight.encode(values, SCHEMES[name]) for name in ("int8", "int4", "fp8", "mxfp4")}
    weights["fp8, rounded inputs"] = weights["fp8"].clone()
    weights["fp8, rounded inputs"].set_activations("float8")
    for rows in (8, 4096):
        x = torch.randn(rows, shape[1], device=device, dtype=BF16)
        offs = torch.linspace(0, rows, groups + 1, device=device)[1:].int()
        contenders = {name: partial(_grouped, x, weight, offs) for name, weight in {"dense": values, **weights}.items()}
        with torch.no_grad():
            found, failed = measure(contenders, device, rounds)
        yield from rows_of("experts", f"{groups} of {shape[0]}x{shape[1]}, {rows} rows", found, failed, "dense")


def _grouped(x, weight, offs):
    return F.grouped_mm(x, weight.transpose(1, 2), offs=offs)


def encoders(device, size, rounds):
    """Bytes read each second, against those that a copy on the device reads and writes."""
    shape = SIZES[size][2]
    values = torch.randn(shape, device=device, dtype=BF16)
    out = torch.empty_like(values)
    contenders = {"copy": lambda: out.copy_(values)}
    weights = {name: tt.Weight.encode(values, scheme) for name, scheme in SCHEMES.items()}
    contenders |= {f"encode {name}": partial(tt.Weight.encode, values, scheme) for name, scheme in SCHEMES.items()}
    contenders |= {f"decode {name}": weight.dequantize for name, weight in weights.items()}
    for group in ("eager", "encoders"):
        broken = {}
        if group == "encoders" and device.type == "cuda":  # the bars are for graphs: Python waits for each check
            with unchecked():
                calls = {name: Turning([lambda _, run=run: run()], values) for name, run in contenders.items()}
                contenders, broken = replays(calls, device)
        found, failed = measure(contenders, device, rounds)
        bandwidth = 2 * values.nbytes / statistics.median(found["copy"])
        for row in rows_of(group, f"{shape[0]}x{shape[1]}", found, failed | broken, "copy"):
            if "seconds" in row:
                scheme = row["contender"].split()[-1]
                moved = values.nbytes + (values.nbytes if scheme == "copy" else weights[scheme].nbytes)
                row |= {"gbps": moved / row["seconds"] / 1e9, "share": moved / row["seconds"] / bandwidth}
                if group == "encoders" and row["contender"] in ("encode int8", "encode fp8", "encode nf4"):
                    row |= {"bar": 0.5, "held": row["share"] >= 0.5}
            yield row


class Layers(nn.Module):
    def __init__(self, count, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=BF16) for _ in range(count))


def loads(device, size, rounds):
    """From files in the page cache; against a bare copy of as many bytes from pinned memory."""
    with saved(size) as folder:
        bare, nbytes = bare_copy(size, device)

        def load(scheme):
            with torch.device("meta"):
                model = Layers(*SIZES[size][3])
            return partial(tt.load, model, folder, device=device, quantize=scheme)

        contenders = {"bare": lambda: bare, "ours": partial(load, None)}
        contenders["safetensors"] = lambda: partial(by_safetensors, folder, device)
        contenders |= {f"ours {name}": partial(load, scheme) for name, scheme in SCHEMES.items()}
        found = timed(contenders, device, rounds)
    bars = {"ours": 1 / 0.9} | {f"ours {scheme}": 1.1 for scheme in SCHEMES}
    for row in rows_of("loads", f"{nbytes / 1e9:.1f} GB", found, {}, "bare", bars):
        yield row | {"gbps": nbytes / row["seconds"] / 1e9}


def loaders(device, size, rounds):
    """The same by other loaders that are installed."""
    with saved(size) as folder:
        bare, nbytes = bare_copy(size, device)
        contenders, failed = {"bare": lambda: bare}, {}
        for name, read in LOADERS.items() if device.type == "cuda" else ():
            try:
                read(folder, device, size)
                contenders[name] = partial(partial, read, folder, device, size)
            except Exception as error:  # most often it is not installed
                failed[name] = reason(error)
        found = timed(contenders, device, rounds)
    for row in rows_of("loaders", f"{nbytes / 1e9:.1f} GB", found, failed, "bare"):
        yield row if "failed" in row else row | {"gbps": nbytes / row["seconds"] / 1e9}


@contextmanager
def saved(size):
    """A folder with a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        tt.save(Layers(*SIZES[size][3]), folder)
        yield Path(folder)


def bare_copy(size, device):
    """What copies as many bytes from pinned memory to the device, and how many."""
    count, width = SIZES[size][3]
    nbytes = count * width * width * 2
    pinned = torch.empty(min(nbytes, 2**28), dtype=torch.uint8, pin_memory=device.type != "cpu")
    there = torch.empty_like(pinned, device=device)

    def copy():
        for _ in range(nbytes // pinned.nbytes):
            there.copy_(pinned, non_blocking=True)

    return copy, nbytes


def timed(contenders, device, rounds):
    """Seconds of what each contender makes, in every round but the first, which reads, pins and compiles."""
    found = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, make in contenders.items():
            run = make()
            start = time.perf_counter()
            run()
            settle(device)
            found[name].append(time.perf_counter() - start)
    return {name: times[1:] for name, times in found.items()}


def files_in(folder):
    return sorted(map(str, folder.glob("*.safetensors")))


def by_safetensors(folder, device):
    from safetensors.torch import load_file

    for file in files_in(folder):
        load_file(file, device=str(device))


def by_fastsafetensors(folder, device, size):
    from fastsafetensors import fastsafe_open

    with fastsafe_open(files_in(folder), device=str(device), nogds=True) as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def by_instanttensor(folder, device, size):
    from instanttensor import safe_open

    with safe_open(files_in(folder), framework="pt", device=device.index or 0) as opened:
        return dict(opened.tensors())


def by_runai_model_streamer(folder, device, size):
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files_in(folder), device=str(device))
        return {name: tensor.to(device) for name, tensor in streamer.get_tensors()}


def by_transformers(folder, device, size):
    from transformers import PretrainedConfig, PreTrainedModel

    class Model(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.layers = Layers(*SIZES[size][3]).layers
            self.post_init()

    config = PretrainedConfig()
    return Model.from_pretrained(folder, config=config, dtype=BF16, device_map=device, local_files_only=True)


LOADERS = {
    "fastsafetensors": by_fastsafetensors,
    "instanttensor": by_instanttensor,
    "runai_model_streamer": by_runai_model_streamer,
    "transformers": by_transformers,
}


def settle(device):
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


GROUPS = {
    "products": products,
    "tiles": tiles,
    "experts": experts,
    "encoders": encoders,
    "loads": loads,
    "loaders": loaders,
}


def line(row):
    """One row of the table."""
    head = f"{row['group']:9} {row['case']:24} {row['contender']:26}"
    if "failed" in row:
        return f"{head} {row['failed']}"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:8.2f}"
    extra = f" {row['gbps']:8.1f} GB/s" if "gbps" in row else ""
    extra += f" {row['share']:6.2f} of bandwidth" if "share" in row else ""
    bar = f"  bar {row['bar']:.2f} {'held' if row['held'] else 'MISSED'}" if "bar" in row else ""
    return f"{head} {row['seconds'] * 1e6:12.1f} us {ratio}{extra}{bar}"
