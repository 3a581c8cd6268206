"""Conversions, swaps, refits and offloads to the device and back; running out of memory changes nothing."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.catalog import each_quantized, each_scheme
from tests.conversion.models import KINDS, rig, snapshot
from tests.conversion.test_out_of_memory import each_failure
from tests.gpu.models import check_same, meta, net, plain_parts, same, step


@each_scheme
def test_convert_there_and_back(row, device):
    model, expected = (tt.quantize(net(), {"emb.weight": row.scheme, "up.weight": row.scheme}) for _ in range(2))
    before = dict(model.named_parameters())
    tt.convert(model, device=device)
    check_same(model, expected_on(expected, device), device)
    tt.convert(model, device="cpu")
    check_same(model, expected)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def expected_on(model, device):
    """A copy of ``model`` whose tensors are moved one by one, in a scope that keeps the ties."""
    with tt.swapping(there := copy.deepcopy(model)):
        there.to(device)
    return there


@each_quantized
def test_quantized_on_the_device_as_on_the_cpu(row, device):
    here, there = net(), net(device=device)
    for model in (here, there):
        tt.quantize(model, row.scheme)
    check_same(tt.convert(there, device="cpu"), here)
    tt.convert(there, device=device)
    for model in (here, there):
        tt.dequantize(model)
    check_same(tt.convert(there, device="cpu"), here)


@pytest.mark.parametrize("scheme", ["int8", "nf4", "fp8"])
def test_refit(scheme, device, tmp_path):
    source = net(3)
    model = tt.quantize(net(device=device), scheme)
    expected = tt.quantize(net(3), scheme)
    pointers = [part.data_ptr() for p in model.parameters() for part in plain_parts(p).values()]
    for given in (source.state_dict(), net(3, device=device).state_dict()):
        tt.refit(model, given)
        check_same(tt.convert(tt.convert(model, device="cpu"), device="cpu"), expected)
        tt.convert(model, device=device)
    tt.save(source, tmp_path)
    model = tt.quantize(net(device=device), scheme)
    pointers = [part.data_ptr() for p in model.parameters() for part in plain_parts(p).values()]
    for atomic in ("checked", "full"):
        tt.refit(model, tmp_path, atomic=atomic)
    assert pointers == [part.data_ptr() for p in model.parameters() for part in plain_parts(p).values()]
    check_same(tt.convert(model, device="cpu"), expected)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("how", ["convert", "swapping"])
def test_training_goes_on_with_its_state(optimizer, how, device):
    make = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    }[optimizer]
    losses = []
    for place in ("cpu", device):
        model = net()
        held = make(model.parameters())
        told = [step(model, held, "cpu")]
        if how == "convert":
            tt.convert(model, device=place, optimizer=held)
        else:
            with tt.swapping(model, optimizer=held):
                model.to(place, non_blocking=True)
        assert model.head.weight is model.emb.weight
        tt.check_optimizer(model, held)
        told += [step(model, held, place) for _ in range(3)]
        losses.append(told)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@each_quantized
def test_pinned_and_not_waited_for(row, device, gpu):
    weight = tt.Weight.encode(torch.randn(16, 64), row.scheme)
    assert not weight.is_pinned()
    pinned = weight.pin_memory()
    assert pinned.is_pinned()
    assert same(pinned, weight)
    there = pinned.to(device, non_blocking=True)
    assert same(there.to("cpu", non_blocking=False), weight)
    back = there.to("cpu", non_blocking=True)
    gpu.synchronize()
    assert same(back, weight)
    held = tt.Weight.encode(torch.randn(16, 64), row.scheme).to(device)
    held.copy_(pinned, non_blocking=True)
    assert same(held.cpu(), weight)


@each_quantized
def test_a_recorded_stream_keeps_the_memory_of_every_part(row, device, gpu):
    """Freed while a side stream still reads, the memory of a part goes to nobody else before that is done."""
    weight = tt.Weight.encode(torch.randn(256, 256), row.scheme)
    there, side = weight.to(device), gpu.Stream()
    side.wait_stream(gpu.current_stream())
    with gpu.stream(side):
        waste = torch.randn(2048, 2048, device=device)
        for _ in range(20):
            waste = waste @ waste * 1e-3
        kept = there.clone()
    there.record_stream(side)
    sizes = [(part.shape, part.dtype) for part in plain_parts(there).values()]
    del there
    empty = [torch.empty(shape, dtype=dtype, device=device).view(-1) for shape, dtype in sizes]
    scribbled = [one.view(torch.uint8).fill_(0xA5) for one in empty]  # a global scale has no dimension to view as bytes
    gpu.synchronize()
    assert same(kept.cpu(), weight)
    del scribbled


@each_quantized
def test_offloaded_while_something_else_runs(row, device, gpu):
    """As diffusers' group offloading does: parts come on a side stream, are used, and go back to pinned memory."""
    weight = nn.Parameter(tt.Weight.encode(torch.randn(64, 64), row.scheme), requires_grad=False)
    pinned, side = weight.data.pin_memory(), gpu.Stream()
    x = torch.randn(4, 64, device=device)
    expected = nn.functional.linear(x.cpu(), weight)
    for _ in range(3):
        with gpu.stream(side):
            weight.data = pinned.to(device, non_blocking=True)
        gpu.current_stream().wait_stream(side)
        weight.data.record_stream(gpu.current_stream())
        torch.testing.assert_close(nn.functional.linear(x, weight).cpu(), expected, rtol=1e-3, atol=1e-3)
        weight.data = pinned
        assert weight.device.type == "cpu"


