"""Quantized models as ONNX files by ``torch.onnx.export``, run by onnxruntime."""

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.catalog import SCHEMES

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # theirs, of themselves
]
K_QUANTS = [row.scheme for row in SCHEMES if row.id in ("q4_k", "q6_k")]
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


class Model(nn.Module):
    """A tied embedding and head, layers of other schemes in between, and a convolution, which is an op of ONNX."""

    def __init__(self, schemes, width=512):
        super().__init__()
        self.emb = nn.Embedding(width, width)
        self.mid = nn.ModuleList(nn.Linear(width, width) for _ in schemes)
        self.conv = nn.Conv1d(width, width, 3, padding=1, groups=width)
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        x = self.emb(tokens)
        for layer in self.mid:
            x = torch.relu(layer(x))
        return self.head(self.conv(x.mT).mT)


def test_files_hold_codes_and_give_the_same_numbers(tmp_path):
    torch.manual_seed(0)
    schemes = ["int8", "nf4", *K_QUANTS]
    rules = {f"mid.{i}.weight": scheme for i, scheme in enumerate(schemes)}
    model = tt.quantize(Model(schemes), {"emb.weight": "int4", "conv.weight": "int4", **rules}).eval()
    example, tokens = torch.arange(6).view(2, 3), torch.arange(40).view(4, 10) * 7 % 512
    path = tmp_path / "model.onnx"
    torch.onnx.export(model, (example,), path, dynamo=True, verbose=False, dynamic_shapes=({0: "batch", 1: "length"},))
    dense = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < dense / 3
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {session.get_inputs()[0].name: tokens.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), model(tokens).detach(), rtol=1e-4, atol=1e-4)
