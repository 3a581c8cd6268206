"""A load to the device gives the same bits as a load to the CPU and a move, in bounded memory on both sides."""

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.catalog import each_scheme
from tests.gpu.models import D, check_same, meta, net
from tests.loading.models import MODELS, build

MIB = 2**20


def moved(make, folder, device, **kwargs):
    model = make()
    tt.load(model, folder, device="cpu", **kwargs)
    return tt.convert(model, device=device)


def check(make, folder, device, **kwargs):
    model = make()
    before = dict(model.named_parameters())
    tt.load(model, folder, device=device, **kwargs)
    check_same(model, moved(make, folder, device, **kwargs), device)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("is_meta", [True, False], ids=["meta", "real"])
def test_ties_views_and_strides(kind, is_meta, device, tmp_path):
    tt.save(build(kind), tmp_path)
    check(lambda: build(kind, meta=is_meta, seed=2), tmp_path, device)


@each_scheme
def test_every_scheme_quantized_on_the_way(row, device, tmp_path):
    tt.save(net(), tmp_path)
    check(meta, tmp_path, device, quantize=row.scheme)
    check(meta, tmp_path, device, quantize=row.scheme, dtype=torch.bfloat16)


@each_scheme
def test_every_scheme_as_stored(row, device, tmp_path):
    tt.save(tt.quantize(net(), row.scheme), tmp_path)
    check(meta, tmp_path, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_cast_on_the_way(dtype, device, tmp_path):
    tt.save(net(), tmp_path)
    check(meta, tmp_path, device, dtype=dtype)
    check(lambda: net(2), tmp_path, device, dtype=dtype)


@pytest.mark.parametrize(("name", "scheme"), [("compressed-tensors", "int8"), ("bitsandbytes", "nf4")])
def test_published_formats(name, scheme, device, tmp_path):
    model = tt.quantize(net(dtype=torch.float16), {"up.weight": scheme, "down.weight": scheme})
    tt.save(model, tmp_path, format=name)
    check(meta, tmp_path, device)


@pytest.mark.parametrize("scheme", [None, "int8", "nf4"])
def test_in_place_on_the_device(scheme, device, tmp_path):
    """Real tensors that stay where they are keep their memory."""
    tt.save(net(), tmp_path)

    def real():
        model = net(2, device=device)
        return model if scheme is None else tt.quantize(model, scheme)

    model = real()
    pointers = [p.data_ptr() for p in model.parameters()]
    tt.load(model, tmp_path)
    check_same(
        model, moved(lambda: meta() if scheme is None else tt.quantize(net(2), scheme), tmp_path, device), device
    )
    assert pointers == [p.data_ptr() for p in model.parameters()]


def test_devices_by_name(device, tmp_path):
    tt.save(net(), tmp_path)
    model = meta()
    tt.load(model, tmp_path, device={"up.*": device, "*": "cpu"}, quantize="int8")
    assert model.up.weight.device == model.up.bias.device == device
    assert model.down.weight.device == torch.device("cpu")
    expected = meta()
    tt.load(expected, tmp_path, quantize="int8")
    check_same(tt.convert(model, device="cpu"), expected)


def test_the_optimizer_follows(device, tmp_path):
    tt.save(net(), tmp_path)
    model = net(2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    tt.load(model, tmp_path, device=device, optimizer=optimizer)
    assert {optimizer.state[p]["exp_avg"].device for p in model.parameters()} == {device}
    tt.check_optimizer(model, optimizer)


class Large(nn.Module):
    def __init__(self, count=6, width=4096):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A folder with 192 MiB of bfloat16."""
    folder = tmp_path_factory.mktemp("large")
    torch.manual_seed(0)
    tt.save(Large().bfloat16(), folder)
    return folder


@pytest.mark.parametrize("scheme", [None, "int8", "nf4", tt.int4()], ids=str)
def test_large_tensors_in_bounded_memory(scheme, device, gpu, large):
    with torch.device("meta"):
        model, again = Large(), Large()
    tt.load(again, large, device=device, quantize=scheme)  # kernels are compiled, buffers pinned
    gpu.synchronize()
    gpu.reset_peak_memory_stats()
    before = gpu.memory_allocated()
    report = tt.load(model, large, device=device, quantize=scheme)
    final, peak = gpu.memory_allocated() - before, gpu.max_memory_allocated() - before
    assert peak <= final + 512 * MIB
    assert report.peak is None or report.peak <= 160 * MIB
    check_same(model, again, device)
    del again
    with torch.device("meta"):
        there = Large()
    tt.load(there, large, quantize=scheme)
    check_same(tt.convert(model, device="cpu"), there)


@pytest.mark.parametrize("scheme", [None, "int8"], ids=str)
def test_every_stream_sees_the_values(scheme, device, gpu, large):
    """Loaded under one stream that is busy, read from another without a word."""
    expected = meta_large()
    tt.load(expected, large, quantize=scheme)
    busy, other, model = gpu.Stream(), gpu.Stream(), meta_large()
    with gpu.stream(busy):
        waste = torch.randn(4096, 4096, device=device)
        for _ in range(20):
            waste = waste @ waste * 1e-3
        del waste
        tt.load(model, large, device=device, quantize=scheme)
    with gpu.stream(other):
        copies = [p.detach().clone() for p in model.parameters()]
    gpu.synchronize()
    for copy, parameter in zip(copies, expected.parameters(), strict=True):
        assert (
            torch.equal(copy.cpu(), parameter)
            if scheme is None
            else torch.equal(copy.cpu().dequantize(), parameter.dequantize())
        )


def meta_large():
    with torch.device("meta"):
        return Large()


def test_values_that_no_scheme_holds_change_nothing(device, tmp_path):
    source = net()
    with torch.no_grad():
        source.down.weight[3, 5] = torch.inf
    tt.save(source, tmp_path)
    errors = []
    for place in ("cpu", device):
        model = meta(D)
        with pytest.raises(tt.SchemeError, match=r"down\.weight: ") as caught:
            tt.load(model, tmp_path, device=place, quantize="int8")
        assert all(p.is_meta for p in model.parameters())
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