@pytest.mark.parametrize("kind", ["plain", "tied_3", "view_slice", "view_transposed", "quantized", "batch_norm"])
def test_out_of_memory_changes_nothing(kind, device):
    made = rig(KINDS[kind])
    target = {"dtype": torch.float64} if device.type == "cpu" else {"device": device}
    run = partial(tt.convert, made.model, **target, optimizer=made.optimizer, atomic="full")
    assert each_failure(run, made.model, made.optimizer) > 1


def test_memory_that_really_ends_changes_nothing(device, gpu):
    model = net(width=1024)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    before = snapshot(model, optimizer)
    gpu.empty_cache()
    total = gpu.mem_get_info()[1]
    gpu.set_per_process_memory_fraction((gpu.memory_reserved() + 8 * 2**20) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            tt.convert(model, device=device, optimizer=optimizer, atomic="full")
    finally:
        gpu.set_per_process_memory_fraction(1.0)
    assert snapshot(model, optimizer) == before
    tt.convert(model, device=device, optimizer=optimizer, atomic="full")
    assert meta(1024).up.weight.shape == model.up.weight.shape


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_recurrent_modules(kind, scheme, device):
    """Also where cuDNN wants plain weights in one memory: in float32, after a change, and when it is asked for."""
    model = kind(64, 32, num_layers=2, device=device)
    tt.quantize(model, {"weight*": scheme})
    plain, x = tt.dequantize(copy.deepcopy(model)), torch.randn(5, 3, 64, device=device)
    for _ in range(2):
        torch.testing.assert_close(model(x)[0], plain(x)[0], rtol=1e-4, atol=1e-4)
        model.flatten_parameters()
    tt.convert(model, dtype=torch.float16)
    assert model(x.half())[0].isfinite().all()


class Seeded(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(42)
        self.register_buffer("drawn", torch.randn(5), persistent=False)
        self.register_buffer("filled", nn.init.orthogonal_(torch.empty(3, 3)), persistent=False)
        generator = torch.Generator().manual_seed(1)
        self.register_buffer("given", torch.rand(3, generator=generator), persistent=False)


def test_seeds_of_constructors_give_the_numbers_of_the_cpu(device):
    expected = Seeded()
    with tt.on_meta():
        model = Seeded()
    tt.materialize(model, device)
    for name, tensor in model.named_buffers():
        assert tensor.device.type == torch.device(device).type
        assert torch.equal(tensor.cpu(), expected.get_buffer(name)), name
