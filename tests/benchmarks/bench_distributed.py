"""The cost of loading into a sharded model, compared with torch's own functions. Run by hand:

    python -m tests.benchmarks.bench_distributed [--size small|full] [--rounds 3] [--ranks 1 2 4] [--folder DIR]
                                                 [--json FILE]

The full checkpoint is that of ``bench_load``: a tied 1.24 B-parameter Llama, bf16, 2.5 GB; as one safetensors file, and
as a folder by torch.distributed.checkpoint. Each round is a group of gloo processes on this machine, on a warm page
cache; the model is on meta and sharded by ``fully_shard`` when time begins, and loaded on all ranks when it ends.

    read      bytes that a rank asks of the system (rchar), the most of any rank; maps do not count
    anon      anonymous memory of a rank at its peak, above what it had before and above its shard; the most of any rank

    torchtether        tt.distributed.load, safetensors
    torchtether dcp    tt.distributed.load, the folder by dcp
    dcp                to_empty, and dcp.load
    dcp, safetensors   to_empty, and dcp.load with HuggingFaceStorageReader, alias keys dropped
    from rank 0        safetensors' load_file on rank 0, and set_model_state_dict(broadcast_from_rank0=True)

The bars: a rank's memory stays below its shard, 64 MiB, and one tensor; it reads its shard, and 8 MiB of headers and of
what meters and Python read, which grow with the time.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import torchtether as tt
import torchtether.distributed
from tests.benchmarks.bench_load import MIB, Layer, on_meta, write_checkpoint
from tests.distributed.spawn import spawn
from torchtether.progress import Meter

CONTENDERS = ("torchtether", "torchtether dcp", "dcp", "dcp, safetensors", "from rank 0")


def sharded(size):
    model = on_meta(size)
    for module in model.modules():
        if isinstance(module, Layer):
            fully_shard(module)
    return fully_shard(model)


def load(name, model, folder):
    if name.startswith("torchtether"):
        tt.distributed.load(model, folder / ("dcp" if name.endswith("dcp") else "files"))
        return
    if name == "from rank 0":
        state = load_file(folder / "files" / "model.safetensors") if dist.get_rank() == 0 else {}
        if state:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        model.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, dict(state), options=options)
        return
    model.to_empty(device="cpu")
    state = {key: held for key, held in model.state_dict().items() if key != "lm_head.weight"}
    if name == "dcp":
        dcp.load(state, checkpoint_id=folder / "dcp")
    else:
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder / "files")))


def read_so_far():
    try:
        return int(Path("/proc/self/io").read_text().split()[1])
    except OSError:
        return 0


def warm(folder):
    """The files in ``folder`` have been read just now, so that the page cache has them if it has room."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.read(16 * MIB):
                    pass


def measure(name, size, folder):
    """This rank's part of one load; what is imported late is imported by a load of a tiny checkpoint."""
    load(name, sharded("tiny"), folder.parent / "tiny")
    model = sharded(size)
    if dist.get_rank() == 0:
        warm(folder / ("dcp" if name in ("dcp", "torchtether dcp") else "files"))
    dist.barrier()
    before, start = read_so_far(), time.perf_counter()
    with Meter() as meter:
        load(name, model, folder)
    dist.barrier()
    wall, read = time.perf_counter() - start, read_so_far() - before
    shard = sum(parameter.to_local().nbytes for parameter in model.parameters())
    largest = max(parameter.nbytes for parameter in model.parameters())
    assert not any(parameter.is_meta for parameter in model.parameters())
    return {"wall": wall, "read": read, "above": (meter.peak or 0) - shard, "shard": shard, "largest": largest}


def write(size, folder):
    """Both checkpoints, of the same values."""
    write_checkpoint(folder / "files", on_meta(size), 1)
    model = on_meta(size)
    tt.load(model, folder / "files", mmap=True)
    tt.distributed.save(model, folder / "dcp", format="dcp")


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=("full", "half", "small"), default="small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows, held = [], []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        folder = Path(folder)
        write("tiny", folder / "tiny")
        write(options.size, folder / "model")
        for name in CONTENDERS:  # the pages are in the cache
            spawn(measure, 1, name, options.size, folder / "model", timeout=300)
        for world in options.ranks:
            runs = {name: [] for name in CONTENDERS}
            for _ in range(options.rounds):
                for name in CONTENDERS:
                    found = spawn(measure, world, name, options.size, folder / "model", timeout=300)
                    runs[name].append({key: max(rank[key] for rank in found) for key in found[0]})
            for name, some in runs.items():
                row = {key: statistics.median(run[key] for run in some) for key in some[0]}
                ratio = statistics.median(
                    run["wall"] / ours["wall"] for run, ours in zip(some, runs[CONTENDERS[0]], strict=True)
                )
                rows.append({"ranks": world, "name": name, "ratio": ratio, **row, "runs": some})
                spread = f"{min(run['wall'] for run in some):.2f} to {max(run['wall'] for run in some):.2f}"
                print(
                    f"{world} ranks  {name:18} {row['wall']:6.2f} s ({spread}) {ratio:6.2f} x  "
                    f"read {row['read'] / MIB:7.0f} MiB  anon above the shard {row['above'] / MIB:6.0f} MiB",
                    flush=True,
                )
            ours = next(row for row in rows if row["ranks"] == world and row["name"] == CONTENDERS[0])
            for what, figure, limit in (
                ("memory above the shard", ours["above"], 64 * MIB + ours["largest"]),
                ("bytes read", ours["read"], ours["shard"] + 8 * MIB),
            ):
                state = "held" if figure <= limit else "missed"
                bar = {"case": f"{world} ranks", "bar": what, "figure": figure, "limit": limit, "state": state}
                held.append({"ranks": world} | bar)
                print(f"{world} ranks  {state}: {what} {figure / MIB:.0f} of {limit / MIB:.0f} MiB")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "bars": held}, indent=1))


if __name__ == "__main__":
    main()
