"""Published formats on several ranks: each sample of tests/golden gives every rank its rows, or one clear fault."""

import json

import pytest
from torch.distributed.fsdp import fully_shard

import torchtether as tt
from tests.distributed.nets import same_rows
from tests.distributed.spawn import spawn
from tests.formats.test_golden import GOLDEN, SAMPLES, _file, _model

IN_HALVES = ("quanto_qint2", "quanto_qint4", "hqq", "sinq")
"""How the samples begin of which a word has codes of rows far apart, so that every rank reads all."""

IN_TILES = "comfy"
"""How those begin whose scales lie in tiles of 128 rows, which every rank reads; their codes are read by rows."""


def loads():
    """Return, for each sample, what this rank read and what one process read, or the fault."""
    found = {}
    for sample in SAMPLES:
        expected = json.loads((GOLDEN / sample / "expected.json").read_text())
        whole, model = _model(expected), _model(expected)
        report = tt.load(whole, _file(sample), strict=False)
        fully_shard(model)
        before = dict(model.named_parameters())
        try:
            mine = tt.distributed.load(model, _file(sample), strict=False)
        except tt.LoadError as error:
            assert all(held.is_meta for held in model.parameters())
            found[sample] = str(error)
            continue
        for name, held in model.named_parameters():
            assert held is before[name]
            assert same_rows(held, whole.get_parameter(name)), (sample, name)
        found[sample] = (mine.bytes, report.bytes)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_every_sample_gives_each_rank_its_rows_or_a_fault(world):
    ranks = spawn(loads, world, timeout=300)
    faults = {sample for sample, what in ranks[0].items() if isinstance(what, str)}
    for found in ranks:
        assert {sample for sample, what in found.items() if isinstance(what, str)} == faults
        for sample in faults:
            assert "cut a block" in found[sample] or "failed" in found[sample] or "contiguous" in found[sample]
    assert len(faults) < len(SAMPLES) / 2
    if world == 2:
        for sample in set(SAMPLES) - faults:
            if not sample.startswith(IN_HALVES):
                most, whole = max(found[sample][0] for found in ranks), ranks[0][sample][1]
                assert most < (0.75 if sample.startswith(IN_TILES) else 0.56) * whole, (sample, most, whole)
