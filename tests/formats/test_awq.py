"""AWQ, against arithmetic written out with numpy; tests/peers has a package, tests/golden what others wrote."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import torchtether as tt
from tests.formats.linears import drawn, fault, gemm, gemv, gptq, opened, values, write
from torchtether.formats import awq
from torchtether.formats import gptq as gptq_format

SAID = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def neighbours(columns, size):
    return np.arange(columns) // size


@given(
    words=st.integers(1, 9),
    columns=st.integers(1, 150),
    size=st.sampled_from((8, 20, 32, 64, -1)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
)
def test_gemm_of_any_shape(words, columns, size, dtype, seed, tmp_path_factory):
    whole = columns if size == -1 else size
    drawing = drawn(8 * words, columns, -(-columns // whole), seed=seed, dtype=dtype)
    folder = write(tmp_path_factory.mktemp("gemm"), gemm(*drawing), {**SAID, "group_size": size})
    found, spec = opened(folder, dtype=torch.float32)
    assert torch.equal(found, values(*drawing, neighbours(columns, whole), torch.float32))
    assert spec.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float16)


@given(
    rows=st.integers(1, 70),
    words=st.integers(1, 99),
    size=st.sampled_from((16, 32, 64, 128, -1)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
)
def test_gemv_of_any_shape(rows, words, size, dtype, seed, tmp_path_factory):
    whole = 8 * words if size == -1 else size
    drawing = drawn(rows, 8 * words, -(-8 * words // whole), seed=seed, dtype=dtype)
    config = {**SAID, "group_size": size, "version": "GEMV"}
    folder = write(tmp_path_factory.mktemp("gemv"), gemv(*drawing, group_size=whole), config)
    found, _ = opened(folder, dtype=torch.float32)
    assert torch.equal(found, values(*drawing, neighbours(8 * words, whole), torch.float32))


def test_many_outputs_are_reordered_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(awq, "CHUNK", 1000)
    drawing = drawn(264, 256, 2)
    assert torch.equal(opened(write(tmp_path, gemm(*drawing), SAID))[0], values(*drawing, neighbours(256, 128)))


@pytest.mark.parametrize("version", [None, "", "GEMM", "exllama", "ipex"])
def test_versions_that_are_stored_as_gemm(tmp_path, version):
    drawing = drawn(32, 256, 2)
    folder = write(tmp_path, gemm(*drawing), {**SAID, "version": version})
    assert torch.equal(opened(folder)[0], values(*drawing, neighbours(256, 128)))


def test_without_zero_points_they_are_8(tmp_path):
    codes, _, scales = drawn(32, 256, 2)
    folder = write(tmp_path, gemm(codes, None, scales), {**SAID, "zero_point": False})
    found, spec = opened(folder)
    assert torch.equal(found, values(codes, np.full((32, 2), 8), scales, neighbours(256, 128)))
    assert spec.scheme.symmetric


def test_zero_points_that_the_config_denies(tmp_path):
    codes, zeros, scales = drawn(32, 256, 2)
    said = {**SAID, "zero_point": False}
    folder = write(tmp_path / "other", gemm(codes, zeros, scales), said)
    with pytest.raises(tt.errors.CheckpointError, match="the config says zero_point: false"):
        opened(folder)
    zeros[:] = 8
    found, _ = opened(write(tmp_path / "same", gemm(codes, zeros, scales), said))
    assert torch.equal(found, values(codes, zeros, scales, neighbours(256, 128)))


# -- where the config is, and without one -------------------------------------------------------------------------


def test_config_of_old_awq_beside_the_file(tmp_path):
    drawing = drawn(32, 240, 3)
    old = {"zero_point": True, "q_group_size": 80, "w_bit": 4, "version": "GEMM"}
    folder = write(tmp_path / "old", gemm(*drawing), quant_config=old)
    assert torch.equal(opened(folder)[0], values(*drawing, neighbours(240, 80)))
    newer = {"quant_method": "awq", "group_size": 80, "bits": 4, "checkpoint_format": "gemm"}
    folder = write(tmp_path / "gptqmodel", gemm(*drawing), quantize_config=newer)
    assert torch.equal(opened(folder)[0], values(*drawing, neighbours(240, 80)))


def test_without_a_config_as_far_as_the_tensors_decide(tmp_path):
    drawing = drawn(32, 256, 4)
    with tt.open(write(tmp_path, gemm(*drawing))) as checkpoint:
        assert checkpoint.format == "awq"
    assert torch.equal(opened(tmp_path)[0], values(*drawing, neighbours(256, 64)))
    assert "3 groups over 288 columns" in fault(write(tmp_path / "other", gemm(*drawn(32, 288, 3))))


def test_loads_into_modules_and_keeps_biases(tmp_path):
    drawing = drawn(64, 256, 2)
    tensors = {**gemm(*drawing, name="0"), "0.bias": torch.arange(64.0)}
    model = torch.nn.Sequential(torch.nn.Linear(256, 64))
    report = tt.load(model, write(tmp_path, tensors, {**SAID, "modules_to_not_convert": ["0"]}))
    assert not report.missing_keys
    assert not report.unexpected_keys
    assert torch.equal(model[0].weight.detach().half().dequantize(), values(*drawing, neighbours(256, 128)))
    assert torch.equal(model[0].bias, tensors["0.bias"])


# -- what is wrong ------------------------------------------------------------------------------------------------


def spoilt(made=gemm, **changes):
    """The tensors of a good module, with some changed (``None``: left out)."""
    tensors = made(*drawn(32, 256, 2), **({"group_size": 128} if made is gemv else {}))
    for role, change in changes.items():
        if change is None:
            del tensors[f"m.{role}"]
        else:
            tensors[f"m.{role}"] = change(tensors.get(f"m.{role}"))
    return tensors


FAULTS = {
    "no qweight": (spoilt(qweight=None), {}, "but no qweight"),
    "no scales": (spoilt(scales=None), {}, "but no scales"),
    "no qzeros": (spoilt(qzeros=None), {}, "no config says zero_point: false"),
    "16-bit words": (spoilt(qweight=lambda t: t.short()), {}, "torch.int16, not torch.int32"),
    "scales of other outputs": (spoilt(scales=lambda t: t[:, 1:]), {}, "scales has shape (2, 31)"),
    "too few zero points": (spoilt(qzeros=lambda t: t[:1]), {}, "qzeros has shape (1, 4)"),
    "other bits": (spoilt(), {"bits": 3}, "the config says 3 bits"),
    "other groups": (spoilt(), {"group_size": 64}, "2 groups, but group_size 64 over 256 columns gives 4"),
    "gemm called gemv": (spoilt(), {"version": "gemv"}, "of version gemv"),
    "gemv called gemm": (spoilt(gemv), {}, "of version gemm"),
    "gemv without a size": (spoilt(gemv), {"version": "gemv", "group_size": None}, "no config has a group_size"),
    "gemv with other padding": (spoilt(gemv), {"version": "gemv", "group_size": 64}, "needs (32, 16)"),
    "a weight besides": (spoilt(weight=lambda t: torch.ones(32, 256)), {}, "stored twice, as m.weight"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faults(tmp_path, case):
    tensors, said, text = FAULTS[case]
    assert text in fault(write(tmp_path, tensors, {**SAID, **said}))


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"version": "gemv_fast"}, "16-bit words"),
        ({"version": "llm-awq"}, "16-bit words"),
        ({"version": "marlin"}, "Marlin"),
        ({"version": 7}, "'7'"),
        ({"zero_point": "no"}, "'no'"),
        ({"bits": None, "w_bit": [4]}, "[4]"),
        ({"group_size": -2}, "-2"),
    ],
    ids=str,
)
def test_refused(tmp_path, said, text):
    with pytest.raises(tt.errors.CheckpointError, match="config.json") as caught:
        tt.open(write(tmp_path, spoilt(), {**SAID, **said}))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


class Largest(TorchDispatchMode):
    """Remembers the largest storage, in bytes, that an op made or read."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.nbytes = max(self.nbytes, out.untyped_storage().nbytes() if isinstance(out, torch.Tensor) else 0)
        return out


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_scratch_is_no_larger_than_what_is_stored(tmp_path, method):
    """No tensor of one byte or more per code is made, of which there are two to a byte."""
    codes, zeros, scales = drawn(4096, 2048, 16)
    tensors = gemm(codes, zeros, scales) if method == "awq" else gptq(codes, zeros, scales)
    with tt.open(write(tmp_path, tensors, {**SAID, "quant_method": method})) as checkpoint:
        entry = checkpoint.entries["m.weight"]
    given = {role: tensors[key] for role, key in entry.keys.items()}
    with Largest() as largest:
        parts = {"awq": awq, "gptq": gptq_format}[method].unpack(entry, given)
    assert largest.nbytes <= 4096 * 2048 // 2
    assert parts["qdata"].nbytes == 4096 * 2048 // 2
