"""AutoRound: which layout of GPTQ or AWQ its config selects; tests/peers has the package."""

import numpy as np
import pytest
import torch

import torchtether as tt
from tests.formats import files
from tests.formats.linears import drawn, fault, gemm, gptq, opened, values, write
from torchtether.formats import compressed_tensors

SAID = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": False, "data_type": "int"}


def neighbours(columns, size):
    return np.arange(columns) // size


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ({}, 1),
        ({"packing_format": "auto_round:auto_gptq"}, 1),
        ({"packing_format": "auto_round:gptq"}, 1),
        ({"packing_format": "auto"}, 1),
        ({"packing_format": "auto_round"}, 2),
        ({"packing_format": "auto_round:gptqmodel"}, 2),
        ({"packing_format": "auto_round:exllamav2"}, 2),
        ({"format": "auto_round"}, 2),
        ({"format": "auto_round:auto_gptq"}, 1),
        ({"format": "safetensors"}, 1),
        ({"backend": "autoround:exllamav2"}, 2),
        ({"backend": "auto_round:gptq:exllamav2"}, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round", "auto_round"])
def test_gptq_under_another_name(tmp_path, said, version, method):
    drawing = drawn(32, 256, 2)
    folder = write(tmp_path, gptq(*drawing, version=version), {**SAID, "quant_method": method, **said})
    assert torch.equal(opened(folder)[0], values(*drawing, neighbours(256, 128)))
    with tt.open(folder) as checkpoint:
        assert checkpoint.format == "auto-round"


@pytest.mark.parametrize("packing", ["auto_round:auto_awq", "auto_round:awq"])
def test_awq_under_another_name(tmp_path, packing):
    drawing = drawn(32, 256, 2)
    folder = write(tmp_path, gemm(*drawing), {**SAID, "packing_format": packing})
    assert torch.equal(opened(folder)[0], values(*drawing, neighbours(256, 128)))


def test_modules_with_options_of_their_own(tmp_path):
    """By name first; a name is no pattern for others, though it would match them."""
    drawings = {
        "layers.1.fc": (drawn(32, 256, 4, bits=8), 8, 64),
        "layers.1.fc2": (drawn(32, 256, 2, seed=1), 4, 128),
        "layers.2.down": (drawn(32, 256, 8, bits=2, seed=2), 2, 32),
        "layers.3.down": (drawn(32, 256, 1, bits=3, seed=3), 3, 256),
    }
    tensors = {"lm_head.weight": torch.ones(4, 4)}
    for name, (drawing, bits, _) in drawings.items():
        tensors |= gptq(*drawing, bits=bits, name=name)
    extra = {
        r".*\.down.*": {"bits": 2, "group_size": 32},
        "layers.1.fc": {"bits": 8, "group_size": 64},
        "layers.3.down": {"bits": 3, "group_size": -1, "act_bits": 16},
        "lm_head": {"bits": 16},
        "elsewhere[0": {"bits": 8},
    }
    folder = write(tmp_path, tensors, {**SAID, "extra_config": extra})
    for name, (drawing, _, size) in drawings.items():
        assert torch.equal(opened(folder, f"{name}.weight")[0], values(*drawing, neighbours(256, size)))


def test_config_and_tensors_that_disagree(tmp_path):
    extra = {"m": {"bits": 8}}
    text = fault(write(tmp_path, gptq(*drawn(32, 256, 2)), {**SAID, "extra_config": extra}))
    assert "fit 4 bits, and the config says 8" in text


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"packing_format": "auto_round:marlin"}, "marlin"),
        ({"packing_format": "auto_round:fp8_static"}, "fp8_static"),
        ({"packing_format": "mlx"}, "mlx"),
        ({"packing_format": ["auto"]}, "['auto']"),
        ({"rotation_config": {"hadamard": True}}, "rotated"),
        ({"spinquant_config": {"r1": True}}, "rotated"),
        ({"extra_config": ["m"]}, "extra_config is ['m']"),
        ({"extra_config": {"m": None}}, "extra_config['m'] is None"),
        ({"extra_config": {"m": {"bits": "8"}}}, "bits is '8'"),
    ],
    ids=str,
)
def test_refused(tmp_path, said, text):
    with pytest.raises(tt.errors.CheckpointError, match="config.json") as caught:
        tt.open(write(tmp_path, gptq(*drawn(32, 256, 2)), {**SAID, **said}))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_was_only_simulated_is_plain(tmp_path):
    folder = write(tmp_path, {"m.weight": torch.ones(2, 2)}, {**SAID, "packing_format": "auto_round:fake"})
    with tt.open(folder) as checkpoint:
        assert torch.equal(checkpoint["m.weight"], torch.ones(2, 2))


@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_as_compressed_tensors(tmp_path, symmetric):
    weight = tt.Weight.encode(files.random(16, 64), tt.int4(32, symmetric=symmetric, scale_dtype=torch.bfloat16))
    tensors, _ = files.packed(compressed_tensors, {"m.weight": weight})
    said = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "bits": 4, "group_size": 32}
    folder = files.write(tmp_path, tensors, {**said, "sym": symmetric})
    assert torch.equal(files.decoded(folder, "m.weight", torch.float32), weight.dequantize())
