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
    with pytest.raises(
        tt.LoadError, match=r"emb.weight: the checkpoint has shape \(16, 64\), the model has \(16, 32\)"
    ):
        Mixed.from_pretrained(tmp_path, size=32)
    tensors = {name: tensor for name, tensor in tt.quantize(Mixed(), "int8").state_dict().items() if "norm" not in name}
    tt.save(tensors | {"other": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(tt.LoadError, match=r"3 faults: norm.weight: the checkpoint does not have it.* other: "):
        Mixed.from_pretrained(tmp_path, strict=True)
    assert isinstance(Mixed.from_pretrained(tmp_path).lin.weight, tt.Weight)


class Square(torch.nn.Module, hub.PyTorchModelHubMixin):
    """A square weight, its transpose, and a buffer."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.one, self.other = (torch.nn.Linear(64, 64, bias=False, dtype=dtype) for _ in range(2))
        self.one.weight.requires_grad_(False)
        self.other.weight = torch.nn.Parameter(self.one.weight.detach().t())
        self.register_buffer("table", torch.rand(64, 64, dtype=dtype))


def test_views_buffers_and_frozen_parameters_stay_what_they_are(tmp_path):
    importlib.import_module("torchtether.integrations.huggingface_hub")
    model = tt.quantize(Square(), {"*": "int8"})
    model.table = tt.Weight.encode(model.table, tt.int8())
    model.save_pretrained(tmp_path)
    read = Square.from_pretrained(tmp_path, strict=True)
    assert tt.find_ties(read) == tt.find_ties(model)
    assert [name for name, _ in read.named_buffers()] == ["table"]
    assert [one.requires_grad for one in read.parameters()] == [False, True]
    for name, tensor in model.state_dict().items():
        assert torch.equal(read.state_dict()[name].dequantize(), tensor.dequantize()), name


@pytest.mark.parametrize("kept", ["emb.weight", "head.weight"])
def test_a_model_with_one_name_of_a_tie_takes_its_values(tmp_path, kept):
    class Half(torch.nn.Module, hub.PyTorchModelHubMixin):
        def __init__(self):
            super().__init__()
            self.add_module(kept.split(".")[0], torch.nn.Linear(64, 16, bias=False, dtype=torch.bfloat16))

    importlib.import_module("torchtether.integrations.huggingface_hub")
    model = tt.quantize(Mixed(), "int8")
    model.save_pretrained(tmp_path)
    found = Half.from_pretrained(tmp_path).state_dict()[kept]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.dequantize(), model.head.weight.to(torch.bfloat16).dequantize())


@pytest.mark.parametrize("strict", [True, False])
def test_a_file_with_one_name_of_a_tie_fills_both(tmp_path, strict):
    importlib.import_module("torchtether.integrations.huggingface_hub")
    model = tt.quantize(Mixed(), "int8")
    model.save_pretrained(tmp_path)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    tt.save(tensors, tmp_path / "model.safetensors")
    read = Mixed.from_pretrained(tmp_path, strict=strict)
    assert read.head.weight is read.emb.weight
    assert torch.equal(read.head.weight.dequantize(), model.head.weight.dequantize())


class Packed(torch.nn.Module, hub.PyTorchModelHubMixin):
    """A layer that unpacks its weight itself, with the names of GPTQ."""

    def __init__(self, **settings):
        super().__init__()
        self.lin = torch.nn.Module()
        for name, shape, dtype in [("qweight", (8, 64), torch.int32), ("qzeros", (1, 8), torch.int32),
                                   ("scales", (1, 64), torch.float16), ("g_idx", (64,), torch.int32)]:  # fmt: skip
            self.lin.register_buffer(name, torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("beside", ["config.json", "quantize_config.json"])
def test_files_whose_names_the_model_has_are_read_as_ever(tmp_path, beside):
    """Also those of other formats, and those beside which something cannot be read."""
    importlib.import_module("torchtether.integrations.huggingface_hub")
    model = Packed(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False})
    model.lin.qweight += 7
    model.lin.scales += 1
    model.save_pretrained(tmp_path)
    if beside != "config.json":
        (tmp_path / beside).write_text("{")
    read = Packed.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, read.state_dict()[name]) for name, tensor in model.state_dict().items())


@torch.no_grad()
def test_a_model_that_is_built_on_meta_gets_its_values(tmp_path):
    importlib.import_module("torchtether.integrations.huggingface_hub")
    model = tt.quantize(Mixed(), "int8").eval()
    model.save_pretrained(tmp_path)
    with tt.on_meta():
        read = Mixed.from_pretrained(tmp_path)
    assert read.head.weight is read.emb.weight
    assert torch.equal(read(IDS), model(IDS))


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
