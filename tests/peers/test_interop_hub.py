"""huggingface_hub: ``load_torch_model`` reads our files, and we read those of ``save_torch_model``."""

import pytest
import torch

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
