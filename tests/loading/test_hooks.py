"""A load says which code of the model it does not call."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import torchtether as tt


def migrate(module, state, prefix, *rest):
    state[prefix + "weight"] = state[prefix + "weight"].t()


class Hooked(nn.Linear):
    def __init__(self):
        super().__init__(4, 4, bias=False)
        self.register_load_state_dict_pre_hook(migrate)


class After(nn.Linear):
    def __init__(self):
        super().__init__(4, 4, bias=False)
        self.register_load_state_dict_post_hook(lambda module, keys: None)


class Own(nn.Linear):
    def __init__(self):
        super().__init__(4, 4, bias=False)

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)


@pytest.mark.parametrize("kind", [Hooked, After, Own])
@pytest.mark.parametrize("is_meta", [False, True], ids=["real", "meta"])
def test_hooks_are_named(kind, is_meta, tmp_path):
    source = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tt.save(source, tmp_path)
    with torch.device("meta" if is_meta else "cpu"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), kind())
    with pytest.warns(UserWarning, match=r"^1 \(.*: load_state_dict calls this, tt\.load does not\.") as found:
        tt.load(model, tmp_path)
    assert len(found) == 1
    assert found[0].filename == __file__
    assert torch.equal(model[1].weight, source[1].weight)


def test_the_way_that_the_warning_names_calls_them(tmp_path):
    source = nn.Linear(4, 4, bias=False)
    tt.save(source, tmp_path)
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = Hooked()
        with tt.swapping(model):
            model.load_state_dict(dict(tt.open(tmp_path)), assign=True)
        assert torch.equal(model.weight, source.weight.t())


def test_torch_s_own_hooks_are_not(tmp_path):
    """What they are for, a load does: renaming, and the version of a buffer."""

    def make():
        norm, weight = nn.BatchNorm1d(4), parametrizations.weight_norm(nn.Linear(4, 4))
        old = torch.nn.utils.spectral_norm(nn.Linear(4, 4))
        return nn.Sequential(norm, weight, old, nn.MultiheadAttention(4, 2), tt.quantize(nn.Linear(4, 4), "int8"))

    tt.save(make(), tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tt.load(make(), tmp_path)
