"""The fast path that plans most tensors gives the same plan as the general one."""

import itertools

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.loading.models import Tied, Turned, build
from torchtether.loading import matching
from torchtether.loading.options import FLOATS
from torchtether.ties.names import named_tensors


def _steps(plan):
    return [
        (s.name, s.component.names, s.tie, s.sources, s.dtype, s.device, s.scheme, s.is_given, s.in_place, s.nbytes)
        for s in plan.steps
    ]


class Kinds(nn.Module):
    """A parameter and a buffer of every kind of dtype, and shapes of every rank."""

    def __init__(self, dtypes):
        super().__init__()
        for i, dtype in enumerate(dtypes):
            self.register_buffer(f"b{i}", torch.ones((2,) * (i % 4)).to(dtype))
        self.turned = nn.Parameter(torch.ones(3, 2).t())
        self.empty = nn.Parameter(torch.ones(0, 2))


DTYPES = (*FLOATS, torch.int64, torch.int32, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn)


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("quantize", [None, "int8", {"mid.weight": None, "*": "int8"}], ids=["plain", "all", "some"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.bfloat16},
        {"dtype": {"norm.*": torch.float64}, "device": {"mid.*": "cpu"}},
        {"rename": {}},
        {"strict": False, "rename": [("^mid", "other")]},
    ],
    ids=["none", "dtype", "patterns", "rename", "missing"],
)
@pytest.mark.parametrize("make", [Tied, Turned])
def test_models(tmp_path, monkeypatch, make, options, quantize, meta):
    tt.save(build(make), tmp_path / "x")
    model = build(make, meta=meta)
    with_short = tt.plan_load(model, tmp_path / "x", quantize=quantize, **options)
    monkeypatch.setattr(matching, "_simple_step", lambda draft, component: None)
    without = tt.plan_load(model, tmp_path / "x", quantize=quantize, **options)
    assert with_short.steps or options.get("strict") is False
    assert _steps(with_short) == _steps(without)
    assert with_short.faults == without.faults
    assert (with_short.missing_keys, with_short.unexpected_keys) == (without.missing_keys, without.unexpected_keys)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_every_pair_of_dtypes(tmp_path, monkeypatch, device):
    pairs = list(itertools.product(DTYPES, DTYPES))
    tt.save(Kinds([given for given, _ in pairs]), tmp_path / "x")
    model = Kinds([held for _, held in pairs]).to(device)
    for options in ({}, {"dtype": torch.float16}):
        with_short = tt.plan_load(model, tmp_path / "x", **options)
        with monkeypatch.context() as patched:
            patched.setattr(matching, "_simple_step", lambda draft, component: None)
            without = tt.plan_load(model, tmp_path / "x", **options)
        assert _steps(with_short) == _steps(without)
        assert with_short.faults == without.faults


def _facts(model):
    found = {}
    for name, tensor in named_tensors(model).items():
        is_weight = isinstance(tensor, tt.Weight)
        parts = tensor.parts.values() if is_weight else [tensor.detach()]
        bits = [part.reshape(-1).view(torch.uint8).tolist() for part in parts]
        laid = (tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride(), tensor.requires_grad)
        found[name] = type(tensor), laid, bits, tensor._base, is_weight or tensor.untyped_storage().nbytes()
    return found


@pytest.mark.parametrize("quantize", [None, {"mid.weight": None, "*": "int8"}], ids=["plain", "some"])
@pytest.mark.parametrize("options", [{}, {"dtype": {"norm.*": torch.float64}}, {"mmap": True}], ids=str)
@pytest.mark.parametrize("make", [Tied, Turned])
def test_what_comes_of_the_short_way(tmp_path, monkeypatch, make, options, quantize):
    """Bits, strides, memory: everything that the long way makes, in the same objects."""
    tt.save(build(make), tmp_path / "x")
    found = []
    for is_short in (True, False):
        if not is_short:
            monkeypatch.setattr(matching, "_simple_step", lambda draft, component: None)
        model = build(make, meta=True)
        model.norm.weight.requires_grad_(False)
        before = {name: id(tensor) for name, tensor in named_tensors(model).items()}
        plan = tt.plan_load(model, tmp_path / "x", quantize=quantize, **options)
        assert any(step.is_as_stored for step in plan.steps) == is_short
        report = plan.apply()
        plan.close()
        assert {name: id(tensor) for name, tensor in named_tensors(model).items()} == before
        said = report.tensors, report.bytes, report.mapped, report.tied, report.quantized, report.on_meta
        found.append((_facts(model), plan.left, said))
    assert found[0] == found[1]


def test_a_tensor_that_has_become_real_since_is_filled_all_the_same(tmp_path):
    """What a plan says of memory on meta is looked at again when it is carried out."""
    source = build(Tied)
    tt.save(source, tmp_path / "x")
    model = build(Tied, meta=True)
    held = model.mid.bias
    plan = tt.plan_load(model, tmp_path / "x")
    tt.materialize(model.mid)
    plan.apply()
    plan.close()
    assert model.mid.bias is held
    assert torch.equal(held, source.mid.bias)


def test_the_strides_of_a_model_are_kept_where_they_say_nothing(tmp_path):
    """A dimension of size 1 may have any stride; the file has its own idea of it."""
    tt.save({"weight": torch.ones(1, 5)}, tmp_path / "x")
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty_strided((1, 5), (99, 1), device="meta"))
    tt.load(model, tmp_path / "x")
    assert model.weight.stride() == (99, 1)
    assert model.weight.sum() == 5
