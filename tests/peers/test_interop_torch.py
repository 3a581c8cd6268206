"""torch's own checkpoints: the Hugging Face reader and writer of torch.distributed.checkpoint, and ``torch.save``."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

import torchtether as tt
from tests.checkpoint.test_round_trip import assert_same
from tests.loading.models import Fused, Slices, Storage, Tied, Turned, build
from tests.peers.patterns import build as build_pattern
from torchtether.ties.names import named_tensors

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # no process group; deprecations inside torch


@pytest.mark.parametrize("shard", [None, 300])
@pytest.mark.parametrize("kind", [Tied, Turned, Fused, Storage])
def test_its_reader_fills_a_tied_model_from_copies(tmp_path, shard, kind):
    source, model = build(kind), build(kind, seed=4)
    tt.save(source, tmp_path, aliases="copy", max_shard_size=shard)
    dcp.load(model.state_dict(), storage_reader=HuggingFaceStorageReader(str(tmp_path)))
    assert_same(named_tensors(source), named_tensors(model))
    assert tt.find_ties(model) == tt.find_ties(source)


def test_its_reader_misses_aliases_that_are_dropped(tmp_path):
    """Which is what ``aliases="copy"`` is for."""
    tt.save(build(Tied), tmp_path)
    with pytest.raises(dcp.CheckpointException, match=r"head\.weight"):
        dcp.load(build(Tied).state_dict(), storage_reader=HuggingFaceStorageReader(str(tmp_path)))


class Floats(Tied):
    """Consolidation takes every dtype for a float one."""

    def __init__(self):
        super().__init__()
        del self.steps


WRITERS = {
    "one file": {},
    "two files": {"fqn_to_index_mapping": {name: 1 + i % 2 for i, name in enumerate(Tied().state_dict())}},
    "consolidated": {"save_distributed": True, "enable_consolidation": True},
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("meta", [True, False])
def test_what_its_writer_writes_loads(tmp_path, writer, meta):
    """It cannot write a tied model, so somebody leaves the aliases out; the model knows them."""
    source, model = build(Floats), build(Floats, meta=meta, seed=4)
    state = source.state_dict()
    with pytest.raises(dcp.CheckpointException, match="share memory"):
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(tmp_path / "tied")))
    del state["head.weight"]
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(tmp_path / "x"), **WRITERS[writer]))
    optimizer = torch.optim.AdamW(model.parameters())
    report = tt.load(model, tmp_path / "x")
    assert (report.missing_keys, report.unexpected_keys) == ((), ())
    assert_same(named_tensors(source), named_tensors(model))
    assert model.head.weight is model.emb.weight
    tt.check_optimizer(model, optimizer)


@pytest.mark.parametrize("kind", [Tied, Turned, Fused, Slices])
def test_torch_load_of_what_torch_save_makes_of_ours(tmp_path, kind):
    """File to torch to file: what ``tt.open`` hands out keeps its memory shared through ``torch.save`` and back."""
    source, model = build(kind), build(kind, meta=True)
    tt.save(source, tmp_path / "x.safetensors")
    with tt.open(tmp_path / "x.safetensors") as checkpoint:
        torch.save({name: checkpoint[name] for name in checkpoint}, tmp_path / "x.pt")
    tt.load(model, tmp_path / "x.pt")
    assert_same(named_tensors(source), named_tensors(model))
    assert tt.find_ties(model) == tt.find_ties(source)


@pytest.mark.parametrize("name", ["gpt2", "t5", "bert_weight_and_bias", "zamba2_shared_blocks"])
def test_what_torch_save_writes_of_a_real_model_loads_tied(tmp_path, name):
    pytest.importorskip("transformers")
    source, model = build_pattern(name), build_pattern(name, meta=True, seed=4)
    torch.save(source.state_dict(), tmp_path / "pytorch_model.bin")
    report = tt.load(model, tmp_path / "pytorch_model.bin")
    assert (report.missing_keys, report.unexpected_keys, report.on_meta) == ((), (), ())
    assert_same(named_tensors(source), named_tensors(model))
    assert [tie.names for tie in tt.find_ties(model)] == [tie.names for tie in tt.find_ties(source)]
