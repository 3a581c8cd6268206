"""See what bounds a load (reading, page faults, copies or conversion), and which of these can be avoided.

You will measure each of them alone on a file of 200 MB, see how much each takes of a load, and read the report of a
load: bytes, peak memory, and memory over time as a picture.
Needs: torch, safetensors. Takes: some seconds, 600 MB of memory.
"""

# %% A checkpoint of 200 MB, and something to measure with. Times are printed, never asserted: machines differ.
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import torchtether as tt

try:
    import resource  # page faults; not on every system
except ImportError:
    resource = None


def model(device="meta"):
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(2048, 4100) for _ in range(6)))


def own_memory():
    """Return the bytes of anonymous memory of this process; None if the system does not report it."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), None)


def measured(what, function, *args):
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource else 0
    start = time.perf_counter()
    result = function(*args)
    seconds = time.perf_counter() - start
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults if resource else 0
    print(f"{what:<50} {seconds:7.3f} s  {faults:>7,} page faults")
    return result, faults


folder = Path(tempfile.mkdtemp())
path = folder / "model.safetensors"
tt.save(model("cpu"), path)
size = sum(p.nbytes for p in model().parameters())
MB = 2**20
assert size > 190 * MB

# %% What goes wrong without us, silently (1): a state dict beside a model is twice the memory.
before = own_memory()
stock = model("cpu")
state = {name: tensor.clone() for name, tensor in load_file(path).items()}  # as torch.load would give it
stock.load_state_dict(state)
if before is not None:
    twice = own_memory() - before
    print(f"stock: {twice / MB:.0f} MB of own memory for a model of {size / MB:.0f} MB")
    assert twice > 1.9 * size
del stock, state


# %% What goes wrong without us, silently (2): one small tensor keeps the whole file mapped.
def mapped_bytes():
    """Return how many bytes of `path` this process has mapped; None if the system does not report it."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    ranges = [line.split()[0].split("-") for line in maps.read_text().splitlines() if line.endswith(path.name)]
    return sum(int(stop, 16) - int(start, 16) for start, stop in ranges)


kept = load_file(path)["0.bias"]  # a tensor of 16 kB
if mapped_bytes() is not None:
    print(f"a tensor of {kept.nbytes:,} bytes keeps {mapped_bytes():,} bytes mapped")
    assert mapped_bytes() > size
del kept

# %% The parts of a load, each alone. Reading into existing memory shows the speed of the disk, or of its cache.
there = torch.empty(path.stat().st_size, dtype=torch.uint8).fill_(1)


def read_into(out):
    with open(path, "rb", buffering=0) as file:
        view, done = memoryview(out.numpy()), 0
        while count := file.readinto(view[done:]):
            done += count
    return done


def processor_seconds(function, *args):
    """Return the processor time of a call, of all threads together."""
    start = time.process_time()
    function(*args)
    return time.process_time() - start


done, _ = measured("read into memory that exists", read_into, there)
assert done == path.stat().st_size
reading = min(processor_seconds(read_into, there) for _ in range(3))

# %% Reading into new memory: the system must find and clear a page for every 4 kB first. Often the largest part.
fresh = torch.empty(path.stat().st_size, dtype=torch.uint8)
done, faults_fresh = measured("read into new memory", read_into, fresh)
assert done == path.stat().st_size

# %% One more copy (read here, then copy there), and a conversion: each passes over all bytes once more.
measured("copy once more, into memory that exists", fresh.copy_, there)
floats = there[: size // 4 * 4].view(torch.float32).zero_()
half = torch.zeros(floats.shape, dtype=torch.bfloat16)
measured("convert to bfloat16, into memory that exists", half.copy_, floats)
del fresh, there, floats, half

# %% A load with us: every byte is read once, into its final memory, for which huge pages are requested.
loaded = model()
report, faults = measured("tt.load", tt.load, loaded, path)
print(report)
assert report.bytes == size
if report.peak is not None:
    assert report.peak < size + 48 * MB  # not twice
if mapped_bytes() is not None:
    assert mapped_bytes() == 0  # nothing of the file stays mapped
if resource:
    assert faults < size / 4096 + 20_000  # not twice; far fewer where the system gives huge pages

# %% Memory over the time of the load: a line that climbs to the size of the model, and no higher.
report.to_svg(folder / "load.svg")
print(f"see {folder / 'load.svg'}")
if report.peak is not None:
    assert max(sample.anonymous for sample in report.timeline) == report.peak

# %% A conversion at load needs no second copy of the model either: each piece is read, converted and dropped.
small = model()
report, _ = measured("tt.load to bfloat16", lambda: tt.load(small, path, dtype=torch.bfloat16))
assert all(p.dtype == torch.bfloat16 for p in small.parameters())
assert report.bytes == size
if report.peak is not None:
    assert report.peak < size / 2 + 100 * MB


# %% Quantizing at load: reading and encoding are both work of the processors. Their times add up, and the cores share
# the sum: two cores need half of it, however well both overlap.
def encoded(values):
    return [tt.Weight.encode(weight, tt.int8()) for weight in values]


def loaded_as_codes():
    codes = model()
    tt.load(codes, path, quantize={"*.bias": None, "*": "int8"})
    return codes


values = [layer.weight.detach() for layer in model("cpu")]
encoding = min(processor_seconds(encoded, values) for _ in range(3))
both = min(processor_seconds(loaded_as_codes) for _ in range(3))
print(f"processor seconds: read {reading:.2f}, encode {encoding:.2f}, load as int8 {both:.2f}")
assert sum(p.nbytes for p in loaded_as_codes().parameters()) < size / 3.9
del values

# %% A mapped load reads nothing at first: the pages of the file are private, and fetched at first use.
mapped = model()
report, _ = measured("tt.load(mmap=True)", lambda: tt.load(mapped, path, mmap=True))
assert report.mapped == size
assert report.bytes == 0
measured("... and its first use", lambda: sum(float(p.detach().sum()) for p in mapped.parameters()))
assert all(torch.equal(one, other) for one, other in zip(loaded.parameters(), mapped.parameters(), strict=True))

# %% A mapping lives as long as any of its tensors, here too: clone the tensors that you keep of a mapped file.
kept = mapped[0].bias.detach().clone()
mapped = None
if mapped_bytes() is not None:
    assert mapped_bytes() == 0
print(tt.storage_map({"kept": kept}))

# %% Now break it: keep `mapped[0].bias.detach()` without `.clone()`, and see which assertion notices.
