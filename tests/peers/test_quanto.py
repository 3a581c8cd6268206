"""We load what optimum-quanto freezes and saves to the values that it dequantizes."""

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.formats.folders import opened

pytestmark = [
    pytest.mark.peers,
    pytest.mark.usefixtures("quanto_uncompiled"),
    pytest.mark.filterwarnings("ignore"),
]


def _model(dtype):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(256, 48, dtype=dtype), nn.Linear(48, 33, bias=False, dtype=dtype), nn.Linear(192, 64, dtype=dtype)
    )


@pytest.mark.parametrize("kind", ["qint8", "qint4", "qint2", "qfloat8_e4m3fn", "qfloat8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_loaded_as_quanto_dequantizes(kind, dtype):
    from optimum import quanto

    model = _model(dtype)
    quanto.quantize(model, weights=getattr(quanto, kind))
    quanto.freeze(model)
    qmap = {name: {"weights": kind, "activations": "none"} for name in ("0", "1", "2")}
    empty = _model(dtype).to("meta")
    with opened(model.state_dict(), quanto_qmap=qmap) as checkpoint:
        tt.load(empty, checkpoint.path)
    for ours, theirs in zip(empty, model, strict=True):
        assert isinstance(ours.weight, tt.Weight)
        assert torch.equal(ours.weight.dequantize(), theirs.weight.dequantize())
