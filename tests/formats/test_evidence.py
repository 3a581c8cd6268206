"""Formats are tried only on evidence: none on a plain checkpoint, and every one that would recognise a checkpoint."""

import random
from types import SimpleNamespace

import pytest
import torch

from tests.formats.conftest import overlooked
from torchtether.files import Record
from torchtether.files.header import Stored
from torchtether.formats import FORMATS, Contents
from torchtether.formats.entry import Evidence, may_recognise

METHODS = """
compressed-tensors compressed_tensors modelopt auto-round Intel/auto-round auto_round autoround intel/autoround GPTQ
awq bitsandbytes quanto quark sinq hqq mxfp4 FP8 fbgemm_fp8 torchao eetq
""".split()
LEAVES = """
weight weight_packed weight_scale weight_scale_inv weight_scale_2 qweight qzeros scales biases g_idx SCB W_q
weight.absmax weight.quant_state.bitsandbytes__nf4 weight._data weight._data._data weight._scale weight._shift
gate_blocks gate_scales bias comfy_quant scale_weight scaled_fp8
""".split()
BESIDE = ["quantize_config.json", "quant_config.json", "hf_quant_config.json", "quanto_qmap.json"]
CONFIGS = [
    {"quantization": {"group_size": 64, "bits": 4}},
    {"quantization": 3},
    {"compression_config": {"format": "dense"}},
    {"_quanto_qmap": {}},
    {"text_config": {"quantization_config": {"quant_method": "gptq", "bits": 4}}},
    {"quantization_config": {"bits": 4, "group_size": 32}},
]
SIDES = [{}, {"quantization": {}}, {"w_bit": 4}, {"is_marlin_format": True}, {"quant_method": "awq"}, {"bits": 4}]
METADATA = [{"tensor_names": "[]"}, {"_quantization_metadata": '{"layers": {"m": {"format": "nvfp4"}}}'}]
DTYPES = [torch.float32, torch.uint8, torch.int8, torch.int32, torch.uint32, torch.float8_e4m3fn, torch.bfloat16]
SHAPES = [(8, 8), (64, 8), (8,), (2, 8, 4, 16), ()]


def _contents(draw):
    tensors = {
        draw.choice(["", "m.", "layers.0.q_proj."]) + leaf: Stored(draw.choice(DTYPES), draw.choice(SHAPES), 0)
        for leaf in draw.sample(LEAVES, draw.randint(1, 4))
    }
    beside = {file: draw.choice(SIDES) for file in draw.sample(BESIDE, draw.choice([0, 0, 1]))}
    config = dict(draw.choice(CONFIGS)) if draw.random() < 0.4 else {}
    if draw.random() < 0.4:
        config["quantization_config"] = {"quant_method": draw.choice(METHODS)}
    metadata = draw.choice(METADATA) if draw.random() < 0.2 else {}
    return Contents(tensors, metadata, Record(), beside | {"config.json": config}, lambda key: torch.zeros(1))


def test_no_format_is_overlooked():
    draw, passed = random.Random(0), 0
    for _ in range(3000):
        contents = _contents(draw)
        assert overlooked(contents) == [], contents
        passed += sum(not may_recognise(format, contents) for format in FORMATS)
    assert passed > 3000 * len(FORMATS) / 2  # the others are asked, and most of them in vain


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_a_plain_checkpoint_is_no_evidence(format):
    tensors = {"emb.weight": Stored(torch.float32, (8, 8), 0), "norm.bias": Stored(torch.bfloat16, (8,), 0)}
    config = {"model_type": "llama", "dtype": "bfloat16"}
    plain = Contents(tensors, {"format": "pt"}, Record(), {"config.json": config}, lambda key: torch.zeros(1))
    assert isinstance(format.evidence, Evidence)
    assert not may_recognise(format, plain)


def test_a_format_that_names_no_evidence_is_always_asked():
    plain = Contents({}, {}, Record(), {}, lambda key: torch.zeros(1))
    of_its_own = [SimpleNamespace(), SimpleNamespace(evidence="what it likes")]
    assert all(may_recognise(format, plain) for format in of_its_own)
    assert not may_recognise(SimpleNamespace(evidence=Evidence(methods=("acme",))), plain)
