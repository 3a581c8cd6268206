"""accelerate: ``load_checkpoint_in_model`` reads our files, and we read those of ``save_model``."""

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.checkpoint.test_round_trip import assert_same
from tests.loading.models import Tied, Turned, build
from torchtether.ties.names import named_tensors

accelerate = pytest.importorskip("accelerate")
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # what accelerate warns about


@pytest.mark.parametrize("aliases", ["drop", "copy"])
@pytest.mark.parametrize("shard", [None, 300])
@pytest.mark.parametrize("meta", [True, False])
def test_load_checkpoint_in_model_reads_ours_and_ties_hold(tmp_path, aliases, shard, meta):
    source, model = build(Tied), build(Tied, meta=meta, seed=4)
    tt.save(source, tmp_path, aliases=aliases, max_shard_size=shard)
    accelerate.load_checkpoint_in_model(model, tmp_path, device_map={"": "cpu"}, strict=aliases == "copy")
    assert_same(named_tensors(source), named_tensors(model))
    assert model.head.weight is model.emb.weight


@pytest.mark.parametrize("shard", ["10GB", 300])
def test_load_checkpoint_in_model_encodes_floats_as_quantize_does(tmp_path, shard):
    source, model = build(Tied), tt.quantize(build(Tied, seed=4), "int8")
    accelerate.Accelerator(cpu=True).save_model(source, tmp_path, max_shard_size=shard)
    optimizer = torch.optim.AdamW(model.parameters())
    accelerate.load_checkpoint_in_model(model, tmp_path)
    expected = tt.quantize(source, "int8")
    for name, weight in expected.named_parameters():
        assert torch.equal(weight.dequantize(), model.get_parameter(name).dequantize()), name
    assert model.head.weight is model.emb.weight
    tt.check_optimizer(model, optimizer)


def test_load_checkpoint_and_dispatch_reads_ours(tmp_path):
    source, model = build(Tied), build(Tied, meta=True)
    tt.save(source, tmp_path / "x.safetensors")
    model = accelerate.load_checkpoint_and_dispatch(model, str(tmp_path / "x.safetensors"), device_map={"": "cpu"})
    tokens = torch.arange(4)[None]
    assert torch.equal(model(tokens), source(tokens))
    assert model.head.weight is model.emb.weight


@pytest.mark.parametrize("kind", [Tied, Turned])
@pytest.mark.parametrize(
    ("shard", "safe"), [("10GB", True), (300, True), ("10GB", False)], ids="file shards bin".split()
)
@pytest.mark.parametrize("meta", [True, False])
def test_what_save_model_writes_loads_tied(tmp_path, kind, shard, safe, meta):
    """It drops a transposed alias without a record; the model knows what that is a view of."""
    source, model = build(kind), build(kind, meta=meta, seed=4)
    accelerate.Accelerator(cpu=True).save_model(source, tmp_path, max_shard_size=shard, safe_serialization=safe)
    path = tmp_path if safe else tmp_path / "pytorch_model.bin"
    optimizer = torch.optim.AdamW(model.parameters())
    report = tt.load(model, path)
    assert (report.missing_keys, report.unexpected_keys) == ((), ())
    assert_same(named_tensors(source), named_tensors(model))
    assert tt.find_ties(model) == tt.find_ties(source)
    tt.check_optimizer(model, optimizer)


class Halves(nn.Module):
    """Two slices of one memory that share no element."""

    def __init__(self):
        super().__init__()
        whole = torch.randn(6, 4)
        self.a, self.b = nn.Parameter(whole[:3]), nn.Parameter(whole[3:])


def test_a_half_that_save_model_lost_is_missed(tmp_path):
    """It takes disjoint slices for one tensor and writes the first only; we write both, and miss what is not there."""
    source = build(Halves)
    accelerate.Accelerator(cpu=True).save_model(source, tmp_path / "theirs")
    with tt.open(tmp_path / "theirs") as checkpoint:
        assert list(checkpoint) == ["a"]
    with pytest.raises(tt.LoadError, match="b"):
        tt.load(build(Halves, seed=4), tmp_path / "theirs")
    tt.save(source, tmp_path / "ours")
    model = build(Halves, meta=True)
    accelerate.load_checkpoint_in_model(model, tmp_path / "ours", device_map={"": "cpu"}, strict=True)
    assert_same(named_tensors(source), named_tensors(model))
