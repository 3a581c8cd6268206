"""Samples that the original packages wrote (tests/golden) decode to the values that those packages decode."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import torchtether as tt

GOLDEN = Path(__file__).parent.parent / "golden"
SAMPLES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.json"))

# One unit in the last place is allowed where no package decodes as it encodes; see the README of each.
ONE_ULP = {"awq_gemv_g64", "modelopt_fp8_tensor"}

# bitsandbytes decodes fp4's second zero to 0 or to -0, by the path that it takes; their hashes are of zeros unsigned.
EITHER_ZERO = {"bnb_fp4_plain_fp32", "bnb_fp4_dq_bf16"}

# Their files do not say which shape a weight has: only the model does.
WITHOUT_SHAPE = {"quanto_qint2", "quanto_qint4_bf16", "quanto_qint4_fp16", "quanto_qint4_gs96"}

# Stored as floats: what is expected is what they are in float32.
PLAIN = {"gguf_bf16"}


def _model(expected):
    """A module with every tensor that the sample decodes to, under its name, on meta."""
    root = nn.Module()
    for name, what in expected.items():
        path, _, leaf = name.rpartition(".")
        module = root
        for part in path.split("."):
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(torch.empty(what["shape"], device="meta")))
    return root


def _file(sample):
    return min((GOLDEN / sample).glob("model.*"))  # the others stand beside it


def _sha256(tensor):
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def check(name, tensor, what, sample):
    values = tensor.detach().to(getattr(torch, what["dtype"]))
    if sample not in PLAIN:
        assert isinstance(tensor, tt.Weight), f"{name} is not a Weight"
        values = values.dequantize()
    assert list(values.shape) == what["shape"]
    if sample in ONE_ULP:
        wanted = load_file(GOLDEN / sample / "expected.safetensors")[name]
        ulp = torch.nextafter(wanted.abs(), torch.full_like(wanted, torch.inf)) - wanted.abs()
        assert bool(((values.float() - wanted.float()).abs() <= ulp.float()).all())
    else:
        values = values + 0.0 if sample in EITHER_ZERO else values
        assert _sha256(values) == what["sha256"], f"{name} of {sample} decodes to other bits"


@pytest.mark.parametrize("sample", SAMPLES)
def test_opened(sample):
    expected = json.loads((GOLDEN / sample / "expected.json").read_text())
    with tt.open(_file(sample)) as checkpoint:
        assert checkpoint.format != "safetensors"
        assert not checkpoint.faults
        for name, what in expected.items():
            if sample in WITHOUT_SHAPE:
                what = {**what, "shape": list(checkpoint[name].shape)}
            check(name, checkpoint[name], what, sample)
            assert checkpoint.spec(name).shape == tuple(what["shape"])


@pytest.mark.parametrize("sample", SAMPLES)
def test_opened_where_new_tensors_are_elsewhere(sample):
    """By default, as after ``torch.set_default_device("cuda")``: what is read is on the CPU, and so is all it meets."""
    expected = json.loads((GOLDEN / sample / "expected.json").read_text())
    with torch.device("meta"), tt.open(_file(sample)) as checkpoint:
        read = {name: checkpoint[name] for name in expected}
    for name, what in expected.items():
        shape = list(read[name].shape) if sample in WITHOUT_SHAPE else what["shape"]
        check(name, read[name], {**what, "shape": shape}, sample)


@pytest.mark.parametrize("sample", SAMPLES)
def test_loaded(sample):
    """Into plain modules, nothing left over but what the sample stores besides (biases, embeddings, a head, norms)."""
    expected = json.loads((GOLDEN / sample / "expected.json").read_text())
    model = _model(expected)
    report = tt.load(model, _file(sample), strict=False)
    assert not report.missing_keys
    besides = ("bias", "lm_head.weight", "norm.weight", "embed_tokens.weight")
    assert all(key.endswith(besides) for key in report.unexpected_keys)
    for name, what in expected.items():
        check(name, model.get_parameter(name), what, sample)
