"""``mmap=True``: parameters lie on private pages of the file; everything else is as with reading."""

import copy
import io
import os
import subprocess
import sys

import pytest
import torch

import torchtether as tt
from tests.loading.models import MODELS, Slices, Tied, Turned, build
from torchtether.progress import resident_memory
from torchtether.ties.names import named_tensors


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of ``Tied``, its model, and its file."""
    model = build(Tied)
    tt.save(model, tmp_path / "model.safetensors")
    return model, tmp_path / "model.safetensors"


def mapped(path, kind=Tied, **options):
    model = build(kind, meta=True)
    return model, tt.load(model, path, mmap=True, **options)


def is_over(tensor, path):
    """Whether the tensor lies in a mapping of the file, as the system tells."""
    place = tensor.data_ptr()
    with open("/proc/self/maps") as file:
        for line in file:
            span, mode, _, _, _, *name = line.split()
            start, stop = (int(word, 16) for word in span.split("-"))
            if start <= place < stop:
                return mode == "rw-p" and name[:1] == [str(path)]
    return False


linux = pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc")


@pytest.mark.parametrize(
    ("suffix", "kind"), [*(("safetensors", kind) for kind in MODELS), ("pt", Tied), ("pt", Turned)]
)
def test_a_mapped_model_is_the_model_that_is_read(tmp_path, suffix, kind):
    source = build(kind)
    path = tmp_path / f"model.{suffix}"
    if suffix == "pt":
        torch.save(source.state_dict(), path)
    else:
        tt.save(source, path)
    one, two = build(kind, meta=True), build(kind, meta=True)
    objects = named_tensors(two)
    read, made = tt.load(one, path), tt.load(two, path, mmap=True)
    assert made.bytes + made.mapped == read.bytes
    assert read.mapped == 0
    assert made.mapped > 0 or kind is Slices  # which no stored tensor covers
    assert tt.find_ties(one) == tt.find_ties(two) == tt.find_ties(source)
    for name, tensor in named_tensors(two).items():
        other = named_tensors(one)[name]
        assert tensor is objects[name]
        assert torch.equal(tensor, other), name
        assert (tensor.dtype, tensor.stride(), type(tensor)) == (other.dtype, other.stride(), type(other)), name


@linux
def test_memory_is_that_of_the_file_until_it_is_written_to_and_the_file_never_changes(saved):
    source, path = saved
    before = path.read_bytes()
    model, _ = mapped(path)
    assert is_over(model.emb.weight, path)
    assert is_over(model.mid.weight, path)
    assert model.head.weight is model.emb.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.tensor([1, 2])).square().sum().backward()
    optimizer.step()
    assert is_over(model.mid.weight, path)
    assert not torch.equal(model.mid.weight, source.mid.weight)
    assert path.read_bytes() == before
    assert torch.equal(mapped(path)[0].mid.weight, source.mid.weight)


def test_each_storage_is_the_size_of_its_tensor(saved):
    source, path = saved
    model, _ = mapped(path)
    for name, tensor in named_tensors(model).items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
        sizes = []
        for one in (tensor, named_tensors(source)[name]):
            file = io.BytesIO()
            torch.save(one, file)
            sizes.append(file.tell())
        assert sizes[0] == sizes[1], name


@linux
def test_copies_are_no_longer_of_the_file(saved):
    source, path = saved
    model, _ = mapped(path)
    again = copy.deepcopy(model)
    assert not is_over(again.emb.weight, path)
    assert again.head.weight is again.emb.weight
    model.share_memory()
    assert model.emb.weight.is_shared()
    assert torch.equal(model.emb.weight, source.emb.weight)
    tt.convert(again, dtype=torch.float64)
    assert torch.equal(again.emb.weight, source.emb.weight.double())


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_file_may_be_deleted_or_saved_over(saved, how):
    source, path = saved
    model, _ = mapped(path)
    if how == "deleted":
        path.unlink()
    else:
        tt.save(build(Tied, seed=9), path)
    assert torch.equal(model.mid.weight, source.mid.weight)
    tt.save(model, path)
    assert torch.equal(mapped(path)[0].mid.weight, source.mid.weight)


@linux
def test_a_stored_weight_is_mapped_in_any_compute_dtype(tmp_path):
    source, path = tt.quantize(build(Tied), "int8"), tmp_path / "model.safetensors"
    tt.save(source, path)
    model, _ = mapped(path, dtype=torch.bfloat16)
    assert model.mid.weight.dtype == torch.bfloat16
    assert torch.equal(model.mid.weight.dequantize(), source.mid.weight.to(torch.bfloat16).dequantize())
    assert all(is_over(part, path) for part in model.mid.weight.parts.values())


@linux
@pytest.mark.parametrize("options", [{"dtype": torch.bfloat16}, {"quantize": "int8"}], ids=str)
def test_what_needs_another_dtype_or_encoding_is_read(saved, options):
    _, path = saved
    model, report = mapped(path, **options)
    other = build(Tied, meta=True)
    tt.load(other, path, **options)
    assert report.bytes > 0
    for name, tensor in named_tensors(model).items():
        assert torch.equal(tensor, named_tensors(other)[name]), name
    assert not is_over(model.mid.weight if "dtype" in options else model.mid.weight.parts["qdata"], path)


@linux
def test_names_that_are_only_called_otherwise_are_mapped_and_composed_ones_are_read(tmp_path):
    path = tmp_path / "x.safetensors"
    tt.save({"q": torch.ones(2, 2), "k": torch.ones(1, 2), "o": torch.ones(2, 2)}, path)
    with torch.device("meta"):
        model = torch.nn.ModuleDict({"qk": torch.nn.Linear(2, 3, bias=False), "out": torch.nn.Linear(2, 2, bias=False)})
    rename = [tt.Concat(["^q$", "^k$"], "qk.weight"), ("^o$", "out.weight")]
    report = tt.load(model, path, rename=rename, mmap=True)
    assert is_over(model["out"].weight, path)
    assert not is_over(model["qk"].weight, path)
    assert (report.mapped, report.bytes) == (16, 24)
    assert "mapped" in str(report)


@linux
def test_a_quantized_weight_of_ours_is_mapped_by_its_parts(tmp_path):
    path, source = tmp_path / "x.safetensors", build(Tied)
    tt.quantize(source, {"emb.weight": "int8", "mid.weight": "int8"})
    tt.save(source, path)
    model, report = mapped(path)
    assert report.bytes == 0
    assert is_over(model.emb.weight.parts["qdata"], path)
    assert model.head.weight is model.emb.weight
    tt.check_ties(model)
    assert torch.equal(model.emb.weight.dequantize(), source.emb.weight.dequantize())


@linux
def test_a_tensor_that_is_not_aligned_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    header = (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}'
    )
    header += b" " * (-len(header) % 8)
    values = torch.tensor([1.5, -2.0])
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\x07" + values.numpy().tobytes())
    with torch.device("meta"):
        model = torch.nn.Module()
        model.b = torch.nn.Parameter(torch.empty(2))
        model.register_buffer("a", torch.empty(1, dtype=torch.uint8))
    report = tt.load(model, path, mmap=True)
    assert (report.mapped, report.bytes) == (1, 8)
    assert is_over(model.a, path)
    assert not is_over(model.b, path)
    assert torch.equal(model.b, values)


def test_a_real_model_is_filled_where_it_is(saved):
    source, path = saved
    model = build(Tied, seed=5)
    place = model.mid.weight.data_ptr()
    assert tt.load(model, path, mmap=True).mapped == 0
    assert model.mid.weight.data_ptr() == place
    assert torch.equal(model.mid.weight, source.mid.weight)


def test_a_plan_says_what_it_will_map_and_apply_may_come_in_parts(saved):
    source, path = saved
    model = build(Tied, meta=True)
    plan = tt.plan_load(model, path, mmap=True)
    assert "on cpu, mapped" in str(plan)
    told = []
    first = plan.apply(only="mid.*", progress=lambda done, all: told.append((done, all)))
    assert told[-1][0] == told[-1][1] == first.mapped
    plan.apply()
    plan.close()
    assert torch.equal(model.mid.weight, source.mid.weight)
    assert torch.equal(model.emb.weight, source.emb.weight)


def test_a_file_that_shrank_before_it_is_mapped_is_an_error_and_nothing_changes(saved):
    _, path = saved
    model = build(Tied, meta=True)
    plan = tt.plan_load(model, path, mmap=True)
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(
        tt.errors.CheckpointError, match=r"the file is cut short: it has \d+ bytes, the tensor ends at byte \d+"
    ):
        plan.apply()
    plan.close()
    assert all(tensor.is_meta for tensor in named_tensors(model).values())


@linux
def test_pages_that_are_not_used_are_not_in_memory_and_descriptors_are_given_back(tmp_path):
    path = tmp_path / "x.safetensors"
    tt.save({"weight": torch.ones(2**22, 8)}, path)
    with torch.device("meta"):
        model = torch.nn.Linear(8, 2**22, bias=False)
    before, descriptors = resident_memory(), len(os.listdir("/proc/self/fd"))
    tt.load(model, path, mmap=True)
    after = resident_memory()
    assert after.anonymous - before.anonymous < 2**24
    assert after.mapped - before.mapped < 2**24
    del model
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.slow
@linux
def test_the_process_ends_in_order_while_tensors_are_mapped(saved):
    _, path = saved
    code = (
        "import torch, torchtether as tt\n"
        "from tests.loading.models import Tied, build\n"
        f"model = build(Tied, meta=True); tt.load(model, {str(path)!r}, mmap=True)\n"
        "print(float(model.mid.weight.sum()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
