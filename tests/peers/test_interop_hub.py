"""huggingface_hub: ``load_torch_model`` reads our files, and we read those of ``save_torch_model``."""

import importlib
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open

import torchtether as tt
from tests.checkpoint.test_round_trip import assert_same
from tests.loading.models import Tied, Turned, build
from torchtether.ties.names import named_tensors

hub = pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.peers


@pytest.mark.parametrize("aliases", ["drop", "copy"])
@pytest.mark.parametrize("shard", [None, 300])
@pytest.mark.parametrize("kind", [Tied, Turned])
def test_load_torch_model_reads_ours_and_ties_hold(tmp_path, aliases, shard, kind):
    """Strictly, if every key is there; its own files do not load strictly either."""
    source, model = build(kind), build(kind, seed=4)
    tt.save(source, tmp_path, aliases=aliases, max_shard_size=shard)
    result = hub.load_torch_model(model, tmp_path, strict=aliases == "copy")
    expected = {alias for tie in tt.find_ties(source) for alias in tie.aliases} if aliases == "drop" else set()
    assert set(result.missing_keys) == expected
    assert not result.unexpected_keys
    assert_same(named_tensors(source), named_tensors(model))
    assert tt.find_ties(model) == tt.find_ties(source)


@pytest.mark.filterwarnings("ignore:TypedStorage")  # safetensors asks for it where a storage has no address
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_save_of_weights_is_refused_with_the_call_that_writes_them(tmp_path, is_tied):
    model = tt.quantize(build(Tied), "int8")
    if not is_tied:
        tt.untie(model, "head.weight")
    with pytest.raises(RuntimeError, match=r"tt\.save") as caught:
        hub.save_torch_model(model, tmp_path)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


class Mixed(torch.nn.Module, hub.PyTorchModelHubMixin):
    """A model of its own class with a tie, a buffer and a norm, as people publish them."""

    def __init__(self, size=64, is_tied=True):
        super().__init__()
        self.emb, self.lin = torch.nn.Embedding(16, size), torch.nn.Linear(size, size)
        self.norm, self.head = torch.nn.LayerNorm(size), torch.nn.Linear(size, 16, bias=False)
        self.register_buffer("shift", torch.rand(size))
        if is_tied:
            self.head.weight = self.emb.weight

    def forward(self, ids):
        return self.head(self.norm(self.lin(self.emb(ids))) + self.shift)


IDS = torch.arange(5)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_tied", [True, False])
@torch.no_grad()
def test_a_quantized_model_of_the_mixin_comes_back_from_its_folder(tmp_path, is_tied, dtype, strict):
    importlib.import_module("torchtether.integrations.huggingface_hub")
    model = tt.quantize(Mixed(is_tied=is_tied), {"*.weight": "int8", "norm.*": None}).to(dtype).eval()
    model.save_pretrained(tmp_path)
    read = Mixed.from_pretrained(tmp_path, strict=strict)
    assert not read.training
    assert (read.head.weight is read.emb.weight) == is_tied
    for name, tensor in model.state_dict().items():
        found = read.state_dict()[name]
        assert type(found) is type(tensor)
        assert found.dtype == torch.float32  # of the model, as stock
        assert torch.equal(found.dequantize(), tensor.float().dequantize())
    assert torch.equal(read(IDS), model.float()(IDS))
    with tt.on_meta():
        other = Mixed(is_tied=is_tied)
    tt.load(other, tmp_path)
    assert torch.equal(other.float()(IDS), read(IDS))


def test_quantizing_prepares_the_mixin_in_a_new_process(tmp_path):
    code = f"""
import torch, torchtether as tt
from tests.peers.test_interop_hub import IDS, Mixed
model = tt.quantize(Mixed(), "int8").eval()
model.save_pretrained({str(tmp_path)!r})
assert torch.equal(Mixed.from_pretrained({str(tmp_path)!r})(IDS), model(IDS))
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@torch.no_grad()
def test_plain_models_of_the_mixin_are_stored_as_ever(tmp_path):
    importlib.import_module("torchtether.integrations.huggingface_hub")
    model = Mixed().eval()
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "torchtether" not in file.metadata()
    assert torch.equal(Mixed.from_pretrained(tmp_path)(IDS), model(IDS))


def test_a_file_that_does_not_fit_the_model_is_refused(tmp_path):
    importlib.import_module("torchtether.integrations.huggingface_hub")
    tt.quantize(Mixed(), "int8").save_pretrained(tmp_path)
    with pytest.raises(tt.CheckpointError, match=r"emb.weight: has the shape \(16, 64\) in the file, and \(16, 32\)"):
        Mixed.from_pretrained(tmp_path, size=32)
    tensors = {name: tensor for name, tensor in tt.quantize(Mixed(), "int8").state_dict().items() if "norm" not in name}
    tt.save(tensors | {"other": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(
        tt.CheckpointError, match="norm.bias: is only in the model, as 2 other names are in one of both"
    ):
        Mixed.from_pretrained(tmp_path, strict=True)
    assert isinstance(Mixed.from_pretrained(tmp_path).lin.weight, tt.Weight)


@pytest.mark.parametrize("shard", ["5GB", 300])
@pytest.mark.parametrize("meta", [True, False])
def test_what_save_torch_model_writes_loads_tied(tmp_path, shard, meta):
    source, model = build(Tied), build(Tied, meta=meta, seed=4)
    hub.save_torch_model(source, tmp_path, max_shard_size=shard)
    optimizer = torch.optim.AdamW(model.parameters())
    report = tt.load(model, tmp_path)
    assert (report.missing_keys, report.unexpected_keys) == ((), ())
    assert_same(named_tensors(source), named_tensors(model))
    assert model.head.weight is model.emb.weight
    tt.check_optimizer(model, optimizer)
    with tt.open(tmp_path) as checkpoint:  # its flat record is found, in the file or in the index
        assert checkpoint["head.weight"].data_ptr() == checkpoint["emb.weight"].data_ptr()
        assert "head.weight" not in list(checkpoint)
