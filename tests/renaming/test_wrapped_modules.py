"""Modules in torch's ``checkpoint_wrapper`` load what they save: files do not name the wrapper."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import torchtether as tt
import torchtether.distributed
from tests.loading.models import Counted


def model(*, wrapped=True, on="cpu"):
    with torch.device(on):
        made = nn.Sequential(*(nn.Sequential(Counted(4, 4), nn.LayerNorm(4)) for _ in range(3)))
    made[1][0].weight = made[0][0].weight
    if wrapped:
        made[0], made[1][0] = checkpoint_wrapper(made[0]), checkpoint_wrapper(made[1][0])
    return made


def counted(net):
    return next(module for module in net.modules() if isinstance(module, Counted))


def without_extra(name):
    return None if name.endswith("_extra_state") else name


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("on", ["meta", "cpu"])
@pytest.mark.parametrize(("one", "other"), [(True, True), (True, False), (False, True)])
def test_what_is_saved_is_loaded(tmp_path, one, other, on, quantize):
    saved, loaded = model(wrapped=one), model(wrapped=other, on=on)
    if quantize:
        tt.quantize(saved, quantize)
    counted(saved).calls = 7
    tt.save(saved, tmp_path)
    tt.load(loaded, tmp_path)
    assert not any("_checkpoint_wrapped_module" in name for name in tt.open(tmp_path))
    wanted, found = saved.state_dict(), loaded.state_dict()
    assert wanted.keys() == found.keys()
    assert all(type(found[name]) is type(wanted[name]) for name in wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert len(tt.find_ties(loaded)) == 1
    assert counted(loaded).calls == 7
    report = tt.refit(loaded, tmp_path, rename=without_extra)
    assert report.checksum == tt.refit(loaded, dict(tt.open(tmp_path)).items(), rename=without_extra).checksum


def test_a_rule_of_the_user_comes_first(tmp_path):
    saved, loaded = model(), model()
    tt.save({f"net.{name}": tensor for name, tensor in saved.state_dict().items() if "extra" not in name}, tmp_path)
    tt.load(loaded, tmp_path, rename=[("^net[.]", "")], strict=False)
    assert torch.equal(loaded[0][0].weight, saved[0][0].weight)


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_state_of_an_optimizer_has_the_same_names(tmp_path, format):
    saved = model()
    optimizer = torch.optim.AdamW(saved.parameters())
    saved(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    tt.distributed.save(saved, tmp_path / "x", format=format, optimizer=optimizer)
    for wrapped in (True, False):
        loaded = model(wrapped=wrapped)
        other = torch.optim.AdamW(loaded.parameters())
        tt.distributed.load(loaded, tmp_path / "x", optimizer=other)
        assert len(other.state) == len(list(saved.parameters()))
        torch.testing.assert_close([*other.state.values()], [*optimizer.state.values()], rtol=0, atol=0)
