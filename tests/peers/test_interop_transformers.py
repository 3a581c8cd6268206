"""transformers: ``from_pretrained`` reads our files, and we read those of ``save_pretrained``, with ties."""

import pytest
import torch

import torchtether as tt
from tests.peers.patterns import TRANSFORMERS, build, outputs_of
from torchtether.ties.names import named_tensors

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # what transformers warns about


def assert_same_model(one, other, name):
    mine, theirs = named_tensors(one), named_tensors(other)
    assert mine.keys() == theirs.keys()
    for key, tensor in mine.items():
        assert tensor.dtype == theirs[key].dtype, key
        assert torch.equal(tensor, theirs[key]), key
    assert [tie.names for tie in tt.find_ties(one)] == [tie.names for tie in tt.find_ties(other)]
    with torch.no_grad():
        for first, second in zip(outputs_of(one, name), outputs_of(other, name), strict=True):
            # not bit for bit: some products round otherwise where memory is aligned otherwise, as in a mapped file
            torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6, equal_nan=True)


HOW = {"file": {}, "shards": {"max_shard_size": 10_000}, "copy": {"aliases": "copy"}}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["gpt2", "t5", "bert_weight_and_bias", "sam_leaf_of_another_name"])
def test_from_pretrained_reads_ours(tmp_path, name, how):
    source = build(name)
    tt.save(source, tmp_path, **HOW[how])
    source.config.save_pretrained(tmp_path)
    model, said = type(source).from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    assert not said["mismatched_keys"]
    assert_same_model(source, model.train(source.training), name)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_every_pattern_goes_there_and_back(tmp_path, name):
    """Ours into ``from_pretrained``, its ``save_pretrained`` into a model on meta, under an optimizer."""
    source = build(name)
    tt.save(source, tmp_path / "ours", max_shard_size=40_000)
    source.config.save_pretrained(tmp_path / "ours")
    theirs = type(source).from_pretrained(tmp_path / "ours", dtype=torch.float32).train(source.training)
    assert_same_model(source, theirs, name)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=40_000)
    model = build(name, meta=True, seed=3)
    optimizer = torch.optim.AdamW(model.parameters())
    report = tt.load(model, tmp_path / "theirs")
    assert report.missing_keys == report.unexpected_keys == ()
    assert not any(tensor.is_meta for tensor in named_tensors(model).values())
    tt.check_optimizer(model, optimizer)
    assert_same_model(source, model, name)


def test_a_file_without_the_head_for_a_model_that_does_not_tie_is_refused(tmp_path):
    """transformers gives such a head random values, and says so in a log."""
    transformers = pytest.importorskip("transformers")
    build("gpt2").save_pretrained(tmp_path)
    config = build("gpt2").config
    config.tie_word_embeddings = False
    with pytest.raises(tt.LoadError, match=r"lm_head\.weight"):
        tt.load(transformers.GPT2LMHeadModel(config), tmp_path)
