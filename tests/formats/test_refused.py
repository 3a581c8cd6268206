"""Formats that are not read are refused by name, and nothing else is."""

import pytest
import torch

import torchtether as tt
from tests.formats.linears import write
from torchtether.formats import refused

CODES = torch.ones(4, 4, dtype=torch.int16)
FLOATS = torch.ones(4, 4)


def refusal(folder):
    with pytest.raises(tt.errors.CheckpointError) as caught:
        tt.open(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert "Use an unquantized checkpoint" in text
    return text


@pytest.mark.parametrize("method", [*refused.METHODS, "marlin_24", "quip_sharp", "exllamav2"])
def test_known_methods(tmp_path, method):
    text = refusal(write(tmp_path, {"m.codes": CODES}, {"quant_method": method}))
    kind = {"marlin_24": "gptq_marlin_24", "quip_sharp": "quip", "exllamav2": "exl2"}.get(method, method)
    assert refused.METHODS[kind] in text
    assert "m.codes is torch.int16" in text


def test_a_config_of_ours_over_files_of_another_format_is_told_apart(tmp_path):
    folder = write(tmp_path, {"m.weight_packed": CODES.int()}, {"quant_method": "torchtether"})
    with pytest.raises(tt.CheckpointError, match=r"^config\.json: says that torchtether .* after tt\.save replaces"):
        tt.open(folder)


def test_unknown_methods_are_named(tmp_path):
    for dtype in (torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn):
        text = refusal(write(tmp_path, {"m.weight": torch.ones(4, 4).to(dtype)}, {"quant_method": "Novel"}))
        assert "unknown quant_method 'novel'" in text
        assert str(dtype) in text


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (("q_weight", "q_invperm"), "EXL2"),
        (("trellis", "suh"), "EXL3"),
        (("codes", "codebooks"), "AQLM"),
        (("Qidxs", "SU"), "QuIP#"),
        (("indices", "centroids.weight"), "VPTQ"),
        (("qweight", "scaled_zeros"), "llm-awq"),
        (("B", "s"), "Marlin"),
    ],
)
def test_without_a_config_by_their_keys(tmp_path, keys, text):
    tensors = {f"layers.0.{key}": CODES if key == keys[0] else FLOATS for key in keys}
    assert text in refusal(write(tmp_path, tensors))


def test_what_is_no_code_is_not_refused(tmp_path):
    """Floats under any method, and under none; masks and counters of old models; low-rank factors called B and s."""
    tensors = {
        "m.weight": FLOATS,
        "m.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8),
        "m.position_ids": torch.arange(4)[None],
        "m.steps": torch.tensor([3], dtype=torch.int32),
        "m.B": FLOATS,
        "m.s": torch.ones(4),
    }
    for number, method in enumerate(["novel", "aqlm", "eetq", ""]):
        with tt.open(write(tmp_path / str(number), tensors, {"quant_method": method})) as checkpoint:
            assert checkpoint.format == "safetensors"
            assert torch.equal(checkpoint["m.weight"], FLOATS)
    with tt.open(write(tmp_path / "none", {"m.table": CODES})) as checkpoint:
        assert torch.equal(checkpoint["m.table"], CODES)
